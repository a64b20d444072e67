"""Accepted counts, ragged windows and rollback. Case numbers are those of docs/guarantees.md.

Counts are window rows kept: 1 + accepted drafts.
"""

from __future__ import annotations

import numpy as np
import pytest
from common import TOLERANCE, assert_untouched, plain_spec, row_of
from harness import (
    DTYPES,
    GEOMETRIES,
    Case,
    Ops,
    Pool,
    assert_same_bits,
    assert_same_pool,
    relative_error,
)

from gdn_graph import GatedDeltaGeometry, reference

G = GEOMETRIES["2x3x32x24"]
pools = pytest.mark.parametrize("dtype", ["f32", "bf16"])


def ring_of(length: int) -> GatedDeltaGeometry:
    return GatedDeltaGeometry(2, 6, 32, 24, ring_len=length)


class Engine:
    """Windows of one batch verified and committed in turn, beside the plain ops on kept tokens."""

    def __init__(self, ops: Ops, case: Case) -> None:
        self.ops, self.case = ops, case
        self.state, self.conv_state = case.state.copy(), case.conv_state.copy()
        self.plain_state, self.plain_conv = case.state.copy(), case.conv_state.copy()
        self.ring = case.new_ring()

    def round(self, case: Case, counts: list[int], *, fold: bool = True) -> None:
        """Verifies the window, keeps counts of it; holds outputs and pools to the plain ops'."""
        ops, slots, rings = self.ops, self.case.slots, self.case.ring_slots
        weight, k = self.case.weight, max(case.lengths) - 1
        gates, offsets = case.take(counts)
        index = case.index(counts)
        kept_x = case.x[index]
        out = ops.verify(*case.gates, self.state, self.ring, slots, rings, case.offsets, k)
        conv, _ = ops.conv_verify(
            case.x, weight, self.conv_state, slots, case.offsets, kept_x, offsets, k
        )
        if fold:
            ops.fold(self.state, self.ring, slots[None], rings[None], counts, k)
        want = ops.plain(*gates, self.plain_state, slots, offsets)
        want_conv = ops.conv(kept_x, weight, self.plain_conv, slots, offsets)
        assert_same_bits(out[index], want, "outputs of the kept tokens")
        assert_same_bits(conv[index], want_conv, "conv of the kept tokens")
        assert_same_pool(self.state, self.plain_state, "pool after the round")
        assert_same_pool(self.conv_state, self.plain_conv, "windows after the round")


@pools
@pytest.mark.parametrize("counts", [[0, 0, 0], [0, 3, 0], [2, 0, 1]], ids=str)
def test_c15_nothing_accepted_changes_nothing(ops_of, dtype, counts):
    case = Case(G, [3, 3, 3], DTYPES[dtype], slots=[0, 3, 1])
    engine = Engine(ops_of(dtype), case)
    engine.round(case, counts)
    kept = [b for b in range(3) if counts[b]]
    assert_untouched(engine.state, case.state, case.slots[kept], "pool")
    assert_untouched(engine.conv_state, case.conv_state, case.slots[kept], "windows")


@pools
@pytest.mark.parametrize("window", [2, 4, 8])
def test_c17_a_plain_decode_after_a_speculated_step(ops_of, dtype, window):
    """Any count kept of a window, then one token: as if the tokens had come one after another."""
    ops = ops_of(dtype)
    for kept in range(1, window + 1):
        case = Case(G, [window, window], DTYPES[dtype], seed=kept)
        engine = Engine(ops, case)
        engine.round(case, [kept, window + 1 - kept])
        decode = Case(G, [1, 1], DTYPES[dtype], seed=kept + 100)
        engine.round(decode, [1, 1])  # K = 0


