"""Clients that are slow, silent, greedy, half gone, or no clients of HTTP at all."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import gzip
import json
import os
import resource
import socket
import zlib
from collections import Counter

import httpx
import pytest

from appliance.api.routes import build_app
from appliance.daemon.process import limits as process_file
from appliance.daemon.requests.request import Role
from appliance.http import connection, gate, listeners, rejected_connections, server
from appliance.http.access import AccessPolicy
from appliance.http.api_keys import ApiKey, new_key, read_keys
from appliance.http.bursts import Bursts
from appliance.http.connection import ClientLimits, ClientProtocol
from appliance.http.listeners import bind_socket, bind_tcp
from appliance.http.server import ApiServer
from engine.text.tokenizer import Tokenizer
from tests.appliance.api_server import one_key
from tests.tiny_tokenizers import byte_level
from tests.worlds.daemon_parts import FakeAppliance, until

QUICK = ClientLimits(head_s=0.2, body_s=0.3, unread_s=0.3, linger_s=0.2, idle_s=0.3)
MAX_BODY_BYTES = 1 << 20
COMPLETION = json.dumps({"prompt": "hello"}).encode()


def post(body=COMPLETION, path="/v1/completions", extra=""):
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\n{extra}Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def read_all(reader) -> bytes:
    """All that comes until the other side closes, politely or not."""
    received = b""
    async with asyncio.timeout(120):
        with contextlib.suppress(ConnectionError):
            while part := await reader.read(65536):
                received += part
    return received


class Running:
    """A server on a Unix socket and on TCP, with clients."""

    def __init__(self, appliance, folder, **settings):
        self.appliance = appliance
        self.limits = settings.pop("limits", QUICK)
        self.path = folder / "api.sock"
        settings = {"max_body_bytes": MAX_BODY_BYTES, **settings}
        self.key, self.policy = one_key(folder, "ann", "viewer", **settings)
        self._open = contextlib.AsyncExitStack()

    async def __aenter__(self):
        tcp = bind_tcp("localhost", 0)
        self.port = tcp[0].getsockname()[1]
        bound = [bind_socket(self.path), *tcp]
        self.server = ApiServer(build_app(self.appliance), bound, self.policy, self.limits)
        await self.server.start()
        transport = httpx.AsyncHTTPTransport(uds=str(self.path), verify=False)
        self.http = httpx.AsyncClient(base_url="http://localhost", transport=transport)
        self.tcp = httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", verify=False)
        await self._open.enter_async_context(self.http)
        await self._open.enter_async_context(self.tcp)
        return self

    async def __aexit__(self, *_):
        await self._open.aclose()
        await self.server.stop(grace_s=1.0)
        assert len(self.appliance.closed) == len(self.appliance.submitted)

    async def connect(self, *, tcp=False):
        opened = (
            asyncio.open_connection("127.0.0.1", self.port)
            if tcp
            else asyncio.open_unix_connection(str(self.path))
        )
        reader, writer = await opened
        self._open.callback(writer.close)
        return reader, writer

    async def say(self, *parts: bytes, tcp=False) -> bytes:
        reader, writer = await self.connect(tcp=tcp)
        for part in parts:
            writer.write(part)
            await asyncio.sleep(0)
        return await read_all(reader)

    async def works(self) -> bool:
        return (await self.http.post("/v1/completions", json={"prompt": "a"})).status_code == 200


@pytest.fixture
def appliance():
    return FakeAppliance(Tokenizer(byte_level()))


@pytest.fixture
async def running(appliance, tmp_path):
    async with Running(appliance, tmp_path) as running:
        yield running


@pytest.fixture
async def patient(appliance, tmp_path):
    async with Running(appliance, tmp_path, limits=ClientLimits()) as running:
        yield running


def code_of(reply: bytes) -> tuple[int, str]:
    """Status and error code of one whole reply that ends the connection."""
    head, _, body = reply.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    return int(head.split()[1]), json.loads(body)["error"]["code"]


async def watch(running, key):
    """A connection in use: frames that never end."""
    reader, writer = await running.connect(tcp=True)
    writer.write(
        f"GET /v1/penstock/stream HTTP/1.1\r\nHost: localhost\r\n"
        f"Authorization: Bearer {key}\r\n\r\n".encode()
    )
    async with asyncio.timeout(120):
        status = int((await reader.readline()).split()[1])
    return status, reader, writer


# who


async def test_tcp_needs_a_key_and_says_so(running):
    for headers in ({}, {"Authorization": "Bearer nonsense"}, {"Authorization": "Basic x"}):
        reply = await running.tcp.get("/v1/models", headers=headers)
        assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
        assert reply.json()["error"]["type"] == "authentication_error"
        assert reply.headers["www-authenticate"] == "Bearer"
    reply = await running.tcp.get("/v1/models", headers={"Authorization": f"bearer {running.key}"})
    assert reply.status_code == 200


async def test_an_address_with_a_key_in_it_shows_that_key(running):
    """Apps that speak to Ollama have a field for its address, and mostly none for a key."""
    for user in ("x", "ollama", ""):
        reply = await running.tcp.get("/api/tags", auth=(user, running.key))
        assert reply.status_code == 200
    for user, password in ((running.key, ""), ("x", "wrong"), ("x", f":{running.key}")):
        reply = await running.tcp.get("/api/tags", auth=(user, password))
        assert (reply.status_code, reply.headers["www-authenticate"]) == (401, "Bearer")
        assert "API key is not valid" in reply.json()["error"] or password == ""
    for broken in ("=", "a", base64.b64encode(b"\xff\xfe:\xff").decode(), "\xe9"):
        headers = {"Authorization": f"Basic {broken}".encode("latin-1")}
        assert (await running.tcp.get("/api/tags", headers=headers)).status_code == 401


async def test_only_liveness_is_open_without_a_key(running):
    assert (await running.tcp.get("/health")).status_code == 200
    for path in ("/ready", "/version", "/nothing", "/v1/penstock/state", "/healthy"):
        assert (await running.tcp.get(path)).status_code == 401


async def test_two_keys_at_once_are_none(running):
    headers = [("Authorization", f"Bearer {running.key}")] * 2
    assert (await running.tcp.get("/v1/models", headers=headers)).status_code == 401


async def test_two_different_keys_are_none_though_each_is_known(running):
    other, line = new_key("bob", "operator")
    digest = bytes.fromhex(line.rpartition(":")[2])
    keys = (*running.policy.keys, ApiKey("bob", Role.OPERATOR, digest))
    running.server.policy = dataclasses.replace(running.policy, keys=keys)
    both = {"Authorization": f"Bearer {running.key}", "x-api-key": other}
    for headers, status in ((both, 401), ({"x-api-key": other}, 200)):
        assert (await running.tcp.get("/v1/models", headers=headers)).status_code == status


async def test_tcp_is_for_names_of_this_machine_only(running):
    key = {"Authorization": f"Bearer {running.key}"}
    for host in ("localhost", "LOCALHOST:1", "127.0.0.1:8000", "127.1.2.3", "[::1]:8000"):
        reply = await running.tcp.get("/v1/models", headers={**key, "Host": host})
        assert reply.status_code == 200, host
    for host in ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "[::2]", "x"):
        for path in ("/v1/models", "/health"):
            reply = await running.tcp.get(path, headers={**key, "Host": host})
            assert (reply.status_code, reply.json()["error"]["code"]) == (403, "host_not_allowed")


async def test_the_log_knows_the_key_by_its_name(running, appliance):
    running.server.policy = dataclasses.replace(
        running.policy,
        keys=tuple(dataclasses.replace(k, role=Role.USER) for k in running.policy.keys),
    )
    key = {"Authorization": f"Bearer {running.key}"}
    await running.tcp.post("/v1/completions", json={"prompt": "a"}, headers=key)
    await running.http.post("/v1/completions", json={"prompt": "a"}, headers=key)
    over_tcp, over_unix = (request.peer for request in appliance.submitted)
    assert (over_tcp.name, over_tcp.role, over_tcp.uid) == ("key:ann", Role.USER, None)
    assert (over_unix.key, over_unix.role, over_unix.uid) == (None, Role.OPERATOR, os.getuid())


async def test_a_new_policy_holds_for_connections_that_are_open(running):
    key = {"Authorization": f"Bearer {running.key}"}
    assert (await running.tcp.get("/v1/models", headers=key)).status_code == 200
    running.server.policy = AccessPolicy(keys=(ApiKey("bob", Role.USER, bytes(32)),))
    assert (await running.tcp.get("/v1/models", headers=key)).status_code == 401


async def test_frames_end_when_their_reader_may_do_less_than_before(running, monkeypatch):
    """By key and by user: what a lowered role may not see is not sent on."""
    (key,) = running.policy.keys
    keys = (dataclasses.replace(key, role=Role.USER),)
    running.server.policy = dataclasses.replace(running.policy, keys=keys)
    roles = [Role.USER]
    monkeypatch.setattr(AccessPolicy, "_role_of", lambda *_: roles[0])
    own, writer = await running.connect()
    writer.write(b"GET /v1/penstock/stream HTTP/1.1\r\nHost: x\r\n\r\n")
    _status, other, _ = await watch(running, running.key)
    async with asyncio.timeout(120):
        for reader in (own, other):
            await reader.readuntil(b'"seq":')
        running.server.policy, roles[:] = running.policy, [Role.VIEWER]
        for reader in (own, other):
            await reader.readuntil(b"\r\n0\r\n\r\n")


async def test_the_frames_of_a_key_end_when_it_is_revoked(running, appliance):
    process, writer = await running.connect()
    writer.write(b"GET /v1/penstock/stream HTTP/1.1\r\nHost: x\r\n\r\n")
    _status, reader, _ = await watch(running, running.key)
    async with asyncio.timeout(120):
        await reader.readuntil(b'"seq":')
        # The same name, another key: it may have been replaced because it was stolen.
        (key,) = running.policy.keys
        keys = (dataclasses.replace(key, digest=bytes(32)),)
        running.server.policy = dataclasses.replace(running.policy, keys=keys)
        await reader.readuntil(b"\r\n0\r\n\r\n")
        await process.readuntil(f'"seq":{appliance.frame_seq + 2}'.encode())


# what


TLS_HELLO = bytes.fromhex("160301020001000001fc0303") + bytes(300)
MALFORMED = {
    "a TLS hello": TLS_HELLO,
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/2 with a host": b"GET /health HTTP/2.0\r\nHost: localhost\r\n\r\n",
    "HTTP/0.9": b"GET /health\r\n\r\n",
    "binary": bytes(range(256)) + b"\r\n\r\n",
    "an empty line": b"\r\n\r\n",
    "negative length": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
    "two lengths": post(extra="Content-Length: 3\r\n"),
    "length and chunks": post(b"0\r\n\r\n", extra="Transfer-Encoding: chunked\r\n"),
    "two encodings": post(b"", extra="Transfer-Encoding: gzip, chunked\r\n"),
    "space before a colon": b"GET /health HTTP/1.1\r\nHost : x\r\n\r\n",
    "a bare feed in a value": b"GET /health HTTP/1.1\r\nHost: x\r\nA: b\0c\r\n\r\n",
    "a huge chunk size": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n" + b"f" * 40 + b"\r\n",
    "a line feed alone at a line's end": b"GET /health HTTP/1.1\r\nHost: x\nA: b\r\n\r\n",
    "a line feed alone at the end": b"GET /health HTTP/1.1\r\nHost: x\r\n\n",
    "line feeds alone": b"GET /health HTTP/1.1\nHost: x\n\n",
    "a folded line": b"GET /health HTTP/1.1\r\nHost: x\r\nA: b\r\n c\r\n\r\n",
    "a line folded by a tab": b"GET /health HTTP/1.1\r\nHost: x\r\nA: b\r\n\tc\r\n\r\n",
    "a length twice": post(extra=f"Content-Length: {len(COMPLETION)}\r\n"),
    "two equal lengths in a line": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    b"content-LENGTH: 2, 2\r\n\r\n{}",
    "chunks on HTTP/1.0": b"POST /v1/completions HTTP/1.0\r\nHost: x\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "two hosts": b"GET /health HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
}


@pytest.mark.parametrize("tcp", [False, True], ids=["unix", "tcp"])
@pytest.mark.parametrize("sent", MALFORMED.values(), ids=MALFORMED)
async def test_what_is_malformed_is_400_and_the_end(running, caplog, sent, tcp):
    status, code = code_of(await running.say(sent, tcp=tcp))
    assert (status, code) in ((400, "invalid_http"), (501, "invalid_http"))
    assert not caplog.records
    assert await running.works()


@pytest.mark.parametrize("trailer", [b"A: b\n\r\n", b"A: b\r\n c\r\n\r\n", b"\n"])
async def test_a_trailer_is_read_as_strictly_as_a_head(running, trailer):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert code_of(await running.say(head + b"0\r\n" + trailer)) == (400, "invalid_http")
    assert await running.works()


@pytest.mark.parametrize("piece_bytes", [1, 7])
async def test_a_strict_head_may_come_in_pieces(patient, piece_bytes):
    sent = post(extra="Connection: close\r\nA: b\r\n")
    pieces = [sent[at : at + piece_bytes] for at in range(0, len(sent), piece_bytes)]
    assert (await patient.say(*pieces)).startswith(b"HTTP/1.1 200")


async def test_too_many_headers_are_refused(running):
    headers = {f"x-{number}": "y" for number in range(gate.MAX_HEADERS + 1)}
    reply = await running.http.get("/health", headers=headers)
    assert (reply.status_code, reply.json()["error"]["code"]) == (431, "headers_too_large")
    assert await running.works()


@pytest.mark.parametrize("ending", [b"\r\n\r\n", b""], ids=["complete", "endless"])
async def test_a_head_that_is_too_large_is_refused_as_such(running, ending):
    head = b"GET /health HTTP/1.1\r\nHost: x\r\nX-Big: " + b"y" * gate.MAX_HEAD_BYTES
    assert code_of(await running.say(head + ending)) == (431, "headers_too_large")
    assert await running.works()


async def test_how_a_large_head_is_cut_does_not_matter(patient):
    head = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Big: "
    value = b"y" * (gate.MAX_HEAD_BYTES // 3)
    reader, writer = await patient.connect()
    writer.write(head + value)
    await asyncio.sleep(0.05)
    writer.write(value + b"\r\n\r\n")
    assert (await read_all(reader)).startswith(b"HTTP/1.1 200 ")


async def test_an_upgrade_is_ignored_and_not_logged(running, caplog):
    headers = {"Connection": "Upgrade", "Upgrade": "websocket"}
    assert (await running.http.get("/health", headers=headers)).status_code == 200
    assert not caplog.records


async def test_a_body_that_says_it_is_too_large_is_refused_before_it_comes(running):
    reader, writer = await running.connect()
    size = MAX_BODY_BYTES + 1
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n"
    writer.write(head.encode())
    async with asyncio.timeout(120):
        assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")
    writer.write(b"x" * 1000)
    assert b"body_too_large" in await read_all(reader)


@pytest.mark.parametrize("size", [1, MAX_BODY_BYTES], ids=["slightly", "twice"])
@pytest.mark.parametrize("before", [b"", b"1\r\n{\r\n"], ids=["alone", "after another"])
@pytest.mark.parametrize("begun", [b"", b"{"])
async def test_a_chunk_that_says_it_is_too_large_is_refused_before_it_comes(
    patient, appliance, begun, before, size
):
    reader, writer = await patient.connect()
    head = post().partition(b"Content-Length")[0] + b"Transfer-Encoding: chunked\r\n\r\n"
    size += MAX_BODY_BYTES - bool(before)
    writer.write(head + before)
    await writer.drain()
    writer.write(b"%x\r\n" % size + begun)
    async with asyncio.timeout(120):  # its rest may take longer
        assert b" 413 " in await reader.readline()
        assert b'"code":"body_too_large"' in await reader.readuntil(b"}}")
    assert not appliance.submitted
    writer.close()


async def test_a_body_that_grows_too_large_is_refused(running):
    async def pieces():
        for _ in range(MAX_BODY_BYTES // 2**16 + 1):
            yield b" " * 2**16

    reply = await running.http.post("/v1/completions", content=pieces())
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, "body_too_large")
    assert await running.works()


@pytest.mark.parametrize("encoding", ["gzip", "X-Gzip", "deflate"])
async def test_a_compressed_body_is_read(running, appliance, encoding):
    body = zlib.compress(COMPLETION) if encoding == "deflate" else gzip.compress(COMPLETION)
    headers = {"content-encoding": encoding}
    reply = await running.http.post("/v1/completions", content=body, headers=headers)
    assert reply.status_code == 200
    assert len(appliance.submitted) == 1


async def test_a_body_that_decompresses_to_too_much_is_refused(running):
    body = gzip.compress(b" " * (MAX_BODY_BYTES + 1) + COMPLETION)
    headers = {"content-encoding": "gzip"}
    reply = await running.http.post("/v1/completions", content=body, headers=headers)
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, "body_too_large")
    assert await running.works()


async def test_of_one_owners_bodies_one_at_a_time_becomes_large(patient, monkeypatch):
    """A few KiB make MiB: of hundreds at once, all would be in memory."""
    inside, most = [], []
    to_thread = asyncio.to_thread

    async def watched(call, *args):
        inside.append(args)
        most.append(len(inside))
        try:
            return await to_thread(call, *args)
        finally:
            inside.pop()

    monkeypatch.setattr("appliance.http.body_encoding.asyncio.to_thread", watched)
    body = gzip.compress(b" " * (MAX_BODY_BYTES - 99) + b"{")
    headers = {"content-encoding": "gzip"}
    asked = [patient.http.post("/v1/completions", content=body, headers=headers) for _ in range(20)]
    replies = await asyncio.gather(*asked)
    assert {reply.status_code for reply in replies} <= {400, 429, 503}
    assert (max(most), len(most) >= 20) == (1, True)
    assert await patient.works()


@pytest.mark.parametrize("encoding", ["zstd", "br", "gzip, gzip", "\x01"])
async def test_another_encoding_is_refused_with_those_that_are_read(running, encoding):
    headers = {"content-encoding": encoding}
    reply = await running.http.post("/v1/completions", content=COMPLETION, headers=headers)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (415, "unsupported_encoding")
    assert "gzip" in error["message"]


async def half_sent(running, size, *, tcp):
    """A body of which the last bytes are missing, under way."""
    reader, writer = await running.connect(tcp=tcp)
    key = f"Authorization: Bearer {running.key}\r\n"
    head = post(b" " * size, "/tokenize", key).replace(b"Host: x", b"Host: localhost")
    writer.write(head[:-10])
    await writer.drain()
    return reader, writer


async def test_who_holds_more_half_sent_bodies_than_is_left_for_others_is_refused(
    patient, monkeypatch
):
    monkeypatch.setattr(gate, "MAX_ARRIVING_BODIES", 4)
    arriving = patient.server._gate.arriving_bytes
    held = [await half_sent(patient, MAX_BODY_BYTES, tcp=True) for _ in range(2)]
    await until(lambda: arriving["key:ann"] > 1.8 * MAX_BODY_BYTES)
    reader, _ = await half_sent(patient, MAX_BODY_BYTES, tcp=True)
    async with asyncio.timeout(120):
        assert b" 503 " in await reader.readline()
        assert b'"code":"busy"' in await reader.readuntil(b"}}")
    for size in (10, gate.UNCOUNTED_BYTES, MAX_BODY_BYTES - 100):
        body = json.dumps({"prompt": "a"}).ljust(size)
        assert (await patient.http.post("/v1/completions", content=body)).status_code == 200
    await half_sent(patient, MAX_BODY_BYTES, tcp=False)
    await until(lambda: len(arriving) == 2)
    for _, writer in held:
        writer.close()
    await until(lambda: "key:ann" not in arriving)


async def test_small_bodies_get_in_however_many_others_are_half_sent(patient, monkeypatch):
    monkeypatch.setattr(gate, "MAX_ARRIVING_BODIES", 1)
    readers = [await half_sent(patient, gate.UNCOUNTED_BYTES, tcp=False) for _ in range(40)]
    key = {"Authorization": f"Bearer {patient.key}"}
    reply = await patient.tcp.post("/tokenize", content=b'{"prompt": "a"}', headers=key)
    assert reply.status_code == 200
    for reader, writer in readers:
        writer.write(b" " * 10)
        async with asyncio.timeout(120):
            assert b" 400 " in await reader.readline()
    assert not patient.server._gate.arriving_bytes


async def test_pipelined_requests_are_answered_in_order(running, appliance):
    replies = await running.say(post() * 3 + post(extra="Connection: close\r\n"))
    assert replies.count(b"HTTP/1.1 200 OK") == 4
    assert len(appliance.submitted) == 4


# how fast


@pytest.mark.parametrize("tcp", [False, True], ids=["unix", "tcp"])
async def test_who_says_nothing_is_cut_without_a_word(running, tcp):
    assert await running.say(tcp=tcp) == b""


@pytest.mark.parametrize(
    "part",
    [b"GET /hea", post()[:-1], b"GET / HTTP/1.1\r\nHost: x\r\n"],
    ids=["line", "body", "head"],
)
async def test_who_stops_halfway_is_told_and_cut(running, part, caplog):
    assert code_of(await running.say(part)) == (400, "request_timeout")
    assert not caplog.records
    assert not running.appliance.submitted


async def test_of_many_late_clients_a_few_are_cut_at_one_look(running, monkeypatch):
    """Each takes a moment, and thousands may be late at once."""
    monkeypatch.setattr(server, "CUT_AT_ONCE", 3)
    look, cut_at = ClientProtocol.look, Counter()

    def counted(self, now, **options):
        was_cut = look(self, now, **options)
        cut_at[now] += was_cut
        return was_cut

    monkeypatch.setattr(ClientProtocol, "look", counted)
    replies = await asyncio.gather(*(running.say(post()[:-1]) for _ in range(10)))
    assert {code_of(reply) for reply in replies} == {(400, "request_timeout")}
    assert max(cut_at.values()) == 3


@pytest.fixture
def held(monkeypatch):
    """Owners of requests that wait for their turn, and what lets them begin."""
    owners, has_turn, begin = [], asyncio.Event(), Bursts.begin

    async def wait(self, owner):
        owners.append(owner)
        await has_turn.wait()
        await begin(self, owner)

    monkeypatch.setattr(Bursts, "begins_at_once", lambda _self: has_turn.is_set())
    monkeypatch.setattr(Bursts, "begin", wait)
    return owners, has_turn


async def test_in_a_burst_requests_wait_before_they_are_parsed_and_a_probe_does_not(running, held):
    owners, has_turn = held
    body = b"x" * (MAX_BODY_BYTES // 2)
    told = [asyncio.create_task(running.say(post(body)[:-1])) for _ in range(3)]
    await until(lambda: len(owners) == 3)
    probe = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    assert b" 200 " in await running.say(probe)
    await asyncio.sleep(3 * QUICK.head_s)  # it is the server's turn
    assert all(not connection.retire() for connection in running.server._connections)
    assert not any(task.done() for task in told)
    has_turn.set()
    assert {code_of(each) for each in await asyncio.gather(*told)} == {(400, "request_timeout")}


async def test_who_leaves_before_its_turn_is_forgotten(running, held):
    owners, has_turn = held
    _reader, writer = await running.connect()
    writer.write(post())
    await until(lambda: owners)
    writer.close()
    await until(lambda: not running.server._connections)
    has_turn.set()
    assert await running.works()
    assert len(running.appliance.submitted) == 1


async def test_the_keys_of_tcp_clients_take_turns(running, held):
    owners, has_turn = held
    extras = ("Authorization: Bearer one\r\n", "x-api-key:  two\r\n", "")
    told = [asyncio.create_task(running.say(post(extra=each), tcp=True)) for each in extras]
    await until(lambda: len(owners) == 3)
    assert {key for _caller, key in owners} == {b"Bearer one", b"two", None}
    has_turn.set()
    await asyncio.gather(*told)


async def test_a_head_that_trickles_in_is_cut(running):
    reader, writer = await running.connect()

    async def trickle():
        with contextlib.suppress(ConnectionError):
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n")
            while not writer.is_closing():
                writer.write(b"x-more: y\r\n")
                await asyncio.sleep(0.02)

    task = asyncio.create_task(trickle())
    assert code_of(await read_all(reader)) == (400, "request_timeout")
    task.cancel()


async def test_a_second_request_has_its_own_time(running):
    reader, writer = await running.connect()
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    async with asyncio.timeout(120):
        await reader.readuntil(b'"ok"}')
    writer.write(b"GET /hea")
    assert code_of(await read_all(reader)) == (400, "request_timeout")


async def test_an_idle_connection_is_closed_in_the_end(running):
    reader, writer = await running.connect()
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await read_all(reader)).endswith(b'{"status":"ok"}')


async def test_a_slow_but_steady_body_is_waited_for(appliance, tmp_path):
    """Each piece has as long as the whole may take in silence, also where this test is held up."""
    body = COMPLETION[:-1] + b" " * 4000 + b"}"
    limits = ClientLimits(body_s=1.5, min_bytes_per_s=100.0)
    async with Running(appliance, tmp_path, limits=limits) as running:
        reader, writer = await running.connect()
        writer.write(post(body, extra="Connection: close\r\n")[: -len(body)])
        for start in range(0, len(body), 400):
            writer.write(body[start : start + 400])
            await asyncio.sleep(0.18)
        assert b" 200 OK" in await read_all(reader)


@pytest.mark.parametrize("extra", ["", "Connection: close\r\n"], ids=["keep-alive", "close"])
async def test_a_body_that_goes_on_after_its_reply_is_not_listened_to_for_long(running, extra):
    reader, writer = await running.connect()
    writer.write(
        post(b"", "/nothing", extra).replace(b"Content-Length: 0", b"Content-Length: 999999999")
    )

    async def flood():
        with contextlib.suppress(ConnectionError):
            while not writer.is_closing():
                writer.write(b"x" * 10_000)
                await writer.drain()
                await asyncio.sleep(0.01)

    task = asyncio.create_task(flood())
    assert b" 404 " in await read_all(reader)
    async with asyncio.timeout(120):
        await task


@pytest.mark.parametrize("tcp", [False, True], ids=["unix", "tcp"])
@pytest.mark.parametrize("ending", ["HTTP/1.0", "HTTP/1.1\r\nConnection: close"])
async def test_a_refusal_before_the_body_is_read_whatever_the_connection_header_says(
    appliance, tmp_path, ending, tcp
):
    whole = post(b" " * (4 * MAX_BODY_BYTES)).replace(b"HTTP/1.1", ending.encode())
    whole = whole.replace(b"Host: x", b"Host: localhost")
    async with Running(appliance, tmp_path, limits=ClientLimits(linger_s=60)) as running:
        reader, writer = await running.connect(tcp=tcp)
        writer.write(whole[:1000])
        await until(lambda: any(one._is_lingering for one in running.server._connections))
        writer.write(whole[1000:])  # more than buffers take: it is read, or this ends in a reset
        await writer.drain()
        refusal = (401, "invalid_api_key") if tcp else (413, "body_too_large")
        async with asyncio.timeout(120):
            assert code_of(await reader.read()) == refusal
        writer.close()
        await until(lambda: not any(one._is_lingering for one in running.server._connections))


async def test_a_wait_for_us_is_never_cut(running, appliance):
    appliance.gate.clear()
    task = asyncio.create_task(running.http.post("/v1/completions", json={"prompt": "a"}))
    await asyncio.sleep(1.0)
    appliance.gate.set()
    assert (await task).status_code == 200


async def test_a_client_that_does_not_read_is_cut_and_its_request_cancelled(running, appliance):
    appliance.interval_s, appliance.burst = 0.001, 1
    appliance.model = dataclasses.replace(appliance.model, max_model_len=10**6)
    appliance.script = lambda prompt: [97] * 100_000
    body = {"prompt": "a", "stream": True, "max_tokens": 100_000, "n": 1}
    reader, writer = await running.connect()
    writer.transport.pause_reading()
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    writer.write(post(json.dumps(body).encode()))
    await until(lambda: appliance.closed)
    assert appliance.submitted[0].cancelled_by == "client"
    assert appliance.closed[0][1] == 499
    assert not reader.at_eof()


async def test_a_stream_that_nobody_reads_does_not_pile_up(patient, appliance):
    appliance.model = dataclasses.replace(appliance.model, max_model_len=10**6)
    appliance.script = lambda prompt: [97] * 4000
    body = {"prompt": "a", "stream": True, "max_tokens": 4000}
    reader, writer = await patient.connect()
    writer.transport.pause_reading()
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    writer.write(post(json.dumps(body).encode(), extra="Connection: close\r\n"))
    connections = patient.server._connections
    await until(lambda: appliance.submitted and appliance.submitted[0].is_finished)
    unread = [connection.transport.get_write_buffer_size() for connection in connections]
    assert 0 < sum(unread) < 200_000, "of about a megabyte"
    writer.transport.resume_reading()
    assert (await read_all(reader)).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


async def test_of_replies_that_nobody_reads_the_largest_is_cut(patient, monkeypatch):
    """Who reads a little at times is not slow enough to be cut, and many would fill the memory."""
    cut = []
    monkeypatch.setattr(server, "MAX_UNREAD_BYTES", 4 << 20)
    monkeypatch.setattr(connection.ClientProtocol, "hang_up", lambda one: cut.append(one))

    async def ask(num_words):
        body = json.dumps({"prompt": "a b " * num_words, "with_pieces": True}).encode()
        reader, writer = await patient.connect()
        writer.write(post(body, "/tokenize", "Connection: close\r\n"))
        return reader

    readers = [await ask(num_words) for num_words in (15_000, 60_000, 20_000)]
    await until(lambda: len(cut) > 1)
    assert len(set(cut)) == 1
    largest = max(patient.server._connections, key=lambda one: one.num_unread)
    assert cut[0] is largest
    monkeypatch.undo()
    largest.hang_up()
    whole = [(await read_all(reader)).endswith(b"null}") for reader in readers]
    assert whole == [True, False, True]


async def test_an_old_client_gets_its_stream_without_chunks_and_then_the_end(running):
    body = json.dumps({"prompt": "a", "stream": True, "max_tokens": 3}).encode()
    reply = await running.say(post(body).replace(b"HTTP/1.1", b"HTTP/1.0"))
    head, _, events = reply.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert all(line.startswith(b"data: ") for line in events.split(b"\n\n")[:-1])
    assert events.endswith(b"data: [DONE]\n\n")


async def test_frames_that_nobody_reads_do_not_pile_up(running, appliance):
    appliance.frame_json = lambda: b" " * 200_000
    made = []
    newest = appliance.next_frame_json

    async def counted(seq):
        made.append(seq)
        return await newest(seq)

    appliance.next_frame_json = counted
    reader, writer = await running.connect()
    writer.transport.pause_reading()
    writer.write(b"GET /v1/penstock/stream HTTP/1.1\r\nHost: x\r\n\r\n")
    await until(lambda: made)
    connections = running.server._connections
    await until(lambda: any(c.flow.write_paused for c in connections))
    num_made = len(made)
    assert sum(c.transport.get_write_buffer_size() for c in connections) < 1 << 20
    await until(lambda: not connections)
    assert len(made) <= num_made + 2
    assert not reader.at_eof()


# half closed, and gone


def user_post(running):
    """A request that both doors admit."""
    running.server.policy = dataclasses.replace(
        running.policy,
        keys=tuple(dataclasses.replace(k, role=Role.USER) for k in running.policy.keys),
    )
    key = f"Authorization: Bearer {running.key}\r\n"
    return post(extra=key).replace(b"Host: x", b"Host: localhost")


by_each_door = pytest.mark.parametrize("tcp", [False, True], ids=["unix", "tcp"])


@by_each_door
async def test_a_client_that_has_said_all_still_gets_its_reply(running, appliance, tcp):
    appliance.interval_s = 0.02
    reader, writer = await running.connect(tcp=tcp)
    writer.write(user_post(running) * 2)
    writer.write_eof()
    replies = await read_all(reader)
    assert replies.count(b" 200 OK") == 2


@by_each_door
async def test_a_client_that_leaves_after_it_has_said_all_is_noticed(running, appliance, tcp):
    appliance.gate.clear()
    _reader, writer = await running.connect(tcp=tcp)
    writer.write(user_post(running))
    writer.write_eof()
    await until(lambda: appliance.live)
    writer.close()
    await until(lambda: appliance.closed)
    assert appliance.submitted[0].cancelled_by == "client"


@by_each_door
async def test_a_client_that_leaves_pipelined_requests_behind_is_noticed(running, appliance, tcp):
    appliance.gate.clear()
    _reader, writer = await running.connect(tcp=tcp)
    writer.write(user_post(running) * 3)
    await until(lambda: appliance.live)
    writer.close()
    await until(lambda: appliance.closed)
    assert len(appliance.submitted) == 1


async def test_half_a_body_and_then_the_end_is_nothing(running, appliance, caplog):
    reader, writer = await running.connect()
    writer.write(post()[:-3])
    writer.write_eof()
    assert await read_all(reader) == b""
    assert not appliance.submitted
    assert not caplog.records


# how many


@pytest.fixture
async def narrow(appliance, tmp_path):
    async with Running(appliance, tmp_path, max_connections=4, limits=ClientLimits()) as running:
        yield running


async def test_beyond_the_limit_503_is_said_at_once(narrow):
    opened = [await watch(narrow, narrow.key) for _ in range(3)]
    assert [status for status, *_ in opened] == [200] * 3
    reply = await narrow.say(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", tcp=True)
    assert code_of(reply) == (503, "too_many_connections")
    assert b"retry-after: 1\r\n" in reply
    opened[0][-1].close()
    await until(lambda: len(narrow.server._connections) == 2)
    assert (await narrow.tcp.get("/health")).status_code == 200


async def test_operators_get_in_when_nobody_else_does(narrow, monkeypatch):
    monkeypatch.setattr(server, "SHARE_OF_ONE", 1.0)
    for _ in range(4):
        await watch(narrow, narrow.key)
    assert b" 503 " in await narrow.say(tcp=True)
    assert (await narrow.http.get("/health")).status_code == 200


async def test_who_has_shown_no_key_gives_way_the_oldest_first(narrow):
    _status, frames, _ = await watch(narrow, narrow.key)
    keyless = []
    for _ in range(2):
        reader, writer = await narrow.connect(tcp=True)
        writer.write(b"GET / HTTP/1.1\r\nHos")
        await writer.drain()
        keyless.append(reader)
        await until(lambda: len(narrow.server._connections) == 1 + len(keyless))
        await until(lambda: all(c.spare_since for c in narrow.server._connections if not c.key))
    status, *_ = await watch(narrow, narrow.key)
    assert status == 200
    assert code_of(await read_all(keyless[0])) == (503, "too_many_connections")
    assert not keyless[1].at_eof()
    async with asyncio.timeout(120):
        await frames.readuntil(b'"seq":2')


async def test_one_key_cannot_take_all_of_tcp(appliance, tmp_path):
    async with Running(appliance, tmp_path, max_connections=10) as running:
        other, line = new_key("bob", "viewer")
        with (tmp_path / "keys").open("a") as file:
            file.write("\n" + line)
        running.server.policy = dataclasses.replace(
            running.policy, keys=read_keys(tmp_path / "keys")
        )
        opened = [await watch(running, running.key) for _ in range(6)]
        assert [status for status, *_ in opened] == [200] * 6
        status, reader, _ = await watch(running, running.key)
        assert status == 503
        assert b'"code":"too_many_connections"' in await read_all(reader)
        status, *_ = await watch(running, other)
        assert status == 200
        opened[0][-1].close()
        await until(lambda: sum(c.key == "ann" for c in running.server._connections) == 5)
        assert (await watch(running, running.key))[0] == 200


async def test_one_user_cannot_take_all_connections(narrow, monkeypatch):
    monkeypatch.setattr(AccessPolicy, "_role_of", lambda *_: Role.USER)
    for _ in range(3):
        await narrow.connect()
    await until(lambda: len(narrow.server._connections) == 3)
    assert b" 503 " in await narrow.say()
    assert (await narrow.tcp.get("/health")).status_code == 200


async def test_an_idle_connection_gives_way_to_a_new_one(narrow, monkeypatch):
    monkeypatch.setattr(server, "SHARE_OF_ONE", 1.0)
    idle = []
    for _ in range(4):
        reader, writer = await narrow.connect(tcp=True)
        key = f"Authorization: Bearer {narrow.key}"
        writer.write(f"GET /ready HTTP/1.1\r\nHost: localhost\r\n{key}\r\n\r\n".encode())
        async with asyncio.timeout(120):
            await reader.readuntil(b'"ready"}')
        idle.append(reader)
    connections = narrow.server._connections
    await until(lambda: sum(c.spare_since is not None for c in connections) == 4)
    assert (await narrow.tcp.get("/health")).status_code == 200
    assert sum(reader.at_eof() for reader in idle) <= 1


@pytest.mark.parametrize("tcp", [False, True], ids=["unix", "tcp"])
async def test_a_flood_that_asks_nothing_gives_way_to_who_asks(narrow, monkeypatch, tcp):
    monkeypatch.setattr(AccessPolicy, "_role_of", lambda *_: Role.USER)
    monkeypatch.setattr(connection, "SILENT_S", 0.0)
    silent = [await narrow.connect() for _ in range(3)]
    await until(lambda: len(narrow.server._connections) == 3)
    await until(lambda: all(c.spare_since for c in narrow.server._connections))
    for _ in range(6):
        client = narrow.tcp if tcp else narrow.http
        assert (await client.get("/health")).status_code == 200
    assert sum(not reader.at_eof() for reader, _ in silent) >= 2 - tcp
    monkeypatch.setattr(connection, "SILENT_S", 60.0)
    assert not any(c.spare_since for c in narrow.server._connections if not c._num_received)


async def test_who_gives_way_or_finds_no_room_is_told_and_they_are_counted(
    narrow, monkeypatch, caplog
):
    monkeypatch.setattr(AccessPolicy, "_role_of", lambda *_: Role.USER)
    silent = [await narrow.connect() for _ in range(3)]
    await until(lambda: len(narrow.server._connections) == 3)
    late = [await narrow.connect() for _ in range(2)]  # these ask when they have been refused
    await until(lambda: len(narrow.server._turned_away._lingering) == 2)
    for reader, writer in late:
        writer.write(post())
        assert code_of(await read_all(reader)) == (503, "too_many_connections")
        writer.close()
    await until(lambda: not narrow.server._turned_away._lingering)
    monkeypatch.setattr(connection, "SILENT_S", 0.0)
    await until(lambda: all(c.spare_since for c in narrow.server._connections))
    assert (await narrow.http.get("/health")).status_code == 200
    reading = [asyncio.create_task(read_all(reader)) for reader, _ in silent]
    (told,) = (await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED))[0]
    assert code_of(told.result()) == (503, "too_many_connections")
    for task in reading:
        task.cancel()
    monkeypatch.setattr(rejected_connections, "TELL_EVERY_S", 0.0)
    await until(lambda: not narrow.server._turned_away._counts)
    lines = [r.getMessage().split() for r in caplog.records if "rejected" in r.getMessage()]
    assert sum(int(words[3]) for words in lines) == 3
    assert sum(int(words[5]) for words in lines) == 3  # all of whom were told


async def test_who_is_turned_away_and_says_nothing_is_not_waited_for_long(narrow, monkeypatch):
    monkeypatch.setattr(AccessPolicy, "_role_of", lambda *_: Role.USER)
    monkeypatch.setattr(rejected_connections, "MAX_LINGERING", 2)
    lingering = narrow.server._turned_away._lingering
    for _ in range(6):
        await narrow.connect()
    await until(lambda: len(lingering) == 2)  # of three the oldest is closed
    lingering.update(dict.fromkeys(lingering, 0.0))
    await until(lambda: not lingering)


async def test_connections_leave_descriptors_for_the_rest(narrow, monkeypatch):
    limits = (process_file.NUM_APART + server.NUM_RESERVED + 2, 4096)
    monkeypatch.setattr(process_file.resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(server, "SHARE_OF_ONE", 1.0)
    opened = [(await watch(narrow, narrow.key))[0] for _ in range(2)]
    assert opened == [200, 200]
    assert b" 503 " in await narrow.say(tcp=True)
    assert (await narrow.http.get("/health")).status_code == 200  # an operator's


async def test_a_flood_at_a_low_limit_of_open_files_is_told_of_it_and_leaves_some(
    narrow, monkeypatch, caplog
):
    monkeypatch.setattr(process_file.resource, "getrlimit", lambda _: (64, 64))
    monkeypatch.setattr(AccessPolicy, "_role_of", lambda *_: Role.USER)
    narrow.server.policy = dataclasses.replace(narrow.server.policy, max_connections=1024)
    entered, *late = [await narrow.connect() for _ in range(9)]
    lingering = narrow.server._turned_away._lingering
    await until(lambda: len(lingering) == 4)
    for reader, writer in late[-4:]:
        writer.write(post())
        reply = await read_all(reader)
        assert code_of(reply) == (503, "too_many_connections")
        assert b" 64 open files " in reply
    assert not entered[0].at_eof(), "one user is let in"
    monkeypatch.setattr(rejected_connections, "TELL_EVERY_S", 0.0)
    await until(lambda: "64 open files" in caplog.text)


async def test_where_no_descriptor_is_left_an_idle_connection_gives_its_own_up(
    narrow, monkeypatch, caplog
):
    monkeypatch.setattr(listeners, "ACCEPT_PAUSE_S", 0.05)
    assert await narrow.works()  # and keeps its connection
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket(socket.AF_UNIX) as client:
        client.setblocking(False)
        in_use = max(int(fd) for fd in os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (in_use, before[1]))
        spare = []
        try:
            with contextlib.suppress(OSError):
                while True:
                    spare.append(os.dup(0))
            client.connect(str(narrow.path))
            await until(lambda: "Too many open files" in caplog.text)
            client.send(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            answer = asyncio.get_running_loop().sock_recv(client, 65536)
            received = await asyncio.wait_for(answer, 120)
        finally:
            for fd in spare:
                os.close(fd)
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert received.startswith(b"HTTP/1.1 200 OK")
    assert len(caplog.records) < 100
