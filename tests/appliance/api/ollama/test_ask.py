"""Ollama's own client, through both doors."""

from __future__ import annotations

import json
import math
import re
import stat
import sys
from contextlib import AbstractContextManager
from dataclasses import replace
from importlib.metadata import version

import httpx
import ollama
import pytest

from appliance.api.ollama import models as ollama_models
from appliance.hub.facts import ModelFacts
from engine.text.tokenizer import Tokenizer
from tests.appliance.api_server import DOORS, says, serving
from tests.appliance.peers import ALICE, OPERATOR, client_of
from tests.byte_tokenizer import CHAT_TEMPLATE
from tests.tiny_tokenizers import CHATML, byte_level
from tests.worlds.daemon_parts import FakeAppliance

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
        ({"format": "yaml"}, "format"),
    ],
)
async def test_refusals_are_ollamas(served, change, says_what):
    body = {"model": "m", "messages": HELLO, **change}
    reply = await served.http.post("/api/chat", json=body)
    assert reply.status_code in (400, 404)
    assert says_what in reply.json()["error"]


FACTS = ModelFacts("gguf", "llama", 270_000_000, 134_500_000, "q8_0", 8192, 576, 30, 9, 3, 300, 0)


async def test_apps_find_all_that_they_insist_on_of_the_model_that_is_served(client, appliance):
    """Zed and Roo Code refuse a whole list for one field that is missing."""
    appliance.model = replace(appliance.model, facts=FACTS, sampling={"temperature": 0.6})
    (listed,) = (await client.list()).models
    (running,) = (await client.ps()).models
    assert listed.model == running.model == "m"
    assert (listed.size, len(listed.digest)) == (270_000_000, 64)
    assert running.digest == listed.digest
    details = listed.details
    assert (details.format, details.family, details.families) == ("gguf", "llama", ["llama"])
    assert (details.parameter_size, details.quantization_level) == ("134.5M", "Q8_0")
    pools = appliance.readings().frame.pools
    assert running.size == 270_000_000 + sum(pool.num_blocks * pool.block_bytes for pool in pools)
    assert running.expires_at.year > 2300
    assert running.context_length == 8192
    shown = await client.show("m:latest")
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert shown.details.family == shown.modelinfo["general.architecture"] == "llama"
    assert shown.modelinfo["llama.context_length"] == 8192
    assert shown.modelinfo["general.parameter_count"] == 134_500_000
    assert (shown.modelfile, shown.parameters) == ("FROM m\n", "temperature 0.6")
    assert CHAT_TEMPLATE in shown.template


async def test_models_that_may_be_named_are_listed_with_their_sizes(client, appliance):
    """One that is still to be fetched has no bytes here, and unknown details are empty."""
    appliance.model = replace(appliance.model, facts=FACTS, others={"big": FACTS, "far": None})
    listed = {one.model: one for one in (await client.list()).models}
    assert {name: one.size for name, one in listed.items()} == {
        "m": 270_000_000,
        "big": 270_000_000,
        "far": 0,
    }
    assert len({one.digest for one in listed.values()}) == 3
    assert (listed["far"].details.family, listed["far"].details.format) == ("", "")
    assert (await client.show("big")).modelinfo["llama.embedding_length"] == 576
    assert (await client.show("far")).capabilities == ["completion"]


async def test_memory_on_a_gpu_is_told_as_such(client, appliance, monkeypatch):
    appliance.model = replace(appliance.model, facts=FACTS)
    readings = appliance.readings()
    for worker in readings.frame.workers:
        worker.device = "cpu 0"
    monkeypatch.setattr(appliance, "readings", lambda: readings)
    assert (await client.ps()).models[0].size_vram == 0
    readings.frame.workers[0].device = "gpu0, time-sliced"
    (running,) = (await client.ps()).models
    assert running.size_vram == running.size > 0


async def test_the_command_and_apps_find_a_compatible_release(served):
    """The command asks HEAD / before all else; Copilot refuses a release before 0.6.4."""
    head, root = await served.http.head("/"), await served.http.get("/")
    assert (head.status_code, head.content) == (200, b"")
    assert (root.status_code, root.text) == (200, "Ollama is running")
    told = (await served.http.get("/api/version")).json()
    assert tuple(map(int, told["version"].split("."))) >= (0, 14, 0)
    assert told["penstock"] == version("penstock")


class Turns(AbstractContextManager):
    """Models m, which is served, and other, which is loaded; which was first, a test says."""

    def __init__(self, first):
        self.first, self.current, self.unloaded, self.kept = first, "m", [], None

    def name_of(self, asked):
        return asked or self.current

    def can_enter(self, name):
        return name == self.current

    async def enter(self, name, asker):
        assert name == self.current
        return True

    def __exit__(self, *_):
        pass

    def keep_loaded(self, keep_s):
        self.kept = keep_s

    def stays(self, name):
        return name == self.current == self.first

    async def unload(self, name):
        self.unloaded.append(name)


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
async def test_a_model_that_is_not_served_is_unloaded_without_being_loaded(appliance, path):
    appliance.swaps = swaps = Turns("m")
    async with client_of(appliance, ALICE) as client:
        reply = await client.post(path, json={"model": "other", "keep_alive": 0})
    assert (reply.status_code, reply.json()["done_reason"]) == (200, "unload")
    assert (reply.json()["model"], swaps.unloaded, swaps.kept) == ("other", ["other"], None)


