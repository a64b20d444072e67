"""The command line as a user runs it: exit status, JSON, one-line errors."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from gdn_graph import demo


def gdn_graph(*arguments: str, timeout: int = 400) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from gdn_graph.cli import main; main()", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@pytest.fixture(scope="module")
def result() -> dict:
    run = gdn_graph("demo", "--rounds", "3", "--json")
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_demo_ends_equal(result):
    assert result["equal"]
    assert len(result["rounds"]) == 3
    for r in result["rounds"]:
        assert r["equal"] and not r["unequal"]
        assert 0 < r["error"] < 2e-5
        assert r["verify_s"] > 0 and r["fold_s"] > 0
        for window, kept in zip(r["window"], r["accepted"], strict=True):
            assert 1 <= kept <= window
    kept = [k for r in result["rounds"] for k in r["accepted"]]
    assert len(set(kept)) > 1, "some drafts are accepted and some are not"


def test_demo_bytes_are_those_of_the_geometry(result):
    """By hand, for the first round: 2 layers of 6 heads of 32 x 24, records of 32 + 3 * 25."""
    state, record = 6 * 32 * 24 * 4, 2 * (32 + 3 * 25) * 4
    r = result["rounds"][0]
    moved = snapshots = 0
    for window, kept in zip(r["window"], r["accepted"], strict=True):
        if window > 4:
            moved, snapshots = moved + 2 * state, snapshots + 2 * state
        else:
            moved += 3 * state + (window + kept) * record
            snapshots += (1 + window) * state
    assert (r["bytes_moved"], r["snapshot_bytes"]) == (2 * moved, 2 * snapshots)


def test_demo_notices_a_broken_fold(monkeypatch):
    """The control: a fold that is left out is not equal, and the exit status says so."""
    from typer.testing import CliRunner

    from gdn_graph.cli import app

    real = demo.Demo._round

    def sabotaged(self, number):
        self.plain_state.data[0, 0, 0, 0] += 1
        return real(self, number)

    monkeypatch.setattr(demo.Demo, "_round", sabotaged)
    run = CliRunner().invoke(app, ["demo", "--rounds", "1"])
    assert run.exit_code == 1
    output = " ".join(run.output.split())  # wrapped at the width of any terminal
    assert "NOT EQUAL" in output and "recurrent state" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--geometry", "llama"], "geometry is 'llama'; need one of qwen3.5-27b, qwen3-next, tiny"),
        (["--dtype", "int8"], "dtype is 'int8'; need one of float32"),
        (["--rounds", "0"], "rounds is 0; need at least 1"),
        (["--drafts", "4", "--ring-len", "4"], "drafts is 4; need 0 to 3"),
        (["--value-heads", "5"], "num_value_heads is 5; need a multiple of num_key_heads, 2"),
    ],
)
def test_a_mistake_is_one_line(arguments, message):
    run = gdn_graph("demo", *arguments)
    assert run.returncode == 2
    assert run.stderr.startswith("gdn-graph: ") and run.stderr.count("\n") == 1
    assert message in run.stderr


def test_doctor():
    run = gdn_graph("doctor", "--json")
    report = json.loads(run.stdout)
    assert run.returncode == 0 and report["good"]
    found = {f["what"]: f for f in report["findings"]}
    assert found["max"]["found"].startswith("26.7.")
    assert "mojo" in found["compiler"]["found"]


def test_build_finds_what_is_built():
    run = gdn_graph("build", "--json")
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["path"].endswith("gated_delta.mojoc")
