"""Recordings over HTTP, out of a real log."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO

import pytest

from appliance.api.operator import handlers as log_api
from appliance.api.operator.handlers import MAX_OPEN_EACH, RECORDING_TYPE
from appliance.api.routes import build_app
from appliance.observe.frame.recording import open_recording
from appliance.observe.log.writer import RequestLog
from engine.text.tokenizer import Tokenizer
from tests.appliance.api_server import Served, serving
from tests.appliance.peers import ALICE, BOB, client_of
from tests.recordings import at, frame_at, request_row, write_log
from tests.tiny_tokenizers import byte_level
from tests.worlds.daemon_parts import FakeAppliance, until

PATH = "/v1/penstock/recording"


@pytest.fixture
def log(tmp_path: Path) -> RequestLog:
    seen = [frame_at(second) for second in range(30)]
    return write_log(tmp_path / "requests.db", seen, [request_row("cmpl-1", 3)])


@pytest.fixture
async def served(log: RequestLog, tmp_path: Path) -> AsyncIterator[Served]:
    appliance = FakeAppliance(Tokenizer(byte_level()))
    appliance.log_recording = log.recording
    async with serving(appliance, tmp_path / "api.sock") as served:
        yield served
    log.close()


async def test_a_span_comes_as_a_file_that_can_be_opened(served: Served, tmp_path: Path) -> None:
    reply = await served.http.get(PATH, params={"since": at(10), "until": at(20)})
    assert (reply.status_code, reply.headers["content-type"]) == (200, RECORDING_TYPE)
    assert int(reply.headers["content-length"]) == len(reply.content)
    path = tmp_path / "got"
    path.write_bytes(reply.content)
    db = open_recording(path)
    assert db.execute("SELECT count(*) FROM frames").fetchone()[0] == 10
    assert db.execute("SELECT rid FROM requests").fetchone()[0] == "cmpl-1"
    db.close()
    head = await served.http.head(PATH)
    assert (head.status_code, head.content) == (200, b"")


async def test_what_cannot_be_recorded_says_why(served: Served) -> None:
    for query, status, code in (
        ("since=soon", 400, "invalid_value"),
        (f"since={at(99)}", 404, "nothing_recorded"),
    ):
        reply = await served.http.get(f"{PATH}?{query}")
        assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)
    served.appliance.log_recording.__self__.path.unlink()
    reply = await served.http.get(PATH)
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "log_unreadable")


@pytest.fixture
def opened(tmp_path: Path, served: Served, monkeypatch: pytest.MonkeyPatch) -> list[IO[bytes]]:
    """Every recording is a file that is more than sockets hold, so that it takes its reader."""
    opened: list[IO[bytes]] = []
    large = tmp_path / "large"
    large.write_bytes(b"x" * (32 << 20))

    def record(span: object) -> object:
        opened.append(large.open("rb"))
        return opened[-1]

    monkeypatch.setattr(served.appliance, "log_recording", record)
    return opened


async def hold(served: Served) -> asyncio.StreamWriter:
    """Ask for a recording, and read no more than that it comes."""
    reader, writer = await served.connect()
    writer.write(f"GET {PATH} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
    return writer


async def test_only_so_many_are_open_and_who_leaves_makes_room(
    served: Served, opened: list[IO[bytes]]
) -> None:
    writers = [await hold(served) for _ in range(MAX_OPEN_EACH)]
    reply = await served.http.get(PATH)
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "busy")
    assert reply.headers["retry-after"]
    writers[0].transport.abort()
    await until(lambda: opened[0].closed)
    assert (await served.http.get(PATH)).status_code == 200


async def test_who_does_not_read_keeps_nobody_out(
    served: Served, opened: list[IO[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(MAX_OPEN_EACH):
        await hold(served)
    monkeypatch.setattr(log_api, "PATIENCE_S", 0.0)
    reply = await served.http.get(PATH)
    assert (reply.status_code, len(reply.content)) == (200, 32 << 20)
    held = opened[:MAX_OPEN_EACH]  # of which one has waited longest
    await until(lambda: any(one.closed for one in held))
    assert sum(one.closed for one in held) == 1


async def test_one_peers_recordings_leave_room_for_others(tmp_path: Path) -> None:
    appliance = FakeAppliance(Tokenizer(byte_level()))
    (tmp_path / "made").write_bytes(b"x")
    may_be_made = threading.Event()

    def record(span: object) -> IO[bytes]:
        may_be_made.wait(120)
        return (tmp_path / "made").open("rb")

    appliance.log_recording = record
    app = build_app(appliance)
    async with client_of(appliance, ALICE, app) as alice, client_of(appliance, BOB, app) as bob:
        asked = [asyncio.create_task(alice.get(PATH)) for _ in range(MAX_OPEN_EACH + 1)]
        refused, pending = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        assert [task.result().status_code for task in refused] == [503]
        other = asyncio.create_task(bob.get(PATH))
        may_be_made.set()
        assert (await other).status_code == 200
        assert [(await task).status_code for task in pending] == [200] * MAX_OPEN_EACH
