"""What the robustness tests share: the specification on a case, and what must not have moved."""

from __future__ import annotations

from typing import Any

import numpy as np
from harness import Array, Case, Pool, assert_same_bits

from gdn_graph import reference

# Relative to the largest value of a tensor; float32 arithmetic over some ten tokens gives 1e-6.
TOLERANCE = 5e-6


def plain_spec(case: Case) -> tuple[Array, Array]:
    """Outputs and pool of the plain recurrence in float64."""
    state = case.state.exact
    out = reference.gated_delta_recurrence_fwd(*case.gates, state, case.slots, case.offsets)
    return out, state


def assert_untouched(got: Pool, before: Pool, changed: Any, what: str) -> None:
    """Every row of a pool or ring that is not named keeps its bits."""
    kept = np.ones(len(before.bits), bool)
    kept[list(changed)] = False
    assert kept.any(), "a pool without a spare row shows nothing"
    assert_same_bits(got.bits[kept], before.bits[kept], f"rows of {what} that no one may change")


def row_of(case: Case, b: int) -> slice:
    """The tokens of row b."""
    return slice(int(case.offsets[b]), int(case.offsets[b + 1]))
