"""Large buffers stay out of the C heap, so that what is freed goes back to the machine."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest

from appliance import disk_reads, log_lines, process
from appliance.log_lines import is_journal, lines
from appliance.process import NUM_APART, OWN_PAGES_BYTES, max_connections
from engine.errors import PenstockError

CHURN = """
import ctypes, random, re, sys
from appliance.process import keep_small
if sys.argv[1] == "kept" and not keep_small():
    sys.exit("this C library has no such sizes")
rng, stays, passing = random.Random(0), [], []
for _ in range(5_000):  # bodies that come and go among small things that stay
    passing.append(bytearray(rng.choice((1_000, 70_000, 200_000))))
    stays.append(bytearray(600))
    if len(passing) > 40:
        passing.pop(rng.randrange(40))
passing.clear()
print(int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]))
"""


def held_kib(how: str) -> int:
    ended = subprocess.run(
        [sys.executable, "-c", CHURN, how], capture_output=True, check=False, text=True
    )
    if ended.returncode:
        pytest.skip(ended.stderr)
    return int(ended.stdout)


def test_bodies_that_come_and_go_leave_no_holes():
    assert held_kib("kept") < held_kib("as it is") - 512
    assert OWN_PAGES_BYTES < 70_000


# --------------------------------------------------------------------------------------------------
# The daemon takes the files that it may have, and connections leave some of them.


def test_the_soft_limit_is_raised_to_the_hard_one():
    script = (
        "import resource; from appliance.process import raise_limit\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (200, 300))\n"
        "print(raise_limit(1024)); print(raise_limit(100))\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert said.stdout.splitlines() == [
        "max_connections is 1024, but 300 open files are allowed, with room for 172"
        " (ulimit -Hn, LimitNOFILE=)",
        "None",
        "300",
    ]


def test_connections_fit_in_what_is_left():
    assert max_connections(1024, 4096) == 1024
    assert max_connections(1024, 1024) == 1024 - NUM_APART
    assert max_connections(1024, 8) == 1
    assert max_connections(2) == min(2, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - NUM_APART)


# Lines on stderr have a priority where the journal reads them, and only there.


@pytest.mark.parametrize("is_on_path", [True, False])
def test_a_program_off_the_path_is_named_by_its_own(tmp_path, monkeypatch, is_on_path):
    program = tmp_path / "penstock"
    program.touch(0o755)
    monkeypatch.setattr("sys.argv", [str(program), "serve"])
    monkeypatch.setenv("PATH", str(tmp_path if is_on_path else tmp_path / "other"))
    assert log_lines.own_command() == ("penstock" if is_on_path else str(program))


def test_the_journal_is_known_by_its_stream(tmp_path):
    with (tmp_path / "stream").open("w") as stream:
        found = os.fstat(stream.fileno())
        environ = {"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"}
        assert is_journal(stream.fileno(), environ)
        assert not is_journal(stream.fileno(), {})
        with (tmp_path / "redirected").open("w") as other:
            assert not is_journal(other.fileno(), environ)


def test_every_line_of_a_message_has_its_priority_in_the_journal():
    assert lines("a\nb", logging.ERROR, to_journal=True) == "<3>a\n<3>b"
    assert lines("a", logging.WARNING, to_journal=True) == "<4>a"
    assert lines("a", logging.INFO, to_journal=True) == "<6>a"
    assert lines("a", logging.DEBUG, to_journal=True) == "<7>a"


def test_people_read_whose_line_it_is():
    assert lines("a\nb", logging.ERROR, to_journal=False) == "penstock: a\nb"


# Disks that hang


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Set, it ends the hang of whoever reads it; patience is for some looks."""
    for name, value in (("_LOOK_S", 0.01), ("SILENT_S", 0.05), ("HANG_S", 0.2)):
        monkeypatch.setattr(disk_reads, name, value)
    event = threading.Event()
    yield event
    event.set()


def test_what_a_disk_yields_or_refuses_comes_from_its_thread(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("y")

    def read(name: str) -> str:
        return asyncio.run(
            disk_reads.read_in_thread("it", (tmp_path / name).read_text, lambda _: None)
        )

    assert read("x") == "y"
    with pytest.raises(FileNotFoundError):
        read("z")


def test_a_disk_that_hangs_is_told_of_once_and_left_behind(hanging: threading.Event) -> None:
    told: list[str] = []
    late = SimpleQueue[bool]()
    reading = disk_reads.read_in_thread("the folder /x", hanging.wait, told.append, late.put)
    with pytest.raises(PenstockError, match=r"/x .*0\.2 s"):
        asyncio.run(reading)
    assert [("/x" in one, "0.05 s" in one, "0.2 s" in one) for one in told] == [(True, True, True)]
    assert late.empty()
    hanging.set()
    assert late.get(timeout=120)


@pytest.mark.usefixtures("hanging")
def test_a_read_whose_thread_has_no_memory_to_begin_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(disk_reads, "start_new_thread", lambda *_: None)
    with pytest.raises(PenstockError, match="does not answer"):
        asyncio.run(disk_reads.read_in_thread("the folder /x", list, lambda _: None))


def test_standing_threads_work_where_no_other_can_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    together = threading.Barrier(3)
    with process.standing_threads(3, "test") as threads:
        monkeypatch.setattr(threading.Thread, "start", refuse)
        jobs = [threads.submit(together.wait) for _ in range(3)]
        assert sorted(job.result(60) for job in jobs) == [0, 1, 2]


def test_nobody_who_stops_waits_for_a_disk(hanging: threading.Event) -> None:
    late = SimpleQueue[bool]()

    async def read() -> None:
        reading = disk_reads.read_in_thread("it", hanging.wait, lambda _: None, late.put)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reading, 0.02)

    asyncio.run(read())
    hanging.set()
    assert late.get(timeout=120)


def test_a_slow_disk_is_waited_for_as_long_as_its_thread_computes(
    hanging: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = itertools.count()

    def used_s(_: list[int]) -> float:
        look = next(looks)
        if look > 100:
            hanging.set()
        return float(look)

    monkeypatch.setattr(disk_reads, "_used_s", used_s)
    assert asyncio.run(disk_reads.read_in_thread("it", hanging.wait, pytest.fail))
    assert next(looks) > 100


def test_the_clock_of_a_thread_tells_what_it_has_used() -> None:
    clocks = [time.pthread_getcpuclockid(threading.get_ident())]
    before_s = disk_reads._used_s(clocks)
    assert before_s is not None
    sum(range(100_000))
    assert disk_reads._used_s(clocks) > before_s
    assert disk_reads._used_s([]) is None
