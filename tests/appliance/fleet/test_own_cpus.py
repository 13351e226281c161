"""A process keeps off CPUs with all its threads and its readers, and still counts all of them."""

import os
import subprocess
import sys
import threading

import psutil
import pytest

from appliance.fleet.own_cpus import OWN_CPUS, OwnCpus
from appliance.fleet.placement import available_cores
from appliance.fleet.scopes import machine_scope

ALL = frozenset(os.sched_getaffinity(0))
LAST = frozenset({max(ALL)})

pytestmark = pytest.mark.skipif(len(ALL) < 2, reason="needs two CPUs")


@pytest.fixture
def own():
    yield OWN_CPUS
    OWN_CPUS.keep_off(frozenset(), None)


@pytest.fixture
def reader():
    """A process with a child."""
    with subprocess.Popen(["sh", "-c", "sleep 60 & echo; wait"], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        yield process.pid
        for one in [*psutil.Process(process.pid).children(), psutil.Process(process.pid)]:
            one.kill()


def masks(pid):
    """Where the threads of a process may run."""
    return {frozenset(os.sched_getaffinity(int(one))) for one in os.listdir(f"/proc/{pid}/task")}


def in_new_thread(call):
    found = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


def test_all_threads_and_readers_keep_off_and_come_back(own, reader):
    children = [one.pid for one in psutil.Process(reader).children()]
    assert len(children) == 1
    for cpus in (LAST, frozenset()):
        own.keep_off(cpus, reader)
        for pid in (os.getpid(), reader, *children):
            assert masks(pid) == {ALL - cpus}
        assert in_new_thread(lambda: os.sched_getaffinity(0)) == ALL - cpus


def test_the_machine_has_as_many_cores_as_before(own):
    before = available_cores(), machine_scope()
    own.keep_off(LAST, None)
    assert (available_cores(), machine_scope()) == before
    assert in_new_thread(own.usable) == ALL


def test_a_process_started_for_the_next_daemon_has_all(own):
    own.keep_off(LAST, None)
    code = [sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"]
    with own.all_in_use():
        found = subprocess.run(code, capture_output=True, text=True, check=True).stdout
    assert found.strip() == str(sorted(ALL))
    assert masks(os.getpid()) == {ALL - LAST}


def test_a_process_never_keeps_off_all(own):
    own.keep_off(ALL, None)
    assert masks(os.getpid()) == {ALL}


def test_a_refusal_leaves_the_count_right(monkeypatch):
    def refuse(*_):
        raise PermissionError

    own = OwnCpus()
    with monkeypatch.context() as patch:
        patch.setattr(os, "sched_setaffinity", refuse)
        with pytest.raises(PermissionError):
            own.keep_off(LAST, None)
        with own.all_in_use():
            assert own.usable() == ALL
