"""The causal conv1d over ragged rows on the CPU.

    out[t, c] = sum over j of w[c, j] * x[t - (width - 1) + j, c],  j ascending, in float32

where x before a row is the row's window in conv_state, oldest first. Channels are independent and every
sum has one order, so the bits depend on no vector width, split or other row.

A unit is a block of channels of a segment of one row. Blocks are the outer order: weights lie
[channel, width] and windows [channel, width - 1], so both are turned once per unit into vectors over
channels, and the turned weights serve every row of a chunk. Four tokens are worked on at once, so that a
weight is loaded once for four products.
"""

from std.math import fma
from std.memory import alloc

from ..checks import PADDING
from .schedule import chunk_count, run_chunks
from .vector import F32, fill_zero, load, P, store, Vector, W

# Channels of a block: 2 KB of a token, and seven tokens and the weights of it stay in L1.
comptime BLOCK = 512
# Tokens of a segment: long rows are cut so that every worker has something to do.
comptime SEGMENT = 256
comptime TOKENS_AT_ONCE = 4


def turn[dtype: DType](source: P[dtype], width: Int, channels: Int, to: P[F32]):
    """[channels, width] to float32 [width, BLOCK]."""
    for c in range(channels):
        for j in range(width):
            to[unsafe_offset=j * BLOCK + c] = Float32(source[unsafe_offset=c * width + j])


struct Taps[work: DType](TrivialRegisterPassable):
    """Where the inputs of one row lie on one block of channels: its turned window, then the row."""

    var window: P[F32]  # [history, BLOCK]
    var row: P[Self.work]  # the row's first token, at the block's first channel
    var stride: Int
    var history: Int  # conv width - 1

    @always_inline
    def __init__(out self, window: P[F32], row: P[Self.work], stride: Int, history: Int):
        self.window = window
        self.row = row
        self.stride = stride
        self.history = history

    @always_inline
    def at[partial: Bool](self, t: Int, c: Int, n: Int) -> Vector:
        """Token t of the row, or of its window for t < 0."""
        if t < 0:
            return load[partial=partial](self.window + (self.history + t) * BLOCK + c, n)
        return load[partial=partial](self.row + t * self.stride + c, n)


@always_inline
def conv_tokens[
    work: DType, TOKENS: Int, partial: Bool, inside: Bool
](taps: Taps[work], weights: P[F32], out_: P[work], t: Int, c: Int, n: Int):
    """Outputs of tokens t .. t + TOKENS - 1 on channels [c, c + n); inside: no tap is before the row.
    """
    var sums = Array[Vector, TOKENS](fill=Vector(0))
    var first = t - taps.history
    var xp = taps.row + first * taps.stride + c
    for j in range(taps.history + 1):
        var w = load[partial=partial](weights + j * BLOCK + c, n)
        comptime for i in range(TOKENS):
            var x: Vector
            comptime if inside:
                x = load[partial=partial](xp + i * taps.stride, n)
            else:
                x = taps.at[partial](first + i + j, c, n)
            sums[i] = fma(w, x, sums[i])
        xp += taps.stride
    comptime for i in range(TOKENS):
        store[partial=partial](out_ + (t + i) * taps.stride + c, sums[i], n)


def conv_segment[
    work: DType
](taps: Taps[work], weights: P[F32], out_: P[work], begin: Int, end: Int, channels: Int):
    """Outputs of tokens [begin, end) of a row on one block of channels."""

    @always_inline
    def tokens[TOKENS: Int, inside: Bool](t: Int) {imm}:
        var c = 0
        while c + W <= channels:
            conv_tokens[TOKENS=TOKENS, partial=False, inside=inside](taps, weights, out_, t, c, W)
            c += W
        if c < channels:
            conv_tokens[TOKENS=TOKENS, partial=True, inside=inside](
                taps, weights, out_, t, c, channels - c
            )

    var t = begin
    while t < min(taps.history, end):
        tokens[1, False](t)
        t += 1
    while t + TOKENS_AT_ONCE <= end:
        tokens[TOKENS_AT_ONCE, True](t)
        t += TOKENS_AT_ONCE
    while t < end:
        tokens[1, True](t)
        t += 1


