"""From the tensors of a graph op to a launch: specialised for the static dims, sized for the GPU.

Nothing is read from the device, so nothing is waited for. The shapes were checked before.
"""

from std.math import ceildiv
from extensibility import InputTensor, OutputTensor
from extensibility import _MutableInputTensor as MutableInputTensor
from layout import TensorLayout, TileTensor, row_major
from max.gpu.host import DeviceAttribute, DeviceContext
from .conv1d import TILE, gated_delta_conv1d_fwd_gpu
from .head import Head
from .recurrence import (
    gated_delta_recurrence_fwd_block_gpu,
    gated_delta_recurrence_fwd_gpu,
    gated_delta_recurrence_verify_ring_block_gpu,
    gated_delta_recurrence_verify_ring_gpu,
)
from .state_fold import Fold, gated_delta_state_fold_gpu
from ..checks import HeadGeometry
from ..cpu.vector import untracked

comptime CONV_THREADS = 128
comptime MAX_RING_LEN = 32
comptime MAX_GRID = 65535  # of a grid's second and third extents

comptime Vector = type_of(row_major(1))
comptime Matrix = type_of(row_major(1, 1))
comptime Cube = type_of(row_major(1, 1, 1))
comptime Pool = type_of(row_major(1, 1, 1, 1))
comptime Tile[dtype: DType, Layout: TensorLayout] = TileTensor[dtype, Layout, MutUntrackedOrigin]


def vector[dtype: DType](p: Pointer[Scalar[dtype], _], a: Int) -> Tile[dtype, Vector]:
    return Tile[dtype, Vector](untracked(p), row_major(a))


def matrix[dtype: DType](p: Pointer[Scalar[dtype], _], a: Int, b: Int) -> Tile[dtype, Matrix]:
    return Tile[dtype, Matrix](untracked(p), row_major(a, b))


def cube[dtype: DType](p: Pointer[Scalar[dtype], _], a: Int, b: Int, c: Int) -> Tile[dtype, Cube]:
    return Tile[dtype, Cube](untracked(p), row_major(a, b, c))


def pool[
    dtype: DType
](p: Pointer[Scalar[dtype], _], a: Int, b: Int, c: Int, d: Int) -> Tile[dtype, Pool]:
    return Tile[dtype, Pool](untracked(p), row_major(a, b, c, d))


def fail(op: StaticString, argument: StaticString, got: String, need: StaticString) raises:
    raise Error(op, ": ", argument, " ", got, " on a GPU; need ", need)


