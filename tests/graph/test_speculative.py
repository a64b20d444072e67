"""Verify and commit of all layers against decoding the same tokens plainly, round after round."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from max.driver import Buffer
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, TensorType, TensorValue
from stack import Stack, random_weights, states_of_stack

from gdn_graph.geometry import MODELS, PADDING, GatedDeltaGeometry
from gdn_graph.speculative import SpeculativeStates, StateSpec, Window

Array = np.ndarray[Any, Any]

CPU = DeviceRef.CPU()
HIDDEN = 16
RING_LEN = 8
# Symmetric in nothing: KD != VD, and two (three) value heads to a key head.
TINY = StateSpec(GatedDeltaGeometry(1, 2, 8, 12, ring_len=RING_LEN), layers=24, slots=6)
WIDE = StateSpec(GatedDeltaGeometry(1, 3, 128, 128, ring_len=RING_LEN), layers=3, slots=6)


@dataclass
class Pair:
    """A speculated model and the same one decoding plainly, with equal slots."""

    speculated: SpeculativeStates
    plain: SpeculativeStates

    def admit(self) -> int:
        slot = self.speculated.admit()
        assert self.plain.admit() == slot
        return slot

    def release(self, slot: int) -> None:
        self.speculated.release(slot)
        self.plain.release(slot)

    def assert_equal(self, when: str) -> None:
        for name in ("recurrent_state", "conv_state"):
            got, want = (bits(s.pools[0][name]) for s in (self.speculated, self.plain))
            rows = np.flatnonzero((got != want).reshape(len(got), -1).any(1))
            assert not len(rows), f"{when}: rows {rows.tolist()} of {name} differ"


def start_over(states: SpeculativeStates) -> None:
    """Empty slots, in their first order, and zero pools."""
    for slot in list(states._stage):
        states.release(slot)
    states._slots._free.sort(reverse=True)
    for pool in states.pools[0].values():
        pool.inplace_copy_from(Buffer.zeros(pool.shape, pool.dtype, pool.device))
        pool.device.synchronize()


def bits(buffer: Buffer) -> Array:
    return buffer.view({4: DType.uint32, 2: DType.uint16}[buffer.dtype.size_in_bytes]).to_numpy()


def array(output: Buffer) -> Array:
    """A copy: memory of an output may be given to a later call."""
    return np.array(output.to_numpy())


@pytest.fixture(scope="module")
def pair_of(session: InferenceSession) -> Callable[..., Pair]:
    """Pairs by spec. The plain one is of the plain ops, or of verifies without drafts, which
    test_conv_ring.py and the tests of the ops hold to them, and which need no second graph."""
    made: dict[tuple[StateSpec, bool], Pair] = {}

    def get(spec: StateSpec, *, plain_ops: bool = False) -> Pair:
        key = (spec, plain_ops)
        if key not in made:
            made[key] = Pair(
                states_of_stack(session, spec, HIDDEN),
                states_of_stack(session, spec, HIDDEN, plain=plain_ops),
            )
        for states in (made[key].speculated, made[key].plain):
            start_over(states)
        return made[key]

    return get


@dataclass
class Row:
    slot: int
    x: Array
    drafts: int
    keep: int = field(default=0)


def plain_decode(pair: Pair, rows: list[Row], one_by_one: bool) -> dict[int, Array]:
    """The kept tokens of every row through the plain ops; the outputs by slot."""
    outputs: dict[int, list[Array]] = {row.slot: [] for row in rows}
    steps = max((row.keep for row in rows), default=0) if one_by_one else 1
    for t in range(steps):
        taken = [row for row in rows if row.keep > t]
        if not taken:
            break
        parts = [row.x[t : t + 1] if one_by_one else row.x[: row.keep] for row in taken]
        lengths = [len(part) for part in parts]
        (result,) = pair.plain.verify(
            np.concatenate(parts), slots=[row.slot for row in taken], lengths=lengths
        )
        out = array(result)
        for row, part in zip(taken, np.split(out, np.cumsum(lengths)[:-1]), strict=True):
            outputs[row.slot].append(part)
    return {slot: np.concatenate(parts) for slot, parts in outputs.items() if parts}


def rounds(pair: Pair, count: int, *, one_by_one: bool, seed: int = 0) -> None:
    """Requests join and leave, with prompts in the launch of other rows' drafts."""
    rng = np.random.default_rng(seed)
    live: list[int] = []
    for number in range(count):
        k = number % RING_LEN  # 0 ... 7
        rows = []
        if pair.speculated.free_slots and (len(live) < 2 or rng.random() < 0.4):
            slot = pair.admit()
            rows.append(Row(slot, hidden(rng, rng.integers(1, 14)), 0))
            live.append(slot)
        for slot in live if not rows else live[:-1]:
            drafts = int(rng.integers(0, k + 1)) if rng.random() < 0.3 else k
            rows.append(Row(slot, hidden(rng, drafts + 1), drafts))
        rng.shuffle(rows)  # type: ignore[arg-type]
        (out,) = pair.speculated.verify(
            np.concatenate([row.x for row in rows]),
            slots=[row.slot for row in rows],
            lengths=[len(row.x) for row in rows],
            drafts=[row.drafts for row in rows],
        )
        verified = np.split(array(out), np.cumsum([len(row.x) for row in rows])[:-1])

        verifies = max(row.drafts for row in rows) > 0
        for row in rows:
            landed = not verifies or len(row.x) > RING_LEN
            row.keep = len(row.x) if landed else int(rng.integers(0, len(row.x) + 1))
        by_slot = {row.slot: out for row, out in zip(rows, verified, strict=True)}

        # Between verify and commit a request may leave, another may join, and all may move.
        if len(rows) > 2 and rng.random() < 0.2:
            gone = rows.pop(int(rng.integers(len(rows))))
            if gone.keep == len(gone.x) and (not verifies or len(gone.x) > RING_LEN):
                plain_decode(pair, [gone], one_by_one)  # it landed before it left
            live.remove(gone.slot)
            pair.release(gone.slot)
        order = [(row.slot, row.keep) for row in rows]
        if pair.speculated.free_slots and rng.random() < 0.2:
            joined = pair.admit()
            live.append(joined)
            order.append((joined, 3))
        order = [order[i] for i in rng.permutation(len(order))]
        pair.speculated.commit([keep for _, keep in order], slots=[slot for slot, _ in order])

        plain = plain_decode(pair, rows, one_by_one)
        pair.assert_equal(f"round {number}, {k} drafts")
        if one_by_one:
            for slot, want in plain.items():
                got = by_slot[slot][: len(want)]
                assert (got == want).all(), f"round {number}: outputs of slot {slot} differ"
    assert sum(bits(pair.speculated.pools[0]["recurrent_state"]).reshape(-1) != 0) > 0


