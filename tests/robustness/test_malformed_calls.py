"""Each malformed call of the table is refused by name, changes nothing, spoils no later call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import Pool, assert_same_bits, normal, run
from malformed import (
    CONV,
    CONV_FOLD,
    CONV_RING,
    CONV_VERIFY,
    FOLD,
    GATES,
    GEOMETRY,
    GOOD,
    LAYERS,
    OPS,
    PLAIN,
    POOLS,
    RING_OPS,
    TABLE_OPS,
    VERIFY,
    B,
    Build,
    C,
    K,
    Make,
    N,
    Run,
    builds,
    good_type,
    makes,
    runs,
)
from max.dtype import DType
from max.graph import BufferType, Graph, TensorType, TensorValue

from gdn_graph import ops


def names(call: Build | Run | Make) -> str:
    return f"{call.op}: {call.what}"


def assert_names(error: pytest.ExceptionInfo[Exception], call: Build | Run | Make) -> None:
    """MAX puts a long text around what the op says; the op's own line has to say it all."""
    lines = [x for x in str(error.value).splitlines() if f"{call.op}: {call.argument} " in x]
    assert lines, f"no line names {call.op}: {call.argument}\n{error.value}"
    said = lines[0].split(f"{call.op}: {call.argument} ")[1]
    got, _, need = said.partition("; need ")
    assert call.got in got, said
    assert any(part in need for part in call.need.split("|")), said
    assert need, said


def graph_of(op: str, change: dict[str, Any], options: dict[str, Any]) -> Graph:
    """The graph of one call, with some operands of another type, or another value altogether."""
    types = {name: good_type(op, name) for name in GOOD[op]} | change
    inputs = {n: t for n, t in types.items() if isinstance(t, TensorType | BufferType)}

    def forward(*values: Any) -> Any:
        operands = dict(types)
        for (name, type_), value in zip(inputs.items(), values, strict=True):
            operands[name] = value.buffer if isinstance(type_, BufferType) else value.tensor
        out = getattr(ops, op)(*operands.values(), **options)
        return out if isinstance(out, TensorValue) else ()

    return Graph("call", forward, input_types=list(inputs.values()))


GOOD_OPTIONS = {CONV_VERIFY: {"rollback": True}}


@pytest.mark.parametrize("call", builds(), ids=names)
def test_a_malformed_call_is_refused_when_the_graph_is_built(call):
    options = GOOD_OPTIONS.get(call.op, {}) | call.options
    with pytest.raises(call.error) as error:
        graph_of(call.op, call.change, options)
    assert_names(error, call)
    assert type(error.value) is call.error
    graph_of(call.op, {}, GOOD_OPTIONS.get(call.op, {}))


@pytest.mark.parametrize("call", makes(), ids=names)
def test_a_malformed_helper_call_is_refused(call):
    with Graph("helpers"), pytest.raises(call.error) as error:
        call.call()
    assert_names(error, call)


MODELS = {
    CONV: "conv",
    CONV_VERIFY: "conv_verify",
    PLAIN: "plain",
    VERIFY: "verify",
    FOLD: "fold",
    CONV_RING: "conv_verify_ring",
    CONV_FOLD: "conv_fold",
    GATES: "gates",
}


class Bench:
    """A good call of every op, and what it leaves."""

    def __init__(self, compiled: Any) -> None:
        self.ops = compiled
        rng = np.random.default_rng(0)
        values = {
            "qkv_input_ragged": normal(rng, N, C),
            "qkv_conv_output": normal(rng, N, C),
            "conv_weight": normal(rng, C, 4),
            "decay_per_token": rng.uniform(0.5, 1, (N, 6)).astype(np.float32),
            "beta_per_token": rng.uniform(0, 1, (N, 6)).astype(np.float32),
            "slot_idx": np.array([2, 0], np.uint32),
            "ring_slot_idx": np.array([1, 2], np.uint32),
            "input_row_offsets": np.array([0, 3, 5], np.uint32),
            "row_ids": np.array([[0, 1], [2, 3]], np.uint32),
            "ring_row_ids": np.array([[1, 2], [0, 1]], np.uint32),
            "num_accepted": np.array([3, 1], np.uint32),
            "verify_width": np.zeros(K, np.int64),
        }
        self.good = {
            op: {
                name: values[name] if name in values else normal(rng, *shape)
                for name, (_, shape) in operands.items()
            }
            for op, operands in GOOD.items()
        }
        self.expected = {op: self.call(op, self.copy(op)) for op in OPS}

    def copy(self, op: str) -> dict[str, Any]:
        return {name: x.copy() for name, x in self.good[op].items()}

    def call(self, op: str, operands: dict[str, Any], launch: str = "forward") -> list[np.ndarray]:
        """Runs the op and returns its outputs and its pools."""
        model = self.ops.models[MODELS[op]]
        inputs = {
            name: Pool(DType.float32, x.view(np.uint32)) if name in POOLS else x
            for name, x in operands.items()
        }
        if op == CONV_VERIFY:
            x, weight, state, slots, offsets, width = inputs.values()
            good = self.good[op]
            back = [good["qkv_input_ragged"], good["input_row_offsets"]]
            if launch == "rollback":
                # The forward launch has no tokens, so that nothing of it is refused.
                x, offsets, back = back[0], np.zeros(B + 1, np.uint32), [x, offsets]
            outputs = run(model, x, weight, state, slots, offsets, *back, width)
        else:
            outputs = run(model, *inputs.values())
        return [*outputs, *(operands[name] for name in operands if name in POOLS)]


