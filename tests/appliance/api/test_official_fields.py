"""What OpenAI's own client asks beyond the simplest, through both doors, streamed and whole.

Held here: presence_penalty, frequency_penalty, repetition_penalty, logit_bias, n, echo, min_tokens,
logprobs (of echoes; of answers next door, in test_official_client), max_completion_tokens, content
in parts, the roles developer, system, user, assistant and tool, response_format (json_object and
json_schema), tools, tool_choice (auto, none, required, a named function), and stream_options
(include_usage and continuous_usage_stats). What a model makes of them, tests/test_official_fields
shows.
"""

from __future__ import annotations

import dataclasses
import json
from enum import StrEnum

import openai
import pydantic
import pytest

from appliance.api.core import wire
from appliance.daemon.requests.request import Peer, Role
from engine.text.tokenizer import Tokenizer
from tests.appliance.api_server import DOORS, events, says, serving
from tests.family_templates import FAMILIES
from tests.tiny_tokenizers import byte_level
from tests.worlds.daemon_parts import FakeAppliance

MODEL = "fake/tiny-model"
USER = {"role": "user", "content": "hi"}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'


class Unit(StrEnum):
    C = "c"
    F = "f"


class Weather(pydantic.BaseModel):
    """What is asked of a tool, or for as an answer."""

    city: str
    unit: Unit = Unit.C


WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": Weather.model_json_schema()},
}

TIME = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture
def appliance():
    backend = byte_level()
    return FakeAppliance(
        Tokenizer(backend, chat_template=FAMILIES["qwen"]),
        max_model_len=4096,
        eos_token_ids=(backend.token_to_id("<|im_end|>"),),
    )


@pytest.fixture(params=DOORS)
async def served(request, appliance, tmp_path):
    async with serving(appliance, tmp_path / "api.sock", request.param) as served:
        yield served


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def stream(request):
    return request.param


async def read(reply) -> list:
    """The choices of a reply, or of all chunks of a stream."""
    if isinstance(reply, openai.AsyncStream):
        return [choice async for chunk in reply for choice in chunk.choices]
    return reply.choices


@pytest.fixture
def complete(served):
    return lambda **fields: served.openai.completions.create(model=MODEL, **fields)


@pytest.fixture
def chat(served):
    fixed = {"model": MODEL, "messages": [USER]}
    return lambda **fields: served.openai.chat.completions.create(**(fixed | fields))


# Choices


async def test_choices_are_ordered_prompt_by_prompt_and_have_their_own_seeds(complete, appliance):
    reply = await complete(prompt=[[104, 105], [106]], n=2, max_tokens=2, seed=7)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    decode = appliance.tokenizer.decode
    hi, j = decode([104, 105]), decode([106, 106])
    assert [choice.text for choice in reply.choices] == [hi, hi, j, j]
    assert [one.sampling.seed for one in appliance.submitted[0].sequences] == [7, 8, 7, 8]
    assert reply.usage.prompt_tokens == 3
    assert reply.usage.completion_tokens == 8


async def test_choices_of_a_streamed_chat_add_up_to_the_whole(chat, appliance):
    says(appliance, "hello wörld<|im_end|>")
    whole = await chat(n=3)
    texts, roles = {0: "", 1: "", 2: ""}, []
    async for chunk in await chat(n=3, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            roles += [choice.index] if choice.delta.role else []
    assert sorted(roles) == [0, 1, 2]
    assert list(texts.values()) == [choice.message.content for choice in whole.choices]
    assert chunk.usage == whole.usage


async def test_more_choices_than_the_queue_holds_are_refused(complete):
    with pytest.raises(openai.BadRequestError, match="takes 8 from one request") as refused:
        await complete(prompt=["a", "b", "c"], n=3)
    assert refused.value.param == "n"


# Sampling, usage, echo


async def test_fields_of_the_sampler_arrive_there(chat, appliance, stream):
    reply = await chat(
        stream=stream,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"5": -100},
        max_completion_tokens=3,
        user="me",
        metadata={"a": "b"},
        store=False,
        extra_body={"repetition_penalty": 1.2, "min_tokens": 2},
    )
    assert (await read(reply))[-1].finish_reason == "length"
    (sequence,) = appliance.submitted[0].sequences
    sampling = sequence.sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert (sampling.repetition_penalty, sampling.min_tokens) == (1.2, 2)
    assert (sampling.logit_bias, sampling.max_tokens) == ({5: -100.0}, 3)
    assert sequence.owner == appliance.submitted[0].peer.name


