"""Decay and beta of every token and value head on the GPU: a thread is one of each."""

from std.math import ceildiv
from extensibility import InputTensor, OutputTensor
from layout import TensorEngine, TensorLayout, TileTensor
from max.gpu import block_idx, thread_idx
from max.gpu.host import DeviceContext
from ..activation import decay, exp, sigmoid
from .common import F32, remainder
from .launch import Matrix, Vector, matrix, vector

comptime THREADS = 256


def gated_delta_gates_gpu[
    a_dtype: DType,
    b_dtype: DType,
    decay_LT: TensorLayout,
    beta_LT: TensorLayout,
    a_LT: TensorLayout,
    b_LT: TensorLayout,
    A_log_LT: TensorLayout,
    dt_bias_LT: TensorLayout,
    Engine: TensorEngine,
](
    elements: UInt32,
    num_heads: UInt32,
    decay_per_token: TileTensor[F32, decay_LT, MutUntrackedOrigin, Engine=Engine],
    beta_per_token: TileTensor[F32, beta_LT, MutUntrackedOrigin, Engine=Engine],
    a: TileTensor[a_dtype, a_LT, MutUntrackedOrigin, Engine=Engine],
    b: TileTensor[b_dtype, b_LT, MutUntrackedOrigin, Engine=Engine],
    A_log: TileTensor[F32, A_log_LT, MutUntrackedOrigin, Engine=Engine],
    dt_bias: TileTensor[F32, dt_bias_LT, MutUntrackedOrigin, Engine=Engine],
):
    """The operands are dense, [tokens, heads] of so many elements and [heads].

    Grid ceil(elements / THREADS), block THREADS.
    """
    var i = UInt32(block_idx.x) * UInt32(THREADS) + UInt32(thread_idx.x)
    if i >= elements:
        return
    var head = remainder(i, num_heads)
    var rate = exp[1](A_log.ptr[unsafe_offset=head])
    decay_per_token.ptr[unsafe_offset=i] = decay[1](
        a.ptr[unsafe_offset=i].cast[F32](), rate, dt_bias.ptr[unsafe_offset=head]
    )
    beta_per_token.ptr[unsafe_offset=i] = sigmoid[1](b.ptr[unsafe_offset=i].cast[F32]())


def gates_gpu[
    a_dtype: DType, b_dtype: DType
](
    decay_per_token: OutputTensor[dtype=F32, rank=2, ...],
    beta_per_token: OutputTensor[dtype=F32, rank=2, ...],
    a: InputTensor[dtype=a_dtype, rank=2, ...],
    b: InputTensor[dtype=b_dtype, rank=2, ...],
    A_log: InputTensor[dtype=F32, rank=1, ...],
    dt_bias: InputTensor[dtype=F32, rank=1, ...],
    ctx: DeviceContext,
) raises:
    """Launches the gates; any dims may be symbolic."""
    var tokens = a.dim_size(0)
    var heads = a.dim_size(1)
    if tokens * heads == 0:
        return
    var decay_tile = matrix(decay_per_token.unsafe_ptr(), tokens, heads)
    comptime kernel = gated_delta_gates_gpu[
        a_dtype, b_dtype, Matrix, Matrix, Matrix, Matrix, Vector, Vector, decay_tile.Engine
    ]
    ctx.enqueue_function[kernel](
        UInt32(tokens * heads),
        UInt32(heads),
        decay_tile,
        matrix(beta_per_token.unsafe_ptr(), tokens, heads),
        matrix(a.unsafe_ptr(), tokens, heads),
        matrix(b.unsafe_ptr(), tokens, heads),
        vector(A_log.unsafe_ptr(), heads),
        vector(dt_bias.unsafe_ptr(), heads),
        grid_dim=ceildiv(tokens * heads, THREADS),
        block_dim=THREADS,
    )
