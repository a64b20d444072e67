"""The timer slack of threads, and what it does to MAX's timer thread."""

import ctypes
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from gdn_graph import timer_slack

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="timer slack is Linux's")

GET_TIMERSLACK = 30

WAKE_UPS = """
import os, sys, time
from contextlib import nullcontext
import numpy as np
from gdn_graph import timer_slack
from max.driver import CPU, Buffer
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType

def wake_ups():
    found = {}
    for thread in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{thread}/status") as status:
            (line,) = (l for l in status if l.startswith("voluntary_ctxt_switches"))
        found[thread] = int(line.split()[1])
    return found

with Graph("g", input_types=[TensorType(DType.float32, [4], DeviceRef.CPU())]) as graph:
    graph.output(graph.inputs[0].tensor + 1)
model = InferenceSession(devices=[CPU()]).load(graph)
with timer_slack() if sys.argv[1] == "calm" else nullcontext():
    model.execute(Buffer.from_numpy(np.zeros(4, np.float32)))
before = wake_ups()
time.sleep(1)
print(max(count - before.get(thread, 0) for thread, count in wake_ups().items()))
"""


def slack() -> int:
    return ctypes.CDLL(None).prctl(GET_TIMERSLACK, 0, 0, 0, 0)


def slack_of_a_new_thread() -> int:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(slack).result()


def test_threads_started_inside_take_it_over():
    before = slack()
    with timer_slack(0.002):
        assert slack_of_a_new_thread() == 2_000_000
    assert slack() == before == slack_of_a_new_thread()


def test_it_ends_when_the_body_raises():
    before = slack()
    with pytest.raises(KeyError), timer_slack():
        raise KeyError
    assert slack() == before


def test_it_must_be_positive():
    with pytest.raises(ValueError, match="timer_slack: seconds is 0; need more than 0"):
        timer_slack(0).__enter__()


def test_an_idle_max_wakes_less_often():
    """Left as it comes, MAX's timer thread wakes some 5,500 times a second: that is the control."""
    stock, calm = (
        int(
            subprocess.run(
                [sys.executable, "-c", WAKE_UPS, how], check=True, capture_output=True, text=True
            ).stdout
        )
        for how in ("stock", "calm")
    )
    assert stock > 500, "MAX has no such thread any more: timer_slack has nothing left to do"
    assert calm < stock / 4
