"""Cases that live in the graph around an op: views, input dtypes, id dtypes, the order of ops.

Case numbers are those of docs/guarantees.md. One graph with static head dims holds them all.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import GEOMETRIES, PADDING, Case, Pool, assert_same_bits, assert_same_pool, run
from max.driver import Buffer
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import BufferType, DeviceRef, Graph, TensorType
from max.graph import ops as max_ops

from gdn_graph import ops

G = GEOMETRIES["2x3x32x24"]
C, NV, R = G.conv_dim, G.num_value_heads, G.ring_len
f32, bf16, f16 = DType.float32, DType.bfloat16, DType.float16
CPU = DeviceRef.CPU()

STATE = BufferType(f32, ["slots", NV, 32, 24], CPU)
# Every input of the graph, by name.
TYPES: dict[str, TensorType | BufferType] = {
    "wide": TensorType(f32, ["N", 5 + C + 3], CPU),
    "gates": TensorType(f32, ["N", 2 * NV], CPU),
    "decay_turned": TensorType(f32, [NV, "N"], CPU),
    "slots_i64": TensorType(DType.int64, ["B"], CPU),
    "offsets_i32": TensorType(DType.int32, ["B1"], CPU),
    "qkv_bf16": TensorType(bf16, ["N", C], CPU),
    "decay_bf16": TensorType(bf16, ["N", NV], CPU),
    "slots_i8": TensorType(DType.int8, ["B"], CPU),
    "offsets_u8": TensorType(DType.uint8, ["B1"], CPU),
    "qkv_f16": TensorType(f16, ["N", C], CPU),
    "decay_f16": TensorType(f16, ["N", NV], CPU),
    "slots_u64": TensorType(DType.uint64, ["B"], CPU),
    "offsets_i64": TensorType(DType.int64, ["B1"], CPU),
    "x": TensorType(f32, ["N", C], CPU),
    "weight": TensorType(f32, [C, G.conv_width], CPU),
    "x_kept": TensorType(f32, ["M", C], CPU),
    "offsets_kept": TensorType(DType.uint32, ["B1"], CPU),
    "counts_i32": TensorType(DType.int32, ["B"], CPU),
    "width": TensorType(DType.int64, ["K"], CPU),
    "state_views": STATE,
    "state_bf16": STATE,
    "state_f16": STATE,
    "state": STATE,
    "conv_state": BufferType(f32, ["slots", C, G.conv_width - 1], CPU),
    "ring": BufferType(f32, ["ring_rows", G.num_key_heads, R, "stride"], CPU),
}
OUTPUTS = ("views", "bf16", "f16", "conv", "activated", "verified")


def field_graph() -> Graph:
    def forward(*values: Any) -> Any:
        v = {
            name: value.buffer if isinstance(type_, BufferType) else value.tensor
            for (name, type_), value in zip(TYPES.items(), values, strict=True)
        }
        # C52, C53: column slices of wider tensors, and a transposed view.
        views = ops.gated_delta_recurrence_fwd(
            v["wide"][:, 5 : 5 + C],
            max_ops.transpose(v["decay_turned"], 0, 1),
            v["gates"][:, NV:],
            v["state_views"],
            v["slots_i64"],
            v["offsets_i32"],
        )
        # C59: inputs of other dtypes, and one of each kind of id.
        of_bf16 = ops.gated_delta_recurrence_fwd(
            v["qkv_bf16"],
            v["decay_bf16"],
            v["gates"][:, :NV],
            v["state_bf16"],
            v["slots_i8"],
            v["offsets_u8"],
        )
        of_f16 = ops.gated_delta_recurrence_fwd(
            v["qkv_f16"],
            v["decay_f16"],
            v["decay_f16"],
            v["state_f16"],
            v["slots_u64"],
            v["offsets_i64"],
        )
        # A whole layer step: the graph has to run these in the order they are written.
        slots, offsets, width = v["slots_i64"], v["offsets_i32"], v["width"]
        pool = (v["weight"], v["conv_state"], slots)
        conv = ops.gated_delta_conv1d_verify_fwd(v["x"], *pool, offsets, width, rollback=False)
        activated = max_ops.silu(conv)
        gates = (v["gates"][:, :NV], v["gates"][:, NV:])
        verified = ops.gated_delta_recurrence_verify_ring_fwd(
            activated, *gates, v["state"], v["ring"], slots, slots, offsets, width
        )
        ops.gated_delta_conv1d_verify_fwd(
            v["x_kept"], *pool, v["offsets_kept"], width, rollback=True
        )
        rows = max_ops.unsqueeze(slots, 0)
        ops.gated_delta_state_fold(v["state"], v["ring"], rows, rows, v["counts_i32"], width)
        return views, of_bf16, of_f16, conv, activated, verified

    return Graph("field_cases", forward, input_types=list(TYPES.values()))


@pytest.fixture(scope="module")
def model(session: InferenceSession) -> Model:
    return session.load(field_graph())


class Call:
    """A good call of the graph, two rows and a padding row, and the same for the compiled ops."""

    LENGTHS, COUNTS = (3, 2, 4), (2, 0, 4)

    def __init__(self) -> None:
        case = self.case = Case(G, self.LENGTHS, slots=[2, PADDING, 0], ring_slots=[2, PADDING, 0])
        rng, n = case.rng, len(case.qkv)
        counts = [0 if s == PADDING else c for s, c in zip(case.slots, self.COUNTS, strict=True)]
        index = case.index(counts)
        self.counts = counts
        _, self.kept_offsets = case.take(counts)
        wide = rng.standard_normal((n, 5 + C + 3), np.float32)
        signed = case.slots.astype(np.int32)
        self.inputs: dict[str, Any] = {
            "wide": wide,
            "gates": np.concatenate([case.decay, case.beta], axis=1),
            "decay_turned": case.decay.T.copy(),
            "slots_i64": signed.astype(np.int64),
            "offsets_i32": case.offsets.astype(np.int32),
            "qkv_bf16": Pool.of(bf16, case.qkv),
            "decay_bf16": Pool.of(bf16, case.decay),
            "slots_i8": signed.astype(np.int8),
            "offsets_u8": case.offsets.astype(np.uint8),
            "qkv_f16": Pool.of(f16, case.qkv),
            "decay_f16": Pool.of(f16, case.decay),
            "slots_u64": case.slots.astype(np.uint64),
            "offsets_i64": case.offsets.astype(np.int64),
            "x": case.x,
            "weight": case.weight,
            "x_kept": case.x[index],
            "offsets_kept": self.kept_offsets,
            "counts_i32": np.array(counts, np.int32),
            "width": np.zeros(3, np.int64),
            "state_views": case.state.copy(),
            "state_bf16": case.state.copy(),
            "state_f16": case.state.copy(),
            "state": case.state.copy(),
            "conv_state": case.conv_state.copy(),
            "ring": case.new_ring(),
        }

    def run(self, model: Model) -> dict[str, np.ndarray]:
        return dict(zip(OUTPUTS, run(model, *self.inputs.values()), strict=True))


def test_c52_c53_slices_and_transposed_views_are_read_as_they_are(model, ops_of):
    call = Call()
    out = call.run(model)["views"]
    case, state = call.case, call.case.state.copy()
    qkv = call.inputs["wide"][:, 5 : 5 + C]
    want = ops_of("f32").plain(qkv, case.decay, case.beta, state, case.slots, case.offsets)
    assert_same_bits(out, want, "outputs of views")
    assert_same_pool(call.inputs["state_views"], state, "pool")


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_c59_inputs_of_other_dtypes_are_cast_and_not_reinterpreted(model, ops_of, dtype):
    """With ids and offsets of 8 and 64 bits, the padding marker among them."""
    call = Call()
    out = call.run(model)[dtype]
    case, state = call.case, call.case.state.copy()
    qkv, decay = call.inputs[f"qkv_{dtype}"].values, call.inputs[f"decay_{dtype}"].values
    beta = case.decay if dtype == "bf16" else decay
    want = ops_of("f32").plain(qkv, decay, beta, state, case.slots, case.offsets)
    assert_same_bits(out, want, f"outputs of {dtype} inputs")
    assert_same_pool(call.inputs[f"state_{dtype}"], state, "pool")


def test_c59_two_calls_return_buffers_of_their_own(model):
    first, second = Call(), Call()
    second.inputs["x"] = second.inputs["x"] + 1
    buffers = []
    for call in (first, second):
        inputs = [x.buffer if isinstance(x, Pool) else x for x in call.inputs.values()]
        buffers.append(model.execute(*inputs))
    kept = [np.array(b.to_numpy()) for b in buffers[0]]
    Call().run(model)
    for buffer, want in zip(buffers[0], kept, strict=True):
        assert_same_bits(buffer.to_numpy(), want, "an output after later calls")
    assert not np.array_equal(buffers[0][3].to_numpy(), buffers[1][3].to_numpy())


def test_one_graph_runs_verify_rollback_and_fold_in_their_order(model, ops_of):
    call, single = Call(), ops_of("f32")
    got = call.run(model)
    case, counts = call.case, call.counts
    state, ring, window = case.state.copy(), case.new_ring(), case.conv_state.copy()
    conv, _ = single.conv_verify(
        case.x,
        case.weight,
        window,
        case.slots,
        case.offsets,
        call.inputs["x_kept"],
        call.kept_offsets,
        3,
    )
    args = (case.slots, case.slots, case.offsets)
    want = single.verify(got["activated"], case.decay, case.beta, state, ring, *args, 3)
    single.fold(state, ring, case.slots[None], case.slots[None], counts, 3)
    assert_same_bits(got["conv"], conv, "conv")
    assert_same_bits(got["verified"], want, "verified")
    for name, pool in (("state", state), ("conv_state", window), ("ring", ring)):
        assert_same_pool(call.inputs[name], pool, name)
    assert call.inputs["state"] != case.state


@pytest.mark.parametrize("bad", [2**32, 2**32 + 2, -(2**32), 2**63 - 1, -(2**63), -2])
@pytest.mark.parametrize("operand", ["slots_i64", "slots_u64", "offsets_i64"])
def test_a_64_bit_id_is_never_cut_to_one_that_exists(model, operand, bad):
    """2**32 + 2 is not slot 2. The next good call of the graph works."""
    good, call = Call(), Call()
    want = good.run(model)
    values = call.inputs[operand]
    values[0 if operand != "offsets_i64" else 1] = np.array(bad).astype(values.dtype)
    before = {n: x.copy() for n, x in call.inputs.items() if isinstance(x, Pool)}
    name = "input_row_offsets" if operand == "offsets_i64" else "slot_idx"
    with pytest.raises(ValueError, match=rf"gated_delta_\w+: {name} .* need"):
        call.run(model)
    # Every op that is given these ids is refused; the others of the graph may have run.
    pools = (
        ["state_views", "state", "conv_state", "ring"] if operand == "slots_i64" else ["state_f16"]
    )
    for name in pools:
        assert_same_pool(call.inputs[name], before[name], f"{name} of a refused op")
    for name, out in Call().run(model).items():
        assert_same_bits(out, want[name], f"{name} of the next good call")


def test_c53_what_is_not_dense_is_refused_by_max(model):
    """A pool that is every second row of a larger one: an error, and never a copy that is lost."""
    call = Call()
    pool = call.inputs["state"]
    larger = np.repeat(pool.bits, 2, axis=0)
    before = larger.copy()
    spread = Buffer.from_numpy(larger).view(f32, larger.shape)[::2, :, :, :]
    for view in (spread, larger.view(np.float32)[::2]):
        call = Call()
        inputs = [x.buffer if isinstance(x, Pool) else x for x in call.inputs.values()]
        inputs[list(TYPES).index("state")] = view
        with pytest.raises(ValueError, match="non-contiguous"):
            model.execute(*inputs)
    assert_same_bits(larger, before, "the larger pool")
    # Rows that lie together are dense: the update is seen in the larger pool.
    call = Call()
    inputs = [x.buffer if isinstance(x, Pool) else x for x in call.inputs.values()]
    rows = slice(4, 4 + len(pool.bits))
    larger[rows] = pool.bits
    window = Buffer.from_numpy(larger).view(f32, larger.shape)[rows, :, :, :]
    inputs[list(TYPES).index("state")] = window
    model.execute(*inputs)
    good = Call()
    good.run(model)
    assert_same_bits(larger[rows], good.inputs["state"].bits, "a dense view")


def test_c33_c49_gates_are_float32_from_the_first_operation(session):
    """Gates of bfloat16 logits and weights: cast first, then exp and sigmoid."""
    types = [TensorType(bf16, shape, CPU) for shape in (["N", 3], ["N", 3], [3], [3])]

    def forward(*values: Any) -> Any:
        return ops.gated_delta_gates(*(value.tensor for value in values))

    model = session.load(Graph("gates", forward, input_types=types))
    a, b = np.full((2, 3), 0.25, np.float32), np.full((2, 3), 0.5, np.float32)
    A_log, dt_bias = np.array([1.3, -0.2, 0.7], np.float32), np.array([0.1, 2.0, -1.0], np.float32)
    pools = [Pool.of(bf16, x) for x in (a, b, A_log, dt_bias)]
    decay, beta = run(model, *pools)
    exact = [x.exact for x in pools]
    softplus = np.log1p(np.exp(exact[0] + exact[3]))
    assert np.abs(decay - np.exp(-np.exp(exact[2]) * softplus)).max() < 1e-6
    assert np.abs(beta - 0.62245935).max() < 1e-7
