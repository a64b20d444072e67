from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_a_step_over_two_gpus_compiles() -> None:
    result = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("two_gpus.py"))],
        capture_output=True,
        text=True,
        timeout=2400,
    )
    assert "compiled" in result.stdout, result.stderr[-4000:]
