"""The state fold on the CPU: accepted records of every layer into the recurrent state.

Elementwise, for the records r = 0 .. a-1 in order: S = fma(k_r, f_r, S * d_r), with S read and
written once. In the block form the decays of four records are one product, in front of them:
S = S * D, then S = fma(k_r, F_r, S) with each factor scaled to the end of its block (block.mojo). A
state is worked on in memory order, in rows or parts of them, with the delta factors and decays of
up to eight records held for all rows; more records are read again for each row.

Whole rows with one record or two are one stream, which the processor prefetches better than we do;
in parts of rows, and beside the arithmetic of more records, it does not see far enough.
"""

from std.math import fma

from ..checks import HeadGeometry, PADDING
from ..ring import is_folded, RecordLayout
from .block import BLOCK, block_end, scale_between
from .schedule import chunk_count, run_chunks
from .vector import F32, into_l2, LINE, load, P, splat, store, Vector, W

comptime MAX_HELD_RECORDS = 8


struct HeadRecords[ring: DType, block: Bool](TrivialRegisterPassable):
    """The accepted records of one row, as one value head sees them."""

    var record: P[Self.ring]
    var stride: Int
    var factor_offset: Int
    var decay_offset: Int
    var count: Int

    @always_inline
    def __init__(
        out self,
        record: P[Self.ring],
        stride: Int,
        factor_offset: Int,
        decay_offset: Int,
        count: Int,
    ):
        self.record = record
        self.stride = stride
        self.factor_offset = factor_offset
        self.decay_offset = decay_offset
        self.count = count

    @always_inline
    def key(self, r: Int, row: Int) -> Vector:
        return splat(self.record, r * self.stride + row)

    @always_inline
    def decay(self, r: Int) -> Vector:
        """What the state is multiplied by before record r; in the block form only where one starts.
        """
        comptime if Self.block:
            return Vector(self._scale(r - 1, block_end(r, self.count) - 1))
        else:
            return splat(self.record, r * self.stride + self.decay_offset)

    @always_inline
    def factors[partial: Bool](self, r: Int, c: Int, n: Int) -> Vector:
        var f = load[partial=partial](self.record + r * self.stride + self.factor_offset + c, n)
        comptime if Self.block:
            return f * self._scale(r, block_end(r, self.count) - 1)
        else:
            return f

    @always_inline
    def expect(self, KD: Int, VD: Int):
        """Prefetches the records: the ring is as far away as the state."""
        for r in range(min(self.count, MAX_HELD_RECORDS)):
            var record = self.record + r * self.stride
            for c in range(0, VD, LINE[Self.ring]):
                into_l2(record + self.factor_offset + c)
            for row in range(0, KD, LINE[Self.ring]):
                into_l2(record + row)
            into_l2(record + self.decay_offset)

    @always_inline
    def _scale(self, s: Int, t: Int) -> Float32:
        return scale_between(self.record + self.decay_offset, self.stride, s, t)

    @staticmethod
    @always_inline
    def decays_before(r: Int) -> Bool:
        """Whether the state decays before record r."""
        comptime if Self.block:
            return r % BLOCK == 0
        else:
            return True


def fold_columns[
    state: DType, ring: DType, block: Bool, A: Int, NV: Int, partial: Bool, LINES: Int
](
    S: P[state],
    KD: Int,
    VD: Int,
    records: HeadRecords[ring, block],
    c: Int,
    n: Int,
    next: P[state],
):
    """Folds into columns [c, c + min(n, NV * W)); A is the record count, or 0 for any.

    Prefetches LINES lines a row from next on.
    """
    var f = Array[Vector, max(A * NV, 1)](fill=Vector(0))
    var d = Array[Vector, max(A, 1)](fill=Vector(0))
    comptime for r in range(A):
        comptime if records.decays_before(r):
            d[r] = records.decay(r)
        comptime for j in range(NV):
            f[r * NV + j] = records.factors[partial](r, c + j * W, n - j * W)
    var sp = S + c
    var pf = next
    for row in range(KD):
        var x = Array[Vector, NV](fill=Vector(0))
        comptime for j in range(NV):
            x[j] = load[partial=partial](sp + j * W, n - j * W)
        comptime for i in range(LINES):
            into_l2(pf + i * LINE[state])
        pf += LINES * LINE[state]
        comptime if A > 0:
            comptime for r in range(A):
                var k = records.key(r, row)
                comptime for j in range(NV):
                    comptime if records.decays_before(r):
                        x[j] = x[j] * d[r]
                    x[j] = fma(k, f[r * NV + j], x[j])
        else:
            for r in range(records.count):
                var k = records.key(r, row)
                if records.decays_before(r):
                    var dr = records.decay(r)
                    comptime for j in range(NV):
                        x[j] = x[j] * dr
                comptime for j in range(NV):
                    var fr = records.factors[partial](r, c + j * W, n - j * W)
                    x[j] = fma(k, fr, x[j])
        comptime for j in range(NV):
            store[partial=partial](sp + j * W, x[j], n - j * W)
        sp += VD


