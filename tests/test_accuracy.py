"""The ops against the float64 specification, and the specification's own float32 against both."""

from __future__ import annotations

import numpy as np
import pytest
from harness import DTYPES, GEOMETRIES, Case, Pool, assert_same_bits, normal, relative_error

from gdn_graph import reference

STATE_BOUND = {"f32": 1e-5, "bf16": 1e-2, "f16": 2e-3}
OUTPUT_BOUND = 2e-5

geometries = pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)


def true_recurrence(case, dtype=np.float64):
    """Outputs and the states of the owned rows, by the specification."""
    state = case.state.exact.astype(dtype)
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
    true_state = case.conv_state.exact
    true = reference.gated_delta_conv1d_fwd(
        case.x, case.weight, true_state, case.slots, case.offsets
    )
    state = case.conv_state.copy()
    out = ops_of(dtype).conv(case.x, case.weight, state, case.slots, case.offsets)
    assert relative_error(out, true) <= OUTPUT_BOUND
    assert relative_error(state.values[case.owned], true_state[case.owned]) <= STATE_BOUND[dtype]


def test_a_long_output_is_the_short_ones(ops_of):
    """One that is stored past the caches, against its rows in calls of their own and the truth."""
    ops, rng = ops_of("f32"), np.random.default_rng(15)
    x, weight = normal(rng, 530, 4112), normal(rng, 4112, 4)
    windows = normal(rng, 2, 4112, 3)
    state, true_state = Pool.of(ops.dtype, windows), windows.astype(np.float64)
    out = ops.conv(x, weight, state, [1, 0], [0, 517, 530])
    true = reference.gated_delta_conv1d_fwd(
        x, weight, true_state, np.array([1, 0]), np.array([0, 517, 530])
    )
    assert relative_error(out, true) <= OUTPUT_BOUND
    again, whole = Pool.of(ops.dtype, windows), state
    for begin in range(0, 517, 47):
        part = ops.conv(x[begin : begin + 47], weight, again, [1], [0, 47])
        assert_same_bits(part, out[begin : begin + 47], f"tokens from {begin}")
    ops.conv(x[517:], weight, again, [0], [0, 13])
    assert_same_bits(again.bits, whole.bits, "windows")


@geometries
@pytest.mark.parametrize("dtype", DTYPES)
def test_conv_and_silu(ops_of, geometry, dtype):
    case = Case(geometry, [4, 0, 1, 6], DTYPES[dtype], seed=16)
    true_state = case.conv_state.exact
    rows = case.slots, case.offsets
    true = reference.gated_delta_conv1d_fwd(
        case.x, case.weight, true_state.copy(), *rows, activation="silu"
    )
    out = ops_of(dtype).conv_silu(case.x, case.weight, case.conv_state.copy(), *rows)
    assert relative_error(out, true) <= OUTPUT_BOUND
    linear = reference.gated_delta_conv1d_fwd(case.x, case.weight, true_state, *rows)
    assert relative_error(out, linear) > 50 * OUTPUT_BOUND, "the control: without its silu"


# An e^x below the normal numbers is zero, and x may be 87 times that.
SMALLEST = 1.2e-36


def assert_close(got, true, ulps):
    """Within so many units of 2^-24 of each element."""
    finite = np.isfinite(true)
    np.testing.assert_array_equal(got[~finite], true[~finite].astype(np.float32))
    bound = ulps * 2.0**-24 * np.abs(true[finite]) + SMALLEST
    wrong = np.abs(got[finite] - true[finite]) / bound
    assert wrong.max(initial=0) <= 1, f"{ulps * wrong.max():.3g} units, not {ulps:.3g}"


