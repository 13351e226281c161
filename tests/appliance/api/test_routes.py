from __future__ import annotations

import pytest

from engine.errors import Unavailable
from engine.text.tokenizer import Tokenizer
from tests.appliance.api_server import serving
from tests.fakes import FakeAppliance
from tests.tiny_tokenizers import CHATML, byte_level


@pytest.fixture
def appliance():
    return FakeAppliance(Tokenizer(byte_level(), chat_template=CHATML))


@pytest.fixture
async def served(appliance, tmp_path):
    async with serving(appliance, tmp_path / "api.sock") as served:
        yield served


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
    reply = await served.complete(prompt=[1] * 250, max_tokens=7)
    assert "250 for the prompt and 7 for the completion" in reply.json()["error"]["message"]
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


# The other routes


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "unknown_url"),
        ("GET", "/v1/nothing", 404, "unknown_url"),
        ("POST", "/v1/embeddings", 404, "unknown_url"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
        ("GET", "/v1/requests/none", 404, "request_not_found"),
        ("POST", "/v1/requests/none/cancel", 404, "request_not_found"),
        ("GET", "/v1/penstock/log?limit=0", 400, "invalid_value"),
        ("GET", "/v1/penstock/log?limit=x", 400, "invalid_type"),
        ("GET", "/v1/penstock/log?limit=-1", 400, "invalid_type"),
        ("GET", "/v1/penstock/log?limit=" + "9" * 5000, 400, "invalid_value"),
    ],
)
async def test_what_is_not_there_is_an_error_object(served, method, path, status, code):
    reply = await served.http.request(method, path)
    assert reply.status_code == status
    error = reply.json()["error"]
    assert error["code"] == code
    assert set(error) == {"message", "type", "param", "code"}


async def test_health_holds_while_readiness_waits(served, appliance):
    assert (await served.http.get("/ready")).json() == {"status": "ready"}
    appliance.degraded = "worker decode is restarting"
    reply = await served.http.get("/ready")
    assert reply.json() == {"status": "degraded", "reason": "worker decode is restarting"}
    assert reply.status_code == 200
    appliance.unavailable = Unavailable("loading the model", code="model_loading")
    reply = await served.http.get("/ready")
    assert (reply.status_code, reply.json()["error"]["message"]) == (503, "loading the model")
    assert "retry-after" in reply.headers
    assert (await served.http.get("/health")).json() == {"status": "ok"}
    version = (await served.http.get("/version")).json()
    assert set(version) == {"version", "frame_version"}
