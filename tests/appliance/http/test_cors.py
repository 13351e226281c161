from __future__ import annotations

import dataclasses

import httpx
import pytest

from appliance.api.routes import build_app
from appliance.http.access import AccessPolicy, new_key, read_keys
from appliance.http.listeners import bind_tcp
from appliance.http.server import ApiServer
from engine.text.tokenizer import Tokenizer
from tests.fakes import FakeAppliance
from tests.tiny_tokenizers import byte_level

PAGE = {"origin": "https://app.example"}
ASKS = {
    **PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


@pytest.fixture
async def served(tmp_path):
    """A server on TCP, a client with a key, and the server's policy."""
    key, line = new_key("page", "user")
    path = tmp_path / "keys"
    path.write_text(line)
    path.chmod(0o600)
    listeners = bind_tcp("127.0.0.1", 0)
    app = build_app(FakeAppliance(Tokenizer(byte_level())))
    server = ApiServer(app, listeners, AccessPolicy(keys=read_keys(path)))
    await server.start()
    url = f"http://127.0.0.1:{listeners[0].getsockname()[1]}"
    async with httpx.AsyncClient(base_url=url) as client:
        yield server, client, {"authorization": f"Bearer {key}"}
    await server.stop(grace_s=1.0)


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