async def test_ignored_fields_are_named_in_a_header(served):
    reply = await served.complete(user="me", nonsense=1, **{"bad\r\nname ü": 1})
    assert reply.headers["x-penstock-ignored"] == "user, nonsense, badname"
    assert "x-penstock-ignored" not in (await served.complete()).headers


async def test_usage_runs_along_if_asked_for(chat, appliance):
    says(appliance, "abc<|im_end|>")
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = [one async for one in await chat(stream=True, stream_options=options)]
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == [0, 1, 2, 3, 4, 4]
    assert {chunk.usage.prompt_tokens for chunk in chunks} == {chunks[-1].usage.prompt_tokens}


@pytest.mark.parametrize("prompt", ["aä 12", [97, 98]])
async def test_an_echo_comes_first_streamed_and_whole(complete, appliance, prompt):
    whole = await complete(prompt=prompt, echo=True, max_tokens=3)
    text = prompt if isinstance(prompt, str) else appliance.tokenizer.decode(prompt)
    assert whole.choices[0].text.startswith(text)
    assert len(whole.choices[0].text) > len(text)
    chunks = [
        one async for one in await complete(prompt=prompt, echo=True, max_tokens=3, stream=True)
    ]
    assert chunks[0].choices[0].text.startswith(text)
    assert "".join(one.choices[0].text for one in chunks) == whole.choices[0].text


async def test_an_echo_has_the_prompts_logprobs(complete, appliance):
    asked = {"prompt": "aä", "echo": True, "max_tokens": 2, "logprobs": 1}
    whole = await complete(**asked)
    logprobs = whole.choices[0].logprobs
    assert logprobs.tokens[:4] == ["<|begin|>", "a", "bytes:\\xc3", "bytes:\\xa4"]
    assert logprobs.text_offset == [0, 0, 1, 1, 2, 2]
    assert logprobs.token_logprobs == [None, *[-0.5] * 5]
    assert logprobs.top_logprobs[0] is None
    assert all(logprobs.top_logprobs[1:])
    chunks = [one.choices[0].logprobs async for one in await complete(**asked, stream=True)]
    for column in ("tokens", "text_offset", "token_logprobs", "top_logprobs"):
        parts = [getattr(chunk, column) for chunk in chunks if chunk]
        assert [one for part in parts for one in part] == getattr(logprobs, column)


async def test_an_echo_of_token_ids_knows_where_they_are(complete, appliance):
    ids = appliance.tokenizer.encode("aä1", False)
    reply = await complete(prompt=ids, echo=True, max_tokens=1, logprobs=0)
    assert reply.choices[0].text.startswith("aä1")
    assert reply.choices[0].logprobs.text_offset == [0, 1, 1, 2, 3]


async def test_an_echo_may_be_all_that_is_wanted(complete, appliance):
    reply = await complete(prompt="abc", echo=True, max_tokens=0, logprobs=2)
    assert reply.choices[0].text == "abc"
    assert reply.choices[0].finish_reason == "length"
    assert len(reply.choices[0].logprobs.tokens) == 4
    assert reply.usage.completion_tokens == 0


async def test_stop_strings_wait_for_the_minimum(complete, appliance, stream):
    says(appliance, "a.b.c.<|im_end|>")
    fields = {"prompt": "x", "stop": ".", "max_tokens": 9, "stream": stream}
    at_once = await read(await complete(**fields))
    held = await read(await complete(**fields, extra_body={"min_tokens": 3}))
    assert ["".join(one.text for one in said) for said in (at_once, held)] == ["a", "a.b"]


# Messages


async def test_all_roles_and_parts_become_a_prompt(chat, appliance, stream):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    texts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    reply = await chat(
        stream=stream,
        messages=[
            {"role": "developer", "content": "be kind"},
            {"role": "user", "content": texts, "name": "eve"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "17", "tool_call_id": "c"},
        ],
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )
    assert await read(reply)
    assert appliance.submitted[0].prompt_text == (
        "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
        "<|im_end|>\n<|im_start|>user\n<tool_response>\n17\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


async def test_a_message_can_be_continued(chat, appliance):
    last = {"role": "assistant", "content": "Once upon"}
    await chat(messages=[USER, last], extra_body={"continue_final_message": True})
    assert appliance.submitted[0].prompt_text.endswith("<|im_start|>assistant\nOnce upon")


# Tools


async def test_a_call_is_parsed_and_its_marks_never_show(chat, appliance):
    says(appliance, f"Let me look.\n{CALL}<|im_end|>")
    choice = (await chat(tools=[WEATHER])).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me look."
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "get_weather")
    assert json.loads(call.function.arguments) == {"city": "Köln"}
    assert call.id.startswith("call_")