@pools
def test_c19_each_token_has_the_gates_of_its_own(ops_of, dtype):
    """A mixed batch with a gate of its own for each token and head, against the specification."""
    ops = ops_of(dtype)
    case = Case(G, [1, 3, 2], DTYPES[dtype], slots=[1, 2, 0])
    steps = np.arange(case.decay.size, dtype=np.float32).reshape(case.decay.shape)
    case.decay[:] = 0.5 + steps / 80
    case.beta[:] = 1 - steps / 50
    state, ring = case.state.copy(), case.new_ring()
    out = ops.verify(*case.gates, state, ring, case.slots, case.ring_slots, case.offsets, 2)
    want, _ = plain_spec(case)
    assert relative_error(out, want) < TOLERANCE
    # Control: any two tokens' gates exchanged would show.
    for a in range(6):
        for b in range(a):
            swapped = Case(G, [1, 3, 2], DTYPES[dtype], slots=[1, 2, 0])
            swapped.decay[:], swapped.beta[:] = case.decay, case.beta
            swapped.beta[[a, b]] = case.beta[[b, a]]
            assert relative_error(plain_spec(swapped)[0], want) > 100 * TOLERANCE


@pools
def test_c20_plain_draft_and_prefill_rows_in_one_launch(ops_of, dtype):
    """Windows of 1, 4, 1, 3 and a prefill of 7, which is longer than the ring."""
    ops = ops_of(dtype)
    lengths = [1, 4, 1, 7, 3]
    case = Case(ring_of(4), lengths, DTYPES[dtype], k=3)
    plain, state, ring = case.state.copy(), case.state.copy(), case.new_ring()
    want = ops.plain(*case.gates, plain, case.slots, case.offsets)
    out = ops.verify(*case.gates, state, ring, case.slots, case.ring_slots, case.offsets, 3)
    assert_same_bits(out, want, "mixed rows in one launch")
    assert_untouched(state, case.state, [case.slots[3]], "pool")
    ops.fold(state, ring, case.slots[None], case.ring_slots[None], lengths, 3)
    assert_same_pool(state, plain, "pool after the fold")
    for b in range(5):  # each row as if it were alone
        alone = case.state.copy()
        gates = tuple(x[row_of(case, b)] for x in case.gates)
        out = ops.plain(*gates, alone, case.slots[b : b + 1], [0, lengths[b]])
        assert_same_bits(out, want[row_of(case, b)], f"row {b} alone")
        slot = case.slots[b]
        assert_same_bits(alone.bits[slot], plain.bits[slot], f"state of row {b} alone")


@pools
@pytest.mark.parametrize(
    ("offsets", "capacity"),
    [([0, 2, 5], 4), ([0, 4, 6, 9], 4), ([0, 0, 1, 1, 4], 4), ([0, 1, 9], 8), ([3, 4, 6, 6], 4)],
    ids=str,
)
def test_c21_ragged_draft_lengths(ops_of, dtype, offsets, capacity):
    lengths = np.diff(offsets)
    case = Case(ring_of(capacity), lengths, DTYPES[dtype], tail=3, k=capacity - 1)
    case.offsets = np.array(offsets, np.uint32)
    ops = ops_of(dtype)
    state, ring = case.state.copy(), case.new_ring()
    out = ops.verify(*case.gates, state, ring, case.slots, case.ring_slots, offsets, capacity - 1)
    want, _ = plain_spec(case)
    assert relative_error(out, want) < TOLERANCE
    long = [b for b, n in enumerate(lengths) if n > capacity]
    assert_untouched(state, case.state, case.slots[long], "pool")
    plain = case.state.copy()
    ops.plain(*case.gates, plain, case.slots, offsets)
    ops.fold(state, ring, case.slots[None], case.ring_slots[None], lengths, capacity - 1)
    assert_same_pool(state, plain, "pool after the fold")


@pools
@pytest.mark.parametrize("window", [5, 6, 8, 9, 16, 33])
@pytest.mark.parametrize("ring_len", [8, 16, 33])
def test_c22_wide_windows(ops_of, dtype, window, ring_len):
    """A window up to the ring length is recorded whole; more drafts than it holds are an error;
    a longer row in a launch of fewer drafts commits itself."""
    case = Case(ring_of(ring_len), [window, 2], DTYPES[dtype], k=0)
    ops = ops_of(dtype)
    args = (case.slots, case.ring_slots, case.offsets)
    if window > ring_len:
        state, ring = case.state.copy(), case.new_ring()
        with pytest.raises(ValueError, match="ring has length .*; need at least verify_width"):
            ops.verify(*case.gates, state, ring, *args, window - 1)
        assert_same_pool(state, case.state, "pool")
        assert_same_pool(ring, case.new_ring(), "ring")
    k = min(window, ring_len) - 1
    state, ring, plain = case.state.copy(), case.new_ring(), case.state.copy()
    ops.verify(*case.gates, state, ring, *args, k)
    ops.fold(state, ring, case.slots[None], case.ring_slots[None], [window, 2], k)
    ops.plain(*case.gates, plain, case.slots, case.offsets)
    assert_same_pool(state, plain, "pool after verify and fold")