def put_window[
    work: DType, state: DType
](taps: Taps[work], window: P[state], T: Int, channels: Int):
    """Writes the last history inputs of the row, [channels, history], oldest first."""
    for j in range(taps.history):
        var t = T - taps.history + j
        if t < 0:
            for c in range(channels):
                window[unsafe_offset=c * taps.history + j] = Scalar[state](
                    taps.window[unsafe_offset=(taps.history + t) * BLOCK + c]
                )
        else:
            for c in range(channels):
                window[unsafe_offset=c * taps.history + j] = Scalar[state](
                    taps.row[unsafe_offset=t * taps.stride + c]
                )


def conv1d[
    work: DType, state: DType
](
    out_: P[work],
    qkv: P[work],
    weight: P[work],
    conv_state: P[state],
    slot_idx: P[DType.uint32],
    offsets: P[DType.uint32],
    batch_size: Int,
    num_tokens: Int,
    conv_dim: Int,
    width: Int,
    write_state: Bool,
):
    """Convolves every row; with write_state a row leaves its last width - 1 inputs in its window.

    The operands are as contract and checks.mojo have them, checked already.
    """
    var history = width - 1

    @always_inline
    def segments_of(b: Int) {imm} -> Int:
        if slot_idx[unsafe_offset=b] == PADDING:
            return 0
        var T = Int(offsets[unsafe_offset=b + 1]) - Int(offsets[unsafe_offset=b])
        return (T + SEGMENT - 1) // SEGMENT

    var row_segments = 0
    var row_tokens = 0
    var covered = 0
    for b in range(batch_size):
        var start = Int(offsets[unsafe_offset=b])
        var end = Int(offsets[unsafe_offset=b + 1])
        if start > covered:
            fill_zero(out_ + covered * conv_dim, (start - covered) * conv_dim)
        covered = end
        if slot_idx[unsafe_offset=b] == PADDING:
            fill_zero(out_ + start * conv_dim, (end - start) * conv_dim)
        else:
            row_segments += segments_of(b)
            row_tokens += end - start
    fill_zero(out_ + covered * conv_dim, (num_tokens - covered) * conv_dim)
    if row_segments == 0:
        return

    var blocks = (conv_dim + BLOCK - 1) // BLOCK
    var units = blocks * row_segments
    # A window is turned one element at a time, which costs as much as some tokens do.
    var chunks = chunk_count((row_tokens + 8 * row_segments) * conv_dim * width, units)

    def chunk(i: Int) {imm} -> None:
        var first = units * i // chunks
        var last = units * (i + 1) // chunks
        var weights = alloc[Float32]((width + history) * BLOCK, alignment=64)
        var window = weights + width * BLOCK
        for block in range(first // row_segments, (last + row_segments - 1) // row_segments):
            var c0 = block * BLOCK
            var channels = min(BLOCK, conv_dim - c0)
            turn(weight + c0 * width, width, channels, weights)
            var unit = block * row_segments
            for b in range(batch_size):
                var segments = segments_of(b)
                var begin = max(first - unit, 0)
                var end = min(last - unit, segments)
                unit += segments
                if begin >= end:
                    continue
                var start = Int(offsets[unsafe_offset=b])
                var T = Int(offsets[unsafe_offset=b + 1]) - start
                var slot = Int(slot_idx[unsafe_offset=b])
                var state_window = conv_state + (slot * conv_dim + c0) * history
                var taps = Taps[work](window, qkv + start * conv_dim + c0, conv_dim, history)
                # Only the first segment of a row looks at its window, so it may also write it.
                if begin == 0:
                    turn(state_window, history, channels, window)
                conv_segment(
                    taps,
                    weights,
                    out_ + start * conv_dim + c0,
                    begin * SEGMENT,
                    min(end * SEGMENT, T),
                    channels,
                )
                if write_state and begin == 0:
                    put_window(taps, state_window, T, channels)
        weights.unsafe_free()

    run_chunks(chunk, chunks)
