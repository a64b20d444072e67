"""The conv windows of a verify on the GPU: inputs recorded in a ring, folded once accepted.

A conv window is nothing but the last width - 1 inputs, so both kernels only copy; a thread is one
channel of one row (and layer). The verify is the plain convolution, by its own function, followed
in the same launch by the copies: a thread copies what it has read, so no block waits for another.
"""

from std.math import ceildiv
from extensibility import InputTensor, OutputTensor
from extensibility import _MutableInputTensor as MutableInputTensor
from layout import TensorEngine, TensorLayout, TileTensor
from max.gpu import block_idx, grid_dim, thread_idx
from max.gpu.host import DeviceContext
from .common import GlobalPtr, wide
from .conv1d import TILE, gated_delta_conv1d_fwd_gpu
from .launch import (
    CONV_THREADS,
    Cube,
    Matrix,
    Vector,
    cube,
    fail,
    matrix,
    processors,
    vector,
    zero_gpu,
)
from ..ring import is_folded


@always_inline
def shift_in[
    source: DType, state: DType
](
    window: GlobalPtr[state],
    inputs: GlobalPtr[source],
    stride: UInt32,
    count: UInt32,
    history: UInt32,
):
    """Shifts `count` inputs of one channel into its window of `history`, oldest first."""
    for j in range(history):  # ascending: an entry moves down before it is replaced
        if count + j < history:
            window[unsafe_offset=j] = window[unsafe_offset=count + j]
        else:
            window[unsafe_offset=j] = Scalar[state](
                Float32(inputs[unsafe_offset=wide(count + j - history, stride)])
            )


def gated_delta_conv1d_verify_ring_gpu[
    work_dtype: DType,
    state_dtype: DType,
    ring_dtype: DType,
    KERNEL_SIZE: Int,
    CONV1D_BLOCK_DIM: Int,
    qkv_input_ragged_LT: TensorLayout,
    conv_weight_LT: TensorLayout,
    conv_state_LT: TensorLayout,
    slot_idx_LT: TensorLayout,
    input_row_offsets_LT: TensorLayout,
    conv_output_ragged_LT: TensorLayout,
    conv_ring_LT: TensorLayout,
    ring_slot_idx_LT: TensorLayout,
    Engine: TensorEngine,
](
    batch_size: Int32,
    total_seq_len: Int32,
    conv_dim: Int32,
    ring_len: Int32,
    qkv_input_ragged: TileTensor[
        work_dtype, qkv_input_ragged_LT, MutUntrackedOrigin, Engine=Engine
    ],
    conv_weight: TileTensor[work_dtype, conv_weight_LT, MutUntrackedOrigin, Engine=Engine],
    conv_state: TileTensor[state_dtype, conv_state_LT, MutUntrackedOrigin, Engine=Engine],
    slot_idx: TileTensor[DType.uint32, slot_idx_LT, MutUntrackedOrigin, Engine=Engine],
    input_row_offsets: TileTensor[
        DType.uint32, input_row_offsets_LT, MutUntrackedOrigin, Engine=Engine
    ],
    conv_output_ragged: TileTensor[
        work_dtype, conv_output_ragged_LT, MutUntrackedOrigin, Engine=Engine
    ],
    conv_ring: TileTensor[ring_dtype, conv_ring_LT, MutUntrackedOrigin, Engine=Engine],
    ring_slot_idx: TileTensor[DType.uint32, ring_slot_idx_LT, MutUntrackedOrigin, Engine=Engine],
):
    """The convolution of dense operands, then per row: its inputs to the ring, or, if it is longer
    than the ring, its last inputs to its window.

    Grid (ceil(conv_dim / CONV1D_BLOCK_DIM), batch_size, tiles), block CONV1D_BLOCK_DIM, as for
    gated_delta_conv1d_fwd_gpu. A row whose slot or ring slot is outside its pool touches neither;
    outputs of a row that has nowhere to record are zero.
    """
    var channels = UInt32(conv_dim)
    gated_delta_conv1d_fwd_gpu[
        work_dtype,
        state_dtype,
        KERNEL_SIZE,
        CONV1D_BLOCK_DIM,
        False,
        qkv_input_ragged_LT,
        conv_weight_LT,
        conv_state_LT,
        slot_idx_LT,
        input_row_offsets_LT,
        conv_output_ragged_LT,
        Engine,
    ](
        batch_size,
        total_seq_len,
        conv_dim,
        qkv_input_ragged,
        conv_weight,
        conv_state,
        slot_idx,
        input_row_offsets,
        conv_output_ragged,
        channels,
        1,
        UInt32(KERNEL_SIZE),
        1,
        channels,
        1,
    )
    var c = UInt32(block_idx.x) * UInt32(CONV1D_BLOCK_DIM) + UInt32(thread_idx.x)
    if c >= channels:
        return
    var row = UInt32(block_idx.y)
    var first = input_row_offsets.ptr[unsafe_offset=row]
    var last = min(input_row_offsets.ptr[unsafe_offset=row + 1], UInt32(total_seq_len))
    var slot = slot_idx.ptr[unsafe_offset=row]
    if first >= last or slot >= UInt32(conv_state.layout.shape[0]().value()):
        return
    var length = last - first
    var ring_slot = ring_slot_idx.ptr[unsafe_offset=row]
    var takes_part = ring_slot < UInt32(conv_ring.layout.shape[0]().value())
    var inputs = qkv_input_ragged.ptr + wide(first, channels) + UInt64(c)
    if takes_part and length > UInt32(ring_len):
        # The block of the first tile is the only one that reads the window.
        if block_idx.z == 0:
            var history = UInt32(KERNEL_SIZE - 1)
            var window = conv_state.ptr + (wide(slot, channels) + UInt64(c)) * UInt64(history)
            shift_in(window, inputs, channels, length, history)
        return
    var out = conv_output_ragged.ptr + wide(first, channels) + UInt64(c)
    # Each block copies, or zeroes, the tokens of the tiles that it has convolved.
    var begin = UInt32(block_idx.z) * UInt32(TILE)
    while begin < length:
        for t in range(begin, min(begin + UInt32(TILE), length)):
            if takes_part:
                var place = wide(ring_slot, UInt32(ring_len)) + UInt64(t)
                conv_ring.ptr[unsafe_offset=place * UInt64(channels) + UInt64(c)] = Scalar[
                    ring_dtype
                ](Float32(inputs[unsafe_offset=wide(t, channels)]))
            else:
                out[unsafe_offset=wide(t, channels)] = 0
        begin += UInt32(grid_dim.z) * UInt32(TILE)