def hidden(rng: np.random.Generator, tokens: int) -> Array:
    return rng.standard_normal((int(tokens), HIDDEN), np.float32)


def test_24_layers_equal_the_plain_decode_bit_for_bit(pair_of: Callable[..., Pair]) -> None:
    rounds(pair_of(TINY), 50, one_by_one=True)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [TINY, WIDE], ids=["24 layers", "3 wide layers"])
def test_layers_equal_the_plain_ops_bit_for_bit(
    pair_of: Callable[..., Pair], spec: StateSpec
) -> None:
    rounds(pair_of(spec, plain_ops=True), 50, one_by_one=True, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [TINY, WIDE], ids=["24 layers", "3 wide layers"])
def test_bfloat16_layers_equal_one_plain_call_a_round(
    pair_of: Callable[..., Pair], spec: StateSpec
) -> None:
    bfloat16 = replace(spec, state_dtype=DType.bfloat16)
    rounds(pair_of(bfloat16, plain_ops=True), 50, one_by_one=False, seed=1)


@pytest.fixture(scope="module")
def replayed(session: InferenceSession) -> Pair:
    """Two layers whose graph commits, the conv windows by gather and replay."""
    geometry = GatedDeltaGeometry(1, 2, 8, 12, ring_len=4)
    spec = StateSpec(geometry, layers=2, slots=4, conv_commit="replay")
    types = [
        TensorType(DType.float32, ["tokens", HIDDEN], CPU),
        TensorType(DType.uint32, ["batch"], CPU),
    ]

    def states() -> SpeculativeStates:
        # A Module belongs to the graph it was built in.
        stack = Stack(HIDDEN, geometry, spec.layers)
        stack.load_state_dict(random_weights(stack, seed=0))

        def forward(inputs: Sequence[Any], windows: list[Window]) -> list[TensorValue]:
            x, num_accepted = (value.tensor for value in inputs)
            out = stack(x, windows[0])
            windows[0].commit(num_accepted)
            return [out]

        return SpeculativeStates(spec, session, forward, types, weights=stack.state_dict())

    return Pair(states(), states())


