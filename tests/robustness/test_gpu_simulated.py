"""Padding, aliases, values that are not finite and extreme gates on the GPU kernels, simulated.

The simulator stops at an access outside a buffer, a race or a read of what was never written. The
kernels' other tests are in tests/gpu.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from common import assert_untouched, row_of
from harness import DTYPES, PADDING, Case, assert_same_bits, assert_same_pool
from simulated import Simulated
from test_aliases_and_nonfinite import ROW, assert_same_numbers, poison

from gdn_graph import GatedDeltaGeometry

# One that tests/gpu compiles too.
G = GatedDeltaGeometry(2, 6, 32, 24, ring_len=6, conv_width=8)
pools = pytest.mark.parametrize("dtype", ["f32", "bf16"])


@cache
def simulated(dtype: str) -> Simulated:
    return Simulated(G, dtype)


@pools
@pytest.mark.parametrize("padded", [0, 1, 2])
def test_c01_c08_a_padding_row_touches_nothing_and_its_output_is_zero(dtype, padded):
    ops = simulated(dtype)
    case = Case(G, [2, 3, 2], DTYPES[dtype], slots=[1, 3, 0])
    slots, rings = case.slots.copy(), case.ring_slots.copy()
    slots[padded] = rings[padded] = PADDING
    real = [b for b in range(3) if b != padded]
    state, folded, ring = case.state.copy(), case.state.copy(), case.new_ring()
    plain = ops.plain(*case.gates, state, slots, case.offsets)
    out = ops.verify(*case.gates, folded, ring, slots, rings, case.offsets, 2)
    assert_same_bits(out, plain, "verify against plain")
    assert_same_pool(folded, case.state, "pool of a verify")
    assert not out[row_of(case, padded)].any()
    assert_untouched(ring, case.new_ring(), rings[real], "ring")
    ops.fold(folded, ring, slots[None], rings[None], [2, 3, 2], 2)
    assert_same_pool(folded, state, "fold against plain")
    assert_untouched(state, case.state, slots[real], "pool")


@pools
@pytest.mark.parametrize("value", [np.nan, np.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("where", ["query", "key", "value", "decay", "beta", "state"])
def test_a_value_that_is_not_finite_stays_in_its_row_and_heads(dtype, value, where):
    ops = simulated(dtype)

    def run(poisoned):
        case = Case(G, [1, 3, 2], DTYPES[dtype], seed=6)
        heads = poison(case, where, value) if poisoned else []
        plain, state, ring = case.state.copy(), case.state.copy(), case.new_ring()
        out = ops.verify(*case.gates, state, ring, case.slots, case.ring_slots, case.offsets, 2)
        want = ops.plain(*case.gates, plain, case.slots, case.offsets)
        assert_same_numbers(out, want)
        ops.fold(state, ring, case.slots[None], case.ring_slots[None], [1, 3, 2], 2)
        assert_same_numbers(state.values[case.slots], plain.values[case.slots])
        return case, heads, out.reshape(6, 6, 24), plain.values[case.slots]

    case, heads, out, state = run(True)
    _, _, clean_out, clean_state = run(False)
    others = [h for h in range(6) if h not in heads]
    at = row_of(case, ROW)
    assert not np.isfinite(out[at][:, heads]).all(), "the value must be seen"
    assert_same_bits(out[at][:, others], clean_out[at][:, others], "other heads")
    assert_same_bits(state[ROW][others], clean_state[ROW][others], "states of other heads")
    for b in (0, 2):
        assert_same_bits(out[row_of(case, b)], clean_out[row_of(case, b)], f"row {b}")
        assert_same_bits(state[b], clean_state[b], f"state of row {b}")


@pools
def test_aliased_rows_disturb_no_other(dtype):
    ops = simulated(dtype)
    case = Case(G, [3, 2, 1, 4], DTYPES[dtype], slots=[1, 3, 1, 0])
    own, counts = [1, 3], [0, 2, 0, 4]
    gates, offsets = case.take(counts)
    state, alone = case.state.copy(), case.state.copy()
    out = ops.plain(*case.gates, state, case.slots, case.offsets)
    want = ops.plain(*gates, alone, case.slots, offsets)
    assert_same_bits(out[case.index(counts)], want, "outputs of rows with a slot of their own")
    assert_same_bits(state.bits[[0, 3]], alone.bits[[0, 3]], "their states")
    assert_untouched(state, case.state, [0, 1, 3], "pool")
    ring = case.new_ring()
    ops.verify(*case.gates, case.state.copy(), ring, case.slots, case.ring_slots, case.offsets, 3)
    folded, alone = case.state.copy(), case.state.copy()
    rows, rings = case.slots[None], case.ring_slots[None]
    ops.fold(folded, ring, rows, rings, [3, 2, 1, 4], 3)
    ops.fold(alone, ring, rows[:, own], rings[:, own], [2, 4], 3)
    assert_same_bits(folded.bits[[0, 3]], alone.bits[[0, 3]], "folds of rows of their own")
    assert_untouched(folded, case.state, [0, 1, 3], "pool")


@pools
@pytest.mark.parametrize("decay", [0.0, 1e-30, 1.0])
@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_c41_verify_and_fold_are_exact_at_extreme_gates(dtype, decay, beta):
    ops = simulated(dtype)
    case = Case(G, [5, 1, 3], DTYPES[dtype])
    case.decay[:], case.beta[:] = decay, beta
    case.qkv[0, : 2 * G.key_dim] = 0  # and a token with neither query nor key
    counts = [4, 1, 2]
    state, plain, ring = case.state.copy(), case.state.copy(), case.new_ring()
    out = ops.verify(*case.gates, state, ring, case.slots, case.ring_slots, case.offsets, 4)
    ops.fold(state, ring, case.slots[None], case.ring_slots[None], counts, 4)
    gates, offsets = case.take(counts)
    want = ops.plain(*gates, plain, case.slots, offsets)
    assert np.isfinite(out).all() and not out[0].any()
    assert_same_bits(out[case.index(counts)], want, "verified outputs")
    assert_same_pool(state, plain, "pool after the fold")
