"""What gdn-graph bench does with its options."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable

from . import against
from . import report as reports
from .peers import HIDDEN, KINDS, PEERS, C
from .peers_ours import OURS
from .run import Bench, Options, Report, Table, default_threads
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


def every_shape() -> dict[str, Shape]:
    """The shapes of all lengths by name."""
    return {shape.name: shape for shapes in SETS.values() for shape in shapes}


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
    every = every_shape()
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
    if not any(KINDS[name].takes(s) for s in chosen for name in names):
        raise ValueError("bench: none of the peers takes any of the shapes; see --list")
    return result


def show_list() -> None:
    """Prints every peer and shape that can be named."""
    console = console_of(False)
    for name, peer in {**PEERS, **HIDDEN}.items():
        console.print(f"[bold]{name:20}[/] {peer.kind:11} {escape(peer.about)}", highlight=False)
    console.print()
    for name, shape in every_shape().items():
        sets = ", ".join(length for length, shapes in SETS.items() if shape in shapes)
        console.print(f"[bold]{name:20}[/] {shape.title} ({sets})", highlight=False)


def run(options: Options, out: Path | None, as_json: bool) -> None:
    """Runs it, shows each table when it is done, and writes the files."""
    console = console_of(as_json)
    if out is not None:
        _make(out)
        if find_spec("matplotlib") is None:
            console.print("no plots: matplotlib is not there; pip install 'gdn-graph[bench]'")
    report = _run(options, console, {}, reports.render)
    if options.shapes in (SETS["default"], SETS["full"]):
        console.print(reports.render_bytes())
    if out is not None:
        paths = reports.write(report, out)
        if find_spec("matplotlib") is not None:
            from . import plots

            paths += plots.write(report, out)
        console.print(f"written: {', '.join(map(str, paths))}", highlight=False)
    if as_json:
        print(json.dumps(reports.as_dict(report), indent=1))


def run_against(commit: str, options: Options, out: Path | None, as_json: bool) -> None:
    """The peers of ours from this checkout and from another commit of it, in one run."""
    ours = [name for name in options.peers if name in OURS or name in HIDDEN]
    if not ours:
        raise ValueError("bench: --against compares peers of ours, and --peers names none")
    options = replace(options, peers=ours, limits=False)
    console = console_of(as_json)
    if out is not None:
        _make(out)
    with against.trees(commit) as trees:
        now, then = trees
        report = _run(
            options, console, trees, lambda table: reports.render_against(table, now, then)
        )
    rows = [row for table in report.tables for row in reports.against_rows(table, now, then)]
    if out is not None:
        reports.write_csv(rows, out / "against.csv")
        console.print(f"written: {out / 'against.csv'}", highlight=False)
    if as_json:
        print(json.dumps({"machine": report.machine, "against": then, "rows": rows}, indent=1))


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"bench: --out is {folder}, which cannot be made ({error})") from None


def _run(
    options: Options,
    console: Console,
    trees: dict[str, Path],
    render: Callable[[Table], RichTable],
) -> Report:
    with progress_bar(console) as progress:
        task = progress.add_task("starting", total=None)

        def on_step(text: str, steps: int) -> None:
            progress.update(task, advance=steps, description=text or None)
            progress.refresh()

        said: set[str] = set()
        with Bench(options, on_step, trees) as bench:
            bench.report.versions["gdn-graph"] = f"{version('gdn-graph')} {against.commit()}"
            progress.update(task, total=bench.steps)
            for table in bench.run():
                console.print(render(table))
                for reason in reports.reasons(table):
                    if reason not in said:
                        console.print(reason, style="yellow", highlight=False, markup=False)
                        said.add(reason)
    return bench.report


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