def test_a_replay_of_the_conv_commits_the_same(replayed: Pair) -> None:
    rng = np.random.default_rng(7)
    slots = [replayed.admit() for _ in range(3)]
    for lengths, drafts, kept in (
        ([9, 5, 1], [0, 0, 0], [9, 5, 1]),
        ([4, 1, 3], [3, 0, 1], [2, 1, 3]),
        ([4, 7, 2], [3, 0, 1], [0, 7, 1]),  # the long row lands itself
    ):
        x = hidden(rng, sum(lengths))
        rows = np.split(x, np.cumsum(lengths)[:-1])
        verify = replayed.speculated.verify
        verify(x, np.array(kept, np.uint32), slots=slots, lengths=lengths, drafts=drafts)
        replayed.plain.verify(
            np.concatenate([row[:count] for row, count in zip(rows, kept, strict=True)]),
            np.zeros(3, np.uint32),
            slots=slots,
            lengths=kept,
        )
        replayed.assert_equal(f"{kept} of {lengths}")
    with pytest.raises(RuntimeError, match="the graph of the verify commits"):
        replayed.speculated.commit(kept)
    assert "conv_ring" not in replayed.speculated.pools[0]


def test_a_replay_needs_the_graph_of_the_verify(session: InferenceSession) -> None:
    spec = replace(TINY, layers=1, conv_commit="replay")
    with pytest.raises(ValueError, match="call commit in the graph of the verify"):
        states_of_stack(session, spec, HIDDEN)

    def too_early(inputs: Sequence[Any], windows: list[Window]) -> list[TensorValue]:
        windows[0].commit(inputs[0].tensor)
        return []

    types = [TensorType(DType.uint32, ["batch"], CPU)]
    with pytest.raises(RuntimeError, match=r"layers \[0\] were not run exactly once"):
        SpeculativeStates(spec, session, too_early, types)


@pytest.mark.parametrize("pool", ["ring", "conv_ring"])
def test_a_dropped_record_is_noticed(pair_of: Callable[..., Pair], pool: str) -> None:
    pair = pair_of(TINY)
    slot = pair.admit()
    x = hidden(np.random.default_rng(0), 3)
    pair.speculated.verify(x, slots=[slot], lengths=[3], drafts=[2])
    layer = slot * TINY.layers + 11
    record = pair.speculated.pools[0][pool].to_numpy()[layer]
    record[..., 1, :] = 0
    pair.speculated.commit([3])
    plain_decode(pair, [Row(slot, x, 2, keep=3)], one_by_one=True)
    name = {"ring": "recurrent_state", "conv_ring": "conv_state"}[pool]
    with pytest.raises(AssertionError, match=rf"rows \[{layer}\] of {name} differ"):
        pair.assert_equal("a record was dropped")


def test_a_recycled_slot_shows_nothing_of_its_last_request(
    pair_of: Callable[..., Pair],
) -> None:
    states = pair_of(TINY).speculated
    x = hidden(np.random.default_rng(3), 9)

    def first_output(slot: int) -> Array:
        return array(states.verify(x, slots=[slot], lengths=[9])[0])

    slot = states.admit()
    fresh = first_output(slot)
    assert (first_output(slot) != fresh).any(), "the control: an old state does show"
    states.verify(x[:3], slots=[slot], lengths=[3], drafts=[2])
    states.release(slot)
    assert states.admit() == slot
    for name, pool in states.pools[0].items():
        of_slot = bits(pool)[slot * TINY.layers : (slot + 1) * TINY.layers]
        assert not of_slot.any(), name
    assert (first_output(slot) == fresh).all()


def test_a_fork_goes_its_own_way(pair_of: Callable[..., Pair]) -> None:
    states = pair_of(TINY).speculated
    rng = np.random.default_rng(4)
    prompt, left, right = hidden(rng, 9), hidden(rng, 2), hidden(rng, 2)
    parent = states.admit()
    states.verify(prompt, slots=[parent], lengths=[9])
    child = states.fork(parent)
    (result,) = states.verify(np.concatenate([left, right]), slots=[parent, child], lengths=[2, 2])
    both = array(result)
    for one, tail in enumerate((left, right)):
        alone = states.admit()
        states.verify(prompt, slots=[alone], lengths=[9])
        out = array(states.verify(tail, slots=[alone], lengths=[2])[0])
        assert (out == both[2 * one : 2 * one + 2]).all()


def test_padding_rows_take_no_part(pair_of: Callable[..., Pair]) -> None:
    pair = pair_of(TINY)
    slot = pair.admit()
    x = hidden(np.random.default_rng(5), 4)
    slots, lengths = [PADDING, slot, PADDING], [1, 2, 1]
    alone = array(pair.speculated.verify(x[1:3], slots=[slot], lengths=[2], drafts=[1])[0])
    pair.speculated.commit([0])
    out = array(pair.speculated.verify(x, slots=slots, lengths=lengths, drafts=[0, 1, 0])[0])
    assert (out[1:3] == alone).all()
    # Only the residual is left of a padding row.
    assert (out[[0, 3]] == x[[0, 3]]).all()
    pair.speculated.commit([1, 2, 1])
    plain_decode(pair, [Row(slot, x[1:3], 1, keep=2)], one_by_one=True)
    pair.assert_equal("with padding")


