"""What an op must not touch, shown with poison: every other byte is as it was."""

from __future__ import annotations

import numpy as np
import pytest
from harness import (
    DTYPES,
    GEOMETRIES,
    PADDING,
    Case,
    Pool,
    assert_same_bits,
    assert_same_pool,
    offsets_of,
)

GEOMETRY = GEOMETRIES["2x3x32x24"]
dtypes = pytest.mark.parametrize("dtype", DTYPES)


def others(pool: Pool, rows: list[int]) -> np.ndarray:
    """The rows of a pool that are not among these."""
    return np.delete(pool.bits, rows, axis=0)


def verify(ops, case, state, ring, k=None):
    return ops.verify(
        *case.gates,
        state,
        ring,
        case.slots,
        case.ring_slots,
        case.offsets,
        case.k if k is None else k,
    )


@dtypes
def test_pool_rows_no_one_owns(ops_of, dtype):
    ops = ops_of(dtype)
    case = Case(GEOMETRY, [3, 1, 20], DTYPES[dtype])
    state, conv_state = case.state.copy(), case.conv_state.copy()
    ops.plain(*case.gates, state, case.slots, case.offsets)
    ops.conv(case.x, case.weight, conv_state, case.slots, case.offsets)
    assert_same_bits(others(state, case.owned), others(case.state, case.owned), "other states")
    assert_same_bits(
        others(conv_state, case.owned), others(case.conv_state, case.owned), "other windows"
    )
    for b in case.owned:
        assert (state.bits[b] != case.state.bits[b]).any(), "owned rows change, or this is blind"


def test_ring_padding_and_ring_rows_no_one_owns(ops_of):
    case = Case(GEOMETRY, [3, 1, 4], stride_padding=7)
    ring = case.new_ring()
    poison = ring.copy()
    verify(ops_of("f32"), case, case.state.copy(), ring)
    elements = GEOMETRY.record_elements
    assert_same_bits(ring.bits[..., elements:], poison.bits[..., elements:], "record padding")
    rows = [int(r) for r in case.ring_slots]
    assert_same_bits(others(ring, rows), others(poison, rows), "other ring rows")
    for b, tokens in enumerate(case.lengths):
        row = ring.bits[rows[b]]
        assert_same_bits(row[:, tokens:], poison.bits[rows[b]][:, tokens:], "later positions")
        assert not np.isnan(ring.values[rows[b]][:, :tokens, :elements]).any()


@dtypes
def test_without_drafts_the_verify_is_plain_and_no_ring_is_touched(ops_of, dtype):
    ops = ops_of(dtype)
    case = Case(GEOMETRY, [1, 3, 0, 2], DTYPES[dtype])
    plain_state, state, ring = case.state.copy(), case.state.copy(), case.new_ring()
    plain = ops.plain(*case.gates, plain_state, case.slots, case.offsets)
    case.ring_slots = case.ring_slots + 1000  # not even looked at
    assert_same_bits(verify(ops, case, state, ring, k=0), plain, "output at K = 0")
    assert_same_pool(state, plain_state, "pool at K = 0")
    assert_same_pool(ring, case.new_ring(), "ring at K = 0")


def test_the_fold_without_drafts_does_nothing(ops_of):
    """Before any check: even wrong ids and a wrong ring go unseen."""
    case = Case(GEOMETRY, [3, 2])
    state, ring = case.state.copy(), Pool.poison(case.dtype, (1, 5, 2, 3))
    ops_of("f32").fold(state, ring, [[999, 0]], [[999, 0]], [2, 2], 0)
    assert_same_pool(state, case.state, "pool after a fold at K = 0")


@dtypes
def test_a_row_longer_than_the_ring_commits_itself(ops_of, dtype):
    ops = ops_of(dtype)
    lengths = [2, GEOMETRY.ring_len + 1, 3]
    case = Case(GEOMETRY, lengths, DTYPES[dtype], k=3)
    plain_state, state, ring = case.state.copy(), case.state.copy(), case.new_ring()
    plain = ops.plain(*case.gates, plain_state, case.slots, case.offsets)
    assert_same_bits(verify(ops, case, state, ring), plain, "output")
    long_slot, long_ring = int(case.slots[1]), int(case.ring_slots[1])
    assert_same_bits(state.bits[long_slot], plain_state.bits[long_slot], "long row's state")
    assert_same_bits(others(state, [long_slot]), others(case.state, [long_slot]), "other states")
    assert_same_bits(ring.bits[long_ring], case.new_ring().bits[long_ring], "long row's ring row")
    # The fold lands the short rows and leaves the long one alone: its count is above the ring.
    ops.fold(state, ring, case.slots[None], case.ring_slots[None], lengths, 3)
    assert_same_pool(state, plain_state, "pool after the fold")


