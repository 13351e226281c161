"""A sample of the sweep, and what it stands on; `python -m tests.sweep` is all of it."""

import asyncio
import gc
import socket
import subprocess
import sys
import threading

import pytest

from appliance.observe.log.writer import RequestLog
from engine.errors import ConfigError
from tests.sweep import __main__
from tests.sweep.machine import Machine
from tests.sweep.planted import BUGS, ROOT
from tests.sweep.scenarios import SCENARIOS
from tests.sweep.virtual_loop import Process, VirtualLoop, virtual_time

NUM_RUNS = 3
NUM_GROUPS = 2
LONGEST_S = 600
GROUPS = [list(SCENARIOS)[start::NUM_GROUPS] for start in range(NUM_GROUPS)]


@pytest.mark.parametrize("names", GROUPS, ids=lambda names: names[0])
def test_no_client_notices_what_fails(names):
    command = [sys.executable, "-m", "tests.sweep", *names, "--sample", str(NUM_RUNS)]
    command += ["--jobs", "1"]
    swept = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=LONGEST_S
    )
    assert swept.returncode == 0, swept.stdout + swept.stderr
    num_runs = len(names) * NUM_RUNS
    assert f"{num_runs} runs, 0 failures" in swept.stdout


@pytest.mark.parametrize("place", ["__init__", "start_run"])
def test_no_client_notices_that_the_logs_disk_is_full_when_the_daemon_dies(
    place, monkeypatch, tmp_path
):
    use = getattr(RequestLog, place)

    def refuse(log, *args, **options):
        path, num_refused = args[0] if args else log.path, len(list(tmp_path.iterdir()))
        if path.with_suffix(".open").exists() and num_refused < 3:  # a dead daemon's
            (tmp_path / str(num_refused)).touch()
            raise ConfigError("database or disk is full")
        return use(log, *args, **options)

    monkeypatch.setattr(RequestLog, place, refuse)
    run = __main__.Run("alias", 1)
    with __main__._pool(1) as pool:
        calm = pool.apply(__main__.execute, (run,))
        middle = (calm.num_at_ready + calm.num_events) // 2
        killed = run._replace(faults=(__main__.Fault(middle, "daemon"),))
        seen = pool.apply(__main__.execute, (killed,))
    assert __main__.differences(calm, seen) == []
    assert len(list(tmp_path.iterdir())) == 3


def threads_left_by(run):
    problems = __main__.execute(run).problems
    return len(problems), [each.name for each in threading.enumerate()]


def test_no_client_notices_that_a_daemon_dies_amid_preparing_what_a_dead_one_had_admitted(
    monkeypatch, tmp_path
):
    read = Machine._read

    def noted(machine, job, *args):
        if job == "render" or job == "constraint":
            (tmp_path / str(machine.loop.num_events + 1)).touch()
        return read(machine, job, *args)

    def execute(*deaths):
        for path in tmp_path.iterdir():
            path.unlink()
        faults = tuple(__main__.Fault(at, "daemon") for at in deaths)
        seen = pool.apply(__main__.execute, (run._replace(faults=faults),))
        assert seen.num_faults == len(deaths)
        return seen, sorted(int(path.name) for path in tmp_path.iterdir())

    monkeypatch.setattr(Machine, "_read", noted)
    run = __main__.Run("every api", 1)
    with __main__._pool(1) as pool:
        calm, prepared = execute()
        middle = (max(prepared) + calm.num_events) // 2
        _, prepared_again = execute(middle)
        again = [at for at in prepared_again if at > middle]
        assert len(again) >= 3
        for deaths in ((prepared[-1],), *((middle, at) for at in again[:3])):
            assert __main__.differences(calm, execute(*deaths)[0]) == []