@pytest.mark.parametrize("burst", [1, 7, 1000])
async def test_streamed_calls_add_up_to_the_whole(served, appliance, burst):
    says(appliance, f"So:\n{CALL}\n{CALL}<|im_end|>")
    appliance.burst = burst
    async with served.openai.chat.completions.stream(
        model=MODEL, messages=[USER], tools=[WEATHER], max_tokens=999
    ) as stream:
        seen = [event.type async for event in stream]
        final = await stream.get_final_completion()
    choice = final.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "So:"
    names = [call.function.name for call in choice.message.tool_calls]
    assert names == ["get_weather", "get_weather"]
    arguments = [json.loads(call.function.arguments) for call in choice.message.tool_calls]
    assert arguments == [{"city": "Köln"}] * 2
    assert len({call.id for call in choice.message.tool_calls}) == 2
    assert seen.count("tool_calls.function.arguments.done") == 2


async def test_deltas_of_calls_have_openais_shape(served, appliance):
    says(appliance, f"{CALL}<|im_end|>")
    reply = await served.chat(stream=True, tools=[WEATHER], max_tokens=999)
    deltas = [chunk["choices"][0]["delta"] for chunk in events(reply.text)]
    assert deltas[0] == {"role": "assistant", "content": None}
    parts = [part for delta in deltas for part in delta.get("tool_calls", [])]
    assert parts[0].pop("id").startswith("call_")
    assert (parts[0]["index"], parts[0]["type"]) == (0, "function")
    assert parts[0]["function"]["name"] == "get_weather"
    assert all(set(part) == {"index", "function"} for part in parts[1:])
    assert "".join(part["function"]["arguments"] for part in parts) == '{"city": "Köln"}'
    assert not any(delta.get("content") for delta in deltas)
    assert "tool_call>" not in reply.text


async def test_only_one_call_is_made_if_they_may_not_be_parallel(chat, appliance):
    says(appliance, f"{CALL}\n{CALL}<|im_end|>")
    choice = (await chat(tools=[WEATHER], parallel_tool_calls=False, max_tokens=999)).choices[0]
    assert (len(choice.message.tool_calls), choice.finish_reason) == (1, "tool_calls")
    assert len(appliance.stopped) == 1


async def test_a_required_call_ends_the_answer_unless_parallel_calls_are_asked_for(chat, appliance):
    says(appliance, f"{CALL}\n{CALL}<|im_end|>")
    asked = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 999}
    choice = (await chat(**asked)).choices[0]
    assert (len(choice.message.tool_calls), choice.finish_reason) == (1, "tool_calls")
    says(appliance, f"{CALL}\n{CALL}<|im_end|>")
    choice = (await chat(**asked, parallel_tool_calls=True)).choices[0]
    assert len(choice.message.tool_calls) == 2


async def test_what_is_no_call_stays_text(chat, appliance):
    says(appliance, '<tool_call>\n{"name": "unknown"}\n</tool_call><|im_end|>')
    choice = (await chat(tools=[WEATHER], max_tokens=999)).choices[0]
    assert choice.message.content == '<tool_call>\n{"name": "unknown"}\n</tool_call>'
    assert (choice.message.tool_calls, choice.finish_reason) == (None, "stop")


@pytest.mark.parametrize(
    ("choice", "callable_names"),
    [
        ("auto", ["get_weather", "get_time"]),
        ("required", ["get_weather", "get_time"]),
        (NAMED, ["get_weather"]),
        ("none", []),
    ],
    ids=["auto", "required", "named", "none"],
)
async def test_a_choice_of_tools_says_which_may_be_called(
    chat, appliance, stream, choice, callable_names
):
    says(appliance, f"{CALL}<|im_end|>")
    reply = await chat(tools=[WEATHER, TIME], tool_choice=choice, max_tokens=999, stream=stream)
    ends = [one.finish_reason for one in await read(reply) if one.finish_reason]
    assert ends == ["tool_calls" if callable_names else "stop"]
    (request,) = appliance.submitted
    assert ("get_weather" in request.prompt_text) == bool(callable_names)
    grammar = request.sequences[0].sampling.grammar or ""
    assert [name for name in ("get_weather", "get_time") if name in grammar] == callable_names


