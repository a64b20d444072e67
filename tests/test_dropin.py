"""MAX's own wrappers, Qwen3.5 layer and rollback functions on these ops, unchanged, on the CPU."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from harness import (
    GEOMETRIES,
    Case,
    Pool,
    assert_same_bits,
    assert_same_pool,
    buffer,
    drafts,
    ids,
    normal,
    offsets_of,
    relative_error,
    run,
    tensor,
)
from max.dtype import DType
from max.graph import DeviceRef, Dim, Graph, Module, TensorType
from max.graph import ops as mops

from gdn_graph import GatedDeltaGeometry, ops, overlay, reference

state_space = pytest.importorskip("max.nn.state_space")
rollback = pytest.importorskip("max.pipelines.architectures.unified_mtp_qwen3_5.state_rollback")

FUNCTIONS = [
    "verify_width_operand",
    "gated_delta_conv1d_fwd",
    "gated_delta_conv1d_verify_fwd",
    "gated_delta_recurrence_fwd",
    "gated_delta_recurrence_verify_ring_fwd",
    "gated_delta_state_fold",
]
LAYERS = 2
HIDDEN = 40
LAYER_GEOMETRY = GatedDeltaGeometry(2, 4, 16, 24)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_ours_can_be_called_as_maxs(name):
    theirs = inspect.signature(getattr(state_space, name)).parameters
    ours = inspect.signature(getattr(ops, name)).parameters
    for parameter in theirs.values():
        mine = ours[parameter.name]
        assert (mine.kind, mine.default) == (parameter.kind, parameter.default)
    positional = [p.name for p in ours.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == [p.name for p in theirs.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    extra = [p for p in ours.values() if p.name not in theirs]
    assert all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in extra)


def speculative_step(module: Module, geometry: GatedDeltaGeometry) -> None:
    """A verify with MAX's wrappers, then MAX's rollback: row plan, conv replay, fold."""
    types = [
        tensor(LAYERS, "N", "C"),
        tensor(LAYERS, "N", "nv"),
        tensor(LAYERS, "N", "nv"),
        tensor(LAYERS, "C", geometry.conv_width),
        buffer(DType.float32, "slots", "nv", "KD", "VD"),
        buffer(DType.float32, "slots", "C", geometry.conv_width - 1),
        buffer(DType.float32, "ring_rows", "nk", "R", "stride"),
        ids(LAYERS, "batch_size"),
        ids("offsets"),
        TensorType(DType.int64, ["batch_size"], DeviceRef.CPU()),
        drafts(),
    ]
    with Graph("max_step", input_types=types, module=module) as graph:
        x, decay, beta, weight = (v.tensor for v in graph.inputs[:4])
        state, conv_state, ring = (v.buffer for v in graph.inputs[4:7])
        rows, offsets, accepted, _ = (v.tensor for v in graph.inputs[7:])
        width = state_space.verify_width_operand(Dim("K"))
        captures, outputs = [], []
        for layer in range(LAYERS):
            conv = state_space.gated_delta_conv1d_verify_fwd(
                x[layer], weight[layer], conv_state, rows[layer], offsets, width, rollback=False
            )
            out = state_space.gated_delta_recurrence_verify_ring_fwd(
                conv,
                decay[layer],
                beta[layer],
                state,
                ring,
                rows[layer],
                rows[layer],
                offsets,
                width,
            )
            captures.append(
                rollback.GatedDeltaReplayInputs(
                    x[layer], weight[layer], decay[layer], beta[layer], conv
                )
            )
            outputs.append(out)
        k = mops.shape_to_tensor([Dim("K")])[0]
        indices, replay_offsets = rollback.accepted_row_plan(
            offsets, accepted, k, Dim("N"), DeviceRef.CPU()
        )
        rollback.replay_conv_pools(
            [captures], [conv_state], [rows], indices, replay_offsets, [], width
        )
        kept = rollback.accepted_lengths(offsets, accepted, k)
        rollback.fold_state_pools([state], [rows], [ring], [rows], kept, [], width)
        graph.output(*outputs)


def plain_wrappers(module: Module) -> None:
    types = [
        tensor("N", "C"),
        tensor("C", "width"),
        buffer(DType.float32, "slots", "C", "history"),
        tensor("N", "nv"),
        tensor("N", "nv"),
        buffer(DType.float32, "rows", "nv", "KD", "VD"),
        ids("B"),
        ids("B1"),
    ]
    with Graph("max_plain", input_types=types, module=module) as graph:
        x, weight = (v.tensor for v in graph.inputs[:2])
        decay, beta = (v.tensor for v in graph.inputs[3:5])
        slots, offsets = (v.tensor for v in graph.inputs[6:])
        conv = state_space.gated_delta_conv1d_fwd(x, weight, graph.inputs[2].buffer, slots, offsets)
        out = state_space.gated_delta_recurrence_fwd(
            conv, decay, beta, graph.inputs[5].buffer, slots, offsets
        )
        graph.output(conv, out)


@pytest.fixture(scope="module")
def models(session):
    geometry = GEOMETRIES["2x3x32x24"]
    module = Module()
    with overlay() as library:
        speculative_step(module, geometry)
        plain_wrappers(module)
        return session.load_all(module, custom_extensions=[library])


def test_the_plain_wrappers_give_the_bits_of_ours(models, ops_of):
    case = Case(GEOMETRIES["2x3x32x24"], [3, 1, 5])
    state, conv_state = case.state.copy(), case.conv_state.copy()
    conv, out = run(
        models["max_plain"],
        case.x,
        case.weight,
        conv_state,
        case.decay,
        case.beta,
        state,
        case.slots,
        case.offsets,
    )
    ops_ = ops_of("f32")
    our_state, our_conv_state = case.state.copy(), case.conv_state.copy()
    our_conv = ops_.conv(case.x, case.weight, our_conv_state, case.slots, case.offsets)
    our_out = ops_.plain(our_conv, case.decay, case.beta, our_state, case.slots, case.offsets)
    assert_same_bits(conv, our_conv, "conv")
    assert_same_bits(out, our_out, "recurrence")
    assert_same_pool(state, our_state, "state")
    assert_same_pool(conv_state, our_conv_state, "window")


@pytest.mark.parametrize("k", range(4))
def test_maxs_rollback_lands_where_the_plain_ops_land(models, ops_of, k):
    geometry = GEOMETRIES["2x3x32x24"]
    ops_ = ops_of("f32")
    batch = 4
    lengths = [k + 1] * batch if k else [3, 1, 9, 2]
    case = Case(geometry, lengths, k=k, seed=k)
    rng = case.rng
    accepted = rng.integers(0, k + 1, batch)
    kept = [a + 1 for a in accepted] if k else lengths
    n = int(case.offsets[-1])
    x = normal(rng, LAYERS, n, geometry.conv_dim)
    decay = rng.uniform(0.5, 1, (LAYERS, n, geometry.num_value_heads)).astype(np.float32)
    beta = rng.uniform(0, 1, decay.shape).astype(np.float32)
    weight = normal(rng, LAYERS, geometry.conv_dim, geometry.conv_width)
    pool_rows = LAYERS * batch
    rows = rng.permutation(pool_rows).reshape(LAYERS, batch).astype(np.uint32)
    state = Pool.of(DType.float32, normal(rng, *geometry.recurrent_state_shape(pool_rows)))
    conv_state = Pool.of(DType.float32, normal(rng, *geometry.conv_state_shape(pool_rows)))
    ring = Pool.poison(DType.float32, geometry.ring_shape(pool_rows))
    plain_state, plain_conv_state = state.copy(), conv_state.copy()
    outputs = run(
        models["max_step"],
        x,
        decay,
        beta,
        weight,
        state,
        conv_state,
        ring,
        rows,
        case.offsets,
        accepted,
        np.zeros(k, np.int64),
    )
    index, kept_offsets = case.index(kept), offsets_of(kept)
    for layer in range(LAYERS):
        conv = ops_.conv(
            x[layer][index], weight[layer], plain_conv_state, rows[layer], kept_offsets
        )
        out = ops_.plain(
            conv, decay[layer][index], beta[layer][index], plain_state, rows[layer], kept_offsets
        )
        assert_same_bits(outputs[layer][index], out, f"outputs of layer {layer}")
    assert_same_pool(state, plain_state, "recurrent state")
    assert_same_pool(conv_state, plain_conv_state, "conv windows")


def test_maxs_qwen35_layer_runs_on_the_cpu(session):
    """Against its own formula in float64, over two calls: a prefill and a decode."""
    from max.pipelines.architectures.qwen3_5.layers.gated_deltanet import GatedDeltaNet

    g, cpu = LAYER_GEOMETRY, DeviceRef.CPU()
    rng = np.random.default_rng(5)
    layer = GatedDeltaNet(
        HIDDEN,
        g.num_key_heads,
        g.num_value_heads,
        g.key_head_dim,
        g.value_head_dim,
        g.conv_width,
        DType.float32,
        cpu,
    )
    weights = {
        name: (0.3 * normal(rng, *(int(d) for d in weight.shape))).astype(np.float32)
        for name, weight in layer.raw_state_dict().items()
    }
    layer.load_state_dict(weights)
    types = [
        tensor("N", HIDDEN),
        buffer(DType.float32, "slots", *g.conv_state_shape(1)[1:]),
        buffer(DType.float32, "slots", *g.recurrent_state_shape(1)[1:]),
        ids("B"),
        ids("B1"),
    ]
    with overlay(), Graph("qwen35_layer", input_types=types) as graph:
        x, conv_state, state, slots, offsets = graph.inputs
        graph.output(
            layer(
                x.tensor,
                conv_state.buffer,
                slots.tensor,
                state.buffer,
                slots.tensor,
                offsets.tensor,
            )
        )
    model = session.load(graph, weights_registry=layer.state_dict())

    state = Pool.of(DType.float32, normal(rng, *g.recurrent_state_shape(3)))
    conv_state = Pool.of(DType.float32, normal(rng, *g.conv_state_shape(3)))
    true_state, true_conv = (p.exact for p in (state, conv_state))
    slots = np.array([2, 0], np.uint32)
    for lengths in ([5, 2], [1, 1]):
        offsets = offsets_of(lengths)
        x = normal(rng, sum(lengths), HIDDEN)
        out = run(model, x, conv_state, state, slots, offsets)[0]
        true = layer_formula(g, weights, x, true_conv, true_state, slots, offsets)
        assert relative_error(out, true) < 2e-5
        assert relative_error(state.values, true_state) < 2e-5
        assert relative_error(conv_state.values, true_conv) < 2e-5


def layer_formula(g, weights, x, conv_state, state, slots, offsets):
    """The Qwen3.5 Gated DeltaNet layer in float64."""
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    x = x.astype(np.float64)
    qkv, z, b, a = (
        x @ next(v for name, v in w.items() if f"in_proj_{part}." in name).T
        for part in ("qkv", "z", "b", "a")
    )
    decay = np.exp(-np.exp(w["A_log"]) * np.log1p(np.exp(a + w["dt_bias"])))
    conv = reference.gated_delta_conv1d_fwd(
        qkv, w["conv1d.weight"][:, 0], conv_state, slots, offsets
    )
    out = reference.gated_delta_recurrence_fwd(
        conv / (1 + np.exp(-conv)), decay, 1 / (1 + np.exp(-b)), state, slots, offsets
    )
    heads = out.reshape(len(x), g.num_value_heads, g.value_head_dim)
    normed = heads / np.sqrt((heads**2).mean(-1, keepdims=True) + 1e-6) * w["norm.weight"]
    gated = normed.reshape(len(x), -1) * z / (1 + np.exp(-z))
    return gated @ w["out_proj.weight"].T


def test_without_the_overlay_max_has_no_such_op_on_the_cpu():
    """The control of this module; in a process of its own, since a failed compile may abort it."""
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from max.driver import CPU; from max.engine import InferenceSession\n"
        "from test_dropin import Module, plain_wrappers\n"
        "module = Module(); plain_wrappers(module)\n"
        "try:\n"
        "    InferenceSession(devices=[CPU()]).load_all(module)\n"
        "except Exception as error:\n"
        "    print('refused', 'GPU' in str(error.__cause__), flush=True)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, str(Path(__file__).parent)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "refused True" in result.stdout, result.stderr[-2000:]
