"""What the tests here share that is no fixture."""

import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import Any

import psutil

# One set of options for generate and serve, so that MAX compiles one model graph for both: the
# length is baked into it. Reasoning stays in the text, as completions have nowhere else for it.
MAX_LENGTH = 256
OPTIONS = (
    *("--devices", "cpu", "--quantization-encoding", "float32"),
    *("--max-length", str(MAX_LENGTH), "--reasoning-parser", "none"),
)
SLOTS = 8  # requests the server runs at once
START_SECONDS = 1200.0  # a cold start compiles for 3 minutes on two idle cores


def load_example(name: str) -> Any:
    """The module of one file of examples/."""
    file = Path(__file__).parents[2] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def running(process_group: int) -> list[str]:
    """The command lines of the live processes of a group."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == process_group:
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(" ".join(process.cmdline()))
        except (psutil.Error, ProcessLookupError):
            pass
    return found


def ends(process_group: int) -> bool:
    """Whether a killed group ends; the kernel takes a moment."""
    deadline = time.monotonic() + 10
    while running(process_group) and time.monotonic() < deadline:
        time.sleep(0.05)
    return running(process_group) == []