@pools
@pytest.mark.parametrize("width", range(2, 9))
def test_c24_the_window_moves_by_what_was_kept(ops_of, dtype, width):
    """All drafts rejected, and any other count: the window is shifted by exactly the kept rows."""
    g = GatedDeltaGeometry(1, 2, 8, 5, conv_width=width)
    ops = ops_of(dtype)
    for kept in range(5):
        case = Case(g, [4], DTYPES[dtype], slots=[1], seed=kept)
        case.x = case.x.astype(np.float16).astype(np.float32)  # whole in any pool but bfloat16
        state = case.conv_state.copy()
        before = state.values[1].copy()
        ops.conv_verify(case.x, case.weight, state, [1], [0, 4], case.x[:kept], [0, kept], 3)
        inputs = Pool.of(state.dtype, case.x[:kept].T).values
        want = np.concatenate([before, inputs], axis=1)[:, kept:]
        assert_same_bits(state.values[1], want, f"window of width {width} after {kept} kept")
        assert_untouched(state, case.conv_state, [1] if kept else [], "windows")


@pools
def test_c25_a_commit_into_another_slot(ops_of, dtype):
    """The rollback launch writes the slot it is given; with as many kept rows as the window is
    long, what lay there before does not matter."""
    ops = ops_of(dtype)
    case = Case(G, [4], DTYPES[dtype], slots=[1])
    for kept in (1, 2, 3, 4):
        state = case.conv_state.copy()
        for moved in (True, False):
            # Slot 2 gets a copy of the window first, or stays poisoned.
            if moved:
                state.bits[2] = state.bits[1]
            x, offsets = case.x[:kept], [0, kept]
            ops.conv_verify(case.x, case.weight, state, [2], [0, 0], x, offsets, 3)
            same_place = case.conv_state.copy()
            ops.conv_verify(case.x, case.weight, same_place, [1], [0, 4], x, offsets, 3)
            if moved or kept >= G.conv_width - 1:
                assert_same_bits(state.bits[2], same_place.bits[1], f"window after {kept} kept")
            assert_untouched(state, case.conv_state, [2], "windows")
            state = case.conv_state.copy()


@pools
@pytest.mark.parametrize("lengths", [[1, 1, 1], [1, 0, 1], [0, 0, 0], [1, 5, 0]], ids=str)
def test_c26_no_drafts_is_plain_decode(ops_of, dtype, lengths):
    """K = 0 through the verify op, rows without tokens among them: the ring is not looked at."""
    ops = ops_of(dtype)
    case = Case(G, lengths, DTYPES[dtype])
    plain, state, ring = case.state.copy(), case.state.copy(), case.new_ring()
    want = ops.plain(*case.gates, plain, case.slots, case.offsets)
    wild = np.full(3, 2**32 - 2, np.uint32)
    out = ops.verify(*case.gates, state, ring, case.slots, wild, case.offsets, 0)
    assert_same_bits(out, want, "verify at K = 0")
    assert_same_pool(state, plain, "pool at K = 0")
    assert_same_pool(ring, case.new_ring(), "ring at K = 0")
    before = state.copy()
    ops.fold(state, ring, wild[None], wild[None], lengths, 0)
    assert_same_pool(state, before, "pool after a fold at K = 0")


@pools
def test_c27_round_after_round(ops_of, dtype):
    """Eight rounds with other windows and counts each time, held to the plain ops after each."""
    ops = ops_of(dtype)
    first = Case(G, [4, 4, 4], DTYPES[dtype], slots=[2, 0, 3])
    engine = Engine(ops, first)
    rng = np.random.default_rng(3)
    for i in range(8):
        lengths = [int(n) for n in rng.integers(1, 6, 3)]
        case = Case(G, lengths, DTYPES[dtype], seed=i)
        engine.round(case, [int(rng.integers(0, n + 1)) for n in lengths])


