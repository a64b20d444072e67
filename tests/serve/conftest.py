"""One tiny checkpoint and one server for every test here."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from numpy_qwen35 import Qwen35
from serving import OPTIONS, SLOTS, START_SECONDS, ends, load_example

from gdn_graph.serve import server as server_module
from gdn_graph.serve.server import ServeError, Server, max_serve


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
    options = [*OPTIONS, "--max-batch-size", str(SLOTS)]
    try:
        with pytest.MonkeyPatch.context() as patch:
            # Every batch in the log, not one in 3 s.
            patch.setenv("MAX_SERVE_SCHEDULER_STATS_LOG_INTERVAL_S", "0")
            with max_serve(checkpoint, options, log, timeout_seconds=START_SECONDS) as started:
                yield started
    except ServeError as error:
        pytest.fail(f"{error}\n{_tail(log)}", pytrace=False)
    assert ends(started.process_group)


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a Python script in the place of `max`."""

    def put(script: str) -> None:
        file = tmp_path / "max"
        file.write_text(f"#!{sys.executable}\n{script}")
        file.chmod(0o755)
        monkeypatch.setattr(server_module, "_max_executable", lambda: str(file))
        monkeypatch.setattr(server_module, "_STOP_SECONDS", 0.5)

    return put


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