@pytest.mark.parametrize(
    "body", [b'{"model": "\xff"}', b'{"keep_alive": "\xff"}', b'{"x":' + b"[" * 100_000]
)
@pytest.mark.parametrize("path", ["/api/chat", "/v1/chat/completions"])
async def test_bytes_that_are_no_json_are_refused_also_where_models_take_turns(
    appliance, path, body
):
    appliance.swaps = Turns("m")
    async with client_of(appliance, ALICE) as client:
        assert (await client.post(path, content=body)).status_code == 400


async def test_a_request_says_how_long_its_model_stays(appliance):
    appliance.swaps = swaps = Turns("m")
    says(appliance, "hello" + END)
    for value, kept_s in (("1h30m", 5400), (-1, math.inf), ("-5m", math.inf), ("1.5s", 1.5)):
        async with client_of(appliance, ALICE) as client:
            body = {"model": "m", "messages": HELLO, "keep_alive": value, "stream": False}
            assert (await client.post("/api/chat", json=body)).status_code == 200
        assert swaps.kept == kept_s


LOADING = [
    ("/api/generate", {}, "response"),
    ("/api/generate", {"prompt": "", "system": "Be kind."}, "response"),
    ("/api/chat", {"messages": []}, "message"),
    ("/api/chat", {}, "message"),
]


@pytest.mark.parametrize(("path", "body", "name"), LOADING)
@pytest.mark.parametrize(
    ("keep_alive", "reason", "first"),
    [
        *((value, "load", None) for value in (None, "5m", -1, "-1", "1h30m", 0)),
        *((value, "load", "m") for value in ("5m", 0)),
        *((value, "unload", "first") for value in (0, "0", "0s", 0.0)),
        ("5m", "load", "first"),
    ],
)
async def test_loading_and_unloading_write_no_reply_and_say_what_becomes_of_the_model(
    appliance, path, body, name, keep_alive, reason, first
):
    if first is not None:
        appliance.swaps = Turns(first)
    asked = {"model": "m", "keep_alive": keep_alive, **body}
    async with client_of(appliance, ALICE) as client:
        reply = await client.post(path, json=asked)
    told = reply.json()
    assert (reply.status_code, told["done"], told["done_reason"]) == (200, True, reason)
    assert told[name] == ("" if name == "response" else {"role": "assistant", "content": ""})
    assert not appliance.submitted


@pytest.mark.parametrize(("method", "path"), ollama_models.NOT_HERE)
async def test_what_changes_a_store_of_models_says_what_does_it_here(appliance, method, path):
    async with client_of(appliance, ALICE) as client:
        reply = await client.request(method, path, json={"source": "m", "destination": "n"})
    assert reply.status_code == 501
    assert ollama_models.NOT_HERE[method, path] in reply.json()["error"]


async def test_a_pull_of_what_is_served_is_done_at_once_for_everybody(client, appliance):
    appliance.model = replace(appliance.model, others={"big": FACTS})
    for name in ("m", "m:latest", "big"):
        assert (await client.pull(name)).status == "success"


async def test_a_stream_that_fails_says_so(served, appliance):
    appliance.fail_after = 2
    reply = await served.http.post("/api/chat", json={"model": "m", "messages": HELLO})
    lines = [json.loads(line) for line in reply.text.splitlines()]
    assert reply.headers["content-type"] == "application/x-ndjson"
    assert list(lines[-1]) == ["error"]


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
    monkeypatch.setattr("appliance.api.ollama.models.PULL", program(tmp_path, *lines))
    async with client_of(plain_appliance(), OPERATOR) as client:
        for _ in range(2):
            reply = await client.post("/api/pull", json={"model": "Qwen/Qwen3-0.6B"})
            said = [json.loads(line) for line in reply.text.splitlines()]
            (progress,) = [one for one in said if "digest" in one]
            assert (progress["completed"], progress["total"]) == (5, 9)
            assert re.fullmatch("sha256:[0-9a-f]{64}", progress["digest"]), "a bar of its own"
            assert said[-1] == {"status": "success"}
            assert "--model Qwen/Qwen3-0.6B" in said[-2]["status"]
        body = {"model": "Qwen/Qwen3-0.6B", "stream": False}
        assert (await client.post("/api/pull", json=body)).json() == {"status": "success"}


async def test_a_name_on_the_hub_may_be_written_as_ollamas_users_do(tmp_path, monkeypatch):
    monkeypatch.setattr("appliance.api.ollama.models.PULL", program(tmp_path, {"folder": "/x"}))
    async with client_of(plain_appliance(), OPERATOR) as client:
        reply = await client.post("/api/pull", json={"model": "hf.co/Qwen/Qwen3-GGUF:Q4_K_M"})
    assert json.loads(reply.text.splitlines()[0])["status"] == "pulling Qwen/Qwen3-GGUF:Q4_K_M"


async def test_a_pull_that_fails_says_why(tmp_path, monkeypatch):
    body, words = {"model": "a/b", "stream": False}, {"what": "no", "where": "x", "hint": "look"}
    for code, status in ((1, 502), (3, 503), (5, 404)):
        said = {"error": words, "exit_code": code}
        monkeypatch.setattr("appliance.api.ollama.models.PULL", program(tmp_path, said))
        async with client_of(plain_appliance(), OPERATOR) as client:
            reply = await client.post("/api/pull", json=body)
        assert (reply.status_code, reply.json()) == (status, {"error": "no; look"})


async def test_users_do_not_pull_and_folders_are_no_names(tmp_path):
    async with client_of(plain_appliance(), ALICE) as client:
        assert (await client.post("/api/pull", json={"model": "a/b"})).status_code == 403
    async with client_of(plain_appliance(), OPERATOR) as client:
        assert (await client.post("/api/pull", json={"model": str(tmp_path)})).status_code == 400
        assert (await client.post("/api/pull", json={})).status_code == 400
