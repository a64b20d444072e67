"""Bytes of recurrent state that one speculative step moves, of one layer and request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from max.dtype import DType

from gdn_graph.geometry import GatedDeltaGeometry

from .problems import GEOMETRY

MAX_DRAFTS = 8


def ring_bytes(g: GatedDeltaGeometry, drafts: int, accepted: int, dtype: DType) -> int:
    """The verify reads the state and writes a record a token; the fold reads those of the accepted
    tokens, one more than the accepted drafts, and reads and writes the state.
    """
    record = g.num_key_heads * g.record_elements * int(DType.float32.size_in_bytes)
    return 3 * g.recurrent_state_bytes(dtype=dtype) + (drafts + 1 + accepted) * record


def snapshot_bytes(g: GatedDeltaGeometry, drafts: int, dtype: DType) -> int:
    """The step reads one state and writes one after each token, to go back to any."""
    return (1 + drafts + 1) * g.recurrent_state_bytes(dtype=dtype)


def rows() -> Iterator[dict[str, Any]]:
    """A row for each number of drafts and pool dtype, of the benchmark's heads."""
    for dtype in (DType.float32, DType.bfloat16):
        for drafts in range(1, MAX_DRAFTS + 1):
            snapshots = snapshot_bytes(GEOMETRY, drafts, dtype)
            none, all_ = (ring_bytes(GEOMETRY, drafts, a, dtype) for a in (1, drafts + 1))
            yield {
                "pool": dtype.name,
                "drafts": drafts,
                "ring_none_accepted": none,
                "ring_all_accepted": all_,
                "snapshots": snapshots,
                "ratio": all_ / snapshots,
            }
