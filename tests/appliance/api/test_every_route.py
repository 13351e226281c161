from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.api.routes import plain_path
from engine.text.tokenizer import Tokenizer
from tests.appliance.api_server import serving
from tests.appliance.peers import ALICE, client_of
from tests.fakes import FakeAppliance
from tests.tiny_tokenizers import CHATML, byte_level

GETS = [
    "/v1/models",
    "/v1/models/fake/tiny-model",
    "/health",
    "/ready",
    "/version",
    "/openapi.json",
    "/v1/requests",
    "/v1/penstock/state",
    "/v1/penstock/stream",
    "/v1/penstock/whoami",
    "/v1/penstock/log",
]


@pytest.fixture
def appliance():
    return FakeAppliance(Tokenizer(byte_level(), chat_template=CHATML))


@pytest.fixture
async def served(appliance, tmp_path):
    async with serving(appliance, tmp_path / "api.sock") as served:
        yield served


async def raw(served, head: str) -> tuple[str, bytes]:
    """Head and body of the reply to a request written by hand."""
    reader, writer = await served.connect()
    writer.write(f"{head}\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    async with asyncio.timeout(10):
        reply = await reader.read()
    head, _, body = reply.partition(b"\r\n\r\n")
    return head.decode().lower(), body


# Paths


@given(st.text(alphabet="/ab.%*:", max_size=20))
def test_a_plain_path_is_plain_already(target):
    path = plain_path(target)
    assert path.startswith("/")
    assert "//" not in path
    assert path == "/" or not path.endswith("/")
    assert plain_path(path) == path


@pytest.mark.parametrize(
    "target",
    [
        "/v1/models",
        "/v1/models/",
        "//v1//models",
        "/v1/%6dodels",
        "http://localhost/v1/models",
        "HTTP://elsewhere:80/v1/models?x=1",
    ],
)
async def test_a_path_is_found_however_it_is_written(served, target):
    head, body = await raw(served, f"GET {target} HTTP/1.1")
    assert head.startswith("http/1.1 200 ")
    assert b"fake/tiny-model" in body


@pytest.mark.parametrize(
    "target",
    ["/v1/models/fake/tiny-model", "/v1/models/fake%2Ftiny-model", "/v1/models/fake%2ftiny-model/"],
)
async def test_a_model_is_found_with_its_slashes_encoded_and_raw(served, target):
    head, body = await raw(served, f"GET {target} HTTP/1.1")
    assert head.startswith("http/1.1 200 ")
    assert b'"id":"fake/tiny-model"' in body


@pytest.mark.parametrize(
    "target",
    [
        *("/", "*", "/v1/../v1/models", "/v1/models%00", "/%ff%fe", "/%", "/V1/models"),
        *("/v1/embeddings", "/v1/images/generations", "/v1/audio/speech"),
        *("http://localhost", "/%2e%2e/etc/passwd"),
    ],
)
async def test_what_is_not_there_is_not_found(served, target):
    head, body = await raw(served, f"GET {target} HTTP/1.1")
    assert head.startswith("http/1.1 404 ")
    assert b'"code":"unknown_url"' in body


# Methods


@pytest.mark.parametrize("path", GETS)
async def test_head_has_the_headers_of_get_and_no_body(served, path):
    head, body = await raw(served, f"HEAD {path} HTTP/1.1")
    assert head.startswith("http/1.1 200 ")
    assert body == b""
    fields = {line.partition(":")[0] for line in head.splitlines()[1:]}
    async with served.http.stream("GET", path) as reply:
        assert fields | {"connection"} == {*reply.headers} | {"connection"}
        if length := reply.headers.get("content-length"):
            assert f"content-length: {length}" in head


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/v1/models", "GET, HEAD, OPTIONS"),
        ("/v1/chat/completions", "OPTIONS, POST"),
        ("/v1/requests/some", "DELETE, GET, HEAD, OPTIONS"),
        ("/v1/penstock/usage", "GET, HEAD, OPTIONS"),
        ("*", "DELETE, GET, HEAD, OPTIONS, POST"),
    ],
)
async def test_options_tells_the_methods_and_nothing_else(served, path, allowed):
    head, body = await raw(served, f"OPTIONS {path} HTTP/1.1\r\nOrigin: http://elsewhere")
    assert head.startswith("http/1.1 204 ")
    assert f"allow: {allowed.lower()}" in head
    assert "access-control" not in head
    assert "content-length" not in head
    assert body == b""


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/completions", "OPTIONS, POST"),
        ("PUT", "/v1/requests/some", "DELETE, GET, HEAD, OPTIONS"),
        ("TRACE", "/health", "GET, HEAD, OPTIONS"),
        ("BREW", "/health", "GET, HEAD, OPTIONS"),
    ],
)
async def test_a_method_that_a_path_has_not_is_told_which_it_has(served, method, path, allowed):
    reply = await served.http.request(method, path)
    assert (reply.status_code, reply.headers["allow"]) == (405, allowed)
    assert reply.json()["error"]["code"] == "method_not_allowed"


async def test_options_of_what_is_not_there_is_not_found(served):
    assert (await served.http.options("/v1/nothing")).status_code == 404


# Headers


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(("GET", "/health"), ("GET", "/nothing"), ("PUT", "/health"), ("POST", "/v1/completions")),
        *(("OPTIONS", "/health"), ("HEAD", "/v1/models"), ("POST", "/tokenize")),
    ],
)
async def test_every_reply_has_an_id_and_the_clients_own(served, method, path):
    headers = {"x-request-id": "mine<>\t-1"}
    replies = [await served.http.request(method, path, headers=headers) for _ in range(2)]
    assert len({reply.headers["x-request-id"] for reply in replies}) == 2
    assert replies[0].headers["x-client-request-id"] == "mine-1"
    assert int(replies[0].headers["openai-processing-ms"]) >= 0
    assert len(replies[0].headers.get_list("x-request-id")) == 1


async def test_a_bug_is_an_error_object_with_the_id_to_look_for(appliance):
    def broken():
        raise ZeroDivisionError

    appliance.request_frames = broken
    reply = await client_of(appliance, ALICE).get("/v1/requests")
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "internal")
    assert reply.headers["x-request-id"] in reply.json()["error"]["message"]
