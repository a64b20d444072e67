"""The ops against the float64 specification, and the specification's own float32 against both."""

from __future__ import annotations

import numpy as np
import pytest
from harness import DTYPES, GEOMETRIES, Case, assert_same_bits, normal, relative_error

from gdn_graph import reference

STATE_BOUND = {"f32": 1e-5, "bf16": 1e-2, "f16": 2e-3}
OUTPUT_BOUND = 2e-5

geometries = pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)


def true_recurrence(case, dtype=np.float64):
    """Outputs and the states of the owned rows, by the specification."""
    state = case.state.values.astype(dtype)
    out = reference.gated_delta_recurrence_fwd(
        *case.gates, state, case.slots, case.offsets, dtype=dtype
    )
    return out, state[case.owned]


@geometries
@pytest.mark.parametrize("dtype", DTYPES)
def test_recurrence(ops_of, geometry, dtype):
    case = Case(geometry, [4, 0, 1, 6], DTYPES[dtype], seed=10)
    true, true_state = true_recurrence(case)
    state = case.state.copy()
    out = ops_of(dtype).plain(*case.gates, state, case.slots, case.offsets)
    assert relative_error(out, true) <= OUTPUT_BOUND
    assert relative_error(state.values[case.owned], true_state) <= STATE_BOUND[dtype]


@geometries
def test_the_specification_in_float32_is_as_close(geometry):
    """What rounding alone does: the bounds are no accident of the kernels."""
    case = Case(geometry, [4, 0, 1, 6], seed=10)
    true, true_state = true_recurrence(case)
    rounded, rounded_state = true_recurrence(case, np.float32)
    assert 0 < relative_error(rounded, true) <= OUTPUT_BOUND
    assert relative_error(rounded_state, true_state) <= STATE_BOUND["f32"]


@geometries
@pytest.mark.parametrize("dtype", DTYPES)
def test_conv(ops_of, geometry, dtype):
    case = Case(geometry, [4, 0, 1, 6], DTYPES[dtype], seed=11)
    true_state = case.conv_state.values.astype(np.float64)
    true = reference.gated_delta_conv1d_fwd(
        case.x, case.weight, true_state, case.slots, case.offsets
    )
    state = case.conv_state.copy()
    out = ops_of(dtype).conv(case.x, case.weight, state, case.slots, case.offsets)
    assert relative_error(out, true) <= OUTPUT_BOUND
    assert relative_error(state.values[case.owned], true_state[case.owned]) <= STATE_BOUND[dtype]


@geometries
def test_ring_records(ops_of, geometry):
    """Raw keys and decays are stored as they came; delta factors agree with the specification."""
    case = Case(geometry, [3, 2], seed=12)
    true_ring = np.full(case.ring_shape, np.nan)
    reference.gated_delta_recurrence_verify_ring_fwd(
        *case.gates,
        case.state.values.astype(np.float64),
        true_ring,
        case.slots,
        case.ring_slots,
        case.offsets,
        case.k,
    )
    ring = case.new_ring()
    ops_of("f32").verify(
        *case.gates,
        case.state.copy(),
        ring,
        case.slots,
        case.ring_slots,
        case.offsets,
        case.k,
    )
    written = ~np.isnan(true_ring)
    got = np.where(written, ring.values, 0)
    g = geometry
    factors = slice(g.record_factors(0).start, g.record_factors(g.group - 1).stop)
    assert relative_error(got[..., factors], np.nan_to_num(true_ring)[..., factors]) < OUTPUT_BOUND
    others = np.r_[0 : g.key_head_dim, factors.stop : g.record_elements]
    assert_same_bits(
        got[..., others],
        np.nan_to_num(true_ring)[..., others].astype(np.float32),
        "keys and decays",
    )


def test_an_error_of_the_rule_is_seen(ops_of):
    """The control of this module: a beta that is off by one percent leaves the bounds."""
    case = Case(GEOMETRIES["2x3x32x24"], [4, 1], seed=13)
    out = ops_of("f32").plain(*case.gates, case.state.copy(), case.slots, case.offsets)
    case.beta = case.beta * np.float32(1.01)
    true, _ = true_recurrence(case)
    assert relative_error(out, true) > 50 * OUTPUT_BOUND


def test_long_rows(ops_of):
    """Prefill: 700 tokens, several conv segments, against the specification."""
    geometry = GEOMETRIES["2x2x64x65"]
    case = Case(geometry, [700, 3], seed=14)
    true, true_state = true_recurrence(case)
    state = case.state.copy()
    ops = ops_of("f32")
    out = ops.plain(*case.gates, state, case.slots, case.offsets)
    assert relative_error(out, true) <= OUTPUT_BOUND
    assert relative_error(state.values[case.owned], true_state) <= STATE_BOUND["f32"]
    x = normal(case.rng, 703, geometry.conv_dim)
    conv_state, true_conv_state = case.conv_state.copy(), case.conv_state.values.astype(np.float64)
    conv = ops.conv(x, case.weight, conv_state, case.slots, case.offsets)
    true = reference.gated_delta_conv1d_fwd(
        x, case.weight, true_conv_state, case.slots, case.offsets
    )
    assert relative_error(conv, true) <= OUTPUT_BOUND
