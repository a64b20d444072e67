"""Numerics: long runs, extreme gates and norms, exactness. Numbers are those of docs/guarantees.md.

Errors against float64 are reported: run pytest with -rA to read them.
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
    normal,
    relative_error,
)
from max.dtype import DType

from gdn_graph import GatedDeltaGeometry, reference

G = GEOMETRIES["2x3x32x24"]
pools = pytest.mark.parametrize("dtype", ["f32", "bf16"])
every_dtype = pytest.mark.parametrize("dtype", DTYPES)

ONE = GatedDeltaGeometry(1, 1, 8, 5, ring_len=16)


def one_token(beta: float = 1.0, decay: float = 1.0, g: GatedDeltaGeometry = ONE) -> Case:
    """A zero state, q = k = the first axis, v = 1."""
    case = Case(g, [1], slots=[0])
    case.state.bits[0] = 0
    case.qkv[:] = 0
    case.qkv[:, [0, g.key_dim]] = 1
    case.qkv[:, 2 * g.key_dim :] = 1
    case.decay[:], case.beta[:] = decay, beta
    return case


def test_c33_beta_is_used_in_float32(ops_of):
    """sigmoid(0.5) = 0.62245935, not the 0.62109375 that bfloat16 makes of it."""
    case = one_token(beta=0.62245935)
    out = ops_of("bf16").plain(
        *case.gates, Pool.of(DType.bfloat16, np.zeros((1, 1, 8, 5))), [0], [0, 1]
    )
    read = out[0] * np.sqrt(8) * (1 + 1e-6)  # undo the readout's 1 / sqrt(KD) and the two norms
    assert np.abs(read - 0.62245935).max() < 1e-7
    assert abs(0.62109375 - 0.62245935) > 1e-3


def long_run(ops: Ops, dtype: DType, g: GatedDeltaGeometry, steps: int, decay, beta, seed=0):
    """steps single-token calls with keys of norm 1, and the same in float64 without rounding."""
    rng = np.random.default_rng(seed)
    qkv = normal(rng, steps, g.conv_dim)
    keys = qkv[:, g.key_dim : 2 * g.key_dim].reshape(steps, -1, g.key_head_dim)
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    decays = np.broadcast_to(np.float32(decay), (steps, g.num_value_heads)).copy()
    betas = np.broadcast_to(np.float32(beta), (steps, g.num_value_heads)).copy()
    pool = Pool.of(dtype, 0.1 * normal(rng, *g.recurrent_state_shape(1)))
    exact = pool.exact
    out = np.concatenate(
        [
            ops.plain(qkv[t : t + 1], decays[t : t + 1], betas[t : t + 1], pool, [0], [0, 1])
            for t in range(steps)
        ]
    )
    want = reference.gated_delta_recurrence_fwd(
        qkv, decays, betas, exact, np.array([0]), np.array([0, steps])
    )
    return out, want, pool, exact


@pytest.mark.parametrize("decay", [0.999, 0.9999, 1.0])
def test_c34_512_steps_with_bfloat16_inputs_and_a_float32_pool(ops_of, decay):
    out, want, pool, exact = long_run(ops_of("f32"), DType.float32, ONE, 512, decay, 0.9)
    error = max(relative_error(out, want), relative_error(pool.values, exact))
    print(f"512 steps, float32 pool, decay {decay}: error {error:.1e} of the largest value")
    assert error < 1e-5


# Bounds: 2,000 roundings of half an ulp (2**-9 and 2**-12), most of them damped by decay and beta.
@pytest.mark.parametrize(("dtype", "bound"), [("bf16", 0.03), ("f16", 0.004), ("f32", 1e-5)])
@pytest.mark.parametrize("decay", [0.999, 1.0])
def test_c35_c37_2000_steps_stay_finite_and_near_float64(ops_of, dtype, bound, decay):
    out, want, pool, exact = long_run(ops_of(dtype), DTYPES[dtype], ONE, 2000, decay, 0.9)
    assert np.isfinite(out).all() and np.isfinite(pool.values).all()
    at_end = relative_error(out[-100:], want[-100:])
    state = relative_error(pool.values, exact)
    print(
        f"2,000 steps, {dtype} pool, decay {decay}: last outputs {at_end:.1e}, state {state:.1e} "
        "of the largest value"
    )
    assert max(at_end, state, relative_error(out, want)) < bound
    if dtype != "f32":
        assert state > 1e-6, "a pool that is rounded at each step must show it"


@pools
@pytest.mark.parametrize("scale", [600.0, 1e6, 1e30])
def test_c36_a_readout_past_float16(ops_of, dtype, scale):
    """States of 600 with a query of their sign sum to 76,800 over 128 rows; larger ones too."""
    g = GatedDeltaGeometry(1, 2, 128, 8)
    case = Case(g, [2], DTYPES[dtype], slots=[0])
    case.state.put([0], np.full(g.recurrent_state_shape(1), scale, np.float32))
    case.qkv[:, : g.key_dim] = 1
    case.decay[:], case.beta[:] = 1, 0
    out = ops_of(dtype).plain(*case.gates, case.state.copy(), [0], case.offsets)
    want, _ = plain_spec(case)
    assert np.isfinite(out).all()
    assert relative_error(out, want) < TOLERANCE
    assert np.abs(want).min() > 0.99 * scale


def nan_columns(out: np.ndarray, g: GatedDeltaGeometry) -> np.ndarray:
    """How many of the VD columns of each (token, value head) are NaN: [N, nv].

    The rule of thumb: a fault of the arithmetic poisons whole heads, VD columns of them, while
    memory corruption leaves odd counts. One column alone comes of its own value.
    """
    return np.isnan(out.reshape(-1, g.num_value_heads, g.value_head_dim)).sum(axis=2)


@pools
def test_c38_the_count_of_nans_tells_what_was_poisoned(ops_of, dtype):
    ops = ops_of(dtype)
    for channels, columns, heads in (
        (slice(3, 4), G.value_head_dim, [0, 1, 2]),  # a query of key head 0
        (slice(G.key_dim + 40, G.key_dim + 41), G.value_head_dim, [3, 4, 5]),  # a key of head 1
        (slice(2 * G.key_dim + 24 + 5, 2 * G.key_dim + 24 + 6), 1, [1]),  # a value of head 1
    ):
        case = Case(G, [3], DTYPES[dtype], slots=[0])
        case.qkv[0, channels] = np.nan
        out = ops.plain(*case.gates, case.state.copy(), [0], case.offsets)
        want = np.zeros(6, int)
        want[heads] = columns
        assert (nan_columns(out, G)[0] == want).all()


@every_dtype
@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_c40_without_decay_it_is_the_delta_rule(ops_of, dtype, beta):
    """S = (I - beta k k^T) S + beta k v^T with normed keys; at beta = 0 S keeps its bits."""
    ops = ops_of(dtype)
    case = Case(G, [4, 3], DTYPES[dtype], slots=[0, 2])
    case.decay[:], case.beta[:] = 1, beta
    state = case.state.copy()
    out = ops.plain(*case.gates, state, case.slots, case.offsets)
    if beta == 0:
        assert_same_pool(state, case.state, "a state that nothing is written to")
    want = case.state.exact
    for b in range(2):
        for t in range(row_of(case, b).start, row_of(case, b).stop):
            for h in range(6):
                q, k = (
                    x.astype(np.float64) / np.sqrt(x.astype(np.float64) @ x + 1e-6)
                    for x in (
                        case.qkv[t, (h // 3) * 32 :][:32],
                        case.qkv[t, 64 + (h // 3) * 32 :][:32],
                    )
                )
                v = case.qkv[t, 128 + h * 24 :][:24].astype(np.float64)
                S = want[case.slots[b], h]
                S += beta * np.outer(k, v - k @ S)
                read = q @ S / np.sqrt(32)
                assert np.abs(out[t, h * 24 :][:24] - read).max() < 2e-5
    got = state.values[case.slots]
    rounding = {"f32": TOLERANCE, "bf16": 2.0**-8, "f16": 2.0**-11}[dtype]
    assert relative_error(got, want[case.slots]) < rounding


@pytest.mark.parametrize("geometry", ["1x1x16x16", "2x3x32x24", "3x1x8x40", "2x2x64x65"])
@pools
@pytest.mark.parametrize("decay", [0.0, 1e-30, 0.5, 0.9999, 1.0])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_c41_verify_and_fold_are_exact_at_extreme_gates(ops_of, geometry, dtype, decay, beta):
    ops = ops_of(dtype)
    case = Case(GEOMETRIES[geometry], [5, 1, 3], DTYPES[dtype])
    case.decay[:], case.beta[:] = decay, beta
    assert_commit_is_exact(ops, case, [3, 1, 2])
    want, _ = plain_spec(case)
    out = ops.plain(*case.gates, case.state.copy(), case.slots, case.offsets)
    assert relative_error(out, want) < TOLERANCE


def assert_commit_is_exact(ops: Ops, case: Case, counts: list[int]) -> None:
    state, ring, plain = case.state.copy(), case.new_ring(), case.state.copy()
    k = max(case.lengths) - 1
    out = ops.verify(*case.gates, state, ring, case.slots, case.ring_slots, case.offsets, k)
    ops.fold(state, ring, case.slots[None], case.ring_slots[None], counts, k)
    gates, offsets = case.take(counts)
    want = ops.plain(*gates, plain, case.slots, offsets)
    assert_same_bits(out[case.index(counts)], want, "verified outputs")
    assert_same_pool(state, plain, "pool after the fold")
    assert_untouched(state, case.state, case.slots, "pool")


@pools
@pytest.mark.parametrize("length", [64, 111, 192])
def test_c42_long_rows_with_decays_near_one(ops_of, dtype, length):
    case = Case(G, [length, 3], DTYPES[dtype])
    case.decay = case.rng.uniform(0.99, 1, case.decay.shape).astype(np.float32)
    state = case.state.copy()
    out = ops_of(dtype).plain(*case.gates, state, case.slots, case.offsets)
    want, exact = plain_spec(case)
    assert relative_error(out, want) < 2 * TOLERANCE
    rounding = 0 if dtype == "f32" else 2.0**-8
    owned = case.owned
    assert relative_error(state.values[owned], exact[owned]) < 2 * TOLERANCE + rounding
    # The control: the decay of the neighbouring head would show.
    case.decay = np.roll(case.decay, 1, axis=1)
    assert relative_error(plain_spec(case)[0], want) > 1e-3


@pools
@pytest.mark.parametrize("head_dim", [1, 7, 16, 32, 33, 64, 96, 128, 256])
@pytest.mark.parametrize("value_dim", [1, 16, 31, 144])
def test_c43_the_fold_replays_to_the_bit_at_any_head_dim(ops_of, dtype, head_dim, value_dim):
    g = GatedDeltaGeometry(2, 4, head_dim, value_dim, ring_len=16)
    ops = ops_of(dtype)
    for counts in ([1, 2, 9], [3, 1, 8], [2, 0, 4]):
        assert_commit_is_exact(ops, Case(g, [3, 2, 9], DTYPES[dtype], seed=counts[0]), counts)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_c44_a_conv_pool_rounds_what_it_keeps(ops_of, dtype):
    """5 tokens at once and as 2 + 3: the same bits if the inputs are values of the pool's dtype;
    otherwise outputs of the second part differ by that rounding."""
    ops = ops_of(dtype)
    case = Case(G, [5], DTYPES[dtype], slots=[0])
    for exact in (True, False):
        x = Pool.of(DTYPES[dtype], case.x).values if exact else case.x
        whole = ops.conv(x, case.weight, case.conv_state.copy(), [0], [0, 5])
        state = case.conv_state.copy()
        parts = np.concatenate(
            [ops.conv(p, case.weight, state, [0], [0, len(p)]) for p in (x[:2], x[2:])]
        )
        if exact:
            assert_same_bits(parts, whole, "2 + 3 tokens against 5")
            continue
        assert_same_bits(parts[:2], whole[:2], "the first part")
        assert (parts != whole).any(), "inputs that the pool cannot hold must show"
        ulp = 2.0**-8 if dtype == "bf16" else 2.0**-11
        bound = 3 * ulp * np.abs(case.weight).max() * np.abs(x).max()
        assert np.abs(parts - whole).max() < bound


@pools
@pytest.mark.parametrize("window", range(1, 9))
def test_c45_c46_a_verified_token_is_the_plain_token(ops_of, dtype, window):
    """To the bit, whatever rows stand around it and whatever comes after it in its window."""
    ops = ops_of(dtype)
    case = Case(G, [window, 3, 8], DTYPES[dtype], seed=window)
    first = row_of(case, 0)
    plain = ops.plain(
        *(x[first] for x in case.gates), case.state.copy(), case.slots[:1], [0, window]
    )
    other = Case(G, [2, window, 1], DTYPES[dtype], seed=window + 50)
    for a, b in zip(other.gates, case.gates, strict=True):
        a[row_of(other, 1)] = b[first]
    other.state.bits[other.slots[1]] = case.state.bits[case.slots[0]]
    for batch, row in ((case, 0), (other, 1)):
        ring = batch.new_ring()
        out = ops.verify(
            *batch.gates, batch.state, ring, batch.slots, batch.ring_slots, batch.offsets, 7
        )
        assert_same_bits(out[row_of(batch, row)], plain, "verified against plain")
    # Token by token, with a float32 pool between.
    if dtype == "f32":
        state = case.state.copy()
        for t in range(window):
            one = ops.plain(*(x[t : t + 1] for x in case.gates), state, case.slots[:1], [0, 1])
            assert_same_bits(one, plain[t : t + 1], f"token {t} alone")


@pytest.mark.parametrize("size", [1e-4, 1e-3, 1e-2, 0.0])
@pytest.mark.parametrize("what", ["key", "query"])
def test_c48_epsilon_stands_inside_the_root(ops_of, size, what):
    """x / sqrt(sum + 1e-6); a floor of 1e-6, or epsilon outside the root, gives other values."""
    g = GatedDeltaGeometry(1, 1, 16, 3)
    case = one_token(g=g)
    x = np.zeros(16) + size
    at = slice(16, 32) if what == "key" else slice(0, 16)
    case.qkv[:, :32] = 0.25
    case.qkv[:, at] = size
    out = ops_of("f32").plain(*case.gates, case.state, [0], [0, 1])[0]
    other = 0.25 / np.sqrt(16 * 0.25**2 + 1e-6)

    def value(norm: float) -> float:
        """What v = 1 comes back as from a zero state: (q . k) / sqrt(KD), both normed."""
        return 16 * other * (size / norm) / 4

    inside = value(np.sqrt(x @ x + 1e-6))
    assert np.abs(out - inside).max() <= 1e-6 * max(inside, 1e-3)
    if 0 < size < 1e-2:
        outside, floor = value(np.sqrt(x @ x) + 1e-6), value(max(np.sqrt(x @ x), 1e-6))
        assert abs(outside - inside) > 1e-3 * inside and abs(floor - inside) > 1e-3 * inside


@every_dtype
def test_zero_queries_and_keys_give_zeros_and_leave_the_state(ops_of, dtype):
    ops = ops_of(dtype)
    case = Case(G, [3], DTYPES[dtype], slots=[0])
    case.qkv[:, : 2 * G.key_dim] = 0
    case.decay[:] = 1
    state, ring = case.state.copy(), case.new_ring()
    out = ops.verify(*case.gates, state, ring, [0], case.ring_slots, case.offsets, 2)
    assert not out.any()
    ops.fold(state, ring, [[0]], case.ring_slots[None], [3], 2)
    assert_same_pool(state, case.state, "a state that zero keys write to")
