"""In static roles nothing of the daemon runs on the cores that only decode uses."""

import contextlib
import os
import signal

import psutil
import pytest

from appliance.fleet.placement import available_cores

CORES = available_cores()
ALL = os.sched_getaffinity(0)


def masks(daemon):
    """Where threads of the daemon and of the processes that read for it may run."""
    workers = {each["pid"] for each in daemon.state()["workers"]}
    processes = [psutil.Process(daemon.pid), *psutil.Process(daemon.pid).children(recursive=True)]
    readers = [one.pid for one in processes if one.pid not in workers]
    assert len(readers) > 1
    found = []
    for pid in readers:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            found += [os.sched_getaffinity(int(one)) for one in os.listdir(f"/proc/{pid}/task")]
    return found


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
def test_the_daemon_keeps_off_decodes_core_while_roles_are_static(start_daemon, tiny_llama):
    prefill, decode = CORES[:2]
    place = f"prefill={prefill} decode={decode}"
    daemon = start_daemon("--roles", "static", "--place", place, model=tiny_llama).wait_ready()
    daemon.complete("a", max_tokens=2)  # the tokenizer's processes run, too

    def switch(roles):
        daemon.http.post("/v1/penstock/roles", json={"roles": roles}).raise_for_status()

    def is_off():
        return all(decode not in each and prefill in each for each in masks(daemon))

    def is_everywhere():
        return all(each == ALL for each in masks(daemon))

    daemon.wait_for(is_off)
    for roles in ("colocated", "elastic"):
        switch(roles)
        daemon.wait_for(is_everywhere)
        switch("static")
        daemon.wait_for(is_off)
    before = daemon.pid
    daemon.process.send_signal(signal.SIGUSR2)  # refused if a core of the two were not counted
    daemon.wait_for(lambda: daemon.pid not in (before, daemon.process.pid) or refused(daemon))
    assert not refused(daemon)
    daemon.wait_ready()
    workers = {each["name"]: each["cpus"] for each in daemon.state()["workers"]}
    assert workers == {"prefill": [prefill], "decode": [decode]}
    daemon.wait_for(is_off)
    assert daemon.stop() == 0


def refused(daemon):
    return "Not restarted" in daemon.stderr
