"""`max serve` on our architectures as a child process: what serve-check and the tests talk to."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gdn_graph.serve import SPEC

_HOST: Final = "127.0.0.1"
# A proxy of the environment does not lead to this machine's loopback.
_DIRECT: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_STOP_SECONDS: Final = 30.0


class ServeError(RuntimeError):
    """The server did not start; the message is one line."""


@dataclass(frozen=True)
class Server:
    """A server that answers.

    Attributes:
        url: Base URL of its OpenAI API.
        model: The name it serves the model under.
        log: What it prints.
        process_group: Id of the group that holds it and every process it started.
        startup_seconds: Seconds from its start to its first answer, compilation included.
    """

    url: str
    model: str
    log: Path
    process_group: int
    startup_seconds: float


@contextmanager
def max_serve(
    model: Path, options: Sequence[str], log: Path, *, timeout_seconds: float = 900.0
) -> Iterator[Server]:
    """Starts `max serve` on a free loopback port, and ends all of it on leaving.

    Args:
        model: Folder of the checkpoint; nothing is fetched.
        options: Further options of `max serve`.
        log: File that takes what the server prints.
        timeout_seconds: How long the server may take to answer. The first start on a machine
            compiles, which takes minutes; later ones load from MAX's cache.

    Raises:
        ServeError: `max` is not installed, the server ended, or it did not answer in time.
    """
    port = _free_port()
    command = [_max_executable(), "serve", "--custom-architectures", SPEC, "--model", str(model)]
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "MAX_SERVE_HOST": _HOST,
        "MAX_SERVE_PORT": str(port),
        "MAX_SERVE_METRICS_ENDPOINT_PORT": str(_free_port()),
        "MAX_SERVE_DISABLE_TELEMETRY": "1",
    }
    start = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *options],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # its workers are then ended with it, whatever became of it
        )
    try:
        while not _answers(f"http://{_HOST}:{port}/health"):
            if process.poll() is not None:
                raise ServeError(f"max serve ended with status {process.returncode}: {_why(log)}")
            if time.monotonic() - start > timeout_seconds:
                raise ServeError(f"max serve did not answer within {timeout_seconds:.0f} s")
            time.sleep(0.2)
        yield Server(
            url=f"http://{_HOST}:{port}/v1",
            model=str(model),
            log=log,
            process_group=process.pid,
            startup_seconds=time.monotonic() - start,
        )
    finally:
        _stop(process)


def _max_executable() -> str:
    """The `max` beside this interpreter, else the first on PATH."""
    beside = str(Path(sys.executable).parent)
    found = shutil.which("max", path=os.pathsep.join([beside, os.environ.get("PATH", "")]))
    if found is None:
        raise ServeError("the command `max` is not installed: pip install 'gdn-graph[serve]'")
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _answers(url: str) -> bool:
    try:
        with _DIRECT.open(url, timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


def _why(log: Path) -> str:
    """The line of a log that says what went wrong: the last exception's, else the last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    raised = [line for line in lines if re.match(r"[\w.]*(Error|Exception): \S", line)]
    return (raised or lines or ["it printed nothing"])[-1]


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Asks the server to end, then ends whatever is left of its process group."""
    process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        pass
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
