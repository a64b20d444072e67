"""Offsets, ids and counts at random, good and bad alike.

A call does what the specification says, or is refused and changes nothing. What has to be refused
is said a second time here, in Python.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from common import TOLERANCE
from harness import (
    PADDING,
    Array,
    Case,
    Pool,
    assert_same_pool,
    normal,
    relative_error,
    u32,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from max.dtype import DType

from gdn_graph import GatedDeltaGeometry, reference

N, SLOTS, RING_ROWS, R = 9, 4, 3, 4
G = GatedDeltaGeometry(2, 4, 5, 3, ring_len=R)

WILD = st.sampled_from([2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1])


@st.composite
def ids_below(draw: st.DrawFn, rows: int, count: int) -> list[int]:
    """Ids that differ, as far as there are so many, or that need not; in one of three cases an id
    that does not exist is among them."""
    ids = draw(st.permutations(range(rows)))[:count]
    ids += [PADDING] * (count - len(ids))
    for i in range(count):
        if not draw(st.integers(0, 5)):
            ids[i] = draw(st.integers(0, rows - 1) | st.just(PADDING))
    if count and not draw(st.integers(0, 2)):
        ids[draw(st.integers(0, count - 1))] = draw(WILD | st.integers(rows, rows + 1))
    return draw(st.permutations(ids))


@st.composite
def ragged(draw: st.DrawFn) -> list[int]:
    """Offsets of 0 to 5 rows: mostly in order and inside, now and then not."""
    rows = draw(st.integers(0, 5))
    offsets = sorted(draw(st.lists(st.integers(0, N), min_size=rows + 1, max_size=rows + 1)))
    if not draw(st.integers(0, 3)):
        offsets[draw(st.integers(0, rows))] = draw(WILD | st.integers(0, N + 2))
    return offsets


def offsets_are_good(offsets: list[int]) -> bool:
    return offsets == sorted(offsets) and offsets[-1] <= N


def ids_are_good(ids: list[int], rows: int, taken: list[bool]) -> bool:
    return all(id == PADDING or id < rows for id, used in zip(ids, taken, strict=True) if used)


def with_tokens(offsets: list[int]) -> list[bool]:
    return [a != b for a, b in zip(offsets, offsets[1:], strict=False)]


def aliased(ids: list[int], taken: list[bool]) -> bool:
    used = [id for id, is_used in zip(ids, taken, strict=True) if is_used and id != PADDING]
    return len(set(used)) != len(used)


class Inputs:
    """What does not change from example to example."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.gates = (
            normal(rng, N, G.conv_dim),
            rng.uniform(0.5, 1, (N, 4)).astype(np.float32),
            rng.uniform(0, 1, (N, 4)).astype(np.float32),
        )
        self.x, self.weight = normal(rng, N, G.conv_dim), normal(rng, G.conv_dim, G.conv_width)
        self.state = Pool.of(DType.float32, normal(rng, *G.recurrent_state_shape(SLOTS)))
        self.conv_state = Pool.of(DType.float32, normal(rng, *G.conv_state_shape(SLOTS)))
        shape = (RING_ROWS, 2, R, G.record_elements + 1)
        self.ring = Pool.of(DType.float32, 0.5 * normal(rng, *shape))


