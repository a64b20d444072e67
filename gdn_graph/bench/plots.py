"""The plots of a run. Needs matplotlib, the extra "bench"."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from . import step_bytes
from .peers import C
from .peers_libraries import LIBRARIES
from .peers_ours import OURS
from .run import Report, Table

_OURS_COLORS: Final = ("#0b6e4f", "#3fa34d", "#7b2d8b", "#c06bd0", "#1f6fb2", "#6cb4ee")
_C_COLORS: Final = ("#222222", "#777777", "#444444", "#aaaaaa")
_LIBRARY_COLORS: Final = ("#d1495b", "#edae49", "#b56b45", "#8d99ae", "#e08e79")
_ROLES: Final = {
    "plain, fold, conv": ("ours_plain", "ours_fold", "ours_conv"),
    "verify": ("ours_verify",),
    "plain, fold, bfloat16": ("ours_plain_bf16", "ours_fold_bf16"),
    "verify, bfloat16": ("ours_verify_bf16",),
    "block": ("ours_block",),
    "block verify": ("ours_block_verify",),
    "C": ("c_rec", "c_fold"),
    "C, paced": ("c_rec_paced", "c_fold_paced"),
    "C, block": ("c_blk",),
    "C, block verify": ("c_verify",),
    "best library": tuple(LIBRARIES),
}
"""Peers of different shapes that do the same, by what they are called in a legend."""
_C_MARKS, _OURS_MARK, _LIBRARY_MARK = "sDPX", "o", "^"


def write(report: Report, folder: Path) -> list[Path]:
    """Writes the plots that the report has data for.

    Raises:
        ImportError: Without matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update(
        {
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.color": "#e5e5e5",
            "axes.axisbelow": True,
            "legend.frameon": False,
            "savefig.dpi": 160,
        }
    )
    figures = {
        "time.png": _time(report),
        "limit.png": _limit(report),
        "bytes.png": _bytes(),
    }
    written = []
    for name, figure in figures.items():
        if figure is not None:
            figure.savefig(folder / name, bbox_inches="tight")
            written.append(folder / name)
    return written


