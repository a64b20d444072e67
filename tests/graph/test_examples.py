from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

# What each prints last; each asserts what it shows.
LAST_LINES = {
    "verify_and_fold.py": "state after the fold equal:           True",
    "layer_from_checkpoint.py": "committed state equals the decoded:  True",
    "speculative_generation.py": "the texts are equal",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAST_LINES)
def test_the_example_runs(name: str) -> None:
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / name)], capture_output=True, text=True, timeout=1200
    )
    assert result.returncode == 0, result.stderr[-4000:]
    assert result.stdout.splitlines()[-1] == LAST_LINES[name]
