"""The conv windows of a verify on the CPU: inputs recorded in a ring, folded once accepted.

    conv_ring[ring row, position in the row, channel] = the raw input

A conv window is nothing but the last width - 1 inputs, so the fold only shifts: no arithmetic, and
no rounding but that to the dtype of conv_state, which the plain conv does too. A ring of the dtype
of conv_state is therefore as exact as a float32 one.

A unit is a block of channels of one row, or of one row of one layer in the fold.
"""

from std.sys import size_of

from ..checks import MAX_CONV_WIDTH, MIN_CONV_WIDTH, PADDING
from ..ring import is_folded
from .conv1d import BLOCK
from .schedule import chunk_count, run_chunks
from .turn import shift_in, turn_in, turn_out
from .vector import copy, fill_zero, P, W


@always_inline
def move_on[
    source: DType, state: DType
](
    window: P[state],
    inputs: P[source],
    stride: Int,
    count: Int,
    history: Int,
    begin: Int,
    end: Int,
):
    """Shifts inputs [count, stride] into channels [begin, end) of window, [channel, history]."""

    @always_inline
    def vector[HISTORY: Int, partial: Bool](c: Int, n: Int) {imm}:
        var v = turn_in[HISTORY, partial](window + c * HISTORY, n)
        shift_in[partial=partial](v, inputs + c, stride, count, n)
        turn_out[HISTORY, partial](window + c * HISTORY, v, n)

    comptime for HISTORY in range(MIN_CONV_WIDTH - 1, MAX_CONV_WIDTH):
        if history == HISTORY:
            var c = begin
            while c + W <= end:
                vector[HISTORY, False](c, W)
                c += W
            if c < end:
                vector[HISTORY, True](c, end - c)


@always_inline
def run_units[Body: def(Int, Int, Int) -> None](body: Body, rows: Int, conv_dim: Int, bytes: Int):
    """Runs body(row, first channel, end) for each block of channels of each row."""
    var blocks = (conv_dim + BLOCK - 1) // BLOCK
    var units = rows * blocks
    if units == 0:
        return
    # A core moves some 20 bytes in the time of 12 multiply-adds.
    var chunks = chunk_count(bytes // 2, units)

    def chunk(i: Int) {imm} -> None:
        for unit in range(units * i // chunks, units * (i + 1) // chunks):
            var begin = unit % blocks * BLOCK
            body(unit // blocks, begin, min(begin + BLOCK, conv_dim))

    run_chunks(chunk, chunks)


def record_inputs[
    work: DType, state: DType, ring: DType
](
    out_: P[work],
    qkv: P[work],
    conv_state: P[state],
    conv_ring: P[ring],
    slot_idx: P[DType.uint32],
    ring_slot_idx: P[DType.uint32],
    offsets: P[DType.uint32],
    batch_size: Int,
    num_tokens: Int,
    conv_dim: Int,
    history: Int,
    ring_len: Int,
):
    """What a verify leaves behind once its conv has run without writing windows.

    A row that fits the ring records its inputs; a longer one shifts them into its window. Outputs
    of a padding row of the ring are made zero.
    """

    def unit(b: Int, begin: Int, end: Int) {imm} -> None:
        var start = Int(offsets[unsafe_offset=b])
        var T = Int(offsets[unsafe_offset=b + 1]) - start
        if T == 0 or slot_idx[unsafe_offset=b] == PADDING:
            return
        var inputs = qkv + start * conv_dim
        if ring_slot_idx[unsafe_offset=b] == PADDING:
            for t in range(start, start + T):
                fill_zero(out_ + t * conv_dim + begin, end - begin)
        elif T > ring_len:
            var window = conv_state + Int(slot_idx[unsafe_offset=b]) * conv_dim * history
            move_on(window, inputs, conv_dim, T, history, begin, end)
        else:
            var records = conv_ring + Int(ring_slot_idx[unsafe_offset=b]) * ring_len * conv_dim
            for t in range(T):
                copy(
                    records + t * conv_dim + begin,
                    inputs + t * conv_dim + begin,
                    end - begin,
                )

    comptime BYTES = size_of[Scalar[work]]() + size_of[Scalar[ring]]()
    run_units(unit, batch_size, conv_dim, num_tokens * conv_dim * BYTES)


def conv_fold[
    state: DType, ring: DType
](
    conv_state: P[state],
    conv_ring: P[ring],
    row_ids: P[DType.uint32],
    ring_row_ids: P[DType.uint32],
    num_accepted: P[DType.uint32],
    layers: Int,
    batch_size: Int,
    conv_dim: Int,
    history: Int,
    ring_len: Int,
):
    """Shifts the first num_accepted[b] recorded inputs of row b into its window, in every layer."""

    def unit(item: Int, begin: Int, end: Int) {imm} -> None:
        var accepted = num_accepted[unsafe_offset=item % batch_size]
        var row = row_ids[unsafe_offset=item]
        var ring_row = ring_row_ids[unsafe_offset=item]
        if not is_folded(accepted, ring_len) or row == PADDING or ring_row == PADDING:
            return
        move_on(
            conv_state + Int(row) * conv_dim * history,
            conv_ring + Int(ring_row) * ring_len * conv_dim,
            conv_dim,
            Int(accepted),
            history,
            begin,
            end,
        )

    # A window is read and written, and at most as much read from the ring.
    comptime BYTES = 2 * size_of[Scalar[state]]() + size_of[Scalar[ring]]()
    run_units(unit, layers * batch_size, conv_dim, layers * batch_size * conv_dim * history * BYTES)