INPUTS = Inputs()
examples = settings(
    max_examples=400,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


# How many calls were refused, compared with the specification, or of unspecified content.
SEEN: Counter[str] = Counter()


def many_of_each(test: Any, ops_of: Any) -> None:
    """Runs the examples, which have to hold good and bad calls in plenty."""
    SEEN.clear()
    examples(given(data=st.data())(test))(ops_of("f32"))
    print(dict(SEEN))
    assert SEEN["refused"] >= 50 and SEEN["compared"] >= 100


def check(call: Any, spec: Any, pools: list[Pool], *, good: bool, defined: bool) -> None:
    """Runs the call; refused, it has changed no pool; done, outputs and pools are the spec's."""
    SEEN["refused" if not good else "compared" if defined else "unspecified"] += 1
    before = [pool.copy() for pool in pools]
    if not good:
        with pytest.raises(ValueError, match=r"gated_delta_\w+: \w+ .*; need "):
            call()
        for pool, kept in zip(pools, before, strict=True):
            assert_same_pool(pool, kept, "pool of a refused call")
        return
    out = call()
    if not defined:  # rows that share a slot they write to
        return
    exact = [pool.exact for pool in before]
    want = spec(*exact)
    if out is not None:
        assert relative_error(out, want) < TOLERANCE
    for pool, true in zip(pools, exact, strict=True):
        assert relative_error(pool.values, true) < TOLERANCE


def plain_and_conv(ops, data):
    offsets = data.draw(ragged())
    slots = data.draw(ids_below(SLOTS, len(offsets) - 1))
    taken = with_tokens(offsets)
    ok = {
        "good": offsets_are_good(offsets) and ids_are_good(slots, SLOTS, taken),
        "defined": not aliased(slots, taken),
    }
    rows = (u32(slots), u32(offsets))
    state, window = INPUTS.state.copy(), INPUTS.conv_state.copy()
    check(
        lambda: ops.plain(*INPUTS.gates, state, *rows),
        lambda s: reference.gated_delta_recurrence_fwd(*INPUTS.gates, s, *rows),
        [state],
        **ok,
    )
    check(
        lambda: ops.conv(INPUTS.x, INPUTS.weight, window, *rows),
        lambda s: reference.gated_delta_conv1d_fwd(INPUTS.x, INPUTS.weight, s, *rows),
        [window],
        **ok,
    )


def verify(ops, data):
    offsets = data.draw(ragged())
    n = len(offsets) - 1
    slots, rings = data.draw(ids_below(SLOTS, n)), data.draw(ids_below(RING_ROWS, n))
    k = data.draw(st.integers(0, R))
    taken = with_tokens(offsets)
    good = offsets_are_good(offsets) and ids_are_good(slots, SLOTS, taken)
    if k:
        good = good and k + 1 <= R and ids_are_good(rings, RING_ROWS, taken)
    writes = [
        t and (k == 0 or b - a > R) for t, a, b in zip(taken, offsets, offsets[1:], strict=False)
    ]
    records = [t and not w and s != PADDING for t, w, s in zip(taken, writes, slots, strict=True)]
    # A slot that one row writes is read by no other.
    shared = any(
        slots[i] == slots[j] != PADDING
        for i in range(n)
        for j in range(n)
        if i != j and writes[i] and taken[j]
    )
    state, ring = INPUTS.state.copy(), INPUTS.ring.copy()
    rows = (u32(slots), u32(rings), u32(offsets))
    check(
        lambda: ops.verify(*INPUTS.gates, state, ring, *rows, k),
        lambda s, r: reference.gated_delta_recurrence_verify_ring_fwd(
            *INPUTS.gates, s, r, *rows, k
        ),
        [state, ring],
        good=good,
        defined=not shared and not (k and aliased(rings, records)),
    )


def fold(ops, data):
    layers, batch = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 4))

    def table(rows: int) -> Array:
        return u32(data.draw(ids_below(rows, layers * batch))).reshape(layers, batch)

    rows, rings = table(SLOTS), table(RING_ROWS)
    counts = data.draw(
        st.lists(st.one_of(*[st.integers(0, R + 1)] * 4, WILD), min_size=batch, max_size=batch),
        label="counts",
    )
    k = data.draw(st.integers(0, R), label="K")
    taken = [0 < a <= R for a in counts] * layers
    good = k == 0 or (
        k + 1 <= R
        and ids_are_good(rows.ravel().tolist(), SLOTS, taken)
        and ids_are_good(rings.ravel().tolist(), RING_ROWS, taken)
    )
    folds = [t and r != PADDING for t, r in zip(taken, rings.ravel(), strict=True)]
    state, ring = INPUTS.state.copy(), INPUTS.ring.copy()
    tables = (rows, rings, u32(counts))
    check(
        lambda: ops.fold(state, ring, *tables, k),
        lambda s, r: reference.gated_delta_state_fold(s, r, *tables, k),
        [state, ring],
        good=good,
        defined=k == 0 or not aliased(rows.ravel().tolist(), folds),
    )


def test_plain_and_conv(ops_of):
    many_of_each(plain_and_conv, ops_of)


def test_verify(ops_of):
    many_of_each(verify, ops_of)


def test_fold(ops_of):
    many_of_each(fold, ops_of)


def test_the_examples_are_good_and_bad(ops_of):
    """The control: a call that the predicates take for the other kind fails the check."""
    case = Case(G, [2], slots=[0])
    state = INPUTS.state.copy()

    def call(slot: int) -> Any:
        return lambda: ops_of("f32").plain(*case.gates, state, [slot], [0, 2])

    with pytest.raises(pytest.fail.Exception):
        check(call(0), None, [state], good=False, defined=True)
    with pytest.raises(ValueError, match="slot_idx"):
        check(call(SLOTS), None, [state], good=True, defined=True)
