"""Between [channel, N] in memory and N vectors over channels, for the N of weights and windows.

W channels are N whole vectors of memory, so both ways are shuffles of N vectors into N vectors; a
partial one of n channels reads and writes n * N elements. No element is converted.
"""

from std.utils import IndexList

from .vector import load, load_raw, P, store_raw, W

comptime Lanes[dtype: DType, N: Int] = Array[SIMD[dtype, W], N]


@always_inline
def turn_in[dtype: DType, //, N: Int, partial: Bool](p: P[dtype], n: Int) -> Lanes[dtype, N]:
    """N vectors over the n channels at p; with partial, lanes at and past n are zero."""
    var lines = Lanes[dtype, N](fill=0)
    comptime for i in range(N):
        lines[i] = load_raw[partial=partial](p + i * W, n * N - i * W)
    return turned[N, inward=True](lines)


@always_inline
def turn_out[dtype: DType, //, N: Int, partial: Bool](p: P[dtype], v: Lanes[dtype, N], n: Int):
    """Writes N vectors over channels as [n, N] to p."""
    var lines = turned[N, inward=False](v)
    comptime for i in range(N):
        store_raw[partial=partial](p + i * W, lines[i], n * N - i * W)


@always_inline
def shift_in[
    source: DType, state: DType, HISTORY: Int, //, partial: Bool
](mut window: Lanes[state, HISTORY], inputs: P[source], stride: Int, count: Int, n: Int):
    """Moves a window on by so many tokens of n channels: old entries out, inputs in as the last."""
    for t in range(max(count - HISTORY, 0), count):
        comptime for j in range(HISTORY - 1):
            window[j] = window[j + 1]
        window[HISTORY - 1] = load[partial=partial](inputs + t * stride, n).cast[state]()


@always_inline
def turned[dtype: DType, //, N: Int, inward: Bool](v: Lanes[dtype, N]) -> Lanes[dtype, N]:
    """Inward, lane c of vector j is element c * N + j of the line of vectors v; outward, back."""
    var result = Lanes[dtype, N](fill=0)
    comptime for j in range(N):
        var r = v[0]
        comptime for i in range(1, N):
            comptime mask = lanes_from[N, inward](j, i)
            r = r.shuffle[mask](v[i])
        result[j] = r
    return result^


def lanes_from[N: Int, inward: Bool](j: Int, i: Int) -> IndexList[W]:
    """The step that takes the lanes of result j that lie in v[i]; the first also those in v[0]."""
    var mask = IndexList[W]()
    for lane in range(W):
        var source: Int
        var at: Int
        if inward:
            source, at = divmod(lane * N + j, W)
        else:
            at, source = divmod(j * W + lane, N)
        if source == i:
            mask[lane] = W + at
        else:
            mask[lane] = at if i == 1 and source == 0 else lane
    return mask
