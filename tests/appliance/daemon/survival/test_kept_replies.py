"""Replies that outlive their server: one dies in mid-answer, another continues them."""

from __future__ import annotations

import array
import asyncio
import base64
import contextlib
import dataclasses
import fcntl
import json
import os
import re
import resource
import socket
import struct
import time

import pytest

from appliance.api import generation
from appliance.api.routes import build_app
from appliance.daemon.survival import journal as journals
from appliance.daemon.survival import keeper_channel, kept_replies
from appliance.daemon.survival.journal import Head, Journal
from appliance.daemon.survival.kept_replies import LeftReplies, LeftReply
from appliance.http import connection
from appliance.http.api_keys import key_digest
from appliance.http.listeners import bind_socket, bind_tcp
from appliance.http.server import ApiServer
from engine.text.tokenizer import Tokenizer
from tests.appliance.api_server import one_key
from tests.tiny_tokenizers import CHATML, byte_level
from tests.worlds.daemon_parts import FakeAppliance, until

MESSAGES = [{"role": "user", "content": "hello"}]
ASKED = {
    "completion": ("/v1/completions", {"prompt": "hello", "max_tokens": 60, "n": 2, "logprobs": 1}),
    "chat": ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 60}),
    "response": ("/v1/responses", {"input": "hello", "max_output_tokens": 60}),
    "message": ("/v1/messages", {"messages": MESSAGES, "max_tokens": 60}),
    "ollama": ("/api/generate", {"prompt": "hello", "options": {"num_predict": 60}}),
    "whole": ("/v1/completions", {"prompt": "hello", "max_tokens": 60, "stream": False}),
    "echo": ("/v1/completions", {"prompt": "hello", "max_tokens": 60, "echo": True, "logprobs": 1}),
    "prompt": (
        "/v1/completions",
        {"prompt": "hello", "max_tokens": 60, "stream": False, "prompt_logprobs": 1},
    ),
}
_VARIES = re.compile(
    rb'"(?:id|item_id|created|created_at|completed_at|\w*duration)": ?(?:"[^"]*"|\d+)'
)


class Keeper:
    """Take what a server has kept, as systemd and `penstock-keeper` do."""

    def __init__(self, path: str) -> None:
        self.kept: dict[str, list[int]] = {}
        self._channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._channel.bind(path)
        self._channel.setblocking(False)
        asyncio.get_running_loop().add_reader(self._channel, self._take)

    def _take(self) -> None:
        room = socket.CMSG_SPACE(struct.calcsize("8i"))
        data, parts, _, _ = self._channel.recvmsg(4096, room, socket.MSG_CMSG_CLOEXEC)
        fields = dict(line.partition("=")[::2] for line in data.decode().split("\n"))
        fds = array.array("i")
        for _, _, value in parts:
            fds.frombytes(value)
        if "FDSTORE" in fields:
            self.kept.setdefault(fields["FDNAME"], []).extend(fds)
        elif "FDSTOREREMOVE" in fields:
            for fd in self.kept.pop(fields["FDNAME"], ()):
                os.close(fd)

    def pass_on(self) -> LeftReplies:
        """What the next server finds: copies, since this keeper keeps its own."""
        return LeftReplies({name: [os.dup(fd) for fd in fds] for name, fds in self.kept.items()})

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._channel)
        self._channel.close()
        for fd in (fd for fds in self.kept.values() for fd in fds):
            os.close(fd)


