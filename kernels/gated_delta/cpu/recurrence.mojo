"""The gated delta rule on the CPU: the plain recurrence and the verify over a ring.

This is the exact form, token by token, and what it shares with the block form of block.mojo.

Value columns of a state are independent, and each sum over key rows runs in ascending order with
one fma a row and one accumulator a column. So the bits depend on no tile width, window length,
thread count or other row; on the vector width they depend only by the norms of keys and queries.

A window of two or more tokens works on a tile of two vectors of columns that stays in L1:

    first pass   tile = S * d[0];                         kv[0] += tile * k[0]
    pass t       x = tile + k[t] * f[t];  out[t] += x * q[t];
                 tile = x * d[t+1];                       kv[t+1] += tile * k[t+1]
    last pass    x = tile + k * f;        out += x * q;   S = x (plain only)

Readout of a token and kv of the next share a pass, and the tile is kept already decayed, so a token
costs four multiply-add slots a state element. The bytes of the head that comes next are prefetched
meanwhile, one line a row at most, and none in a pass that stores the state: a core has some twenty
lines on their way at a time, and the stores would wait for those from memory.

One token alone, and two that replace a float32 state, have too few passes for that. They run over
whole rows in memory order, with up to six lines a row, and each pass computes the state from S
again rather than storing it.
"""

from std.math import fma
from std.sys import size_of

from ..checks import HeadGeometry, PADDING
from ..ring import RecordLayout
from .block import block_coefficients, block_on_columns, block_products, COEFFICIENTS, PRODUCTS
from .schedule import chunk_count, MIN_CHUNK_COST, parts_per_item, run_chunks
from .vector import (
    copy,
    F32,
    fill_zero,
    from_row_order,
    into_l2,
    LINE,
    load,
    load_row,
    P,
    splat,
    store,
    store_row,
    to_row_order,
    Vector,
    W,
)
from .window import delta_factors, expect, norms, pack, put_out, Window

# Bytes of a tile: well inside a 32 KB L1, beside the keys and queries of a window.
comptime TILE_BYTES = 24 * 1024
# Vectors of a row held at once (kv, then delta factors and readout): as the registers allow.
comptime ROW_VECTORS = 8 if W >= 16 else 4


