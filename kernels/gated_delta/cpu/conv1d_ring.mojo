"""The conv windows of a verify on the CPU: inputs recorded in a ring, folded once accepted.

    conv_ring[ring row, position in the row, channel] = the raw input

A conv window is nothing but the last width - 1 inputs, so the fold only shifts: no arithmetic, and
no rounding but that to the dtype of conv_state, which the plain conv does too. A ring of the dtype
of conv_state is therefore as exact as a float32 one.

A unit is a block of channels of one row, or of one row of one layer in the fold.
"""

from ..checks import PADDING
from .schedule import chunk_count, run_chunks
from .vector import copy, fill_zero, P

# Channels of a unit: 2 KB of each token.
comptime BLOCK = 512


@always_inline
def shift_in[
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
    """Shifts inputs[count, stride] into channels [begin, end) of window, [channel, history]."""
    var kept = max(history - count, 0)
    for c in range(begin, end):
        var first = c * history
        for j in range(kept):
            window[unsafe_offset=first + j] = window[unsafe_offset=first + j + count]
        for j in range(kept, history):
            window[unsafe_offset=first + j] = Scalar[state](
                Float32(inputs[unsafe_offset=(count - history + j) * stride + c])
            )


@always_inline
def run_units[Body: def(Int, Int, Int) -> None](body: Body, rows: Int, conv_dim: Int, cost: Int):
    """Runs body(row, first channel, end) for each block of channels of each row."""
    var blocks = (conv_dim + BLOCK - 1) // BLOCK
    var units = rows * blocks
    if units == 0:
        return
    var chunks = chunk_count(cost, units)

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
            shift_in(window, inputs, conv_dim, T, history, begin, end)
        else:
            var records = conv_ring + Int(ring_slot_idx[unsafe_offset=b]) * ring_len * conv_dim
            for t in range(T):
                copy(
                    records + t * conv_dim + begin,
                    inputs + t * conv_dim + begin,
                    end - begin,
                )

    run_units(unit, batch_size, conv_dim, num_tokens * conv_dim)


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
        var accepted = Int(num_accepted[unsafe_offset=item % batch_size])
        var row = row_ids[unsafe_offset=item]
        var ring_row = ring_row_ids[unsafe_offset=item]
        if accepted == 0 or accepted > ring_len or row == PADDING or ring_row == PADDING:
            return
        shift_in(
            conv_state + Int(row) * conv_dim * history,
            conv_ring + Int(ring_row) * ring_len * conv_dim,
            conv_dim,
            accepted,
            history,
            begin,
            end,
        )

    # Each element of a window is moved alone, at some eight multiply-adds' time.
    run_units(unit, layers * batch_size, conv_dim, 8 * layers * batch_size * conv_dim * history)