def gated_delta_conv1d_fold_gpu[
    state_dtype: DType,
    ring_dtype: DType,
    CONV1D_BLOCK_DIM: Int,
    conv_state_LT: TensorLayout,
    row_ids_LT: TensorLayout,
    conv_ring_LT: TensorLayout,
    ring_row_ids_LT: TensorLayout,
    num_accepted_LT: TensorLayout,
    Engine: TensorEngine,
](
    batch_size: Int32,
    conv_dim: Int32,
    history: Int32,
    ring_len: Int32,
    conv_state: TileTensor[state_dtype, conv_state_LT, MutUntrackedOrigin, Engine=Engine],
    row_ids: TileTensor[DType.uint32, row_ids_LT, MutUntrackedOrigin, Engine=Engine],
    conv_ring: TileTensor[ring_dtype, conv_ring_LT, MutUntrackedOrigin, Engine=Engine],
    ring_row_ids: TileTensor[DType.uint32, ring_row_ids_LT, MutUntrackedOrigin, Engine=Engine],
    num_accepted: TileTensor[DType.uint32, num_accepted_LT, MutUntrackedOrigin, Engine=Engine],
):
    """Shifts the accepted inputs of every row and layer into its window.

    Grid (ceil(conv_dim / CONV1D_BLOCK_DIM), batch_size, layers), block CONV1D_BLOCK_DIM.
    """
    var channels = UInt32(conv_dim)
    var c = UInt32(block_idx.x) * UInt32(CONV1D_BLOCK_DIM) + UInt32(thread_idx.x)
    var accepted = num_accepted.ptr[unsafe_offset=UInt32(block_idx.y)]
    if c >= channels or not is_folded(accepted, Int(ring_len)):
        return
    var entry = wide(UInt32(block_idx.z), UInt32(batch_size)) + UInt64(block_idx.y)
    var row = row_ids.ptr[unsafe_offset=entry]
    var ring_row = ring_row_ids.ptr[unsafe_offset=entry]
    if row >= UInt32(conv_state.layout.shape[0]().value()):
        return
    if ring_row >= UInt32(conv_ring.layout.shape[0]().value()):
        return
    shift_in(
        conv_state.ptr + (wide(row, channels) + UInt64(c)) * UInt64(history),
        conv_ring.ptr + wide(ring_row, UInt32(ring_len)) * UInt64(channels) + UInt64(c),
        channels,
        accepted,
        UInt32(history),
    )


