"""Shapes, layouts and grids. Case numbers are those of docs/guarantees.md.

Offsets past 2**31 (C54, C55) are in test_offsets.py, memory over many steps (C64) in test_soak.py,
views and input dtypes (C52, C53, C59) in test_field_cases_graphs.py.
"""

from __future__ import annotations

import numpy as np
import pytest
from common import TOLERANCE, assert_untouched, plain_spec, row_of
from harness import (
    DTYPES,
    GEOMETRIES,
    Case,
    Pool,
    assert_same_bits,
    assert_same_pool,
    normal,
    relative_error,
)
from max.dtype import DType

from gdn_graph import GatedDeltaGeometry

pools = pytest.mark.parametrize("dtype", ["f32", "bf16"])

UNEQUAL = {
    "2x3x32x24": GEOMETRIES["2x3x32x24"],
    "1x1x32x24": GatedDeltaGeometry(1, 1, 32, 24),
    "1x2x128x65": GatedDeltaGeometry(1, 2, 128, 65),
    "2x1x24x32": GatedDeltaGeometry(2, 2, 24, 32),
    "4x1x16x16": GatedDeltaGeometry(4, 4, 16, 16),
    "1x5x7x129": GatedDeltaGeometry(1, 5, 7, 129),
}


@pytest.mark.parametrize("g", UNEQUAL.values(), ids=UNEQUAL)
@pools
@pytest.mark.parametrize("start", ["zero", "random"])
def test_c50_the_state_is_key_dim_by_value_dim(ops_of, g, dtype, start):
    """A zero state isolates the stores, a random one the loads, of outputs, pool and fold."""
    ops = ops_of(dtype)
    case = Case(g, [3, 2], DTYPES[dtype], slots=[2, 0])
    if start == "zero":
        case.state.bits[case.slots] = 0
    state, folded, ring = case.state.copy(), case.state.copy(), case.new_ring()
    out = ops.plain(*case.gates, state, case.slots, case.offsets)
    want, want_state = plain_spec(case)
    assert relative_error(out, want) < TOLERANCE
    rounding = 0 if dtype == "f32" else 2.0**-8
    owned = case.owned
    assert relative_error(state.values[owned], want_state[owned]) < TOLERANCE + rounding
    ops.verify(*case.gates, folded, ring, case.slots, case.ring_slots, case.offsets, 2)
    ops.fold(folded, ring, case.slots[None], case.ring_slots[None], [3, 2], 2)
    assert_same_pool(folded, state, "fold against plain")
    # The control: a transposed state is another one, also where KD = VD.
    turned = np.swapaxes(want_state[owned], -1, -2).reshape(want_state[owned].shape)
    assert relative_error(turned, want_state[owned]) > 0.1


@pools
def test_c52_as_many_value_heads_as_key_heads(ops_of, dtype):
    """nv = nk, symmetric dims: each head reads its own key, query, value, gates and state."""
    g = UNEQUAL["4x1x16x16"]
    ops = ops_of(dtype)
    case = Case(g, [3], DTYPES[dtype], slots=[1])
    out = ops.plain(*case.gates, case.state.copy(), [1], case.offsets).reshape(3, 4, 16)
    one = GatedDeltaGeometry(1, 1, 16, 16)
    for h in range(4):
        alone = Case(one, [3], DTYPES[dtype], slots=[1])
        alone.qkv = np.concatenate(
            [case.qkv[:, i * 64 + h * 16 : i * 64 + (h + 1) * 16] for i in range(3)], axis=1
        )
        alone.decay, alone.beta = case.decay[:, h : h + 1], case.beta[:, h : h + 1]
        alone.state.bits[1, 0] = case.state.bits[1, h]
        got = ops.plain(*alone.gates, alone.state, [1], alone.offsets)
        assert_same_bits(got, out[:, h], f"head {h} alone")


@pools
@pytest.mark.parametrize("nk", [1, 2, 3])
@pytest.mark.parametrize("group", [1, 2, 3, 4])
def test_c52_a_value_head_reads_its_key_head_and_no_other(ops_of, dtype, nk, group):
    g = GatedDeltaGeometry(nk, nk * group, 8, 6)
    ops = ops_of(dtype)
    case = Case(g, [2], DTYPES[dtype], slots=[0])
    want = ops.plain(*case.gates, case.state.copy(), [0], case.offsets).reshape(2, nk, -1)
    for kh in range(nk):
        for at in (kh * 8, g.key_dim + kh * 8):
            qkv = case.qkv.copy()
            qkv[:, at : at + 8] *= np.linspace(1.5, 2.5, 8, dtype=np.float32)
            got = ops.plain(qkv, case.decay, case.beta, case.state.copy(), [0], case.offsets)
            changed = (got.reshape(2, nk, -1) != want).any(axis=(0, 2))
            assert changed.tolist() == [h == kh for h in range(nk)]


