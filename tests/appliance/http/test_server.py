from __future__ import annotations

import asyncio
import gc
import os
import pwd
import signal
import sys
from types import SimpleNamespace

import pytest

from appliance.api.routes import build_app
from appliance.daemon.survival import keeper_channel
from appliance.http.connection import ClientProtocol
from appliance.http.listeners import bind_socket
from appliance.http.server import ApiServer
from engine.errors import RequestError
from engine.text.tokenizer import Tokenizer
from tests.appliance.api_server import Served, serving
from tests.tiny_tokenizers import byte_level
from tests.worlds.daemon_parts import FakeAppliance, until


@pytest.fixture
def appliance():
    return FakeAppliance(Tokenizer(byte_level()))


@pytest.fixture
async def served(appliance, tmp_path):
    async with serving(appliance, tmp_path / "api.sock") as served:
        yield served


async def test_the_peer_is_who_the_kernel_says(served, appliance):
    script = (
        "import http.client, socket, sys\n"
        "c = http.client.HTTPConnection('x'); c.sock = socket.socket(socket.AF_UNIX)\n"
        "c.sock.connect(sys.argv[1])\n"
        "for _ in range(2):\n"
        "    c.request('POST', '/v1/completions', '{\"prompt\": \"a\"}'); c.getresponse().read()\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, str(served.path))
    assert await process.wait() == 0
    for request in appliance.submitted:
        peer = request.peer
        assert (peer.pid, peer.uid, peer.gid) == (process.pid, os.getuid(), os.getgid())
    user = pwd.getpwuid(os.getuid()).pw_name
    assert [request.peer.user for request in appliance.submitted] == [user, user]


GARBAGE = {
    "tls": b"\x16\x03\x01\x02\x00\x01\x00",
    "words": b"hello\r\n\r\n",
    "negative length": b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "header flood": b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X-Flood: y\r\n" * 20_000,
    "endless path": b"GET /" + b"a" * 100_000,
    "bad chunk": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"zz\r\n",
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
async def test_what_is_not_http_is_answered_and_cut_off(served, garbage):
    try:
        reader, writer = await served.connect()
        writer.write(garbage)
        async with asyncio.timeout(120):
            reply = await reader.read()
    except ConnectionError:  # it was cut off while it still flooded
        reply = b""
    assert reply.split(b" ", 2)[:2] in ([b""], [b"HTTP/1.1", b"400"], [b"HTTP/1.1", b"431"])
    assert not reply or b'"code":"invalid_http"' in reply or b'"code":"headers_too_large"' in reply
    assert (await served.complete()).status_code == 200


async def test_garbage_behind_an_open_stream_harms_only_its_own_connection(served, appliance):
    appliance.interval_s = 0.005
    body = {"prompt": "hello", "stream": True, "max_tokens": 30}
    reader, writer = await served.post("/v1/completions", body)
    await reader.readuntil(b"data: ")
    writer.write(b"\x00garbage\r\n\r\n")
    await reader.read()
    writer.close()
    await until(lambda: appliance.closed)
    assert (await served.complete()).status_code == 200


CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
ENDINGS = {
    "a text": ("/v1/completions", {"prompt": "hello", "max_tokens": 3}),
    "a chat": ("/v1/chat/completions", CHAT),
    "a stream": ("/v1/chat/completions", {**CHAT, "stream": True}),
    "no path": ("/v1/lost", {}),
    "no field": ("/v1/completions", {"prompt": []}),
    "no grammar": ("/v1/completions", {"prompt": "a", "grammar": "root ::= a"}),
    "no chat": ("/v1/chat/completions", {**CHAT, "response_format": {"type": "json_schema"}}),
}


@pytest.mark.parametrize(("path", "body"), ENDINGS.values(), ids=ENDINGS)
async def test_a_connection_is_freed_without_a_garbage_collection(served, path, body):
    def existing():
        kinds = (ClientProtocol, RequestError)
        return [each for each in gc.get_objects() if isinstance(each, kinds)]

    def left():
        return [each for each in existing() if id(each) not in before]

    await served.complete()
    await served.http.aclose()
    gc.collect()
    gc.disable()
    kept = existing()  # by other tests
    before = set(map(id, kept))
    try:
        reader, writer = await served.post(path, body)
        await reader.read(1)
        assert left()
        writer.write_eof()
        await reader.read()
        writer.close()
        await until(lambda: not left(), seconds=10.0)
    finally:
        gc.enable()


async def test_one_connection_serves_many_requests(served, appliance):
    for _ in range(5):
        await served.complete()
    assert len({id(request) for request in appliance.submitted}) == 5
    assert len({request.peer.pid for request in appliance.submitted}) == 1


async def test_stopping_lets_replies_end_and_takes_nothing_new(appliance, tmp_path):
    path = tmp_path / "api.sock"
    appliance.interval_s = 0.02
    server = ApiServer(build_app(appliance), [bind_socket(path)])
    await server.start()
    served = Served(appliance, path)
    frames = asyncio.create_task(served.http.get("/v1/penstock/stream"))
    reply = asyncio.create_task(served.complete(max_tokens=20, stream=True))
    await until(lambda: appliance.live)
    await server.stop(grace_s=5.0)
    assert "[DONE]" in (await reply).text
    assert (await frames).status_code == 200
    assert [status for _id, status in appliance.closed] == [200]
    assert not path.exists()
    await served.close()


async def test_what_outlives_the_grace_is_cut_and_closed_once(appliance, tmp_path, caplog):
    path = tmp_path / "api.sock"
    appliance.gate.clear()
    server = ApiServer(build_app(appliance), [bind_socket(path)])
    await server.start()
    served = Served(appliance, path)
    _reader, writer = await served.post("/v1/completions", {"prompt": "hello"})
    await until(lambda: appliance.live)
    await server.stop(grace_s=0.05)
    assert [status for _id, status in appliance.closed] == [503]
    assert appliance.submitted[0].cancelled_by == "drain"
    assert caplog.records[0].levelname == "WARNING"
    writer.close()
    await served.close()


async def test_a_request_that_is_not_whole_at_a_stop_is_refused_in_silence(
    appliance, tmp_path, caplog
):
    path = tmp_path / "api.sock"
    server = ApiServer(build_app(appliance), [bind_socket(path)])
    await server.start()
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 90\r\n\r\n{")
    await until(lambda: server._server.server_state.tasks)
    await server.stop(grace_s=0.3)
    assert (await reader.read()).startswith(b"HTTP/1.1 503 ")
    assert not caplog.records
    writer.close()


async def test_a_waiting_request_is_answered_at_a_stop(appliance, tmp_path, caplog):
    path = tmp_path / "api.sock"
    server = ApiServer(build_app(appliance), [bind_socket(path)], is_restart=True)
    await server.start()
    served = Served(appliance, path)
    reply = asyncio.create_task(served.complete())
    await until(lambda: server._server.server_state.tasks)
    await server.stop(grace_s=5.0)
    assert (await reply).status_code == 200
    assert not caplog.records
    await served.close()


async def test_while_a_restart_waits_for_an_idle_client_others_are_served(
    appliance, tmp_path, monkeypatch
):
    monkeypatch.setattr("appliance.http.server.STRAGGLER_S", 60.0)
    path = tmp_path / "api.sock"
    server = ApiServer(build_app(appliance), [bind_socket(path)])
    await server.start()
    idle, other = Served(appliance, path), Served(appliance, path)
    await idle.complete()  # its connection stays open
    handing_over = asyncio.create_task(server.hand_over_all())
    await asyncio.sleep(0)
    assert (await other.complete()).headers["connection"] == "close"
    assert not handing_over.done()
    reader, writer = await other.connect()  # and says nothing, as a health check does
    await until(lambda: len(server._connections) == 2)  # accepted: who waits is for the next daemon
    assert (await idle.complete()).headers["connection"] == "close"
    async with asyncio.timeout(30):
        await handing_over
        assert await reader.read() == b""
    writer.close()
    for each in (idle, other):
        await each.close()
    await server.stop(grace_s=0.1)


async def test_a_socket_file_of_someone_else_is_left(appliance, tmp_path):
    path = tmp_path / "api.sock"
    server = ApiServer(build_app(appliance), [bind_socket(path)])
    await server.start()
    path.unlink()
    with bind_socket(path):
        await server.stop(grace_s=0.1)
        assert path.exists()


async def test_a_server_that_never_started_leaves_no_socket(appliance, tmp_path):
    path = tmp_path / "api.sock"
    await ApiServer(build_app(appliance), [bind_socket(path)]).stop(grace_s=0.1)
    assert not path.exists()


async def test_signals_stay_the_daemons(appliance, tmp_path):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    async with serving(appliance, tmp_path / "api.sock"):
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


async def test_a_body_that_breaks_after_its_reply_is_cut_off(served, caplog):
    reader, writer = await served.connect()
    writer.write(b"POST /nothing HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
    async with asyncio.timeout(120):
        assert (await reader.readline()).startswith(b"HTTP/1.1 404 ")
        writer.write(b"zz\r\n")
        await reader.read()
    assert "Traceback" not in caplog.text
    assert (await served.complete()).status_code == 200


async def test_the_keeper_is_told_between_requests_of_every_kind(served, monkeypatch):
    """A loop that has only begun with a flood of them is not taken for one that hangs."""
    told, clock = [], SimpleNamespace(s=1000.0)
    monkeypatch.setattr(keeper_channel, "notify_watchdog", lambda: told.append(clock.s))
    monkeypatch.setattr(keeper_channel, "time", SimpleNamespace(monotonic=lambda: clock.s))
    monkeypatch.setattr(keeper_channel.BUSY_LOOP, "_watched_s", clock.s)
    monkeypatch.setattr(keeper_channel.BUSY_LOOP, "_told_s", clock.s)
    asked = (
        ("POST", "/v1/completions", {"content": b"no JSON"}),
        ("POST", "/v1/completions", {"json": {"prompt": "a"}}),
        ("POST", "/v1/tokenize", {"json": {"prompt": "a"}}),
        ("GET", "/v1/requests", {}),
        ("GET", "/metrics", {}),
        ("GET", "/nowhere", {}),
        ("GET", "/health", {"headers": {"x-much": "a" * 60_000}}),
    )
    for number, (method, path, more) in enumerate(asked):
        clock.s += keeper_channel.BUSY_TELL_S
        await served.http.request(method, path, **more)
        assert told == [1000 + (1 + n) * keeper_channel.BUSY_TELL_S for n in range(1 + number)]
