"""What every peer is: something that solves a problem on rotating pools, and can be checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, ClassVar

from numpy.typing import NDArray

from .problems import Problem
from .shapes import Shape

Array = NDArray[Any]


class Unavailable(Exception):
    """Why a peer, or a peer at some shape, is left out."""


@dataclass(frozen=True)
class Settings:
    """What a worker is started with.

    Args:
        threads: Threads that the peer may use.
        graphs: (peer, layers) of every graph of ours in this run: each process of ours compiles
            all of them in one module, so that MAX's cache serves all processes but the first.
    """

    threads: int
    graphs: Sequence[tuple[str, int]] = ()


class Peer:
    """One way to solve problems of one kind.

    A subclass sets the class variables, imports what it needs in __init__ (raising Unavailable if
    it is not there), and implements load, call and results.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    kind: ClassVar[str] = "recurrence"
    algorithm: ClassVar[str] = "exact"
    """As least_work has it."""
    state_bytes: ClassVar[int] = 4
    twin: ClassVar[str | None] = None
    """The C peer that does the same as well as is known."""
    tokens: ClassVar[tuple[int, int]] = (1, 1 << 30)
    """The fewest and the most that it takes."""
    calm: ClassVar[bool] = False
    """Whether its process starts inside gdn_graph.timer_slack()."""
    layers: ClassVar[bool] = False
    """Whether it takes more than one layer."""
    tolerances: ClassVar[Mapping[str, float]] = {}

    def __init__(self, settings: Settings) -> None:
        self.threads = settings.threads

    @classmethod
    def takes(cls, shape: Shape) -> bool:
        fits = cls.tokens[0] <= shape.tokens <= cls.tokens[1]
        return cls.kind == shape.kind and fits and (cls.layers or shape.layers == 1)

    @property
    def versions(self) -> dict[str, str]:
        """Of what it runs on."""
        return {}

    def load(self, problem: Problem, copies: int) -> None:
        """Takes a problem, with so many copies of the state. Raises Unavailable if it cannot."""
        raise NotImplementedError

    def call(self, copy: int) -> None:
        """What is timed: solves the problem on this copy of the state."""
        raise NotImplementedError

    def results(self) -> dict[str, Array]:
        """After call(0) on a fresh state: arrays by their names in problem.right. "kept" is the
        state of a peer that must leave it alone.
        """
        raise NotImplementedError

    def tolerance(self, name: str) -> float:
        """The largest error, relative to the largest value, that is no mistake."""
        return self.tolerances.get(name, 0.0 if name == "kept" else 2e-5)

    def burst(self, seconds: float, copies: int) -> dict[str, list[int]]:
        """Times of consecutive calls over all copies in turn, in ns, for so long; one at least."""
        call, turn = self.call, self._turn
        call(turn % copies)  # other peers ran meanwhile: code and tables come back to the caches
        times: list[int] = []
        end = perf_counter_ns() + int(seconds * 1e9)
        while not times or perf_counter_ns() < end:
            turn += 1
            start = perf_counter_ns()
            call(turn % copies)
            times.append(perf_counter_ns() - start)
        self._turn = turn + 1
        return {"times": times}

    _turn = 1
