"""MAX's timer thread on machines of few cores."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_PR_SET_TIMERSLACK: Final = 29
_PR_GET_TIMERSLACK: Final = 30


@contextmanager
def timer_slack(seconds: float = 0.005) -> Iterator[None]:
    """Run the first execute of a process in this, and a thread of MAX stops costing 5 to 10 %.

    The first execute starts a thread that waits for 100 microseconds over and over, also while
    nothing runs. Its 5,500 wake-ups a second take a tenth of a core from the kernels: on two cores
    a T = 4 recurrence is 5 to 10 % faster without them, on many cores nobody will notice.

    On Linux a thread's timed waits may end late by its timer slack, 50 microseconds unless it was
    set, and a new thread takes over the slack of the one that starts it. Inside this context the
    calling thread has a larger one, so a thread that it starts wakes some 200 times a second. The
    work that MAX hands from thread to thread does not wait for a timer. Threads that run already
    keep theirs, other systems than Linux have no such thing, and there this does nothing.

        with gdn_graph.timer_slack():
            model.execute(*inputs)

    Args:
        seconds: How late a wait of the threads started inside may end.

    Raises:
        ValueError: If that is not above 0.
    """
    if not seconds > 0:
        raise ValueError(f"timer_slack: seconds is {seconds}; need more than 0")
    before = _get()
    if before > 0:
        _set(max(int(seconds * 1e9), 1))
    try:
        yield
    finally:
        if before > 0:
            _set(before)


def _get() -> int:
    """The calling thread's timer slack in ns; 0 or less where there is none to be set."""
    return _prctl(_PR_GET_TIMERSLACK, 0)


def _set(ns: int) -> None:
    _prctl(_PR_SET_TIMERSLACK, ns)


def _prctl(option: int, value: int) -> int:
    if not sys.platform.startswith("linux"):
        return 0
    return int(ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0))
