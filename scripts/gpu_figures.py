"""What the GPU kernels cost, on a machine without a GPU, beside MAX's own.

    python scripts/gpu_figures.py            prints the table
    python scripts/gpu_figures.py --check    and fails if a figure is worse than its limit
    python scripts/gpu_figures.py --write    and puts the table into docs/gpu.md

The kernels are compiled to PTX, run in the PTX simulator (tests/ptxsim) and assembled by ptxas (of
the PyPI package nvidia-cuda-nvcc). Counts are of PTX at KD = VD = 128, one key head, two value
heads, batch 1, ring length 4, record stride 416, per value head. Nothing here is a time.

MAX's figures are of the kernels in max 26.7, in the same simulator at the same sizes; they were
measured once and stand here as constants, since those kernels may change with any release.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "gpu"), str(ROOT / "tests" / "ptxsim")]

from emit_ptx import Build  # noqa: E402
from harness import DTYPES, Case  # noqa: E402
from ptxsim import Stats, ptxas_report  # noqa: E402
from simulated import Simulated  # noqa: E402

from gdn_graph import GatedDeltaGeometry  # noqa: E402

PAGE = ROOT / "docs" / "gpu.md"
BEGIN, END = "<!-- figures: scripts/gpu_figures.py --write -->", "<!-- end of figures -->"
ARCHES = ("sm_80", "sm_90a", "sm_100a")
GEOMETRY = GatedDeltaGeometry(1, 2, 128, 128, ring_len=4)
HEADS = GEOMETRY.num_value_heads
STRIDE_PADDING = 30  # 386 elements used of 416
STATE_SECTORS = {"f32": 2048, "bf16": 1024}  # of 32 bytes, of one head, read once
RECORD_SECTORS = 4 * 128 * 4 / 32 * 1.5 + 0.5  # four records: factors, half a shared key, a decay


@dataclass(frozen=True)
class Figure:
    """One figure: ours, MAX's (None: not measured) and the most (or least) it may be."""

    name: str
    ours: float
    limit: float
    theirs: float | None = None
    digits: int = 0
    at_least: bool = False

    @property
    def met(self) -> bool:
        return self.ours >= self.limit if self.at_least else self.ours <= self.limit

    def row(self) -> str:
        def show(value: float | None) -> str:
            return "–" if value is None else f"{value:,.{self.digits}f}"

        ratio = "–" if self.theirs is None else f"{self.ours / self.theirs - 1:+.0%}"
        limit = f"{'≥' if self.at_least else '≤'} {show(self.limit)}"
        cells = [self.name, show(self.ours), show(self.theirs), ratio, limit]
        return f"| {' | '.join(cells)} |"


def run(name: str, tokens: int, dtype: str, wide: bool = False, algorithm: str = "exact") -> Stats:
    """The counters of one launch over one row of so many tokens (for the fold: records)."""
    ops = Simulated(GEOMETRY, dtype, algorithm, wide)
    case = Case(GEOMETRY, [tokens], DTYPES[dtype], stride_padding=STRIDE_PADDING)
    state, ring = case.state, case.new_ring()
    if name == "fwd":
        ops.plain(*case.gates, state, case.slots, case.offsets)
    else:
        ops.verify(*case.gates, state, ring, case.slots, case.ring_slots, case.offsets, 3)
    if name == "fold":
        ops.fold(state, ring, case.slots[None], case.ring_slots[None], [tokens], 3)
    assert ops.stats is not None
    return ops.stats


def per_token(stats: Stats, tokens: int) -> float:
    return stats.total_warp_instructions / HEADS / tokens


def longest_chain(ptx: str) -> int:
    """Dependent float additions, multiplications and fmas on the longest path through one pass of
    the token loop: the loop with the most fmas. Selects and shuffles count nothing, and pass on."""
    lines = [line.strip() for line in ptx.splitlines()]
    labels = {line[:-1]: i for i, line in enumerate(lines) if line.endswith(":")}
    loops = []
    for i, line in enumerate(lines):
        if (jump := re.search(r"\bbra(?:\.uni)?\s+(\$\w+);", line)) and labels[jump[1]] < i:
            body = lines[labels[jump[1]] : i]
            loops.append((sum("fma.rn.f32" in x for x in body), -len(body), body))
    depth: dict[str, int] = {}
    for line in max(loops)[2]:
        line = re.sub(r"^@!?%p\d+\s+", "", line)
        found = re.match(r"([\w.:]+)\s+(\{[^}]*\}|%\w+)", line)
        if not found or line.startswith(("st.", "bra", "bar", "cp.")):
            continue
        op, results = found[1], re.findall(r"%\w+", found[2])
        operands = re.findall(r"%\w+", line[found.end() :])
        weight = int(bool(re.match(r"(fma|mul|add|sub)\..*f32", op)))
        if op.startswith("ld."):  # a value from memory depends on no arithmetic of this pass
            operands = []
        value = max((depth.get(x, 0) for x in operands), default=0) + weight
        depth.update(dict.fromkeys(results, value))
    return max(depth.values())


