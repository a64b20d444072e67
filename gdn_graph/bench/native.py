"""The C sources of benchmarks/c, compiled with gcc for this machine and cached."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from gdn_graph.library import cache_dir

from .machine import cpu_model
from .peer import Unavailable

# A product that feeds a sum is fused only where gated_delta.c says so; limits.c never says.
_CONTRACT: Final = {"gated_delta": "off", "limits": "fast"}


def source_dir() -> Path:
    """The C sources: inside an installed wheel, or in the checkout of an editable install."""
    package = Path(__file__).resolve().parent.parent
    for path in (package / "_benchmarks" / "c", package.parent / "benchmarks" / "c"):
        if path.is_dir():
            return path
    raise Unavailable(f"the C sources are missing beside {package}; reinstall gdn-graph")


def library(name: str) -> ctypes.CDLL:
    """The shared library of NAME.c, compiled now if it has not been.

    Raises:
        Unavailable: Without gcc, or if it does not compile here (gated_delta.c needs AVX-512).
    """
    compiler = shutil.which("gcc")
    if compiler is None:
        raise Unavailable("gcc is not installed")
    source = source_dir() / f"{name}.c"
    flags = ["-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"]
    flags.append(f"-ffp-contract={_CONTRACT[name]}")
    version = subprocess.run([compiler, "-dumpfullversion"], capture_output=True, text=True).stdout
    key = f"{flags} {version} {platform.machine()} {cpu_model()}".encode()
    digest = hashlib.sha256(key + source.read_bytes()).hexdigest()[:16]
    target = cache_dir() / f"bench-c-{digest}" / f"{name}.so"
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as work:
            built = Path(work) / target.name
            command = [compiler, *flags, str(source), "-o", str(built), "-lm"]
            result = subprocess.run(command, capture_output=True, text=True)
            if result.returncode != 0:
                reason = next((x for x in result.stderr.splitlines() if "error" in x), "")
                raise Unavailable(f"gcc does not compile {source.name} on this machine: {reason}")
            os.replace(built, target)
    return ctypes.CDLL(str(target))
