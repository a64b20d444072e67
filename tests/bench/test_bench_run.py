"""The benchmark's workers: what is wrong is not timed, C is right, two trees run side by side."""

from __future__ import annotations

from pathlib import Path

import pytest

from gdn_graph.bench import against, report
from gdn_graph.bench.peers import C
from gdn_graph.bench.run import Bench, Options, Table
from gdn_graph.bench.shapes import Shape

ROOT = Path(__file__).resolve().parents[2]


def short(shapes, peers) -> Options:
    """One short burst a peer."""
    return Options(
        shapes, peers, threads=1, rounds=1, seconds=0, wait=0, cold_bytes=1, limits=False
    )


def tables(shapes, peers, trees=None) -> list[Table]:
    """The tables of a short run."""
    with Bench(short(shapes, peers), trees=trees) as bench:
        return list(bench.run())


def test_a_wrong_peer_is_red_and_not_timed():
    (table,) = tables([Shape("recurrence", 2, 2)], ["specification", "wrong"])
    right, wrong = table.entries
    assert right.status == "timed" and 0 < right.error < 1e-5 and right.best > 0
    assert wrong.status == "red" and "out: error 1.0e-03" in wrong.reason
    assert not wrong.times and not wrong.bursts
    assert [row["status"] for row in report.rows(table)] == ["timed", "red"]


def test_a_peer_that_raises_is_reported():
    (table,) = tables([Shape("recurrence", 1 << 40, 1)], ["specification"])
    assert table.entries[0].status == "failed" and table.entries[0].reason


def test_a_process_ends_with_its_last_table():
    """All of them to the end of a run would not fit the memory of a small machine."""
    shapes = [Shape("recurrence", 1, 1), Shape("recurrence", 1, 2)]
    with Bench(short(shapes, ["specification"])) as bench:
        alive = []
        for table in bench.run():
            assert [e.status for e in table.entries] == ["timed"]
            alive.append("specification" in bench.workers)
    assert alive == [True, False]


def test_the_c_reference_is_right():
    """Whole blocks and cut ones, one token, two layers, and every special number of records."""
    shapes = [
        *(Shape("recurrence", batch, tokens) for batch, tokens in ((2, 3), (1, 1), (1, 9), (1, 4))),
        Shape("recurrence", 1, 2, layers=2),
        *(Shape("fold", 2, records, 2) for records in (1, 2, 3, 4, 5)),
    ]
    entries = [e for table in tables(shapes, list(C)) for e in table.entries]
    reasons = {e.reason for e in entries if e.status == "skipped"}
    if reasons:
        pytest.skip(f"no C here: {', '.join(reasons)}")
    assert {(e.peer, e.status, e.reason) for e in entries} == {(name, "timed", "") for name in C}
    assert all(0 < e.error < 2e-6 for e in entries)


def test_against_the_same_commit_yields_rows():
    if not against.commit():
        pytest.skip("not a git checkout")
    with against.trees("HEAD") as trees:
        now, then = trees
        (table,) = tables([Shape("recurrence", 1, 2)], ["ours_plain", "wrong"], trees)
        assert trees[now] == ROOT and trees[then] != ROOT
        assert (trees[then] / "gdn_graph").is_dir()
    assert not trees[then].exists()
    plain, wrong = report.against_rows(table, now, then)
    assert plain["ratio_min"] > 0 and plain["error"] < 1e-5
    assert "ratio_min" not in wrong and wrong["reason"].count("red") == 2


def test_against_an_unknown_commit():
    with pytest.raises(ValueError, match="against is 'no-such'|needs (a )?git"):
        with against.trees("no-such"):
            pass