def window_on_tiles[
    work: DType, state: DType, ring: DType, NV: Int, partial: Bool
](w: Window[work, state, ring], first: Int, n: Int, count: Int, tile: P[F32]):
    """Runs two or more tokens on count tiles of n <= NV * W columns, from column first on.

    The pass of the last token on a tile loads the next tile, so that the traffic of both hides
    behind the arithmetic.
    """
    comptime TW = NV * W
    comptime LINES_PER_ROW = max(TW // LINE[state], 1)
    var KD = w.KD
    var VD = w.VD
    var last = w.T - 1

    var kv = Array[Vector, NV](fill=Vector(0))
    expect[NV=NV](w, 0, first)
    expect[NV=NV](w, 1, first)
    var d = splat(w.decay, 0)
    var k = w.k
    var sp = w.S + first
    var tp = tile
    for r in range(KD):
        var kr = splat(k, r)
        comptime for j in range(NV):
            var s = load[partial=partial and j == NV - 1](sp + j * W, n - j * W) * d
            tp.store(j * W, s)
            kv[j] = fma(s, kr, kv[j])
        sp += VD
        tp += TW

    for i in range(count):
        var c = first + i * TW
        # Lines of the next head: all before the last pass, whose stores wait for lines of L2 behind
        # those of memory, and as few at a time as that allows (one may be lost at an odd KD).
        var pf = w.next + c * KD
        var lines = LINES_PER_ROW * KD
        for t in range(last):
            expect[NV=NV](w, t + 2, c)
            var f = delta_factors[partial=partial](w, t, c, n, kv)
            var out = Array[Vector, NV](fill=Vector(0))
            kv = Array[Vector, NV](fill=Vector(0))
            k = w.k + t * KD
            var k_next = k + KD
            var q = w.q + t * KD
            d = splat(w.decay, (t + 1) * w.gate_stride)
            tp = tile

            @always_inline
            def step(r: Int) {imm k, imm k_next, imm q, imm d, imm f, mut out, mut kv, mut tp}:
                var kr = splat(k, r)
                var knr = splat(k_next, r)
                var qr = splat(q, r)
                comptime for j in range(NV):
                    var x = fma(kr, f[j], tp.load[width=W](j * W))
                    out[j] = fma(x, qr, out[j])
                    var s = x * d
                    tp.store(j * W, s)
                    kv[j] = fma(s, knr, kv[j])
                tp += TW

            if lines > (last - t) * KD - KD // 2:
                for r in range(KD):
                    into_l2(pf)
                    pf += LINE[state]
                    step(r)
                lines -= KD
            elif lines > 0:
                for r in range(0, KD - 1, 2):
                    into_l2(pf)
                    pf += LINE[state]
                    step(r)
                    step(r + 1)
                if KD % 2 == 1:
                    step(KD - 1)
                lines -= KD // 2
            else:
                for r in range(KD):
                    step(r)
            put_out[partial=partial](w, t, c, n, out)

        # The last token, and in the same pass the load of the tile that follows.
        var f = delta_factors[partial=partial](w, last, c, n, kv)
        var out = Array[Vector, NV](fill=Vector(0))
        kv = Array[Vector, NV](fill=Vector(0))
        k = w.k + last * KD
        var q = w.q + last * KD
        sp = w.S + c
        tp = tile

        @always_inline
        def finish[
            write: Bool, load_next: Bool
        ](r: Int) {
            imm w, imm k, imm q, imm d, imm f, imm VD, imm n, mut out, mut kv, mut sp, mut tp
        }:
            var kr = splat(k, r)
            var qr = splat(q, r)
            comptime for j in range(NV):
                var x = fma(kr, f[j], tp.load[width=W](j * W))
                out[j] = fma(x, qr, out[j])
                comptime if write:
                    store[partial=partial and j == NV - 1](sp + j * W, x, n - j * W)
                comptime if load_next:
                    var s = load[partial=False](sp + TW + j * W, W) * d
                    tp.store(j * W, s)
                    kv[j] = fma(s, splat(w.k, r), kv[j])
            sp += VD
            tp += TW

        d = splat(w.decay, 0)
        comptime for write in [False, True]:
            comptime for load_next in [False, True]:
                if write != w.records and load_next == (i + 1 < count):
                    comptime if load_next:
                        expect[NV=NV](w, 0, c + TW)
                        expect[NV=NV](w, 1, c + TW)
                    # What a verify of two tokens has left; it stores nothing.
                    var rest = KD if lines >= KD else 0
                    for r in range(rest):
                        into_l2(pf)
                        pf += LINE[state]
                        finish[write, load_next](r)
                    for r in range(rest, KD):
                        finish[write, load_next](r)
        put_out[partial=partial](w, last, c, n, out)


def tokens_on_rows[
    work: DType, state: DType, ring: DType, T: Int, NV: Int, partial: Bool
](w: Window[work, state, ring], c: Int, n: Int, next: P[state]):
    """Runs T tokens on columns [c, c + n), rows in memory order; same bits as the tile.

    Pass t applies the first t updates to S, reads out token t - 1 and sums kv of token t.
    """
    comptime LINES_PER_ROW = max(NV * W // LINE[state], 1)
    # Of the lines of the next head, a quarter (float32) or a half (16 bits) in the last pass, which
    # has the stores: as measured.
    comptime IN_LAST_PASS = LINES_PER_ROW // size_of[Scalar[state]]()
    comptime BEFORE = LINES_PER_ROW - IN_LAST_PASS
    var d = Array[Vector, T](fill=Vector(0))
    comptime for t in range(T):
        expect[NV=NV](w, t, c)
        d[t] = splat(w.decay, t * w.gate_stride)
    var f = Array[Array[Vector, NV], T](fill=Array[Vector, NV](fill=Vector(0)))
    var pf = next

    comptime for t in range(T + 1):
        comptime LINES = IN_LAST_PASS if t == T else BEFORE * (t + 1) // T - BEFORE * t // T
        var out = Array[Vector, NV](fill=Vector(0))
        var kv = Array[Vector, NV](fill=Vector(0))
        var sp = w.S + c

        @always_inline
        def step[write: Bool](r: Int) {imm w, imm d, imm f, imm n, mut out, mut kv, mut sp, mut pf}:
            var x = load_row[NV=NV, partial=partial](sp, n)
            comptime for u in range(t):
                var kr = splat(w.k + u * w.KD, r)
                comptime for j in range(NV):
                    x[j] = fma(kr, f[u][j], x[j] * d[u])
            comptime if t > 0:
                var qr = splat(w.q + (t - 1) * w.KD, r)
                comptime for j in range(NV):
                    out[j] = fma(x[j], qr, out[j])
            comptime if t < T:
                var kr = splat(w.k + t * w.KD, r)
                comptime for j in range(NV):
                    kv[j] = fma(x[j] * d[t], kr, kv[j])
            comptime if write:
                store_row[partial=partial](sp, x, n)
            comptime for i in range(LINES):
                into_l2(pf + i * LINE[state])
            pf += LINES * LINE[state]
            sp += w.VD

        if t < T or w.records:
            for r in range(w.KD):
                step[False](r)
        else:
            for r in range(w.KD):
                step[True](r)
        comptime if t > 0:
            from_row_order[state, partial=partial](out)
            put_out[partial=partial](w, t - 1, c, n, out)
        comptime if t < T:
            from_row_order[state, partial=partial](kv)
            f[t] = delta_factors[partial=partial](w, t, c, n, kv)
            to_row_order[state, partial=partial](f[t])


def window_on_rows[
    work: DType, state: DType, ring: DType, T: Int
](w: Window[work, state, ring], c0: Int, c1: Int):
    """Runs a window of T tokens on columns [c0, c1) over whole rows, in ever narrower pieces."""
    var c = c0
    comptime for NV in [ROW_VECTORS, ROW_VECTORS // 2, 2]:
        while c1 - c >= NV * W:
            tokens_on_rows[T=T, NV=NV, partial=False](w, c, NV * W, w.next + c * w.KD)
            c += NV * W
    while c < c1:
        tokens_on_rows[T=T, NV=1, partial=True](w, c, min(c1 - c, W), w.next + c * w.KD)
        c += W


def window_on_columns[
    work: DType, state: DType, ring: DType
](w: Window[work, state, ring], c0: Int, c1: Int, tile: P[F32]):
    """Runs the window on columns [c0, c1), in pieces as wide as the registers and L1 allow."""
    if w.T == 1:
        window_on_rows[T=1](w, c0, c1)
        return
    comptime if state == F32:
        if w.T == 2 and not w.records:
            window_on_rows[T=2](w, c0, c1)
            return
    var c = c0
    if w.KD * 2 * W * 4 <= TILE_BYTES:
        var count = (c1 - c) // (2 * W)
        if count > 0:
            window_on_tiles[NV=2, partial=False](w, c, 2 * W, count, tile)
            c += count * 2 * W
        if c1 - c > W:
            window_on_tiles[NV=2, partial=True](w, c, c1 - c, 1, tile)
            return
    while c < c1:
        window_on_tiles[NV=1, partial=True](w, c, min(c1 - c, W), 1, tile)
        c += W


def recurrence[
    work: DType, state: DType, ring: DType, block: Bool
](
    geometry: HeadGeometry,
    out_: P[work],
    qkv: P[work],
    decay: P[work],
    beta: P[work],
    pool: P[state],
    slot_idx: P[DType.uint32],
    offsets: P[DType.uint32],
    batch_size: Int,
    num_tokens: Int,
    ring_records: P[ring],
    ring_slot_idx: P[DType.uint32],
    ring_len: Int,
    record_stride: Int,
):
    """Runs every row on every value head.

    A row of at most ring_len tokens leaves its records in the ring and its state in the pool
    untouched; a longer row writes its final state and no record. ring_len 0 is therefore the
    plain recurrence, and reads neither ring nor ring ids.

    The operands are as contract and checks.mojo have them, checked already.
    """
    var nk = geometry.num_key_heads
    var nv = geometry.num_value_heads
    var KD = geometry.key_head_dim
    var VD = geometry.value_head_dim
    var group = geometry.group()
    var key_dim = nk * KD
    var conv_dim = geometry.conv_dim()
    var value_dim = nv * VD
    var layout = RecordLayout(KD, VD, group)

    @always_inline
    def tokens_of(b: Int) {imm} -> Int:
        return Int(offsets[unsafe_offset=b + 1]) - Int(offsets[unsafe_offset=b])

    @always_inline
    def takes_part(b: Int, T: Int) {imm} -> Bool:
        if T == 0 or slot_idx[unsafe_offset=b] == PADDING:
            return False
        return ring_len == 0 or ring_slot_idx[unsafe_offset=b] != PADDING

    # A row costs its tokens and one pass more, over the state.
    var longest = 0
    var row_costs = 0
    var active_rows = 0
    var covered = 0
    for b in range(batch_size):
        var start = Int(offsets[unsafe_offset=b])
        var T = tokens_of(b)
        if start > covered:
            fill_zero(out_ + covered * value_dim, (start - covered) * value_dim)
        covered = start + T
        if takes_part(b, T):
            longest = max(longest, T)
            row_costs += T + 1
            active_rows += 1
        else:
            fill_zero(out_ + start * value_dim, T * value_dim)
    fill_zero(out_ + covered * value_dim, (num_tokens - covered) * value_dim)
    if active_rows == 0:
        return

    # A unit is some columns of one (row, value head): all of them, unless heads are scarce.
    var parts = parts_per_item(active_rows * nv, (VD + 2 * W - 1) // (2 * W))
    var part_columns = ((VD + parts - 1) // parts + 2 * W - 1) // (2 * W) * (2 * W)
    parts = (VD + part_columns - 1) // part_columns
    # Heads that share a key are claimed together, and share its packing, unless that is too coarse.
    var grain = 1
    if parts == 1 and group * (longest + 1) * KD * VD <= 2 * MIN_CHUNK_COST:
        grain = group
    var pieces = nv * parts // grain
    var total = row_costs * pieces
    var chunks = chunk_count(row_costs * nv * KD * VD, active_rows * pieces)

    @always_inline
    def first_state(mark: Int) {imm} -> P[state]:
        """The state of the first piece whose cost mark is mark or more."""
        var row_mark = 0
        for b in range(batch_size):
            var T = tokens_of(b)
            if takes_part(b, T):
                var piece = (max(mark - row_mark, 0) + T) // (T + 1)
                if piece < pieces:
                    var head = Int(slot_idx[unsafe_offset=b]) * nv + piece * grain // parts
                    return pool + head * KD * VD
                row_mark += (T + 1) * pieces
        return pool

    def chunk(i: Int, next_chunk: Int, tile: P[F32]) {imm} -> None:
        """Runs the pieces whose first cost mark lies in [i, i + 1) of the chunks' shares."""
        var first = total * i // chunks
        var last = total * (i + 1) // chunks
        var after = first_state(total * min(next_chunk, chunks - 1) // chunks)
        var k = tile + KD * 2 * W
        var q = k + longest * KD
        var kinv = q + longest * KD
        var qf = kinv + longest
        var products = qf + longest
        var coefficients = products + longest * PRODUCTS
        var mark = 0
        for b in range(batch_size):
            var T = tokens_of(b)
            if not takes_part(b, T):
                continue
            var cost = T + 1
            var begin = max((first - mark + cost - 1) // cost, 0) * grain
            var end = min((last - mark + cost - 1) // cost, pieces) * grain
            mark += cost * pieces
            if begin >= end:
                continue
            var start = Int(offsets[unsafe_offset=b])
            var slot = Int(slot_idx[unsafe_offset=b])
            var records = T <= ring_len
            var normed_head = -1
            for unit in range(begin, end):
                var h = unit // parts
                var part = unit % parts
                var kh = h // group
                var g = h % group
                var S = pool + (slot * nv + h) * KD * VD
                var next = after
                if unit + 1 < end:
                    next = pool + (slot * nv + (unit + 1) // parts) * KD * VD
                elif mark < last:
                    next = first_state(mark)
                if kh != normed_head:
                    var queries = qkv + start * conv_dim + kh * KD
                    pack(queries, conv_dim, T, KD, q)
                    pack(queries + key_dim, conv_dim, T, KD, k)
                    norms(q, k, T, KD, kinv, qf)
                    comptime if block:
                        block_products(q, k, T, KD, products)
                    normed_head = kh
                var record = ring_records
                if records:
                    var ring_row = Int(ring_slot_idx[unsafe_offset=b])
                    record = ring_records + (ring_row * nk + kh) * ring_len * record_stride
                var w = Window[work, state, ring](
                    S,
                    q,
                    k,
                    qkv + start * conv_dim + 2 * key_dim + h * VD,
                    conv_dim,
                    decay + start * nv + h,
                    beta + start * nv + h,
                    nv,
                    kinv,
                    qf,
                    out_ + start * value_dim + h * VD,
                    value_dim,
                    records,
                    record + layout.delta_factor(g),
                    record_stride,
                    T,
                    KD,
                    VD,
                    next,
                )
                var c0 = part * part_columns
                if records and part == 0:
                    for t in range(T):
                        if g == 0:
                            copy(record + t * record_stride, k + t * KD, KD)
                        record[unsafe_offset=t * record_stride + layout.decay(g)] = Scalar[ring](
                            w.decay[unsafe_offset=t * nv]
                        )
                var c1 = min(c0 + part_columns, VD)
                comptime if block:
                    block_coefficients(w, products, coefficients)
                    block_on_columns(w, coefficients, c0, c1, tile)
                else:
                    window_on_columns(w, c0, c1, tile)

    var scratch = KD * 2 * W + 2 * longest * (KD + 1)
    comptime if block:
        scratch += longest * (PRODUCTS + COEFFICIENTS)
    run_chunks(chunk, chunks, scratch)
