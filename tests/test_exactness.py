"""What is promised to the bit: verify = plain per token, verify + fold = plain over the prefix."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from harness import (
    DTYPES,
    GEOMETRIES,
    Case,
    Pool,
    assert_same_bits,
    assert_same_pool,
    normal,
    offsets_of,
)
from max.dtype import DType

from gdn_graph import GatedDeltaGeometry

geometries = pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
pools = pytest.mark.parametrize("dtype", ["f32", "bf16"])


@geometries
@pytest.mark.parametrize("dtype", DTYPES)
def test_verify_equals_plain_and_leaves_the_pool(ops_of, geometry, dtype):
    ops = ops_of(dtype)
    case = Case(geometry, [3, 1, 0, 5, 2], DTYPES[dtype])
    plain_state = case.state.copy()
    plain = ops.plain(*case.gates, plain_state, case.slots, case.offsets)
    state, ring = case.state.copy(), case.new_ring()
    out = ops.verify(*case.gates, state, ring, case.slots, case.ring_slots, case.offsets, case.k)
    assert_same_bits(out, plain, "verify output against plain")
    assert_same_pool(state, case.state, "pool after verify")
    assert plain_state != case.state, "the plain op must change its pool, or this shows nothing"


@geometries
@pools
def test_verify_and_fold_equal_plain_over_every_prefix(ops_of, geometry, dtype):
    ops = ops_of(dtype)
    lengths = [5, 1, 9, 3]
    case = Case(geometry, lengths, DTYPES[dtype], seed=1)
    ring = case.new_ring()
    ops.verify(
        *case.gates, case.state.copy(), ring, case.slots, case.ring_slots, case.offsets, case.k
    )
    previous = None
    for accepted in range(max(lengths) + 1):
        counts = [min(accepted, t) for t in lengths]
        folded = case.state.copy()
        ops.fold(folded, ring, case.slots[None], case.ring_slots[None], counts, case.k)
        gates, offsets = case.take(counts)
        plain_state = case.state.copy()
        ops.plain(*gates, plain_state, case.slots, offsets)
        assert_same_pool(folded, plain_state, f"fold of {accepted} against plain")
        assert folded != previous, "one record more must change the pool"
        previous = folded


@geometries
def test_a_split_window_gives_the_same_bits(ops_of, geometry):
    """Float32 pools: 9 tokens at once, as 4 + 5, and one by one."""
    ops = ops_of("f32")
    case = Case(geometry, [9, 9], seed=2)

    def run(steps):
        state, conv_state = case.state.copy(), case.conv_state.copy()
        out = np.zeros((18, geometry.value_dim), np.float32)
        conv = np.zeros((18, geometry.conv_dim), np.float32)
        done = 0
        for step in steps:
            index = np.concatenate([np.arange(done, done + step) + 9 * b for b in range(2)])
            offsets = offsets_of([step, step])
            out[index] = ops.plain(
                case.qkv[index], case.decay[index], case.beta[index], state, case.slots, offsets
            )
            conv[index] = ops.conv(case.x[index], case.weight, conv_state, case.slots, offsets)
            done += step
        return out, conv, state, conv_state

    whole = run([9])
    for steps in ([4, 5], [1] * 9):
        for got, want, what in zip(
            run(steps), whole, ("output", "conv output", "state", "window"), strict=True
        ):
            compare = assert_same_pool if isinstance(got, Pool) else assert_same_bits
            compare(got, want, f"{what} of {steps}")


@geometries
@pools
def test_windows_of_1_to_16_and_other_rows_do_not_change_a_row(ops_of, geometry, dtype):
    ops = ops_of(dtype)
    case = Case(geometry, [16, 2, 7], DTYPES[dtype], seed=3)
    state = case.state.copy()
    batch = ops.plain(*case.gates, state, case.slots, case.offsets)
    for width in range(1, 17):
        gates = tuple(x[:width] for x in case.gates)
        alone_state, ring = case.state.copy(), case.new_ring()
        alone = ops.verify(
            *gates, alone_state, ring, case.slots[:1], case.ring_slots[:1], [0, width], 15
        )
        assert_same_bits(alone, batch[:width], f"row 0 alone with a window of {width}")
    # The row's tokens in another row of another batch, at another place in memory.
    order = [2, 0, 1]
    index = np.concatenate(
        [case.index([16, 2, 7])[case.offsets[b] : case.offsets[b + 1]] for b in order]
    )
    moved = ops.plain(
        *(x[index] for x in case.gates),
        case.state.copy(),
        case.slots[order],
        offsets_of([case.lengths[b] for b in order]),
    )
    assert_same_bits(moved, batch[index], "permuted batch")


def test_subnormal_states_do_not_depend_on_the_batch(ops_of):
    """A small batch runs on the thread that calls, a large one on workers that flush to zero."""
    ops = ops_of("f32")
    geometry = GatedDeltaGeometry(2, 4, 64, 64, ring_len=4)
    case = Case(geometry, [1] * 64, seed=7)
    case.qkv[:] = 0  # so that a state only decays
    case.state.put(case.owned, np.full(geometry.recurrent_state_shape(64), 1e-40))
    alone, batch = case.state.copy(), case.state.copy()
    ops.plain(*case.gates, batch, case.slots, case.offsets)
    ops.plain(*(x[:1] for x in case.gates), alone, case.slots[:1], [0, 1])
    slot = case.slots[0]
    assert_same_bits(alone.bits[slot], batch.bits[slot], "a state alone against in a batch")


def test_a_changed_input_changes_the_bits(ops_of):
    """The control of this module: equality to the bit notices the last bit of one input."""
    ops = ops_of("f32")
    case = Case(GEOMETRIES["2x3x32x24"], [3, 2])
    want = ops.plain(*case.gates, case.state.copy(), case.slots, case.offsets)
    case.decay[1, 2] = np.nextafter(case.decay[1, 2], np.float32(0))
    got = ops.plain(*case.gates, case.state.copy(), case.slots, case.offsets)
    with pytest.raises(AssertionError, match="ulps"):
        assert_same_bits(got, want, "output")


@pytest.mark.parametrize("width", range(2, 9))
@pytest.mark.parametrize("dtype", DTYPES)
def test_conv_commit_equals_plain_conv_over_the_prefix(ops_of, width, dtype):
    """Forward launch, then rollback over the accepted rows, for conv widths 2 to 8."""
    ops = ops_of(dtype)
    geometry = GatedDeltaGeometry(1, 3, 8, 5, conv_width=width)
    lengths, accepted = [4, 1, 3, 4], [2, 1, 0, 4]
    case = Case(geometry, lengths, DTYPES[dtype], seed=width)
    plain_state = case.conv_state.copy()
    plain = ops.conv(case.x, case.weight, plain_state, case.slots, case.offsets, write_state=False)
    assert_same_pool(plain_state, case.conv_state, "window of a conv that only reads it")
    state = case.conv_state.copy()
    kept = case.x[case.index(accepted)]
    forward, rollback = ops.conv_verify(
        case.x, case.weight, state, case.slots, case.offsets, kept, offsets_of(accepted), 3
    )
    prefix = ops.conv(kept, case.weight, plain_state, case.slots, offsets_of(accepted))
    assert_same_bits(forward, plain, "forward launch")
    assert_same_bits(rollback, prefix, "rollback launch")
    assert_same_pool(state, plain_state, "window after the commit")
    assert state != case.conv_state


def test_conv_verify_without_drafts_is_the_plain_conv(ops_of):
    ops = ops_of("f32")
    case = Case(GEOMETRIES["2x3x32x24"], [1, 1, 1])
    plain_state, state = case.conv_state.copy(), case.conv_state.copy()
    plain = ops.conv(case.x, case.weight, plain_state, case.slots, case.offsets)
    forward, rollback = ops.conv_verify(
        case.x, case.weight, state, case.slots, case.offsets, case.x, case.offsets, 0
    )
    assert_same_bits(forward, plain, "forward launch at K = 0")
    assert_same_pool(state, plain_state, "window at K = 0")
    assert not rollback.any(), "the rollback at K = 0 writes zeros"


@geometries
@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_has_the_same_bits_in_every_conv_and_place(ops_of, geometry, dtype):
    """Plain, verify and ring; whole vectors and tails; rows short and long."""
    ops = ops_of(dtype)
    case = Case(geometry, [4, 0, 1, 11, 3], DTYPES[dtype], seed=5, tail=2)
    raw_state, state = case.conv_state.copy(), case.conv_state.copy()
    raw = ops.conv(case.x, case.weight, raw_state, case.slots, case.offsets)
    out = ops.conv_silu(case.x, case.weight, state, case.slots, case.offsets)
    assert_same_pool(state, raw_state, "window of an activated conv")
    assert not out[-2:].any(), "tokens of no row"
    ring = Pool.poison(DTYPES[dtype], (len(case.lengths) + 1, 16, geometry.conv_dim))
    raw_ring = ring.copy()
    verify = case.x, case.weight, case.conv_state.copy()
    rows = case.slots, case.ring_slots, case.offsets, 3
    for got, what in zip(
        ops.conv_verify_silu(*verify, ring, *rows), ("rollback", "ring"), strict=True
    ):
        assert_same_bits(got, out, f"verify by {what} against plain")
    ops.conv_verify_ring(*verify, raw_ring, *rows)
    assert_same_pool(ring, raw_ring, "inputs recorded by an activated conv")

    # The same values one by one, through the conv that is the identity on a channel of its own.
    flat = raw.reshape(-1, 1)
    alone = ops.conv_silu(
        flat, np.float32([[0, 1]]), Pool.of(ops.dtype, [[[0]]]), [0], [0, len(flat)]
    )
    assert_same_bits(alone.reshape(out.shape), out, "elements alone")
    assert (out[raw != 0] != raw[raw != 0]).all(), "silu changes every value but zero"


@pytest.mark.parametrize("heads", [1, 3, 16, 37, 48])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_do_not_depend_on_their_place(ops_of, heads, dtype):
    """Each head alone, the tokens in another order, and so many that the work is cut."""
    ops = ops_of(dtype)
    rng = np.random.default_rng(heads)
    a, b = (Pool.of(DTYPES[dtype], 4 * normal(rng, 900, heads)) for _ in range(2))
    A_log, dt_bias = normal(rng, heads), normal(rng, heads)
    want = ops.gates(a, b, A_log, dt_bias)
    order = rng.permutation(900)[:100]
    some = ops.gates(*(Pool(x.dtype, x.bits[order]) for x in (a, b)), A_log, dt_bias)
    for h in (0, heads // 2, heads - 1):
        one = [Pool(x.dtype, np.ascontiguousarray(x.bits[:, h : h + 1])) for x in (a, b)]
        alone = ops.gates(*one, A_log[h : h + 1], dt_bias[h : h + 1])
        for got, whole, part in zip(alone, want, some, strict=True):
            assert_same_bits(got[:, 0], whole[:, h], f"head {h} alone")
            assert_same_bits(part, whole[order], "tokens in another order")
    moved = ops.gates(a, b, A_log, np.nextafter(dt_bias, np.float32(9)) + np.float32(1e-5))
    assert (moved[0] != want[0]).mean() > 0.5, "the control: a bias that is a little off"
    assert_same_bits(moved[1], want[1], "beta does not depend on dt_bias")


_AFFINITY_PROGRAM = """
import hashlib, os, sys
os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[: int(sys.argv[1])]))
sys.path.insert(0, sys.argv[2])
from test_exactness import digest_of_a_step
print(digest_of_a_step())
"""


def digest_of_a_step() -> str:
    """Every bit that a verify and a fold leave, of a batch large enough for many chunks."""
    from harness import Ops
    from max.driver import CPU
    from max.engine import InferenceSession

    ops = Ops(InferenceSession(devices=[CPU()]), DType.float32)
    case = Case(GEOMETRIES["16x3x128x128"], [4, 3, 17, 1, 2], seed=4)
    state, ring = case.state.copy(), case.new_ring()
    digest = hashlib.sha256()
    digest.update(
        ops.verify(*case.gates, state, ring, case.slots, case.ring_slots, case.offsets, 3).tobytes()
    )
    accepted = [2, 3, 17, 1, 1]
    ops.fold(state, ring, case.slots[None], case.ring_slots[None], accepted, 3)
    # Chunked over channels and segments, and large enough to be stored past the caches.
    x = normal(case.rng, 600, 4096)
    conv_state = Pool.of(DType.float32, normal(case.rng, 2, 4096, 3))
    conv = ops.conv(x, normal(case.rng, 4096, 4), conv_state, [1, 0], [0, 599, 600])
    for bits in (state.bits, ring.bits, conv, conv_state.bits):
        digest.update(bits.tobytes())
    return digest.hexdigest()


@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="needs two CPUs and a way to run on one of them",
)
def test_the_thread_count_does_not_change_the_bits():
    here = str(Path(__file__).parent)
    digests = [
        subprocess.run(
            [sys.executable, "-c", _AFFINITY_PROGRAM, str(cpus), here],
            check=True,
            capture_output=True,
            text=True,
            timeout=1200,  # may compile, and does so on one CPU
        ).stdout.split()[-1]
        for cpus in (1, 2)
    ]
    assert digests[0] == digests[1]
    assert len(digests[0]) == 64