def test_c27_a_round_that_is_not_folded_shows(ops_of):
    """The control of the rounds above."""
    case = Case(G, [4, 4], slots=[2, 0])
    engine = Engine(ops_of("f32"), case)
    with pytest.raises(AssertionError, match="pool after the round"):
        engine.round(case, [2, 3], fold=False)


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_c30_a_verify_leaves_every_pool_byte(ops_of, geometry, dtype):
    """All rows, those of the batch and those of others, whatever the drafts hold."""
    ops = ops_of(dtype)
    case = Case(geometry, [5, 1, 3], DTYPES[dtype])
    case.qkv[3:] *= 1e30
    case.qkv[1] = np.nan
    state, ring = case.state.copy(), case.new_ring()
    ops.verify(*case.gates, state, ring, case.slots, case.ring_slots, case.offsets, 4)
    assert_same_pool(state, case.state, "pool after a verify")
    assert_untouched(ring, case.new_ring(), case.ring_slots, "ring")


@pytest.mark.parametrize("dtype", DTYPES)
def test_c31_the_memory_of_a_request_is_what_the_formula_says(dtype):
    for g in GEOMETRIES.values():
        state = Case(g, [1], DTYPES[dtype], slots=[0]).state
        per_slot = state.bits.nbytes // len(state.bits)
        assert per_slot == g.recurrent_state_bytes(dtype=DTYPES[dtype])
        windows = Case(g, [1], DTYPES[dtype], slots=[0]).conv_state
        assert windows.bits.nbytes // len(windows.bits) == g.conv_state_bytes(dtype=DTYPES[dtype])
        assert g.ring_bytes(layers=3) == 3 * 4 * int(np.prod(g.ring_shape(1)))
        assert g.record_stride >= g.record_elements


@pools
def test_c31_records_do_not_reach_into_the_padding(ops_of, dtype):
    """Slots and ring rows cost what the formula says, since no record is wider than it says."""
    ops = ops_of(dtype)
    case = Case(G, [4, 2], DTYPES[dtype], stride_padding=13)
    ring = case.new_ring()
    ops.verify(*case.gates, case.state.copy(), ring, case.slots, case.ring_slots, case.offsets, 3)
    assert_same_bits(
        ring.bits[..., G.record_elements :],
        case.new_ring().bits[..., G.record_elements :],
        "padding of the records",
    )
    for b, length in enumerate(case.lengths):
        rows = ring.bits[case.ring_slots[b]]
        assert_same_bits(rows[:, length:], case.new_ring().bits[0][:, length:], "later records")
        assert (rows[:, :length, : G.record_elements] != 0x7FA5A5A5).all()


@pools
def test_c15_counts_above_the_recorded_window_stay_inside_their_row(ops_of, dtype):
    """Undefined content, as documented, but only in the state of that row."""
    ops = ops_of(dtype)
    case = Case(G, [2, 2], DTYPES[dtype], slots=[0, 2])
    state, ring = case.state.copy(), case.new_ring()
    ops.verify(*case.gates, state, ring, case.slots, case.ring_slots, case.offsets, 1)
    ops.fold(state, ring, case.slots[None], case.ring_slots[None], [16, 2], 1)
    assert_untouched(state, case.state, [0, 2], "pool")
    plain = case.state.copy()
    ops.plain(*case.gates, plain, case.slots, case.offsets)
    assert_same_bits(state.bits[2], plain.bits[2], "the row with a good count")


def test_the_specification_folds_as_it_recurs():
    """The two halves of the specification agree: verify and fold against plain, in float64."""
    case = Case(G, [3, 4], slots=[1, 0])
    state, plain = case.state.exact, case.state.exact
    ring = np.zeros(case.ring_shape)
    reference.gated_delta_recurrence_verify_ring_fwd(
        *case.gates, state, ring, case.slots, case.ring_slots, case.offsets, 3
    )
    rows = (case.slots[None], case.ring_slots[None])
    reference.gated_delta_state_fold(state, ring, *rows, np.array([2, 4]), 3)
    gates, offsets = case.take([2, 4])
    reference.gated_delta_recurrence_fwd(*gates, plain, case.slots, offsets)
    assert np.allclose(state[:2], plain[:2], rtol=0, atol=1e-13)