@pytest.fixture
async def keeper(tmp_path, monkeypatch):
    path = str(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", path)
    made = Keeper(path)
    yield made
    keeper_channel.close_channel()
    made.close()


@pytest.fixture
async def servers(tmp_path, monkeypatch):
    """Start servers, and let them die."""
    running: list[ApiServer] = []
    writers: list[asyncio.StreamWriter] = []

    class Servers:
        async def start(self, policy=None, **fields) -> tuple[ApiServer, FakeAppliance]:
            tokenizer = Tokenizer(byte_level(), chat_template=CHATML)
            appliance = FakeAppliance(tokenizer, **fields)
            path = tmp_path / f"{len(running)}.sock"
            (listener,) = [bind_socket(path)] if policy is None else bind_tcp("127.0.0.1", 0)
            server = ApiServer(build_app(appliance), [listener], policy)
            await server.start()
            running.append(server)
            return server, appliance

        async def kill(self, server: ApiServer) -> None:
            """End it as SIGKILL would: it writes nothing, and shuts nothing down."""
            with monkeypatch.context() as patch:
                patch.setattr(connection, "forget", lambda *_: None)
                patch.setattr(kept_replies.ReplyFile, "write", lambda *_: None)
                for each in list(server._connections):
                    each.transport.abort()
                await asyncio.sleep(0)
                await server.stop(0)
            running.remove(server)

        async def ask(self, server: ApiServer, path: str, body: dict, header: str = "X: y"):
            """POST to a server; the reader and the writer of the connection."""
            where = server._listeners[0].getsockname()
            is_tcp = isinstance(where, tuple)
            opened = (
                asyncio.open_connection(*where) if is_tcp else asyncio.open_unix_connection(where)
            )
            reader, writer = await opened
            writers.append(writer)
            data = json.dumps({"stream": True, "seed": 1, **body}).encode()
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n"
            writer.write(f"{head}{header}\r\nConnection: close\r\n\r\n".encode() + data)
            return reader, writer

    yield Servers()
    for writer in writers:
        writer.close()
    for each in running:
        await each.stop(0)


def said(received: bytes) -> tuple[bytes, bytes]:
    """The status line, and the events without what varies from one request to the next."""
    head, _, rest = received.partition(b"\r\n\r\n")
    body, is_chunked = rest, b"chunked" in head
    while is_chunked and rest:
        body = body if rest is not body else b""
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return head.partition(b"\r\n")[0], _VARIES.sub(b'"varies": 0', body)


async def closed(appliance) -> None:
    await until(lambda: len(appliance.closed) == len(appliance.submitted))


@pytest.mark.parametrize("name", ASKED)
async def test_a_client_reads_the_undisturbed_reply_wherever_its_server_dies(keeper, servers, name):
    first, appliance = await servers.start()
    reader, _ = await servers.ask(first, *ASKED[name])
    undisturbed = await asyncio.wait_for(reader.read(), 60)
    await closed(appliance)
    for size in (0, 200, 700, 2000, len(undisturbed) - 20):
        server, appliance = await servers.start(interval_s=0.0005)
        if size == 0:
            appliance.gate.clear()
        reader, writer = await servers.ask(server, *ASKED[name])
        await until(lambda one=appliance: one.submitted and keeper.kept)
        received = b""
        while len(received) < size and (part := await reader.read(size - len(received))):
            received += part
        await servers.kill(server)
        second, later = await servers.start()
        for left in keeper.pass_on().hand_over():
            second.take_up(left)
        received += await asyncio.wait_for(reader.read(), 60)
        assert said(received) == said(undisturbed)
        writer.close()
        await until(lambda: not keeper.kept)
        assert len(later.submitted) <= 1
        await closed(later)


@pytest.mark.parametrize("name", ASKED)
async def test_what_was_drawn_for_a_request_is_the_next_servers_too(keeper, servers, name):
    def drawn(request):
        seeds = [sequence.spec.sampling.seed for sequence in request.sequences]
        return request.request_id, request.received_at, seeds

    path, body = ASKED[name]
    server, appliance = await servers.start(interval_s=0.005)
    reader, _ = await servers.ask(server, path, {**body, "seed": None})
    await until(lambda: appliance.submitted and keeper.kept)
    await servers.kill(server)
    second, later = await servers.start()
    for left in keeper.pass_on().hand_over():
        second.take_up(left)
    await asyncio.wait_for(reader.read(), 60)
    assert drawn(later.submitted[0]) == drawn(appliance.submitted[0])
    await closed(later)


async def test_the_time_of_the_dead_server_is_no_time_of_tokenizing(keeper, servers):
    server, appliance = await servers.start()
    appliance.gate.clear()
    reader, _ = await servers.ask(server, *ASKED["completion"])
    await until(lambda: appliance.submitted and keeper.kept)
    await servers.kill(server)
    await asyncio.sleep(0.5)
    began_ns = time.monotonic_ns()
    second, later = await servers.start()
    for left in keeper.pass_on().hand_over():
        second.take_up(left)
    await asyncio.wait_for(reader.read(), 60)
    stamps = later.submitted[0].sequences[0].stamps
    assert stamps.tokenized_ns - stamps.arrived_ns < time.monotonic_ns() - began_ns
    await closed(later)


def basic(key: str) -> str:
    return f"Authorization: Basic {base64.b64encode(f'x:{key}'.encode()).decode()}"


@pytest.fixture
def keyed(tmp_path):
    """A key, and the policy that knows it."""
    return one_key(tmp_path)


@pytest.mark.parametrize(
    "said", ["Authorization: Bearer {}", "X-Api-Key: {}", "api-key: {}", basic]
)
@pytest.mark.parametrize("is_of_before", [False, True])
async def test_a_key_continues_its_request_without_lying_in_a_journal(
    keeper, servers, keyed, monkeypatch, said, is_of_before
):
    key, policy = keyed
    header = said(key) if callable(said) else said.format(key)
    server, appliance = await servers.start(policy, interval_s=0.005)
    with monkeypatch.context() as patch:
        if is_of_before:  # a version that kept the whole head, and no digest
            patch.setattr(connection, "SECRETS", ())
            patch.setattr(connection, "key_digests", lambda _: ())
        reader, _ = await servers.ask(server, *ASKED["completion"], header)
        await until(lambda: appliance.submitted and keeper.kept)
    written = b""
    for fd in (fd for fds in keeper.kept.values() for fd in fds):
        with contextlib.suppress(OSError):
            written += os.pread(fd, 1 << 20, 0)
    shown = header.partition(": ")[2].encode()
    assert (shown in written, key_digest(key) in written) == (is_of_before, not is_of_before)
    await servers.kill(server)
    second, later = await servers.start(policy)
    for left in keeper.pass_on().hand_over():
        second.take_up(left)
    assert (await asyncio.wait_for(reader.read(), 60)).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert [request.peer.key for request in later.submitted] == ["laptop"]
    await closed(later)


async def test_a_key_that_is_gone_continues_nothing(keeper, servers, keyed):
    key, policy = keyed
    server, appliance = await servers.start(policy, interval_s=0.01)
    reader, _ = await servers.ask(server, *ASKED["completion"], f"X-Api-Key: {key}")
    await until(lambda: appliance.submitted and keeper.kept)
    await servers.kill(server)
    other = tuple(dataclasses.replace(each, digest=bytes(32)) for each in policy.keys)
    second, later = await servers.start(dataclasses.replace(policy, keys=other))
    for left in keeper.pass_on().hand_over():
        second.take_up(left)
    assert b"error" in await asyncio.wait_for(reader.read(), 60)
    assert not later.submitted


async def test_a_digest_is_no_key(servers, keyed):
    """Whoever reads a journal cannot ask with what is there."""
    key, policy = keyed
    server, appliance = await servers.start(policy)
    digest = key_digest(key)
    for shown in (digest.hex(), base64.b64encode(digest).decode(), f"sha256:{digest.hex()}"):
        reader, _ = await servers.ask(server, *ASKED["completion"], f"X-Api-Key: {shown}")
        assert (await reader.read()).split()[1] == b"401"
    assert not appliance.submitted


async def test_a_reply_on_an_open_connection_leaves_nothing_with_the_keeper(keeper, servers):
    server, appliance = await servers.start()
    path, body = ASKED["completion"]
    reader, writer = await asyncio.open_unix_connection(server._listeners[0].getsockname())
    for _ in range(3):
        data = json.dumps({**body, "stream": False}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
        size = int(re.search(rb"content-length: (\d+)", head)[1])
        assert json.loads(await reader.readexactly(size))["choices"]
        await until(lambda: not keeper.kept)
    writer.close()
    await closed(appliance)


async def test_a_client_that_hangs_up_leaves_nothing_with_the_keeper(keeper, servers):
    server, appliance = await servers.start(interval_s=0.01)
    reader, writer = await servers.ask(server, *ASKED["chat"])
    await reader.readuntil(b"data: ")
    assert keeper.kept
    writer.close()
    await until(lambda: not keeper.kept)
    await closed(appliance)


async def test_a_client_that_leaves_before_its_request_is_admitted_is_no_fault_of_the_keeper(
    keeper, servers, monkeypatch, caplog
):
    server, appliance = await servers.start()
    decode = generation.decode

    async def lose_the_client(*args):
        (each,) = server._connections
        each.transport.abort()
        await until(lambda: not server._connections)
        return await decode(*args)

    monkeypatch.setattr(generation, "decode", lose_the_client)
    await servers.ask(server, *ASKED["chat"])
    await until(lambda: appliance.closed)
    assert keeper_channel.keeper_problem() is None
    assert not keeper.kept
    assert not [r for r in caplog.records if r.name.startswith("penstock")]


@pytest.mark.parametrize("has_begun", [True, False])
async def test_a_request_that_cannot_continue_gets_an_error_and_its_row(keeper, servers, has_begun):
    server, appliance = await servers.start(interval_s=0.0005)
    if not has_begun:
        appliance.gate.clear()
    body = ASKED["chat"][1] | ({} if has_begun else {"stream": False})
    reader, _ = await servers.ask(server, "/v1/chat/completions", body)
    await until(lambda: appliance.submitted and keeper.kept)
    received = await reader.readuntil(b"data: ") if has_begun else b""
    await servers.kill(server)
    second, later = await servers.start()
    later.model = later.model.limited_to(100)
    later._model = type(later._model)(
        **{name: getattr(later._model, name) for name in later._model.__slots__}
        | {"model_id": "another"}
    )
    rows = []
    (left,) = keeper.pass_on().hand_over()
    told = (left.request_id, left.journal.num_deaths)
    left.on_failed = lambda: rows.append((*told, left.http_status))
    second.take_up(left)
    received += await asyncio.wait_for(reader.read(), 60)
    status, text = said(received)
    assert status.split()[1] == (b"200" if has_begun else b"503")
    assert b"daemon_died" in text
    assert text.endswith(b"[DONE]\n\n") == has_begun
    (request,) = appliance.submitted
    await until(lambda: rows == [(request.request_id, 1, 200 if has_begun else 503)])
    assert not later.submitted


async def test_a_client_that_leaves_between_two_servers_has_the_row_of_one_that_left(
    keeper, servers
):
    server, _ = await servers.start(interval_s=0.0005)
    reader, writer = await servers.ask(server, *ASKED["chat"])
    await reader.readuntil(b"data: ")
    await servers.kill(server)
    writer.close()
    await writer.wait_closed()
    second, later = await servers.start()
    rows = []
    (left,) = keeper.pass_on().hand_over()
    left.on_failed = lambda: rows.append(left.http_status)
    second.take_up(left)
    await until(lambda: rows == [499] and not keeper.kept)
    assert not later.submitted


async def test_an_answered_reply_is_only_sent(keeper, servers):
    server, appliance = await servers.start()
    undisturbed_reader, _ = await servers.ask(server, *ASKED["chat"])
    undisturbed = await asyncio.wait_for(undisturbed_reader.read(), 60)
    big = {"messages": MESSAGES, "max_tokens": 200, "logprobs": True, "top_logprobs": 20, "n": 8}
    with socket.socket(socket.AF_UNIX) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, server._listeners[0].getsockname())
        data = json.dumps({"stream": False, **big}).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        client.sendall(head.encode() + data)
        await until(lambda: len(appliance.closed) == 2)
        assert keeper.kept  # the client has not read it
        await servers.kill(server)
        second, later = await servers.start()
        (left,) = keeper.pass_on().hand_over()
        assert left.journal.is_complete
        left.is_answered = True
        second.take_up(left)
        received, loop = b"", asyncio.get_running_loop()
        while part := await asyncio.wait_for(loop.sock_recv(client, 1 << 16), 60):
            received += part
    assert undisturbed
    size = int(re.search(rb"content-length: (\d+)", received)[1])
    assert len(received.partition(b"\r\n\r\n")[2]) == size
    assert not later.submitted
    await until(lambda: not keeper.kept)


async def test_a_stream_is_kept_alive_until_it_continues(keeper, servers, monkeypatch):
    monkeypatch.setattr(kept_replies, "PING_S", 0.01)
    server, _ = await servers.start(interval_s=0.0005)
    reader, _ = await servers.ask(server, *ASKED["chat"])
    received = await reader.readuntil(b"data: ")
    await servers.kill(server)
    found = keeper.pass_on()
    pinging = asyncio.create_task(found.ping())
    for _ in range(3):
        received += await asyncio.wait_for(reader.readuntil(b": keep-alive\n\n"), 60)
    pinging.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await pinging
    second, _ = await servers.start()
    for left in found.hand_over():
        second.take_up(left)
    received += await asyncio.wait_for(reader.read(), 60)
    _, text = said(received)
    first, _ = await servers.start()
    reader, _ = await servers.ask(first, *ASKED["chat"])
    _, undisturbed = said(await asyncio.wait_for(reader.read(), 60))
    assert text.count(b": keep-alive\n\n") >= 3
    assert text.replace(b": keep-alive\n\n", b"") == undisturbed


def left_stream(written: bytes, ping: bytes) -> LeftReply:
    """A stream that a dead daemon has written so far; its journal cannot grow once it is sealed."""
    made = Journal()
    made.open(Head(journals.VERSION, b"", ping, "tiny", None), [b"request"])
    fd = os.memfd_create("journal", os.MFD_ALLOW_SEALING)
    os.write(fd, os.pread(made.fd, 1 << 16, 0))
    made.close()
    ours, client = socket.socketpair()
    client.close()
    reply = os.memfd_create("reply")
    os.write(reply, written)
    return LeftReply("reply", "cmpl-1", ours, reply, Journal(fd))


HEADERS = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b"9\r\ndata: a\n\n\r\n"
PING = b"4\r\n: a\n\n\r\n"


@pytest.mark.parametrize(
    ("written", "is_pinged"),
    [
        (HEADERS, True),
        (HEADERS + EVENT, True),
        (HEADERS + EVENT[:-6], False),
        (HEADERS + EVENT[:-2], False),
        (HEADERS + EVENT + b"0\r\n\r\n", False),
    ],
)
async def test_a_ping_comes_between_two_events_of_a_stream_that_has_not_ended(written, is_pinged):
    left = left_stream(written, PING)
    left.ping()
    assert os.pread(left.fd, 1 << 10, 0) == written + PING * is_pinged
    left.end()


async def test_a_ping_that_the_journal_has_no_room_for_is_not_sent():
    left = left_stream(HEADERS, PING)
    fcntl.fcntl(left.journal.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    left.ping()
    assert os.pread(left.fd, 1 << 10, 0) == HEADERS
    left.end()


async def test_only_a_stream_that_is_silent_for_long_is_kept_alive(keeper, servers, monkeypatch):
    monkeypatch.setattr(kept_replies, "LOOKS_PER_PING", 1000)
    server, _ = await servers.start(interval_s=0.0005)
    reader, _ = await servers.ask(server, *ASKED["chat"])
    await reader.readuntil(b"data: ")
    await servers.kill(server)
    found = keeper.pass_on()
    (left,) = found.replies
    size = os.fstat(left.fd).st_size
    pinging = asyncio.create_task(found.ping())
    await asyncio.sleep(0.1)
    assert os.fstat(left.fd).st_size == size
    os.utime(left.fd, (0, 0))
    await until(lambda: os.fstat(left.fd).st_size > size)
    pinging.cancel()
    assert left.silent_s < kept_replies.PING_S
    os.utime(left.fd, (0, 0))
    found.hand_over()
    assert left.journal.silent_s > kept_replies.PING_S  # counts until the next ping
    left.end()


async def test_replies_that_wait_at_a_stop_end_with_an_error(keeper, servers):
    server, _ = await servers.start(interval_s=0.0005)
    reader, _ = await servers.ask(server, *ASKED["message"])
    received = await reader.readuntil(b"data: ")
    await servers.kill(server)
    found, rows = keeper.pass_on(), []
    (left,) = found.replies
    left.on_failed = lambda: rows.append(left.http_status)
    found.end()
    received += await asyncio.wait_for(reader.read(), 60)
    assert b'"error"' in said(received)[1]
    assert rows == [200]
    await until(lambda: not keeper.kept)


async def test_a_whole_reply_that_waits_at_a_stop_is_a_503(keeper, servers):
    server, appliance = await servers.start()
    appliance.gate.clear()
    reader, _ = await servers.ask(server, *ASKED["whole"])
    await until(lambda: appliance.submitted and keeper.kept)
    await servers.kill(server)
    found, rows = keeper.pass_on(), []
    (left,) = found.replies
    left.on_failed = lambda: rows.append(left.http_status)
    found.end()
    assert (await asyncio.wait_for(reader.read(), 60)).split()[1] == b"503"
    assert rows == [503]
    await until(lambda: not keeper.kept)


@pytest.mark.parametrize("name", ["chat", "whole"])
async def test_a_reply_whose_files_cannot_grow_goes_on_without_the_keeper(keeper, servers, name):
    server, appliance = await servers.start(interval_s=0.001)
    reader, _ = await servers.ask(server, *ASKED[name])
    undisturbed = await asyncio.wait_for(reader.read(), 60)
    reader, _ = await servers.ask(server, *ASKED[name])
    await until(lambda: len(appliance.submitted) == 2 and keeper.kept)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, limits[1]))
    try:
        received = await asyncio.wait_for(reader.read(), 60)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert said(received) == said(undisturbed)
    await until(lambda: not keeper.kept)
    await closed(appliance)


