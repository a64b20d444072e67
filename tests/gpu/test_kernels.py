"""Every GPU kernel in the simulator: against the specification, and against each other to the bit.

The simulator checks every launch for races, reads of what was never written and accesses outside a
buffer (simulated.py).
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from harness import (
    DTYPES,
    PADDING,
    Case,
    Pool,
    assert_same_bits,
    assert_same_pool,
    relative_error,
)
from simulated import POISON, UNWRITTEN, Simulated, vector

from gdn_graph import GatedDeltaGeometry, reference

GEOMETRIES = {
    "128x128": GatedDeltaGeometry(1, 2, 128, 128, ring_len=4),
    "64x64": GatedDeltaGeometry(2, 2, 64, 64, ring_len=8, conv_width=3),
    "32x24": GatedDeltaGeometry(2, 6, 32, 24, ring_len=6, conv_width=8),
}
STATE_TOLERANCE = {"f32": 1e-5, "bf16": 1e-2, "f16": 2e-3}
TOLERANCE = 2e-5

# The ends of what is allowed, and dims that fill neither a warp nor a block.
RARE = {
    "256x256": GatedDeltaGeometry(1, 1, 256, 256, ring_len=2, conv_width=2),
    "16x16": GatedDeltaGeometry(3, 3, 16, 16, ring_len=1, conv_width=5),
    "40x72": GatedDeltaGeometry(2, 4, 40, 72, ring_len=32, conv_width=6),
    "248x16": GatedDeltaGeometry(1, 3, 248, 16, ring_len=5, conv_width=7),
    "16x256": GatedDeltaGeometry(1, 2, 16, 256, ring_len=9),
}
geometries = pytest.mark.parametrize(
    "geometry",
    [
        *(pytest.param(geometry, id=name) for name, geometry in GEOMETRIES.items()),
        *(pytest.param(g, id=name, marks=pytest.mark.slow) for name, g in RARE.items()),
    ],
)
pools = pytest.mark.parametrize("dtype", ["f32", "bf16"])


algorithms = pytest.mark.parametrize("algorithm", ["exact", "block"])


@cache
def simulated(
    geometry: GatedDeltaGeometry, dtype: str, algorithm: str = "exact", wide: bool = False
) -> Simulated:
    return Simulated(geometry, dtype, algorithm, wide)


def ragged(geometry: GatedDeltaGeometry, dtype: str, seed: int = 0, **options) -> Case:
    """A full window, no tokens, an overlong row, one token, a short window, a padding row; then
    tokens of no row."""
    ring_len = geometry.ring_len
    lengths = [ring_len, 0, ring_len + 3, 1, min(3, ring_len), 2]
    case = Case(geometry, lengths, DTYPES[dtype], seed=seed, tail=2, **options)
    case.slots[-1] = case.ring_slots[-1] = PADDING
    return case


def numbers(pool: Pool, dtype: str) -> np.ndarray:
    """float64 values for the specification; what is poison is zero there."""
    return np.where(pool.bits == POISON[dtype], 0, pool.values).astype(np.float64)


def unowned(case: Case, pool: Pool, rows: list[int]) -> np.ndarray:
    return np.delete(pool.bits, rows, axis=0)


@geometries
@pools
@algorithms
def test_plain_against_the_specification(geometry, dtype, algorithm):
    case = ragged(geometry, dtype)
    state = case.state.copy()
    out = simulated(geometry, dtype, algorithm).plain(*case.gates, state, case.slots, case.offsets)
    true_state = numbers(case.state, dtype)
    true = reference.gated_delta_recurrence_fwd(*case.gates, true_state, case.slots, case.offsets)
    assert relative_error(out, true) <= TOLERANCE
    assert (out[case.offsets[-2] :] == 0).all(), "tokens of a padding row and of no row"
    ran = [int(s) for s, n in zip(case.slots, case.lengths, strict=True) if n and s != PADDING]
    assert relative_error(state.values[ran], true_state[ran]) <= STATE_TOLERANCE[dtype]
    assert_same_bits(unowned(case, state, ran), unowned(case, case.state, ran), "other pool rows")


@geometries
@pools
@algorithms
@pytest.mark.parametrize("stride_padding", [3, 30])
def test_verify_equals_plain_and_records_the_window(geometry, dtype, algorithm, stride_padding):
    ops = simulated(geometry, dtype, algorithm)
    case = ragged(geometry, dtype, stride_padding=stride_padding)
    plain_state, state, ring = case.state.copy(), case.state.copy(), case.new_ring()
    plain = ops.plain(*case.gates, plain_state, case.slots, case.offsets)
    out = ops.verify(*case.gates, state, ring, case.slots, case.ring_slots, case.offsets, case.k)
    assert_same_bits(out, plain, "verify output against plain")
    overlong = int(case.slots[2])
    want = case.state.copy()
    want.bits[overlong] = plain_state.bits[overlong]
    assert_same_pool(state, want, "only the row longer than the ring commits itself")

    true_ring = np.full(case.ring_shape, UNWRITTEN, np.float64)
    reference.gated_delta_recurrence_verify_ring_fwd(
        *case.gates,
        numbers(case.state, dtype),
        true_ring,
        case.slots,
        case.ring_slots,
        case.offsets,
        case.k,
    )
    written = ring.bits != POISON["f32"]
    assert_same_bits(written, true_ring != UNWRITTEN, "elements of the ring that are written")
    assert relative_error(ring.values[written], true_ring[written]) <= TOLERANCE
    keys = ring.values[..., : geometry.key_head_dim][written[..., : geometry.key_head_dim]]
    true_keys = true_ring[..., : geometry.key_head_dim]
    assert_same_bits(keys, true_keys[true_keys != UNWRITTEN].astype(np.float32), "raw keys")


@geometries
@pools
@algorithms
def test_verify_and_fold_equal_plain_over_the_accepted_prefix(geometry, dtype, algorithm):
    ops = simulated(geometry, dtype, algorithm)
    case = ragged(geometry, dtype, seed=1)
    verified, ring = case.state.copy(), case.new_ring()
    ops.verify(*case.gates, verified, ring, case.slots, case.ring_slots, case.offsets, case.k)
    full = list(case.lengths)
    previous = None
    for accepted in ([1, 0, full[2], 1, 1, 1], [full[0], 0, full[2], 0, min(2, full[4]), 2]):
        folded = verified.copy()
        ops.fold(folded, ring, case.slots[None], case.ring_slots[None], accepted, case.k)
        gates, offsets = case.take(accepted)
        plain_state = case.state.copy()
        ops.plain(*gates, plain_state, case.slots, offsets)
        assert_same_pool(folded, plain_state, f"fold of {accepted} against plain")
        assert folded != previous, "another prefix must give another state"
        previous = folded


@geometries
@pools
@algorithms
def test_the_bits_do_not_depend_on_the_blocks_or_the_batch(geometry, dtype, algorithm):
    narrow = simulated(geometry, dtype, algorithm)
    wide = simulated(geometry, dtype, algorithm, True)
    case = ragged(geometry, dtype, seed=2)
    results = []
    for ops in (narrow, wide):
        state, ring = case.state.copy(), case.new_ring()
        out = ops.verify(*case.gates, state, ring, case.slots, case.ring_slots, case.offsets, 1)
        results.append((out, state, ring))
    for a, b in zip(*results, strict=True):
        assert_same_bits(getattr(a, "bits", a), getattr(b, "bits", b), "narrow and wide blocks")
    for b in (0, 2, 3):  # a row alone
        tokens = slice(int(case.offsets[b]), int(case.offsets[b + 1]))
        state = case.state.copy()
        gates = [x[tokens] for x in case.gates]
        out = narrow.plain(*gates, state, case.slots[b : b + 1], [0, len(gates[0])])
        assert_same_bits(out, results[0][0][tokens], f"row {b} alone")


@geometries
def test_a_split_window_gives_the_same_bits(geometry):
    ops = simulated(geometry, "f32")
    case = Case(geometry, [9], seed=3)
    outs, states = [], []
    for steps in ([9], [4, 5], [1] * 9):
        state, out, done = case.state.copy(), [], 0
        for step in steps:
            gates = [x[done : done + step] for x in case.gates]
            out.append(ops.plain(*gates, state, case.slots, [0, step]))
            done += step
        outs.append(np.concatenate(out))
        states.append(state)
    for out, state in zip(outs[1:], states[1:], strict=True):
        assert_same_bits(out, outs[0], "output of a split window")
        assert_same_pool(state, states[0], "state after a split window")


@geometries
def test_ids_outside_their_pools_touch_nothing(geometry):
    """The simulator fails on any access outside a buffer."""
    ops = simulated(geometry, "f32")
    window = min(2, geometry.ring_len)
    case = Case(geometry, [window] * 4, seed=4)
    case.slots[:2] = PADDING, len(case.state.bits)
    case.ring_slots[2:] = case.ring_shape[0], 5
    case.ring_slots[3] = 0
    state, ring = case.state.copy(), case.new_ring()
    out = ops.verify(*case.gates, state, ring, case.slots, case.ring_slots, case.offsets, 1)
    assert (out[: 3 * window] == 0).all() and (out[3 * window :] != 0).any()
    assert_same_pool(state, case.state, "pool")
    recorded = (ring.bits != POISON["f32"]).any(axis=(1, 2, 3))
    assert recorded.tolist() == [True] + [False] * (case.ring_shape[0] - 1)
    before = state.copy()
    ops.fold(state, ring, case.slots[None], case.ring_slots[None], [1, 1, 1, 0], 1)
    assert_same_pool(state, before, "pool after a fold of rows that take no part")
    ops.fold(state, ring, case.slots[None], case.ring_slots[None], [1, 1, 1, 1], 1)
    assert state != before, "the last row does take part"
    conv_state = case.conv_state.copy()
    out = ops.conv(case.x, case.weight, conv_state, case.slots, case.offsets)
    assert (out[: 2 * window] == 0).all() and (out[2 * window :] != 0).any()


@geometries
def test_fold_of_several_layers(geometry):
    ops = simulated(geometry, "f32")
    rng = np.random.default_rng(5)
    rows, ring_rows = np.array([[3, 0], [1, 4]]), np.array([[1, 2], [0, 3]])
    accepted = [geometry.ring_len, 1]
    g = geometry
    state = Pool.of(DTYPES["f32"], rng.standard_normal(g.recurrent_state_shape(5)))
    ring = Pool.of(
        DTYPES["f32"], rng.standard_normal((4, g.num_key_heads, g.ring_len, g.record_elements + 1))
    )
    true = state.exact
    reference.gated_delta_state_fold(true, ring.values, rows, ring_rows, accepted, 1)
    before = state.copy()
    ops.fold(state, ring, rows, ring_rows, accepted, 1)
    assert relative_error(state.values, true) <= 1e-5
    assert_same_bits(state.bits[2], before.bits[2], "a row of no layer")
    folded = state.copy()
    ops.fold(state, ring, rows, ring_rows, [geometry.ring_len + 1, 0], 1)
    assert_same_pool(state, folded, "rows that committed themselves, or kept nothing")


@geometries
@pools
def test_conv_against_the_specification(geometry, dtype):
    ops = simulated(geometry, dtype)
    case = ragged(geometry, dtype, seed=6)
    for write in (True, False):
        state = case.conv_state.copy()
        out = ops.conv(case.x, case.weight, state, case.slots, case.offsets, write)
        true_state = numbers(case.conv_state, dtype)
        true = reference.gated_delta_conv1d_fwd(
            case.x, case.weight, true_state, case.slots, case.offsets, write_state=write
        )
        assert relative_error(out, true) <= TOLERANCE
        ran = [0, 2, 3, 4]
        windows = case.slots[ran] if write else []  # inputs, rounded once: no arithmetic
        want = case.conv_state.copy()
        want.put(windows, true_state[windows])
        assert_same_pool(state, want, "windows")


def test_conv_of_a_long_row_does_not_depend_on_the_tiles():
    geometry = GEOMETRIES["32x24"]
    ops = simulated(geometry, "f32")
    case = Case(geometry, [150, 3, 70], seed=7, tail=3)
    results = []
    for tiles in (1, 3):
        state = case.conv_state.copy()
        out = ops.conv(case.x, case.weight, state, case.slots, case.offsets, tiles=tiles)
        results.append((out, state))
    assert_same_bits(results[1][0], results[0][0], "three tiles against one")
    assert_same_pool(results[1][1], results[0][1], "windows of three tiles against one")
    true_state = numbers(case.conv_state, "f32")
    true = reference.gated_delta_conv1d_fwd(
        case.x, case.weight, true_state, case.slots, case.offsets
    )
    assert relative_error(results[0][0], true) <= TOLERANCE


@geometries
@pytest.mark.parametrize("layout", ["channel stride", "odd token stride", "odd base"])
def test_qkv_anywhere_gives_the_same_bits(geometry, layout):
    """Strided channels and unaligned tokens take the kernel's other way of loading."""
    ops = simulated(geometry, "f32")
    case = Case(geometry, [6, 2], seed=8)
    want_state, state = case.state.copy(), case.state.copy()
    want = ops.plain(*case.gates, want_state, case.slots, case.offsets)
    n, channels = case.qkv.shape
    out, head, strides = ops._recurrence_args(*case.gates, state, case.slots, case.offsets)
    memory = np.full(2 * n * (channels + 2), UNWRITTEN)
    step, base = {"channel stride": (2, 0), "odd token stride": (1, 0), "odd base": (1, 1)}[layout]
    stride = step * channels + (layout == "odd token stride")
    places = base + np.arange(n)[:, None] * stride + np.arange(channels) * step
    memory[places] = case.qkv
    tile = vector(memory, "qkv", poison=memory == UNWRITTEN)
    tile.shape, tile.offset = case.qkv.shape, base
    head[7] = tile
    strides[:2] = stride, step
    ops.launch("fwd", *ops._recurrence_grid(2), [*head, *strides])
    assert_same_bits(out, want, layout)
    assert_same_pool(state, want_state, layout)


