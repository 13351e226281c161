"""A thread's times are the kernel's; only waits for a core are not a process's own time."""

import os
import resource
import shutil
import signal
import subprocess
import sys
import time

import pytest

from appliance.observe.telemetry.thread_times import (
    ThreadTime,
    has_computed,
    own_s,
    thread_times,
    times_of,
)

LOOP = "print(flush=True)\nwhile True: pass"
ASLEEP = (
    "import threading; print(flush=True); lock = threading.Lock(); lock.acquire()\nlock.acquire()"
)


@pytest.fixture
def run():
    """Start Python code that says one line when it has begun."""
    started = []

    def begun(code):
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        started.append(process)
        process.stdout.readline()
        return process.pid

    yield begun
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def until(condition):
    while not condition():
        time.sleep(0.01)


def state_is(pid, is_runnable):
    return lambda: {each.is_runnable for each in thread_times(pid).values()} == {is_runnable}


def test_the_times_of_a_process_are_its_threads_together():
    cpu_s = sum(each.cpu_s for each in thread_times(os.getpid()).values())
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert 0 < cpu_s <= after.ru_utime + after.ru_stime + 0.1


def test_a_worker_that_has_ended_has_no_times():
    assert times_of([]) == {}


def test_processes_of_a_group_have_their_times_together(run):
    pids = [run(LOOP), run(LOOP)]
    threads = times_of(pids).keys()
    assert all(thread_times(pid).keys() <= threads for pid in pids)
    assert set(pids) <= threads


def test_a_loop_uses_its_time_and_a_lock_or_a_stop_waits_for_no_core(run):
    pid = run(LOOP)
    until(state_is(pid, True))
    first = thread_times(pid)
    until(lambda: has_computed(first, thread_times(pid)))
    os.kill(pid, signal.SIGSTOP)
    until(state_is(pid, False))
    stopped = thread_times(pid)
    assert own_s(stopped, thread_times(pid), 9.0) == 9.0
    assert not has_computed(stopped, thread_times(pid))
    pid = run(ASLEEP)
    until(state_is(pid, False))
    asleep = thread_times(pid)
    assert own_s(asleep, thread_times(pid), 9.0) == pytest.approx(9.0, abs=0.5)


def test_without_schedstat_waits_are_not_reported(tmp_path):
    task = tmp_path / "7" / "task" / "7"
    task.mkdir(parents=True)
    shutil.copy("/proc/self/stat", task / "stat")
    (each,) = thread_times(7, tmp_path).values()
    assert each.waited_s is None
    (task / "schedstat").write_text("1500000000 250000000 9\n")
    assert thread_times(7, tmp_path)[7][1:] == (1.5, 0.25)
    (task / "stat").unlink()
    assert thread_times(7, tmp_path) == {}


RUNNABLE, ASLEEP_THREAD = ThreadTime(True, 0.0, 0.0), ThreadTime(False, 0.0, 0.0)


@pytest.mark.parametrize(
    ("before", "after", "expected_s"),
    [
        (RUNNABLE, RUNNABLE, 0.0),
        (RUNNABLE, RUNNABLE._replace(cpu_s=1.5), 1.5),
        (RUNNABLE._replace(waited_s=None), RUNNABLE._replace(cpu_s=0.5, waited_s=None), 0.5),
        (RUNNABLE, RUNNABLE._replace(cpu_s=0.01, waited_s=1.25), 0.75),
        (ASLEEP_THREAD, RUNNABLE, 2.0),
        (ASLEEP_THREAD, ASLEEP_THREAD, 2.0),
        (ASLEEP_THREAD, ASLEEP_THREAD._replace(waited_s=0.5), 1.5),
        (RUNNABLE, ASLEEP_THREAD._replace(waited_s=7.0), 0.0),
    ],
    ids=[
        *("starved", "shares a core", "shares, unreported", "sleeps between waits"),
        *("woke", "asleep", "waited", "long ago"),
    ],
)
def test_own_time_is_what_was_not_spent_waiting_for_a_core(before, after, expected_s):
    assert own_s({1: before}, {1: after, 2: RUNNABLE}, 2.0) == pytest.approx(expected_s)


def test_who_waits_for_a_starved_thread_waits_with_it():
    before = {1: ASLEEP_THREAD, 2: RUNNABLE}
    assert own_s(before, before, 2.0) == 0.0
