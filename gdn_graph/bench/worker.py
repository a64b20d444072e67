"""One peer in one process: a line of JSON in, a line of JSON out.

Requests: load (shape, cold_bytes), burst (seconds), free, quit. Answers hold what was asked for, or
"unavailable" with a reason, or "failed" with a trace.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from typing import Any, TextIO

from .machine import cpus, die_with_parent

_WARM_CALLS = 3  # until a library has the memory for its outputs


def main(name: str, threads: int, graphs: list[list[Any]]) -> None:
    """Serves requests on standard input until it ends."""
    die_with_parent()
    # Libraries print what they like to standard output: it is kept for answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # MAX takes its number of threads from the CPUs it may use, and from nothing else.
    if hasattr(os, "sched_setaffinity") and threads < len(cpus()):
        os.sched_setaffinity(0, cpus()[:threads])
    worker: Worker | None = None
    for line in sys.stdin:
        request = json.loads(line)
        if request["ask"] == "quit":
            break
        from .peer import Unavailable

        try:
            if worker is None:
                worker = Worker(name, threads, graphs)
            _answer(answers, getattr(worker, request.pop("ask"))(**request))
        except Unavailable as reason:
            _answer(answers, {"unavailable": str(reason)})
        except Exception as error:
            what = f"{type(error).__name__}: {error}".splitlines()[0]
            _answer(answers, {"failed": what, "trace": traceback.format_exc()})


def _answer(to: TextIO, value: dict[str, Any]) -> None:
    to.write(json.dumps(value) + "\n")
    to.flush()


class Worker:
    """The peer, and what it has loaded."""

    def __init__(self, name: str, threads: int, graphs: list[list[Any]]) -> None:
        from .peer import Settings
        from .peers import KINDS

        wanted = tuple((str(peer), int(layers)) for peer, layers in graphs)
        self.peer = KINDS[name](Settings(threads, wanted))
        self.started = dict(vars(self.peer))

    def start(self) -> dict[str, Any]:
        return {"versions": self.peer.versions}

    def load(self, shape: dict[str, Any], cold_bytes: int) -> dict[str, Any]:
        """Loads a shape and checks one call; answers with each result's error and tolerance."""
        from .problems import error, problem
        from .shapes import Shape

        self.free()
        task = problem(Shape(**shape))
        self.copies = max(1, -(-cold_bytes // task.cold_bytes))
        self.peer.load(task, self.copies)
        self.peer.call(0)
        checks = {}
        for name, got in self.peer.results().items():
            right = task.state if name == "kept" else task.right[name]
            checks[name] = [error(got, right), self.peer.tolerance(name)]
        for turn in range(_WARM_CALLS):
            self.peer.call(turn % self.copies)
        return {"checks": checks, "copies": self.copies}

    def burst(self, seconds: float) -> dict[str, Any]:
        gc.disable()
        try:
            return dict(self.peer.burst(seconds, self.copies))
        finally:
            gc.enable()

    def rates(self) -> dict[str, Any]:
        from .peers_c import Limits

        assert isinstance(self.peer, Limits)
        return {"rates": self.peer.rates()}

    def free(self) -> dict[str, Any]:
        """Drops all that loading added."""
        from . import memory

        vars(self.peer).clear()
        vars(self.peer).update(self.started)
        gc.collect()
        memory.reset()
        return {}


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))
