"""Rows that share a slot disturb no other row; NaN and infinity stay where they came in."""

from __future__ import annotations

import numpy as np
import pytest
from common import assert_untouched, row_of
from harness import DTYPES, GEOMETRIES, Case, Pool, assert_same_bits, assert_same_pool, u32

from gdn_graph import GatedDeltaGeometry

G = GEOMETRIES["2x3x32x24"]
pools = pytest.mark.parametrize("dtype", ["f32", "bf16"])
# The large one is cut into chunks that run at the same time.
sizes = pytest.mark.parametrize("geometry", ["2x3x32x24", "16x3x128x128"])

LENGTHS = [3, 2, 1, 4, 2]
SHARED = [0, 2, 4]  # rows of the batch that name slot 1; rows 1 and 3 have slots of their own
OWN = [1, 3]


def aliased(geometry: str, dtype: str, seed: int) -> Case:
    return Case(GEOMETRIES[geometry], LENGTHS, DTYPES[dtype], seed=seed, slots=[1, 3, 1, 0, 1])


def without_the_shared(case: Case) -> tuple[tuple[np.ndarray, ...], np.ndarray, np.ndarray]:
    counts = [n if b in OWN else 0 for b, n in enumerate(LENGTHS)]
    gates, offsets = case.take(counts)
    return gates, offsets, case.index(counts)


@sizes
@pools
@pytest.mark.parametrize("seed", range(3))
def test_aliased_rows_of_the_plain_op_and_the_conv(ops_of, geometry, dtype, seed):
    ops = ops_of(dtype)
    case = aliased(geometry, dtype, seed)
    gates, offsets, index = without_the_shared(case)
    state, alone = case.state.copy(), case.state.copy()
    out = ops.plain(*case.gates, state, case.slots, case.offsets)
    want = ops.plain(*gates, alone, case.slots, offsets)
    assert_same_bits(out[index], want, "outputs of rows with a slot of their own")
    assert_same_bits(state.bits[[0, 3]], alone.bits[[0, 3]], "their states")
    assert_untouched(state, case.state, [0, 1, 3], "pool")
    conv_state, alone = case.conv_state.copy(), case.conv_state.copy()
    conv = ops.conv(case.x, case.weight, conv_state, case.slots, case.offsets)
    want = ops.conv(case.x[index], case.weight, alone, case.slots, offsets)
    assert_same_bits(conv[index], want, "conv of rows with a slot of their own")
    assert_same_bits(conv_state.bits[[0, 3]], alone.bits[[0, 3]], "their windows")
    assert_untouched(conv_state, case.conv_state, [0, 1, 3], "windows")


@sizes
@pools
def test_a_shared_slot_that_is_only_read_gives_every_row_its_result(ops_of, geometry, dtype):
    """A verify over one slot, as a tree of drafts would have it: each row as if it were alone."""
    ops = ops_of(dtype)
    case = aliased(geometry, dtype, 0)
    state, ring = case.state.copy(), case.new_ring()
    args = (case.slots, case.ring_slots)
    out = ops.verify(*case.gates, state, ring, *args, case.offsets, 3)
    assert_same_pool(state, case.state, "pool")
    conv_state = case.conv_state.copy()
    conv = ops.conv(case.x, case.weight, conv_state, case.slots, case.offsets, write_state=False)
    assert_same_pool(conv_state, case.conv_state, "windows")
    for b, length in enumerate(LENGTHS):
        rows, at = slice(b, b + 1), row_of(case, b)
        own_ring = case.new_ring()
        gates = tuple(x[at] for x in case.gates)
        one = [ids[rows] for ids in args]
        want = ops.verify(*gates, case.state.copy(), own_ring, *one, [0, length], 3)
        assert_same_bits(out[at], want, f"row {b}")
        row = case.ring_slots[b]
        assert_same_bits(ring.bits[row], own_ring.bits[row], f"records of row {b}")
        want = ops.conv(
            case.x[at], case.weight, conv_state, case.slots[rows], [0, length], write_state=False
        )
        assert_same_bits(conv[at], want, f"conv of row {b}")


@sizes
@pools
def test_aliased_ring_rows(ops_of, geometry, dtype):
    """Two rows record into one ring row: their records are lost, those of others are not."""
    ops = ops_of(dtype)
    case = Case(GEOMETRIES[geometry], LENGTHS, DTYPES[dtype], ring_slots=[2, 1, 2, 0, 2])
    state, ring, alone = case.state.copy(), case.new_ring(), case.new_ring()
    out = ops.verify(*case.gates, state, ring, case.slots, case.ring_slots, case.offsets, 3)
    want = ops.plain(*case.gates, case.state.copy(), case.slots, case.offsets)
    assert_same_bits(out, want, "outputs, which no ring row changes")
    gates, offsets, _ = without_the_shared(case)
    ops.verify(*gates, state, alone, case.slots, case.ring_slots, offsets, 3)
    assert_same_bits(ring.bits[[0, 1]], alone.bits[[0, 1]], "records of rows of their own")
    assert_untouched(ring, case.new_ring(), [0, 1, 2], "ring")


