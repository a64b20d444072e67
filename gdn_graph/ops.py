"""The graph ops: those of max.nn.state_space, with its names and signatures, and three of ours.

Each function adds one op to the current graph and loads the kernel library into it; nothing else
has to be set up. What can be seen when the graph is built is checked here (devices, dtypes, ranks,
static dims); offsets, ids and symbolic dims are checked by the op when it runs, before it writes
anything. Both raise ValueError with the op, the argument, what came and what is needed (TypeError
for a value of the wrong kind or dtype).

Symbols: N tokens, B rows, L layers, K drafts, nk / nv key / value heads, KD / VD key / value head
dim, conv_dim = 2 * nk * KD + nv * VD. Any of the dims may be symbolic on the CPU. GPU kernels are
compiled for KD and VD (multiples of 8 from 16 to 256), the ring length (up to 32) and the conv
width, which must be static there. Row b is tokens
[input_row_offsets[b], input_row_offsets[b + 1]). An id of 0xFFFFFFFF (or -1) names no row: that row
touches no pool or ring and its outputs are zero, as are those of tokens of no row. A 64-bit id that
uint32 cannot hold is refused like any other id outside its pool. Aliased rows are legal; what they
write to the row they share is unspecified.

The recurrence has two algorithms. "exact" goes token by token: a verify, its fold and the plain op
agree to the bit however a row is cut into calls. "block" takes a row four tokens at a time: it
reads the state once for their products with it and solves for their factors, which is fewer
operations. A block verify, its block fold and the block plain op over the accepted tokens in one
call agree to the bit with each other; they differ from "exact", and from a row cut elsewhere into
calls, in the last bits. Give the fold the algorithm of the verify that filled the ring.

All arithmetic is float32. Pools may be float32, bfloat16 or float16; a ring must be
float32 for the fold to be exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from max.dtype import DType
from max.graph import (
    BufferValue,
    DeviceRef,
    Dim,
    DimLike,
    Graph,
    StaticDim,
    TensorType,
    TensorValue,
    TensorValueLike,
    ops,
)

from .geometry import (
    MAX_CONV_WIDTH,
    MIN_CONV_WIDTH,
    PADDING,
    STATE_DTYPES,
    GatedDeltaGeometry,
)
from .library import kernel_library

Activation = Literal["silu"]
Algorithm = Literal["exact", "block"]

_WORK_DTYPES = (DType.float32, DType.bfloat16, DType.float16)
_GPU_HEAD_DIMS = (16, 256)
_MAX_GPU_RING_LEN = 32
# What a 64-bit id outside uint32 becomes: no pool is so long, so the op refuses it.
_NO_ROW = PADDING - 1


def verify_width_operand(num_draft_tokens: DimLike) -> TensorValue:
    """The operand that tells an op how many drafts a verify has.

    Only its length is read, so it stays on the host and no device is waited for.

    Args:
        num_draft_tokens: K, static or a symbolic dim of the graph; 0 means no verify.

    Returns:
        int64 [K] on the CPU.
    """
    try:
        dim = Dim(num_draft_tokens)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"verify_width_operand: num_draft_tokens is {num_draft_tokens!r}; need a whole number "
            "or the name of a symbolic dim"
        ) from error
    if (_static(dim) or 0) < 0:
        _fail("verify_width_operand", "num_draft_tokens", f"is {dim}", "0 or more")
    zero = ops.constant(0, DType.int64, device=DeviceRef.CPU())
    return ops.broadcast_to(zero, [dim])


def gated_delta_conv1d_fwd(
    qkv_input_ragged: TensorValueLike,
    conv_weight: TensorValueLike,
    conv_state: BufferValue,
    slot_idx: TensorValueLike,
    input_row_offsets: TensorValueLike,
    *,
    write_state: bool = True,
    activation: Activation | None = None,
) -> TensorValue:
    """Causal depthwise conv1d over ragged rows; no bias.

    out[t, c] = sum over j of conv_weight[c, j] * x[t - (width - 1) + j, c], where x before a row is
    its slot's window.

    Args:
        qkv_input_ragged: [N, conv_dim], float32 (bfloat16 and float16 are cast).
        conv_weight: [conv_dim, width], width 2 to 8, cast likewise.
        conv_state: [slots, conv_dim, width - 1], oldest input first; changed with write_state.
        slot_idx: [B], uint32 (other integers are cast).
        input_row_offsets: [B + 1], uint32, never decreasing, at most N.
        write_state: Leave the last width - 1 inputs of each row in its window.
        activation: "silu" for out * sigmoid(out): part of the op on the CPU, the graph's own silu
            behind it on a GPU.

    Returns:
        float32 [N, conv_dim].
    """
    return _conv(
        "gated_delta_conv1d_fwd",
        qkv_input_ragged,
        conv_weight,
        conv_state,
        slot_idx,
        input_row_offsets,
        [],
        activation,
        {"write_state": write_state},
    )


def gated_delta_conv1d_verify_fwd(
    qkv_input_ragged: TensorValueLike,
    conv_weight: TensorValueLike,
    conv_state: BufferValue,
    slot_idx: TensorValueLike,
    input_row_offsets: TensorValueLike,
    verify_width: TensorValue,
    *,
    rollback: bool,
    activation: Activation | None = None,
) -> TensorValue:
    """The conv of a verify: forward over the window, or rollback over the accepted rows.

    With drafts the forward launch only reads conv_state and the rollback launch, over the accepted
    tokens of each row, writes it. Without drafts the forward launch writes it and the rollback does
    nothing; its output is zero.

    Args:
        qkv_input_ragged: As for gated_delta_conv1d_fwd.
        conv_weight: As for gated_delta_conv1d_fwd.
        conv_state: As for gated_delta_conv1d_fwd.
        slot_idx: As for gated_delta_conv1d_fwd.
        input_row_offsets: As for gated_delta_conv1d_fwd.
        verify_width: int64 [K] on the CPU, see verify_width_operand.
        rollback: Which of the two launches this is.
        activation: As for gated_delta_conv1d_fwd.

    Returns:
        float32 [N, conv_dim].
    """
    op = "gated_delta_conv1d_verify_fwd"
    return _conv(
        op,
        qkv_input_ragged,
        conv_weight,
        conv_state,
        slot_idx,
        input_row_offsets,
        [_verify_width(op, verify_width)],
        activation,
        {"rollback": rollback},
    )


def gated_delta_recurrence_fwd(
    qkv_conv_output: TensorValueLike,
    decay_per_token: TensorValueLike,
    beta_per_token: TensorValueLike,
    recurrent_state: BufferValue,
    slot_idx: TensorValueLike,
    input_row_offsets: TensorValueLike,
    *,
    algorithm: Algorithm = "exact",
) -> TensorValue:
    """The plain gated delta rule: each row runs from its slot's state and replaces it.

    Per token and value head, with state S [KD, VD]: S *= decay; f = beta * (v - S^T k / |k|) / |k|;
    S += k f^T; out = S^T q / (|q| sqrt(KD)). Queries and keys are raw; the norms are rsqrt(sum of
    squares + 1e-6).

    Args:
        qkv_conv_output: [N, conv_dim]: queries, keys, values, head-major; float32 (bfloat16 and
            float16 are cast). Value head h reads key head h // (nv / nk).
        decay_per_token: [N, nv], already exponentiated; cast likewise.
        beta_per_token: [N, nv], already a sigmoid; cast likewise.
        recurrent_state: [slots, nv, KD, VD]; the state of each row with tokens is replaced.
        slot_idx: [B], uint32 (other integers are cast).
        input_row_offsets: [B + 1], uint32, never decreasing, at most N.
        algorithm: "exact" or "block", see the module.

    Returns:
        float32 [N, nv * VD].
    """
    op = "gated_delta_recurrence_fwd"
    device = _pool_device(op, "recurrent_state", recurrent_state, 4)
    qkv, decay, beta, slots, offsets = _recurrence_operands(
        op,
        device,
        qkv_conv_output,
        decay_per_token,
        beta_per_token,
        recurrent_state,
        slot_idx,
        input_row_offsets,
    )
    result: TensorValue = _add(
        op,
        device,
        [qkv, decay, beta, recurrent_state, slots, offsets],
        _recurrence_output(qkv, recurrent_state, device),
        _algorithm(op, algorithm),
    )
    return result


def gated_delta_recurrence_verify_ring_fwd(
    qkv_conv_output: TensorValueLike,
    decay_per_token: TensorValueLike,
    beta_per_token: TensorValueLike,
    recurrent_state: BufferValue,
    ring: BufferValue,
    slot_idx: TensorValueLike,
    ring_slot_idx: TensorValueLike,
    input_row_offsets: TensorValueLike,
    verify_width: TensorValue,
    *,
    algorithm: Algorithm = "exact",
) -> TensorValue:
    """The recurrence over a window of drafts that leaves the state alone and fills the ring.

    Outputs are those of gated_delta_recurrence_fwd bit for bit. Without drafts (K = 0) it is that
    op, and the ring is not looked at. With drafts each token leaves its record at
    ring[ring_slot_idx[b], key head, position in the row], except in a row longer than the ring (a
    prefill row), which records nothing and replaces its state.

    Args:
        qkv_conv_output: As for gated_delta_recurrence_fwd.
        decay_per_token: As for gated_delta_recurrence_fwd.
        beta_per_token: As for gated_delta_recurrence_fwd.
        recurrent_state: [slots, nv, KD, VD]; changed only at K = 0 and by rows longer than the
            ring.
        ring: [ring rows, nk, ring length > K, record stride >= KD + nv / nk * (VD + 1)]; changed.
            float32; bfloat16 and float16 are taken, and make the fold inexact.
        slot_idx: [B], uint32 (other integers are cast).
        ring_slot_idx: [B], uint32 (other integers are cast).
        input_row_offsets: [B + 1], uint32, never decreasing, at most N.
        verify_width: int64 [K] on the CPU, see verify_width_operand.
        algorithm: "exact" or "block", see the module.

    Returns:
        float32 [N, nv * VD].
    """
    op = "gated_delta_recurrence_verify_ring_fwd"
    device = _pool_device(op, "recurrent_state", recurrent_state, 4)
    qkv, decay, beta, slots, offsets = _recurrence_operands(
        op,
        device,
        qkv_conv_output,
        decay_per_token,
        beta_per_token,
        recurrent_state,
        slot_idx,
        input_row_offsets,
    )
    _require_device(op, "ring", _pool_device(op, "ring", ring, 4), device)
    ring_slots = _ids(op, "ring_slot_idx", ring_slot_idx, 1, device)
    width = _verify_width(op, verify_width)
    if _static(width.shape[0]) != 0:
        _require_dim(
            op, "ring_slot_idx", ring_slots, 0, _static(slots.shape[0]), "the rows of slot_idx"
        )
        _check_ring(op, ring, _heads(op, qkv, recurrent_state), width)
        _require_compiled(op, "ring", ring, 2, device, 1, _MAX_GPU_RING_LEN)
    result: TensorValue = _add(
        op,
        device,
        [qkv, decay, beta, recurrent_state, ring, slots, ring_slots, offsets, width],
        _recurrence_output(qkv, recurrent_state, device),
        _algorithm(op, algorithm),
    )
    return result


def gated_delta_state_fold(
    recurrent_state: BufferValue,
    ring: BufferValue,
    row_ids: TensorValueLike,
    ring_row_ids: TensorValueLike,
    num_accepted: TensorValueLike,
    verify_width: TensorValue,
    *,
    algorithm: Algorithm = "exact",
) -> None:
    """Folds accepted records into the state of every layer in one launch.

    S = S * decay + k f^T for the first num_accepted[b] records of row b, in order: with a float32
    ring bit for bit what the plain recurrence over those tokens would have left. Without drafts it
    does nothing.

    Args:
        recurrent_state: [rows, nv, KD, VD] of all layers; changed.
        ring: [ring rows, nk, ring length > K, record stride]; only read, but mutable so that the
            graph
            runs the fold after the verify that filled it.
        row_ids: [L, B], uint32 (other integers are cast): the state of row b in each layer.
        ring_row_ids: [L, B], likewise in the ring.
        num_accepted: [B], likewise: window rows to keep, 1 + accepted drafts. A row with 0, or with
            more than the ring length (it committed itself), is neither read nor written. A count
            above what the verify recorded folds whatever the ring holds.
        verify_width: int64 [K] on the CPU, see verify_width_operand.
        algorithm: That of the verify, "exact" or "block", see the module.
    """
    op = "gated_delta_state_fold"
    device = _pool_device(op, "recurrent_state", recurrent_state, 4)
    _require_device(op, "ring", _pool_device(op, "ring", ring, 4), device)
    rows, ring_rows, accepted = _tables(op, row_ids, ring_row_ids, num_accepted, device)
    width = _verify_width(op, verify_width)
    if _static(width.shape[0]) != 0:
        _check_tables(op, rows, ring_rows, accepted)
        _check_fold(op, recurrent_state, ring, width)
        _require_head_dims(op, recurrent_state, device)
        _require_compiled(op, "ring", ring, 2, device, 1, _MAX_GPU_RING_LEN)
    _add(
        op,
        device,
        [recurrent_state, ring, rows, ring_rows, accepted, width],
        None,
        _algorithm(op, algorithm),
    )


def gated_delta_conv1d_verify_ring_fwd(
    qkv_input_ragged: TensorValueLike,
    conv_weight: TensorValueLike,
    conv_state: BufferValue,
    conv_ring: BufferValue,
    slot_idx: TensorValueLike,
    ring_slot_idx: TensorValueLike,
    input_row_offsets: TensorValueLike,
    verify_width: TensorValue,
    *,
    activation: Activation | None = None,
) -> TensorValue:
    """The conv over a window of drafts that leaves conv_state alone and records its inputs.

    Not among MAX's ops: with gated_delta_conv1d_fold it commits the windows of all layers in one
    launch, where MAX gathers and convolves once more in every layer. Outputs are those of
    gated_delta_conv1d_fwd bit for bit. Without drafts (K = 0) it is that op, and the ring is not
    looked at. With drafts each token leaves its raw input at conv_ring[ring_slot_idx[b], position
    in the row], except in a row longer than the ring (a prefill row), which records nothing and
    writes its window.

    Args:
        qkv_input_ragged: As for gated_delta_conv1d_fwd.
        conv_weight: As for gated_delta_conv1d_fwd.
        conv_state: [slots, conv_dim, width - 1]; changed only at K = 0 and by rows longer than the
            ring.
        conv_ring: [ring rows, ring length > K, conv_dim]; changed. Of the dtype of conv_state or
            float32, so that the fold is exact.
        slot_idx: [B], uint32 (other integers are cast).
        ring_slot_idx: [B], uint32 (other integers are cast).
        input_row_offsets: [B + 1], uint32, never decreasing, at most N.
        verify_width: int64 [K] on the CPU, see verify_width_operand.
        activation: As for gated_delta_conv1d_fwd; the ring holds raw inputs in any case.

    Returns:
        float32 [N, conv_dim].
    """
    op = "gated_delta_conv1d_verify_ring_fwd"
    device, qkv, weight, slots, offsets = _conv_operands(
        op, qkv_input_ragged, conv_weight, conv_state, slot_idx, input_row_offsets
    )
    _require_device(op, "conv_ring", _pool_device(op, "conv_ring", conv_ring, 3), device)
    ring_slots = _ids(op, "ring_slot_idx", ring_slot_idx, 1, device)
    width = _verify_width(op, verify_width)
    if _static(width.shape[0]) != 0:
        _require_dim(
            op, "ring_slot_idx", ring_slots, 0, _static(slots.shape[0]), "the rows of slot_idx"
        )
        _check_conv_ring(op, conv_ring, _static(qkv.shape[1]), width)
    silu = _silu(op, activation)
    result: TensorValue = _add(
        op,
        device,
        [qkv, weight, conv_state, conv_ring, slots, ring_slots, offsets, width],
        TensorType(DType.float32, qkv.shape, device),
        {"silu": silu and device.is_cpu()},
    )
    return _activated(result, silu, device)


def gated_delta_conv1d_fold(
    conv_state: BufferValue,
    conv_ring: BufferValue,
    row_ids: TensorValueLike,
    ring_row_ids: TensorValueLike,
    num_accepted: TensorValueLike,
    verify_width: TensorValue,
) -> None:
    """Shifts accepted inputs into the conv windows of every layer in one launch.

    Not among MAX's ops. A window is left as gated_delta_conv1d_fwd over the first num_accepted[b]
    tokens of row b would have left it, bit for bit. Without drafts it does nothing.

    Args:
        conv_state: [rows, conv_dim, width - 1] of all layers; changed.
        conv_ring: [ring rows, ring length > K, conv_dim]; only read, but mutable so that the graph
            runs the fold after the verify that filled it.
        row_ids: [L, B], uint32 (other integers are cast): the window of row b in each layer.
        ring_row_ids: [L, B], likewise in the ring.
        num_accepted: [B], likewise, as for gated_delta_state_fold.
        verify_width: int64 [K] on the CPU, see verify_width_operand.
    """
    op = "gated_delta_conv1d_fold"
    device = _pool_device(op, "conv_state", conv_state, 3)
    _require_device(op, "conv_ring", _pool_device(op, "conv_ring", conv_ring, 3), device)
    rows, ring_rows, accepted = _tables(op, row_ids, ring_row_ids, num_accepted, device)
    width = _verify_width(op, verify_width)
    if _static(width.shape[0]) != 0:
        _check_tables(op, rows, ring_rows, accepted)
        history = _static(conv_state.shape[2])
        if history is not None and not MIN_CONV_WIDTH <= history + 1 <= MAX_CONV_WIDTH:
            _fail(
                op,
                "conv_state",
                f"has shape {_shape(conv_state)}",
                "[rows, conv_dim, width - 1] for a conv width of "
                f"{MIN_CONV_WIDTH} to {MAX_CONV_WIDTH}",
            )
        _check_conv_ring(op, conv_ring, _static(conv_state.shape[1]), width)
    _add(op, device, [conv_state, conv_ring, rows, ring_rows, accepted, width], None)


def gated_delta_gates(
    a: TensorValueLike,
    b: TensorValueLike,
    A_log: TensorValueLike,
    dt_bias: TensorValueLike,
) -> tuple[TensorValue, TensorValue]:
    """Decay and beta of every token and value head, in float32 from the first operation.

    decay = exp(-exp(A_log) * softplus(a + dt_bias)) and beta = sigmoid(b). Not among MAX's ops,
    where these are some ten operations of the graph.

    Args:
        a: [N, nv], float32, bfloat16 or float16: the projection that opens the decay.
        b: [N, nv], likewise, of its own dtype.
        A_log: [nv], float32 (bfloat16 and float16 are cast).
        dt_bias: [nv], likewise.

    Returns:
        decay and beta, float32 [N, nv].
    """
    op = "gated_delta_gates"
    logits = _tensor(op, "a", a, 2)
    device = logits.device
    logits = _work(op, "a", logits, device, cast=False)
    beta_logits = _work(op, "b", b, device, cast=False)
    rate = _work(op, "A_log", A_log, device, rank=1)
    bias = _work(op, "dt_bias", dt_bias, device, rank=1)
    tokens, heads = (_static(dim) for dim in logits.shape)
    _require_dim(op, "b", beta_logits, 0, tokens, "the tokens of a")
    _require_dim(op, "b", beta_logits, 1, heads, "the value heads of a")
    _require_dim(op, "A_log", rate, 0, heads, "the value heads of a")
    _require_dim(op, "dt_bias", bias, 0, heads, "the value heads of a")
    _import_library()
    output = TensorType(DType.float32, logits.shape, device)
    decay, beta = ops.custom(op, device, [logits, beta_logits, rate, bias], [output, output])
    return decay.tensor, beta.tensor


def _import_library() -> None:
    graph = Graph.current
    # A graph made without the library would fall back on MAX's GPU-only op of the same name.
    if kernel_library() not in graph.kernel_libraries_paths:
        graph._import_kernels([kernel_library()])


def _add(
    op: str,
    device: DeviceRef,
    values: Sequence[TensorValue | BufferValue],
    output: TensorType | None,
    parameters: dict[str, Any] | None = None,
) -> Any:
    """Adds the op to the current graph; returns its output, if it has one."""
    _import_library()
    out_types = None if output is None else [output]
    results = ops.inplace_custom(op, device, values, out_types, parameters)
    return None if output is None else results[0].tensor


def _conv(
    op: str,
    qkv_input_ragged: TensorValueLike,
    conv_weight: TensorValueLike,
    conv_state: BufferValue,
    slot_idx: TensorValueLike,
    input_row_offsets: TensorValueLike,
    extra: list[TensorValue],
    activation: Activation | None,
    parameters: dict[str, Any],
) -> TensorValue:
    for name, value in parameters.items():
        if not isinstance(value, bool):
            raise TypeError(f"{op}: {name} is {value!r}; need True or False")
    silu = _silu(op, activation)
    device, qkv, weight, slots, offsets = _conv_operands(
        op, qkv_input_ragged, conv_weight, conv_state, slot_idx, input_row_offsets
    )
    result: TensorValue = _add(
        op,
        device,
        [qkv, weight, conv_state, slots, offsets, *extra],
        TensorType(DType.float32, qkv.shape, device),
        parameters | {"silu": silu and device.is_cpu()},
    )
    return _activated(result, silu, device)


def _silu(op: str, activation: Activation | None) -> bool:
    if activation not in (None, "silu"):
        _fail(op, "activation", f"is {activation!r}", '"silu" or None')
    return activation == "silu"


def _activated(out: TensorValue, silu: bool, device: DeviceRef) -> TensorValue:
    """The output of a conv whose GPU kernels have no SiLU."""
    return ops.silu(out) if silu and not device.is_cpu() else out


def _conv_operands(
    op: str,
    qkv_input_ragged: TensorValueLike,
    conv_weight: TensorValueLike,
    conv_state: BufferValue,
    slot_idx: TensorValueLike,
    input_row_offsets: TensorValueLike,
) -> tuple[DeviceRef, TensorValue, TensorValue, TensorValue, TensorValue]:
    device = _pool_device(op, "conv_state", conv_state, 3)
    qkv = _work(op, "qkv_input_ragged", qkv_input_ragged, device)
    weight = _work(op, "conv_weight", conv_weight, device)
    slots, offsets = _rows(op, slot_idx, input_row_offsets, device)
    channels = _static(qkv.shape[1])
    width = _static(weight.shape[1])
    _require_dim(op, "conv_weight", weight, 0, channels, "the channels of qkv_input_ragged")
    _require_dim(op, "conv_state", conv_state, 1, channels, "the channels of qkv_input_ragged")
    _require_compiled(op, "conv_weight", weight, 1, device, MIN_CONV_WIDTH, MAX_CONV_WIDTH)
    if width is not None:
        if not MIN_CONV_WIDTH <= width <= MAX_CONV_WIDTH:
            _fail(
                op,
                "conv_weight",
                f"has width {width}",
                f"a conv width of {MIN_CONV_WIDTH} to {MAX_CONV_WIDTH} as dim 1",
            )
        _require_dim(op, "conv_state", conv_state, 2, width - 1, "the conv width - 1")
    return device, qkv, weight, slots, offsets


def _recurrence_operands(
    op: str,
    device: DeviceRef,
    qkv_conv_output: TensorValueLike,
    decay_per_token: TensorValueLike,
    beta_per_token: TensorValueLike,
    recurrent_state: BufferValue,
    slot_idx: TensorValueLike,
    input_row_offsets: TensorValueLike,
) -> tuple[TensorValue, TensorValue, TensorValue, TensorValue, TensorValue]:
    qkv = _work(op, "qkv_conv_output", qkv_conv_output, device)
    decay = _work(op, "decay_per_token", decay_per_token, device)
    beta = _work(op, "beta_per_token", beta_per_token, device)
    slots, offsets = _rows(op, slot_idx, input_row_offsets, device)
    tokens = _static(qkv.shape[0])
    heads = _static(recurrent_state.shape[1])
    for name, value in (("decay_per_token", decay), ("beta_per_token", beta)):
        _require_dim(op, name, value, 0, tokens, "the tokens of qkv_conv_output")
        _require_dim(op, name, value, 1, heads, "the value heads of recurrent_state")
    _heads(op, qkv, recurrent_state)
    _require_head_dims(op, recurrent_state, device)
    return qkv, decay, beta, slots, offsets


def _recurrence_output(
    qkv: TensorValue, recurrent_state: BufferValue, device: DeviceRef
) -> TensorType:
    _, heads, _, value_head_dim = recurrent_state.shape
    return TensorType(DType.float32, [qkv.shape[0], heads * value_head_dim], device)


def _heads(op: str, qkv: TensorValue, recurrent_state: BufferValue) -> GatedDeltaGeometry | None:
    """The heads that the channels and the pool agree on, or None if a dim is symbolic."""
    channels = _static(qkv.shape[1])
    nv, KD, VD = _head_dims(op, recurrent_state)
    if channels is None or nv is None or KD is None or VD is None:
        return None
    nk, rest = divmod(channels - nv * VD, 2 * KD)
    if nk < 1 or rest:
        _fail(
            op,
            "qkv_conv_output",
            f"has {channels} channels",
            f"2 * key heads * {KD} + {nv} * {VD} for a whole number of key heads, as "
            f"recurrent_state {_shape(recurrent_state)} has it",
        )
    if nv % nk:
        _fail(
            op,
            "recurrent_state",
            f"has {nv} value heads for the {nk} key heads of qkv_conv_output",
            "a multiple of the key heads",
        )
    return GatedDeltaGeometry(nk, nv, KD, VD)


def _head_dims(op: str, recurrent_state: BufferValue) -> list[int | None]:
    """nv, KD and VD as far as they are static."""
    dims = [_static(dim) for dim in recurrent_state.shape[1:]]
    if any(dim is not None and dim < 1 for dim in dims):
        _fail(
            op,
            "recurrent_state",
            f"has shape {_shape(recurrent_state)}",
            "[slots, value heads, key head dim, value head dim] with every head dim at least 1",
        )
    return dims


def _check_ring(
    op: str, ring: BufferValue, heads: GatedDeltaGeometry | None, width: TensorValue
) -> None:
    ring_len, stride, drafts = (_static(d) for d in (*ring.shape[2:], width.shape[0]))
    if heads is not None:
        _require_dim(op, "ring", ring, 1, heads.num_key_heads, "the key heads")
        if stride is not None and stride < heads.record_elements:
            _fail(
                op,
                "ring",
                f"has record stride {stride}",
                f"at least {heads.record_elements} = key head dim + group * (value head dim + 1)",
            )
    if ring_len is not None and drafts is not None and drafts + 1 > ring_len:
        _fail(op, "ring", f"has length {ring_len}", f"at least verify_width + 1 = {drafts + 1}")


def _check_fold(
    op: str, recurrent_state: BufferValue, ring: BufferValue, width: TensorValue
) -> None:
    nv, KD, VD = _head_dims(op, recurrent_state)
    nk = _static(ring.shape[1])
    heads = None
    if nv is not None and nk is not None:
        if nk < 1 or nv % nk:
            _fail(
                op,
                "ring",
                f"has {nk} key heads for the {nv} value heads of recurrent_state",
                "a number of key heads that divides the value heads",
            )
        if KD is not None and VD is not None:
            heads = GatedDeltaGeometry(nk, nv, KD, VD)
    _check_ring(op, ring, heads, width)


def _check_conv_ring(
    op: str, conv_ring: BufferValue, channels: int | None, width: TensorValue
) -> None:
    _require_dim(op, "conv_ring", conv_ring, 2, channels, "the channels of the conv")
    ring_len, drafts = _static(conv_ring.shape[1]), _static(width.shape[0])
    if ring_len is not None and drafts is not None and drafts + 1 > ring_len:
        _fail(
            op, "conv_ring", f"has length {ring_len}", f"at least verify_width + 1 = {drafts + 1}"
        )


def _tables(
    op: str,
    row_ids: TensorValueLike,
    ring_row_ids: TensorValueLike,
    num_accepted: TensorValueLike,
    device: DeviceRef,
) -> tuple[TensorValue, TensorValue, TensorValue]:
    return (
        _ids(op, "row_ids", row_ids, 2, device),
        _ids(op, "ring_row_ids", ring_row_ids, 2, device),
        _ids(op, "num_accepted", num_accepted, 1, device),
    )


def _check_tables(
    op: str, rows: TensorValue, ring_rows: TensorValue, accepted: TensorValue
) -> None:
    batch = _static(accepted.shape[0])
    _require_dim(op, "row_ids", rows, 1, batch, "the rows of num_accepted")
    _require_dim(op, "ring_row_ids", ring_rows, 0, _static(rows.shape[0]), "the layers of row_ids")
    _require_dim(op, "ring_row_ids", ring_rows, 1, batch, "the rows of num_accepted")


def _rows(
    op: str, slot_idx: TensorValueLike, input_row_offsets: TensorValueLike, device: DeviceRef
) -> tuple[TensorValue, TensorValue]:
    slots = _ids(op, "slot_idx", slot_idx, 1, device)
    offsets = _ids(op, "input_row_offsets", input_row_offsets, 1, device)
    rows = _static(slots.shape[0])
    _require_dim(
        op,
        "input_row_offsets",
        offsets,
        0,
        None if rows is None else rows + 1,
        "one more than the rows of slot_idx",
    )
    return slots, offsets


def _verify_width(op: str, value: TensorValue) -> TensorValue:
    width = _tensor(op, "verify_width", value, 1)
    if width.dtype != DType.int64:
        raise TypeError(
            f"{op}: verify_width has dtype {width.dtype.name}; need int64, see verify_width_operand"
        )
    _require_device(op, "verify_width", width.device, DeviceRef.CPU())
    return width


def _ids(op: str, name: str, value: TensorValueLike, rank: int, device: DeviceRef) -> TensorValue:
    tensor = _tensor(op, name, value, rank)
    if not tensor.dtype.is_integral():
        raise TypeError(
            f"{op}: {name} has dtype {tensor.dtype.name}; need uint32 or another integer"
        )
    _require_device(op, name, tensor.device, device)
    if tensor.dtype in (DType.int64, DType.uint64):
        # The cast keeps the low 32 bits, which would make 2**32 + 1 row 1: name no row at all.
        wide = ops.cast(tensor, DType.int64)
        no_row = ops.constant(_NO_ROW, DType.int64, device=device)
        outside = ops.logical_or(wide > PADDING, wide < -1)
        tensor = ops.where(outside, no_row, wide)
    return tensor if tensor.dtype == DType.uint32 else ops.cast(tensor, DType.uint32)


def _work(
    op: str,
    name: str,
    value: TensorValueLike,
    device: DeviceRef,
    *,
    rank: int = 2,
    cast: bool = True,
) -> TensorValue:
    tensor = _tensor(op, name, value, rank)
    if tensor.dtype not in _WORK_DTYPES:
        raise TypeError(
            f"{op}: {name} has dtype {tensor.dtype.name}; need float32, bfloat16 or float16"
        )
    _require_device(op, name, tensor.device, device)
    return ops.cast(tensor, DType.float32) if cast else tensor


def _tensor(op: str, name: str, value: TensorValueLike, rank: int) -> TensorValue:
    if isinstance(value, BufferValue):
        raise TypeError(f"{op}: {name} is a buffer; need a tensor, as buffer[...] gives it")
    try:
        tensor = TensorValue(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{op}: {name} is {value!r}; need a tensor") from error
    if tensor.rank != rank:
        _fail(op, name, f"has shape {_shape(tensor)}", f"rank {rank}")
    return tensor


def _pool_device(op: str, name: str, value: BufferValue, rank: int) -> DeviceRef:
    if not isinstance(value, BufferValue):
        raise TypeError(
            f"{op}: {name} is a {type(value).__name__}; need a buffer (BufferType): it is changed"
        )
    if value.dtype not in STATE_DTYPES:
        raise TypeError(
            f"{op}: {name} has dtype {value.dtype.name}; need float32, bfloat16 or float16"
        )
    if value.rank != rank:
        _fail(op, name, f"has shape {_shape(value)}", f"rank {rank}")
    return value.device


def _require_device(op: str, name: str, got: DeviceRef, need: DeviceRef) -> None:
    if got != need:
        _fail(op, name, f"is on {got}", f"{need}: move it there with .to(device)")


def _require_dim(
    op: str, name: str, value: TensorValue | BufferValue, axis: int, need: int | None, why: str
) -> None:
    got = _static(value.shape[axis])
    if got is not None and need is not None and got != need:
        _fail(op, name, f"has shape {_shape(value)}", f"{need}, {why}, as dim {axis}")


def _shape(value: TensorValue | BufferValue) -> str:
    return f"[{', '.join(str(dim) for dim in value.shape)}]"


def _algorithm(op: str, algorithm: str) -> dict[str, Any]:
    """The op's parameters for an algorithm."""
    if algorithm not in ("exact", "block"):
        _fail(op, "algorithm", f"is {algorithm!r}", '"exact" or "block"')
    return {"block": algorithm == "block"}


def _require_head_dims(op: str, recurrent_state: BufferValue, device: DeviceRef) -> None:
    for axis in (2, 3):
        _require_compiled(
            op, "recurrent_state", recurrent_state, axis, device, *_GPU_HEAD_DIMS, multiple=8
        )


def _require_compiled(
    op: str,
    name: str,
    value: TensorValue | BufferValue,
    axis: int,
    device: DeviceRef,
    low: int,
    high: int,
    multiple: int = 1,
) -> None:
    """On a GPU, asks for a static dim that the kernels can be compiled for."""
    if device.is_cpu():
        return
    got = _static(value.shape[axis])
    if got is None or not low <= got <= high or got % multiple:
        of = f"a multiple of {multiple} " if multiple > 1 else ""
        _fail(
            op,
            name,
            f"has shape {_shape(value)} on {device}",
            f"{of}from {low} to {high}, static, as dim {axis}: GPU kernels are compiled for it",
        )


def _static(dim: Any) -> int | None:
    return int(dim) if isinstance(dim, StaticDim) else None


def _fail(op: str, name: str, got: str, need: str) -> None:
    raise ValueError(f"{op}: {name} {got}; need {need}")