def test_float16_pools():
    geometry = GEOMETRIES["32x24"]
    ops = simulated(geometry, "f16")
    case = ragged(geometry, "f16", seed=9)
    state, verified, ring = case.state.copy(), case.state.copy(), case.new_ring()
    plain = ops.plain(*case.gates, state, case.slots, case.offsets)
    out = ops.verify(*case.gates, verified, ring, case.slots, case.ring_slots, case.offsets, 1)
    assert_same_bits(out, plain, "verify output against plain")
    counts = [*case.lengths[:-1], 0]
    ops.fold(verified, ring, case.slots[None], case.ring_slots[None], counts, 1)
    assert_same_pool(verified, state, "fold of the whole window against plain")
    true = reference.gated_delta_recurrence_fwd(
        *case.gates, numbers(case.state, "f16"), case.slots, case.offsets
    )
    assert relative_error(out, true) <= TOLERANCE


def test_a_bfloat16_ring_rounds_each_record_once():
    """Outputs do not pass through the ring; the fold does, and is near the plain op, not equal."""
    ops = Simulated(GEOMETRIES["32x24"], "f32", ring_dtype="bf16")
    case = Case(ops.geometry, [6, 3], seed=10)
    state, verified = case.state.copy(), case.state.copy()
    ring, exact_ring = case.new_ring(DTYPES["bf16"]), case.new_ring()
    plain = ops.plain(*case.gates, state, case.slots, case.offsets)
    rows = case.slots, case.ring_slots, case.offsets
    out = ops.verify(*case.gates, verified, ring, *rows, 5)
    assert_same_bits(out, plain, "verify output against plain")
    simulated(ops.geometry, "f32").verify(*case.gates, case.state.copy(), exact_ring, *rows, 5)
    written = exact_ring.bits != POISON["f32"]
    want = case.new_ring(DTYPES["bf16"])
    want.bits[written] = Pool.of(DTYPES["bf16"], exact_ring.values).bits[written]
    assert_same_pool(ring, want, "the float32 ring, rounded")
    ops.fold(verified, ring, case.slots[None], case.ring_slots[None], case.lengths, 5)
    assert verified != state
    owned = case.owned
    assert relative_error(verified.values[owned], state.values[owned].astype(np.float64)) <= 2e-2
