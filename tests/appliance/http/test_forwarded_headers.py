"""A request is judged by its connection: no header of a proxy changes who asks, or how."""

from __future__ import annotations

import dataclasses
import inspect

import httpx
import pytest
import uvicorn

from appliance.api.routes import build_app
from appliance.http.listeners import bind_socket, bind_tcp
from appliance.http.server import ApiServer
from engine.text.tokenizer import Tokenizer
from tests.appliance.api_server import one_key, started, url_of
from tests.tiny_tokenizers import CHATML, byte_level
from tests.worlds.daemon_parts import FakeAppliance

CLAIMS = {
    "forwarded": "for=127.0.0.1;host=localhost;proto=https",
    "x-forwarded-proto": "https",
    "x-forwarded-protocol": "ssl",
    "x-forwarded-scheme": "https",
    "x-forwarded-ssl": "on",
    "x-forwarded-for": "127.0.0.1",
    "x-forwarded-host": "localhost",
    "x-forwarded-port": "443",
    "x-forwarded-server": "localhost",
    "x-forwarded-prefix": "/health",
    "x-forwarded-path": "/health",
    "x-forwarded-uri": "/health",
    "x-forwarded-method": "GET",
    "x-forwarded-user": "root",
    "x-forwarded-client-cert": "Subject=root",
    "x-original-host": "localhost",
    "x-original-url": "/health",
    "x-original-uri": "/health",
    "x-original-method": "GET",
    "x-rewrite-url": "/health",
    "x-http-method-override": "GET",
    "x-real-ip": "127.0.0.1",
    "x-client-ip": "127.0.0.1",
    "x-cluster-client-ip": "127.0.0.1",
    "x-remote-addr": "127.0.0.1",
    "x-remote-user": "root",
    "x-url-scheme": "https",
    "x-host": "localhost",
    "x-scheme": "https",
    "front-end-https": "on",
    "true-client-ip": "127.0.0.1",
    "cf-connecting-ip": "127.0.0.1",
    "cf-visitor": '{"scheme":"https"}',
    "client-cert": ":cm9vdA==:",
    "via": "1.1 localhost",
    "remote-user": "root",
}
"""What proxies and frameworks read in place of the connection, each with its boldest value."""
ALL_OF_THEM = [*({name: value} for name, value in CLAIMS.items()), CLAIMS]
FOREIGN = {"host": "evil.example"}


@pytest.fixture
async def served(tmp_path):
    """A server on TCP that asks for no key, and clients on its port and on its socket."""
    key, policy = one_key(tmp_path, "page", "viewer", asks_for_keys=False)
    listeners = [bind_socket(tmp_path / "s"), *bind_tcp("127.0.0.1", 0)]
    appliance = FakeAppliance(Tokenizer(byte_level(), chat_template=CHATML))
    on_socket = httpx.AsyncHTTPTransport(uds=str(tmp_path / "s"))
    async with (
        started(appliance, listeners, policy) as server,
        httpx.AsyncClient(base_url=url_of(listeners[1])) as tcp,
        httpx.AsyncClient(base_url="http://localhost", transport=on_socket) as unix,
    ):
        yield server, tcp, unix, {"authorization": f"Bearer {key}"}


async def test_no_header_opens_what_a_refusal_closes(served):
    server, tcp, _unix, key = served
    open_to_all, closed = server.policy, dataclasses.replace(server.policy, asks_for_keys=True)
    for policy, method, path, headers, status in (
        (open_to_all, "GET", "/v1/requests", FOREIGN, 403),
        (open_to_all, "GET", "/v1/models", {"origin": "https://evil.example"}, 403),
        (open_to_all, "GET", "/v1/models", {"origin": "null"}, 403),
        (open_to_all, "GET", "/v1/models", {"sec-fetch-site": "cross-site"}, 403),
        (open_to_all, "POST", "/v1/penstock/drain", {}, 403),
        (open_to_all, "GET", "/v1/models", {**key, **FOREIGN}, 403),
        (closed, "GET", "/v1/models", {**key, **FOREIGN}, 403),
        (closed, "GET", "/health", FOREIGN, 403),
        (closed, "GET", "/metrics", {}, 401),
        (closed, "GET", "/v1/models", {}, 401),
        (closed, "GET", "/v1/models", {"authorization": "Bearer guessed"}, 401),
        (closed, "POST", "/v1/penstock/drain", key, 403),
    ):
        server.policy = policy
        for claims in ALL_OF_THEM if FOREIGN.items() <= headers.items() else [CLAIMS]:
            reply = await tcp.request(method, path, headers={**claims, **headers})
            assert reply.status_code == status, (method, path, headers, claims)


