"""The run: peers in turn, in short bursts, each in a process of its own."""

from __future__ import annotations

import json
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from gdn_graph.timers import timer_slack

from .machine import Load, can_stop, cpus, describe
from .peers import KINDS, PEERS
from .peers_c import Limits
from .peers_ours import OURS
from .shapes import Shape, least_work

QUIET: Final = 0.12
"""CPUs that others may keep busy during a burst that counts."""
_ANSWER_S: Final = 900.0  # torch.compile takes minutes on a slow machine
_GRACE_S: Final = 20.0


@dataclass(frozen=True)
class Options:
    """What to run.

    Args:
        shapes: The tables.
        peers: Names; each runs at the shapes that it takes.
        threads: Of every peer.
        rounds: Bursts of each peer at each shape.
        seconds: Of a burst.
        wait: Seconds that a table may wait in all for others to leave the machine alone.
        cold_bytes: Bytes of state that a peer goes through before it comes back to the first.
        limits: Whether the limits of the machine are measured too.
    """

    shapes: Sequence[Shape]
    peers: Sequence[str]
    threads: int
    rounds: int = 8
    seconds: float = 0.2
    wait: float = 30.0
    cold_bytes: int = 320 << 20
    limits: bool = True

    def graphs(self) -> list[tuple[str, int]]:
        """(peer, layers) of every graph of ours that the run needs."""
        found: dict[tuple[str, int], None] = {}
        for shape in self.shapes:
            for name in self.peers:
                if name in OURS and OURS[name].takes(shape):
                    found[name, OURS[name].graph_layers(shape)] = None
        return list(found)


@dataclass
class Entry:
    """What came of one peer at one shape. Times are ns of one call."""

    label: str
    """The peer, and after an @ the tree that it was run from."""
    status: str = "timed"
    """"timed", "red" (its result is wrong; not timed), "skipped" or "failed"."""
    reason: str = ""
    error: float | None = None
    """The largest of its errors, relative to the largest value of each result."""
    times: list[int] = field(default_factory=list)
    bursts: list[int] = field(default_factory=list)
    """The best call of each burst that counts, one a round."""
    foreign: list[float] = field(default_factory=list)
    """CPUs that others kept busy during each of those bursts."""
    discarded: int = 0
    """Bursts that others disturbed and that a later one replaced."""

    @property
    def peer(self) -> str:
        return self.label.partition("@")[0]

    @property
    def best(self) -> int:
        return min(self.times)

    @property
    def median(self) -> float:
        return statistics.median(self.times)

    @property
    def disturbed(self) -> int:
        """Bursts that count although others disturbed them."""
        return sum(load > QUIET for load in self.foreign)

    def ratio_by_round(self, base: Entry) -> float:
        """The median of this peer's best burst over the base's in the same round.

        Where the machine is faster in some rounds than in others, a minimum says who was lucky;
        this does not.
        """
        return statistics.median(a / b for a, b in zip(self.bursts, base.bursts, strict=False))


@dataclass
class Table:
    """One shape: an entry a peer, and the limits of the machine meanwhile."""

    shape: Shape
    entries: list[Entry] = field(default_factory=list)
    rates: list[dict[str, float]] = field(default_factory=list)
    """What the machine could do, in each round."""

    @property
    def limits(self) -> dict[str, float]:
        """The best of each rate."""
        names = self.rates[0] if self.rates else {}
        return {name: max(rates[name] for rates in self.rates) for name in names}

    def timed(self, label: str | None) -> Entry | None:
        """The entry of that label if it has times."""
        found = (e for e in self.entries if e.label == label and e.status == "timed")
        return next(found, None)

    @property
    def base(self) -> Entry | None:
        """What ratios are to: the C reference, or else the first of ours."""
        c = {"recurrence": "c_rec", "fold": "c_fold"}.get(self.shape.kind)
        ours = (e for e in self.entries if e.peer in OURS and e.status == "timed")
        return self.timed(c) or next(ours, None)

    def share(self, entry: Entry) -> float | None:
        """The least time that the limits allow, over the best time."""
        peer = PEERS.get(entry.peer)
        if not self.limits or peer is None:
            return None
        work = least_work(peer.algorithm, self.shape, peer.state_bytes)
        return work.seconds(self.limits) / (entry.best * 1e-9)


@dataclass
class Report:
    """A whole run."""

    machine: dict[str, str]
    options: Options
    tables: list[Table] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0


