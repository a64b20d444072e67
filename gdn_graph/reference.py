"""The ops in NumPy: the specification that the kernels are tested against.

Written to be read, not to be fast. Every function takes and returns plain arrays; pools and rings
are changed in place, as the ops change them. `dtype` is the dtype of the arithmetic: float64 for
the true value, float32 for what rounding alone does. A pool is read into it once and rounded once
per call. Shapes are those of the ops (N tokens, B rows, nk / nv key / value heads, KD / VD head
dims):

    qkv [N, conv_dim], decay and beta [N, nv], recurrent_state [slots, nv, KD, VD],
    conv_state [slots, conv_dim, width - 1], ring [ring rows, nk, ring_len, record_stride],
    conv_ring [ring rows, ring_len, conv_dim],
    slot_idx [B], input_row_offsets [B + 1], row_ids and ring_row_ids [L, B], num_accepted [B]

Source of the rule: Yang, Kautz, Hatamizadeh, Gated Delta Networks, 2024 (arXiv 2412.06464), with
L2-normed queries and keys; the order of operations is this package's contract.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from .geometry import PADDING

Array = NDArray[Any]

EPS = 1e-6


def rows_of(slot_idx: Array, input_row_offsets: Array) -> Iterator[tuple[int, int, int, int]]:
    """Yields (row, slot, first token, end) of each row that has tokens and is not padding."""
    for b, slot in enumerate(slot_idx):
        begin, end = int(input_row_offsets[b]), int(input_row_offsets[b + 1])
        if begin < end and int(slot) != PADDING:
            yield b, int(slot), begin, end


def sigmoid(x: Array) -> Array:
    """1 / (1 + e^-x), by an exponential that does not overflow."""
    e = np.exp(-np.abs(x))
    y: Array = np.where(x < 0, e, 1) / (1 + e)
    return y


def silu(x: Array) -> Array:
    """x sigmoid(x)."""
    return x * sigmoid(x)


def gated_delta_gates(
    a: Array, b: Array, A_log: Array, dt_bias: Array, *, dtype: DTypeLike = np.float64
) -> tuple[Array, Array]:
    """Decay and beta [N, nv] of a and b [N, nv], A_log and dt_bias [nv].

    decay = exp(-exp(A_log) * softplus(a + dt_bias)), beta = sigmoid(b).
    """
    a, b, A_log, dt_bias = (x.astype(dtype) for x in (a, b, A_log, dt_bias))
    softplus = np.logaddexp(0, a + dt_bias)
    return np.exp(-np.exp(A_log) * softplus), sigmoid(b)


def gated_delta_conv1d_fwd(
    qkv: Array,
    conv_weight: Array,
    conv_state: Array,
    slot_idx: Array,
    input_row_offsets: Array,
    *,
    write_state: bool = True,
    activation: str | None = None,
    dtype: DTypeLike = np.float64,
) -> Array:
    """Causal depthwise conv of each row, its slot's window standing before it.

    Returns [N, conv_dim], zero for tokens of no row; with activation "silu" its silu. With
    write_state the window becomes the last width - 1 inputs of the row.
    """
    width = conv_weight.shape[1]
    weight = conv_weight.astype(dtype)
    out = np.zeros(qkv.shape, dtype)
    for _, slot, begin, end in rows_of(slot_idx, input_row_offsets):
        inputs = np.concatenate([conv_state[slot].T.astype(dtype), qkv[begin:end].astype(dtype)])
        for j in range(width):
            out[begin:end] += weight[:, j] * inputs[j : j + end - begin]
        if write_state:
            conv_state[slot] = inputs[end - begin :].T.astype(conv_state.dtype)
    return silu(out) if activation == "silu" else out


def gated_delta_conv1d_verify_fwd(
    qkv: Array,
    conv_weight: Array,
    conv_state: Array,
    slot_idx: Array,
    input_row_offsets: Array,
    verify_width: int,
    *,
    rollback: bool,
    activation: str | None = None,
    dtype: DTypeLike = np.float64,
) -> Array:
    """The conv around a verify of so many drafts.

    The forward launch writes the window only when there are no drafts; the rollback launch, over
    the accepted rows, writes it otherwise, and does nothing without drafts.
    """
    if rollback and verify_width == 0:
        return np.zeros(qkv.shape, dtype)
    return gated_delta_conv1d_fwd(
        qkv,
        conv_weight,
        conv_state,
        slot_idx,
        input_row_offsets,
        write_state=rollback or verify_width == 0,
        activation=activation,
        dtype=dtype,
    )


def gated_delta_conv1d_verify_ring_fwd(
    qkv: Array,
    conv_weight: Array,
    conv_state: Array,
    conv_ring: Array,
    slot_idx: Array,
    ring_slot_idx: Array,
    input_row_offsets: Array,
    verify_width: int,
    *,
    activation: str | None = None,
    dtype: DTypeLike = np.float64,
) -> Array:
    """The conv that leaves conv_state alone and a token's raw input in the ring.

    Without drafts it is the plain conv. With drafts, a row longer than the ring records nothing and
    writes its window.
    """
    out = np.zeros(qkv.shape, dtype)
    for b, _, begin, end in rows_of(slot_idx, input_row_offsets):
        if verify_width > 0 and int(ring_slot_idx[b]) == PADDING:
            continue
        records = verify_width > 0 and end - begin <= conv_ring.shape[1]
        out[begin:end] = gated_delta_conv1d_fwd(
            qkv[begin:end],
            conv_weight,
            conv_state,
            slot_idx[b : b + 1],
            np.array([0, end - begin]),
            write_state=not records,
            activation=activation,
            dtype=dtype,
        )
        if records:
            conv_ring[int(ring_slot_idx[b]), : end - begin] = qkv[begin:end]
    return out


def gated_delta_conv1d_fold(
    conv_state: Array,
    conv_ring: Array,
    row_ids: Array,
    ring_row_ids: Array,
    num_accepted: Array,
    verify_width: int,
) -> None:
    """Shifts the first num_accepted[b] recorded inputs of row b into its window, in every layer."""
    if verify_width == 0:
        return
    for row, ring_row in zip(row_ids, ring_row_ids, strict=True):
        for b, accepted in enumerate(num_accepted):
            if not 0 < accepted <= conv_ring.shape[1] or PADDING in (int(row[b]), int(ring_row[b])):
                continue
            inputs = np.concatenate([conv_state[row[b]].T, conv_ring[ring_row[b], :accepted]])
            conv_state[row[b]] = inputs[accepted:].T


def token_step(
    state: Array, q: Array, k: Array, v: Array, decay: Array, beta: Array
) -> tuple[Array, Array]:
    """One token of one value head: changes state [KD, VD], returns out and delta factor [VD]."""
    eps = state.dtype.type(EPS)
    k_inv = 1 / np.sqrt(k @ k + eps)
    q_factor = 1 / np.sqrt(q @ q + eps) / np.sqrt(state.dtype.type(len(q)))
    state *= decay
    kv = k @ state
    factor = beta * (v - kv * k_inv) * k_inv
    state += np.outer(k, factor)
    return (q @ state) * q_factor, factor


def gated_delta_recurrence_fwd(
    qkv: Array,
    decay: Array,
    beta: Array,
    recurrent_state: Array,
    slot_idx: Array,
    input_row_offsets: Array,
    *,
    dtype: DTypeLike = np.float64,
) -> Array:
    """The plain recurrence: each row runs from its slot's state, which it replaces.

    Returns [N, nv * VD], zero for tokens of no row.
    """
    return _recurrence(
        qkv, decay, beta, recurrent_state, None, slot_idx, slot_idx, input_row_offsets, dtype
    )


def gated_delta_recurrence_verify_ring_fwd(
    qkv: Array,
    decay: Array,
    beta: Array,
    recurrent_state: Array,
    ring: Array,
    slot_idx: Array,
    ring_slot_idx: Array,
    input_row_offsets: Array,
    verify_width: int,
    *,
    dtype: DTypeLike = np.float64,
) -> Array:
    """The recurrence that leaves recurrent_state alone and a record per token in the ring.

    Without drafts it is the plain recurrence. With drafts, a row longer than the ring records
    nothing and replaces its state.
    """
    return _recurrence(
        qkv,
        decay,
        beta,
        recurrent_state,
        ring if verify_width else None,
        slot_idx,
        ring_slot_idx,
        input_row_offsets,
        dtype,
    )


def _recurrence(
    qkv: Array,
    decay: Array,
    beta: Array,
    recurrent_state: Array,
    ring: Array | None,
    slot_idx: Array,
    ring_slot_idx: Array,
    input_row_offsets: Array,
    dtype: DTypeLike,
) -> Array:
    _, nv, KD, VD = recurrent_state.shape
    nk = (qkv.shape[1] - nv * VD) // (2 * KD)
    group = nv // nk
    qkv, decay, beta = qkv.astype(dtype), decay.astype(dtype), beta.astype(dtype)
    queries = qkv[:, : nk * KD].reshape(-1, nk, KD)
    keys = qkv[:, nk * KD : 2 * nk * KD].reshape(-1, nk, KD)
    values = qkv[:, 2 * nk * KD :].reshape(-1, nv, VD)
    out = np.zeros((len(qkv), nv, VD), dtype)
    for b, slot, begin, end in rows_of(slot_idx, input_row_offsets):
        if ring is not None and int(ring_slot_idx[b]) == PADDING:
            continue
        records = ring is not None and end - begin <= ring.shape[2]
        state = recurrent_state[slot].astype(dtype)
        for t in range(begin, end):
            for h in range(nv):
                kh, g = divmod(h, group)
                out[t, h], factor = token_step(
                    state[h], queries[t, kh], keys[t, kh], values[t, h], decay[t, h], beta[t, h]
                )
                if records:
                    assert ring is not None
                    record = ring[int(ring_slot_idx[b]), kh, t - begin]
                    record[:KD] = keys[t, kh]
                    record[KD + g * VD : KD + (g + 1) * VD] = factor
                    record[KD + group * VD + g] = decay[t, h]
        if not records:
            recurrent_state[slot] = state.astype(recurrent_state.dtype)
    return out.reshape(len(qkv), nv * VD)


def gated_delta_state_fold(
    recurrent_state: Array,
    ring: Array,
    row_ids: Array,
    ring_row_ids: Array,
    num_accepted: Array,
    verify_width: int,
    *,
    dtype: DTypeLike = np.float64,
) -> None:
    """Folds the first num_accepted[b] records of row b into its state, in every layer.

    A row that accepts nothing, or more than a ring holds, is left as it is: the latter committed
    itself. Without drafts nothing is done.
    """
    if verify_width == 0:
        return
    _, nv, KD, VD = recurrent_state.shape
    _, nk, ring_len, _ = ring.shape
    group = nv // nk
    for row, ring_row in zip(row_ids, ring_row_ids, strict=True):
        for b, accepted in enumerate(num_accepted):
            if not 0 < accepted <= ring_len or PADDING in (int(row[b]), int(ring_row[b])):
                continue
            state = recurrent_state[row[b]].astype(dtype)
            for r in range(accepted):
                for h in range(nv):
                    kh, g = divmod(h, group)
                    record = ring[ring_row[b], kh, r].astype(dtype)
                    factor = record[KD + g * VD : KD + (g + 1) * VD]
                    state[h] *= record[KD + group * VD + g]
                    state[h] += np.outer(record[:KD], factor)
            recurrent_state[row[b]] = state.astype(recurrent_state.dtype)
