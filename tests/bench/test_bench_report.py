"""The benchmark's arithmetic, on times that are made up."""

from __future__ import annotations

import csv
import json

import pytest

from gdn_graph.bench import command, report
from gdn_graph.bench.native import source_dir
from gdn_graph.bench.run import Entry, Options, Report, Table
from gdn_graph.bench.shapes import Shape, least_work

SHAPE = Shape("recurrence", 8, 4)
RATES = {"multiply_add": 117.5e9, "read": 51e9, "update": 90e9, "copy": 60e9}


def entry(label: str, *bursts: list[int], foreign: float = 0.0) -> Entry:
    times = [time for burst in bursts for time in burst]
    return Entry(
        label,
        error=1e-7,
        times=times,
        bursts=[min(burst) for burst in bursts],
        foreign=[foreign] * len(bursts),
    )


@pytest.fixture
def table() -> Table:
    # The machine runs at half speed in the last two rounds.
    return Table(
        SHAPE,
        [
            entry("c_rec", [1000_000, 1200_000], [2000_000], [2000_000]),
            entry("c_rec_paced", [700_000], [1400_000], [1400_000]),
            entry("ours_plain", [800_000, 900_000], [1500_000], [1500_000], foreign=0.5),
            Entry("ours_block", "skipped", "no such kernel"),
            Entry("ours_verify", "red", "out: error 1e-03, at most 2e-05", 1e-3),
        ],
        [RATES, {name: rate / 2 for name, rate in RATES.items()}],
    )


def test_ratios_by_hand(table):
    rows = {row["peer"]: row for row in report.rows(table)}
    assert list(rows)[:3] == ["c_rec_paced", "ours_plain", "c_rec"]
    row = rows["ours_plain"]
    assert row["min_us"] == 800 and row["median_us"] == 1200
    assert row["ns_per_unit"] == 800_000 / (8 * 4 * 32)
    assert (row["base"], row["twin"]) == ("c_rec", "c_rec_paced")
    assert row["ratio_min"] == 0.8
    assert row["ratio_median"] == 1200 / 1600
    assert row["ratio_by_round"] == 0.75
    assert row["twin_ratio"] == 8 / 7
    assert row["disturbed"] == 3 and rows["c_rec"]["disturbed"] == 0
    assert row["limit_share"] == pytest.approx(16 * 8 * 32 * 128**2 / 117.5e9 / 800e-6)
    assert "min_us" not in rows["ours_verify"] and "min_us" not in rows["ours_block"]


@pytest.mark.parametrize(
    ("algorithm", "shape", "nanoseconds"),
    [
        ("exact", Shape("recurrence", 8, 1), 1456),
        ("exact", SHAPE, 558),
        ("block", SHAPE, 453),
        ("block verify", SHAPE, 321),
        ("fold", Shape("fold", 8, 4, 4), 1456),
    ],
)
def test_least_work_against_known_floors(algorithm, shape, nanoseconds):
    """Floors that were worked out by hand for a machine of these rates."""
    seconds = least_work(algorithm, shape).seconds(RATES)
    assert seconds * 1e9 / shape.units == pytest.approx(nanoseconds, rel=0.002)


def test_a_bfloat16_pool_moves_half_the_bytes():
    shape = Shape("recurrence", 8, 1)
    full, half = (least_work("exact", shape, size) for size in (4, 2))
    assert half.moved * 2 == full.moved and half.slots == full.slots


def test_files(table, tmp_path):
    made = Report({"cpu": "a CPU", "threads": "2"}, Options([SHAPE], ["c_rec"], 2), [table])
    report.write(made, tmp_path)
    lines = list(csv.DictReader((tmp_path / "bench.csv").open()))
    assert [line["peer"] for line in lines] == [row["peer"] for row in report.rows(table)]
    assert lines[0]["ratio_min"] == "0.7"
    read = json.loads((tmp_path / "bench.json").read_text())
    assert read["machine"]["cpu"] == "a CPU"
    assert read["tables"][0]["entries"][0]["burst_ns"] == [700_000, 1400_000, 1400_000]
    text = (tmp_path / "README.md").read_text()
    assert "| ours_plain | 800.0 | 1200.0 | 781 | 0.80 | 0.75 | 0.75 | 1.14 |" in text
    assert "- ours_block skipped: no such kernel" in text
    assert "multiply-adds 59 to 118 G/s" in text


def test_plots(table, tmp_path):
    pytest.importorskip("matplotlib")
    from gdn_graph.bench import plots

    other = Table(Shape("recurrence", 1, 4), [entry("ours_plain", [100_000])], [RATES])
    made = Report({"cpu": "a CPU", "threads": "2"}, Options([SHAPE], [], 2), [table, other])
    assert [path.name for path in plots.write(made, tmp_path)] == [
        "time.png",
        "limit.png",
        "bytes.png",
    ]


def test_choices():
    known = ["c_rec", "ours_plain", "ours_fold"]
    assert command.choose("peers", "ours_*, c_rec", known) == known
    assert command.choose("peers", "wrong", known, ["wrong"]) == ["wrong"]
    with pytest.raises(ValueError, match="--peers has 'wr\\*', which matches nothing"):
        command.choose("peers", "c_rec,wr*", known, ["wrong"])


def test_the_c_sources_are_found():
    assert {path.name for path in source_dir().iterdir()} == {"gated_delta.c", "limits.c"}
