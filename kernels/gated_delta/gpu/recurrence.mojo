"""The plain recurrence and the verify.

Grid (group, num_key_heads, batch_size * splits), or with the extents in reverse for large heads
(Head.launch_grid); block 32 * NARROW threads with splits = NARROW_SPLITS, or 32 * WIDE threads with
WIDE_SPLITS (head.mojo says what these are, and why). At 128 x 128: 64 threads and 4 blocks a head,
or 256 threads and 1 block. Blocks of one key head are neighbours, so that its q and k come from the
cache.

A block loads its columns of the state into registers, runs the row's tokens (step.mojo) and writes
the state back, unless the row left records instead.
"""

from std.memory import AddressSpace, stack_allocation
from std.utils.index import StaticTuple
from layout import TensorEngine, TensorLayout, TileTensor
from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, thread_idx
from .block import Block
from .common import F32, GlobalPtr, opaque, wide
from .head import Head
from .records import Outputs, Ring
from .step import Step
from .tokens import CHUNK, Source


@always_inline
def recurrence[
    block: Bool,
    state_dtype: DType,
    ring_dtype: DType,
    KD: Int,
    VD: Int,
    RING_LEN: Int,
](
    batch_size: UInt32,
    num_value_heads: UInt32,
    num_tokens: UInt32,
    num_slots: UInt32,
    state: GlobalPtr[state_dtype],
    slot_idx: GlobalPtr[DType.uint32],
    row_offsets: GlobalPtr[DType.uint32],
    source: Source[KD, VD],
    outputs: Outputs,
    ring: Ring[KD, VD, ring_dtype, RING_LEN],
):
    """All kernels. With a ring, a row that fits it leaves records and its state alone."""
    comptime WORDS = Block[KD, VD].WORDS if block else Step[KD, VD].WORDS
    comptime TOKENS = Block[KD, VD].TOKENS if block else Step[KD, VD].TOKENS
    var shared = stack_allocation[
        TOKENS * WORDS, F32, address_space=AddressSpace.SHARED, alignment=16
    ]()
    var head = Head[KD, VD](UInt32(thread_idx.x))
    var row = head.batch_row
    var first = row_offsets[unsafe_offset=row]
    var last = min(row_offsets[unsafe_offset=row + 1], num_tokens)
    var length = last - first
    var slot = slot_idx[unsafe_offset=row]
    var known = (slot < num_slots) & ring.has_place(row)
    # Tokens before the first row and after the last belong to none.
    var none_until = first if row == 0 else 0
    var none_from = last if row == batch_size - 1 else num_tokens
    if first >= last or not known or none_until > 0 or none_from < num_tokens:
        outputs.zero(head, 0, none_until)
        outputs.zero(head, none_from, num_tokens)
        if first >= last:
            return
        if not known:
            outputs.zero(head, first, last)
            return

    source.fetch[WORDS](head, first, min(length, UInt32(CHUNK)), shared)
    head.clear_padding[WORDS, TOKENS](shared)
    var tile = state + (wide(slot, num_value_heads) + UInt64(head.value_head)) * UInt64(KD * VD)
    var s = head.load(tile)
    var records = ring.records(head, length)
    # Lanes of a reduction's first operand write delta factors, those of the second outputs.
    var writes = head.owns_result()
    var sink = outputs.sink[ring_dtype](head, first)
    comptime if RING_LEN > 0:
        if not head.second:
            sink = records.sink(head)
    writes &= head.second | records.active
    comptime if block:
        Block[KD, VD].run(head, source, ring, records, sink, writes, first, length, shared, s)
    else:
        Step[KD, VD].run(head, source, ring, records, sink, writes, first, length, shared, s)
    if not records.active:
        comptime if RING_LEN > 0:  # rare, so the address is not kept
            var again = head.again()
            slot = slot_idx[unsafe_offset=opaque(again.batch_row)]
            tile = state + (wide(slot, num_value_heads) + UInt64(head.value_head)) * UInt64(KD * VD)
            again.store(tile, s)
        else:
            head.store(tile, s)


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](
        Int32(Head[KEY_HEAD_DIM, VALUE_HEAD_DIM].THREADS)
    ),
    `nvvm.minctasm`=SIMDLength(Head[KEY_HEAD_DIM, VALUE_HEAD_DIM].MIN_BLOCKS),
)
def gated_delta_recurrence_fwd_gpu[
    work_dtype: DType,
    state_dtype: DType,
    KEY_HEAD_DIM: Int,
    VALUE_HEAD_DIM: Int,
    recurrence_output_LT: TensorLayout,
    qkv_conv_output_LT: TensorLayout,
    decay_per_token_LT: TensorLayout,
    beta_per_token_LT: TensorLayout,
    recurrent_state_LT: TensorLayout,
    slot_idx_LT: TensorLayout,
    input_row_offsets_LT: TensorLayout,
    Engine: TensorEngine,
](
    batch_size: Int32,
    num_value_heads: Int32,
    num_key_heads: Int32,
    key_dim: Int32,
    recurrence_output: TileTensor[
        work_dtype, recurrence_output_LT, MutUntrackedOrigin, Engine=Engine
    ],
    recurrent_state: TileTensor[state_dtype, recurrent_state_LT, MutUntrackedOrigin, Engine=Engine],
    slot_idx: TileTensor[DType.uint32, slot_idx_LT, MutUntrackedOrigin, Engine=Engine],
    qkv_conv_output: TileTensor[work_dtype, qkv_conv_output_LT, MutUntrackedOrigin, Engine=Engine],
    decay_per_token: TileTensor[work_dtype, decay_per_token_LT, MutUntrackedOrigin, Engine=Engine],
    beta_per_token: TileTensor[work_dtype, beta_per_token_LT, MutUntrackedOrigin, Engine=Engine],
    input_row_offsets: TileTensor[
        DType.uint32, input_row_offsets_LT, MutUntrackedOrigin, Engine=Engine
    ],
    qkv_conv_output_seqlen_stride: UInt32,
    qkv_conv_output_channel_stride: UInt32,
    per_token_seqlen_stride: UInt32,
    per_token_head_stride: UInt32,
    recurrence_output_seqlen_stride: UInt32,
    recurrence_output_valuedim_stride: UInt32,
):
    """The plain recurrence of every (row, value head); writes the final state to the row's slot."""
    comptime assert work_dtype == F32, "the work dtype is float32"
    recurrence[False](
        UInt32(batch_size),
        UInt32(num_value_heads),
        UInt32(recurrence_output.layout.shape[0]().value()),
        UInt32(recurrent_state.layout.shape[0]().value()),
        recurrent_state.ptr,
        slot_idx.ptr,
        input_row_offsets.ptr,
        Source[KEY_HEAD_DIM, VALUE_HEAD_DIM](
            qkv_conv_output.ptr.unsafe_bitcast[Float32](),
            decay_per_token.ptr.unsafe_bitcast[Float32](),
            beta_per_token.ptr.unsafe_bitcast[Float32](),
            UInt32(key_dim),
            qkv_conv_output_seqlen_stride,
            qkv_conv_output_channel_stride,
            per_token_seqlen_stride,
            per_token_head_stride,
        ),
        Outputs(
            recurrence_output.ptr.unsafe_bitcast[Float32](),
            recurrence_output_seqlen_stride,
            recurrence_output_valuedim_stride,
        ),
        Ring[KEY_HEAD_DIM, VALUE_HEAD_DIM, F32, 0](
            recurrence_output.ptr.unsafe_bitcast[Float32](), slot_idx.ptr, 0, 0, 0
        ),
    )


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](
        Int32(Head[KEY_HEAD_DIM, VALUE_HEAD_DIM].THREADS)
    ),
    `nvvm.minctasm`=SIMDLength(Head[KEY_HEAD_DIM, VALUE_HEAD_DIM].MIN_BLOCKS),
)
def gated_delta_recurrence_verify_ring_gpu[
    work_dtype: DType,
    state_dtype: DType,
    ring_dtype: DType,
    KEY_HEAD_DIM: Int,
    VALUE_HEAD_DIM: Int,
    RING_LEN: Int,
    recurrence_output_LT: TensorLayout,
    qkv_conv_output_LT: TensorLayout,
    decay_per_token_LT: TensorLayout,
    beta_per_token_LT: TensorLayout,
    recurrent_state_LT: TensorLayout,
    slot_idx_LT: TensorLayout,
    input_row_offsets_LT: TensorLayout,
    ring_LT: TensorLayout,
    ring_slot_idx_LT: TensorLayout,
    Engine: TensorEngine,
](
    batch_size: Int32,
    num_value_heads: Int32,
    num_key_heads: Int32,
    key_dim: Int32,
    recurrence_output: TileTensor[
        work_dtype, recurrence_output_LT, MutUntrackedOrigin, Engine=Engine
    ],
    recurrent_state: TileTensor[state_dtype, recurrent_state_LT, MutUntrackedOrigin, Engine=Engine],
    slot_idx: TileTensor[DType.uint32, slot_idx_LT, MutUntrackedOrigin, Engine=Engine],
    qkv_conv_output: TileTensor[work_dtype, qkv_conv_output_LT, MutUntrackedOrigin, Engine=Engine],
    decay_per_token: TileTensor[work_dtype, decay_per_token_LT, MutUntrackedOrigin, Engine=Engine],
    beta_per_token: TileTensor[work_dtype, beta_per_token_LT, MutUntrackedOrigin, Engine=Engine],
    input_row_offsets: TileTensor[
        DType.uint32, input_row_offsets_LT, MutUntrackedOrigin, Engine=Engine
    ],
    ring: TileTensor[ring_dtype, ring_LT, MutUntrackedOrigin, Engine=Engine],
    ring_slot_idx: TileTensor[DType.uint32, ring_slot_idx_LT, MutUntrackedOrigin, Engine=Engine],
    ring_record_stride: Int32,
    qkv_conv_output_seqlen_stride: UInt32,
    qkv_conv_output_channel_stride: UInt32,
    per_token_seqlen_stride: UInt32,
    per_token_head_stride: UInt32,
    recurrence_output_seqlen_stride: UInt32,
    recurrence_output_valuedim_stride: UInt32,
):
    """As the plain recurrence, but a row of at most RING_LEN tokens writes one record per token to
    its ring row and leaves its state alone; a longer one writes its state and no records."""
    comptime assert work_dtype == F32, "the work dtype is float32"
    recurrence[False](
        UInt32(batch_size),
        UInt32(num_value_heads),
        UInt32(recurrence_output.layout.shape[0]().value()),
        UInt32(recurrent_state.layout.shape[0]().value()),
        recurrent_state.ptr,
        slot_idx.ptr,
        input_row_offsets.ptr,
        Source[KEY_HEAD_DIM, VALUE_HEAD_DIM](
            qkv_conv_output.ptr.unsafe_bitcast[Float32](),
            decay_per_token.ptr.unsafe_bitcast[Float32](),
            beta_per_token.ptr.unsafe_bitcast[Float32](),
            UInt32(key_dim),
            qkv_conv_output_seqlen_stride,
            qkv_conv_output_channel_stride,
            per_token_seqlen_stride,
            per_token_head_stride,
        ),
        Outputs(
            recurrence_output.ptr.unsafe_bitcast[Float32](),
            recurrence_output_seqlen_stride,
            recurrence_output_valuedim_stride,
        ),
        Ring[KEY_HEAD_DIM, VALUE_HEAD_DIM, ring_dtype, RING_LEN](
            ring.ptr,
            ring_slot_idx.ptr,
            UInt32(ring.layout.shape[0]().value()),
            UInt32(num_key_heads),
            UInt32(ring_record_stride),
        ),
    )


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](
        Int32(Head[KEY_HEAD_DIM, VALUE_HEAD_DIM].THREADS)
    ),
    `nvvm.minctasm`=SIMDLength(Head[KEY_HEAD_DIM, VALUE_HEAD_DIM].MIN_BLOCKS),
)
def gated_delta_recurrence_fwd_block_gpu[
    work_dtype: DType,
    state_dtype: DType,
    KEY_HEAD_DIM: Int,
    VALUE_HEAD_DIM: Int,
    recurrence_output_LT: TensorLayout,
    qkv_conv_output_LT: TensorLayout,
    decay_per_token_LT: TensorLayout,
    beta_per_token_LT: TensorLayout,
    recurrent_state_LT: TensorLayout,
    slot_idx_LT: TensorLayout,
    input_row_offsets_LT: TensorLayout,
    Engine: TensorEngine,
](
    batch_size: Int32,
    num_value_heads: Int32,
    num_key_heads: Int32,
    key_dim: Int32,
    recurrence_output: TileTensor[
        work_dtype, recurrence_output_LT, MutUntrackedOrigin, Engine=Engine
    ],
    recurrent_state: TileTensor[state_dtype, recurrent_state_LT, MutUntrackedOrigin, Engine=Engine],
    slot_idx: TileTensor[DType.uint32, slot_idx_LT, MutUntrackedOrigin, Engine=Engine],
    qkv_conv_output: TileTensor[work_dtype, qkv_conv_output_LT, MutUntrackedOrigin, Engine=Engine],
    decay_per_token: TileTensor[work_dtype, decay_per_token_LT, MutUntrackedOrigin, Engine=Engine],
    beta_per_token: TileTensor[work_dtype, beta_per_token_LT, MutUntrackedOrigin, Engine=Engine],
    input_row_offsets: TileTensor[
        DType.uint32, input_row_offsets_LT, MutUntrackedOrigin, Engine=Engine
    ],
    qkv_conv_output_seqlen_stride: UInt32,
    qkv_conv_output_channel_stride: UInt32,
    per_token_seqlen_stride: UInt32,
    per_token_head_stride: UInt32,
    recurrence_output_seqlen_stride: UInt32,
    recurrence_output_valuedim_stride: UInt32,
):
    """As gated_delta_recurrence_fwd_gpu, in the block form."""
    comptime assert work_dtype == F32, "the work dtype is float32"
    recurrence[True](
        UInt32(batch_size),
        UInt32(num_value_heads),
        UInt32(recurrence_output.layout.shape[0]().value()),
        UInt32(recurrent_state.layout.shape[0]().value()),
        recurrent_state.ptr,
        slot_idx.ptr,
        input_row_offsets.ptr,
        Source[KEY_HEAD_DIM, VALUE_HEAD_DIM](
            qkv_conv_output.ptr.unsafe_bitcast[Float32](),
            decay_per_token.ptr.unsafe_bitcast[Float32](),
            beta_per_token.ptr.unsafe_bitcast[Float32](),
            UInt32(key_dim),
            qkv_conv_output_seqlen_stride,
            qkv_conv_output_channel_stride,
            per_token_seqlen_stride,
            per_token_head_stride,
        ),
        Outputs(
            recurrence_output.ptr.unsafe_bitcast[Float32](),
            recurrence_output_seqlen_stride,
            recurrence_output_valuedim_stride,
        ),
        Ring[KEY_HEAD_DIM, VALUE_HEAD_DIM, F32, 0](
            recurrence_output.ptr.unsafe_bitcast[Float32](), slot_idx.ptr, 0, 0, 0
        ),
    )


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](
        Int32(Head[KEY_HEAD_DIM, VALUE_HEAD_DIM].THREADS)
    ),
    `nvvm.minctasm`=SIMDLength(Head[KEY_HEAD_DIM, VALUE_HEAD_DIM].MIN_BLOCKS),
)
def gated_delta_recurrence_verify_ring_block_gpu[
    work_dtype: DType,
    state_dtype: DType,
    ring_dtype: DType,
    KEY_HEAD_DIM: Int,
    VALUE_HEAD_DIM: Int,
    RING_LEN: Int,
    recurrence_output_LT: TensorLayout,
    qkv_conv_output_LT: TensorLayout,
    decay_per_token_LT: TensorLayout,
    beta_per_token_LT: TensorLayout,
    recurrent_state_LT: TensorLayout,
    slot_idx_LT: TensorLayout,
    input_row_offsets_LT: TensorLayout,
    ring_LT: TensorLayout,
    ring_slot_idx_LT: TensorLayout,
    Engine: TensorEngine,
](
    batch_size: Int32,
    num_value_heads: Int32,
    num_key_heads: Int32,
    key_dim: Int32,
    recurrence_output: TileTensor[
        work_dtype, recurrence_output_LT, MutUntrackedOrigin, Engine=Engine
    ],
    recurrent_state: TileTensor[state_dtype, recurrent_state_LT, MutUntrackedOrigin, Engine=Engine],
    slot_idx: TileTensor[DType.uint32, slot_idx_LT, MutUntrackedOrigin, Engine=Engine],
    qkv_conv_output: TileTensor[work_dtype, qkv_conv_output_LT, MutUntrackedOrigin, Engine=Engine],
    decay_per_token: TileTensor[work_dtype, decay_per_token_LT, MutUntrackedOrigin, Engine=Engine],
    beta_per_token: TileTensor[work_dtype, beta_per_token_LT, MutUntrackedOrigin, Engine=Engine],
    input_row_offsets: TileTensor[
        DType.uint32, input_row_offsets_LT, MutUntrackedOrigin, Engine=Engine
    ],
    ring: TileTensor[ring_dtype, ring_LT, MutUntrackedOrigin, Engine=Engine],
    ring_slot_idx: TileTensor[DType.uint32, ring_slot_idx_LT, MutUntrackedOrigin, Engine=Engine],
    ring_record_stride: Int32,
    qkv_conv_output_seqlen_stride: UInt32,
    qkv_conv_output_channel_stride: UInt32,
    per_token_seqlen_stride: UInt32,
    per_token_head_stride: UInt32,
    recurrence_output_seqlen_stride: UInt32,
    recurrence_output_valuedim_stride: UInt32,
):
    """As gated_delta_recurrence_verify_ring_gpu, in the block form."""
    comptime assert work_dtype == F32, "the work dtype is float32"
    recurrence[True](
        UInt32(batch_size),
        UInt32(num_value_heads),
        UInt32(recurrence_output.layout.shape[0]().value()),
        UInt32(recurrent_state.layout.shape[0]().value()),
        recurrent_state.ptr,
        slot_idx.ptr,
        input_row_offsets.ptr,
        Source[KEY_HEAD_DIM, VALUE_HEAD_DIM](
            qkv_conv_output.ptr.unsafe_bitcast[Float32](),
            decay_per_token.ptr.unsafe_bitcast[Float32](),
            beta_per_token.ptr.unsafe_bitcast[Float32](),
            UInt32(key_dim),
            qkv_conv_output_seqlen_stride,
            qkv_conv_output_channel_stride,
            per_token_seqlen_stride,
            per_token_head_stride,
        ),
        Outputs(
            recurrence_output.ptr.unsafe_bitcast[Float32](),
            recurrence_output_seqlen_stride,
            recurrence_output_valuedim_stride,
        ),
        Ring[KEY_HEAD_DIM, VALUE_HEAD_DIM, ring_dtype, RING_LEN](
            ring.ptr,
            ring_slot_idx.ptr,
            UInt32(ring.layout.shape[0]().value()),
            UInt32(num_key_heads),
            UInt32(ring_record_stride),
        ),
    )
