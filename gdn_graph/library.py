"""The compiled kernel library: found, built and cached.

The Mojo sources travel with the package. They are compiled on first use by the mojo that max
brings, which takes seconds, and cached by compiler version and source content: a new release or an
edited source is another library, and an old one is never used by mistake.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Final

from max.graph import default_custom_extensions_scope

CACHE_VARIABLE: Final = "GDN_GRAPH_CACHE_DIR"
_PACKAGE: Final = "gated_delta"
# The module name is baked into the library: it loads under this name only.
_LIBRARY: Final = f"{_PACKAGE}.mojoc"
_ABANDONED_AFTER_S: Final = 3600


def source_dir() -> Path:
    """The Mojo package: inside an installed wheel, or in the checkout of an editable install."""
    here = Path(__file__).resolve().parent
    for path in (here / "_kernels" / _PACKAGE, here.parent / "kernels" / _PACKAGE):
        if (path / "__init__.mojo").is_file():
            return path
    raise FileNotFoundError(
        f"gdn_graph: the Mojo sources are missing beside {here}; reinstall gdn-graph"
    )


def cache_dir() -> Path:
    """Where libraries are kept: $GDN_GRAPH_CACHE_DIR, or gdn-graph in the user's cache folder."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gdn-graph"


def compiler_version() -> str:
    """The version of the mojo that max brings; a library works with exactly this one."""
    return importlib.metadata.version("mojo-compiler")


def library_path() -> Path:
    """Where the library of these sources and this compiler is, or would be."""
    digest = hashlib.sha256()
    sources = source_dir()
    for path in sorted(sources.rglob("*.mojo")):
        digest.update(f"{path.relative_to(sources)}\0".encode())
        digest.update(path.read_bytes() + b"\0")
    return cache_dir() / f"mojo-{compiler_version()}-{digest.hexdigest()[:16]}" / _LIBRARY


@cache
def kernel_library() -> Path:
    """The compiled library, built now if it has not been; for Graph(custom_extensions=[...]).

    Several processes may call this at once: each builds beside the cache and the first to finish
    puts its library in place in one step, so none ever sees a half-written one.

    Returns:
        Path of gated_delta.mojoc. Found once per process: edited sources need a new process.

    Raises:
        RuntimeError: If the compiler fails or the cache folder cannot be written.
    """
    path = library_path()
    if not path.is_file():
        build(path)
    return path


def build(path: Path) -> None:
    """Compiles the sources into path, whose folder must not exist or be complete already."""
    from mojo.run import subprocess_run_mojo

    cache_root = path.parent.parent
    try:
        cache_root.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(cache_root)
        work = Path(tempfile.mkdtemp(prefix="build-", dir=cache_root))
    except OSError as error:
        raise RuntimeError(
            f"gdn_graph: cannot write the kernel cache {cache_root} ({error}); set "
            f"{CACHE_VARIABLE} to a folder that can be written"
        ) from error
    try:
        command = [
            "precompile",
            str(source_dir()),
            "-o",
            str(work / _LIBRARY),
            "--disable-warnings",
        ]
        result = subprocess_run_mojo(command, capture_output=True, text=True)
        if result.returncode != 0:
            raise RuntimeError(
                f"gdn_graph: mojo {compiler_version()} did not compile the kernels in "
                f"{source_dir()}; this package needs max 26.7:\n{result.stderr.strip()}"
            )
        work.chmod(0o755)
        try:
            work.rename(path.parent)
        except OSError:
            # Another process was first. Its library is of the same sources.
            if not path.is_file():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _remove_abandoned(cache_root: Path) -> None:
    """Removes what a killed build left behind."""
    for left in cache_root.glob("build-*"):
        with suppress(FileNotFoundError):  # another process may be removing it too
            if time.time() - left.stat().st_mtime > _ABANDONED_AFTER_S:
                shutil.rmtree(left, ignore_errors=True)


@contextmanager
def overlay() -> Iterator[Path]:
    """Within this context every MAX graph of the process uses this package's ops.

    MAX's own wrappers (max.nn.state_space) and layers then run on these kernels unchanged, on the
    CPU too. It must be open while graphs are built; compiled models keep what they were built with.

    Yields:
        The path of the kernel library.
    """
    path = kernel_library()
    with default_custom_extensions_scope(path):
        yield path