def conv1d_verify_ring_gpu[
    work_dtype: DType, state_dtype: DType, ring_dtype: DType
](
    op: StaticString,
    output: OutputTensor[dtype=work_dtype, rank=2, ...],
    qkv: InputTensor[dtype=work_dtype, rank=2, ...],
    weight: InputTensor[dtype=work_dtype, rank=2, ...],
    conv_state: MutableInputTensor[dtype=state_dtype, rank=3, ...],
    conv_ring: MutableInputTensor[dtype=ring_dtype, rank=3, ...],
    slot_idx: InputTensor[dtype=DType.uint32, rank=1, ...],
    ring_slot_idx: InputTensor[dtype=DType.uint32, rank=1, ...],
    offsets: InputTensor[dtype=DType.uint32, rank=1, ...],
    ctx: DeviceContext,
) raises:
    """Launches the conv of a verify; needs the conv width as a static dim of the weight."""
    comptime WIDTH = type_of(weight.to_tile_tensor[DType.int64]()).LayoutType.static_shape[1]
    comptime if WIDTH < 0:
        fail(
            op, "conv_weight", "has a symbolic width", "a static one: the kernel is compiled for it"
        )
    else:
        var tokens = qkv.dim_size(0)
        var channels = qkv.dim_size(1)
        var rows = slot_idx.dim_size(0)
        if tokens == 0 or channels == 0:
            return
        if rows == 0:
            zero_gpu(output, ctx)
            return
        var ring_len = conv_ring.dim_size(1)
        var x = matrix(qkv.unsafe_ptr(), tokens, channels)
        var w = matrix(weight.unsafe_ptr(), channels, WIDTH)
        var state = cube(conv_state.unsafe_ptr(), conv_state.dim_size(0), channels, WIDTH - 1)
        var ring = cube(conv_ring.unsafe_ptr(), conv_ring.dim_size(0), ring_len, channels)
        var slots = vector(slot_idx.unsafe_ptr(), rows)
        var ring_slots = vector(ring_slot_idx.unsafe_ptr(), rows)
        var row_offsets = vector(offsets.unsafe_ptr(), rows + 1)
        var out = matrix(output.unsafe_ptr(), tokens, channels)
        comptime kernel = gated_delta_conv1d_verify_ring_gpu[
            work_dtype,
            state_dtype,
            ring_dtype,
            WIDTH,
            CONV_THREADS,
            Matrix,
            Matrix,
            Cube,
            Vector,
            Vector,
            Matrix,
            Cube,
            Vector,
            x.Engine,
        ]
        var blocks = ceildiv(channels, CONV_THREADS)
        var tiles = min(ceildiv(tokens, TILE), max(1, 16 * processors(ctx) // (blocks * rows)))
        ctx.enqueue_function[kernel](
            Int32(rows),
            Int32(tokens),
            Int32(channels),
            Int32(ring_len),
            x,
            w,
            state,
            slots,
            row_offsets,
            out,
            ring,
            ring_slots,
            grid_dim=(blocks, rows, tiles),
            block_dim=CONV_THREADS,
        )


def conv1d_fold_gpu[
    state_dtype: DType, ring_dtype: DType
](
    conv_state: MutableInputTensor[dtype=state_dtype, rank=3, ...],
    conv_ring: MutableInputTensor[dtype=ring_dtype, rank=3, ...],
    row_ids: InputTensor[dtype=DType.uint32, rank=2, ...],
    ring_row_ids: InputTensor[dtype=DType.uint32, rank=2, ...],
    num_accepted: InputTensor[dtype=DType.uint32, rank=1, ...],
    ctx: DeviceContext,
) raises:
    """Launches the fold of the windows of every layer; any dims may be symbolic."""
    var layers = row_ids.dim_size(0)
    var rows = row_ids.dim_size(1)
    var channels = conv_state.dim_size(1)
    var history = conv_state.dim_size(2)
    var ring_len = conv_ring.dim_size(1)
    if layers * rows * channels == 0:
        return
    var state = cube(conv_state.unsafe_ptr(), conv_state.dim_size(0), channels, history)
    var ids = matrix(row_ids.unsafe_ptr(), layers, rows)
    var ring = cube(conv_ring.unsafe_ptr(), conv_ring.dim_size(0), ring_len, channels)
    var ring_ids = matrix(ring_row_ids.unsafe_ptr(), layers, rows)
    var accepted = vector(num_accepted.unsafe_ptr(), rows)
    comptime kernel = gated_delta_conv1d_fold_gpu[
        state_dtype,
        ring_dtype,
        CONV_THREADS,
        Cube,
        Matrix,
        Cube,
        Matrix,
        Vector,
        state.Engine,
    ]
    ctx.enqueue_function[kernel](
        Int32(rows),
        Int32(channels),
        Int32(history),
        Int32(ring_len),
        state,
        ids,
        ring,
        ring_ids,
        accepted,
        grid_dim=(ceildiv(channels, CONV_THREADS), rows, layers),
        block_dim=CONV_THREADS,
    )
