"""One tiny checkpoint and one server for every test here."""

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from numpy_qwen35 import Qwen35

from gdn_graph.serve.server import ServeError, Server, max_serve

# One set of options for generate and serve, so that MAX compiles one model graph for both: the
# length is baked into it. Reasoning stays in the text, as completions have nowhere else for it.
MAX_LENGTH = 256
OPTIONS = (
    *("--devices", "cpu", "--quantization-encoding", "float32"),
    *("--max-length", str(MAX_LENGTH), "--reasoning-parser", "none"),
)
START_SECONDS = 900.0  # a cold start compiles for 3 minutes on two idle cores


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


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny-qwen35"
    load_example("tiny_qwen35").write_checkpoint(folder)
    return folder


@pytest.fixture(scope="session")
def oracle(checkpoint: Path) -> Qwen35:
    return Qwen35(checkpoint)


@pytest.fixture(scope="session")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "max-serve.log"
    options = [*OPTIONS, "--max-batch-size", "8"]
    try:
        with max_serve(checkpoint, options, log, timeout_seconds=START_SECONDS) as running_server:
            yield running_server
    except ServeError as error:
        pytest.fail(f"{error}\n{_tail(log)}", pytrace=False)
    assert running(running_server.process_group) == []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Shows the server's log beside a failure."""
    report: Any = yield
    server = getattr(item, "funcargs", {}).get("server")
    if report.failed and server is not None:
        report.sections.append(("max serve", _tail(server.log)))
    return report


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-10_000:]