@sizes
@pools
def test_aliased_rows_of_the_fold(ops_of, geometry, dtype):
    """Padding requests that all name block 0, in two layers, beside rows that fold."""
    ops = ops_of(dtype)
    case = Case(GEOMETRIES[geometry], [3, 2, 4, 1], DTYPES[dtype], slots=[4, 2, 3, 5])
    ring = case.new_ring()
    rings = case.ring_slots
    ops.verify(*case.gates, case.state.copy(), ring, case.slots, rings, case.offsets, 3)
    case.state.put([0, 1], case.state.values[[2, 3]])  # block 0 and a second layer
    rows = np.array([[4, 0, 2, 0, 3], [0, 0, 1, 0, 0]])
    ring_rows = np.array([[rings[0], 0, rings[1], 0, rings[2]], [0, 0, rings[3], 0, 0]])
    state, alone = case.state.copy(), case.state.copy()
    ops.fold(state, ring, rows, ring_rows, [3, 1, 1, 2, 4], 3)
    for layer, b, count in ((0, 0, 3), (0, 2, 1), (0, 4, 4), (1, 2, 1)):
        ops.fold(
            alone,
            ring,
            rows[layer : layer + 1, b : b + 1],
            ring_rows[[layer], [b]][None],
            [count],
            3,
        )
    for row in (1, 2, 3, 4):
        assert_same_bits(state.bits[row], alone.bits[row], f"row {row}, which one request names")
        assert (state.bits[row] != case.state.bits[row]).any()
    assert_untouched(state, case.state, [0, 1, 2, 3, 4], "pool")


@pools
def test_states_may_share_a_ring_row(ops_of, dtype):
    """The ring is only read by a fold: two states may take the same records."""
    ops = ops_of(dtype)
    case = Case(G, [3], DTYPES[dtype], slots=[0], ring_slots=[0])
    case.state.bits[1] = case.state.bits[0]
    ring = case.new_ring()
    ops.verify(*case.gates, case.state.copy(), ring, [0], [0], case.offsets, 2)
    state = case.state.copy()
    ops.fold(state, ring, [[0, 1]], [[0, 0]], [2, 2], 2)
    assert_same_bits(state.bits[1], state.bits[0], "two states and one ring row")
    assert (state.bits[0] != case.state.bits[0]).any()


# Not finite.

VALUES = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf}
ROW, TOKEN = 1, 1  # of a batch of three rows: where the value is put


