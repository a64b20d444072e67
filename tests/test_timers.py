"""The timer slack of threads, and what it does to MAX's timer thread."""

import ctypes
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gdn_graph import timer_slack

GET_TIMERSLACK = 30


def slack() -> int:
    return ctypes.CDLL(None).prctl(GET_TIMERSLACK, 0, 0, 0, 0)


pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or slack() <= 0, reason="there is no timer slack to be set"
)

TIMER_THREAD = """
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
        try:
            with open(f"/proc/self/task/{thread}/status") as status:
                (line,) = (l for l in status if l.startswith("voluntary_ctxt_switches"))
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
        found[thread] = int(line.split()[1])
    return found

with Graph("g", input_types=[TensorType(DType.float32, [4], DeviceRef.CPU())]) as graph:
    graph.output(graph.inputs[0].tensor + 1)
model = InferenceSession(devices=[CPU()]).load(graph)
threads = wake_ups()
with timer_slack() if sys.argv[1] == "calm" else nullcontext():
    model.execute(Buffer.from_numpy(np.zeros(4, np.float32)))
before = wake_ups()
time.sleep(1)
after = wake_ups()
timer_thread = max(before.keys() & after.keys(), key=lambda thread: after[thread] - before[thread])
try:
    with open(f"/proc/{timer_thread}/timerslack_ns") as file:
        slack = int(file.read())
except PermissionError:  # for another thread than the caller it takes CAP_SYS_NICE
    slack = None
print(int(timer_thread not in threads), after[timer_thread] - before[timer_thread], slack)
"""


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


@pytest.mark.parametrize("seconds", [0, -1, 1.5, float("nan")])
def test_what_it_refuses(seconds):
    with pytest.raises(ValueError, match=f"timer_slack: seconds is {seconds}; need more than 0"):
        timer_slack(seconds).__enter__()


def test_it_nests():
    with timer_slack(1):
        with timer_slack(0.001):
            assert slack() == 1_000_000
        assert slack() == 1_000_000_000


def test_only_the_first_execute_of_a_process_has_it():
    code = """
from gdn_graph.timers import around_execute
import test_timers
for _ in range(2):
    with around_execute():
        print(test_timers.slack())
"""
    here = Path(__file__).parent
    said = subprocess.run(
        [sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True, cwd=here
    )
    assert [int(line) for line in said.stdout.split()] == [5_000_000, slack()]


@pytest.mark.parametrize("how", ["stock", "calm"])
def test_the_timer_thread_of_max_starts_in_the_first_execute(how):
    """Which thread it is shows by its wake-ups; their rate is no test, as other processes' timers
    on the same core end a wait early."""
    said = subprocess.run(
        [sys.executable, "-c", TIMER_THREAD, how], check=True, stdout=subprocess.PIPE, text=True
    )
    is_new, wake_ups, its_slack = said.stdout.split()
    assert int(wake_ups) > 20, "MAX has no such thread any more"
    assert is_new == "1", "it was there before the first execute"
    if its_slack == "None":
        pytest.skip(
            "another thread's timer slack cannot be read here; that it is taken over is tested"
        )
    assert int(its_slack) == {"stock": slack(), "calm": 5_000_000}[how]
