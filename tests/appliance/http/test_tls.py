"""TLS on TCP: with a key and a certificate the daemon may be reached from other machines."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import shutil
import socket
import ssl
from pathlib import Path

import httpx
import openai
import pytest

from appliance.client.address import TcpAddress
from appliance.client.calls import Client, DaemonUnreachable
from appliance.http import rejected_connections
from appliance.http.api_keys import new_key, read_keys
from appliance.http.listeners import (
    bind_tcp,
)
from appliance.http.server import ApiServer
from appliance.http.tls import tls_context
from engine.errors import ConfigError
from engine.text.tokenizer import Tokenizer
from tests.appliance.api_server import one_key, started
from tests.tiny_tokenizers import byte_level
from tests.worlds.daemon_parts import FakeAppliance, until

FILES = Path(__file__).parents[2] / "fixtures" / "tls"
FIRST = FILES / "first.pem", FILES / "first.key.pem"
SECOND = FILES / "second.pem", FILES / "second.key.pem"


def trusting(certificate: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(certificate))


class Served:
    """A server on TLS, a key for it, and where it is."""

    def __init__(self, server: ApiServer, port: int, key: str) -> None:
        self.server, self.port, self.key = server, port, key
        self.url = f"https://127.0.0.1:{port}"
        self.shown = {"authorization": f"Bearer {key}"}

    def client(self, certificate: Path = FIRST[0]) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, verify=trusting(certificate))


@pytest.fixture
async def served(tmp_path):
    (listener,) = bind_tcp("127.0.0.1", 0)
    key, policy = one_key(tmp_path, tls=tls_context(*FIRST))
    appliance = FakeAppliance(Tokenizer(byte_level()))
    async with started(appliance, [listener], policy) as server:
        yield Served(server, listener.getsockname()[1], key)


async def test_the_official_client_streams_over_it(served):
    async with served.client() as http:
        client = openai.AsyncOpenAI(
            base_url=f"{served.url}/v1", api_key=served.key, http_client=http, max_retries=0
        )
        asked = {"model": "", "prompt": "hello", "max_tokens": 5}
        whole = await client.completions.create(**asked)
        stream = await client.completions.create(**asked, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == whole.choices[0].text


async def test_it_is_called_by_any_name_but_never_without_a_key(served):
    async with served.client() as client:
        for path, status in (("/v1/models", 401), ("/metrics", 401), ("/health", 200)):
            reply = await client.get(path, headers={"host": "box.example:8443"})
            assert reply.status_code == status, path
        named = {**served.shown, "host": "box.example:8443"}
        assert (await client.get("/v1/models", headers=named)).status_code == 200


async def test_metrics_are_open_only_where_the_policy_says_so(served):
    served.server.policy = dataclasses.replace(served.server.policy, has_open_metrics=True)
    async with served.client() as client:
        assert "vllm:lora_requests_info" in (await client.get("/metrics")).text
        for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions")):
            assert (await client.request(method, path)).status_code == 401, path


async def test_who_does_not_encrypt_gets_nothing_and_harms_nobody(served):
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(f"GET /health HTTP/1.1\r\nHost: x\r\n{served.shown}\r\n\r\n".encode())
    with contextlib.suppress(ConnectionError):
        assert b"HTTP/1.1 200" not in await reader.read()
    writer.close()
    async with served.client() as client:
        assert (await client.get("/v1/models", headers=served.shown)).status_code == 200


async def test_half_handshakes_give_way_to_who_has_a_key_and_are_not_said_to_be_told(
    served, caplog, monkeypatch
):
    served.server.policy = dataclasses.replace(served.server.policy, max_connections=12)
    halves = []
    try:
        for _ in range(40):
            halves.append(half := socket.create_connection(("127.0.0.1", served.port)))
            half.setblocking(False)
            half.send(b"\x16")
        async with served.client() as client:
            assert (await client.get("/v1/models", headers=served.shown)).status_code == 200
        monkeypatch.setattr(rejected_connections, "TELL_EVERY_S", 0.0)
        await until(lambda: not served.server._turned_away._counts)
        lines = [r.getMessage() for r in caplog.records if "max_connections" in r.getMessage()]
        assert lines
        assert all(", 0 with a reply" in line for line in lines)
    finally:
        for half in halves:
            half.close()


async def test_a_stream_ends_with_the_role_that_opened_it(served, tmp_path):
    key, line = new_key("desk", "operator")
    path = tmp_path / "more"

    def let_in(text):
        path.write_text(text)
        path.chmod(0o600)
        policy = dataclasses.replace(served.server.policy, keys=read_keys(path))
        served.server.policy = policy

    let_in(line)
    shown = {"authorization": f"Bearer {key}"}
    async with (
        served.client() as client,
        client.stream("GET", "/v1/penstock/stream", headers=shown) as reply,
    ):
        frames = reply.aiter_lines()
        assert await anext(frames)
        let_in(line.replace("operator", "user"))
        async with asyncio.timeout(120):
            async for _ in frames:
                pass


async def test_old_versions_are_not_spoken(served):
    context = trusting(FIRST[0])
    with pytest.warns(DeprecationWarning, match="deprecated"):
        context.minimum_version = ssl.TLSVersion.TLSv1
    with pytest.warns(DeprecationWarning, match="deprecated"):
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await asyncio.open_connection("127.0.0.1", served.port, ssl=context)


async def test_a_new_certificate_holds_for_new_connections(served):
    async with served.client() as old:
        assert (await old.get("/health")).status_code == 200
        served.server.policy = dataclasses.replace(served.server.policy, tls=tls_context(*SECOND))
        assert (await old.get("/health")).status_code == 200
        async with served.client(SECOND[0]) as new:
            assert (await new.get("/health")).status_code == 200
    async with served.client() as late:
        with pytest.raises(httpx.ConnectError):
            await late.get("/health")


async def test_our_own_client_checks_the_certificate(served, monkeypatch):
    monkeypatch.setenv("PENSTOCK_API_KEY", served.key)
    address = TcpAddress("127.0.0.1", served.port, is_tls=True)
    assert str(address) == served.url

    def ask():
        return Client(address).get("/v1/models")["data"]

    with pytest.raises(DaemonUnreachable, match="certificate") as refused:
        await asyncio.to_thread(ask)
    assert "SSL_CERT_FILE" in refused.value.hint
    monkeypatch.setenv("SSL_CERT_FILE", str(FIRST[0]))
    assert await asyncio.to_thread(ask)


@pytest.mark.parametrize(
    ("certificate", "key", "says"),
    [
        (FIRST[0], SECOND[1], "no certificate"),
        (FIRST[1], FIRST[1], "no certificate"),
        (FIRST[0], FILES / "missing", "cannot read"),
    ],
)
def test_files_that_are_wrong_are_named(certificate, key, says):
    with pytest.raises(ConfigError, match=says) as error:
        tls_context(certificate, key)
    assert error.value.where in ("tls_cert", "tls_key")


def test_a_daemon_beyond_loopback_says_so_and_reads_its_certificate_again(
    start_daemon, tiny_llama, tmp_path
):
    for name, source in zip(("c.pem", "k.pem"), FIRST, strict=True):
        shutil.copy(source, tmp_path / name)
    key, line = new_key("laptop", "viewer")
    (tmp_path / "keys").write_text(line)
    (tmp_path / "keys").chmod(0o600)
    with socket.socket() as probe:
        probe.bind(("0.0.0.0", 0))
        port = probe.getsockname()[1]
    files = {name: str(tmp_path / name) for name in ("c.pem", "k.pem", "keys")}
    daemon = start_daemon(
        *("--listen", f"0.0.0.0:{port}", "--api-keys", files["keys"]),
        *("--tls-cert", files["c.pem"], "--tls-key", files["k.pem"]),
        model=tiny_llama,
    ).wait_ready()
    assert f"https://0.0.0.0:{port}" in daemon.stderr
    assert "open to the network" in daemon.stderr
    url = f"https://127.0.0.1:{port}/v1/models"

    def status(certificate: Path) -> int | None:
        try:
            shown = {"authorization": f"Bearer {key}"}
            return httpx.get(url, headers=shown, verify=trusting(certificate)).status_code
        except httpx.ConnectError:
            return None

    assert (status(FIRST[0]), status(SECOND[0])) == (200, None)
    for name, source in zip(("c.pem", "k.pem"), SECOND, strict=True):
        shutil.copy(source, tmp_path / name)
    daemon.process.send_signal(1)
    daemon.wait_for(lambda: status(SECOND[0]) == 200)
    assert status(FIRST[0]) is None