def test_the_order_is_kept(pair_of: Callable[..., Pair]) -> None:
    states = pair_of(TINY).speculated
    x = hidden(np.random.default_rng(6), 12)
    with pytest.raises(ValueError, match="verify: slot 0 is not admitted"):
        states.verify(x[:1], slots=[0], lengths=[1])
    a, b = states.admit(), states.admit()
    with pytest.raises(RuntimeError, match="commit: no slot of the batch has been verified"):
        states.commit([1], slots=[a])
    with pytest.raises(ValueError, match="need each slot once"):
        states.verify(x[:2], slots=[a, a], lengths=[1, 1])
    with pytest.raises(ValueError, match="row 0 has 2 drafts among 2 tokens"):
        states.verify(x[:2], slots=[a], lengths=[2], drafts=[2])
    with pytest.raises(ValueError, match=r"row 0 has drafts and 9 tokens; .* ring length, 8"):
        states.verify(x[:9], slots=[a], lengths=[9], drafts=[1])

    states.verify(x[:5], slots=[a, b], lengths=[3, 2], drafts=[2, 1])
    before = bits(states.pools[0]["recurrent_state"]).copy()
    with pytest.raises(RuntimeError, match=f"verify: slot {b} has a verify that was not commit"):
        states.verify(x[:1], slots=[b], lengths=[1])
    with pytest.raises(RuntimeError, match=f"fork: slot {a} has a verify that was not committed"):
        states.fork(a)
    with pytest.raises(ValueError, match=r"num_accepted is uint32 \(1,\); need uint32 \(2,\)"):
        states.commit([1])
    with pytest.raises(ValueError, match="need counts, of 0 or more"):
        states.commit([1, -1])
    assert (bits(states.pools[0]["recurrent_state"]) == before).all()

    states.commit([1, 2])
    with pytest.raises(RuntimeError, match=f"commit: slot {a} was committed already"):
        states.commit([1, 2])
    # Without drafts the verify lands, and the commit that a uniform loop makes is let through once.
    states.verify(x[:1], slots=[a], lengths=[1])
    states.commit([1])
    with pytest.raises(RuntimeError, match=f"commit: slot {a} was committed already"):
        states.commit([1])
    for _ in range(states.free_slots):
        states.admit()
    with pytest.raises(RuntimeError, match="admit: all 6 slots are taken; release one"):
        states.admit()
    states.release(a)
    with pytest.raises(ValueError, match=f"release: slot {a} is not admitted"):
        states.release(a)


@pytest.mark.parametrize("layers", [1, 24, 48])
@pytest.mark.parametrize("devices", [1, 2])
def test_a_commit_is_two_launches_on_each_device(layers: int, devices: int) -> None:
    spec = StateSpec(GatedDeltaGeometry(2, 6, 8, 12), layers, slots=2, devices=(CPU,) * devices)
    text = str(spec.commit_graph())
    done = re.findall(r"^ *(?:%\d+ = )?(mo\.\S+)(?:.*symbol = \"(\w+)\")?", text, re.M)
    work = [op for op in done if op[0] not in ("mo.graph", "mo.chain.create()", "mo.output")]
    assert work == devices * [
        ("mo.custom", "gated_delta_state_fold"),
        ("mo.custom", "gated_delta_conv1d_fold"),
    ]


def test_the_pools_have_the_bytes_that_the_geometry_counts(
    pair_of: Callable[..., Pair],
) -> None:
    states = pair_of(TINY).speculated
    allocated = sum(pool.num_elements * pool.element_size for pool in states.pools[0].values())
    assert allocated == states.spec.bytes


def test_the_bytes_of_qwen35_27b() -> None:
    model = MODELS["qwen3.5-27b"]
    geometry, layers, bf16 = model.geometry, model.layers, DType.bfloat16
    assert (layers, geometry.ring_len, geometry.record_stride) == (48, 4, 640)
    assert round(geometry.recurrent_state_bytes(layers, bf16) / 1e6, 1) == 75.5
    assert round(geometry.conv_state_bytes(layers, bf16) / 1e6, 2) == 2.95
    assert round(geometry.ring_bytes(layers) / 1e6, 1) == 7.9
    # Without the padding that MAX's pages need, a seventh less.
    assert round(replace(geometry, stride=None).ring_bytes(layers) / 1e6, 1) == 6.7