def test_c56_grids_past_65535(ops_of):
    """98,304 (row, value head) pairs in a launch, and a fold of 147,456, all rows held to one."""
    ops = ops_of("f32")
    g = GatedDeltaGeometry(16, 48, 2, 3)
    rows = 2048
    case = Case(g, [1] * rows, slots=np.random.default_rng(0).permutation(rows))
    state, ring, plain = case.state.copy(), case.new_ring(), case.state.copy()
    out = ops.verify(*case.gates, state, ring, case.slots, case.ring_slots, case.offsets, 1)
    want = ops.plain(*case.gates, plain, case.slots, case.offsets)
    assert_same_bits(out, want, "outputs")
    for b in (0, 1365, 1366, 2047):  # 1365 * 48 = 65,520
        alone = Case(g, [1], slots=[0])
        alone.state.bits[0] = case.state.bits[case.slots[b]]
        gates = tuple(x[b : b + 1] for x in case.gates)
        got = ops.plain(*gates, alone.state, [0], [0, 1])
        assert_same_bits(got, out[b : b + 1], f"row {b} alone")
    ops.fold(state, ring, case.slots[None], case.ring_slots[None], [1] * rows, 1)
    assert_same_pool(state, plain, "pool after the fold")

    layers, batch = 48, 64
    row_ids = np.random.default_rng(1).permutation(layers * batch).reshape(layers, batch)
    pool = Pool.of(DType.float32, normal(case.rng, *g.recurrent_state_shape(layers * batch + 1)))
    records = Pool.of(DType.float32, normal(case.rng, layers * batch, 16, 2, g.record_elements))
    before = pool.copy()
    counts = np.arange(batch) % 3
    ops.fold(pool, records, row_ids, np.arange(layers * batch).reshape(layers, batch), counts, 1)
    folded = row_ids[:, counts > 0].ravel()
    assert_untouched(pool, before, folded, "pool")
    single = before.copy()
    for layer, b in ((0, 1), (47, 62), (20, 44)):
        ids = [[row_ids[layer, b]]]
        ops.fold(single, records, ids, [[layer * batch + b]], [counts[b]], 1)
        row = row_ids[layer, b]
        assert_same_bits(pool.bits[row], single.bits[row], f"layer {layer}, row {b} alone")
        assert (pool.bits[row] != before.bits[row]).any()


@pools
@pytest.mark.parametrize("length", [1, 3, 64, 65, 66, 257])
def test_c60_a_prefill_and_a_decode_are_one_longer_prefill(ops_of, dtype, length):
    """With conv; a pool that rounds does so between the calls, so only float32 is to the bit."""
    ops = ops_of(dtype)
    g = GEOMETRIES["2x3x32x24"]
    case = Case(g, [length + 1, 2], DTYPES[dtype], slots=[1, 0])
    whole_state, whole_window = case.state.copy(), case.conv_state.copy()
    whole = ops.plain(*case.gates, whole_state, case.slots, case.offsets)
    conv = ops.conv(case.x, case.weight, whole_window, case.slots, case.offsets)
    state, window = case.state.copy(), case.conv_state.copy()
    for part, offsets in ((slice(0, length), [0, length]), (slice(length, length + 1), [0, 1])):
        gates = tuple(x[part] for x in case.gates)
        got = ops.plain(*gates, state, [1], offsets)
        got_conv = ops.conv(case.x[part], case.weight, window, [1], offsets)
        if dtype == "f32":
            assert_same_bits(got, whole[part], f"tokens {part}")
            assert_same_bits(got_conv, conv[part], f"conv of tokens {part}")
        else:
            assert relative_error(got, whole[part]) < 0.02
    if dtype == "f32":
        assert_same_bits(state.bits[1], whole_state.bits[1], "state")
    assert_same_bits(window.bits[1], whole_window.bits[1], "window")


@pools
@pytest.mark.parametrize("extra", [1, 4, 28])
def test_c62_a_window_with_trailing_columns_is_refused(ops_of, dtype, extra):
    case = Case(GEOMETRIES["2x3x32x24"], [2], DTYPES[dtype], slots=[0])
    shape = list(case.conv_state.bits.shape)
    shape[2] += extra
    wide = Pool.of(DTYPES[dtype], normal(case.rng, *shape))
    before = wide.copy()
    got, need = (
        f"{tuple(s)}".replace("(", r"\(").replace(")", r"\)")
        for s in (shape, case.conv_state.bits.shape)
    )
    with pytest.raises(ValueError, match=rf"conv_state has shape {got}; need {need}"):
        ops_of(dtype).conv(case.x, case.weight, wide, [0], case.offsets)
    assert_same_pool(wide, before, "pool")


@pools
@pytest.mark.parametrize("width", range(2, 9))
def test_c63_a_row_reads_its_own_window_and_not_the_row_before(ops_of, dtype, width):
    """Rows side by side in memory, the others with values that would show at once."""
    g = GatedDeltaGeometry(1, 3, 8, 5, conv_width=width)
    ops = ops_of(dtype)
    case = Case(g, [3, 2, 1, 4], DTYPES[dtype])
    state = case.conv_state.copy()
    want = ops.conv(case.x, case.weight, state, case.slots, case.offsets)
    for b in range(4):
        x = np.full_like(case.x, 1e30)
        x[row_of(case, b)] = case.x[row_of(case, b)]
        loud = case.conv_state.copy()
        loud.bits[np.delete(case.slots, b)] = Pool.of(loud.dtype, np.array([1e4])).bits[0]
        got = ops.conv(x, case.weight, loud, case.slots, case.offsets)
        assert_same_bits(got[row_of(case, b)], want[row_of(case, b)], f"row {b}")
        slot = case.slots[b]
        assert_same_bits(loud.bits[slot], state.bits[slot], f"window of row {b}")
