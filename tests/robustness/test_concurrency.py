"""Sessions and threads at once, over disjoint slots of one pool, give the bits of serial runs."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from harness import DTYPES, GEOMETRIES, Case, Ops, Pool, assert_same_bits, assert_same_pool, normal
from max.driver import CPU
from max.engine import InferenceSession

WORKERS = 4


class Shared:
    """One set of pools; each worker owns two slots and two ring rows of them."""

    def __init__(self, geometry: str, dtype: str) -> None:
        self.g, self.dtype = GEOMETRIES[geometry], DTYPES[dtype]
        g, rng = self.g, np.random.default_rng(11)
        slots = 2 * WORKERS
        # Enough calls for the threads to meet; the larger geometry takes longer for one.
        self.rounds = 25 if g.num_value_heads < 10 else 4
        self.weight = normal(rng, g.conv_dim, g.conv_width)
        self.state = Pool.of(self.dtype, normal(rng, *g.recurrent_state_shape(slots)))
        self.conv_state = Pool.of(self.dtype, normal(rng, *g.conv_state_shape(slots)))
        self.ring = Case(g, [1], ring_slots=[slots - 2]).new_ring()

    def work(self, ops: Ops, worker: int) -> list[np.ndarray]:
        """Rounds of verify, commit and plain decode on the worker's own slots."""
        slots = [2 * worker + 1, 2 * worker]
        outputs = []
        for i in range(self.rounds):
            case = Case(self.g, [4, 3], self.dtype, seed=100 * worker + i, slots=slots)
            counts = [1 + i % 4, i % 3]
            kept = case.x[case.index(counts)]
            _, offsets = case.take(counts)
            ids = (np.array([slots]), np.array([slots]))
            outputs.append(
                ops.verify(*case.gates, self.state, self.ring, slots, slots, case.offsets, 3)
            )
            outputs += ops.conv_verify(
                case.x, self.weight, self.conv_state, slots, case.offsets, kept, offsets, 3
            )
            ops.fold(self.state, self.ring, *ids, counts, 3)
            token = Case(self.g, [1, 1], self.dtype, seed=100 * worker + i, slots=slots)
            outputs.append(ops.plain(*token.gates, self.state, slots, token.offsets))
            outputs.append(ops.conv(token.x, self.weight, self.conv_state, slots, token.offsets))
        return outputs


@pytest.fixture(scope="module")
def second_session() -> InferenceSession:
    return InferenceSession(devices=[CPU()])


@pytest.mark.parametrize("geometry", ["2x3x32x24", "16x3x128x128"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_threads_and_sessions_over_disjoint_slots(ops_of, second_session, geometry, dtype):
    first = ops_of(dtype)
    second = Ops(second_session, DTYPES[dtype])
    serial = Shared(geometry, dtype)
    want = [serial.work(first, worker) for worker in range(WORKERS)]
    Shared(geometry, dtype).work(second, 0)  # its models are compiled before the threads start

    together = Shared(geometry, dtype)
    start = threading.Barrier(WORKERS)

    def work(worker: int) -> list[np.ndarray]:
        start.wait()
        return together.work((first, second)[worker % 2], worker)

    with ThreadPoolExecutor(WORKERS) as threads:
        got = list(threads.map(work, range(WORKERS)))
    for worker in range(WORKERS):
        for i, (a, b) in enumerate(zip(got[worker], want[worker], strict=True)):
            assert_same_bits(a, b, f"output {i} of worker {worker}")
    for what in ("state", "conv_state", "ring"):
        assert_same_pool(getattr(together, what), getattr(serial, what), what)
    assert together.state != Shared(geometry, dtype).state


def test_a_call_that_is_refused_does_not_disturb_another_thread(ops_of):
    """Errors in one thread, good calls in the next."""
    ops = ops_of("f32")
    serial, together = Shared("2x3x32x24", "f32"), Shared("2x3x32x24", "f32")
    want = serial.work(ops, 0)
    done = threading.Event()

    def misuse() -> int:
        refused = 0
        bad = Case(together.g, [2], seed=1, slots=[2])
        while not done.is_set():
            with pytest.raises(ValueError, match="slot_idx names row"):
                ops.plain(*bad.gates, together.state, [10_000], bad.offsets)
            refused += 1
        return refused

    with ThreadPoolExecutor(1) as other:
        refusals = other.submit(misuse)
        try:
            got = together.work(ops, 0)
        finally:
            done.set()
    assert refusals.result() > 0
    for a, b in zip(got, want, strict=True):
        assert_same_bits(a, b, "outputs beside refused calls")
    assert_same_pool(together.state, serial.state, "pool")
