"""200 random ragged batches against the specification and the plain op, on one set of graphs."""

from __future__ import annotations

import numpy as np
from harness import PADDING, Case, assert_same_bits, assert_same_pool, relative_error
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gdn_graph import GatedDeltaGeometry, reference


@st.composite
def cases(draw):
    nk = draw(st.integers(1, 3))
    geometry = GatedDeltaGeometry(
        num_key_heads=nk,
        num_value_heads=nk * draw(st.integers(1, 3)),
        key_head_dim=draw(st.integers(1, 40)),
        value_head_dim=draw(st.integers(1, 70)),
        conv_width=draw(st.integers(2, 8)),
        ring_len=draw(st.integers(2, 9)),
    )
    longest = geometry.ring_len + 3
    lengths = draw(st.lists(st.integers(0, longest), min_size=1, max_size=5))
    case = Case(
        geometry,
        lengths,
        seed=draw(st.integers(0, 2**32)),
        tail=draw(st.integers(0, 3)),
        k=draw(st.integers(1, geometry.ring_len - 1)),
        stride_padding=draw(st.integers(0, 5)),
    )
    padding = draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
    case.slots[np.array(padding) & (case.rng.random(len(lengths)) < 0.3)] = PADDING
    accepted = [draw(st.integers(0, t)) if t <= geometry.ring_len else t for t in lengths]
    return case, accepted


@settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(cases())
def test_random_rounds(ops_of, drawn):
    """Verify and fold: outputs of the specification, and the plain op's bits over the prefix."""
    case, accepted = drawn
    ops = ops_of("f32")
    true_state = case.state.exact
    true = reference.gated_delta_recurrence_fwd(*case.gates, true_state, case.slots, case.offsets)
    state, ring = case.state.copy(), case.new_ring()
    out = ops.verify(*case.gates, state, ring, case.slots, case.ring_slots, case.offsets, case.k)
    assert relative_error(out, true) <= 2e-5
    ops.fold(state, ring, case.slots[None], case.ring_slots[None], accepted, case.k)
    gates, offsets = case.take(accepted)
    plain_state = case.state.copy()
    plain = ops.plain(*gates, plain_state, case.slots, offsets)
    assert_same_bits(out[case.index(accepted)], plain, "outputs of accepted tokens")
    assert_same_pool(state, plain_state, "state after the fold")
    conv_state, true_conv = case.conv_state.copy(), case.conv_state.exact
    conv = ops.conv(case.x, case.weight, conv_state, case.slots, case.offsets)
    true = reference.gated_delta_conv1d_fwd(
        case.x, case.weight, true_conv, case.slots, case.offsets
    )
    assert relative_error(conv, true) <= 2e-5
    # Poison is NaN on both sides; a window holds inputs as they came.
    np.testing.assert_array_equal(conv_state.values, true_conv.astype(np.float32))
