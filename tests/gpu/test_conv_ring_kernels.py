"""The conv that records its inputs and the fold of the windows, in the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from emit_ptx import Build
from harness import DTYPES, PADDING, Array, Case, Pool, u32
from simulated import UNWRITTEN, Simulated, vector

from gdn_graph import GatedDeltaGeometry

# 160 channels are two blocks, one partial; the ring is longer than a tile of 64 tokens.
GEOMETRIES = {
    "width 4": GatedDeltaGeometry(1, 3, 32, 32, conv_width=4, ring_len=4),
    "width 8": GatedDeltaGeometry(1, 3, 32, 32, conv_width=8, ring_len=70),
}

geometries = pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
pools = pytest.mark.parametrize("dtype", ["f32", "bf16"])


class ConvRing(Simulated):
    """Simulated, with the two kernels of the conv ring; the ring has the dtype of the windows."""

    def ptx(self, name: str) -> str:
        g = self.geometry
        build = Build(
            g.key_head_dim,
            g.value_head_dim,
            g.ring_len,
            g.conv_width,
            kernels=("conv", "conv_ring"),
        )
        return (build.folder() / f"{name}_{self.dtype}.ptx").read_text()

    def conv_ring(
        self,
        x: Array,
        weight: Array,
        state: Pool,
        ring: Pool,
        slots: Any,
        ring_slots: Any,
        offsets: Any,
        tiles: int = 1,
    ) -> Array:
        slots, ring_slots, offsets = u32(slots), u32(ring_slots), u32(offsets)
        out = np.full(x.shape, UNWRITTEN)
        args = [
            len(slots),
            len(x),
            x.shape[1],
            ring.bits.shape[1],
            vector(x, "x"),
            vector(weight, "weight"),
            self.pool(state, "conv_state"),
            vector(slots, "slot_idx"),
            vector(offsets, "offsets"),
            vector(out, "out", readonly=False),
            self.pool(ring, "conv_ring"),
            vector(ring_slots, "ring_slot_idx"),
        ]
        self.launch("conv_ring", (-(-x.shape[1] // 128), len(slots), tiles), 128, args)
        return out

    def conv_fold(
        self, state: Pool, ring: Pool, rows: Sequence[Any], ring_rows: Sequence[Any], accepted: Any
    ) -> None:
        table, ring_table, counts = u32(rows), u32(ring_rows), u32(accepted)
        layers, batch = table.shape
        channels, history = state.bits.shape[1:]
        args = [
            batch,
            channels,
            history,
            ring.bits.shape[1],
            self.pool(state, "conv_state"),
            vector(table, "row_ids"),
            self.pool(ring, "conv_ring", readonly=True),
            vector(ring_table, "ring_row_ids"),
            vector(counts, "num_accepted"),
        ]
        self.launch("conv_fold", (-(-channels // 128), batch, layers), 128, args)


@cache
def simulated(geometry: GatedDeltaGeometry, dtype: str) -> ConvRing:
    return ConvRing(geometry, dtype)


def case_of(geometry: GatedDeltaGeometry, dtype: str) -> tuple[Case, Pool]:
    """A full window, no tokens, an overlong row, short ones, one with nowhere to record and a
    padding row; then tokens of no row."""
    full = geometry.ring_len
    case = Case(geometry, [full, 0, full + 3, 1, 3, 2, 2], DTYPES[dtype], tail=2)
    case.ring_slots[-2] = PADDING
    case.slots[-1] = case.ring_slots[-1] = PADDING
    return case, Pool.poison(DTYPES[dtype], geometry.conv_ring_shape(9))


@geometries
@pools
@pytest.mark.parametrize("tiles", [1, 2])
def test_verify_and_fold_equal_the_plain_conv(
    geometry: GatedDeltaGeometry, dtype: str, tiles: int
) -> None:
    sim = simulated(geometry, dtype)
    case, ring = case_of(geometry, dtype)
    before = case.conv_state.bits.copy()
    out = sim.conv_ring(
        case.x, case.weight, case.conv_state, ring, case.slots, case.ring_slots, case.offsets, tiles
    )
    plain, _ = case_of(geometry, dtype)
    want = sim.conv(case.x, case.weight, plain.conv_state, case.slots, case.offsets)
    nowhere = slice(int(case.offsets[5]), int(case.offsets[6]))
    want[nowhere] = 0
    assert (out.view(np.uint32) == want.view(np.uint32)).all()
    # Only the overlong row has written its window, and only recording rows the ring.
    long = int(case.slots[2])
    assert (case.conv_state.bits[long] == plain.conv_state.bits[long]).all()
    assert (np.delete(case.conv_state.bits, long, 0) == np.delete(before, long, 0)).all()
    for b in (0, 3, 4):
        tokens = case.x[case.offsets[b] : case.offsets[b + 1]]
        recorded = ring.bits[int(case.ring_slots[b]), : len(tokens)]
        assert (recorded == Pool.of(DTYPES[dtype], tokens).bits).all()
    assert (ring.bits == Pool.poison(DTYPES[dtype], ring.bits.shape).bits).sum() == (
        ring.bits.size - (geometry.ring_len + 4) * geometry.conv_dim
    )

    accepted = [min(2, geometry.ring_len), 0, geometry.ring_len + 3, 1, 2, 2, 2]
    sim.conv_fold(case.conv_state, ring, [case.slots], [case.ring_slots], accepted)
    kept = [n if b < 5 else 0 for b, n in enumerate(accepted)]
    again, _ = case_of(geometry, dtype)
    rows = [case.x[o : o + n] for o, n in zip(case.offsets[:-1], kept, strict=True)]
    sim.conv(
        np.concatenate(rows),
        case.weight,
        again.conv_state,
        case.slots,
        np.concatenate([[0], np.cumsum(kept)]),
    )
    assert case.conv_state == again.conv_state


def test_a_fold_of_two_layers_and_ids_outside_the_pools() -> None:
    geometry = GEOMETRIES["width 4"]
    sim = simulated(geometry, "f32")
    rng = np.random.default_rng(0)
    windows = rng.standard_normal(geometry.conv_state_shape(5), np.float32)
    inputs = rng.standard_normal(geometry.conv_ring_shape(4), np.float32)
    state, ring = Pool.of(DTYPES["f32"], windows), Pool.of(DTYPES["f32"], inputs)
    # The last two rows name a window, and a ring row, that there is not.
    sim.conv_fold(state, ring, [[3, 1, 5, 0], [4, 2, PADDING, 0]], [[2, 0, 1, 4]] * 2, [3, 1, 2, 2])
    want = windows.copy()
    for row, ring_row, count in ((3, 2, 3), (1, 0, 1), (4, 2, 3), (2, 0, 1)):
        both = np.concatenate([windows[row].T, inputs[ring_row, :count]])
        want[row] = both[count:].T
    np.testing.assert_array_equal(state.values, want)
    folded = state.copy()
    sim.conv_fold(state, ring, [[3, 1]] * 2, [[2, 0]] * 2, [geometry.ring_len + 1, 0])
    assert state == folded, "rows that committed themselves, or kept nothing"


def test_a_fold_of_one_input_too_few_is_noticed() -> None:
    """The control: bit for bit is a comparison that can fail."""
    geometry = GEOMETRIES["width 4"]
    sim = simulated(geometry, "f32")
    states = []
    for accepted in (2, 1):
        case, ring = case_of(geometry, "f32")
        rows = case.slots, case.ring_slots, case.offsets
        sim.conv_ring(case.x, case.weight, case.conv_state, ring, *rows)
        counts = [accepted, 0, 0, 0, 0, 0, 0]
        sim.conv_fold(case.conv_state, ring, [case.slots], [case.ring_slots], counts)
        states.append(case.conv_state)
    assert states[0] != states[1]
