"""Padding rows, null slots, captured graphs. Case numbers are those of docs/guarantees.md."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
from common import assert_untouched, row_of
from harness import (
    DTYPES,
    GEOMETRIES,
    PADDING,
    Case,
    Pool,
    assert_same_bits,
    assert_same_pool,
    offsets_of,
    u32,
)
from max.dtype import DType

import gdn_graph.ops

G = GEOMETRIES["2x3x32x24"]
pools = pytest.mark.parametrize("dtype", ["f32", "bf16"])


@pools
@pytest.mark.parametrize("padded", [[0], [1], [2], [0, 2], [0, 1, 2]], ids=str)
@pytest.mark.parametrize("window", [1, 2, 5])
def test_c01_c08_a_padding_row_touches_nothing_and_its_output_is_zero(
    ops_of, dtype, padded, window
):
    """In every op, at every place of the batch: the other rows as if it were not there."""
    ops = ops_of(dtype)
    case = Case(G, [window, window + 1, window], DTYPES[dtype], slots=[1, 3, 0], seed=window)
    k = window
    real = [b for b in range(3) if b not in padded]
    slots, ring_slots = case.slots.copy(), case.ring_slots.copy()
    slots[padded], ring_slots[padded] = PADDING, PADDING
    counts = [case.lengths[b] if b in real else 0 for b in range(3)]
    gates, offsets = case.take(counts)
    index = case.index(counts)
    pad_index = np.setdiff1d(np.arange(len(case.qkv)), index)

    def check(out, alone, state, alone_state, what):
        assert_same_bits(out[index], alone, what)
        assert not out[pad_index].any(), f"{what}: zero for the padding row"
        assert_same_pool(state, alone_state, f"pool of {what}")

    for what in ("plain", "conv"):
        start = case.state if what == "plain" else case.conv_state
        state, alone_state = start.copy(), start.copy()
        if what == "plain":
            out = ops.plain(*case.gates, state, slots, case.offsets)
            alone = ops.plain(*gates, alone_state, slots, offsets)
        else:
            out = ops.conv(case.x, case.weight, state, slots, case.offsets)
            alone = ops.conv(case.x[index], case.weight, alone_state, slots, offsets)
        check(out, alone, state, alone_state, what)
        assert_untouched(state, start, slots[real], what)

    # Either of the two ids may be the padding one.
    for ids, rings in ((slots, case.ring_slots), (case.slots, ring_slots), (slots, ring_slots)):
        state, ring = case.state.copy(), case.new_ring()
        out = ops.verify(*case.gates, state, ring, ids, rings, case.offsets, k)
        alone_ring = case.new_ring()
        alone = ops.verify(
            *gates, case.state.copy(), alone_ring, case.slots, case.ring_slots, offsets, k
        )
        check(out, alone, state, case.state, "verify")
        assert_same_pool(ring, alone_ring, "ring of a verify with padding")
        folded, alone_folded = case.state.copy(), case.state.copy()
        ops.fold(folded, ring, ids[None], rings[None], [window] * 3, k)
        accepted = [window if b in real else 0 for b in range(3)]
        ops.fold(alone_folded, ring, case.slots[None], case.ring_slots[None], accepted, k)
        assert_same_pool(folded, alone_folded, "fold with padding")
        assert_untouched(folded, case.state, case.slots[real], "fold")


@pools
def test_c03_slot_0_is_a_slot_like_any_other(ops_of, dtype):
    ops = ops_of(dtype)
    results = []
    for slot in (0, 3):
        case = Case(G, [3], DTYPES[dtype], slots=[slot], ring_slots=[slot])
        plain, conv, folded, ring = (
            case.state.copy(),
            case.conv_state.copy(),
            case.state.copy(),
            case.new_ring(),
        )
        results.append(
            [
                ops.plain(*case.gates, plain, [slot], case.offsets),
                ops.conv(case.x, case.weight, conv, [slot], case.offsets),
                ops.verify(*case.gates, folded, ring, [slot], [slot], case.offsets, 2),
            ]
        )
        ops.fold(folded, ring, [[slot]], [[slot]], [2], 2)
        assert folded != case.state
        results[-1] += [pool.bits[slot] for pool in (plain, conv, folded, ring)]
    for at_0, at_3 in zip(*results, strict=True):
        assert_same_bits(at_0, at_3, "slot 0 against slot 3")


@pools
@pytest.mark.parametrize("real", [0, 2, 3])
def test_c04_rows_without_tokens_may_repeat_the_slot_of_a_real_row(ops_of, dtype, real):
    """A batch captured at 4 rows, replayed with one."""
    ops = ops_of(dtype)
    lengths = [0, 0, 0, 0]
    lengths[real] = 3
    alone = Case(G, [3], DTYPES[dtype], slots=[2], ring_slots=[1])
    want_plain, want_conv = alone.state.copy(), alone.conv_state.copy()
    want_folded, want_ring = alone.state.copy(), alone.new_ring()
    want = [
        ops.plain(*alone.gates, want_plain, [2], [0, 3]),
        ops.conv(alone.x, alone.weight, want_conv, [2], [0, 3]),
        ops.verify(*alone.gates, want_folded, want_ring, [2], [1], [0, 3], 2),
    ]
    ops.fold(want_folded, want_ring, [[2]], [[1]], [2], 2)

    slots, rings, offsets = [2] * 4, [1] * 4, offsets_of(lengths)
    plain, conv = alone.state.copy(), alone.conv_state.copy()
    folded, ring = alone.state.copy(), alone.new_ring()
    got = [
        ops.plain(*alone.gates, plain, slots, offsets),
        ops.conv(alone.x, alone.weight, conv, slots, offsets),
        ops.verify(*alone.gates, folded, ring, slots, rings, offsets, 2),
    ]
    accepted = [0, 0, 0, 0]
    accepted[real] = 2
    ops.fold(folded, ring, [slots], [rings], accepted, 2)
    for a, b in zip(got, want, strict=True):
        assert_same_bits(a, b, "output of the one real row")
    for a, b in zip(
        (plain, conv, folded, ring), (want_plain, want_conv, want_folded, want_ring), strict=True
    ):
        assert_same_pool(a, b, "pool of the one real row")


def test_c06_a_row_has_one_slot_for_reading_and_writing(ops_of):
    """A choice: no separate write slot. To read without writing is what the verify does."""
    for op in (gdn_graph.ops.gated_delta_recurrence_fwd, gdn_graph.ops.gated_delta_conv1d_fwd):
        slots = [p for p in inspect.signature(op).parameters if "slot" in p]
        assert slots == ["slot_idx"]
    ops = ops_of("f32")
    case = Case(G, [2, 3])
    plain_state, state = case.state.copy(), case.state.copy()
    want = ops.plain(*case.gates, plain_state, case.slots, case.offsets)
    rings = case.ring_slots
    got = ops.verify(*case.gates, state, case.new_ring(), case.slots, rings, case.offsets, 2)
    assert_same_bits(got, want, "output of the row that is only read")
    assert_same_pool(state, case.state, "pool of the row that is only read")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("accepted", [0, 17, 2**31, 2**32 - 1])
def test_c07_a_row_that_accepts_nothing_or_committed_itself_ignores_its_ring(
    ops_of, dtype, accepted
):
    ops = ops_of(dtype)
    case = Case(G, [3, 3, 3], DTYPES[dtype], slots=[0, 2, 1])
    ring = Pool.of(DType.float32, np.full(case.ring_shape, np.nan, np.float32))
    state = case.state.copy()
    ids = (case.slots[None], case.ring_slots[None])
    ops.fold(state, ring, *ids, [accepted] * 3, 2)
    assert_same_pool(state, case.state, "pool")
    # The control: one accepted record of this ring ruins the row, and that row only.
    ops.fold(state, ring, *ids, [accepted, 1, accepted], 2)
    assert np.isnan(state.values[2]).all()
    assert_untouched(state, case.state, [2], "pool")


@pytest.mark.parametrize("op", ["plain", "verify", "conv", "rollback"])
def test_c08_no_output_is_left_as_the_allocator_gave_it(ops_of, op):
    """Rows that take no part and tokens of no row, after calls that left NaN in that memory."""
    ops = ops_of("f32")
    case = Case(G, [3, 4, 2], slots=[0, PADDING, 2], tail=5)
    case.offsets += 2  # two tokens before the first row, three after the last

    def call(gates, x, k=3):
        args = (case.slots, case.offsets)
        if op == "plain":
            return ops.plain(*gates, case.state.copy(), *args)
        if op == "verify":
            rings = case.ring_slots
            return ops.verify(
                *gates, case.state.copy(), case.new_ring(), args[0], rings, args[1], k
            )
        if op == "conv":
            return ops.conv(x, case.weight, case.conv_state.copy(), *args)
        return ops.conv_verify(x, case.weight, case.conv_state.copy(), *args, x, case.offsets, k)[1]

    nan = np.full_like(case.qkv, np.nan)
    own = np.zeros(len(case.qkv), bool)
    for b in (0, 2):
        own[row_of(case, b)] = True
    for _ in range(5):
        assert np.isnan(call((nan, case.decay, case.beta), nan)[own]).all()
        out = call(case.gates, case.x)
        assert not out[~own].any()
        assert np.isfinite(out).all() and out[own].all(axis=1).any()
    if op == "rollback":
        call((nan, case.decay, case.beta), nan)
        assert not call(case.gates, case.x, k=0).any()


def test_c08_a_batch_of_padding_alone_and_a_batch_of_no_rows(ops_of):
    ops = ops_of("bf16")
    for slots in ([PADDING] * 3, []):
        case = Case(G, [2, 0, 3] if slots else [], DType.bfloat16, slots=slots, tail=2)
        state, conv_state, ring = case.state.copy(), case.conv_state.copy(), case.new_ring()
        rings = u32(slots)
        outputs = [
            ops.plain(*case.gates, state, slots, case.offsets),
            ops.verify(*case.gates, state, ring, slots, rings, case.offsets, 2),
            ops.conv(case.x, case.weight, conv_state, slots, case.offsets),
        ]
        ids = np.zeros((2, len(slots)), np.uint32) + PADDING
        ops.fold(state, ring, ids, ids, [2] * len(slots), 2)
        for out in outputs:
            assert len(out) == len(case.qkv) and not out.any()
        assert_same_pool(state, case.state, "pool")
        assert_same_pool(conv_state, case.conv_state, "windows")
        assert_same_pool(ring, case.new_ring(), "ring")


def test_c08_no_tokens_at_all(ops_of):
    ops = ops_of("f32")
    case = Case(G, [0, 0], slots=[0, 1])
    state, conv_state, ring = case.state.copy(), case.conv_state.copy(), case.new_ring()
    assert ops.plain(*case.gates, state, case.slots, [0, 0, 0]).shape == (0, G.value_dim)
    rings = case.ring_slots
    assert len(ops.verify(*case.gates, state, ring, case.slots, rings, [0, 0, 0], 2)) == 0
    assert len(ops.conv(case.x, case.weight, conv_state, case.slots, [0, 0, 0])) == 0
    assert_same_pool(state, case.state, "pool")
    assert_same_pool(conv_state, case.conv_state, "windows")
