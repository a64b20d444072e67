"""The layer against MAX's own, against the public formula, and against itself in two halves."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from max.driver import Buffer
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import BufferType, DeviceRef, Graph, ShardingStrategy, TensorType, TensorValue
from max.nn import Module
from max.pipelines.architectures.qwen3_5.layers.gated_deltanet import (
    GatedDeltaNet as GatedDeltaNetOfMax,
)
from stack import random_weights

from gdn_graph import ops, overlay, reference
from gdn_graph.geometry import GatedDeltaGeometry
from gdn_graph.layer import GatedDeltaNet, LayerState, checkpoint_weights

Array = np.ndarray[Any, Any]

G = GatedDeltaGeometry(2, 6, 16, 24)
HIDDEN, SLOTS = 40, 4
CPU_REF = DeviceRef.CPU()
HALF = G.shard(2)
# Pools of the separate and the fused layer, of MAX's, and of the two halves.
POOLS = {"separate": G, "fused": G, "of MAX": G, "left": HALF, "right": HALF}


def fused_weights(separate: dict[str, Array]) -> dict[str, Array]:
    """The Qwen3-Next layout: key head by key head q, k, then the v and z of its value heads."""
    qkv, z = separate["in_proj_qkv.weight"], separate["in_proj_z.weight"]
    q, k, v = np.split(qkv, [G.key_dim, 2 * G.key_dim])
    parts = [w.reshape(G.num_key_heads, -1, HIDDEN) for w in (q, k, v, z)]
    gates_ = [
        separate[f"in_proj_{name}.weight"].reshape(G.num_key_heads, -1, HIDDEN) for name in "ba"
    ]
    fused = {name: w for name, w in separate.items() if not name.startswith("in_proj")}
    fused["in_proj_qkvz.weight"] = np.concatenate(parts, 1).reshape(-1, HIDDEN)
    fused["in_proj_ba.weight"] = np.concatenate(gates_, 1).reshape(-1, HIDDEN)
    return fused


class Layers(Module):
    def __init__(self) -> None:
        super().__init__()
        self.separate = GatedDeltaNet(HIDDEN, G)
        self.fused = GatedDeltaNet(HIDDEN, G, projections="fused")
        self.of_max = GatedDeltaNetOfMax(
            hidden_size=HIDDEN,
            num_key_heads=G.num_key_heads,
            num_value_heads=G.num_value_heads,
            key_head_dim=G.key_head_dim,
            value_head_dim=G.value_head_dim,
            conv_kernel_size=G.conv_width,
            dtype=DType.float32,
            device=CPU_REF,
        )
        self.whole = GatedDeltaNet(HIDDEN, G)
        self.whole.sharding_strategy = ShardingStrategy.tensor_parallel(2)

    def __call__(
        self,
        x: TensorValue,
        states: Sequence[LayerState],
    ) -> list[TensorValue]:
        of_max = states[2]
        left, right = self.whole.shard([CPU_REF, CPU_REF])
        return [
            self.separate(x, states[0]),
            self.fused(x, states[1]),
            self.of_max(
                x,
                conv_pool=of_max.conv_state,
                conv_row_id=of_max.slot_idx,
                recurrent_pool=of_max.recurrent_state,
                recurrent_row_id=of_max.slot_idx,
                input_row_offsets=of_max.input_row_offsets,
            ),
            left(x, states[3]) + right(x, states[4]),
        ]


class Run:
    """Every layer in one graph, on the same input and the same rows."""

    def __init__(self, session: InferenceSession) -> None:
        layers = Layers()
        self.weights = random_weights(layers.separate, seed=0)
        fused = fused_weights(self.weights)
        named = {
            f"{layer}.{name}": value
            for layer in ("separate", "of_max", "whole")
            for name, value in self.weights.items()
        }
        layers.load_state_dict(named | {f"fused.{name}": value for name, value in fused.items()})
        types: list[Any] = [
            TensorType(DType.float32, ["tokens", HIDDEN], CPU_REF),
            TensorType(DType.uint32, ["batch"], CPU_REF),
            TensorType(DType.uint32, ["batch_plus_1"], CPU_REF),
            TensorType(DType.bfloat16, ["gates", G.num_value_heads], CPU_REF),
        ]
        for geometry in POOLS.values():
            types.append(BufferType(DType.float32, geometry.recurrent_state_shape(SLOTS), CPU_REF))
            types.append(BufferType(DType.float32, geometry.conv_state_shape(SLOTS), CPU_REF))
        with overlay(), Graph("layers", input_types=types) as graph:
            x, slots, offsets, logits = (value.tensor for value in graph.inputs[:4])
            pools = [value.buffer for value in graph.inputs[4:]]
            states = [
                LayerState(pools[2 * i], pools[2 * i + 1], slots, offsets)
                for i in range(len(POOLS))
            ]
            decay_and_beta = ops.gated_delta_gates(
                logits, logits, layers.separate.A_log, layers.separate.dt_bias
            )
            graph.output(*layers(x, states), *decay_and_beta)
        self.model = session.load(graph, weights_registry=layers.state_dict())
        rng = np.random.default_rng(1)
        self.recurrent = rng.standard_normal(G.recurrent_state_shape(SLOTS), np.float32)
        self.conv = rng.standard_normal(G.conv_state_shape(SLOTS), np.float32)

    def start(self) -> list[Array]:
        """Pools of every layer, all of one content."""
        pools: list[Array] = []
        for name in POOLS:
            recurrent, conv = self.recurrent, self.conv
            if name in ("left", "right"):
                recurrent, conv = half(recurrent, conv, 0 if name == "left" else 1)
            pools += [recurrent.copy(), conv.copy()]
        return pools

    def __call__(
        self, x: Array, slots: Sequence[int], lengths: Sequence[int], pools: list[Array]
    ) -> list[Array]:
        outputs = self.model.execute(
            x,
            np.array(slots, np.uint32),
            np.concatenate([[0], np.cumsum(lengths)]).astype(np.uint32),
            bfloat16(np.zeros((1, G.num_value_heads))),
            *pools,
        )
        return [np.array(output.to_numpy()) for output in outputs[:4]]


def half(recurrent: Array, conv: Array, side: int) -> tuple[Array, Array]:
    """The heads of one of two devices."""
    q, k, v = np.split(conv, [G.key_dim, 2 * G.key_dim], axis=1)
    channels = [np.split(part, 2, axis=1)[side] for part in (q, k, v)]
    return np.split(recurrent, 2, axis=1)[side], np.concatenate(channels, 1)


def bfloat16(values: Array) -> Buffer:
    raw = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return Buffer.from_numpy((raw >> 16).astype(np.uint16)).view(DType.bfloat16)


@pytest.fixture(scope="module")
def run(session: InferenceSession) -> Run:
    return Run(session)


BATCHES = [([2, 0, 3], [7, 1, 3]), ([3, 2], [1, 1]), ([1], [20])]


def steps(run: Run, pools: list[Array]) -> Any:
    rng = np.random.default_rng(2)
    for slots, lengths in BATCHES:
        x = rng.standard_normal((sum(lengths), HIDDEN), np.float32)
        yield x, slots, lengths, run(x, slots, lengths, pools)


def error(got: Array, want: Array) -> float:
    return float(np.abs(got - want).max() / np.abs(want).max())


def test_equals_the_layer_of_max(run: Run) -> None:
    pools = run.start()
    for _, _, _, (separate, fused, of_max, _) in steps(run, pools):
        assert error(separate, of_max) < 1e-6
        assert error(fused, of_max) < 1e-6
    for mine, theirs in zip(pools[0:2], pools[4:6], strict=True):
        assert error(mine, theirs) < 1e-6
    # The states have moved, so that the comparison means something.
    assert error(pools[0], run.recurrent) > 0.1 and error(pools[1], run.conv) > 0.1


def test_two_halves_equal_the_whole(run: Run) -> None:
    pools = run.start()
    for _, _, _, (separate, _, _, halves) in steps(run, pools):
        assert error(halves, separate) < 1e-6
    for side in (0, 1):
        for got, want in zip(
            pools[6 + 2 * side : 8 + 2 * side], half(pools[0], pools[1], side), strict=True
        ):
            np.testing.assert_array_equal(got, want)


def formula(
    w: dict[str, Array], x: Array, recurrent: Array, conv: Array, slots: Array, offsets: Array
) -> Array:
    """The layer as the papers and checkpoints define it, in float64."""
    w = {name: value.astype(np.float64) for name, value in w.items()}
    qkv, z, b, a = (x @ w[f"in_proj_{name}.weight"].T for name in ("qkv", "z", "b", "a"))
    decay = np.exp(-np.exp(w["A_log"]) * np.log1p(np.exp(a + w["dt_bias"])))
    beta = 1 / (1 + np.exp(-b))
    weight = w["conv1d.weight"][:, 0]
    out = reference.gated_delta_conv1d_fwd(qkv, weight, conv, slots, offsets)
    y = reference.gated_delta_recurrence_fwd(
        out / (1 + np.exp(-out)), decay, beta, recurrent, slots, offsets
    )
    y = y.reshape(len(x), G.num_value_heads, G.value_head_dim)
    y = y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-6) * w["norm.weight"]
    y = y.reshape(len(x), -1) * (z / (1 + np.exp(-z)))
    return y @ w["out_proj.weight"].T


def test_equals_the_public_formula(run: Run) -> None:
    pools = run.start()
    recurrent, conv = run.recurrent.astype(np.float64), run.conv.astype(np.float64)
    for x, slots, lengths, (separate, *_) in steps(run, pools):
        want = formula(
            run.weights,
            x.astype(np.float64),
            recurrent,
            conv,
            np.array(slots),
            np.concatenate([[0], np.cumsum(lengths)]),
        )
        assert error(separate, want) < 2e-5
    assert error(pools[0], recurrent) < 2e-5
    # The control: a rounded sigmoid, as of bfloat16, is far off.
    assert abs(0.62109375 - 1 / (1 + np.exp(-0.5))) > 1e-3


def test_gates_of_bfloat16_logits_are_float32(run: Run) -> None:
    outputs = run.model.execute(
        np.zeros((0, HIDDEN), np.float32),
        np.zeros(0, np.uint32),
        np.zeros(1, np.uint32),
        bfloat16(np.array([[0.5, -8, 0, 30, -30, 100]])),
        *run.start(),
    )
    decay, beta = (output.to_numpy()[0].astype(np.float64) for output in outputs[4:])
    logits = np.array([0.5, -8, 0, 30, -30, 100])
    A, bias = np.exp(run.weights["A_log"].astype(np.float64)), run.weights["dt_bias"]
    assert abs(beta[0] - 0.62245935) < 1e-7
    np.testing.assert_allclose(beta, 1 / (1 + np.exp(-logits)), rtol=1e-6)
    softplus = np.logaddexp(0, logits + bias)
    np.testing.assert_allclose(decay, np.exp(-A * softplus), rtol=2e-5)


def test_what_the_layer_refuses() -> None:
    with pytest.raises(ValueError, match="output_gate is 'relu'; need one of"):
        GatedDeltaNet(HIDDEN, G, output_gate="relu")
    with pytest.raises(ValueError, match="projections is 'both'; need 'separate' or 'fused'"):
        GatedDeltaNet(HIDDEN, G, projections="both")  # type: ignore[arg-type]
    layer = GatedDeltaNet(HIDDEN, G)
    with pytest.raises(ValueError, match="shard needs a sharding_strategy"):
        layer.shard([CPU_REF])
    with pytest.raises(ValueError, match="cannot split 2 key heads over 3 devices"):
        layer.sharding_strategy = ShardingStrategy.tensor_parallel(3)
    with pytest.raises(ValueError, match="need ShardingStrategy.tensor_parallel"):
        layer.sharding_strategy = ShardingStrategy.rowwise(2)


def write_safetensors(file: Path, tensors: dict[str, tuple[str, Array]]) -> None:
    header, data = {}, b""
    for name, (dtype, array) in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": dtype,
            "shape": array.shape,
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.mark.parametrize("layout", ["separate", "fused"])
def test_weights_come_from_a_checkpoint(tmp_path: Path, layout: Any) -> None:
    """A bfloat16 checkpoint in two files, its gates cast to float32 and its conv given a shape."""
    layer = GatedDeltaNet(HIDDEN, G, projections=layout)
    weights = random_weights(layer, seed=3)
    prefix = "model.layers.5.linear_attn."
    stored = {}
    for name, value in weights.items():
        weights[name] = (value.view(np.uint32) & 0xFFFF0000).view(np.float32)
        flat = weights[name].reshape(G.conv_dim, -1) if "conv1d" in name else weights[name]
        stored[prefix + name] = ("BF16", (flat.view(np.uint32) >> 16).astype(np.uint16))
    names = sorted(stored)
    write_safetensors(tmp_path / "a.safetensors", {name: stored[name] for name in names[::2]})
    write_safetensors(tmp_path / "b.safetensors", {name: stored[name] for name in names[1::2]})
    loaded = checkpoint_weights(tmp_path, layer, prefix)
    assert sorted(loaded) == sorted(weights)
    for name, value in weights.items():
        assert tuple(loaded[name].shape) == value.shape
        np.testing.assert_array_equal(loaded[name].to_numpy(), value)
    layer.load_state_dict(loaded)

    with pytest.raises(ValueError, match="layers.6.* is not in .*; there is model.layers.5"):
        checkpoint_weights(tmp_path, layer, "model.layers.6.linear_attn.")
    other = GatedDeltaNet(HIDDEN, G, projections={"separate": "fused", "fused": "separate"}[layout])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="check the projections"):
        checkpoint_weights(tmp_path, other, prefix)
    with pytest.raises(ValueError, match=r"has shape .*; need \(256, 1, 4\)"):
        bigger = GatedDeltaNet(HIDDEN, GatedDeltaGeometry(2, 8, 16, 24), projections=layout)
        checkpoint_weights(tmp_path, bigger, prefix)
    with pytest.raises(FileNotFoundError, match="no .*safetensors file"):
        checkpoint_weights(tmp_path / "none", layer, prefix)
