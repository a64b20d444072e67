"""The GPU kernels on NumPy arrays, run by the PTX simulator with all of its checks on.

`Simulated` has the calls of harness.Ops. Pools, rings and outputs are poisoned where nothing has
been written: reading such an element, reading or writing outside a buffer, writing to a read-only
one, an unordered pair of shared-memory accesses and a barrier that cannot complete are errors.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from emit_ptx import Build
from harness import Array, Pool, u32
from ptxsim import Buffer, Kernel, Stats, TileTensor

from gdn_graph import GatedDeltaGeometry

# An output element that no kernel has written. No kernel computes it.
UNWRITTEN = np.float32(-7.75e18)
POISON = {"f32": 0x7FA5A5A5, "bf16": 0x7FA5, "f16": 0x7D5A}


def vector(array: Array, name: str, *, readonly: bool = True, poison: Any = None) -> TileTensor:
    return TileTensor(Buffer(array, name, readonly=readonly, poison=poison), array.shape)


@dataclass
class Simulated:
    """The kernels of one geometry, pool dtype and algorithm; `wide` blocks cover more of a head."""

    geometry: GatedDeltaGeometry
    dtype: str = "f32"
    algorithm: str = "exact"
    wide: bool = False
    stats: Stats | None = field(default=None, init=False)  # of the last launch

    @cached_property
    def build(self) -> Build:
        g = self.geometry
        dtypes = ("f16",) if self.dtype == "f16" else ("f32", "bf16")
        return Build(
            g.key_head_dim,
            g.value_head_dim,
            g.ring_len,
            g.conv_width,
            dtypes=dtypes,
        )

    @cached_property
    def launch_geometry(self) -> dict[str, int]:
        text = (self.build.folder() / "launch.json").read_text()
        geometry: dict[str, int] = json.loads(text)[self.dtype]
        return geometry

    def ptx(self, name: str) -> str:
        return (self.build.folder() / f"{name}_{self.dtype}.ptx").read_text()

    def kernel(self, name: str) -> Kernel:
        loaded: dict[str, Kernel] = self.__dict__.setdefault("loaded", {})
        if name not in loaded:
            loaded[name] = Kernel.from_ptx(self.ptx(name))
        return loaded[name]

    def replace(self, name: str, ptx: str) -> None:
        """Uses this PTX for a kernel: a planted fault."""
        self.kernel(name)
        self.__dict__["loaded"][name] = Kernel.from_ptx(ptx)

    def pool(self, pool: Pool, name: str, *, readonly: bool = False) -> TileTensor:
        poison = pool.bits == POISON[self.dtype if name != "ring" else "f32"]
        return vector(pool.bits, name, readonly=readonly, poison=poison)

    def launch(self, name: str, grid: Sequence[int], threads: int, args: Sequence[Any]) -> None:
        self.stats = self.kernel(name).launch(tuple(grid), threads, args, races=True)

    def conv(
        self,
        x: Array,
        weight: Array,
        state: Pool,
        slots: Any,
        offsets: Any,
        write_state: bool = True,
        tiles: int = 1,
    ) -> Array:
        slots, offsets = u32(slots), u32(offsets)
        channels = weight.shape[0]
        out = np.full(x.shape, UNWRITTEN)
        args = [
            len(slots),
            len(x),
            channels,
            vector(x, "x"),
            vector(weight, "weight"),
            self.pool(state, "conv_state", readonly=not write_state),
            vector(slots, "slot_idx"),
            vector(offsets, "offsets"),
            vector(out, "out", readonly=False),
            *(x.shape[1], 1),
            *(weight.shape[1], 1),
            *(out.shape[1], 1),
        ]
        grid = (-(-channels // 128), len(slots), tiles)
        self.launch("conv" if write_state else "conv_read", grid, 128, args)
        return out

    def _recurrence_args(
        self, qkv: Array, decay: Array, beta: Array, state: Pool, slots: Array, offsets: Array
    ) -> tuple[Array, list[Any], list[Any]]:
        g = self.geometry
        out = np.full((len(decay), g.value_dim), UNWRITTEN)
        head = [
            len(slots),
            g.num_value_heads,
            g.num_key_heads,
            g.key_dim,
            vector(out, "out", readonly=False),
            self.pool(state, "state"),
            vector(slots, "slot_idx"),
            vector(qkv, "qkv"),
            vector(decay, "decay"),
            vector(beta, "beta"),
            vector(offsets, "offsets"),
        ]
        strides = [qkv.shape[1], 1, g.num_value_heads, 1, g.value_dim, 1]
        return out, head, strides

    def _recurrence_grid(self, rows: int) -> tuple[tuple[int, int, int], int]:
        size = "wide" if self.wide else "narrow"
        splits = self.launch_geometry[f"{size}_splits"]
        grid = (self.geometry.group, self.geometry.num_key_heads, rows * splits)
        if self.launch_geometry["rows_first"]:
            grid = grid[::-1]
        return grid, self.launch_geometry[f"{size}_threads"]

    def plain(
        self, qkv: Array, decay: Array, beta: Array, state: Pool, slots: Any, offsets: Any
    ) -> Array:
        slots, offsets = u32(slots), u32(offsets)
        out, head, strides = self._recurrence_args(qkv, decay, beta, state, slots, offsets)
        self.launch(self._name("fwd"), *self._recurrence_grid(len(slots)), [*head, *strides])
        return out

    def verify(
        self,
        qkv: Array,
        decay: Array,
        beta: Array,
        state: Pool,
        ring: Pool,
        slots: Any,
        ring_slots: Any,
        offsets: Any,
        k: int,
    ) -> Array:
        if k == 0:  # as the op launches it
            return self.plain(qkv, decay, beta, state, slots, offsets)
        slots, ring_slots, offsets = u32(slots), u32(ring_slots), u32(offsets)
        out, head, strides = self._recurrence_args(qkv, decay, beta, state, slots, offsets)
        ring_args = [
            self.pool(ring, "ring"),
            vector(ring_slots, "ring_slot_idx"),
            ring.bits.shape[-1],
        ]
        args = [*head, *ring_args, *strides]
        self.launch(self._name("verify"), *self._recurrence_grid(len(slots)), args)
        return out

    def fold(
        self, state: Pool, ring: Pool, row_ids: Any, ring_row_ids: Any, accepted: Any, k: int
    ) -> None:
        if k == 0:  # as the op launches it
            return
        rows, ring_rows, accepted = u32(row_ids), u32(ring_row_ids), u32(accepted)
        g = self.geometry
        layers, batch = rows.shape
        args = [
            batch,
            layers,
            g.num_value_heads,
            g.num_key_heads,
            self.pool(state, "state"),
            vector(rows, "row_ids"),
            self.pool(ring, "ring", readonly=True),
            vector(ring_rows, "ring_row_ids"),
            ring.bits.shape[-1],
            vector(accepted, "num_accepted"),
        ]
        parts = self.launch_geometry["fold_parts"]
        grid = (layers * batch, g.group * parts, g.num_key_heads)
        self.launch("fold", grid, self.launch_geometry["fold_threads"], args)

    def _name(self, kernel: str) -> str:
        return kernel if self.algorithm == "exact" else f"{kernel}_block"
