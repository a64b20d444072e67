"""A run as tables on the terminal, as Markdown, as CSV and as JSON."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table as RichTable

from . import step_bytes
from .peers import KINDS
from .peers_ours import OURS
from .run import Report, Table

_BYTE_HEADS = ("pool", "drafts", "ring, none accepted", "all accepted", "snapshots", "ratio")
_LIMIT_UNITS = {"multiply_add": ("multiply-adds", "G/s")}


def rows(table: Table) -> Iterator[dict[str, Any]]:
    """One flat row an entry, fastest first and what was not timed last."""
    base, shape = table.base, table.shape
    for entry in sorted(table.entries, key=lambda e: e.best if e.times else 1 << 62):
        row: dict[str, Any] = {"shape": shape.name, **shape.as_dict(), "peer": entry.label}
        row |= {"status": entry.status, "reason": entry.reason, "error": entry.error}
        if entry.status == "timed":
            twin = table.timed(KINDS[entry.peer].twin)
            row |= {
                "min_us": entry.best / 1e3,
                "median_us": entry.median / 1e3,
                "ns_per_unit": entry.best / shape.units,
                "unit": shape.unit,
                "base": base.label if base else "",
                "ratio_min": entry.best / base.best if base else None,
                "ratio_median": entry.median / base.median if base else None,
                "ratio_by_round": entry.ratio_by_round(base) if base else None,
                "twin": twin.label if twin else "",
                "twin_ratio": entry.best / twin.best if twin else None,
                "limit_share": table.share(entry),
                "calls": len(entry.times),
                "bursts": len(entry.bursts),
                "disturbed": entry.disturbed,
                "discarded": entry.discarded,
                "foreign_cpus": sum(entry.foreign) / len(entry.foreign),
            }
        yield row


def heads(table: Table) -> list[str]:
    """The columns of `cells`."""
    to = f"x {table.base.label}" if table.base else "x"
    times = ["peer", "min us", "median", "ns/unit"]
    return [*times, to, "median", "by round", "x C twin", "of limit", "error", ""]


def cells(row: dict[str, Any]) -> list[str]:
    """A row as text."""
    error = "" if row["error"] is None else f"{row['error']:.0e}"
    if row["status"] != "timed":
        return [row["peer"], *[""] * 8, error, row["status"]]
    unit, share = row["ns_per_unit"], row["limit_share"]
    names = ("ratio_min", "ratio_median", "ratio_by_round", "twin_ratio")
    disturbed = f"disturbed {row['disturbed']}/{row['bursts']}"
    return [
        row["peer"],
        f"{row['min_us']:.1f}",
        f"{row['median_us']:.1f}",
        f"{unit:.0f}" if unit >= 100 else f"{unit:.3g}",
        *("" if row[name] is None else f"{row[name]:.2f}" for name in names),
        "" if share is None else f"{share:.0%}",
        error,
        disturbed if row["disturbed"] else "",
    ]


def render(table: Table) -> RichTable:
    """The table for a terminal."""
    title = f"{table.shape.name}: {table.shape.title}"
    rich = _rich(heads(table), title, caption(table))
    for row in rows(table):
        *text, note = map(escape, cells(row))
        color = {"timed": "yellow", "skipped": "yellow"}.get(row["status"], "red")
        style = "bold" if row["peer"] in OURS else ""
        rich.add_row(*text, f"[{color}]{note}[/]" if note else "", style=style)
    return rich


def render_against(table: Table, now: str, then: str) -> RichTable:
    """Peers of two trees: times of both, and now over then."""
    title = f"{table.shape.name}: {table.shape.title}"
    columns = ["peer", f"{then} us", f"{now} us", "ratio", "median", "by round", "error", ""]
    rich = _rich(columns, title, caption(table))
    for row in against_rows(table, now, then):
        if "ratio_min" not in row:
            rich.add_row(row["peer"], *[""] * 6, "[yellow]not in both[/]")
            continue
        ratios = (f"{row[name]:.2f}" for name in ("ratio_min", "ratio_median", "ratio_by_round"))
        times = (f"{row[name]:.1f}" for name in ("then_us", "now_us"))
        rich.add_row(row["peer"], *times, *ratios, f"{row['error']:.0e}", row["reason"])
    return rich


def against_rows(table: Table, now: str, then: str) -> Iterator[dict[str, Any]]:
    """One row a peer; without ratios, and with the reason, if either tree lacks it."""
    for name in dict.fromkeys(entry.peer for entry in table.entries):
        row: dict[str, Any] = {"shape": table.shape.name, "peer": name, "reason": ""}
        new, old = table.timed(f"{name}@{now}"), table.timed(f"{name}@{then}")
        if new is None or old is None:
            missing = [e for e in table.entries if e.peer == name and e.status != "timed"]
            row["reason"] = "; ".join(f"{e.label} {e.status}: {e.reason}" for e in missing)
        else:
            row |= {
                "then_us": old.best / 1e3,
                "now_us": new.best / 1e3,
                "ratio_min": new.best / old.best,
                "ratio_median": new.median / old.median,
                "ratio_by_round": new.ratio_by_round(old),
                "error": new.error,
            }
            if new.disturbed or old.disturbed:
                count = len(new.bursts) + len(old.bursts)
                row["reason"] = f"{new.disturbed + old.disturbed} of {count} bursts disturbed"
        yield row


def reasons(table: Table) -> list[str]:
    """Why entries were not timed, a line each."""
    return [f"{e.label} {e.status}: {e.reason}" for e in table.entries if e.status != "timed"]


def caption(table: Table) -> str:
    """What a unit is, and what the machine could do meanwhile; a span where it changed."""
    parts = []
    for name, best in table.limits.items():
        label, unit = _LIMIT_UNITS.get(name, (name.replace("_", " "), "GB/s"))
        worst = min(rates[name] for rates in table.rates)
        span = "" if worst > 0.85 * best else f"{worst / 1e9:.0f} to "
        parts.append(f"{label} {span}{best / 1e9:.0f} {unit}")
    unit = f"a unit is a {table.shape.unit}"
    return f"{unit}; limits: {', '.join(parts)}" if parts else unit


def render_bytes() -> RichTable:
    """Bytes of a step, of ring and snapshots."""
    rich = _rich(
        _BYTE_HEADS, "bytes of recurrent state a speculative step, of a layer and request", ""
    )
    for text in _byte_cells():
        rich.add_row(*text)
    return rich


def write_csv(lines: Iterable[dict[str, Any]], path: Path) -> None:
    """A line a row, under the names of all."""
    lines = list(lines)
    names = list(dict.fromkeys(name for line in lines for name in line))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, restval="", lineterminator="\n")
        writer.writeheader()
        for line in lines:
            writer.writerow({k: f"{v:.5g}" if isinstance(v, float) else v for k, v in line.items()})


def as_dict(report: Report) -> dict[str, Any]:
    """Everything but the single times, for JSON."""
    options = asdict(report.options)
    options["shapes"] = [shape.name for shape in report.options.shapes]
    tables = []
    for table in report.tables:
        bursts = {
            e.label: {"burst_ns": e.bursts, "burst_foreign_cpus": e.foreign} for e in table.entries
        }
        tables.append(
            {
                "shape": table.shape.name,
                "title": table.shape.title,
                "limits": _whole(table.limits),
                "limits_by_round": [_whole(rates) for rates in table.rates],
                "entries": [row | bursts[row["peer"]] for row in rows(table)],
            }
        )
    return {
        "machine": report.machine,
        "versions": report.versions,
        "options": options,
        "seconds": round(report.seconds, 1),
        "tables": tables,
    }


def markdown(report: Report) -> str:
    """The machine and all tables, to be committed."""
    o = report.options
    text = [
        "# A result of `gdn-graph bench`",
        "Written by it. How to read it: [README](../README.md).",
        _markdown_table(["machine", ""], (list(x) for x in report.machine.items())),
        _markdown_table(["version of", ""], (list(x) for x in report.versions.items())),
        f"{o.rounds} bursts of {o.seconds} s of each peer, in turn; states rotate over "
        f"{o.cold_bytes >> 20} MB; {report.seconds / 60:.0f} minutes in all.",
    ]
    for table in report.tables:
        text += [f"## {table.shape.name}: {table.shape.title}"]
        text += [_markdown_table(heads(table), (cells(row) for row in rows(table)))]
        text += [caption(table)]
    left_out = dict.fromkeys(reason for table in report.tables for reason in reasons(table))
    if left_out:
        text += ["## Not timed", "\n".join(f"- {reason}" for reason in left_out)]
    text += ["## Bytes of recurrent state a speculative step, of a layer and request"]
    text += [_markdown_table(_BYTE_HEADS, _byte_cells())]
    return "\n\n".join(part for part in text if part) + "\n"


def write(report: Report, folder: Path) -> list[Path]:
    """Writes CSV, JSON and Markdown."""
    paths = [folder / name for name in ("bench.csv", "bytes.csv", "bench.json", "README.md")]
    write_csv((row for table in report.tables for row in rows(table)), paths[0])
    write_csv(step_bytes.rows(), paths[1])
    paths[2].write_text(json.dumps(as_dict(report), indent=1) + "\n")
    paths[3].write_text(markdown(report))
    return paths


def _rich(columns: Sequence[str], title: str, caption: str) -> RichTable:
    rich = RichTable(
        title=title,
        caption=caption,
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title_justify="left",
        caption_justify="left",
    )
    for column in columns:
        rich.add_column(column, justify="left" if column in ("peer", "") else "right", no_wrap=True)
    return rich


def _markdown_table(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rules = ["---", *["--:"] * (len(columns) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (columns, rules, *lines))


def _byte_cells() -> Iterator[list[str]]:
    for row in step_bytes.rows():
        names = ("ring_none_accepted", "ring_all_accepted", "snapshots")
        sizes = (f"{row[name] / 1e6:.2f} MB" for name in names)
        yield [row["pool"], str(row["drafts"]), *sizes, f"{row['ratio']:.2f}"]


def _whole(rates: dict[str, float]) -> dict[str, int]:
    return {name: round(rate) for name, rate in rates.items()}