class Worker:
    """A peer's process. `tree` is the checkout whose gdn_graph it measures.

    It is stopped while it is not asked: an idle MAX session keeps a seventh of a CPU busy, and
    OpenMP's threads spin for a while after their last task.
    """

    def __init__(self, peer: str, options: Options, log: Path, tree: Path | None = None) -> None:
        self.peer, self.log = peer, log
        graphs = json.dumps(options.graphs())
        threads = str(options.threads)
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
        environment = dict(os.environ, **{name: threads for name in names})
        if tree is None:
            module = f"{__package__}.worker"
        else:
            module = "gdn_graph_bench.worker"
            environment["PYTHONPATH"] = os.pathsep.join([str(tree), str(_standalone(log.parent))])
        # A process takes over the slack of the thread that starts it.
        calm = KINDS[peer].calm
        with timer_slack() if calm else nullcontext():
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, peer, threads, graphs],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log.open("w"),
                text=True,
                env=environment,
            )

    def ask(self, ask: str, **arguments: Any) -> dict[str, Any]:
        """The answer; "failed" if the process died or did not answer in time."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self._let_run(True)
        try:
            self.process.stdin.write(json.dumps({"ask": ask, **arguments}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return self._died()
        if not select.select([self.process.stdout], [], [], _ANSWER_S)[0]:
            self.process.kill()
            return {"failed": f"no answer in {_ANSWER_S:.0f} s"}
        line = self.process.stdout.readline()
        if not line:
            return self._died()
        self._let_run(False)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _let_run(self, run: bool) -> None:
        if can_stop():
            self.process.send_signal(signal.SIGCONT if run else signal.SIGSTOP)

    def _died(self) -> dict[str, Any]:
        code = self.process.wait()
        tail = self.log.read_text(errors="replace").strip().splitlines()[-1:]
        return {"failed": f"its process ended with {code}: {' '.join(tail)[:200]}"}

    def close(self) -> None:
        self._let_run(True)
        if self.process.poll() is None and self.process.stdin is not None:
            try:
                self.process.stdin.write('{"ask": "quit"}\n')
                self.process.stdin.close()
                self.process.wait(_GRACE_S)
            except (OSError, subprocess.TimeoutExpired):
                self.process.kill()
        self.process.wait()


class Bench:
    """Runs the tables one by one. A context: its workers end with it.

    Args:
        options: What to run.
        on_step: Called with what happens now and how many steps of `steps` that finishes.
        trees: Checkouts by label. With them every peer runs from each, as "peer@label".
    """

    def __init__(
        self,
        options: Options,
        on_step: Callable[[str, int], None] = lambda text, steps: None,
        trees: dict[str, Path] | None = None,
    ) -> None:
        self.options, self.on_step, self.trees = options, on_step, trees or {}
        self.report = Report(describe(options.threads), options)
        self.workers: dict[str, Worker] = {}
        self.gone: dict[str, Entry] = {}
        """Peers that cannot run at all, found out once."""
        self.folder = tempfile.TemporaryDirectory(prefix="gdn-graph-bench-")

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers.values():
            worker.close()
        self.folder.cleanup()

    def peers_of(self, shape: Shape) -> list[str]:
        """The entries of a table, in order."""
        names = [name for name in self.options.peers if KINDS[name].takes(shape)]
        if not self.trees:
            return names
        return [f"{name}@{label}" for name in names for label in self.trees]

    @property
    def steps(self) -> int:
        rounds = self.options.rounds + 1
        return sum(rounds * len(self.peers_of(shape)) for shape in self.options.shapes)

    def run(self) -> Iterator[Table]:
        """Yields each table when it is done."""
        start = time.monotonic()
        for done, shape in enumerate(self.options.shapes, 1):
            table = self._table(shape)
            self._retire(self.options.shapes[done:])
            self.report.tables.append(table)
            self.report.seconds = time.monotonic() - start
            yield table

    def _table(self, shape: Shape) -> Table:
        table = Table(shape)
        for name in self.peers_of(shape):
            self.on_step(f"{shape.name}: loading and checking {name}", 0)
            entry = self._load(name, shape)
            table.entries.append(entry)
            self.on_step("", 1 if entry.status == "timed" else 1 + self.options.rounds)
        timed = [entry for entry in table.entries if entry.status == "timed"]
        limits = self._worker(Limits.name) if timed and self.options.limits else None
        wait_until = time.monotonic() + self.options.wait
        for turn in range(self.options.rounds):
            if limits is not None:
                self._limits(limits, table, wait_until)
            for entry in timed:
                if entry.status != "timed":
                    continue
                self.on_step(f"{shape.name}: round {turn + 1}, {entry.label}", 0)
                self._burst(entry, wait_until)
                self.on_step("", 1)
        for entry in table.entries:
            if entry.label in self.workers:
                self.workers[entry.label].ask("free")
        return table

    def _worker(self, name: str) -> Worker | None:
        """The peer's process, started if need be; None if the peer cannot run here."""
        if name in self.gone:
            return None
        if name not in self.workers:
            peer, _, label = name.partition("@")
            log = Path(self.folder.name) / f"{name}.log"
            worker = Worker(peer, self.options, log, self.trees.get(label))
            self.workers[name] = worker
            answer = worker.ask("start")
            if "versions" not in answer:
                self._drop(name, answer)
                return None
            self.report.versions.update(answer["versions"])
        return self.workers[name]

    def _retire(self, later: Sequence[Shape]) -> None:
        """Ends the processes that no later table needs: each keeps a gigabyte or two."""
        needed = {Limits.name, *(name for shape in later for name in self.peers_of(shape))}
        for name in self.workers.keys() - needed:
            self.workers.pop(name).close()

    def _drop(self, name: str, answer: dict[str, Any]) -> Entry:
        self.workers.pop(name).close()
        self.gone[name] = _not_timed(name, answer)
        return self.gone[name]

    def _load(self, name: str, shape: Shape) -> Entry:
        worker = self._worker(name)
        if worker is None:
            return self.gone[name]
        answer = worker.ask("load", shape=shape.as_dict(), cold_bytes=self.options.cold_bytes)
        if worker.process.poll() is not None:
            return self._drop(name, answer)
        if "checks" not in answer:
            return _not_timed(name, answer)
        checks: dict[str, list[float]] = answer["checks"]
        # A NaN is above all others, and not below its tolerance.
        worst = max((error for error, _ in checks.values()), key=lambda e: (e != e, e))
        entry = Entry(name, error=worst)
        wrong = [what for what, (error, most) in checks.items() if not error <= most]
        if wrong:
            entry.status = "red"
            entry.reason = "; ".join(
                f"{what}: error {checks[what][0]:.1e}, at most {checks[what][1]:.0e}"
                for what in wrong
            )
        return entry

    def _burst(self, entry: Entry, wait_until: float) -> None:
        """One burst that counts: undisturbed, or the last that there was time for."""
        worker = self.workers[entry.label]
        while True:
            load, start = Load(worker.process.pid), time.monotonic()
            answer = worker.ask("burst", seconds=self.options.seconds)
            foreign = load.foreign(time.monotonic() - start)
            if "times" not in answer:
                entry.status, entry.reason = "failed", self._drop(entry.label, answer).reason
                return
            if foreign <= QUIET or not _wait_for_quiet(wait_until):
                break
            entry.discarded += 1
        entry.times += answer["times"]
        entry.bursts.append(min(answer["times"]))
        entry.foreign.append(round(foreign, 3))

    def _limits(self, worker: Worker, table: Table, wait_until: float) -> None:
        rates: dict[str, float] = {}
        for _ in range(3):
            load, start = Load(worker.process.pid), time.monotonic()
            rates = worker.ask("rates").get("rates", {})
            quiet = load.foreign(time.monotonic() - start) <= QUIET
            if quiet or not _wait_for_quiet(wait_until):
                break
        if rates:
            table.rates.append(rates)


def _not_timed(name: str, answer: dict[str, Any]) -> Entry:
    if "unavailable" in answer:
        return Entry(name, "skipped", answer["unavailable"])
    return Entry(name, "failed", answer.get("failed", "no answer that makes sense"))


def _wait_for_quiet(until: float) -> bool:
    """Waits until the machine is idle; False if that does not come in time."""
    while time.monotonic() < until:
        load, start = Load(os.getpid()), time.monotonic()
        time.sleep(QUIET)
        if load.foreign(time.monotonic() - start) < QUIET:
            return True
    return False


def _standalone(folder: Path) -> Path:
    """A folder that holds this package under a name of its own, for workers of other trees."""
    link = folder / "gdn_graph_bench"
    if not link.exists():
        link.symlink_to(Path(__file__).resolve().parent, target_is_directory=True)
    return folder


def default_threads() -> int:
    """All CPUs that this process may use."""
    return len(cpus())
