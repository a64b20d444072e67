"""Slot recycling, prefix caching, chunked prefill. Case numbers are those of docs/guarantees.md."""

from __future__ import annotations

import numpy as np
import pytest
from common import TOLERANCE, plain_spec
from harness import (
    DTYPES,
    GEOMETRIES,
    Case,
    assert_same_bits,
    assert_same_pool,
    offsets_of,
    relative_error,
)

G = GEOMETRIES["2x3x32x24"]
pools = pytest.mark.parametrize("dtype", ["f32", "bf16"])


@pools
@pytest.mark.parametrize("length", [1, 4, 9])
def test_c10_a_recycled_and_zeroed_slot_is_a_fresh_one(ops_of, dtype, length):
    ops = ops_of(dtype)
    a = Case(G, [6], DTYPES[dtype], slots=[1], seed=1)
    b = Case(G, [length], DTYPES[dtype], slots=[1], seed=2)

    def second_request(state, conv_state, zeroed):
        if zeroed:
            state.bits[1], conv_state.bits[1] = 0, 0
        out = ops.plain(*b.gates, state, [1], b.offsets)
        conv = ops.conv(b.x, a.weight, conv_state, [1], b.offsets)
        return out, conv, state.bits[1].copy(), conv_state.bits[1].copy()

    def after_the_first():
        state, conv_state = a.state.copy(), a.conv_state.copy()
        ops.plain(*a.gates, state, [1], a.offsets)
        ops.conv(a.x, a.weight, conv_state, [1], a.offsets)
        return state, conv_state

    fresh = second_request(b.state.copy(), b.conv_state.copy(), zeroed=True)
    recycled = second_request(*after_the_first(), zeroed=True)
    for got, want in zip(recycled, fresh, strict=True):
        assert_same_bits(got, want, "recycled against fresh")
    leaking = second_request(*after_the_first(), zeroed=False)
    assert not np.array_equal(leaking[0], fresh[0]), "a slot that is not zeroed must show"
    assert not np.array_equal(leaking[1], fresh[1])


@pools
@pytest.mark.parametrize("kept", [1, 2, 4])
def test_c12_a_checkpoint_never_holds_rejected_tokens(ops_of, dtype, kept):
    """Until the fold the pool is that of before the verify; after it, that of the kept tokens,
    whatever the rejected ones were."""
    ops = ops_of(dtype)
    case = Case(G, [4, 4], DTYPES[dtype], slots=[2, 0])
    folded = []
    for _ in range(2):
        state, ring = case.state.copy(), case.new_ring()
        ops.verify(*case.gates, state, ring, case.slots, case.ring_slots, case.offsets, 3)
        assert_same_pool(state, case.state, "pool between verify and fold")
        ops.fold(state, ring, case.slots[None], case.ring_slots[None], [kept, kept], 3)
        folded.append(state)
        for b in range(2):  # other drafts after the kept tokens
            case.qkv[4 * b + kept : 4 * b + 4] += 1
            case.decay[4 * b + kept : 4 * b + 4] *= 0.5
    assert_same_pool(folded[1], folded[0], "checkpoint with other rejected drafts")
    gates, offsets = case.take([kept, kept])
    plain = case.state.copy()
    ops.plain(*gates, plain, case.slots, offsets)
    assert_same_pool(folded[0], plain, "checkpoint against the kept tokens alone")


def test_c13_a_verify_in_the_buffers_of_a_long_prefill(ops_of):
    """1,000 tokens, then a window of 4 in the same arrays: nothing of the prefill is read again."""
    ops = ops_of("f32")
    case = Case(G, [1000], slots=[0], ring_slots=[0])
    ops.plain(*case.gates, case.state, [0], case.offsets)
    ops.conv(case.x, case.weight, case.conv_state, [0], case.offsets)
    short = Case(G, [4], slots=[0], ring_slots=[0], seed=9)
    for kept, new in zip((case.x, *case.gates), (short.x, *short.gates), strict=True):
        kept[4:] = np.nan
        kept[:4] = new
    views = tuple(x[:4] for x in case.gates)
    state, ring = case.state.copy(), short.new_ring()
    reused = ops.verify(*views, state, ring, [0], [0], [0, 4], 3)
    fresh_ring = short.new_ring()
    fresh = ops.verify(*short.gates, case.state.copy(), fresh_ring, [0], [0], [0, 4], 3)
    assert_same_bits(reused, fresh, "verify in reused buffers")
    assert_same_pool(ring, fresh_ring, "ring")
    conv_state = case.conv_state.copy()
    conv = ops.conv(case.x[:4], case.weight, conv_state, [0], [0, 4])
    want = ops.conv(short.x, case.weight, case.conv_state.copy(), [0], [0, 4])
    assert_same_bits(conv, want, "conv in reused buffers")
    # A window inside the long arrays, the stale rest beside it, gives the same too.
    whole = ops.plain(*case.gates, case.state.copy(), [0], [0, 4])
    assert_same_bits(whole[:4], fresh, "four tokens of a buffer of 1,000")
    assert not whole[4:].any()


