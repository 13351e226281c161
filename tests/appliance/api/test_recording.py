"""Recordings over HTTP, out of a real log."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from appliance.api.log import MAX_OPEN_RECORDINGS, RECORDING_TYPE
from appliance.log.request_log import RequestLog
from appliance.recording import open_recording
from engine.tokenizer import Tokenizer
from tests.appliance.api_server import Served, serving
from tests.fakes import FakeAppliance, until
from tests.recordings import at, frame_at, request_row, write_log
from tests.tiny_tokenizers import byte_level

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


async def test_only_so_many_are_open_and_who_leaves_makes_room(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []
    large = tmp_path / "large"
    large.write_bytes(b"x" * (32 << 20))  # more than sockets hold, so that it takes its reader

    def record(span: object) -> object:
        opened.append(large.open("rb"))
        return opened[-1]

    monkeypatch.setattr(served.appliance, "log_recording", record)
    writers = []
    for _ in range(MAX_OPEN_RECORDINGS):
        reader, writer = await served.connect()
        writer.write(f"GET {PATH} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        writers.append(writer)
    reply = await served.http.get(PATH)
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "busy")
    assert reply.headers["retry-after"]
    writers[0].transport.abort()
    await until(lambda: opened[0].closed)
    monkeypatch.undo()
    assert (await served.http.get(PATH)).status_code in (200, 404)
