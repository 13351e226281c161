"""What holds for every route: headers, unknown paths, methods, errors."""

from __future__ import annotations

import asyncio
from importlib import metadata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.api import routes
from appliance.api.core.wire import MAX_SMALL_BYTES
from appliance.api.edge import plain_path
from engine.errors import Unavailable
from engine.text.tokenizer import Tokenizer
from tests.appliance.api_server import serving
from tests.appliance.peers import ALICE, client_of
from tests.tiny_tokenizers import byte_level
from tests.worlds.daemon_parts import FakeAppliance

# Bad input


async def test_bad_bodies_are_answered_and_the_next_request_is_served(served):
    for body in (b"", b"{", b"\xff\xfe", b"[" * 200_000, b'{"prompt": "\\ud800"}', b"null"):
        reply = await served.http.post("/v1/completions", content=body)
        assert reply.status_code == 400
        assert reply.json()["error"]["type"] == "invalid_request_error"
    assert (await served.complete()).status_code == 200


async def test_what_does_not_fit_the_model_is_refused_with_the_numbers(served, appliance):
    reply = await served.complete(prompt="x y " * 100)
    assert reply.json()["error"]["code"] == "context_length_exceeded"
    reply = await served.complete(prompt="x" * 2_000_000)
    assert reply.json()["error"]["code"] == "context_length_exceeded"
    reply = await served.complete(prompt=[1] * 256, max_tokens=7)
    assert reply.json()["error"]["code"] == "context_length_exceeded"
    assert appliance.submitted == []


async def test_more_prompts_than_the_queue_holds_can_never_be_served(served):
    reply = await served.complete(prompt=["a"] * 9)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "prompt")


async def test_without_a_chat_template_completions_still_work(tmp_path):
    bare = FakeAppliance(Tokenizer(byte_level()))
    async with serving(bare, tmp_path / "api.sock") as served:
        reply = await served.chat()
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "no_chat_template")
        assert (await served.complete()).status_code == 200


@pytest.mark.parametrize("path", ["/api/show", "/api/pull", "/v1/penstock/roles"])
async def test_a_long_body_is_not_read_where_a_name_is_all_that_is_asked(served, path):
    body = b'{"model": "' + b"x" * MAX_SMALL_BYTES + b'"}'
    reply = await served.http.post(path, content=body)
    assert reply.json()["error"]
    assert reply.status_code == 413


@pytest.mark.parametrize("depth", [100, 400, 900])
@pytest.mark.parametrize(
    "begin", [b'{"type": "thinking", "thinking": [', b'{"type": "x", "content": [']
)
async def test_what_is_nested_deeply_is_no_bug_of_ours(served, appliance, begin, depth):
    deep = begin * depth + b"]}" * depth
    past = b'{"role": "assistant", "content": [' + deep + b"]}"
    for path, place in (("/v1/chat/completions", b"messages"), ("/v1/responses", b"input")):
        body = b'{"%b": [%b, {"role": "user", "content": "hi"}]}' % (place, past)
        reply = await served.http.post(path, content=body)
        assert reply.status_code in (200, 400), reply.text
    assert appliance.events == []


# The other routes


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v9", 404, "unknown_url"),
        ("GET", "/v1/nothing", 404, "unknown_url"),
        ("POST", "/v1/moderations", 404, "unknown_url"),
        ("POST", "/v1/conversations", 404, "unknown_url"),
        ("GET", "/v1/conversations/conv_1/items", 404, "unknown_url"),
        ("POST", "/v1/responses/compact", 405, "method_not_allowed"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
        ("GET", "/v1/requests/none", 404, "request_not_found"),
        ("POST", "/v1/requests/none/cancel", 404, "request_not_found"),
        ("GET", "/v1/penstock/log?limit=0", 400, "invalid_value"),
        ("GET", "/v1/penstock/log?limit=x", 400, "invalid_type"),
        ("GET", "/v1/penstock/log?limit=-1", 400, "invalid_value"),
        ("GET", "/v1/penstock/log?limit=" + "9" * 5000, 400, "invalid_value"),
    ],
)
async def test_what_is_not_there_is_an_error_object(served, method, path, status, code):
    reply = await served.http.request(method, path)
    assert reply.status_code == status
    error = reply.json()["error"]
    assert error["code"] == code
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("path", ["/v1/conversations", "/v1/conversations/conv_1/items"])
async def test_the_refusal_of_conversations_says_what_does_it_here(served, path):
    reply = await served.http.post(path, json={})
    assert "`previous_response_id`" in reply.json()["error"]["message"]


async def test_the_refusal_of_a_compaction_says_what_does_it_here(served):
    reply = await served.http.post("/v1/responses/compact", json={})
    assert "`truncation: auto`" in reply.json()["error"]["message"]


async def test_health_holds_while_readiness_waits(served, appliance):
    assert (await served.http.get("/ready")).json() == {"status": "ready"}
    appliance.degraded = "worker decode is restarting"
    reply = await served.http.get("/ready")
    assert (reply.json()["status"], "decode" in reply.json()["reason"]) == ("degraded", True)
    assert reply.status_code == 200
    appliance.unavailable = Unavailable("loading the model", code="model_loading")
    reply = await served.http.get("/ready")
    assert (reply.status_code, reply.json()["error"]["message"]) == (503, "loading the model")
    assert "retry-after" in reply.headers
    assert (await served.http.get("/health")).json() == {"status": "ok"}
    version = (await served.http.get("/version")).json()
    assert set(version) == {"version", "frame_version"}


async def test_a_daemon_whose_files_an_upgrade_replaced_says_what_runs(served, monkeypatch):
    async def told():
        first, second = [await served.http.get(path) for path in ("/version", "/api/version")]
        return first.json()["version"], second.json()["penstock"]

    before = await told()
    monkeypatch.setattr(metadata.Distribution, "version", "99.0")
    assert metadata.version("penstock") == "99.0"
    assert await told() == before


# --------------------------------------------------------------------------------------------------
#

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


async def raw(served, head: str) -> tuple[str, bytes]:
    """Head and body of the reply to a request written by hand."""
    reader, writer = await served.connect()
    writer.write(f"{head}\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    async with asyncio.timeout(120):
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
        *("/v1", "*", "/v1/../v1/models", "/v1/models%00", "/%ff%fe", "/%", "/V1/models"),
        *("/v1/moderations", "/v1/images/generations", "/v1/audio/speech"),
        *("http://localhost/v9", "/%2e%2e/etc/passwd"),
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
    request_id = reply.headers["x-request-id"]
    assert request_id in reply.json()["error"]["message"]
    about = f"{request_id}: ZeroDivisionError in GET /v1/requests; the journal says where"
    assert appliance.events == [("error", "request.internal", about)]


async def test_the_document_is_made_once_for_all_who_ask(served, monkeypatch):
    """It takes 20 ms of the loop: 200 clients that ask for it stopped all streams."""
    first = await served.http.get("/openapi.json")
    monkeypatch.setattr(routes, "document", lambda *_, **__: pytest.fail("made again"))
    again = await served.http.get("/openapi.json")
    assert (again.status_code, again.json()) == (200, first.json())
