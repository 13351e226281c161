"""Ollama's own client, through both doors."""

from __future__ import annotations

import json
import stat
import sys

import httpx
import ollama
import pytest

from engine.text.tokenizer import Tokenizer
from tests.appliance.api_server import DOORS, says, serving
from tests.appliance.peers import ALICE, OPERATOR, client_of
from tests.byte_tokenizer import CHAT_TEMPLATE
from tests.fakes import FakeAppliance
from tests.tiny_tokenizers import CHATML, byte_level

END = "!"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
HELLO = [{"role": "user", "content": "hello"}]


def add(a: int) -> int:
    """Add one.

    Args:
        a: to what.
    """
    return a + 1


@pytest.fixture
def appliance():
    template = CHAT_TEMPLATE + "{# <think> #}"
    appliance = FakeAppliance(Tokenizer(byte_level(), chat_template=template))
    appliance.model = appliance.model.__class__("m", 8192, 300, (257,), None, 0)
    return appliance


@pytest.fixture(params=DOORS)
async def served(request, appliance, tmp_path):
    async with serving(appliance, tmp_path / "api.sock", request.param) as served:
        yield served


@pytest.fixture
async def client(served):
    transport = httpx.AsyncHTTPTransport(uds=served.uds)
    headers = {"authorization": f"Bearer {served.key}"}
    async with ollama.AsyncClient(host=served.url, transport=transport, headers=headers) as client:
        yield client


async def test_a_chat_is_answered_whole_and_as_a_stream(client, appliance):
    says(appliance, "<think>\nwell\n</think>\n\nhello wörld" + END)
    whole = await client.chat(model="m:latest", messages=HELLO, think=True)
    assert (whole.message.content, whole.message.thinking) == ("hello wörld", "well")
    assert (whole.done, whole.done_reason) == (True, "stop")
    sequence = appliance.submitted[0].sequences[0]
    assert whole.prompt_eval_count == sequence.num_prompt_tokens
    assert whole.eval_count == sequence.num_output_tokens
    parts = [part async for part in await client.chat(model="m", messages=HELLO, stream=True)]
    assert "".join(part.message.content or "" for part in parts) == "hello wörld"
    assert "".join(part.message.thinking or "" for part in parts) == "well"
    assert [part.done for part in parts[-2:]] == [False, True]


@pytest.mark.parametrize("stream", [False, True])
async def test_tools_are_called(client, appliance, stream):
    says(appliance, CALL + END)
    reply = await client.chat(model="m", messages=HELLO, tools=[add], stream=stream)
    parts = [part async for part in reply] if stream else [reply]
    calls = [call for part in parts for call in part.message.tool_calls or ()]
    assert [(call.function.name, dict(call.function.arguments)) for call in calls] == [
        ("add", {"a": 2})
    ]


async def test_results_go_back(client, appliance):
    call = {"function": {"name": "add", "arguments": {"a": 2}}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_name": "add", "content": "3"},
    ]
    await client.chat(model="m", messages=messages, options={"num_predict": 2})
    assert "<tool_response>\n3\n</tool_response>" in appliance.submitted[0].prompt_text


async def test_a_prompt_is_answered_through_the_template_or_bare(client, appliance):
    says(appliance, "abc" + END)
    reply = await client.generate(model="m", prompt="hello", system="Be kind.")
    assert reply.response == "abc"
    assert "Be kind." in appliance.submitted[0].prompt_text
    await client.generate(model="m", prompt="hello", raw=True, options={"num_predict": 3})
    assert appliance.submitted[1].prompt_text == "hello"
    parts = [part async for part in await client.generate("m", "hello", stream=True)]
    assert "".join(part.response for part in parts) == "abc"


