"""What gdn-graph bench does with its options."""

from __future__ import annotations

import json
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from . import report as reports
from .peers import HIDDEN, PEERS, C
from .peers_ours import OURS
from .run import Bench, Options, default_threads
from .shapes import SETS, Shape

_LENGTHS = {"quick": (6, 0.12), "default": (8, 0.2), "full": (16, 0.3)}
"""Rounds and the seconds of a burst."""


def choose(what: str, patterns: str, known: Sequence[str], hidden: Sequence[str] = ()) -> list[str]:
    """Names that match any of the comma-separated patterns, in the order of the known.

    Raises:
        ValueError: If a pattern matches nothing.
    """
    wanted = [p.strip() for p in patterns.split(",") if p.strip()]
    for pattern in wanted:
        if pattern not in hidden and not any(fnmatchcase(name, pattern) for name in known):
            raise ValueError(
                f"bench: --{what} has {pattern!r}, which matches nothing; need names or patterns "
                f"of {', '.join(known)}"
            )
    names = [name for name in known if any(fnmatchcase(name, p) for p in wanted)]
    return names + [name for name in hidden if name in wanted]


def options(
    length: str,
    peers: str | None,
    shapes: str | None,
    threads: int | None,
    rounds: int | None,
    seconds: float | None,
    wait: float | None,
) -> Options:
    """The options of a run; what is not given is that of its length."""
    every = {shape.name: shape for set_ in SETS.values() for shape in set_}
    chosen: Sequence[Shape] = SETS[length]
    if shapes is not None:
        chosen = [every[name] for name in choose("shapes", shapes, list(every))]
    short = [name for name in (*OURS, *C) if "bf16" not in name]
    names = list(short if length == "quick" else PEERS)
    if peers is not None:
        names = choose("peers", peers, list(PEERS), list(HIDDEN))
    most = default_threads()
    if threads is not None and not 1 <= threads <= most:
        raise ValueError(f"bench: --threads is {threads}; need 1 to {most}, the CPUs there are")
    default_rounds, default_seconds = _LENGTHS[length]
    result = Options(
        shapes=chosen,
        peers=names,
        threads=threads or most,
        rounds=rounds or default_rounds,
        seconds=seconds or default_seconds,
        wait=30.0 if wait is None else wait,
    )
    if not any({**PEERS, **HIDDEN}[name].takes(s) for s in chosen for name in names):
        raise ValueError("bench: none of the peers takes any of the shapes; see --list")
    return result


def run(options: Options, out: Path | None, as_json: bool) -> None:
    """Runs it, shows each table when it is done, and writes the files."""
    console = console_of(as_json)
    with progress_bar(console) as progress:
        task = progress.add_task("starting", total=None)

        def on_step(text: str, steps: int) -> None:
            progress.update(task, advance=steps, description=text or None)
            progress.refresh()

        with Bench(options, on_step) as bench:
            progress.update(task, total=bench.steps)
            for table in bench.run():
                console.print(reports.render(table))
                for reason in reports.reasons(table):
                    console.print(f"  {reason}", style="yellow", highlight=False)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        reports.write_csv(bench.report, out / "bench.csv")
        reports.write_json(bench.report, out / "bench.json")
        console.print(f"written to {out}")
    if as_json:
        print(json.dumps(reports.as_dict(bench.report), indent=1))


def console_of(as_json: bool) -> Console:
    """Wide enough for the tables where there is no terminal to ask."""
    console = Console(stderr=as_json)
    if not console.is_terminal:
        console = Console(stderr=as_json, width=112)
    return console


def progress_bar(console: Console) -> Progress:
    """A bar that is drawn between the bursts only: its thread would disturb them."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        auto_refresh=False,
        transient=True,
    )
