"""A run as tables on the terminal, as CSV and as JSON."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table as RichTable

from .peers import HIDDEN, PEERS
from .peers_ours import OURS
from .run import Entry, Report, Table

_LIMIT_UNITS = {"multiply_add": ("multiply-adds", 1e9, "G/s")}


def peer_of(entry: Entry) -> str:
    """The name of an entry without its tree."""
    return entry.peer.partition("@")[0]


def rows(table: Table) -> Iterator[dict[str, Any]]:
    """One flat row an entry, fastest first and what was not timed last."""
    base = table.base
    ranked = sorted(table.entries, key=lambda e: e.best if e.times else 1 << 62)
    for entry in ranked:
        shape = table.shape
        row: dict[str, Any] = {"shape": shape.name, **shape.as_dict(), "peer": entry.peer}
        row |= {"status": entry.status, "reason": entry.reason, "error": entry.error}
        if entry.status == "timed":
            twin = table.timed({**PEERS, **HIDDEN}[peer_of(entry)].twin)
            share = table.share(entry)
            row |= {
                "min_us": entry.best / 1e3,
                "median_us": entry.median / 1e3,
                "ns_per_unit": entry.best / shape.units,
                "unit": shape.unit,
                "base": base.peer if base else "",
                "ratio_min": entry.best / base.best if base else None,
                "ratio_median": entry.median / base.median if base else None,
                "twin": twin.peer if twin else "",
                "twin_ratio": entry.best / twin.best if twin else None,
                "limit_share": share,
                "calls": len(entry.times),
                "bursts": len(entry.bursts),
                "disturbed": entry.disturbed,
                "discarded": entry.discarded,
                "foreign_cpus": sum(entry.foreign) / len(entry.foreign),
            }
        yield row


def render(table: Table) -> RichTable:
    """The table for a terminal."""
    base = table.base.peer if table.base else "?"
    rich = RichTable(
        title=f"{table.shape.name}: {table.shape.title}",
        caption=_limits(table),
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title_justify="left",
        caption_justify="left",
    )
    rich.add_column("peer", no_wrap=True)
    heads = ("min us", "median", f"ns/{table.shape.unit}", f"x {base}", "median", "x C twin")
    for head in (*heads, "of limit", "error"):
        rich.add_column(head, justify="right")
    rich.add_column("", no_wrap=False)
    for row in rows(table):
        name = row["peer"]
        style = "bold" if name.partition("@")[0] in OURS else ""
        if row["status"] != "timed":
            color = "yellow" if row["status"] == "skipped" else "red"
            rich.add_row(name, *[""] * 7, _error(row["error"]), f"[{color}]{row['status']}[/]")
            continue
        note = ""
        if row["disturbed"]:
            note = f"[yellow]{row['disturbed']} of {row['bursts']} bursts disturbed[/]"
        rich.add_row(
            name,
            f"{row['min_us']:.1f}",
            f"{row['median_us']:.1f}",
            f"{row['ns_per_unit']:.3g}"
            if row["ns_per_unit"] < 100
            else f"{row['ns_per_unit']:.0f}",
            _ratio(row["ratio_min"]),
            _ratio(row["ratio_median"]),
            _ratio(row["twin_ratio"]),
            "" if row["limit_share"] is None else f"{row['limit_share']:.0%}",
            _error(row["error"]),
            note,
            style=style,
        )
    return rich


def reasons(table: Table) -> list[str]:
    """Why entries were not timed, a line each."""
    return [f"{e.peer} {e.status}: {e.reason}" for e in table.entries if e.status != "timed"]


def write_csv(report: Report, path: Path) -> None:
    """One line an entry of every table."""
    lines = [row for table in report.tables for row in rows(table)]
    names = list(dict.fromkeys(name for line in lines for name in line))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, restval="")
        writer.writeheader()
        for line in lines:
            writer.writerow({k: _short(v) for k, v in line.items()})


def as_dict(report: Report) -> dict[str, Any]:
    """Everything but the single times, for JSON."""
    options = asdict(report.options)
    options["shapes"] = [shape.name for shape in report.options.shapes]
    return {
        "machine": report.machine,
        "versions": report.versions,
        "options": options,
        "seconds": round(report.seconds, 1),
        "tables": [
            {
                "shape": table.shape.name,
                "title": table.shape.title,
                "limits": {name: round(rate) for name, rate in table.limits.items()},
                "entries": [
                    row | {"burst_ns": entry.bursts, "burst_foreign_cpus": entry.foreign}
                    for row in rows(table)
                    for entry in table.entries
                    if entry.peer == row["peer"]
                ],
            }
            for table in report.tables
        ],
    }


def write_json(report: Report, path: Path) -> None:
    path.write_text(json.dumps(as_dict(report), indent=1) + "\n")


def _limits(table: Table) -> str:
    if not table.limits:
        return ""
    parts = []
    for name, rate in table.limits.items():
        label, scale, unit = _LIMIT_UNITS.get(name, (name.replace("_", " "), 1e9, "GB/s"))
        parts.append(f"{label} {rate / scale:.0f} {unit}")
    return "limits: " + ", ".join(parts)


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _error(value: float | None) -> str:
    return "" if value is None else f"{value:.0e}"


def _short(value: Any) -> Any:
    return f"{value:.5g}" if isinstance(value, float) else value