@pytest.fixture(scope="module")
def bench(ops_of):
    return Bench(ops_of("f32"))


def launches(call: Run) -> list[str]:
    """Which launches of the conv a call can spoil alone; the weights and the window they share."""
    alone = len(call.change) == 1 and not set(call.change) & {"conv_weight", "conv_state"}
    return ["forward", "rollback"] if call.op == CONV_VERIFY and alone else ["forward"]


@pytest.mark.parametrize(
    ("call", "launch"),
    [(call, launch) for call in runs() for launch in launches(call)],
    ids=lambda x: x if isinstance(x, str) else names(x),
)
def test_a_malformed_call_is_refused_when_it_runs(bench, call, launch):
    operands = bench.copy(call.op)
    for name, change in call.change.items():
        operands[name] = change(operands[name])
    before = {name: x.copy() for name, x in operands.items()}
    with pytest.raises(call.error) as error:
        bench.call(call.op, operands, launch)
    assert_names(error, call)
    for name, x in operands.items():
        assert x.tobytes() == before[name].tobytes(), f"{name} changed"
    again = bench.call(call.op, bench.copy(call.op))
    for got, want in zip(again, bench.expected[call.op], strict=True):
        assert_same_bits(got, want, f"the next good call of {call.op}")


def test_a_good_call_changes_its_pool(bench):
    """The control: a call that is not refused shows in the bytes that are compared above."""
    written = {CONV: "conv_state", CONV_VERIFY: "conv_state", PLAIN: "recurrent_state"}
    written |= {VERIFY: "ring", FOLD: "recurrent_state"}
    written |= {CONV_RING: "conv_ring", CONV_FOLD: "conv_state"}
    for op, pool in written.items():
        pools = [name for name in GOOD[op] if name in POOLS]
        changed = bench.expected[op][pools.index(pool) - len(pools)]
        assert changed.tobytes() != bench.good[op][pool].tobytes(), op


def test_at_least_150_different_calls():
    calls = [*builds(), *runs(), *makes()]
    assert len({names(c) + type(c).__name__ for c in calls}) == len(calls)
    assert len(runs()) >= 150
    assert {c.op for c in runs()} == set(OPS)


WILD = 2**32 - 2


def test_what_is_not_looked_at_may_be_anything(bench):
    """Ids of rows without tokens or that do not fold, ring operands at K = 0: not errors."""
    for op in (CONV, PLAIN, VERIFY, CONV_RING):
        operands = bench.copy(op)
        before = {name: operands[name].copy() for name in operands if name in POOLS}
        operands["input_row_offsets"][:] = 4
        for name in ("slot_idx", "ring_slot_idx"):
            if name in operands:
                operands[name][:] = WILD
        out = bench.call(op, operands)[0]
        assert not out.any()
        for name, pool in before.items():
            assert operands[name].tobytes() == pool.tobytes()

    operands = bench.copy(VERIFY)
    operands["verify_width"] = operands["verify_width"][:0]
    operands["ring"] = np.zeros((1, 5, 1, 2), np.float32)
    operands["ring_slot_idx"] = np.full(7, WILD, np.uint32)
    out, state, _ = bench.call(VERIFY, operands)
    plain = bench.copy(PLAIN)
    plain |= {name: bench.good[VERIFY][name].copy() for name in plain}
    want_out, want_state = bench.call(PLAIN, plain)
    assert_same_bits(out, want_out, "verify at K = 0")
    assert_same_bits(state, want_state, "pool of a verify at K = 0")

    for op, pool in TABLE_OPS.items():
        operands = bench.copy(op)
        operands["num_accepted"] = np.array([0, GEOMETRY.ring_len + 1], np.uint32)
        for name in ("row_ids", "ring_row_ids"):
            operands[name] = np.full((LAYERS, B), WILD, np.uint32)
        bench.call(op, operands)
        assert operands[pool].tobytes() == bench.good[op][pool].tobytes()

        operands = bench.copy(op)
        operands["verify_width"] = operands["verify_width"][:0]
        operands["row_ids"] = np.full((3, 7), WILD, np.uint32)
        ring = RING_OPS[op]
        operands[ring] = operands[ring][:0, ..., :1].copy()
        bench.call(op, operands)
        assert operands[pool].tobytes() == bench.good[op][pool].tobytes()