def test_a_failed_run_leaves_no_thread_that_a_fork_could_interrupt(monkeypatch):
    def fail(*_):
        raise ConfigError("it fails")

    monkeypatch.setattr(__main__.Machine, "_quiet", fail)
    with __main__._pool(1) as pool:
        num_problems, names = pool.apply(threads_left_by, (__main__.Run("alias", 1),))
    assert num_problems == 1
    assert "request-log" not in names


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_replaces_one_place(name):
    bug = BUGS[name]
    assert (ROOT / bug.file).read_text().count(bug.right) == 1
    assert set(bug.scenarios) <= set(SCENARIOS)


def test_a_failure_is_shrunk_to_the_fewest_faults_and_calls(monkeypatch):
    """Here a run fails if decode dies at event 30 or later while `whole` is answered."""

    def execute(run):
        names = [call.name for call in __main__.calls_of(run)]
        num_events = 20 * len(names)
        killed_at = [fault.at for fault in run.faults if fault.what == "decode"]
        fails = "whole" in names and any(30 <= at <= num_events for at in killed_at)
        problems = ["it fails"] if fails else []
        return __main__.Seen(run, num_at_ready=5, num_events=num_events, problems=problems)

    class Here:
        def apply(self, call, args):
            return call(*args)

        def imap(self, call, runs, chunksize):
            return map(call, runs)

    monkeypatch.setattr(__main__, "execute", execute)
    faults = __main__.Fault(12, "prefill"), __main__.Fault(45, "decode")
    shrunk, found = __main__.shrink(Here(), __main__.Run("alias", 1, faults), ["it fails"])
    assert found == ["it fails"]
    assert [fault.what for fault in shrunk.faults] == ["decode"]
    assert "whole" in shrunk.calls
    assert len(shrunk.calls) == 2  # one call has 20 events, too few
    line = "python -m tests.sweep 'alias' --seed 1 --at {} --fault decode --calls '{}'"
    assert str(shrunk) == line.format(shrunk.faults[0].at, ",".join(shrunk.calls))


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_killed_process_does_nothing_any_more(is_killed):
    """Its timers, tasks, sockets and threads are deaf; left alone, each of them does its work."""
    loop, process, done = VirtualLoop(1, lambda *_: None), Process("any"), []
    ours, theirs = socket.socketpair()

    async def waits():
        try:
            await asyncio.sleep(2)
        finally:
            done.append("unwound")

    async def calls_a_thread():
        await loop.run_in_executor(None, done.append, "thread")

    coroutines = [waits(), calls_a_thread()]

    async def kill_and_look():
        tasks = [process.run(loop.create_task, coroutine) for coroutine in coroutines]
        process.run(loop.call_later, 2, done.append, "timer")
        process.run(loop.add_reader, ours, done.append, "socket")
        await asyncio.sleep(0)
        process.is_dead = is_killed
        theirs.send(b"1")
        for _ in range(3):
            await asyncio.sleep(0)
        loop.remove_reader(ours)
        await asyncio.sleep(1)
        tasks[0].cancel()
        await asyncio.sleep(2)
        gc.collect()
        for task in tasks:
            task._log_destroy_pending = False
        return set(done)

    with virtual_time(loop), ours, theirs:
        seen = loop.run_until_complete(kill_and_look())
    for coroutine in coroutines:
        coroutine.close()
    loop.close()
    assert seen == (set() if is_killed else {"unwound", "thread", "timer", "socket"})


def test_a_stopped_process_goes_on_where_it_was():
    """Neither its timers nor its sockets call it before; another's timer does not wait."""
    loop, process, done = VirtualLoop(1, lambda *_: None), Process("any"), []
    ours, theirs = socket.socketpair()

    def read():
        done.append(("socket", theirs.recv(1)))

    async def stop_and_look():
        loop.stop_process(process, 5)
        process.run(loop.call_later, 1, done.append, "timer")
        process.run(loop.add_reader, theirs, read)
        ours.send(b"1")
        await asyncio.sleep(4)
        before = [*done]
        await asyncio.sleep(2)
        return before

    with virtual_time(loop), ours, theirs:
        before = loop.run_until_complete(stop_and_look())
        loop.remove_reader(theirs)
    loop.close()
    assert before == []
    assert sorted(map(str, done)) == ["('socket', b'1')", "timer"]