async def test_without_a_keeper_nothing_is_recorded(servers, monkeypatch):
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    server, appliance = await servers.start()
    reader, _ = await servers.ask(server, *ASKED["chat"])
    assert b"[DONE]" in await asyncio.wait_for(reader.read(), 60)
    (request,) = appliance.submitted
    assert type(request.inbox).__name__ == "Inbox"


async def test_a_keeper_that_cannot_be_reached_costs_only_the_next_life(
    servers, monkeypatch, caplog
):
    monkeypatch.setenv("NOTIFY_SOCKET", "/nonexistent")
    server, _ = await servers.start()
    reader, _ = await servers.ask(server, *ASKED["chat"])
    assert b"[DONE]" in await asyncio.wait_for(reader.read(), 60)
    told = [r.levelname for r in caplog.records if r.name.startswith("penstock")]
    assert told == ["WARNING"]


async def test_what_the_keeper_has_no_room_for_is_told_once_and_answered(
    keeper, servers, monkeypatch, caplog
):
    monkeypatch.setenv("FDSTORE", "3")
    keeper_channel.close_channel()
    server, appliance = await servers.start()
    appliance.gate.clear()
    asked = [await servers.ask(server, *ASKED["chat"]) for _ in range(4)]
    await until(lambda: len(appliance.submitted) == 4 and keeper.kept)
    assert len(keeper.kept) == 1
    appliance.gate.set()
    for reader, _ in asked:
        assert b"[DONE]" in await asyncio.wait_for(reader.read(), 60)
    told = [r.getMessage() for r in caplog.records if r.name.startswith("penstock")]
    assert len(told) == 1
    await until(lambda: not keeper.kept)
