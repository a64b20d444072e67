"""The README's example runs as printed, and its commands are those that CI runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(), re.DOTALL)


def test_the_graph_example_runs_as_printed():
    example = blocks("python")[0]
    run = subprocess.run(
        [sys.executable, "-c", example], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    words = re.fullmatch(
        r"state after two of three tokens: (\S+) - row 0 untouched: True\n", run.stdout
    )
    assert words and float(words[1]) > 0


def test_the_overlay_example_runs_as_printed():
    exec(blocks("python")[1])


def test_the_two_commands():
    install, test = blocks("sh")[:2]
    assert install.strip() == "pip install -e '.[test]' && gdn-graph demo"
    assert test.strip() == "pytest"
