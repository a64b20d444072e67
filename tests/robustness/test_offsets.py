"""Offsets past 2**31 and 2**32 elements, in sparse memory: only the pages that are touched exist.

Each case is run in a small pool too, and has to give the same bits. Where an offset would land if
it were cut to 32 or 31 bits, nothing may have been written.
"""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest
from harness import DTYPES, Array, Case, Pool, assert_same_bits, assert_same_pool, normal
from max.dtype import DType
from soak import ROLLUP, resident_bytes

from gdn_graph import GatedDeltaGeometry

pytestmark = pytest.mark.skipif(not ROLLUP.exists(), reason=f"needs sparse memory and {ROLLUP}")

G = GatedDeltaGeometry(1, 1, 8, 5)
MAP_NORESERVE = 0x4000  # mmap has no name for it


def sparse(shape: tuple[int, ...], dtype: type) -> Array:
    """Zeros that take no memory until they are written."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return np.frombuffer(mmap.mmap(-1, size, flags), dtype).reshape(shape)


def available_bytes() -> int:
    """What the machine has free, or all that a container may have if that is less."""
    with open("/proc/meminfo") as meminfo:
        line = next(line for line in meminfo if line.startswith("MemAvailable"))
    free = int(line.split()[1]) * 1024
    group = Path("/sys/fs/cgroup")
    if not (group / "memory.max").is_file():
        return free
    most, used = ((group / f"memory.{name}").read_text().strip() for name in ("max", "current"))
    return free if most == "max" else min(free, int(most) - int(used))


class Sparse:
    """A pool with rows past 2**32 elements, and a small one that holds the same rows."""

    def __init__(self, dtype: DType, row_shape: tuple[int, ...]) -> None:
        row = int(np.prod(row_shape))
        rows = 2**32 // row + 3
        self.pool = Pool(
            dtype, sparse((rows, *row_shape), np.uint32 if dtype == DType.float32 else np.uint16)
        )
        # The first row that starts past 2**31 elements, past 2**32, and the last.
        self.far = [2**31 // row + 1, 2**32 // row + 1, rows - 1]
        self.near = [7, 3, 5]
        self.small = Pool.of(dtype, np.zeros((9, *row_shape), np.float32))

    def put(self, values: Array) -> None:
        bits = Pool.of(self.pool.dtype, values).bits
        self.pool.bits[self.far] = bits
        self.small.bits[self.near] = bits

    def assert_equal(self, what: str) -> None:
        for far, near in zip(self.far, self.near, strict=True):
            assert_same_bits(self.pool.bits[far], self.small.bits[near], f"{what}, row {far}")
        flat = self.pool.bits.reshape(-1)
        row = self.small.bits[0].size
        for far in self.far:
            for wrapped in (far * row % 2**32, far * row % 2**31):
                if wrapped < far * row:
                    assert not flat[wrapped : wrapped + row].any(), f"{what}: written at {wrapped}"


lengths = [3, 1, 4]


def case_of(dtype: DType) -> Case:
    return Case(G, lengths, dtype, slots=[0, 1, 2], ring_slots=[0, 1, 2], k=3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_c54_c55_states_windows_and_records_past_2_32(ops_of, dtype):
    """Plain, verify and fold on a far state pool and a far ring, the conv on far windows."""
    ops = ops_of(dtype)
    assert ops.models  # compiled before memory is looked at: that alone may take more
    case = case_of(DTYPES[dtype])
    before = resident_bytes()
    state = Sparse(DTYPES[dtype], (1, 8, 5))
    ring = Sparse(DType.float32, (1, 4, G.record_elements))
    windows = Sparse(DTYPES[dtype], (G.conv_dim, 3))
    state.put(normal(case.rng, 3, 1, 8, 5))
    windows.put(normal(case.rng, 3, G.conv_dim, 3))

    def both(run):
        far = run(state.pool, ring.pool, windows.pool, state.far, ring.far, windows.far)
        near = run(state.small, ring.small, windows.small, state.near, ring.near, windows.near)
        assert_same_bits(far, near, "outputs")
        for what, pool in (("state", state), ("ring", ring), ("windows", windows)):
            pool.assert_equal(what)

    both(lambda s, r, w, i, j, k: ops.verify(*case.gates, s, r, i, j, case.offsets, 3))
    assert ring.small.bits[ring.near].any()

    def fold(s, r, w, i, j, k):
        ops.fold(s, r, np.array(i)[None], np.array(j)[None], [2, 1, 4], 3)
        return np.zeros(0)

    both(fold)
    both(lambda s, r, w, i, j, k: ops.plain(*case.gates, s, i, case.offsets))
    both(lambda s, r, w, i, j, k: ops.conv(case.x, case.weight, w, k, case.offsets))
    assert resident_bytes() - before < 2**29, "the far pools must stay sparse"


def test_c54_ids_at_the_edge_of_a_far_pool(ops_of):
    """One row past the end is refused, whatever its offset would wrap to."""
    ops = ops_of("bf16")
    case = case_of(DType.bfloat16)
    state = Sparse(DType.bfloat16, (1, 8, 5))
    rows = len(state.pool.bits)
    for slot in (rows, rows + 1, 2**32 - 2):
        with pytest.raises(ValueError, match=f"names row {slot} .* id below {rows}"):
            ops.plain(*case.gates, state.pool, [0, 1, slot], case.offsets)
    assert not state.pool.bits[state.far].any() and not state.pool.bits[:3].any()


@pytest.mark.parametrize("edge", [2**31, 2**32])
def test_c54_tokens_past_2_32_elements_of_the_input(ops_of, edge):
    """Wide keys and one narrow value: an input that is huge, with outputs that are not."""
    ops = ops_of("f32")
    g = GatedDeltaGeometry(1, 1, 1024, 1)
    tokens = edge // g.conv_dim + 4
    qkv = sparse((tokens, g.conv_dim), np.float32)
    gates = np.zeros((2, tokens, 1), np.float32)
    small = Case(g, [3, 4], slots=[1, 0], ring_slots=[0, 1])
    at = tokens - 7
    qkv[at:], gates[0, at:], gates[1, at:] = small.qkv, small.decay, small.beta
    offsets = [at, at + 3, at + 7]
    assert at * g.conv_dim < edge < (at + 4) * g.conv_dim
    args = (small.slots, small.ring_slots)
    state, ring, want_ring = small.state.copy(), small.new_ring(), small.new_ring()
    out = ops.verify(qkv, *gates, state, ring, *args, offsets, 3)
    want = ops.verify(*small.gates, small.state.copy(), want_ring, *args, small.offsets, 3)
    assert_same_bits(out[at:], want, "outputs")
    assert not out[:at].any()
    assert_same_pool(ring, want_ring, "records")
    plain, want_plain = small.state.copy(), small.state.copy()
    ops.plain(qkv, *gates, plain, small.slots, offsets)
    ops.plain(*small.gates, want_plain, small.slots, small.offsets)
    assert_same_pool(plain, want_plain, "states")


@pytest.mark.slow
def test_c54_tokens_past_2_31_elements_of_the_conv(ops_of):
    """The one case whose output is as large as its input: 8.6 GB of real memory."""
    if available_bytes() < 12 * 2**30:
        pytest.skip("needs 12 GB of free memory")
    channels = 4096
    tokens = 2**31 // channels + 4
    at = tokens - 7
    rng = np.random.default_rng(0)
    x, weight = normal(rng, 7, channels), normal(rng, channels, 4)
    window = Pool.of(DType.float32, normal(rng, 2, channels, 3))
    want_window = window.copy()
    far = sparse((tokens, channels), np.float32)
    far[at:] = x
    offsets = np.array([at, at + 3, at + 7], np.uint32)
    slots = np.array([1, 0], np.uint32)
    ops = ops_of("f32")
    # Not through Ops.conv, which copies its output.
    out = ops.models["conv"].execute(far, weight, window.buffer, slots, offsets)[0].to_numpy()
    want = ops.conv(x, weight, want_window, slots, [0, 3, 7])
    assert_same_bits(out[at:], want, "outputs")
    assert not out[:16].any() and not out[at - 16 : at].any()
    assert_same_pool(window, want_window, "windows")
