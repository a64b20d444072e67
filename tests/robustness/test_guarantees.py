"""docs/guarantees.md names tests that exist, and a test for each of its cases."""

from __future__ import annotations

import re
from pathlib import Path

import planted_faults
import pytest

TESTS = Path(__file__).resolve().parents[1]
DOCUMENT = TESTS.parent / "docs" / "guarantees.md"


def functions(name: str) -> set[str]:
    paths = list(TESTS.rglob(name))
    assert len(paths) == 1, f"{name}: {paths}"
    return set(re.findall(r"^def (test_\w+)", paths[0].read_text(), re.MULTILINE))


def test_every_named_test_exists():
    named = re.findall(r"(test_\w+\.py)::(test_\w+)", DOCUMENT.read_text())
    assert len(named) > 30
    missing = [f"{file}::{test}" for file, test in named if test not in functions(file)]
    assert not missing


def test_every_case_has_a_test_in_its_file():
    rows = re.findall(
        r"^\| (C[\dC, ]+) \|.*\| (test_\w+\.py) \|$", DOCUMENT.read_text(), re.MULTILINE
    )
    cases = [(int(n), file) for ids, file in rows for n in re.findall(r"C(\d+)", ids)]
    assert len({n for n, _ in cases}) == len(cases) == 48
    missing = [
        f"C{n} in {file}"
        for n, file in cases
        if not any(f"_c{n:02d}_" in f"{name}_" for name in functions(file))
    ]
    assert not missing


@pytest.mark.parametrize("fault", planted_faults.FAULTS.values(), ids=planted_faults.FAULTS)
def test_every_planted_fault_still_has_its_place(fault):
    """The faults are planted by hand; here only that they can be."""
    for name, old, new in fault.changes:
        text = (planted_faults.ROOT / name).read_text()
        assert old in text and old != new
