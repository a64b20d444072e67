"""The block form on the CPU: up to four tokens against the state as it was before them.

With D_t the decay from the block's start to token t, D_st that from token s to token t, and S the
state before the block:

    m_t = D_t (S^T k_t) + sum over s < t of D_st (k_t . k_s) f_s
    f_t = beta_t (v_t - m_t kinv_t) kinv_t
    out_t = qf_t (D_t (S^T q_t) + sum over s <= t of D_st (q_t . k_s) f_s)
    S' = D S + sum over t of k_t (D_t,last f_t)

S^T k and S^T q of all tokens take one pass over the state, at two multiply-adds a token and
element; the sums are a triangular solve a column; the update takes one pass more, and a verify of
one block has none. Between two blocks of a row the update of one and the products of the next share
a pass.

Blocks start with the row, and a token depends on nothing behind it. So a verify, its fold and the
plain recurrence over the same tokens agree to the bit (the fold takes `scale_between` and the order
of the update from here), whatever the tile, the other rows and the threads. But a row cut elsewhere
into calls differs in the last bits, unlike in the exact form.
"""

from std.math import fma

from .vector import dot, F32, into_l2, LINE, load, P, splat, store, Vector, W
from .window import delta_factors, expect, put_out, Window

comptime BLOCK = 4

# A token's coefficients: those of the factors before it in m, those of the factors up to its own in
# out, its decay from the block's start and to the block's end.
comptime KEYS = 0
comptime QUERIES = KEYS + BLOCK
comptime SINCE_START = QUERIES + BLOCK
comptime TO_END = SINCE_START + 1
comptime COEFFICIENTS = TO_END + 1
# Products of a token, which do not depend on the value head: k_t . k_s and q_t . k_s.
comptime PRODUCTS = 2 * BLOCK