@pytest.mark.parametrize("geometry", ["2x3x32x24", "2x2x64x65", "3x1x8x40"])
def test_c14_a_prefill_in_chunks_is_the_prefill(ops_of, geometry):
    """Float32 pools, to the bit, for any cuts, with a second row cut elsewhere."""
    ops = ops_of("f32")
    case = Case(GEOMETRIES[geometry], [37, 37], slots=[1, 0], seed=5)
    whole_state, whole_conv = case.state.copy(), case.conv_state.copy()
    whole = ops.plain(*case.gates, whole_state, case.slots, case.offsets)
    conv = ops.conv(case.x, case.weight, whole_conv, case.slots, case.offsets)
    assert relative_error(whole, plain_spec(case)[0]) < TOLERANCE
    rng = np.random.default_rng(7)
    for _ in range(6):
        cuts = [np.sort(rng.choice(np.arange(1, 37), 3, replace=False)) for _ in range(2)]
        parts = [np.diff([0, *c, 37]) for c in cuts]
        state, conv_state, done = case.state.copy(), case.conv_state.copy(), np.array([0, 37])
        for i in range(4):
            lengths = [int(parts[b][i]) for b in range(2)]
            index = np.concatenate([np.arange(done[b], done[b] + lengths[b]) for b in range(2)])
            gates = tuple(x[index] for x in case.gates)
            out = ops.plain(*gates, state, case.slots, offsets_of(lengths))
            assert_same_bits(out, whole[index], f"chunk {i} of {parts}")
            out = ops.conv(case.x[index], case.weight, conv_state, case.slots, offsets_of(lengths))
            assert_same_bits(out, conv[index], f"conv of chunk {i} of {parts}")
            done += lengths
        assert_same_pool(state, whole_state, f"pool after {parts}")
        assert_same_pool(conv_state, whole_conv, f"windows after {parts}")


@pools
def test_c14_a_long_row_of_a_verify_is_a_prefill_chunk(ops_of, dtype):
    """A chunk longer than the ring, in a launch with drafts, commits itself as the plain op."""
    ops = ops_of(dtype)
    case = Case(G, [40, 17, 3], DTYPES[dtype], slots=[2, 0, 1])
    plain, state, ring = case.state.copy(), case.state.copy(), case.new_ring()
    want = ops.plain(*case.gates, plain, case.slots, case.offsets)
    out = ops.verify(*case.gates, state, ring, case.slots, case.ring_slots, case.offsets, 2)
    assert_same_bits(out, want, "outputs")
    assert_same_bits(state.bits[[2, 0]], plain.bits[[2, 0]], "states of the long rows")
    assert_same_bits(state.bits[1], case.state.bits[1], "state of the short row")
    rings = int(case.ring_slots[2])
    others = np.delete(ring.bits, rings, axis=0)
    assert_same_bits(others, np.delete(case.new_ring().bits, rings, axis=0), "rings of others")
    ops.fold(state, ring, case.slots[None], case.ring_slots[None], [40, 17, 3], 2)
    assert_same_pool(state, plain, "pool after the fold")


def test_c14_one_token_at_a_time_over_a_bfloat16_pool_rounds_each_time(ops_of):
    """The difference that is documented: a pool is rounded once a launch, so only float32 pools
    give the same bits for another split."""
    ops = ops_of("bf16")
    case = Case(G, [8], DTYPES["bf16"], slots=[0])
    whole, split = case.state.copy(), case.state.copy()
    ops.plain(*case.gates, whole, [0], [0, 8])
    for t in range(8):
        ops.plain(*(x[t : t + 1] for x in case.gates), split, [0], [0, 1])
    assert split != whole
    assert relative_error(split.values[0], whole.values[0]) < 0.02