@dtypes
def test_zero_length_rows_and_padding_rows_touch_nothing(ops_of, dtype):
    """Their ids are not even checked; a padding row's outputs are zero."""
    ops = ops_of(dtype)
    case = Case(GEOMETRY, [2, 0, 3, 2, 2], DTYPES[dtype], k=3)
    plain = ops.plain(*case.gates, case.state.copy(), case.slots, case.offsets)
    case.slots[1] = case.ring_slots[1] = 10**6
    case.slots[2] = PADDING
    case.ring_slots[4] = PADDING
    state, ring = case.state.copy(), case.new_ring()
    out = verify(ops, case, state, ring)
    padded = np.r_[case.offsets[2] : case.offsets[3], case.offsets[4] : case.offsets[5]]
    taking_part = np.setdiff1d(np.arange(len(out)), padded)
    assert not out[padded].any(), "padding rows give zeros"
    assert_same_bits(out[taking_part], plain[taking_part], "the other rows")
    rows = [int(case.ring_slots[0]), int(case.ring_slots[3])]
    assert_same_bits(others(ring, rows), others(case.new_ring(), rows), "other ring rows")
    # A fold of these rows: only rows 0 and 3 accept something and are not padding.
    accepted = [2, 0, 3, 2, 2]
    table = case.slots[None], case.ring_slots[None]
    ops.fold(state, ring, *table, accepted, 3)
    changed = [int(case.slots[0]), int(case.slots[3])]
    assert_same_bits(others(state, changed), others(case.state, changed), "other states")
    for b in changed:
        assert (state.bits[b] != case.state.bits[b]).any()


def test_a_long_row_with_a_padding_ring_id_takes_no_part(ops_of):
    """A padding row of the ring is one whatever its length; without drafts the id is not read."""
    ops = ops_of("f32")
    case = Case(GEOMETRY, [2, GEOMETRY.ring_len + 1], k=3)
    case.ring_slots[1] = PADDING
    state, ring = case.state.copy(), case.new_ring()
    out = verify(ops, case, state, ring)
    assert out[:2].all() and not out[2:].any()
    assert_same_pool(state, case.state, "pool")
    assert verify(ops, case, state, ring, k=0).all()


@dtypes
def test_padding_and_zero_length_rows_of_the_plain_ops(ops_of, dtype):
    ops = ops_of(dtype)
    case = Case(GEOMETRY, [2, 0, 3], DTYPES[dtype], tail=4)
    case.slots[1] = 10**6
    case.slots[2] = PADDING
    state, conv_state = case.state.copy(), case.conv_state.copy()
    out = ops.plain(*case.gates, state, case.slots, case.offsets)
    conv = ops.conv(case.x, case.weight, conv_state, case.slots, case.offsets)
    owned = [int(case.slots[0])]
    for got, pool, start in ((out, state, case.state), (conv, conv_state, case.conv_state)):
        assert got[:2].all() and not got[2:].any(), "padding rows and tokens of no row are zero"
        assert_same_bits(others(pool, owned), others(start, owned), "other rows")


def test_tokens_before_the_first_row_and_after_the_last(ops_of):
    """MAX's rollback passes tails; a gap at the front is as legal."""
    ops = ops_of("f32")
    case = Case(GEOMETRY, [3, 2], tail=3)
    whole = ops.plain(*case.gates, case.state.copy(), case.slots, case.offsets)
    assert whole[:5].all() and not whole[5:].any()
    shifted = ops.plain(*case.gates, case.state.copy(), case.slots[:1], [3, 5])
    assert not shifted[:3].any() and not shifted[5:].any()
    alone = ops.plain(
        *(x[3:5] for x in case.gates), case.state.copy(), case.slots[:1], offsets_of([2])
    )
    assert_same_bits(shifted[3:5], alone, "a row after a gap")


def test_no_rows_at_all(ops_of):
    ops = ops_of("f32")
    case = Case(GEOMETRY, [], tail=2)
    state = case.state.copy()
    assert not ops.plain(*case.gates, state, case.slots, case.offsets).any()
    assert not ops.conv(case.x, case.weight, case.conv_state, case.slots, case.offsets).any()
    ops.fold(state, case.new_ring(), np.zeros((2, 0)), np.zeros((2, 0)), [], 1)
    assert_same_pool(state, case.state, "pool")


def test_each_op_returns_memory_of_its_own(ops_of):
    ops = ops_of("f32")
    case = Case(GEOMETRY, [2])
    first = ops.plain(*case.gates, case.state.copy(), case.slots, case.offsets)
    kept = first.copy()
    ops.plain(-case.qkv, case.decay, case.beta, case.state.copy(), case.slots, case.offsets)
    assert_same_bits(first, kept, "an earlier result")
