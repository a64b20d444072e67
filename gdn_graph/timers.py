"""MAX's timer thread on machines of few cores."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from itertools import count
from typing import Final

_PR_SET_TIMERSLACK: Final = 29
_PR_GET_TIMERSLACK: Final = 30


@contextmanager
def timer_slack(seconds: float = 0.005) -> Iterator[None]:
    """Lets timed waits of threads started inside end late, so that MAX's timer thread wakes less.

        with gdn_graph.timer_slack():
            model.execute(*inputs)  # the first execute of the process

    The first execute starts a thread that waits for 100 microseconds over and over, also while
    nothing runs. Its 5,500 wake-ups a second take a tenth of a core from the kernels: on two cores
    a T = 4 recurrence is 5 to 10 % faster without them, on many cores nobody will notice.

    On Linux a thread's timed waits may end late by its timer slack, 50 microseconds unless it was
    set, and a new thread takes over the slack of the one that starts it. Inside this context the
    calling thread has a larger one, so a thread that it starts wakes some 200 times a second.
    Threads that run already keep theirs. Where there is no slack to be set (other systems, a
    sandbox that forbids it) this does nothing. Do not hold it across an await: it is the thread's.

    Args:
        seconds: How late a wait of the threads started inside may end.

    Raises:
        ValueError: If that is not above 0 and at most 1.
    """
    if not 0 < seconds <= 1:
        raise ValueError(f"timer_slack: seconds is {seconds}; need more than 0, and 1 at most")
    before = _prctl()(_PR_GET_TIMERSLACK, 0, 0, 0, 0)  # 0 or less where there is none to be set
    if before > 0:
        _prctl()(_PR_SET_TIMERSLACK, max(int(seconds * 1e9), 1), 0, 0, 0)
    try:
        yield
    finally:
        if before > 0:
            _prctl()(_PR_SET_TIMERSLACK, before, 0, 0, 0)


_executes: Final = count()


def around_execute() -> AbstractContextManager[None]:
    """For every execute of this package: timer_slack() around the first, nothing later on."""
    return timer_slack() if next(_executes) == 0 else nullcontext()


@cache
def _prctl() -> Callable[..., int]:
    if not sys.platform.startswith("linux"):
        return lambda *_: 0
    prctl = ctypes.CDLL(None).prctl
    prctl.argtypes = [ctypes.c_int, *4 * [ctypes.c_ulong]]
    prctl.restype = ctypes.c_int
    return prctl
