"""A disk that hangs holds up one thread, and is told of once."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest

from appliance.daemon.process import disk_reads
from appliance.daemon.process import limits as process
from engine.errors import PenstockError
from engine.system.threads import helped_by
from tests.running import running


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


def test_an_exit_while_standing_threads_start_waits_for_none_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[threading.Thread] = []

    class Interrupted(threading.Barrier):
        def wait(self, timeout: float | None = None) -> int:
            if threading.current_thread() is threading.main_thread():
                started.extend(t for t in threading.enumerate() if t.name.startswith("cut"))
                raise SystemExit(130)
            return super().wait(timeout)

    monkeypatch.setattr(threading, "Barrier", Interrupted)
    with pytest.raises(SystemExit):
        process.standing_threads(3, "cut")
    for thread in started:
        thread.join(60)
    assert [thread.is_alive() for thread in started] == [False] * 3


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

    def used_s(*_: int) -> float:
        look = next(looks)
        if look > 100:
            hanging.set()
        return float(look)

    monkeypatch.setattr(disk_reads, "thread_time_s", used_s)
    assert asyncio.run(disk_reads.read_in_thread("it", hanging.wait, pytest.fail))
    assert next(looks) > 100


@pytest.mark.usefixtures("hanging")
@pytest.mark.parametrize("has_core", [False, True], ids=["starved", "hanging"])
def test_a_process_that_only_gets_no_core_is_waited_for_and_one_at_a_pipe_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_core: bool
) -> None:
    """The starved one would run; the other waits for a file, as at a disk that hangs."""
    looks = itertools.count()
    done = threading.Event()

    def used_s(*_: int) -> float:
        if next(looks) > 100:
            done.set()
        return 0.0  # as if nothing of it were run

    os.mkfifo(tmp_path / "file")
    program = f"open({str(tmp_path / 'file')!r})" if has_core else "while True: pass"
    monkeypatch.setattr(disk_reads, "thread_time_s", used_s)
    with running(program) as helper:

        def read() -> bool:
            with helped_by(helper.pid):
                return done.wait(60)

        reading = disk_reads.read_in_thread("it", read, lambda _: None)
        try:
            if has_core:
                with pytest.raises(PenstockError, match="does not answer"):
                    asyncio.run(reading)
            else:
                assert asyncio.run(reading)
        finally:
            done.set()
