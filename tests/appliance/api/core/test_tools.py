"""Which calls an answer must have, and the grammar that follows."""

from __future__ import annotations

import json
from pathlib import Path
from threading import get_ident

import pytest

from appliance.api.core.fields import ChatRequest
from appliance.api.core.tools import MAX_FAILED_READS, read_tools
from appliance.api.core.tools_in_words import in_words
from appliance.api.formats.format_choice import OutputFormat
from appliance.api.formats.tool_format import FORMATS
from appliance.json.fields import check
from engine.errors import Unreadable
from engine.text.grammar import validate, with_deep_stack
from engine.text.reading import READER
from engine.text.tokenizer import Tokenizer
from tests.appliance.api_server import events, says, serving
from tests.tiny_tokenizers import CHATML, byte_level
from tests.worlds.daemon_parts import FakeAppliance

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def body_of(fields):
    return check({"messages": [{"role": "user", "content": "hi"}], **fields}, ChatRequest)


def function(name="f", **fields):
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **fields}}


def tools(*functions, **fields):
    return read_tools(body_of({"tools": list(functions or (function(),)), **fields}))[0]


def named(name):
    return {"type": "function", "function": {"name": name}}


def test_without_tools_or_with_choice_none_there_are_none():
    assert read_tools(body_of({}))[0] is None
    assert read_tools(body_of({"tools": [], "tool_choice": "auto"}))[0] is None
    assert tools(tool_choice="none") is None


@pytest.mark.parametrize("choice", [None, "auto"])
def test_by_default_the_model_chooses(choice):
    found = tools(function("f"), function("g", parameters=None), tool_choice=choice)
    assert found.schemas == {"f": SCHEMA, "g": None}
    assert (found.is_required, found.is_parallel, found.strict) == (False, True, frozenset())


def test_a_choice_requires_a_call_of_any_or_of_one():
    assert tools(tool_choice="required", parallel_tool_calls=False).is_required
    one = tools(function("f"), function("g", strict=True), tool_choice=named("g"))
    assert (list(one.schemas), one.is_required, one.is_parallel) == (["g"], True, False)
    assert one.strict == {"g"}
    assert len(one.definitions) == 2


@pytest.mark.parametrize(("said", "is_parallel"), [(None, False), (False, False), (True, True)])
def test_required_calls_are_several_only_where_that_is_asked_for(said, is_parallel):
    assert tools(tool_choice="required", parallel_tool_calls=said).is_parallel == is_parallel
    assert tools(tool_choice="auto", parallel_tool_calls=said).is_parallel == (said is not False)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_every_format_has_a_grammar_that_compiles(name, choice):
    found = tools(function("f"), function("g", parameters=None), tool_choice=choice)
    grammar = found.grammar(OutputFormat(FORMATS[name]), Tokenizer(byte_level()))
    is_free = FORMATS[name].is_bare or FORMATS[name].is_harmony
    assert (grammar is None) == (is_free and choice == "auto")
    if grammar:
        validate(grammar)


# --------------------------------------------------------------------------------------------------
# Tools on a template without any, as langchain, instructor and pydantic-ai send them.

END = "!"
"""The last token is the end of the text, which is silent."""
PARAMETERS = {
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "type": "object",
}
ADD = {"name": "add", "description": "Add two numbers.", "parameters": PARAMETERS}
BODIES = json.loads((Path(__file__).parent / "framework_bodies.json").read_text())
"""What came over the wire from langchain-openai, instructor and pydantic-ai, which were asked to
add two numbers by a function, or to answer in the form of a class."""
FIRST = [name for name in BODIES if name != "captured_with"]
LANGCHAIN = {name: BODIES["langchain"][0][name] for name in ("tools", "stream")}


def call_of(name: str) -> str:
    arguments = '{"a": 2, "b": 2}'
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


CALL = call_of("add")
REFUSES_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}" + CHATML
)


@pytest.fixture
def appliance():
    appliance = FakeAppliance(Tokenizer(byte_level(), chat_template=CHATML))
    appliance.model = appliance.model.__class__("m", 4096, 300, (257,), None, 0)
    return appliance


@pytest.mark.parametrize("name", FIRST)
async def test_frameworks_get_their_call(served, appliance, name):
    body = BODIES[name][0]
    function = body["tools"][0]["function"]
    says(appliance, call_of(function["name"]) + END)
    reply = await served.http.post("/v1/chat/completions", json=body)
    if body.get("stream"):
        calls, finish_reason = streamed_calls(reply.text)
    else:
        choice = reply.json()["choices"][0]
        assert choice["message"]["content"] is None
        calls = [each["function"] for each in choice["message"]["tool_calls"]]
        finish_reason = choice["finish_reason"]
    assert finish_reason == "tool_calls"
    assert [each["name"] for each in calls] == [function["name"]]
    assert json.loads(calls[0]["arguments"]) == {"a": 2, "b": 2}
    prompt = appliance.submitted[0].prompt_text
    assert "<tools>" in prompt
    assert json.dumps(function["description"]) in prompt
    is_forced = body.get("tool_choice") not in (None, "auto")
    assert is_forced <= (appliance.submitted[0].sequences[0].sampling.grammar is not None)
    assert "x-penstock-ignored" not in reply.headers


def streamed_calls(text: str) -> tuple[list[dict[str, str]], str | None]:
    """The functions that a stream has called, put together, and why it ended."""
    calls: list[dict[str, str]] = []
    finish_reason = None
    for chunk in events(text):
        for choice in chunk["choices"]:
            finish_reason = choice["finish_reason"] or finish_reason
            for part in choice["delta"].get("tool_calls", []):
                if part["index"] == len(calls):
                    calls.append({"name": part["function"]["name"], "arguments": ""})
                calls[part["index"]]["arguments"] += part["function"].get("arguments", "")
    return calls, finish_reason