async def test_options_are_those_of_the_other_apis(client, appliance):
    options = {
        "temperature": 0.5,
        "top_k": 7,
        "repeat_penalty": 1.2,
        "num_predict": 9,
        "num_ctx": 2048,
        "stop": ["x"],
        "seed": 3,
    }
    await client.chat(model="m", messages=HELLO, options=options, format="json")
    sampling = appliance.submitted[0].sequences[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.seed) == (0.5, 7, 3)
    assert (sampling.repetition_penalty, sampling.max_tokens) == (1.2, 9)
    assert sampling.grammar is not None


@pytest.mark.parametrize(
    ("change", "says_what"),
    [
        ({"model": "llama3"}, "does not exist"),
        ({"options": {"mirostat": 1}}, "options.mirostat"),
        ({"options": {"typical_p": 0.5}}, "options.typical_p"),
        ({"format": "yaml"}, "format"),
        ({"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "images"),
    ],
)
async def test_refusals_are_ollamas(served, change, says_what):
    body = {"model": "m", "messages": HELLO, **change}
    reply = await served.http.post("/api/chat", json=body)
    assert reply.status_code in (400, 404)
    assert says_what in reply.json()["error"]


async def test_the_model_is_listed_and_shown(client):
    (listed,) = (await client.list()).models
    (running,) = (await client.ps()).models
    assert listed.model == running.model == "m"
    shown = await client.show("m")
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert shown.modelinfo["penstock.context_length"] == 8192


async def test_a_stream_that_fails_says_so(served, appliance):
    appliance.fail_after = 2
    reply = await served.http.post("/api/chat", json={"model": "m", "messages": HELLO})
    lines = [json.loads(line) for line in reply.text.splitlines()]
    assert reply.headers["content-type"] == "application/x-ndjson"
    assert lines[-1] == {"error": "the worker died too often"}


# Pulling


def program(folder, *lines):
    path = folder / "pull"
    said = "\n".join(f"print({json.dumps(json.dumps(line))})" for line in lines)
    path.write_text(f"#!{sys.executable}\n{said}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return (str(path),)


def plain_appliance():
    return FakeAppliance(Tokenizer(byte_level(), chat_template=CHATML))


async def test_operators_pull_and_are_told_how_far(tmp_path, monkeypatch):
    lines = {"done_bytes": 5, "total_bytes": 9, "bytes_per_s": 1.0}, {"folder": "/x"}
    monkeypatch.setattr("appliance.api.ollama_api.PULL", program(tmp_path, *lines))
    async with client_of(plain_appliance(), OPERATOR) as client:
        for _ in range(2):
            reply = await client.post("/api/pull", json={"model": "Qwen/Qwen3-0.6B"})
            said = [json.loads(line) for line in reply.text.splitlines()]
            assert {"status": "pulling Qwen/Qwen3-0.6B", "total": 9, "completed": 5} in said
            assert said[-1] == {"status": "success"}
            assert "--model Qwen/Qwen3-0.6B" in said[-2]["status"]
        body = {"model": "Qwen/Qwen3-0.6B", "stream": False}
        assert (await client.post("/api/pull", json=body)).json() == {"status": "success"}


async def test_a_pull_that_fails_says_why(tmp_path, monkeypatch):
    body, words = {"model": "a/b", "stream": False}, {"what": "no", "where": "x", "hint": "look"}
    for code, status in ((1, 502), (3, 503), (5, 404)):
        said = {"error": words, "exit_code": code}
        monkeypatch.setattr("appliance.api.ollama_api.PULL", program(tmp_path, said))
        async with client_of(plain_appliance(), OPERATOR) as client:
            reply = await client.post("/api/pull", json=body)
        assert (reply.status_code, reply.json()) == (status, {"error": "no; look"})


async def test_users_do_not_pull_and_folders_are_no_names(tmp_path):
    async with client_of(plain_appliance(), ALICE) as client:
        assert (await client.post("/api/pull", json={"model": "a/b"})).status_code == 403
    async with client_of(plain_appliance(), OPERATOR) as client:
        assert (await client.post("/api/pull", json={"model": str(tmp_path)})).status_code == 400
        assert (await client.post("/api/pull", json={})).status_code == 400
