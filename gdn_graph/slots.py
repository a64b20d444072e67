"""Slots: which request owns which rows of the pools.

A slot is one row of each pool in each layer: row slot * layers + layer, as MAX's cache numbers
them. A slot is zeroed when it is admitted, so a recycled one never shows an earlier request.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from max.driver import Buffer
from numpy.typing import NDArray

from .geometry import PADDING


class Slots:
    """Hands out the slots of a set of pools.

    Args:
        slots: How many there are.
        layers: Rows of a pool that one slot has.
        states: Pools that hold what a request has become; fork copies them.
        scratch: Pools that hold nothing between steps.

    Each pool is [slots * layers, ...].
    """

    def __init__(
        self, slots: int, layers: int, states: Sequence[Buffer], scratch: Sequence[Buffer] = ()
    ) -> None:
        self._layers = layers
        self._states = list(states)
        self._pools = [*states, *scratch]
        self._zeros = [
            Buffer.zeros((layers, *pool.shape[1:]), pool.dtype, pool.device) for pool in self._pools
        ]
        self._settle()
        self._free = list(range(slots - 1, -1, -1))
        self._taken: set[int] = set()

    @property
    def free(self) -> int:
        """Slots that no request owns."""
        return len(self._free)

    def admit(self) -> int:
        """Takes a free slot and zeroes its rows.

        Raises:
            RuntimeError: If no slot is free.
        """
        slot = self._take("admit")
        for pool, zeros in zip(self._pools, self._zeros, strict=True):
            self._rows(pool, slot).inplace_copy_from(zeros)
        self._settle()
        return slot

    def fork(self, slot: int) -> int:
        """Takes a free slot and gives it the state of another, as after a shared prefix.

        Raises:
            ValueError: If slot is not admitted.
            RuntimeError: If no slot is free.
        """
        self.require(slot, "fork")
        child = self._take("fork")
        for pool in self._states:
            self._rows(pool, child).inplace_copy_from(self._rows(pool, slot))
        self._settle()
        return child

    def release(self, slot: int) -> None:
        """Gives a slot back.

        Raises:
            ValueError: If slot is not admitted.
        """
        self.require(slot, "release")
        self._taken.remove(slot)
        self._free.append(slot)

    def require(self, slot: int, what: str) -> None:
        """Raises ValueError unless slot is admitted."""
        if slot not in self._taken:
            raise ValueError(f"{what}: slot {slot} is not admitted; need one that admit() gave")

    def rows(self, slots: Sequence[int]) -> NDArray[np.uint32]:
        """The row table uint32 [layers, B] of a batch; PADDING stays PADDING."""
        ids = np.asarray(slots, np.int64)
        table = ids * self._layers + np.arange(self._layers, dtype=np.int64)[:, None]
        return np.where(ids == PADDING, PADDING, table).astype(np.uint32)

    def _take(self, what: str) -> int:
        if not self._free:
            raise RuntimeError(
                f"{what}: all {len(self._taken)} slots are taken; release one, or make more slots"
            )
        slot = self._free.pop()
        self._taken.add(slot)
        return slot

    def _settle(self) -> None:
        """Waits for fills and copies on the host: MAX queues them there, and unlike on a GPU the
        next execution does not come after what is queued."""
        for device in {pool.device for pool in self._pools}:
            if device.is_host:
                device.synchronize()

    def _rows(self, pool: Buffer, slot: int) -> Buffer:
        first = slot * self._layers
        return pool[(slice(first, first + self._layers), *[slice(None)] * (pool.rank - 1))]
