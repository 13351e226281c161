"""The watchdog and real processes: one that is starved keeps its place, one that hangs is found."""

import os
import signal
import subprocess
import sys
import time

import pytest

from appliance.observe.telemetry import progress
from appliance.observe.telemetry.progress import Watchdog, WorkerReading
from appliance.observe.telemetry.thread_times import thread_times

LOOP = "print(flush=True)\nwhile True: pass"
PATIENCE_S = 2.0
LOOK_S, STARVED_S, LONGEST_S = 0.1, 3.0, 120.0


@pytest.fixture
def run(monkeypatch):
    """Start endless loops on one core; the watchdog has little patience."""
    monkeypatch.setattr(progress, "MIN_PATIENCE_S", PATIENCE_S)
    core, started = min(os.sched_getaffinity(0)), []

    def begun(policy):
        process = subprocess.Popen([sys.executable, "-c", LOOP], stdout=subprocess.PIPE)
        started.append(process)
        process.stdout.readline()
        os.sched_setaffinity(process.pid, {core})
        os.sched_setscheduler(process.pid, policy, os.sched_param(0))
        return process

    yield begun
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def is_found(pid, seconds):
    """Say whether the watchdog would end a worker that sends and beats nothing for so long."""
    watchdog, end_s = Watchdog(), time.monotonic() + seconds
    last_s = time.monotonic()
    while last_s < end_s:
        time.sleep(LOOK_S)
        now_s = time.monotonic()
        reading = WorkerReading(pid, 0, True, 1.0, thread_times(pid), has_beats=True)
        watchdog.look({"prefill": reading}, now_s - last_s)
        if watchdog.hung:
            return True
        last_s = now_s
    assert not watchdog.stalled, "it gets new work all the time"
    return False


def test_a_starved_process_keeps_its_place_and_one_that_hangs_is_found(run):
    starved, hung = run(os.SCHED_IDLE), run(os.SCHED_OTHER)
    assert not is_found(starved.pid, STARVED_S), "it has no core"
    assert is_found(hung.pid, LONGEST_S), "an endless loop"
    starved.send_signal(signal.SIGSTOP)
    assert is_found(starved.pid, LONGEST_S), "a stop"