async def test_no_header_changes_who_asks(served):
    server, tcp, unix, key = served
    for client, headers in ((tcp, {}), (tcp, key), (unix, {})):
        plain = await client.get("/v1/penstock/whoami", headers=headers)
        for claims in ALL_OF_THEM:
            claimed = await client.get("/v1/penstock/whoami", headers={**claims, **headers})
            assert (claimed.status_code, claimed.json()) == (200, plain.json()), claims
    for name in CLAIMS:
        claim = {name: "for=203.0.113.9" if name == "forwarded" else "203.0.113.9"}
        await tcp.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=claim)
        peer = server._app.state.appliance.submitted[-1].peer
        assert peer.address.startswith("127.0.0.1:"), claim


async def test_a_rebound_page_reads_nobodys_prompt(served):
    _server, tcp, _unix, _key = served
    secret = "my private question"
    asked = await tcp.post("/v1/responses", json={"model": "fake/tiny-model", "input": secret})
    assert asked.status_code == 200, asked.text
    path = f"/v1/responses/{asked.json()['id']}/input_items"
    assert secret in (await tcp.get(path)).text
    for headers in (FOREIGN, {**FOREIGN, "x-forwarded-proto": "https"}, {**CLAIMS, **FOREIGN}):
        reply = await tcp.get(path, headers=headers)
        assert (reply.status_code, reply.json()["error"]["code"]) == (403, "host_not_allowed")
        assert secret not in reply.text


UNSET = {
    "host": "127.0.0.1",
    "port": 8000,
    "uds": None,
    "fd": None,
    "http2": False,
    "ws_max_size": 1 << 24,
    "ws_max_queue": 32,
    "ws_ping_interval": 20.0,
    "ws_ping_timeout": 20.0,
    "ws_per_message_deflate": True,
    "env_file": None,
    "log_level": None,
    "use_colors": None,
    "interface": "auto",
    "reload": False,
    "reload_dirs": None,
    "reload_delay": 0.25,
    "reload_includes": None,
    "reload_excludes": None,
    "workers": None,
    "date_header": True,
    "forwarded_allow_ips": None,
    "root_path": "",
    "limit_concurrency": None,
    "limit_max_requests": None,
    "limit_max_requests_jitter": 0,
    "backlog": 2048,
    "timeout_notify": 30,
    "timeout_graceful_shutdown": None,
    "timeout_worker_healthcheck": 5,
    "callback_notify": None,
    "ssl_keyfile": None,
    "ssl_certfile": None,
    "ssl_keyfile_password": None,
    "ssl_ca_certs": None,
    "ssl_context_factory": None,
    "headers": None,
    "factory": False,
    "reset_contextvars": False,
}
"""Uvicorn's defaults that the server leaves as they are; each was read and found harmless."""
SET = {
    "ws": "none",
    "lifespan": "off",
    "loop": "none",
    "log_config": None,
    "access_log": False,
    "server_header": False,
    "proxy_headers": False,
}
SET_BY_OTHERS = {
    *("app", "http", "timeout_keep_alive", "h11_max_incomplete_event_size"),
    *("ssl_version", "ssl_cert_reqs", "ssl_ciphers"),  # of a TLS that uvicorn does not do here
}


def test_every_default_of_uvicorn_is_known():
    """A new option may believe headers again, or open something: read it, then list it here."""
    parameters = inspect.signature(uvicorn.Config).parameters
    unread = {
        name: one.default
        for name, one in parameters.items()
        if name not in SET.keys() | SET_BY_OTHERS and (name, one.default) not in UNSET.items()
    }
    assert unread == {}
    server = ApiServer(build_app(FakeAppliance(Tokenizer(byte_level()))), [])
    for name, value in SET.items():
        assert getattr(server._config, name) == value, name
