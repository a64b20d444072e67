"""The machine and what runs on it."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import signal
import sys
from pathlib import Path


def cpu_model() -> str:
    """The name that the CPU gives itself."""
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def cpus() -> list[int]:
    """The CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def describe(threads: int) -> dict[str, str]:
    """What a reader needs to know of the machine; values that cannot be read are left out."""
    text = {
        "cpu": cpu_model(),
        "cpus": f"{len(cpus())} of {os.cpu_count()}",
        "threads": str(threads),
        "caches": _caches(),
        "governor": _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").strip(),
        "huge pages": _read("/sys/kernel/mm/transparent_hugepage/enabled").strip(),
        "virtual": "yes" if " hypervisor" in _read("/proc/cpuinfo") else "",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "max": _version("max"),
        "numpy": _version("numpy"),
    }
    return {name: value for name, value in text.items() if value}


def can_stop() -> bool:
    """Whether a worker may be stopped: only where it dies with the process that would wake it."""
    return sys.platform == "linux"


def die_with_parent() -> None:
    """Has the kernel end this process when the one that started it ends, on Linux."""
    if can_stop():
        set_death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)


class Load:
    """CPU time of a span by everyone on the machine, and by one process of it."""

    def __init__(self, process: int) -> None:
        self.process = process
        self.total, self.own = _busy_ticks(), _ticks_of(process)

    def foreign(self, seconds: float) -> float:
        """CPUs that others kept busy since this was made, so many seconds ago. Theft by a
        hypervisor counts.
        """
        others = (_busy_ticks() - self.total) - (_ticks_of(self.process) - self.own)
        return max(0.0, others / os.sysconf("SC_CLK_TCK") / seconds)


def _busy_ticks() -> int:
    lines = _read("/proc/stat").splitlines()
    if not lines:
        return 0
    user, nice, system, _idle, _wait, irq, softirq, steal = map(int, lines[0].split()[1:9])
    return user + nice + system + irq + softirq + steal


def _ticks_of(process: int) -> int:
    text = _read(f"/proc/{process}/stat")
    if not text:
        return 0
    fields = text.rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


def _caches() -> str:
    found = []
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        kind, level, size = (_read(index / f).strip() for f in ("type", "level", "size"))
        if kind != "Instruction":
            found.append(f"L{level} {size}")
    return ", ".join(found)


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
