"""Starting and ending a server, with a small script in the place of `max`."""

from collections.abc import Callable
from pathlib import Path

import pytest
from serving import ends, running

from gdn_graph.serve import server

# A server with a child, both of which ignore the request to end.
STUBBORN = """
import http.server, os, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", child])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
port = int(os.environ["MAX_SERVE_PORT"])
http.server.HTTPServer((os.environ["MAX_SERVE_HOST"], port), Handler).serve_forever()
"""
FAILING = """
print("starting")
raise ValueError("the weights are made of cheese")
"""
SILENT = "import time; time.sleep(600)"


def test_leaving_ends_every_process(stand_in: Callable[[str], None], tmp_path: Path) -> None:
    stand_in(STUBBORN)
    with server.max_serve(tmp_path, [], tmp_path / "log", timeout_seconds=30) as started:
        assert len(running(started.process_group)) == 2
    assert ends(started.process_group)


def test_an_exception_inside_ends_every_process(
    stand_in: Callable[[str], None], tmp_path: Path
) -> None:
    stand_in(STUBBORN)
    with pytest.raises(KeyboardInterrupt):
        with server.max_serve(tmp_path, [], tmp_path / "log", timeout_seconds=30) as started:
            raise KeyboardInterrupt
    assert ends(started.process_group)


def test_a_server_that_ends_says_why(stand_in: Callable[[str], None], tmp_path: Path) -> None:
    stand_in(FAILING)
    with pytest.raises(server.ServeError, match="status 1.*the weights are made of cheese"):
        with server.max_serve(tmp_path, [], tmp_path / "log", timeout_seconds=30):
            pass


def test_a_server_that_never_answers_is_given_up(
    stand_in: Callable[[str], None], tmp_path: Path
) -> None:
    stand_in(SILENT)
    with pytest.raises(server.ServeError, match="did not answer within 1 s"):
        with server.max_serve(tmp_path, [], tmp_path / "log", timeout_seconds=1):
            pass
