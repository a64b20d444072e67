"""Runs one round of speculated decoding over and over: memory has to stay flat, rounds equal.

    python tests/robustness/soak.py --steps 20000

A step is a verify of a ragged window, a conv forward and rollback, a fold, and a plain token. Each
round starts from the same pools and has to leave the same bits.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from harness import DTYPES, GEOMETRIES, Case, Ops, offsets_of
from max.driver import CPU
from max.engine import InferenceSession

STEPS_PER_ROUND = 100
# Rounds before memory is looked at: allocators and thread pools fill up first.
WARM_UP = 2


@dataclass
class Result:
    steps: int = 0
    seconds: float = 0.0
    digests: list[str] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)

    @property
    def growth(self) -> float:
        """By how much the largest resident memory exceeds that after the warm-up."""
        warm = self.resident[WARM_UP - 1 :]
        return max(warm) / warm[0] - 1

    @property
    def rounds_equal(self) -> bool:
        return len(set(self.digests)) == 1


# Counted page by page; the counters of statm may lag behind where there are many CPUs.
ROLLUP = Path("/proc/self/smaps_rollup")


def resident_bytes() -> int:
    line = next(line for line in ROLLUP.read_text().splitlines() if line.startswith("Rss:"))
    return int(line.split()[1]) * 1024


def one_round(ops: Ops, geometry: str, dtype: str) -> str:
    """STEPS_PER_ROUND steps from fresh pools; the digest of every output and of the pools."""
    g, rng = GEOMETRIES[geometry], np.random.default_rng(0)
    case = Case(g, [4, 2, 3, 1], DTYPES[dtype])
    token = Case(g, [1, 1, 1, 1], DTYPES[dtype], slots=case.slots)
    state, conv_state, ring = case.state, case.conv_state, case.new_ring()
    rows, rings = case.slots[None], case.ring_slots[None]
    digest = hashlib.sha256()
    for _ in range(STEPS_PER_ROUND):
        counts = [int(rng.integers(0, n + 1)) for n in case.lengths]
        kept, offsets = case.x[case.index(counts)], offsets_of(counts)
        outputs = [
            ops.verify(*case.gates, state, ring, case.slots, case.ring_slots, case.offsets, case.k),
            *ops.conv_verify(
                case.x, case.weight, conv_state, case.slots, case.offsets, kept, offsets, case.k
            ),
        ]
        ops.fold(state, ring, rows, rings, counts, case.k)
        outputs.append(ops.plain(*token.gates, state, case.slots, token.offsets))
        for out in outputs:
            digest.update(out)
    for pool in (state, conv_state, ring):
        digest.update(pool.bits)
    return digest.hexdigest()


def soak(ops: Ops, steps: int, geometry: str, dtype: str) -> Result:
    """Whole rounds, at least three, until so many steps have been made."""
    result = Result()
    start = time.perf_counter()
    while result.steps < steps or len(result.digests) < WARM_UP + 1:
        result.digests.append(one_round(ops, geometry, dtype))
        result.steps += STEPS_PER_ROUND
        gc.collect()
        result.resident.append(resident_bytes())
    result.seconds = time.perf_counter() - start
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--geometry", choices=GEOMETRIES, default="2x3x32x24")
    parser.add_argument("--dtype", choices=DTYPES, default="f32")
    args = parser.parse_args()
    ops = Ops(InferenceSession(devices=[CPU()]), DTYPES[args.dtype])
    result = soak(ops, args.steps, args.geometry, args.dtype)
    print(
        f"{result.steps:,} steps in {len(result.digests)} rounds, {result.seconds:.0f} s; "
        f"resident {result.resident[WARM_UP - 1] / 2**20:.1f} MB after the warm-up, "
        f"{result.resident[-1] / 2**20:.1f} MB at the end, growth {result.growth:.2%}; "
        f"rounds {'equal' if result.rounds_equal else 'DIFFER'}"
    )
    if not result.rounds_equal or result.growth > 0.01:
        sys.exit(1)


if __name__ == "__main__":
    main()
