"""Memory over many steps (C64), and the same round again and again: the short form of soak.py."""

from __future__ import annotations

import mmap

import pytest
import soak

has_rollup = pytest.mark.skipif(not soak.ROLLUP.exists(), reason=f"reads {soak.ROLLUP}")


@has_rollup
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_c64_memory_is_flat_and_rounds_are_equal(ops_of, dtype):
    result = soak.soak(ops_of(dtype), 1500, "2x3x32x24", dtype)
    print(f"{result.steps} steps: memory grew {result.growth:.2%}")
    assert result.steps >= 1500
    assert result.rounds_equal
    assert result.growth <= 0.01


@has_rollup
@pytest.mark.slow
def test_c64_20000_steps(ops_of):
    result = soak.soak(ops_of("f32"), 20_000, "2x3x32x24", "f32")
    print(f"{result.steps} steps: memory grew {result.growth:.2%}")
    assert result.rounds_equal
    assert result.growth <= 0.01


@has_rollup
def test_a_leak_and_a_differing_round_show():
    """The control: what the two figures are made of notices a leak of a hundredth, and one bit."""
    leaking = [mb * 2**20 for mb in (400, 400, 401, 402, 405)]
    assert soak.Result(resident=leaking).growth > 0.01
    assert soak.Result(resident=leaking[:3]).growth <= 0.01
    assert not soak.Result(digests=["a", "a", "b"]).rounds_equal
    # Pages of its own: the heap may hold as many that earlier tests gave back.
    size = 2**26
    before = soak.resident_bytes()
    with mmap.mmap(-1, size) as kept:
        kept[:: mmap.PAGESIZE] = bytes(size // mmap.PAGESIZE)
        assert soak.resident_bytes() - before > size // 2
