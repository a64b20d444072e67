"""The block form: to the bit with itself, near the specification, and another form than exact."""

from __future__ import annotations

import numpy as np
import pytest
from harness import (
    DTYPES,
    GEOMETRIES,
    Case,
    assert_same_bits,
    assert_same_pool,
    offsets_of,
    relative_error,
)

from gdn_graph import GatedDeltaGeometry, reference
from gdn_graph.geometry import PADDING

# The last: a tile of the block form larger than L1, and a value dim that ends in a tail.
SIZES = {**GEOMETRIES, "1x1x300x72": GatedDeltaGeometry(1, 1, 300, 72, ring_len=16)}
geometries = pytest.mark.parametrize("geometry", SIZES.values(), ids=SIZES)
pools = pytest.mark.parametrize("dtype", DTYPES)
# Every length of a block, and rows of several blocks with every tail.
LENGTHS = [1, 2, 3, 4, 5, 0, 6, 7, 8, 13]


@geometries
@pools
def test_verify_and_fold_equal_plain_over_every_prefix(ops_of, geometry, dtype):
    ops = ops_of(dtype)
    case = Case(geometry, LENGTHS, DTYPES[dtype], seed=11)
    state, ring = case.state.copy(), case.new_ring()
    out = ops.verify(
        *case.gates, state, ring, case.slots, case.ring_slots, case.offsets, case.k, "block"
    )
    assert_same_pool(state, case.state, "pool after verify")
    previous = None
    for accepted in range(max(LENGTHS) + 1):
        counts = [min(accepted, t) for t in LENGTHS]
        folded = case.state.copy()
        table = (case.slots[None], case.ring_slots[None], counts, case.k)
        ops.fold(folded, ring, *table, "block")
        gates, offsets = case.take(counts)
        plain_state = case.state.copy()
        plain = ops.plain(*gates, plain_state, case.slots, offsets, "block")
        assert_same_bits(out[case.index(counts)], plain, f"outputs of {accepted} tokens")
        assert_same_pool(folded, plain_state, f"fold of {accepted} against plain")
        assert folded != previous, "one record more must change the pool"
        previous = folded


@geometries
def test_other_rows_and_their_order_do_not_change_a_row(ops_of, geometry):
    ops = ops_of("f32")
    case = Case(geometry, [9, 2, 7, 4], seed=12)
    state = case.state.copy()
    batch = ops.plain(*case.gates, state, case.slots, case.offsets, "block")
    order = [2, 0, 3, 1]
    index = np.concatenate(
        [np.arange(case.offsets[b], case.offsets[b + 1], dtype=np.int64) for b in order]
    )
    moved_state = case.state.copy()
    moved = ops.plain(
        *(x[index] for x in case.gates),
        moved_state,
        case.slots[order],
        offsets_of([case.lengths[b] for b in order]),
        "block",
    )
    assert_same_bits(moved, batch[index], "permuted batch")
    assert_same_pool(moved_state, state, "pool of the permuted batch")


@geometries
@pytest.mark.parametrize("lengths", [[3, 4, 9], [70]], ids=str)
def test_error_against_float64(ops_of, geometry, lengths):
    """The bounds of the exact form (test_accuracy.py)."""
    case = Case(geometry, lengths, seed=13)
    state = case.state.copy()
    out = ops_of("f32").plain(*case.gates, state, case.slots, case.offsets, "block")
    true_state = case.state.exact
    true = reference.gated_delta_recurrence_fwd(
        *(x.astype(np.float64) for x in case.gates), true_state, case.slots, case.offsets
    )
    assert relative_error(out, true) < 2e-5
    owned = case.owned
    assert relative_error(state.values[owned], true_state[owned]) < 1e-5


def test_block_is_another_form_than_exact(ops_of):
    """What the block form gives up, and the control of the equalities above."""
    ops = ops_of("f32")
    case = Case(GEOMETRIES["1x2x128x128"], [8], seed=14)
    states = {a: case.state.copy() for a in ("exact", "block", "cut", "mixed")}
    exact = ops.plain(*case.gates, states["exact"], case.slots, case.offsets)
    block = ops.plain(*case.gates, states["block"], case.slots, case.offsets, "block")
    assert relative_error(block, exact) < 1e-5
    with pytest.raises(AssertionError, match="ulps"):
        assert_same_bits(block, exact, "block against exact")
    for tokens in (range(0, 3), range(3, 8)):
        gates = (x[tokens] for x in case.gates)
        ops.plain(*gates, states["cut"], case.slots, [0, len(tokens)], "block")
    assert states["cut"] != states["block"], "a row cut within a block"
    ring = case.new_ring()
    rows = (case.slots, case.ring_slots)
    ops.verify(*case.gates, case.state.copy(), ring, *rows, case.offsets, case.k, "block")
    ops.fold(states["mixed"], ring, *(ids[None] for ids in rows), [8], case.k)
    assert states["mixed"] != states["block"], "the fold of the other algorithm"
    mixed, block_state = (states[a].values[case.owned] for a in ("mixed", "block"))
    assert relative_error(mixed, block_state) < 1e-5


def test_a_row_cut_between_blocks_gives_the_same_bits(ops_of):
    """Float32 pools: 9 tokens at once, and as 4 + 4 + 1."""
    ops = ops_of("f32")
    case = Case(GEOMETRIES["2x3x32x24"], [9], seed=15)
    whole_state, state = case.state.copy(), case.state.copy()
    whole = ops.plain(*case.gates, whole_state, case.slots, case.offsets, "block")
    for begin, end in ((0, 4), (4, 8), (8, 9)):
        gates = (x[begin:end] for x in case.gates)
        out = ops.plain(*gates, state, case.slots, [0, end - begin], "block")
        assert_same_bits(out, whole[begin:end], f"tokens {begin} to {end}")
    assert_same_pool(state, whole_state, "state")


@pools
def test_padding_rows_and_rows_longer_than_the_ring(ops_of, dtype):
    """Padding by either id touches nothing; a row longer than the ring commits itself."""
    ops = ops_of(dtype)
    geometry = GatedDeltaGeometry(2, 6, 32, 24, ring_len=4)
    slots, ring_slots = [1, PADDING, 3, 0], [2, 0, PADDING, 1]
    case = Case(geometry, [3, 2, 4, 11], DTYPES[dtype], 16, slots, ring_slots, tail=2, k=3)
    state, ring = case.state.copy(), case.new_ring()
    out = ops.verify(
        *case.gates, state, ring, case.slots, case.ring_slots, case.offsets, case.k, "block"
    )
    for begin, end in ((3, 9), (20, 22)):
        assert not out[begin:end].any(), f"outputs of tokens {begin} to {end}, of no row"
    plain_state = case.state.copy()
    long_row = slice(9, 20)
    gates = (x[long_row] for x in case.gates)
    plain = ops.plain(*gates, plain_state, case.slots[3:], [0, 11], "block")
    assert_same_bits(out[long_row], plain, "the long row")
    assert_same_pool(state, plain_state, "only the long row's state is written")
    untouched = case.new_ring()
    assert np.array_equal(ring.bits[[0, 1]], untouched.bits[[0, 1]]), (
        "rings of rows without records"
    )
    assert not np.array_equal(ring.bits[2], untouched.bits[2])