async def test_a_required_call_is_bound_more_than_a_free_one(chat, appliance):
    for choice in ("auto", "required"):
        await chat(tools=[WEATHER], tool_choice=choice)
    free, required = (request.sequences[0].sampling.grammar for request in appliance.submitted)
    assert free != required


async def test_special_tokens_that_mark_calls_are_read(tmp_path, appliance):
    tokenizer = Tokenizer(byte_level("[TOOL_CALLS]"), chat_template=FAMILIES["mistral"])
    appliance = FakeAppliance(tokenizer, max_model_len=4096)
    says(appliance, '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Bonn"}}]<|end|>')
    async with serving(appliance, tmp_path / "api.sock") as served:
        reply = await served.chat(tools=[WEATHER], max_tokens=999)
    message = reply.json()["choices"][0]["message"]
    assert message["content"] is None
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Bonn"}'}
    assert len(call["id"]) == 9


@pytest.mark.parametrize("family", ["gemma", "phi"])
async def test_a_template_without_tools_gets_them_in_words(tmp_path, family):
    appliance = FakeAppliance(Tokenizer(byte_level(), chat_template=FAMILIES[family]))
    appliance.model = dataclasses.replace(appliance.model, max_model_len=4096)
    async with serving(appliance, tmp_path / "api.sock") as served:
        says(appliance, '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>!')
        reply = (await served.chat(tools=[WEATHER], max_tokens=99)).json()
    assert reply["choices"][0]["finish_reason"] == "tool_calls"
    assert '"get_weather"' in appliance.submitted[0].prompt_text


# Answers of a given form


async def test_the_client_parses_answers_into_its_own_types(served, appliance):
    says(appliance, '{"city": "Rom", "unit": "f"}<|im_end|>')
    reply = await served.openai.chat.completions.parse(
        model=MODEL, messages=[USER], response_format=Weather, max_tokens=999
    )
    assert reply.choices[0].message.parsed == Weather(city="Rom", unit=Unit.F)
    assert "city" in appliance.submitted[0].sequences[0].sampling.grammar
    async with served.openai.chat.completions.stream(
        model=MODEL, messages=[USER], response_format=Weather, max_tokens=999
    ) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.parsed == Weather(city="Rom", unit=Unit.F)


@pytest.mark.parametrize("kind", ["text", "json_object"])
async def test_any_object_may_be_asked_for(chat, appliance, stream, kind):
    says(appliance, '{"a": [1]}<|im_end|>')
    choices = await read(await chat(response_format={"type": kind}, stream=stream))
    said = [choice.delta if stream else choice.message for choice in choices]
    assert "".join(one.content or "" for one in said) == '{"a": [1]}'
    (sequence,) = appliance.submitted[0].sequences
    assert (sequence.sampling.grammar is None) == (kind == "text")


async def test_the_client_parses_calls_into_its_own_types(served, appliance):
    says(
        appliance,
        '<tool_call>{"name": "Weather", "arguments": {"city": "Rom", "unit": "c"}}<|im_end|>',
    )
    reply = await served.openai.chat.completions.parse(
        model=MODEL,
        messages=[USER],
        tools=[openai.pydantic_function_tool(Weather)],
        max_tokens=999,
    )
    (call,) = reply.choices[0].message.tool_calls
    assert call.function.parsed_arguments == Weather(city="Rom")


async def test_a_form_that_does_not_compile_is_refused_before_it_is_queued(chat, appliance):
    schema = {"name": "x", "schema": {"type": "nothing"}}
    with pytest.raises(openai.BadRequestError, match="cannot be compiled") as refused:
        await chat(response_format={"type": "json_schema", "json_schema": schema})
    assert refused.value.param == "response_format.json_schema.schema"
    assert not appliance.submitted


async def test_a_model_that_cannot_end_has_no_forms(chat, complete, appliance):
    appliance.model = appliance.model.__class__(MODEL, 4096, 300, (), None, 0)
    with pytest.raises(openai.BadRequestError, match="no end-of-text id"):
        await complete(prompt="x", extra_body={"guided_choice": ["a"]})
    assert (await chat(tools=[WEATHER])).choices


# Who may


async def test_viewers_may_not_generate(appliance, tmp_path, monkeypatch):
    monkeypatch.setattr(wire, "peer_of", lambda http: Peer(user="eve", role=Role.VIEWER))
    async with serving(appliance, tmp_path / "api.sock") as served:
        reply = await served.complete()
    assert (reply.status_code, reply.json()["error"]["code"]) == (403, "role_required")
    assert not appliance.submitted
