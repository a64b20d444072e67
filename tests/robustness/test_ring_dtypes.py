"""Rings of bfloat16 and float16: taken, near the plain op, and not exact, as documented."""

from __future__ import annotations

import numpy as np
import pytest
from common import assert_untouched
from harness import (
    DTYPES,
    GEOMETRIES,
    Case,
    add_graph,
    assert_same_bits,
    assert_same_pool,
    buffer,
    drafts,
    ids,
    relative_error,
    run,
    tensor,
    u32,
)
from max.graph import Module

from gdn_graph import kernel_library, ops

G = GEOMETRIES["2x3x32x24"]
PAIRS = {"f32 pool, bf16 ring": ("f32", "bf16"), "bf16 pool, f16 ring": ("bf16", "f16")}
# Three records, each rounded once by half an ulp of the ring, then once by the pool.
BOUND = {"bf16": 2.0**-6, "f16": 2.0**-7}


@pytest.fixture(scope="module")
def models(session):
    module = Module()
    for name, (pool, ring) in PAIRS.items():
        state = buffer(DTYPES[pool], "slots", "nv", "KD", "VD")
        records = buffer(DTYPES[ring], "rows", "nk", "R", "stride")
        inputs = [tensor("N", "C"), tensor("N", "nv"), tensor("N", "nv")]
        rows = [ids("B"), ids("B"), ids("B1"), drafts()]
        verify = [*inputs, state, records, *rows]
        fold = [state, records, ids("L", "B"), ids("L", "B"), ids("B"), drafts()]
        add_graph(module, f"verify {name}", ops.gated_delta_recurrence_verify_ring_fwd, verify)
        add_graph(module, f"fold {name}", ops.gated_delta_state_fold, fold)
    return session.load_all(module, custom_extensions=[kernel_library()])


@pytest.mark.parametrize("name", PAIRS)
def test_a_ring_that_rounds_is_near_and_not_exact(models, ops_of, name):
    pool, ring_dtype = PAIRS[name]
    case = Case(G, [3, 1, 2], DTYPES[pool])
    plain, state, ring = case.state.copy(), case.state.copy(), case.new_ring(DTYPES[ring_dtype])
    want = ops_of(pool).plain(*case.gates, plain, case.slots, case.offsets)
    k = np.zeros(2, np.int64)
    rows = (case.slots, case.ring_slots, case.offsets, k)
    out = run(models[f"verify {name}"], *case.gates, state, ring, *rows)[0]
    assert_same_bits(out, want, "outputs, which no ring changes")
    assert_same_pool(state, case.state, "pool of a verify")
    assert_untouched(ring, case.new_ring(DTYPES[ring_dtype]), case.ring_slots, "ring")
    table = (case.slots[None], case.ring_slots[None], u32([3, 1, 2]), k)
    run(models[f"fold {name}"], state, ring, *table)
    assert relative_error(state.values[case.owned], plain.values[case.owned]) < BOUND[ring_dtype]
    assert state != plain, "a ring that rounds must show"
    assert_untouched(state, case.state, case.slots, "pool")
