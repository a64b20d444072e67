"""Each check of the kernel tests fails on a kernel that is wrong in the way it is there to find.

Faults are planted in the PTX: a kernel is changed in one place and one of the checks must say so.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
from harness import Case, assert_same_bits, assert_same_pool, relative_error
from ptxsim import DataRace, MemoryFault, UninitialisedRead
from simulated import UNWRITTEN, Simulated
from test_kernels import GEOMETRIES, TOLERANCE, numbers, ragged

from gdn_graph import reference

GEOMETRY = GEOMETRIES["32x24"]


def change(
    kernel: str, pattern: str, replacement: str | Callable[[re.Match[str]], str], which: int = -1
) -> Simulated:
    """The kernels, with one match of the pattern (the last) replaced in one of them."""
    ops = Simulated(GEOMETRY, "f32")
    ptx = ops.ptx(kernel)
    matches = list(re.finditer(pattern, ptx))
    assert matches, f"{kernel} has no {pattern}"
    found = matches[which]
    new = replacement(found) if callable(replacement) else found.expand(replacement)
    assert new != found[0]
    ops.replace(kernel, ptx[: found.start()] + new + ptx[found.end() :])
    return ops


def verify(ops: Simulated, case: Case):
    state, ring = case.state.copy(), case.new_ring()
    out = ops.verify(*case.gates, state, ring, case.slots, case.ring_slots, case.offsets, case.k)
    return out, state, ring


@pytest.mark.parametrize("kernel", ["fwd", "verify", "fold"])
def test_a_missing_barrier_is_a_race(kernel):
    ops = change(kernel, r"bar\.sync\s+0;", "")
    case = ragged(GEOMETRY, "f32")
    with pytest.raises(DataRace):
        if kernel == "fwd":
            ops.plain(*case.gates, case.state, case.slots, case.offsets)
        else:
            _, state, ring = verify(ops, case)
            ops.fold(state, ring, case.slots[None], case.ring_slots[None], [1, 0, 0, 1, 1, 0], 1)


@pytest.mark.parametrize("kernel", ["fwd", "verify", "fold"])
def test_a_missing_wait_is_an_uninitialised_read(kernel):
    ops = Simulated(GEOMETRY, "f32")
    ops.replace(kernel, re.sub(r"cp\.async\.wait_all;", "", ops.ptx(kernel)))
    case = ragged(GEOMETRY, "f32")
    with pytest.raises(UninitialisedRead):
        if kernel == "fwd":
            ops.plain(*case.gates, case.state, case.slots, case.offsets)
        else:
            _, state, ring = verify(ops, case)
            ops.fold(state, ring, case.slots[None], case.ring_slots[None], [1, 0, 0, 1, 1, 0], 1)


def test_an_id_that_is_not_checked_is_an_access_outside():
    """Every comparison that may guard an id, in turn, becomes one that always holds."""
    case = Case(GEOMETRY, [2, 2], seed=4)
    case.slots[0] = 1_000_000
    caught = 0
    ptx = Simulated(GEOMETRY, "f32").ptx("fwd")
    for found in list(re.finditer(r"setp\.lt\.u32\s+(%p\d+), (%r\d+), (%r\d+);", ptx))[:4]:
        ops = Simulated(GEOMETRY, "f32")
        always = f"setp.eq.u32 {found[1]}, {found[2]}, {found[2]};"
        ops.replace("fwd", ptx[: found.start()] + always + ptx[found.end() :])
        try:
            ops.plain(*case.gates, case.state.copy(), case.slots, case.offsets)
        except MemoryFault:
            caught += 1
    assert caught


def test_a_store_beside_the_ring_record_shows_in_the_poison():
    """The decays go one element too far: into padding that no record has."""
    case = ragged(GEOMETRY, "f32")
    want = verify(Simulated(GEOMETRY, "f32"), case)[2]
    decay = r"(ld\.shared\.b32\s+(%r\d+), [^;]+;\s*)st\.global\.b32\s+\[(%rd\d+)\], \2;"
    ops = change("verify", decay, r"\1st.global.b32 [\3+4], \2;", which=1)
    with pytest.raises(AssertionError, match="differ"):
        assert_same_pool(verify(ops, case)[2], want, "ring")


def test_a_wrong_constant_fails_against_the_specification():
    """1 / sqrt(KD) of the query becomes 1.0009 times that."""
    case = ragged(GEOMETRY, "f32")
    scale = np.float32(1 / np.sqrt(32)).view(np.uint32)
    ops = change("fwd", f"0f{scale:08X}", f"0f{scale + 7500:08X}")
    out = ops.plain(*case.gates, case.state.copy(), case.slots, case.offsets)
    true = reference.gated_delta_recurrence_fwd(
        *case.gates, numbers(case.state, "f32"), case.slots, case.offsets
    )
    assert relative_error(out, true) > TOLERANCE


def test_one_rounding_more_in_the_verify_is_not_bit_equal():
    """An fma of the token loop becomes a rounded product and a sum."""
    case = ragged(GEOMETRY, "f32")
    plain = Simulated(GEOMETRY, "f32").plain(
        *case.gates, case.state.copy(), case.slots, case.offsets
    )

    def split(found: re.Match[str]) -> str:
        d, a, b, c = found.groups()
        return f"{{.reg .f32 %x; mul.rn.f32 %x, {a}, {b}; add.rn.f32 {d}, %x, {c};}}"

    ops = change("verify", r"fma\.rn\.f32\s+(%r\d+), (%r\d+), (%r\d+), (%r\d+);", split)
    with pytest.raises(AssertionError, match="differ"):
        assert_same_bits(verify(ops, case)[0], plain, "verify output against plain")


def test_outputs_that_are_not_written_stay_poison():
    """Without its last store the kernel leaves outputs as they were, and the comparison sees it."""
    case = ragged(GEOMETRY, "f32")
    ops = Simulated(GEOMETRY, "f32")
    ptx = ops.ptx("fwd")
    ops.replace("fwd", re.sub(r"(?m)^.*st\.global\.b32.*$", "", ptx))
    out = ops.plain(*case.gates, case.state.copy(), case.slots, case.offsets)
    assert (out == UNWRITTEN).any()
