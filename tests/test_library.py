"""Building and caching the kernel library: at once by several processes, killed, unwritable."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gdn_graph import kernel_library, library

_BUILD = "from gdn_graph import kernel_library; print(kernel_library())"


def process(cache: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _BUILD],
        env={**os.environ, library.CACHE_VARIABLE: str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(build: subprocess.Popen[str]) -> Path:
    out, err = build.communicate(timeout=300)
    assert build.returncode == 0, err
    return Path(out.split()[-1])


def test_several_processes_build_at_once(tmp_path):
    builds = [process(tmp_path) for _ in range(3)]
    appeared: list[Path] = []
    deadline = time.monotonic() + 300
    while not appeared and time.monotonic() < deadline:
        time.sleep(0.001)
        appeared = list(tmp_path.glob(f"mojo-*/{kernel_library().name}"))
    at_first_sight = appeared[0].read_bytes()
    paths = {finish(build) for build in builds}
    assert paths == set(appeared)
    assert appeared[0].read_bytes() == at_first_sight, "seen half-written, or replaced"
    assert [p.name for p in tmp_path.iterdir()] == [appeared[0].parent.name], "no work is left"


def test_a_killed_build_leaves_nothing_that_breaks_the_next(tmp_path):
    build = process(tmp_path)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("build-*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    build.send_signal(signal.SIGKILL)
    build.communicate(timeout=60)
    left = list(tmp_path.glob("build-*"))
    assert left, "the build was to be killed at work"
    assert finish(process(tmp_path)).is_file()
    hour_ago = time.time() - 2 * 3600
    for work in left:
        os.utime(work, (hour_ago, hour_ago))
    library._remove_abandoned(tmp_path)
    assert not list(tmp_path.glob("build-*"))


def test_another_source_or_compiler_is_another_library(tmp_path, monkeypatch):
    sources = tmp_path / "gated_delta"
    sources.mkdir()
    (sources / "__init__.mojo").write_text("# one\n")
    monkeypatch.setattr(library, "source_dir", lambda: sources)
    first = library.library_path()
    (sources / "__init__.mojo").write_text("# two\n")
    second = library.library_path()
    monkeypatch.setattr(library, "compiler_version", lambda: "9.9.9")
    assert len({first, second, library.library_path()}) == 3


def test_sources_that_do_not_compile(tmp_path, monkeypatch):
    sources = tmp_path / "gated_delta"
    sources.mkdir()
    (sources / "__init__.mojo").write_text("def broken(:\n")
    monkeypatch.setattr(library, "source_dir", lambda: sources)
    monkeypatch.setenv(library.CACHE_VARIABLE, str(tmp_path / "cache"))
    with pytest.raises(RuntimeError, match="did not compile the kernels"):
        library.build(library.library_path())
    assert not list((tmp_path / "cache").iterdir())


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv(library.CACHE_VARIABLE, str(blocked / "cache"))
    with pytest.raises(RuntimeError, match=f"cannot write .* set {library.CACHE_VARIABLE}"):
        library.build(library.library_path())


def test_the_library_is_found_without_mojo_on_the_path(tmp_path):
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
        library.CACHE_VARIABLE: str(tmp_path / "cache"),
    }
    result = subprocess.run(
        [sys.executable, "-c", _BUILD],
        env=environment,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.split()[-1]).is_file()
