"""Decay and beta of every token and value head on the CPU.

    decay = exp(-exp(A_log) softplus(a + dt_bias)),  beta = sigmoid(b),  in float32

A vector of heads goes down the tokens of a chunk: what depends on the head alone is computed once.
"""

from ..activation import decay, exp, sigmoid
from .schedule import chunk_count, run_chunks
from .vector import F32, load, P, store, W

# What an element costs, in multiply-adds: three exponentials, a logarithm, two divisions.
comptime ELEMENT_COST = 16


def gates[
    a_dtype: DType, b_dtype: DType
](
    decay_: P[F32],
    beta: P[F32],
    a: P[a_dtype],
    b: P[b_dtype],
    A_log: P[F32],
    dt_bias: P[F32],
    num_tokens: Int,
    num_heads: Int,
):
    """The operands are [tokens, heads] and [heads], checked already."""

    @always_inline
    def heads[partial: Bool](begin: Int, end: Int, h: Int, n: Int) {imm}:
        var rate = exp(load[partial=partial](A_log + h, n))
        var bias = load[partial=partial](dt_bias + h, n)
        for t in range(begin, end):
            var i = t * num_heads + h
            store[partial=partial](
                decay_ + i, decay(load[partial=partial](a + i, n), rate, bias), n
            )
            store[partial=partial](beta + i, sigmoid(load[partial=partial](b + i, n)), n)

    var chunks = chunk_count(num_tokens * num_heads * ELEMENT_COST, num_tokens)

    def chunk(i: Int) {imm} -> None:
        var begin = num_tokens * i // chunks
        var end = num_tokens * (i + 1) // chunks
        var h = 0
        while h + W <= num_heads:
            heads[False](begin, end, h, W)
            h += W
        if h < num_heads:
            heads[True](begin, end, h, num_heads - h)

    run_chunks(chunk, chunks)