def test_silu_of_every_size(ops_of):
    """To a few units in the last place over the whole range; NaN and infinity as NumPy has them."""
    rng = np.random.default_rng(17)
    x = np.concatenate([rng.uniform(-s, s, 5000) for s in (1e-3, 1, 10, 87, 1e4)])
    special = [0, np.inf, -np.inf, np.nan, 1e30, -1e30, 3e38, -3e38, 1e-30, -1e-30]
    x = np.concatenate([x, special]).astype(np.float32)
    # The identity: one channel a value, so that what is not finite stays where it is.
    weight, state = np.tile(np.float32([0, 1]), (len(x), 1)), np.zeros((1, len(x), 1), np.float32)
    got = ops_of("f32").conv_silu(x[None], weight, Pool.of(DTYPES["f32"], state), [0], [0, 1])[0]
    with np.errstate(invalid="ignore"):
        true = reference.silu(x.astype(np.float64))
    assert_close(got, true, 4)
    assert np.isnan(got[-8]) and np.isnan(got[-7]) and got[-9] == np.inf


@pytest.mark.parametrize("heads", [1, 5, 48])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", [4, 100])
def test_gates(ops_of, heads, dtype, spread):
    rng = np.random.default_rng([heads, spread])
    a, b = (
        Pool.of(DTYPES[dtype], rng.uniform(-spread, spread, (301, heads)).astype(np.float32))
        for _ in range(2)
    )
    A_log = rng.uniform(-10, 5, heads).astype(np.float32)
    dt_bias = rng.uniform(-3, 3, heads).astype(np.float32)
    decay, beta = ops_of(dtype).gates(a, b, A_log, dt_bias)
    true_decay, true_beta = reference.gated_delta_gates(a.values, b.values, A_log, dt_bias)
    assert_close(beta, true_beta, 4)
    # e^y magnifies the rounding of y by y.
    exponent = -np.log(np.maximum(true_decay, 1e-300))
    assert_close(decay, true_decay, 6 * (1 + exponent[np.isfinite(true_decay)]))
    rounded_decay, _ = reference.gated_delta_gates(
        a.values, b.values, A_log, dt_bias, dtype=np.float32
    )
    assert relative_error(rounded_decay, true_decay) < 1e-5
    with pytest.raises(AssertionError, match="units, not 4"):
        assert_close(beta, reference.sigmoid(b.values * 1.001), 4)


def test_gates_that_are_not_finite(ops_of):
    """As NumPy has them, each in its own element."""
    special = np.float32([np.nan, np.inf, -np.inf, 0, 1])
    a, b = (x.reshape(-1, 1) for x in np.meshgrid(special, special))
    A_log, dt_bias = (x.ravel() for x in np.meshgrid(special, special))
    a, b = (np.ascontiguousarray(np.broadcast_to(x, (25, 25)), np.float32) for x in (a, b))
    decay, beta = ops_of("f32").gates(
        Pool.of(DTYPES["f32"], a), Pool.of(DTYPES["f32"], b), A_log, dt_bias
    )
    with np.errstate(invalid="ignore", over="ignore"):
        true_decay, true_beta = reference.gated_delta_gates(a, b, A_log, dt_bias)
    assert_close(decay, true_decay, 12)
    assert_close(beta, true_beta, 4)
    assert np.isnan(true_decay).any() and (true_decay == 0).any() and (true_decay == 1).any()


@geometries
def test_ring_records(ops_of, geometry):
    """Raw keys and decays are stored as they came; delta factors agree with the specification."""
    case = Case(geometry, [3, 2], seed=12)
    true_ring = np.full(case.ring_shape, np.nan)
    reference.gated_delta_recurrence_verify_ring_fwd(
        *case.gates,
        case.state.exact,
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
    conv_state, true_conv_state = case.conv_state.copy(), case.conv_state.exact
    conv = ops.conv(x, case.weight, conv_state, case.slots, case.offsets)
    true = reference.gated_delta_conv1d_fwd(
        x, case.weight, true_conv_state, case.slots, case.offsets
    )
    assert relative_error(conv, true) <= OUTPUT_BOUND
