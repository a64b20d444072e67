"""The state fold on the CPU: accepted records of every layer into the recurrent state.

Elementwise, for the records r = 0 .. a-1 in order: S = fma(k_r, f_r, S * d_r), with S read and written
once. A whole row of the state is worked on in memory order, with the delta factors and decays of up to
eight records in registers; more records are read again for each row.
"""

from std.math import fma

from ..checks import HeadGeometry, PADDING
from ..ring import RecordLayout
from .schedule import chunk_count, run_chunks
from .vector import into_l2, LINE, load, P, splat, store, Vector, W

comptime MAX_HELD_RECORDS = 8


struct HeadRecords[ring: DType](TrivialRegisterPassable):
    """The accepted records of one row, as one value head sees them."""

    var record: P[Self.ring]
    var stride: Int
    var factor_offset: Int
    var decay_offset: Int

    @always_inline
    def __init__(
        out self, record: P[Self.ring], stride: Int, factor_offset: Int, decay_offset: Int
    ):
        self.record = record
        self.stride = stride
        self.factor_offset = factor_offset
        self.decay_offset = decay_offset

    @always_inline
    def key(self, r: Int, row: Int) -> Vector:
        return splat(self.record, r * self.stride + row)

    @always_inline
    def decay(self, r: Int) -> Vector:
        return splat(self.record, r * self.stride + self.decay_offset)

    @always_inline
    def factors[partial: Bool](self, r: Int, c: Int, n: Int) -> Vector:
        return load[partial=partial](self.record + r * self.stride + self.factor_offset + c, n)


def fold_columns[
    state: DType, ring: DType, A: Int, NV: Int, partial: Bool
](
    S: P[state],
    KD: Int,
    VD: Int,
    records: HeadRecords[ring],
    accepted: Int,
    c: Int,
    n: Int,
    next: P[state],
):
    """Folds into columns [c, c + min(n, NV * W)); A is the record count if > 0, else accepted."""
    comptime LINES_PER_ROW = max(NV * W // LINE[state], 1)
    var f = Array[Vector, max(A * NV, 1)](fill=Vector(0))
    var d = Array[Vector, max(A, 1)](fill=Vector(0))
    comptime for r in range(A):
        d[r] = records.decay(r)
        comptime for j in range(NV):
            f[r * NV + j] = records.factors[partial](r, c + j * W, n - j * W)
    var sp = S + c
    var pf = next
    for row in range(KD):
        var x = Array[Vector, NV](fill=Vector(0))
        comptime for j in range(NV):
            x[j] = load[partial=partial](sp + j * W, n - j * W)
        comptime for i in range(LINES_PER_ROW):
            into_l2(pf + i * LINE[state])
        pf += LINES_PER_ROW * LINE[state]
        comptime if A > 0:
            comptime for r in range(A):
                var k = records.key(r, row)
                comptime for j in range(NV):
                    x[j] = fma(k, f[r * NV + j], x[j] * d[r])
        else:
            for r in range(accepted):
                var k = records.key(r, row)
                var dr = records.decay(r)
                comptime for j in range(NV):
                    var fr = records.factors[partial](r, c + j * W, n - j * W)
                    x[j] = fma(k, fr, x[j] * dr)
        comptime for j in range(NV):
            store[partial=partial](sp + j * W, x[j], n - j * W)
        sp += VD


def fold_head[
    state: DType, ring: DType
](S: P[state], KD: Int, VD: Int, records: HeadRecords[ring], accepted: Int, next: P[state],):
    comptime for A in range(1, MAX_HELD_RECORDS + 1):
        if accepted == A:
            fold_rows[A](S, KD, VD, records, accepted, next)
    if accepted > MAX_HELD_RECORDS:
        fold_rows[0](S, KD, VD, records, accepted, next)


def fold_rows[
    A: Int, state: DType, ring: DType
](S: P[state], KD: Int, VD: Int, records: HeadRecords[ring], accepted: Int, next: P[state]):
    """Folds A records, or accepted ones at A = 0, in pieces as wide as the registers allow."""
    # The A * NV delta factors that are held and the NV vectors of the row share the registers.
    comptime HELD = 8 if 0 < A <= 2 else (4 if A <= 4 else 2)
    comptime NV = HELD if W >= 16 else max(HELD // 2, 1)
    comptime TAIL = min(NV, 2)
    var c = 0
    while VD - c >= NV * W:
        fold_columns[A=A, NV=NV, partial=False](
            S, KD, VD, records, accepted, c, NV * W, next + c * KD
        )
        c += NV * W
    while c < VD:
        fold_columns[A=A, NV=TAIL, partial=True](
            S, KD, VD, records, accepted, c, VD - c, next + c * KD
        )
        c += TAIL * W


def state_fold[
    state: DType, ring: DType
](
    geometry: HeadGeometry,
    pool: P[state],
    ring_records: P[ring],
    row_ids: P[DType.uint32],
    ring_row_ids: P[DType.uint32],
    num_accepted: P[DType.uint32],
    num_layers: Int,
    batch_size: Int,
    ring_len: Int,
    record_stride: Int,
):
    """Folds num_accepted[b] records into the state of row b in every layer; one dispatch.

    Rows that accept nothing, or more than a ring holds (they committed themselves), and padding
    rows are neither read nor written. The operands are checked already.
    """
    var nk = geometry.num_key_heads
    var nv = geometry.num_value_heads
    var KD = geometry.key_head_dim
    var VD = geometry.value_head_dim
    var group = geometry.group()
    var layout = RecordLayout(KD, VD, group)

    var folded = 0
    for b in range(batch_size):
        var a = Int(num_accepted[unsafe_offset=b])
        folded += a + 1 if a <= ring_len else 0
    var items = num_layers * batch_size * nv
    var chunks = chunk_count(folded * num_layers * nv * KD * VD, items)

    def chunk(i: Int) {imm} -> None:
        var first = items * i // chunks
        var last = items * (i + 1) // chunks
        for item in range(first, last):
            var table = item // nv
            var h = item % nv
            var a = Int(num_accepted[unsafe_offset=table % batch_size])
            var row = row_ids[unsafe_offset=table]
            var ring_row = ring_row_ids[unsafe_offset=table]
            if a == 0 or a > ring_len or row == PADDING or ring_row == PADDING:
                continue
            var S = pool + (Int(row) * nv + h) * KD * VD
            var next = S
            if item + 1 < last:
                # Only a prefetch: a row that takes no part costs nothing but the hint.
                var next_row = row_ids[unsafe_offset=(item + 1) // nv]
                next = pool + (Int(next_row) * nv + (item + 1) % nv) * KD * VD
            var g = h % group
            var records = HeadRecords[ring](
                ring_records + (Int(ring_row) * nk + h // group) * ring_len * record_stride,
                record_stride,
                layout.delta_factor(g),
                layout.decay(g),
            )
            fold_head(S, KD, VD, records, a, next)

    run_chunks(chunk, chunks)