def instruction_figures() -> list[Figure]:
    found = []
    rows: list[tuple[str, str, int, bool, str, tuple[float, float], tuple[float, float] | None]] = [
        ("verify T=4, 4 blocks a head", "verify", 4, False, "exact", (3350, 3480), (3720, 3849)),
        ("verify T=4, 1 block a head", "verify", 4, True, "exact", (3150, 3280), (3720, 3849)),
        ("plain T=1", "fwd", 1, False, "exact", (4200, 5000), (4992, 6020)),
        ("fold of 4, a record", "fold", 4, False, "exact", (1410, 1590), (2061, 2318)),
        ("fold of 1", "fold", 1, False, "exact", (2130, 2860), (3548, 4576)),
        ("block verify T=4, 4 blocks", "verify", 4, False, "block", (2550, 2680), (3720, 3849)),
        ("block verify T=4, 1 block", "verify", 4, True, "block", (2200, 2320), (3720, 3849)),
    ]
    for label, name, tokens, wide, algorithm, limits, theirs in rows:
        for i, dtype in enumerate(("f32", "bf16")):
            ours = per_token(run(name, tokens, dtype, wide, algorithm), tokens)
            title = f"warp instructions a token: {label}, {dtype} pool"
            found.append(Figure(title, ours, limits[i], theirs and theirs[i]))
    return found


def traffic_figures() -> list[Figure]:
    found = []
    for dtype in ("f32", "bf16"):
        verify, fold, plain = run("verify", 4, dtype), run("fold", 4, dtype), run("fwd", 1, dtype)
        for label, stats, limit in (
            ("verify", verify, 128),
            ("fold", fold, 64 if dtype == "bf16" else 128),
        ):
            requests = stats.traffic["state", "load"].requests / HEADS
            title = f"state load requests a head: {label}, {dtype} pool"
            found.append(Figure(title, requests, limit, 512))
        for label, stats, kind in (
            ("verify", verify, "load"),
            ("plain", plain, "store"),
            ("fold", fold, "load"),
            ("fold", fold, "store"),
        ):
            ratio = stats.traffic["state", kind].sectors / HEADS / STATE_SECTORS[dtype]
            title = f"state {kind} sectors / compulsory: {label}, {dtype} pool"
            found.append(Figure(title, ratio, 1.02, 1.0, 2))
        if dtype == "f32":
            stores = verify.traffic["ring", "store"].sectors / HEADS / RECORD_SECTORS
            loads = fold.traffic["ring", "load"].sectors / HEADS / RECORD_SECTORS
            # MAX's were measured at a record stride of 389, which no kernel can align.
            found.append(
                Figure("ring store sectors / compulsory: verify T=4", stores, 1.1, None, 2)
            )
            found.append(Figure("ring load sectors / compulsory: fold of 4", loads, 1.4, None, 2))
            blocks = verify.blocks / HEADS * 32
            title = "blocks at batch 1, 32 value heads: verify"
            found.append(Figure(title, blocks, 128, 32, at_least=True))
    return found


def static_figures() -> list[Figure]:
    """The worst of all kernels, pools and architectures; and the chain of the token loop."""
    registers, spills, stack, chains = 0, 0, 0, {}
    for arch in ARCHES:
        folder = Build(arch=arch).folder()
        for path in sorted(folder.glob("*.ptx")):
            ptx = path.read_text()
            for report in ptxas_report(ptx, arch):
                registers = max(registers, report.registers)
                spills = max(spills, report.spill_loads + report.spill_stores)
                stack = max(stack, report.stack)
            if path.stem in ("verify_f32", "fwd_f32"):
                chains[path.stem, arch] = longest_chain(ptx)
    return [
        Figure(f"registers, most of {', '.join(ARCHES)}", registers, 128, 255),
        Figure("bytes spilled, most (stores + loads)", spills, 0, 248),
        Figure("bytes of stack, most", stack, 0, 120),
        Figure(
            "dependent float instructions a token, verify and plain", max(chains.values()), 32, 256
        ),
    ]


def table(figures: Sequence[Figure]) -> str:
    head = "| figure | ours | MAX's | difference | limit |\n| --- | --: | --: | --: | --: |"
    return "\n".join([head, *(figure.row() for figure in figures)])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail if a limit is not met")
    parser.add_argument("--write", action="store_true", help="replace the table in docs/gpu.md")
    options = parser.parse_args(arguments)
    parts: list[Callable[[], list[Figure]]] = [static_figures, instruction_figures, traffic_figures]
    figures = [figure for part in parts for figure in part()]
    text = table(figures)
    print(text)
    if options.write:
        page = PAGE.read_text()
        before, rest = page.split(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")
    if missed := [figure.name for figure in figures if not figure.met]:
        print(f"\nworse than the limit: {'; '.join(missed)}")
        sys.exit(1 if options.check else 0)


if __name__ == "__main__":
    main()