def _time(report: Report) -> Any:
    """Time per head-token by batch, a panel a window."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    tables = [t for t in report.tables if t.shape.kind == "recurrence" and t.shape.layers == 1]
    by_tokens: dict[int, list[Table]] = {}
    for table in tables:
        by_tokens.setdefault(table.shape.tokens, []).append(table)
    windows = sorted(tokens for tokens, group in by_tokens.items() if len(group) > 1)
    if not windows:
        return None
    figure, axes = plt.subplots(
        1, len(windows), figsize=(3.1 * len(windows) + 1.6, 4.4), sharey=True, squeeze=False
    )
    lines: dict[str, Any] = {}
    for axis, tokens in zip(axes[0], windows, strict=True):
        group = sorted(by_tokens[tokens], key=lambda t: t.shape.batch)
        for name in _names(group):
            timed = [(t.shape, e.best) for t in group if (e := t.timed(name))]
            batches = [shape.batch for shape, _ in timed]
            times = [best / shape.units for shape, best in timed]
            lines[name] = axis.plot(batches, times, **_style(name))[0]
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks([t.shape.batch for t in group])
        axis.xaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_minor_locator(NullLocator())
        for ticks in (axis.xaxis, axis.yaxis):
            ticks.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
        axis.set_title(f"{tokens} token{'s' if tokens > 1 else ''} a row", loc="left", fontsize=10)
        axis.set_xlabel("rows")
    axes[0][0].set_ylabel("ns per head-token (best of the bursts)")
    order = [name for name in (*OURS, *C, *LIBRARIES) if name in lines]
    figure.legend(
        [lines[name] for name in order], order, loc="center left", bbox_to_anchor=(0.99, 0.5)
    )
    figure.suptitle(
        f"Gated DeltaNet, one layer, {_heads()}: {report.machine['cpu']}, "
        f"{report.machine['threads']} threads",
        x=0.01,
        ha="left",
        fontsize=11,
    )
    figure.tight_layout()
    return figure


def _limit(report: Report) -> Any:
    """Share of what the machine allows: a line a shape, a mark a role."""
    import matplotlib.pyplot as plt

    tables = [t for t in report.tables if t.limits and _names([t])]
    if not tables:
        return None
    figure, axis = plt.subplots(figsize=(7.4, 0.36 * len(tables) + 1.4))
    for role, names in _ROLES.items():
        shares = []
        for row, table in enumerate(tables):
            timed = [e for name in names if (e := table.timed(name)) is not None]
            best = max((table.share(e) or 0.0 for e in timed), default=None)
            if best is not None:
                shares.append((100 * best, len(tables) - row))
        if shares:
            style = _style(names[0]) | {"linestyle": ""}
            axis.plot(*zip(*shares, strict=True), label=role, alpha=0.9, **style)
    axis.set_yticks(range(len(tables), 0, -1), [table.shape.title for table in tables])
    axis.set_xlim(0, 105)
    axis.set_ylim(0.4, len(tables) + 0.6)
    axis.set_xlabel("per cent of the speed that multiply-adds and memory allow each algorithm")
    axis.axvline(100, color="#999999", linewidth=1)
    axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    axis.set_title("Share of the machine's limit", loc="left", fontsize=11)
    return figure


def _bytes() -> Any:
    """Bytes of a step by drafts, ring against snapshots."""
    import matplotlib.pyplot as plt

    rows = list(step_bytes.rows())
    pools = list(dict.fromkeys(row["pool"] for row in rows))
    figure, axes = plt.subplots(1, len(pools), figsize=(7.6, 3.4), sharey=True)
    for axis, pool in zip(axes, pools, strict=True):
        group = [row for row in rows if row["pool"] == pool]
        drafts = [row["drafts"] for row in group]

        def series(name: str, group: Sequence[dict[str, Any]] = group) -> list[float]:
            return [row[name] / 1e6 for row in group]

        axis.plot(drafts, series("snapshots"), color="#d1495b", marker="^")
        axis.fill_between(
            drafts,
            series("ring_none_accepted"),
            series("ring_all_accepted"),
            color="#0b6e4f",
            alpha=0.25,
            linewidth=0,
        )
        axis.plot(drafts, series("ring_all_accepted"), color="#0b6e4f", marker="o")
        for name, text, color in (
            ("snapshots", "a snapshot a token", "#d1495b"),
            ("ring_all_accepted", "ring, all accepted or none", "#0b6e4f"),
        ):
            axis.annotate(
                text,
                (drafts[-1], series(name)[-1]),
                xytext=(0, 9),
                textcoords="offset points",
                ha="right",
                color=color,
            )
        axis.set_title(f"{pool} pool", loc="left", fontsize=10)
        axis.set_xlabel("drafts a step")
        axis.set_xticks(drafts)
    axes[0].set_ylim(0, 1.12 * rows[step_bytes.MAX_DRAFTS - 1]["snapshots"] / 1e6)
    axes[0].set_ylabel("MB moved a step, layer and request")
    figure.suptitle(f"Bytes of a speculative step, {_heads()}", x=0.01, ha="left", fontsize=11)
    figure.tight_layout()
    return figure


def _names(tables: Sequence[Table]) -> list[str]:
    """Peers that are timed in any of the tables; of ours, as they should be run."""
    found = {e.label for t in tables for e in t.entries if e.status == "timed"}
    ours = [name for name in OURS if OURS[name].calm]
    return [name for name in (*ours, *C, *LIBRARIES) if name in found]


def _style(name: str) -> dict[str, Any]:
    style: dict[str, Any] = {"markersize": 5, "linewidth": 1.3}
    for family, colors, marks in (
        (OURS, _OURS_COLORS, _OURS_MARK),
        (C, _C_COLORS, _C_MARKS),
        (LIBRARIES, _LIBRARY_COLORS, _LIBRARY_MARK),
    ):
        if name in family:
            # Peers of one kind of problem stand beside each other, so colours go by their place.
            kind = family[name].kind
            place = [n for n, peer in family.items() if peer.kind == kind].index(name)
            style["color"] = colors[place % len(colors)]
            style["marker"] = marks[place % len(marks)]
    if name in OURS:
        style |= {"linewidth": 2.2, "markersize": 6, "zorder": 3}
    return style


def _heads() -> str:
    from .shapes import HEAD_DIM, NUM_KEY_HEADS, NUM_VALUE_HEADS

    return f"{NUM_KEY_HEADS} key and {NUM_VALUE_HEADS} value heads of {HEAD_DIM} x {HEAD_DIM}"