def conv1d_gpu[
    write_state: Bool, work_dtype: DType, state_dtype: DType
](
    op: StaticString,
    output: OutputTensor[dtype=work_dtype, rank=2, ...],
    qkv: InputTensor[dtype=work_dtype, rank=2, ...],
    weight: InputTensor[dtype=work_dtype, rank=2, ...],
    conv_state: MutableInputTensor[dtype=state_dtype, rank=3, ...],
    slot_idx: InputTensor[dtype=DType.uint32, rank=1, ...],
    offsets: InputTensor[dtype=DType.uint32, rank=1, ...],
    ctx: DeviceContext,
) raises:
    """Launches the convolution; needs the conv width as a static dim of the weight."""
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
        var x = matrix(qkv.unsafe_ptr(), tokens, channels)
        var w = matrix(weight.unsafe_ptr(), channels, WIDTH)
        var state = cube(conv_state.unsafe_ptr(), conv_state.dim_size(0), channels, WIDTH - 1)
        var slots = vector(slot_idx.unsafe_ptr(), rows)
        var row_offsets = vector(offsets.unsafe_ptr(), rows + 1)
        var out = matrix(output.unsafe_ptr(), tokens, channels)
        comptime kernel = gated_delta_conv1d_fwd_gpu[
            work_dtype,
            state_dtype,
            WIDTH,
            CONV_THREADS,
            write_state,
            Matrix,
            Matrix,
            Cube,
            Vector,
            Vector,
            Matrix,
            x.Engine,
        ]
        var blocks = ceildiv(channels, CONV_THREADS)
        # Tiles of a long row in parallel, while there are not blocks enough to fill the GPU.
        var tiles = min(ceildiv(tokens, TILE), max(1, 16 * processors(ctx) // (blocks * rows)))
        ctx.enqueue_function[kernel](
            Int32(rows),
            Int32(tokens),
            Int32(channels),
            x,
            w,
            state,
            slots,
            row_offsets,
            out,
            UInt32(channels),
            UInt32(1),
            UInt32(WIDTH),
            UInt32(1),
            UInt32(channels),
            UInt32(1),
            grid_dim=(blocks, rows, tiles),
            block_dim=CONV_THREADS,
        )


def processors(ctx: DeviceContext) raises -> Int:
    return ctx.get_attribute(DeviceAttribute.MULTIPROCESSOR_COUNT)


def zero_gpu[
    dtype: DType
](tensor: OutputTensor[dtype=dtype, rank=2, ...], ctx: DeviceContext) raises:
    """Fills a tensor with zeros."""
    if tensor.size() > 0:
        ctx.enqueue_memset(tensor.to_device_buffer(ctx), Scalar[dtype](0))


def is_wide[KD: Int, VD: Int](rows: Int, num_value_heads: Int, ctx: DeviceContext) raises -> Bool:
    """Wide blocks once they alone give every processor two; until then narrow ones, which give a
    small batch more blocks. Both give the same bits."""
    comptime H = Head[KD, VD]
    var fills = rows * num_value_heads * H.WIDE_SPLITS >= 2 * processors(ctx)
    comptime if H.ROWS_FIRST:
        return fills
    else:
        return fills or rows * H.NARROW_SPLITS > MAX_GRID


def is_head_dim(dim: Int) -> Bool:
    """Whether the kernels can be compiled for it; a symbolic dim is negative."""
    return dim >= 16 and dim <= 256 and dim % 8 == 0


def fail_ring_len(op: StaticString, ring_len: Int) raises:
    fail(
        op,
        "ring",
        String("has length ", ring_len, " (-1: symbolic)"),
        "a static one of 1 to 32: the kernel is compiled for it",
    )


def fail_head_dims(op: StaticString, KD: Int, VD: Int) raises:
    fail(
        op,
        "recurrent_state",
        String("has head dims ", KD, " x ", VD, " (-1: symbolic)"),
        "static multiples of 8 from 16 to 256: the kernel is compiled for them",
    )


def recurrence_gpu[
    block: Bool, work_dtype: DType, state_dtype: DType
](
    op: StaticString,
    geometry: HeadGeometry,
    recurrence_output: OutputTensor[dtype=work_dtype, rank=2, ...],
    qkv_conv_output: InputTensor[dtype=work_dtype, rank=2, ...],
    decay_per_token: InputTensor[dtype=work_dtype, rank=2, ...],
    beta_per_token: InputTensor[dtype=work_dtype, rank=2, ...],
    recurrent_state: MutableInputTensor[dtype=state_dtype, rank=4, ...],
    slot_idx: InputTensor[dtype=DType.uint32, rank=1, ...],
    input_row_offsets: InputTensor[dtype=DType.uint32, rank=1, ...],
    ctx: DeviceContext,
) raises:
    """Launches the plain recurrence; needs the head dims as static dims of the pool."""
    comptime StateLayout = type_of(recurrent_state.to_tile_tensor[DType.int64]()).LayoutType
    comptime KD = StateLayout.static_shape[2]
    comptime VD = StateLayout.static_shape[3]
    comptime if not is_head_dim(KD) or not is_head_dim(VD):
        fail_head_dims(op, KD, VD)
    else:
        var nv = geometry.num_value_heads
        var nk = geometry.num_key_heads
        var tokens = qkv_conv_output.dim_size(0)
        var rows = slot_idx.dim_size(0)
        if tokens == 0:
            return
        if rows == 0:
            zero_gpu(recurrence_output, ctx)
            return
        var out = matrix(recurrence_output.unsafe_ptr(), tokens, nv * VD)
        var qkv = matrix(qkv_conv_output.unsafe_ptr(), tokens, geometry.conv_dim())
        var decay = matrix(decay_per_token.unsafe_ptr(), tokens, nv)
        var beta = matrix(beta_per_token.unsafe_ptr(), tokens, nv)
        var state = pool(recurrent_state.unsafe_ptr(), recurrent_state.dim_size(0), nv, KD, VD)
        var slots = vector(slot_idx.unsafe_ptr(), rows)
        var offsets = vector(input_row_offsets.unsafe_ptr(), rows + 1)
        comptime H = Head[KD, VD]
        var wide = is_wide[KD, VD](rows, nv, ctx)
        comptime exact = gated_delta_recurrence_fwd_gpu[
            work_dtype,
            state_dtype,
            KD,
            VD,
            Matrix,
            Matrix,
            Matrix,
            Matrix,
            Pool,
            Vector,
            Vector,
            out.Engine,
        ]
        comptime blocked = gated_delta_recurrence_fwd_block_gpu[
            work_dtype,
            state_dtype,
            KD,
            VD,
            Matrix,
            Matrix,
            Matrix,
            Matrix,
            Pool,
            Vector,
            Vector,
            out.Engine,
        ]
        comptime kernel = blocked if block else exact
        ctx.enqueue_function[kernel](
            Int32(rows),
            Int32(nv),
            Int32(nk),
            Int32(nk * KD),
            out,
            state,
            slots,
            qkv,
            decay,
            beta,
            offsets,
            UInt32(geometry.conv_dim()),
            UInt32(1),
            UInt32(nv),
            UInt32(1),
            UInt32(nv * VD),
            UInt32(1),
            grid_dim=H.launch_grid(rows, nk, nv, wide),
            block_dim=32 * (H.WIDE if wide else H.NARROW),
        )


def verify_ring_gpu[
    block: Bool, work_dtype: DType, state_dtype: DType, ring_dtype: DType
](
    op: StaticString,
    geometry: HeadGeometry,
    recurrence_output: OutputTensor[dtype=work_dtype, rank=2, ...],
    qkv_conv_output: InputTensor[dtype=work_dtype, rank=2, ...],
    decay_per_token: InputTensor[dtype=work_dtype, rank=2, ...],
    beta_per_token: InputTensor[dtype=work_dtype, rank=2, ...],
    recurrent_state: MutableInputTensor[dtype=state_dtype, rank=4, ...],
    ring: MutableInputTensor[dtype=ring_dtype, rank=4, ...],
    slot_idx: InputTensor[dtype=DType.uint32, rank=1, ...],
    ring_slot_idx: InputTensor[dtype=DType.uint32, rank=1, ...],
    input_row_offsets: InputTensor[dtype=DType.uint32, rank=1, ...],
    ctx: DeviceContext,
) raises:
    """Launches the verify of a window with drafts; needs the head dims and the ring length as
    static dims of the pool and the ring."""
    comptime StateLayout = type_of(recurrent_state.to_tile_tensor[DType.int64]()).LayoutType
    comptime KD = StateLayout.static_shape[2]
    comptime VD = StateLayout.static_shape[3]
    comptime RING_LEN = type_of(ring.to_tile_tensor[DType.int64]()).LayoutType.static_shape[2]
    comptime if not is_head_dim(KD) or not is_head_dim(VD):
        fail_head_dims(op, KD, VD)
    elif RING_LEN < 1 or RING_LEN > MAX_RING_LEN:
        fail_ring_len(op, RING_LEN)
    else:
        var nv = geometry.num_value_heads
        var nk = geometry.num_key_heads
        var tokens = qkv_conv_output.dim_size(0)
        var rows = slot_idx.dim_size(0)
        if tokens == 0:
            return
        if rows == 0:
            zero_gpu(recurrence_output, ctx)
            return
        var out = matrix(recurrence_output.unsafe_ptr(), tokens, nv * VD)
        var qkv = matrix(qkv_conv_output.unsafe_ptr(), tokens, geometry.conv_dim())
        var decay = matrix(decay_per_token.unsafe_ptr(), tokens, nv)
        var beta = matrix(beta_per_token.unsafe_ptr(), tokens, nv)
        var state = pool(recurrent_state.unsafe_ptr(), recurrent_state.dim_size(0), nv, KD, VD)
        var slots = vector(slot_idx.unsafe_ptr(), rows)
        var offsets = vector(input_row_offsets.unsafe_ptr(), rows + 1)
        comptime H = Head[KD, VD]
        var wide = is_wide[KD, VD](rows, nv, ctx)
        var ring_tile = pool(ring.unsafe_ptr(), ring.dim_size(0), nk, RING_LEN, ring.dim_size(3))
        var ring_slots = vector(ring_slot_idx.unsafe_ptr(), rows)
        comptime exact = gated_delta_recurrence_verify_ring_gpu[
            work_dtype,
            state_dtype,
            ring_dtype,
            KD,
            VD,
            RING_LEN,
            Matrix,
            Matrix,
            Matrix,
            Matrix,
            Pool,
            Vector,
            Vector,
            Pool,
            Vector,
            out.Engine,
        ]
        comptime blocked = gated_delta_recurrence_verify_ring_block_gpu[
            work_dtype,
            state_dtype,
            ring_dtype,
            KD,
            VD,
            RING_LEN,
            Matrix,
            Matrix,
            Matrix,
            Matrix,
            Pool,
            Vector,
            Vector,
            Pool,
            Vector,
            out.Engine,
        ]
        comptime kernel = blocked if block else exact
        ctx.enqueue_function[kernel](
            Int32(rows),
            Int32(nv),
            Int32(nk),
            Int32(nk * KD),
            out,
            state,
            slots,
            qkv,
            decay,
            beta,
            offsets,
            ring_tile,
            ring_slots,
            Int32(ring.dim_size(3)),
            UInt32(geometry.conv_dim()),
            UInt32(1),
            UInt32(nv),
            UInt32(1),
            UInt32(nv * VD),
            UInt32(1),
            grid_dim=H.launch_grid(rows, nk, nv, wide),
            block_dim=32 * (H.WIDE if wide else H.NARROW),
        )


def fold_gpu[
    state_dtype: DType, ring_dtype: DType
](
    op: StaticString,
    geometry: HeadGeometry,
    recurrent_state: MutableInputTensor[dtype=state_dtype, rank=4, ...],
    ring: MutableInputTensor[dtype=ring_dtype, rank=4, ...],
    row_ids: InputTensor[dtype=DType.uint32, rank=2, ...],
    ring_row_ids: InputTensor[dtype=DType.uint32, rank=2, ...],
    num_accepted: InputTensor[dtype=DType.uint32, rank=1, ...],
    ctx: DeviceContext,
) raises:
    """Launches the fold of every layer; needs the same static dims as the verify."""
    comptime StateLayout = type_of(recurrent_state.to_tile_tensor[DType.int64]()).LayoutType
    comptime KD = StateLayout.static_shape[2]
    comptime VD = StateLayout.static_shape[3]
    comptime RING_LEN = type_of(ring.to_tile_tensor[DType.int64]()).LayoutType.static_shape[2]
    comptime if not is_head_dim(KD) or not is_head_dim(VD):
        fail_head_dims(op, KD, VD)
    elif RING_LEN < 1 or RING_LEN > MAX_RING_LEN:
        fail_ring_len(op, RING_LEN)
    else:
        comptime F = Fold[state_dtype, KD, VD]
        var nv = geometry.num_value_heads
        var nk = geometry.num_key_heads
        var layers = row_ids.dim_size(0)
        var rows = row_ids.dim_size(1)
        if layers * rows == 0:
            return
        var state = pool(recurrent_state.unsafe_ptr(), recurrent_state.dim_size(0), nv, KD, VD)
        var ids = matrix(row_ids.unsafe_ptr(), layers, rows)
        var ring_tile = pool(ring.unsafe_ptr(), ring.dim_size(0), nk, RING_LEN, ring.dim_size(3))
        var ring_ids = matrix(ring_row_ids.unsafe_ptr(), layers, rows)
        var accepted = vector(num_accepted.unsafe_ptr(), rows)
        comptime kernel = gated_delta_state_fold_gpu[
            state_dtype,
            ring_dtype,
            KD,
            VD,
            RING_LEN,
            Pool,
            Matrix,
            Pool,
            Matrix,
            Vector,
            state.Engine,
        ]
        ctx.enqueue_function[kernel](
            Int32(rows),
            Int32(layers),
            Int32(nv),
            Int32(nk),
            state,
            ids,
            ring_tile,
            ring_ids,
            Int32(ring.dim_size(3)),
            accepted,
            grid_dim=(layers * rows, nv // nk * F.PARTS, nk),
            block_dim=F.THREADS,
        )