def poison(case: Case, where: str, value: float) -> list[int]:
    """Puts the value into row ROW, and says which value heads it may reach."""
    g, group = case.geometry, case.geometry.group
    t = row_of(case, ROW).start + TOKEN
    last = g.num_value_heads - 1
    if where == "query":
        case.qkv[t, (g.num_key_heads - 1) * g.key_head_dim] = value
        return list(range(g.num_value_heads - group, g.num_value_heads))
    if where == "key":
        case.qkv[t, g.key_dim + g.key_head_dim - 1] = value
        return list(range(group))
    if where == "value":
        case.qkv[t, 2 * g.key_dim + g.value_head_dim // 2] = value
        return [0]
    if where == "state":
        values = case.state.values[case.slots[ROW]].copy()
        values[last, 1, 2] = value
        case.state.put(case.slots[ROW], values)
        return [last]
    gate = case.decay if where == "decay" else case.beta
    gate[t, last // 2] = value
    return [last // 2]


@pools
@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
@pytest.mark.parametrize("where", ["query", "key", "value", "decay", "beta", "state"])
@pytest.mark.parametrize("geometry", ["2x3x32x24", "3x1x8x40", "2x2x64x65", "16x3x128x128"])
def test_a_value_that_is_not_finite_stays_in_its_row_and_heads(
    ops_of, geometry, dtype, where, value
):
    """In outputs, records, and the state after the plain op and after the fold."""
    ops = ops_of(dtype)
    g = GEOMETRIES[geometry]

    def run(poisoned):
        case = Case(g, [2, 3, 2], DTYPES[dtype], seed=6)
        heads = poison(case, where, value) if poisoned else []
        plain, state, ring = case.state.copy(), case.state.copy(), case.new_ring()
        args = (case.slots, case.ring_slots, case.offsets)
        out = ops.verify(*case.gates, state, ring, *args, 2)
        want = ops.plain(*case.gates, plain, case.slots, case.offsets)
        assert_same_numbers(out, want)
        ops.fold(state, ring, case.slots[None], case.ring_slots[None], [2, 3, 2], 2)
        assert_same_numbers(state.values[case.slots], plain.values[case.slots])
        shape = (-1, g.num_value_heads, g.value_head_dim)
        return case, heads, out.reshape(shape), plain.values[case.slots], ring.values

    case, heads, out, state, ring = run(True)
    _, _, clean_out, clean_state, clean_ring = run(False)
    others = [h for h in range(g.num_value_heads) if h not in heads]
    assert not np.isfinite(out[row_of(case, ROW)][:, heads]).all(), "the value must be seen"
    rows = [b for b in range(3) if b != ROW]
    for b in rows:
        assert_same_bits(out[row_of(case, b)], clean_out[row_of(case, b)], f"row {b}")
        assert_same_bits(state[b], clean_state[b], f"state of row {b}")
        ring_row = case.ring_slots[b]
        assert_same_bits(ring[ring_row], clean_ring[ring_row], f"records of row {b}")
    at = row_of(case, ROW)
    assert_same_bits(out[at][:, others], clean_out[at][:, others], "other heads")
    assert_same_bits(state[ROW][others], clean_state[ROW][others], "states of other heads")
    if where != "state":  # tokens before it are as they were
        before = slice(at.start, at.start + TOKEN)
        assert_same_bits(out[before], clean_out[before], "tokens before")


def assert_same_numbers(a: np.ndarray, b: np.ndarray) -> None:
    """Equal bits, but a NaN may have any sign and payload."""
    assert np.array_equal(np.isnan(a), np.isnan(b))
    assert_same_bits(np.where(np.isnan(a), 0, a), np.where(np.isnan(b), 0, b), "finite values")


@pools
@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_a_value_that_is_not_finite_stays_in_its_channel_of_the_conv(ops_of, dtype, value):
    ops = ops_of(dtype)
    clean = Case(G, [4, 5, 3], DTYPES[dtype])
    want_state = clean.conv_state.copy()
    want = ops.conv(clean.x, clean.weight, want_state, clean.slots, clean.offsets)
    for where in ("input", "window", "weight"):
        case = Case(G, [4, 5, 3], DTYPES[dtype])
        channel = 17
        rows = [1]
        if where == "input":
            case.x[row_of(case, 1).start + 1, channel] = value
        elif where == "window":
            window = case.conv_state.values[case.slots[1]].copy()
            window[channel, 1] = value
            case.conv_state.put(case.slots[1], window)
        else:
            case.weight[channel] = value
            rows = [0, 1, 2]
        state = case.conv_state.copy()
        out = ops.conv(case.x, case.weight, state, case.slots, case.offsets)
        assert not np.isfinite(out).all()
        reached = np.zeros(out.shape, bool)
        for b in rows:
            reached[row_of(case, b), channel] = True
        assert_same_bits(out[~reached], want[~reached], f"outputs beside the {where}")
        other = [slot for b, slot in enumerate(case.slots) if b not in rows]
        assert_same_bits(state.bits[other], want_state.bits[other], "windows of other rows")


@pools
def test_a_slot_that_is_zeroed_has_forgotten_a_nan(ops_of, dtype):
    ops = ops_of(dtype)
    case = Case(G, [3], DTYPES[dtype], slots=[1])
    ruined = case.state.copy()
    ruined.bits[1] = Pool.poison(ruined.dtype, [1]).bits
    ops.plain(*case.gates, ruined, [1], case.offsets)
    assert np.isnan(ruined.values[1]).all()
    results = []
    for state in (ruined, case.state.copy()):
        state.bits[1] = 0
        results.append(ops.plain(*case.gates, state, [1], case.offsets))
    assert_same_bits(results[0], results[1], "after a NaN and without one")


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_states_and_small_gates(ops_of, dtype):
    """States of 600, decays 0 and 1e-30, beta 0 and 1, side by side: finite, and exact."""
    ops = ops_of(dtype)
    g = GatedDeltaGeometry(2, 4, 32, 24, ring_len=8)
    case = Case(g, [4, 4], DTYPES[dtype], slots=u32([0, 2]))
    case.state.put([0, 2], np.sign(case.state.values[[0, 2]]) * 600)
    case.decay[:] = [0, 1e-30, 0.9999, 1]
    case.beta[::2], case.beta[1::2] = 0, 1
    plain, state, ring = case.state.copy(), case.state.copy(), case.new_ring()
    out = ops.verify(*case.gates, state, ring, case.slots, case.ring_slots, case.offsets, 3)
    want = ops.plain(*case.gates, plain, case.slots, case.offsets)
    assert np.isfinite(out).all()
    assert_same_bits(out, want, "outputs")
    ops.fold(state, ring, case.slots[None], case.ring_slots[None], [4, 4], 3)
    assert_same_pool(state, plain, "pool")
    assert np.isfinite(plain.values[[0, 2]]).all()
