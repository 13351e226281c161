"""Messages reach the keeper in order, also when it has no room, and the loop never waits."""

from __future__ import annotations

import asyncio
import os
import socket
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.daemon.survival import keeper_channel
from appliance.daemon.survival.keeper_channel import (
    MAX_NAMES_BYTES,
    close_channel,
    count_kept,
    has_keeper,
    keeper_problem,
    notify,
    unused_name,
)


@pytest.fixture(params=["path", "abstract"])
def manager(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[socket.socket]:
    """What systemd would be listening on."""
    name = str(tmp_path / "notify") if request.param == "path" else f"@penstock-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(name.replace("@", "\0", 1))
        listening.settimeout(120)
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        yield listening
        close_channel()


def test_fields_arrive_one_a_line(manager: socket.socket) -> None:
    assert notify(READY=1, STATUS="serving")
    assert manager.recv(1_000) == b"READY=1\nSTATUS=serving"
    assert notify(STOPPING=1)
    assert manager.recv(1_000) == b"STOPPING=1"


def test_a_status_cannot_smuggle_in_another_field(manager: socket.socket) -> None:
    assert notify(STATUS="a\nMAINPID=1")
    assert manager.recv(1_000) == b"STATUS=a MAINPID=1"


def test_without_systemd_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    assert not notify(READY=1)
    assert not has_keeper()


def test_a_socket_that_is_gone_is_survived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    assert not notify(READY=1)
    assert "Cannot notify the keeper" in caplog.text


def take(manager: socket.socket) -> tuple[str, list[int]]:
    """The next message's name and descriptors."""
    data, parts, _, _ = manager.recvmsg(4096, socket.CMSG_SPACE(4 * 253))
    fds = array("i")
    for _, _, value in parts:
        fds.frombytes(value)
    fields = dict(line.split("=") for line in data.decode().split("\n"))
    return fields.get("FDNAME", ""), list(fds)


async def keep(name: str) -> bool:
    """Send three descriptors, and close our own."""
    fds = [os.memfd_create(name[:99]) for _ in range(3)]
    is_kept = notify(*fds, FDSTORE=1, FDNAME=name)
    for fd in fds:
        os.close(fd)
    return is_kept


def test_a_burst_arrives_in_order_when_there_is_room(manager: socket.socket) -> None:
    async def burst() -> list[tuple[str, list[int]]]:
        assert all([await keep(f"reply-{number}") for number in range(64)])  # in one turn
        assert notify(FDSTOREREMOVE=1, FDNAME="reply-63")
        assert all(notify(WATCHDOG=1) for _ in range(100))
        return await asyncio.to_thread(lambda: [take(manager) for _ in range(64)])

    *arrived, last = asyncio.run(burst())
    assert [name for name, _ in arrived] == [f"reply-{number}" for number in range(63)]
    assert last == ("", [])  # the last set was taken back; the same message waits once
    for name, fds in arrived:
        assert [os.readlink(f"/proc/self/fd/{fd}").split()[0] for fd in fds] == [
            f"/memfd:{name}"
        ] * 3
        for fd in fds:
            os.close(fd)


def test_what_has_no_room_at_the_keeper_is_not_kept_and_that_is_told_once(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FDSTORE", "6")
    close_channel()
    assert has_keeper()
    kept = [asyncio.run(keep(name)) for name in ("a", "b", "c", "d")]
    assert kept == [True, True, False, False]
    assert caplog.text.count("The keeper is full") == 1
    notify(FDSTOREREMOVE=1, FDNAME="a")
    assert asyncio.run(keep("c"))
    assert not asyncio.run(keep("e"))
    notify(FDSTOREREMOVE=1, FDNAME="b")
    assert not asyncio.run(keep("n" * (MAX_NAMES_BYTES // 3)))


def test_a_keeper_that_takes_nothing_is_a_problem_until_it_does(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_channel, "PATIENCE_S", 0)

    async def fill() -> None:
        assert keeper_problem() is None
        notify(STATUS=0)
        assert keeper_problem() is not None  # though there is room
        for number in range(1, 2_000):
            notify(STATUS=number)
        assert keeper_problem() is not None
        for _ in range(2_000):
            await asyncio.to_thread(manager.recv, 1_000)
        assert keeper_problem() is None

    asyncio.run(fill())


def test_a_keeper_that_comes_back_is_no_problem_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "late"))
    notify(READY=1)
    assert keeper_problem() is not None
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "late"))
        assert notify(READY=1)
        assert keeper_problem() is None


def test_a_new_name_is_short_and_not_one_that_the_keeper_has(manager: socket.socket) -> None:
    count_kept(["r-0", "r-0", "listen", "r-2"])
    assert [unused_name("r-") for _ in range(3)] == ["r-1", "r-3", "r-4"]


def test_a_busy_loop_tells_between_requests_until_its_watch_is_lost(monkeypatch):
    told, clock = [], [1000.0]
    monkeypatch.setattr(keeper_channel, "notify_watchdog", lambda: told.append(clock[0]))
    monkeypatch.setattr(keeper_channel.time, "monotonic", lambda: clock[0])
    loop = keeper_channel.BusyLoop()
    loop.answers()  # before the watch begins
    loop.watched()
    for _ in range(2000):
        clock[0] += 1.0
        loop.answers()
    assert told[:3] == [1005.0, 1010.0, 1015.0]
    assert 1000 + keeper_channel.BUSY_MAX_S - 10 < told[-1] < 1000 + keeper_channel.BUSY_MAX_S
