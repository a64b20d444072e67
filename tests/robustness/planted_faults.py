"""Plants faults in a copy of the kernels, one after another, and shows which tests notice.

    python tests/robustness/planted_faults.py [--fault NAME] [pytest arguments]

A fault is a few words of a kernel replaced. The tree is copied to a temporary folder, so that
neither the sources nor the kernel cache of this one are touched. Without arguments the tests of
float32 pools run, which need one compile a fault. Each fault has to be caught by two test functions
at least.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CPU = "kernels/gated_delta/cpu"
DEFAULT_TESTS = [
    "tests/test_exactness.py",
    "tests/test_block.py",
    "tests/robustness/test_field_cases_accepted.py",
    "tests/robustness/test_field_cases_slots.py",
    "tests/robustness/test_field_cases_shapes.py",
    "tests/robustness/test_aliases_and_nonfinite.py",
    "tests/robustness/test_fuzz_ids.py",
    "-k",
    "not bf16 and not f16 and not thread_count",
]


@dataclass(frozen=True)
class Fault:
    """Replacements in the sources: (file, old, new); old has to be there."""

    what: str
    changes: tuple[tuple[str, str, str], ...]


FAULTS = {
    "fold-skips-a-record": Fault(
        "a fold of two or more records leaves out the last",
        (
            (
                f"{CPU}/state_fold.mojo",
                "Int(num_accepted[unsafe_offset=item // nv % batch_size]),",
                "max(Int(num_accepted[unsafe_offset=item // nv % batch_size]) - 1, 1),",
            ),
        ),
    ),
    "verify-writes-the-pool": Fault(
        "a verify leaves its last state in the pool",
        (
            (f"{CPU}/recurrence.mojo", "if write != w.records and", "if write and"),
            (f"{CPU}/recurrence.mojo", "if t < T or w.records:", "if t < T:"),
        ),
    ),
    "swapped-head-map": Fault(
        "value head h reads key head h % nk, in recurrence, records and fold alike",
        (
            (f"{CPU}/recurrence.mojo", "var kh = h // group", "var kh = h % nk"),
            (f"{CPU}/recurrence.mojo", "var g = h % group", "var g = h // nk"),
            (f"{CPU}/state_fold.mojo", "* nk + h // group)", "* nk + h % nk)"),
            (f"{CPU}/state_fold.mojo", "(h % group)", "(h // nk)"),
        ),
    ),
    "stale-row-table": Fault(
        "the fold takes the state rows of the first layer in every layer",
        (
            (
                f"{CPU}/state_fold.mojo",
                "row_ids[unsafe_offset=item // nv]) * nv",
                "row_ids[unsafe_offset=item // nv % batch_size]) * nv",
            ),
            # Else a row that only the first layer leaves out is a write outside the pool.
            (
                f"{CPU}/state_fold.mojo",
                "var row = row_ids[unsafe_offset=item // nv]",
                "var row = row_ids[unsafe_offset=item // nv % batch_size]",
            ),
        ),
    ),
    "block-update-unscaled": Fault(
        "the block form adds a token's factors as they were, not decayed to the block's end",
        (
            (
                f"{CPU}/block.mojo",
                "f[t * NV + j] = f[t * NV + j] * to_end",
                "f[t * NV + j] = f[t * NV + j]",
            ),
        ),
    ),
    "conv-window-off-by-one": Fault(
        "the conv leaves the inputs of one token earlier in its window",
        (
            (
                f"{CPU}/conv1d.mojo",
                "self.stride, self.length, n)",
                "self.stride, self.length - 1, n)",
            ),
        ),
    ),
}


def plant(fault: Fault, tree: Path) -> None:
    for part in ("gdn_graph", "kernels", "tests", "pyproject.toml"):
        source = ROOT / part
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, tree / part)
    for name, old, new in fault.changes:
        path = tree / name
        text = path.read_text()
        if old not in text:
            raise SystemExit(f"{name} no longer holds {old!r}: bring this fault up to date")
        path.write_text(text.replace(old, new))


def failing_tests(tree: Path, tests: list[str]) -> tuple[list[str], str]:
    """Runs pytest in the tree; the test functions that fail, and pytest's last line."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "GDN_GRAPH_CACHE_DIR": str(tree / "cache"),
    }
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [*command, *tests], cwd=tree, env=environment, capture_output=True, text=True
    )
    if result.returncode not in (0, 1):
        return [], f"pytest itself ended with {result.returncode}: {result.stderr[-300:].strip()}"
    failed = re.findall(r"^FAILED (\S+?\.py::\w+)", result.stdout, re.MULTILINE)
    return list(dict.fromkeys(failed)), result.stdout.strip().splitlines()[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fault", choices=FAULTS, action="append")
    args, tests = parser.parse_known_args()
    missed = []
    for name in args.fault or FAULTS:
        fault = FAULTS[name]
        with tempfile.TemporaryDirectory() as folder:
            plant(fault, Path(folder))
            failed, summary = failing_tests(Path(folder), tests or DEFAULT_TESTS)
        print(f"{name}: {fault.what}\n  caught by {len(failed)} test functions ({summary})")
        for test in failed:
            print(f"    {test}")
        sys.stdout.flush()
        if len(failed) < 2:
            missed.append(name)
    if missed:
        raise SystemExit(f"caught by fewer than two tests: {', '.join(missed)}")


if __name__ == "__main__":
    main()