def fold_head[
    state: DType, ring: DType, block: Bool
](S: P[state], KD: Int, VD: Int, records: HeadRecords[ring, block], next: P[state]):
    comptime for A in range(1, MAX_HELD_RECORDS + 1):
        if records.count == A:
            fold_rows[A](S, KD, VD, records, next)
    if records.count > MAX_HELD_RECORDS:
        fold_rows[0](S, KD, VD, records, next)


def fold_rows[
    A: Int, state: DType, ring: DType, block: Bool
](S: P[state], KD: Int, VD: Int, records: HeadRecords[ring, block], next: P[state]):
    """Folds A records, or any number at A = 0, in pieces as wide as the registers allow."""
    # The A * NV delta factors that are held and the NV vectors of the row share the registers. With
    # three or four records in float32 memory decides: longer pieces are worth spilling factors for.
    comptime FEW = 0 < A <= 2
    comptime LONG = FEW or (0 < A <= 4 and state == F32 and W >= 16)
    comptime HELD = 8 if LONG else (4 if A <= 4 else 2)
    comptime NV = HELD if W >= 16 else max(HELD // 2, 1)
    comptime TAIL = min(NV, 2)
    comptime if FEW:
        if VD == NV * W:
            fold_columns[A=A, NV=NV, partial=False, LINES=0](S, KD, VD, records, 0, VD, next)
            return
    var c = 0
    comptime for N in [NV, max(NV // 2, 1)]:
        while VD - c >= N * W:
            fold_columns[A=A, NV=N, partial=False, LINES=max(N * W // LINE[state], 1)](
                S, KD, VD, records, c, N * W, next + c * KD
            )
            c += N * W
    while c < VD:
        fold_columns[A=A, NV=TAIL, partial=True, LINES=max(TAIL * W // LINE[state], 1)](
            S, KD, VD, records, c, VD - c, next + c * KD
        )
        c += TAIL * W


def state_fold[
    state: DType, ring: DType, block: Bool
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
        if is_folded(num_accepted[unsafe_offset=b], ring_len):
            folded += Int(num_accepted[unsafe_offset=b]) + 1
    var items = num_layers * batch_size * nv
    var chunks = chunk_count(folded * num_layers * nv * KD * VD, items)

    @always_inline
    def state_of(item: Int) {imm} -> P[state]:
        return pool + (Int(row_ids[unsafe_offset=item // nv]) * nv + item % nv) * KD * VD

    @always_inline
    def records_of(item: Int) {imm} -> HeadRecords[ring, block]:
        var h = item % nv
        var ring_row = Int(ring_row_ids[unsafe_offset=item // nv])
        return HeadRecords[ring, block](
            ring_records + (ring_row * nk + h // group) * ring_len * record_stride,
            record_stride,
            layout.delta_factor(h % group),
            layout.decay(h % group),
            Int(num_accepted[unsafe_offset=item // nv % batch_size]),
        )

    @always_inline
    def takes_part(item: Int) {imm} -> Bool:
        if not is_folded(num_accepted[unsafe_offset=item // nv % batch_size], ring_len):
            return False
        var row = row_ids[unsafe_offset=item // nv]
        var ring_row = ring_row_ids[unsafe_offset=item // nv]
        return row != PADDING and ring_row != PADDING

    def chunk(i: Int, next_chunk: Int, _scratch: P[F32]) {imm} -> None:
        var first = items * i // chunks
        var last = items * (i + 1) // chunks
        for item in range(first, last):
            if not takes_part(item):
                continue
            var next = item + 1 if item + 1 < last else items * next_chunk // chunks
            if next >= items or not takes_part(next):
                next = item
            records_of(next).expect(KD, VD)
            fold_head(state_of(item), KD, VD, records_of(item), state_of(next))

    run_chunks(chunk, chunks, 0)
