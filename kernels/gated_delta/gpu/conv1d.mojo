"""The causal depthwise convolution over ragged rows, with a window of past inputs per slot.

Grid (ceil(conv_dim / CONV1D_BLOCK_DIM), batch_size, tiles), block CONV1D_BLOCK_DIM. A thread is one
channel of one row, so that a warp reads and writes 32 neighbouring channels; it keeps the last
KERNEL_SIZE inputs in registers and asks for UNROLL inputs before it uses the first of them. Blocks
share the tokens of a long row in tiles of TILE, tile i to block i modulo `tiles`: any `tiles` >= 1
gives the same bits. The block of the first tile, which is the one that reads the slot's window, is
also the one that writes it.
"""

from std.collections import Array
from std.math import fma
from layout import TensorEngine, TensorLayout, TileTensor
from max.gpu import block_idx, grid_dim, thread_idx
from .common import F32, wide

comptime TILE = 64
comptime UNROLL = 4


def gated_delta_conv1d_fwd_gpu[
    work_dtype: DType,
    state_dtype: DType,
    KERNEL_SIZE: Int,
    CONV1D_BLOCK_DIM: Int,
    WRITE_STATE: Bool,
    qkv_input_ragged_LT: TensorLayout,
    conv_weight_LT: TensorLayout,
    conv_state_LT: TensorLayout,
    slot_idx_LT: TensorLayout,
    input_row_offsets_LT: TensorLayout,
    conv_output_ragged_LT: TensorLayout,
    Engine: TensorEngine,
](
    batch_size: Int32,
    total_seq_len: Int32,
    conv_dim: Int32,
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
    qkv_input_seqlen_stride: UInt32,
    qkv_input_channel_stride: UInt32,
    conv_weight_channel_stride: UInt32,
    conv_weight_offset_stride: UInt32,
    conv_output_seqlen_stride: UInt32,
    conv_output_channel_stride: UInt32,
):
    """Computes out[t, c] = sum_j w[c, j] x[t - (KERNEL_SIZE - 1) + j, c], j ascending.

    Inputs before the row come from the slot's window, oldest first; with WRITE_STATE the window
    then holds the row's last KERNEL_SIZE - 1 inputs. A row whose slot is outside the pool gives
    zeros, as does a token of no row.
    """
    comptime assert work_dtype == F32, "the work dtype is float32"
    comptime assert KERNEL_SIZE >= 2, "the convolution is at least 2 wide"
    comptime PAST = KERNEL_SIZE - 1
    var c = UInt32(block_idx.x) * UInt32(CONV1D_BLOCK_DIM) + UInt32(thread_idx.x)
    if c >= UInt32(conv_dim):
        return
    var row = UInt32(block_idx.y)
    var tile = UInt32(block_idx.z)
    var tiles = UInt32(grid_dim.z)
    var tokens = UInt32(total_seq_len)
    var x = qkv_input_ragged.ptr.unsafe_bitcast[Float32]() + wide(c, qkv_input_channel_stride)
    var out = conv_output_ragged.ptr.unsafe_bitcast[Float32]() + wide(c, conv_output_channel_stride)

    @always_inline
    def zero(first: UInt32, last: UInt32) {var}:
        """Outputs of tokens [first, last), of which this block writes its share."""
        var t = first + tile
        while t < last:
            out[unsafe_offset=wide(t, conv_output_seqlen_stride)] = 0
            t += tiles

    var first = input_row_offsets.ptr[unsafe_offset=row]
    var last = min(input_row_offsets.ptr[unsafe_offset=row + 1], tokens)
    if row == 0:
        zero(0, min(first, tokens))
    if row == UInt32(batch_size) - 1:
        zero(last, tokens)
    if first >= last:
        return
    var slot = slot_idx.ptr[unsafe_offset=row]
    if slot >= UInt32(conv_state.layout.shape[0]().value()):
        zero(first, last)
        return
    var window = conv_state.ptr + (wide(slot, UInt32(conv_dim)) + UInt64(c)) * UInt64(PAST)

    var w = Array[Float32, KERNEL_SIZE](fill=0)
    comptime for j in range(KERNEL_SIZE):
        w[j] = conv_weight.ptr.unsafe_bitcast[Float32]()[
            unsafe_offset=wide(c, conv_weight_channel_stride)
            + wide(UInt32(j), conv_weight_offset_stride)
        ]
    var begin = first + tile * UInt32(TILE)
    while begin < last:
        var end = min(begin + UInt32(TILE), last)
        var past = Array[Float32, PAST](fill=0)
        comptime for j in range(PAST):
            if begin - first + UInt32(j) >= UInt32(PAST):
                past[j] = x[
                    unsafe_offset=wide(begin + UInt32(j) - UInt32(PAST), qkv_input_seqlen_stride)
                ]
            else:
                past[j] = window[unsafe_offset=begin - first + UInt32(j)].cast[F32]()
        var t = begin
        while t < end:
            var new = Array[Float32, UNROLL](fill=0)
            comptime for u in range(UNROLL):
                if t + UInt32(u) < end:
                    new[u] = x[unsafe_offset=wide(t + UInt32(u), qkv_input_seqlen_stride)]
            comptime for u in range(UNROLL):
                if t + UInt32(u) < end:
                    var sum = w[0] * past[0]
                    comptime for j in range(1, PAST):
                        sum = fma(w[j], past[j], sum)
                    sum = fma(w[PAST], new[u], sum)
                    out[unsafe_offset=wide(t + UInt32(u), conv_output_seqlen_stride)] = sum
                comptime for j in range(PAST - 1):
                    past[j] = past[j + 1]
                past[PAST - 1] = new[u]
            t += UInt32(UNROLL)
        begin += tiles * UInt32(TILE)
    comptime if WRITE_STATE:
        if tile == 0:
            var length = last - first
            comptime for j in range(PAST):  # ascending: an entry moves down before it is replaced
                if length + UInt32(j) < UInt32(PAST):
                    window[unsafe_offset=j] = window[unsafe_offset=length + UInt32(j)]
                else:
                    window[unsafe_offset=j] = x[
                        unsafe_offset=wide(last + UInt32(j) - UInt32(PAST), qkv_input_seqlen_stride)
                    ].cast[state_dtype]()
