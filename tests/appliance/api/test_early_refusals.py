"""What a full queue says to a flood, and that it is what it would have said at length."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.api.early_refusals import EarlyRefusals
from appliance.api.endpoints import ENDPOINTS
from appliance.api.operator.cache import HttpCounts
from appliance.api.routes import build_app
from appliance.daemon.requests.request import Peer, Role
from appliance.http.access import AccessPolicy
from appliance.http.listeners import bind_socket
from appliance.http.server import ApiServer
from engine.errors import Unavailable
from engine.text.tokenizer import Tokenizer
from tests.tiny_tokenizers import byte_level
from tests.worlds.daemon_parts import FakeAppliance

PEER = Peer(user="ann", uid=1000, role=Role.USER)
BODIES = {
    "/v1/completions": {"prompt": "hello"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]},
    "/api/chat": {"model": "fake", "messages": [{"role": "user", "content": "hello"}]},
    "/api/generate": {"model": "fake", "prompt": "hello"},
}


def request(path="/v1/completions", *headers, body=None):
    sent = json.dumps(BODIES[path]).encode() if body is None else body
    lines = [f"POST {path} HTTP/1.1", "Host: x", *headers, f"Content-Length: {len(sent)}"]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + sent


@pytest.fixture
def full():
    """An appliance that takes nothing."""
    appliance = FakeAppliance(Tokenizer(byte_level()))
    appliance.max_queued = 0
    return appliance


@pytest.fixture
def early(full):
    return EarlyRefusals(full, ENDPOINTS, HttpCounts())


@pytest.fixture
async def path(full, tmp_path):
    path = tmp_path / "api.sock"
    server = ApiServer(build_app(full), [bind_socket(path)], AccessPolicy())
    await server.start()
    yield path
    await server.stop(grace_s=1.0)


async def reply_on(reader):
    head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 120)).decode()
    status, *lines = head.strip().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return status, headers, json.loads(await reader.readexactly(int(headers["content-length"])))


@pytest.mark.parametrize("asked", list(ENDPOINTS))
async def test_the_short_way_says_what_the_long_way_says(path, asked):
    """By a connection that is new, by one that had a request, and by the long way."""
    told = []
    for headers, has_asked in (((), False), ((), True), (("Connection: keep-alive",), True)):
        reader, writer = await asyncio.open_unix_connection(str(path))
        if has_asked:
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            await reply_on(reader)
        writer.write(request(asked, *headers))
        told.append(await reply_on(reader))
        if has_asked:  # and it goes on
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await reply_on(reader))[0] == "HTTP/1.1 200 OK"
        writer.close()
    for _, headers, body in told:
        for name in ("x-request-id", "request-id", "date", "openai-processing-ms"):
            assert bool(headers.pop(name, None)) == (name != "request-id" or "messages" in asked)
        headers.pop("connection", None)
        body.pop("request_id", None)
    assert told[0] == told[1] == told[2]
    assert told[0][0] == "HTTP/1.1 429 Too Many Requests"
    assert told[0][1]["retry-after"] == "2"


async def test_a_request_that_comes_in_pieces_is_refused_all_the_same(path):
    reader, writer = await asyncio.open_unix_connection(str(path))
    for part in (request()[:20], request()[20:]):
        writer.write(part)
        await asyncio.sleep(0.05)
    assert (await reply_on(reader))[0].endswith("429 Too Many Requests")
    writer.close()


def test_what_there_is_room_for_or_is_not_asked_plainly_goes_the_long_way(full, early):
    assert early.refuse(request(), PEER, []) is not None
    plain = request(body=b"{}")
    for other in (
        plain[:-1],
        plain + plain,
        plain.replace(b"POST", b"GET"),
        plain.replace(b"HTTP/1.1", b"HTTP/1.0"),
        plain.replace(b"completions", b"models"),
        plain.replace(b"Content-Length: 2", b"Content-Length: 2\r\ncontent-length: 2"),
        request("/v1/completions", "Transfer-Encoding: chunked"),
        request("/v1/completions", "X-Request-ID: mine"),
        request("/v1/completions", "Origin: http://localhost"),
        request("/v1/completions", "Expect: 100-continue"),
        b"",
    ):
        assert early.refuse(other, PEER, []) is None
    assert early.refuse(request(), Peer(user="eve", role=Role.VIEWER), []) is None
    full.unavailable = Unavailable("draining", code="draining")
    assert early.refuse(request(), PEER, []) is None
    full.unavailable, full.max_queued = None, 1
    assert early.refuse(request(), PEER, []) is None


def test_refusals_are_counted_as_others_are(full):
    counts = HttpCounts()
    EarlyRefusals(full, ENDPOINTS, counts).refuse(request(), PEER, [])
    assert counts._replies == {("/v1/completions", "POST", "4xx"): 1}


@given(st.binary(max_size=200), st.integers(0, 200))
def test_any_bytes_are_refused_or_left_alone(noise, at):
    appliance = FakeAppliance(Tokenizer(byte_level()))
    appliance.max_queued = 0
    asked = request()
    reply = EarlyRefusals(appliance, ENDPOINTS, HttpCounts()).refuse(
        asked[:at] + noise + asked[at:], PEER, []
    )
    assert reply is None or reply.startswith(b"HTTP/1.1 429 ")
