"""Web pages ask as CORS allows, and never without a key."""

from __future__ import annotations

import asyncio
import dataclasses

import httpx
import pytest

from appliance.http.access import AccessPolicy
from appliance.http.gate import LOCAL_USER
from appliance.http.listeners import bind_tcp
from engine.errors import ConfigError
from engine.text.tokenizer import Tokenizer
from tests.appliance.api_server import one_key, started, url_of
from tests.tiny_tokenizers import byte_level
from tests.worlds.daemon_parts import FakeAppliance

PAGE = {"origin": "https://app.example"}
ASKS = {
    **PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


@pytest.fixture
async def served(tmp_path):
    """A server on TCP, a client with a key, and the server's policy."""
    key, policy = one_key(tmp_path, "page")
    listeners = bind_tcp("127.0.0.1", 0)
    appliance = FakeAppliance(Tokenizer(byte_level()))
    async with (
        started(appliance, listeners, policy) as server,
        httpx.AsyncClient(base_url=url_of(listeners[0]), verify=False) as client,
    ):
        yield server, client, {"authorization": f"Bearer {key}"}


async def test_where_no_key_is_asked_for_programs_are_users_and_other_sites_pages_nobody(served):
    server, client, _ = served
    assert (await client.get("/v1/models")).status_code == 401
    server.policy = dataclasses.replace(server.policy, asks_for_keys=False)
    for headers in ({}, {"authorization": "Bearer EMPTY"}, {"origin": "http://localhost:3000"}):
        assert (await client.get("/v1/models", headers=headers)).status_code == 200
    told = (await client.get("/v1/penstock/whoami")).json()
    assert (told["role"], told["name"]) == ("user", LOCAL_USER)
    assert (await client.post("/v1/penstock/drain")).status_code == 403
    for headers, code in (
        (PAGE, "origin_not_allowed"),
        ({"origin": "null"}, "origin_not_allowed"),
        ({"origin": "http://localhost.evil.example"}, "origin_not_allowed"),
        ({"host": "evil.example"}, "host_not_allowed"),
    ):
        reply = await client.get("/v1/models", headers=headers)
        assert (reply.status_code, reply.json()["error"]["code"]) == (403, code)
    server.policy = dataclasses.replace(server.policy, cors_origins=(PAGE["origin"],))
    assert (await client.get("/v1/models", headers=PAGE)).status_code == 200


LOCAL = b"Host: localhost"


@pytest.mark.parametrize(
    ("version", "headers", "status"),
    [
        (b"1.1", [LOCAL], 200),
        (b"1.1", [LOCAL, b"Sec-Fetch-Site: none"], 200),
        (b"1.1", [LOCAL, b"Sec-Fetch-Site: cross-site", b"Origin: http://127.0.0.1:3000"], 200),
        (b"1.1", [LOCAL, b"Sec-Fetch-Site: cross-site"], 403),
        (b"1.1", [LOCAL, b"Origin: http://localhost", b"Origin: http://localhost"], 403),
        (b"1.1", [LOCAL, b"Origin: https://evil.example", b"Origin: http://localhost"], 403),
        (b"1.1", [b"Host:"], 403),
        (b"1.0", [], 403),
        (b"1.0", [LOCAL], 200),
    ],
)
async def test_without_keys_a_request_shows_that_no_foreign_page_sent_it(
    served, version, headers, status
):
    server, client, _ = served
    server.policy = dataclasses.replace(server.policy, asks_for_keys=False)
    reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
    head = [b"GET /v1/models HTTP/" + version, *headers, b"Connection: close"]
    writer.write(b"\r\n".join([*head, b"", b""]))
    assert int((await reader.read()).split()[1]) == status
    writer.close()


async def test_with_a_key_no_host_header_is_needed_and_health_needs_neither(served):
    _server, client, key = served
    shown = f"Authorization: {key['authorization']}".encode()
    for path, headers in ((b"/v1/models", [shown]), (b"/health", [])):
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        writer.write(b"\r\n".join([b"GET " + path + b" HTTP/1.0", *headers, b"", b""]))
        assert int((await reader.read()).split()[1]) == 200
        writer.close()


def test_a_socket_units_port_always_asks_for_keys():
    with pytest.raises(ConfigError):
        AccessPolicy(asks_for_keys=False).check_tcp("ListenStream")


async def test_without_the_setting_no_page_is_answered(served):
    _server, client, key = served
    asked = await client.options("/v1/models", headers=ASKS)
    assert asked.status_code == 401
    reply = await client.get("/v1/models", headers=PAGE | key)
    assert "access-control-allow-origin" not in reply.headers


@pytest.mark.parametrize("origin", ["https://app.example", "*"])
async def test_an_allowed_page_asks_without_a_key_and_reads_with_one(served, origin):
    server, client, key = served
    server.policy = dataclasses.replace(server.policy, cors_origins=(origin,))
    asked = await client.options("/v1/models", headers=ASKS)
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] == "https://app.example"
    assert asked.headers["access-control-allow-headers"] == "authorization,content-type"
    reply = await client.get("/v1/models", headers=PAGE | key)
    assert reply.headers["access-control-allow-origin"] == "https://app.example"
    assert "x-request-id" in reply.headers["access-control-expose-headers"]
    assert (await client.get("/v1/models", headers=PAGE)).status_code == 401


async def test_another_page_is_not_answered(served):
    server, client, key = served
    server.policy = dataclasses.replace(server.policy, cors_origins=("https://app.example",))
    other = {"origin": "https://evil.example"}
    assert (await client.options("/v1/models", headers=ASKS | other)).status_code == 401
    reply = await client.get("/v1/models", headers=other | key)
    assert "access-control-allow-origin" not in reply.headers