@always_inline
def block_end(t: Int, T: Int) -> Int:
    """One past the last token of t's block."""
    return min(t // BLOCK * BLOCK + BLOCK, T)


@always_inline
def scale_between[dtype: DType](decay: P[dtype], stride: Int, s: Int, t: Int) -> Float32:
    """The product of the decays of tokens s + 1 .. t, in ascending order."""
    var scale = Float32(1)
    for u in range(s + 1, t + 1):
        scale *= Float32(decay[unsafe_offset=u * stride])
    return scale


def block_products(q: P[F32], k: P[F32], T: Int, KD: Int, products: P[F32]):
    """The products of a key head's tokens within their blocks, [T, PRODUCTS]."""
    for t in range(T):
        var first = t // BLOCK * BLOCK
        for s in range(first, t + 1):
            var at = t * PRODUCTS + s - first
            products[unsafe_offset=at] = dot(k + t * KD, k + s * KD, KD)
            products[unsafe_offset=at + BLOCK] = dot(q + t * KD, k + s * KD, KD)


def block_coefficients[
    work: DType, state: DType, ring: DType
](w: Window[work, state, ring], products: P[F32], coefficients: P[F32]):
    """The products of a value head, scaled by its decays, [T, COEFFICIENTS]."""
    for t in range(w.T):
        var first = t // BLOCK * BLOCK
        var of_t = coefficients + t * COEFFICIENTS
        for s in range(first, t + 1):
            var scale = scale_between(w.decay, w.gate_stride, s, t)
            var at = t * PRODUCTS + s - first
            of_t[unsafe_offset=KEYS + s - first] = products[unsafe_offset=at] * scale
            of_t[unsafe_offset=QUERIES + s - first] = products[unsafe_offset=at + BLOCK] * scale
        of_t[unsafe_offset=SINCE_START] = scale_between(w.decay, w.gate_stride, first - 1, t)
        of_t[unsafe_offset=TO_END] = scale_between(w.decay, w.gate_stride, t, block_end(t, w.T) - 1)


@always_inline
def solve[
    work: DType, state: DType, ring: DType, N: Int, NV: Int, partial: Bool
](
    w: Window[work, state, ring],
    coefficients: P[F32],
    first: Int,
    c: Int,
    n: Int,
    sums: Array[Vector, 2 * N * NV],
) -> Array[Vector, N * NV]:
    """Outputs and delta factors of a block's N tokens from S^T k and S^T q.

    Returns:
        The factors, scaled to the block's end.
    """
    var f = Array[Vector, N * NV](fill=Vector(0))
    comptime for t in range(N):
        var of_t = coefficients + (first + t) * COEFFICIENTS
        var since_start = splat(of_t, SINCE_START)
        var m = Array[Vector, NV](fill=Vector(0))
        var out = Array[Vector, NV](fill=Vector(0))
        comptime for j in range(NV):
            m[j] = sums[t * NV + j] * since_start
            out[j] = sums[(N + t) * NV + j] * since_start
        comptime for s in range(t):
            var key = splat(of_t, KEYS + s)
            var query = splat(of_t, QUERIES + s)
            comptime for j in range(NV):
                m[j] = fma(key, f[s * NV + j], m[j])
                out[j] = fma(query, f[s * NV + j], out[j])
        var ft = delta_factors[partial=partial](w, first + t, c, n, m)
        var own = splat(of_t, QUERIES + t)
        comptime for j in range(NV):
            f[t * NV + j] = ft[j]
            out[j] = fma(own, ft[j], out[j])
        put_out[partial=partial](w, first + t, c, n, out)
    comptime for t in range(N):
        var to_end = splat(coefficients, (first + t) * COEFFICIENTS + TO_END)
        comptime for j in range(NV):
            f[t * NV + j] = f[t * NV + j] * to_end
    return f^


@always_inline
def products_with_state[
    state: DType, N: Int, NV: Int, partial: Bool, LINES: Int
](
    S: P[state],
    stride: Int,
    n: Int,
    k: P[F32],
    q: P[F32],
    KD: Int,
    next: P[state],
) -> Array[
    Vector, 2 * N * NV
]:
    """S^T k, then S^T q, of N tokens; prefetches LINES lines a row from next on."""
    var sums = Array[Vector, 2 * N * NV](fill=Vector(0))
    var sp = S
    var pf = next
    for r in range(KD):
        var x = Array[Vector, NV](fill=Vector(0))
        comptime for j in range(NV):
            x[j] = load[partial=partial and j == NV - 1](sp + j * W, n - j * W)
        comptime for i in range(LINES):
            into_l2(pf + i * LINE[state])
        pf += LINES * LINE[state]
        comptime for t in range(N):
            var kr = splat(k + t * KD, r)
            var qr = splat(q + t * KD, r)
            comptime for j in range(NV):
                sums[t * NV + j] = fma(x[j], kr, sums[t * NV + j])
                sums[(N + t) * NV + j] = fma(x[j], qr, sums[(N + t) * NV + j])
        sp += stride
    return sums^


@always_inline
def updated[
    N: Int, NV: Int
](
    x: Array[Vector, NV], since_start: Vector, k: P[F32], KD: Int, r: Int, f: Array[Vector, N * NV]
) -> Array[Vector, NV]:
    """A row of the state after the block."""
    var y = Array[Vector, NV](fill=Vector(0))
    comptime for j in range(NV):
        y[j] = x[j] * since_start
    comptime for t in range(N):
        var kr = splat(k + t * KD, r)
        comptime for j in range(NV):
            y[j] = fma(kr, f[t * NV + j], y[j])
    return y^


@always_inline
def update_state[
    source: DType, state: DType, N: Int, NV: Int, partial: Bool, LINES: Int
](
    S: P[source],
    source_stride: Int,
    to: P[state],
    stride: Int,
    n: Int,
    since_start: Vector,
    k: P[F32],
    KD: Int,
    f: Array[Vector, N * NV],
    next: P[state],
):
    """Replaces the state by that after the block of N tokens; prefetches as above."""
    var sp = S
    var tp = to
    var pf = next
    for r in range(KD):
        var x = Array[Vector, NV](fill=Vector(0))
        comptime for j in range(NV):
            x[j] = load[partial=partial and j == NV - 1](sp + j * W, n - j * W)
        comptime for i in range(LINES):
            into_l2(pf + i * LINE[state])
        pf += LINES * LINE[state]
        x = updated[N, NV](x, since_start, k, KD, r, f)
        comptime for j in range(NV):
            store[partial=partial and j == NV - 1](tp + j * W, x[j], n - j * W)
        sp += source_stride
        tp += stride


@always_inline
def advance[
    source: DType, N: Int, NV: Int, partial: Bool
](
    S: P[source],
    source_stride: Int,
    tile: P[F32],
    n: Int,
    since_start: Vector,
    k: P[F32],
    f: Array[Vector, BLOCK * NV],
    next_k: P[F32],
    next_q: P[F32],
    KD: Int,
) -> Array[Vector, 2 * N * NV]:
    """The state after a block into the tile, and its products with the N tokens of the next block.
    """
    var sums = Array[Vector, 2 * N * NV](fill=Vector(0))
    var sp = S
    var tp = tile
    for r in range(KD):
        var x = Array[Vector, NV](fill=Vector(0))
        comptime for j in range(NV):
            x[j] = load[partial=partial and j == NV - 1](sp + j * W, n - j * W)
        x = updated[BLOCK, NV](x, since_start, k, KD, r, f)
        comptime for j in range(NV):
            tp.store(j * W, x[j])
        comptime for t in range(N):
            var kr = splat(next_k + t * KD, r)
            var qr = splat(next_q + t * KD, r)
            comptime for j in range(NV):
                sums[t * NV + j] = fma(x[j], kr, sums[t * NV + j])
                sums[(N + t) * NV + j] = fma(x[j], qr, sums[(N + t) * NV + j])
        sp += source_stride
        tp += NV * W
    return sums^


@always_inline
def last_block[
    source: DType,
    work: DType,
    state: DType,
    ring: DType,
    N: Int,
    NV: Int,
    partial: Bool,
    LINES: Int,
](
    w: Window[work, state, ring],
    coefficients: P[F32],
    S: P[source],
    source_stride: Int,
    c: Int,
    n: Int,
    sums: Array[Vector, 2 * N * NV],
    next: P[state],
):
    """The N tokens that end the row: outputs and factors, and unless it records, its state."""
    var first = w.T - N
    var f = solve[N=N, NV=NV, partial=partial](w, coefficients, first, c, n, sums)
    if not w.records:
        var since_start = splat(coefficients, (w.T - 1) * COEFFICIENTS + SINCE_START)
        update_state[N=N, NV=NV, partial=partial, LINES=LINES](
            S,
            source_stride,
            w.S + c,
            w.VD,
            n,
            since_start,
            w.k + first * w.KD,
            w.KD,
            f,
            next,
        )


def one_block_on_columns[
    work: DType, state: DType, ring: DType, N: Int, NV: Int, partial: Bool
](w: Window[work, state, ring], coefficients: P[F32], c: Int, n: Int):
    """A row of N <= BLOCK tokens on columns [c, c + n), n <= NV * W."""
    comptime LINES = max(NV * W // LINE[state], 1)
    var next = w.next + c * w.KD
    comptime for t in range(N):
        expect[NV=NV](w, t, c)
    comptime for records in [False, True]:
        if w.records == records:
            # The whole of the next head in the one pass of a verify, else half of it in each pass.
            comptime NOW = LINES if records else LINES // 2
            var sums = products_with_state[N=N, NV=NV, partial=partial, LINES=NOW](
                w.S + c, w.VD, n, w.k, w.q, w.KD, next
            )
            last_block[N=N, NV=NV, partial=partial, LINES=LINES - NOW](
                w, coefficients, w.S + c, w.VD, c, n, sums, next + NOW * LINE[state] * w.KD
            )


@always_inline
def next_products[
    work: DType, state: DType, ring: DType, N: Int, NV: Int, partial: Bool
](
    w: Window[work, state, ring],
    coefficients: P[F32],
    first: Int,
    c: Int,
    n: Int,
    tile: P[F32],
    sums: Array[Vector, 2 * BLOCK * NV],
) -> Array[Vector, 2 * N * NV]:
    """Ends the full block at token first, whose sums are given; takes up the N tokens behind it."""
    var after = first + BLOCK
    comptime for t in range(N):
        expect[NV=NV](w, after + t, c)
    var f = solve[N=BLOCK, NV=NV, partial=partial](w, coefficients, first, c, n, sums)
    var since_start = splat(coefficients, (after - 1) * COEFFICIENTS + SINCE_START)
    var k = w.k + first * w.KD
    var next_k = w.k + after * w.KD
    var next_q = w.q + after * w.KD
    if first == 0:
        return advance[N=N, NV=NV, partial=partial](
            w.S + c, w.VD, tile, n, since_start, k, f, next_k, next_q, w.KD
        )
    return advance[N=N, NV=NV, partial=False](
        tile, NV * W, tile, n, since_start, k, f, next_k, next_q, w.KD
    )


def blocks_on_tile[
    work: DType, state: DType, ring: DType, NV: Int, partial: Bool
](w: Window[work, state, ring], coefficients: P[F32], c: Int, n: Int, tile: P[F32]):
    """A row of more than one block on columns [c, c + n), n <= NV * W.

    The state between blocks stays in the tile, in float32.
    """
    comptime LINES = max(NV * W // LINE[state], 1)
    var next = w.next + c * w.KD
    comptime for t in range(BLOCK):
        expect[NV=NV](w, t, c)
    var sums = products_with_state[N=BLOCK, NV=NV, partial=partial, LINES=LINES](
        w.S + c, w.VD, n, w.k, w.q, w.KD, next
    )
    var first = 0
    while first + 2 * BLOCK < w.T:
        sums = next_products[N=BLOCK, NV=NV, partial=partial](
            w, coefficients, first, c, n, tile, sums
        )
        first += BLOCK
    comptime for N in range(1, BLOCK + 1):
        if w.T - first - BLOCK == N:
            var last = next_products[N=N, NV=NV, partial=partial](
                w, coefficients, first, c, n, tile, sums
            )
            last_block[N=N, NV=NV, partial=partial, LINES=0](
                w, coefficients, tile, NV * W, c, n, last, next
            )


def block_on_columns[
    work: DType, state: DType, ring: DType
](w: Window[work, state, ring], coefficients: P[F32], c0: Int, c1: Int, tile: P[F32]):
    """Runs the window on columns [c0, c1), in pieces as wide as the registers allow."""
    var c = c0
    if w.T <= BLOCK:
        comptime for N in range(1, BLOCK + 1):
            if w.T == N:
                # Both sums of N tokens and NV vectors share the registers.
                comptime HELD = 8 if N == 1 else (4 if N == 2 else 2)
                comptime NV = HELD if W >= 16 else max(HELD // 2, 1)
                while c1 - c >= NV * W:
                    one_block_on_columns[N=N, NV=NV, partial=False](w, coefficients, c, NV * W)
                    c += NV * W
                while c < c1:
                    one_block_on_columns[N=N, NV=1, partial=True](
                        w, coefficients, c, min(c1 - c, W)
                    )
                    c += W
        return
    comptime NV = 2 if W >= 16 else 1
    while c1 - c >= NV * W:
        blocks_on_tile[NV=NV, partial=False](w, coefficients, c, NV * W, tile)
        c += NV * W
    while c < c1:
        blocks_on_tile[NV=1, partial=True](w, coefficients, c, min(c1 - c, W), tile)
        c += W