async def test_a_frameworks_second_turn_has_the_call_and_its_result(served, appliance):
    says(appliance, "It is 4." + END)
    reply = await served.http.post("/v1/chat/completions", json=BODIES["pydantic_ai"][1])
    assert reply.json()["choices"][0]["message"]["content"] == "It is 4."
    prompt = appliance.submitted[0].prompt_text
    assert CALL in prompt
    assert "<tool_response>\n4\n</tool_response>" in prompt


async def test_calls_and_results_are_read_as_they_would_be_written(served, appliance):
    call = {"type": "function", "id": "c", "function": {"name": "add", "arguments": '{"a": 2}'}}
    messages = [
        {"role": "user", "content": "2 + ?"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "4"},
        {"role": "tool", "tool_call_id": "d", "content": "5"},
    ]
    await served.chat(messages=messages, max_tokens=2)
    prompt = appliance.submitted[0].prompt_text
    written = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
    assert f"assistant\nLet me see.\n{written}<|im_end|>" in prompt
    results = "<tool_response>\n4\n</tool_response>\n<tool_response>\n5\n</tool_response>"
    assert f"user\n{results}<|im_end|>" in prompt
    assert "<tools>" not in prompt


def test_the_words_come_behind_the_clients_own():
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"}]
    tools = [{"type": "function", "function": ADD}]
    words, _ = in_words(messages[1:], tools)
    first, second = in_words(messages, tools)
    assert first["content"] == f"Be kind.\n\n{words['content']}"
    assert second == messages[1]


async def test_a_template_that_refuses_the_role_system_gets_them_from_the_user(tmp_path, appliance):
    appliance.tokenizer = Tokenizer(byte_level(), chat_template=REFUSES_SYSTEM)
    async with serving(appliance, tmp_path / "own.sock") as served:
        assert (await served.chat(**LANGCHAIN, max_tokens=2)).status_code == 200
        own = [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]
        assert (await served.chat(**LANGCHAIN, messages=own, max_tokens=2)).status_code == 200
    first, second = (request.prompt_text for request in appliance.submitted)
    words = in_words(own, LANGCHAIN["tools"])[0]["content"].removeprefix("x\n\n")
    assert first.startswith(f"<|im_start|>user\n{words}")
    assert second.startswith(f"<|im_start|>user\nx\n\n{words}")


async def test_tools_and_a_form_of_the_answer_go_together(served, appliance):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": PARAMETERS}}
    says(appliance, '{"a": 1, "b": 2}' + END)
    reply = (await served.chat(**LANGCHAIN, response_format=form)).json()
    assert reply["choices"][0]["message"]["content"] == '{"a": 1, "b": 2}'
    says(appliance, CALL + END)
    reply = (await served.chat(**LANGCHAIN, response_format=form)).json()
    assert reply["choices"][0]["finish_reason"] == "tool_calls"
    assert "@answer" in appliance.submitted[0].sequences[0].sampling.grammar


async def test_reasoning_has_a_field_of_its_own(served, appliance):
    appliance.tokenizer = Tokenizer(
        byte_level(), chat_template=CHATML.replace("assistant\n", "assistant\n<think>")
    )
    says(appliance, "well\n</think>\n\nabc" + END)
    body = {"max_tokens": 99}
    message = (await served.chat(**body)).json()["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == ("abc", "well")
    assert message["reasoning_content"] == "well"
    chunks = events((await served.chat(**body, stream=True)).text)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(one.get("reasoning_content", "") for one in deltas) == "well"
    assert "".join(one.get("content") or "" for one in deltas) == "abc"
    assert not any("reasoning" in one and one.get("content") for one in deltas)


def test_the_schemas_of_hundreds_of_tools_are_mended_in_one_job(monkeypatch):
    """Each job waits for an idle core: beside a busy worker hundreds would take minutes."""
    jobs = []
    read = READER.read
    monkeypatch.setattr(READER, "read", lambda *job: (jobs.append(job[0]), read(*job))[1])
    odd = {"type": "object", "properties": {"m": {"type": "string", "pattern": "^(?!x)a"}}}
    functions = [function(f"f{i}") for i in range(300)] + [function("odd", parameters=odd)]
    mended, left_out = tools(*functions).mended()
    assert left_out == ("tools.odd.parameters.properties.m.pattern",)
    assert mended.schemas["odd"]["properties"]["m"] == {"type": "string"}
    assert mended.schemas["f299"] == SCHEMA
    assert len(jobs) < 10


def test_of_schemas_that_take_too_much_a_few_are_tried_and_one_is_found_among_many(monkeypatch):
    bad, num_read = {f"f{i}" for i in range(300)}, [0]

    def read(_job, schemas, _lenient):
        num_read[0] += 1
        if bad & schemas.keys():
            raise Unreadable("it takes too much")
        return json.dumps({name: [schema, []] for name, schema in schemas.items()})

    monkeypatch.setattr(READER, "read", read)
    offered = tools(*(function(name) for name in sorted(bad)))
    mended, left_out = offered.mended()
    assert num_read[0] == MAX_FAILED_READS
    assert set(mended.schemas.values()) == {None}
    assert len(left_out) == 300
    bad.intersection_update({"f7"})
    mended, left_out = offered.mended()
    assert [name for name, schema in mended.schemas.items() if schema is None] == ["f7"]
    assert left_out == ("tools.f7.parameters",)


def test_calls_within_a_deep_stack_stay_there():
    outer, inner = with_deep_stack(lambda: (get_ident(), with_deep_stack(get_ident)))
    assert outer == inner != get_ident()
