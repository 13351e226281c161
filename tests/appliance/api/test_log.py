"""The request log over HTTP, in front of a real log."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from appliance.log.writer import RequestLog
from engine.text.tokenizer import Tokenizer
from tests.appliance.api_server import Served, serving
from tests.appliance.logs import rids, row, start
from tests.fakes import FakeAppliance
from tests.tiny_tokenizers import byte_level


class LoggingAppliance(FakeAppliance):
    """A FakeAppliance with a real log."""

    def __init__(self, log: RequestLog) -> None:
        super().__init__(Tokenizer(byte_level()))
        self.log_rows, self.log_events, self.log_usage = log.rows, log.events, log.usage
        self.logged_frame = log.row


@pytest.fixture
def log(tmp_path: Path) -> RequestLog:
    return start(tmp_path / "requests.db")


@pytest.fixture
async def served(log: RequestLog, tmp_path: Path) -> AsyncIterator[Served]:
    async with serving(LoggingAppliance(log), tmp_path / "api.sock") as served:
        yield served
    log.close()


async def get(served: Served, path: str) -> list[dict[str, object]]:
    reply = await served.http.get(f"/v1/penstock/{path}")
    assert reply.status_code == 200, reply.text
    body = reply.json()
    assert body["object"] == "list"
    return body["data"]


async def test_a_tail_is_followed_by_its_cursor(served: Served, log: RequestLog) -> None:
    for number in range(3):
        log.record(row(f"cmpl-{number}"))
    tail = await get(served, "log?limit=2")
    assert rids(tail) == ["cmpl-2", "cmpl-1"]
    cursor = max(found["cursor"] for found in tail)
    assert await get(served, f"log?after={cursor}") == []
    for number in range(3, 5):
        log.record(row(f"cmpl-{number}"))
    assert rids(await get(served, f"log?after={cursor}")) == ["cmpl-3", "cmpl-4"]


async def test_parameters_reach_the_log(served: Served, log: RequestLog) -> None:
    log.record(row("cmpl-1"))
    log.record(row("cmpl-2", http_status=500, peer_user="bob"))
    assert rids(await get(served, "log?errors=true&user=bob&slow=ttft%3E9")) == ["cmpl-2"]
    assert await get(served, "log?since=-1s") == []
    log.event("error", "worker.died", "killed")
    assert [one["code"] for one in await get(served, "events?severity=error")] == ["worker.died"]
    (day,) = await get(served, "usage?by=day")
    assert (day["day"], day["requests"], day["errors"]) == ("2026-01-02", 2, 1)


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("log?limit=0", "limit"),
        ("log?slow=ttft", "slow"),
        ("log?since=soon", "since"),
        ("events?severity=fatal", "severity"),
        ("usage?by=moon", "by"),
    ],
)
async def test_what_cannot_be_asked_is_refused_by_name(
    served: Served, path: str, param: str
) -> None:
    reply = await served.http.get(f"/v1/penstock/{path}")
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


async def test_a_log_that_is_gone_is_unavailable_until_the_next_row(
    served: Served, log: RequestLog
) -> None:
    log.path.unlink()
    for path in ("penstock/log", "penstock/events", "penstock/usage", "requests/cmpl-0"):
        reply = await served.http.get(f"/v1/{path}")
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "log_unreadable")
    log.record(row("cmpl-1"))
    assert rids(await get(served, "log")) == ["cmpl-1"]
