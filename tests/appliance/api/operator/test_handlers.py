"""What operators read and change over HTTP, and who may; the log's routes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from appliance.daemon.requests.request import Peer
from appliance.fleet.roles_change import RolesChange
from appliance.observe.log.writer import RequestLog
from engine.text.tokenizer import Tokenizer
from tests.appliance.api_server import Served, serving
from tests.appliance.logs import rids, row, start
from tests.appliance.peers import ALICE, BOB, OPERATOR, VIEWER, client_of
from tests.tiny_tokenizers import byte_level
from tests.worlds.daemon_parts import FakeAppliance, until


async def waiting_request(appliance, peer):
    """A request of a peer that has not been answered: its id, and the reply to come."""
    appliance.gate.clear()
    client = client_of(appliance, peer)
    reply = asyncio.create_task(client.post("/v1/completions", json={"prompt": "a"}))
    await until(lambda: appliance.live)
    return next(iter(appliance.live)), reply


async def test_requests_can_be_read(served):
    request_id = (await served.complete()).json()["id"]
    listed = (await served.http.get("/v1/requests")).json()
    assert listed == {"object": "list", "data": [{"id": request_id}]}
    assert (await served.http.get(f"/v1/requests/{request_id}")).json() == {"id": request_id}


async def test_as_many_requests_come_as_were_asked_for(served):
    ids = [(await served.complete()).json()["id"] for _ in range(3)]
    listed = (await served.http.get("/v1/requests?limit=2")).json()["data"]
    assert len(listed) == 2
    assert {one["id"] for one in listed} < set(ids)
    refused = await served.http.get("/v1/requests?limit=none")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "limit")


async def test_requests_that_only_the_log_knows_can_be_read(appliance):
    appliance.logged_frame = lambda request_id: {"id": request_id}
    reply = await client_of(appliance, VIEWER).get("/v1/requests/cmpl-old")
    assert reply.json() == {"id": "cmpl-old"}


@pytest.mark.parametrize("peer", [ALICE, OPERATOR])
@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/v1/requests/{}/cancel"), ("DELETE", "/v1/requests/{}")]
)
async def test_owners_and_operators_cancel(appliance, peer, method, path):
    request_id, reply = await waiting_request(appliance, ALICE)
    cancelled = await client_of(appliance, peer).request(method, path.format(request_id))
    assert cancelled.json() == {"id": request_id, "status": "cancelled"}
    assert (await reply).json()["choices"][0]["finish_reason"] == "abort"
    assert appliance.submitted[0].cancelled_by == peer.name


@pytest.mark.parametrize(
    ("peer", "code"),
    [(BOB, "not_owner"), (VIEWER, "role_required"), (None, "not_owner")],
)
async def test_nobody_else_cancels(appliance, peer, code):
    request_id, reply = await waiting_request(appliance, ALICE)
    refused = await client_of(appliance, peer).delete(f"/v1/requests/{request_id}")
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, code)
    assert refused.json()["error"]["type"] == "permission_error"
    appliance.gate.set()
    assert (await reply).json()["choices"][0]["finish_reason"] == "length"


async def test_a_key_and_a_user_of_the_same_name_are_two(appliance):
    request_id, reply = await waiting_request(appliance, BOB)
    refused = await client_of(appliance, Peer(uid=7, user="bob")).delete(
        f"/v1/requests/{request_id}"
    )
    assert refused.json()["error"]["code"] == "not_owner"
    appliance.gate.set()
    await reply


async def test_what_has_ended_cannot_be_cancelled(appliance):
    client = client_of(appliance, OPERATOR)
    request_id = (await client.post("/v1/completions", json={"prompt": "a"})).json()["id"]
    reply = await client.delete(f"/v1/requests/{request_id}")
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "request_not_found")
    assert reply.json()["error"]["message"].endswith(f"`{request_id}`; it may have ended")
    unknown = await client.get("/v1/requests/cmpl-none")
    assert "`cmpl-none`" in unknown.json()["error"]["message"]


async def test_a_response_is_shown_and_cancelled_by_its_id(appliance):
    client = client_of(appliance, OPERATOR)
    appliance.gate.clear()
    asked = {"input": "a", "max_output_tokens": 4}
    reply = asyncio.create_task(client.post("/v1/responses", json=asked))
    await until(lambda: appliance.live)
    (request_id,) = appliance.live
    assert (await client.delete(f"/v1/requests/{request_id}")).status_code == 200
    appliance.gate.set()
    assert (await reply).json()["id"] == request_id


async def test_operators_drain_and_resume(appliance):
    client = client_of(appliance, OPERATOR)
    assert (await client.post("/v1/penstock/drain")).json() == {"status": "draining"}
    assert (await client.get("/ready")).status_code == 503
    assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 503
    assert (await client.post("/v1/penstock/resume")).json() == {"status": "resumed"}
    assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 200
    assert appliance.drained_by == appliance.resumed_by == "root"


@pytest.mark.parametrize("verb", ["drain", "resume"])
@pytest.mark.parametrize("peer", [ALICE, BOB, VIEWER, None])
async def test_nobody_else_drains_or_resumes(appliance, peer, verb):
    reply = await client_of(appliance, peer).post(f"/v1/penstock/{verb}")
    assert (reply.status_code, reply.json()["error"]["code"]) == (403, "role_required")
    role = "user" if peer is None else peer.role.name.lower()
    who, _, hint = reply.json()["error"]["message"].rpartition("; ")
    assert who.endswith(f" is a {role}")
    is_by_key = peer is not None and peer.key is not None
    assert ("penstock keys add" if is_by_key else "`operators`") in hint


async def test_operators_switch_roles_and_targets(appliance):
    client = client_of(appliance, OPERATOR)
    asked = {"roles": "static", "slo_itl_ms": 40}
    reply = await client.post("/v1/penstock/roles", json=asked)
    assert reply.json() == {"roles": "static", "slo_ttft_ms": None, "slo_itl_ms": 40}
    assert appliance.roles_changes == [(RolesChange("static", None, 40), "root")]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"roles": "both"}, "roles"),
        ({"rolls": "static"}, "rolls"),
    ],
)
async def test_a_wrong_change_of_roles_changes_nothing(appliance, body, param):
    reply = await client_of(appliance, OPERATOR).post("/v1/penstock/roles", json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    assert not appliance.roles_changes


@pytest.mark.parametrize("peer", [ALICE, VIEWER, None])
async def test_nobody_else_switches_roles(appliance, peer):
    reply = await client_of(appliance, peer).post("/v1/penstock/roles", json={"roles": "static"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (403, "role_required")
    assert not appliance.roles_changes


async def test_operators_have_it_measured_and_everybody_sees_how_far_it_is(appliance):
    asked = client_of(appliance, OPERATOR)
    assert (await asked.post("/v1/penstock/measure")).json()["work_ms"] == 0
    assert (await client_of(appliance, VIEWER).get("/v1/penstock/measure")).json()["num_facts"] == 3
    assert (await client_of(appliance, VIEWER).post("/v1/penstock/measure")).status_code == 403


@pytest.mark.parametrize(
    ("peer", "known"),
    [
        (OPERATOR, {"name": "root", "role": "operator", "uid": 0, "key": None}),
        (BOB, {"name": "key:bob", "role": "user", "uid": None, "key": "bob"}),
        (None, {"name": "unknown", "role": "user", "uid": None, "key": None}),
    ],
)
async def test_a_client_can_ask_who_it_is(appliance, peer, known):
    assert (await client_of(appliance, peer).get("/v1/penstock/whoami")).json() == known


@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/requests", "/v1/penstock/state", "/v1/penstock/log"]
)
async def test_viewers_read_everything(appliance, path):
    assert (await client_of(appliance, VIEWER).get(path)).status_code == 200


@pytest.mark.parametrize("wants_events", [False, True])
async def test_frames_come_at_once_and_then_as_they_are_made(served, wants_events):
    assert (await served.http.get("/v1/penstock/state")).json() == {"version": 1, "seq": 1}
    headers = {"accept": "text/event-stream"} if wants_events else {}
    seqs = []
    async with served.http.stream("GET", "/v1/penstock/stream", headers=headers) as reply:
        async for line in reply.aiter_lines():
            if line:
                seqs.append(json.loads(line.removeprefix("data: "))["seq"])
            if len(seqs) == 3:
                break
    assert seqs == [1, 2, 3]
    kind = "text/event-stream" if wants_events else "application/x-ndjson"
    assert reply.headers["content-type"].startswith(kind)


# The request log over HTTP, in front of a real log.


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
