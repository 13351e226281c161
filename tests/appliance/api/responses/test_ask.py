from __future__ import annotations

import dataclasses
import json

import openai
import pydantic
import pytest

from appliance.api.responses.ask import response_ask
from engine.scheduler.cache.hashes import PrefixHasher
from engine.text.tokenizer import Tokenizer
from tests.appliance.api_server import serving
from tests.tiny_tokenizers import CHATML, byte_level
from tests.worlds.daemon_parts import FakeAppliance

MODEL = "fake/tiny-model"
HERMES = (
    "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '[' + call.function.name + (call.function.arguments | tojson) + ']' }}"
    "{% endfor %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": True,
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'


class City(pydantic.BaseModel):
    name: str
    people: int


@pytest.fixture
def appliance():
    appliance = FakeAppliance(Tokenizer(byte_level(), chat_template=CHATML))
    answers(appliance, "hello wörld")
    return appliance


@pytest.fixture
def tool_appliance():
    appliance = FakeAppliance(Tokenizer(byte_level(), chat_template=HERMES), max_model_len=2048)
    # A grammar needs an end to come to.
    end_id = appliance.tokenizer.special_id("<|end|>")
    appliance.model = dataclasses.replace(appliance.model, eos_token_ids=(end_id,))
    return appliance


@pytest.fixture
async def tool_served(tool_appliance, tmp_path):
    async with serving(tool_appliance, tmp_path / "tools.sock") as served:
        yield served


def answers(appliance, text: str) -> None:
    """Make the model say a text, and end."""
    tokenizer = appliance.tokenizer
    ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.special_id("<|end|>")]
    appliance.script = lambda prompt: ids


def prompt_of(appliance) -> str:
    return appliance.submitted[-1].prompt_text


async def streamed(client, **asked) -> list:
    stream = await client.responses.create(model=MODEL, stream=True, **asked)
    return [event async for event in stream]


# Whole


async def test_the_official_client_gets_a_response(served, appliance):
    reply = await served.openai.responses.create(
        model=MODEL,
        input="hi",
        instructions="be brief",
        max_output_tokens=50,
        temperature=0.5,
        top_p=0.9,
        store=False,
        metadata={"trip": "1"},
    )
    assert reply.output_text == "hello wörld"
    assert (reply.object, reply.status, reply.error) == ("response", "completed", None)
    assert reply.id == reply._request_id == appliance.submitted[0].request_id
    assert reply.id.startswith("resp_")
    (message,) = reply.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert (reply.instructions, reply.metadata) == ("be brief", {"trip": "1"})
    assert (reply.temperature, reply.top_p, reply.max_output_tokens) == (0.5, 0.9, 50)
    sequence = appliance.submitted[0].sequences[0]
    assert (sequence.sampling.temperature, sequence.sampling.max_tokens) == (0.5, 50)
    assert reply.usage.input_tokens == sequence.num_prompt_tokens
    assert reply.usage.output_tokens == sequence.num_output_tokens
    assert reply.usage.total_tokens == reply.usage.input_tokens + reply.usage.output_tokens
    assert prompt_of(appliance).startswith("<|im_start|>system\nbe brief<|im_end|>")


async def test_what_was_found_computed_is_told_of_the_input(served, appliance):
    appliance.hasher = PrefixHasher(bytes(32), b"", 4)
    replies = [await served.openai.responses.create(model=MODEL, input="hello") for _ in range(2)]
    length = appliance.submitted[0].sequences[0].num_prompt_tokens
    assert [reply.usage.input_tokens for reply in replies] == [length] * 2
    found = [reply.usage.input_tokens_details.cached_tokens for reply in replies]
    assert found == [0, (length - 1) // 4 * 4]


async def test_the_next_turn_takes_items_as_they_came(served, appliance):
    first = await served.openai.responses.create(model=MODEL, input="hi")
    parts = [{"type": "input_text", "text": "and"}, {"type": "input_text", "text": "then?"}]
    await served.openai.responses.create(
        model=MODEL,
        input=[
            {"role": "developer", "content": "be kind"},
            {"role": "user", "content": "hi"},
            *[item.model_dump() for item in first.output],
            {"type": "message", "role": "user", "content": parts},
        ],
    )
    assert prompt_of(appliance) == (
        "<|im_start|>system\nbe kind<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\nhello wörld<|im_end|>\n"
        "<|im_start|>user\nand\nthen?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


async def test_a_response_that_is_cut_short_says_so(served):
    reply = await served.openai.responses.create(model=MODEL, input="hi", max_output_tokens=2)
    assert reply.status == reply.output[0].status == "incomplete"
    assert reply.incomplete_details.reason == "max_output_tokens"


async def test_a_response_without_a_word_is_a_response(served, appliance):
    appliance.script = lambda prompt: [appliance.tokenizer.special_id("<|end|>")]
    reply = await served.openai.responses.create(model=MODEL, input="hi")
    assert (reply.output_text, reply.status) == ("", "completed")


async def test_a_failure_is_an_error(served, appliance):
    appliance.fail_after = 2
    with pytest.raises(openai.InternalServerError, match="died too often"):
        await served.openai.responses.create(model=MODEL, input="hi")


# Streams


async def test_events_come_in_order_and_add_up_to_the_response(served):
    whole = await served.openai.responses.create(model=MODEL, input="hi")
    events = await streamed(served.openai, input="hi")
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 3
    assert "".join(delta.delta for delta in deltas) == whole.output_text
    others = [event.type.removeprefix("response.") for event in events if event not in deltas]
    assert others == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    first, last = events[0].response, events[-1].response
    assert (first.status, first.output, first.usage) == ("in_progress", [], None)
    assert (last.output_text, last.usage) == (whole.output_text, whole.usage)
    item_ids = {event.item_id for event in events if hasattr(event, "item_id")}
    assert item_ids == {last.output[0].id}


async def test_a_stream_names_its_events_and_has_no_done_mark(served):
    body = {"model": MODEL, "input": "hi", "stream": True}
    reply = await served.http.post("/v1/responses", json=body)
    blocks = reply.text.strip().split("\n\n")
    for block in blocks:
        name, data = block.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"
    assert blocks[-1].startswith("event: response.completed")


async def test_a_stream_that_is_cut_short_or_fails_says_so(served, appliance):
    (*_, last) = await streamed(served.openai, input="hi", max_output_tokens=2)
    assert (last.type, last.response.status) == ("response.incomplete", "incomplete")
    appliance.fail_after = 2
    (*_, last) = await streamed(served.openai, input="hi")
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert "died too often" in last.response.error.message


async def test_the_official_clients_stream_helper_follows(served):
    async with served.openai.responses.stream(model=MODEL, input="hi") as stream:
        texts = [
            event.delta async for event in stream if event.type == "response.output_text.delta"
        ]
        final = await stream.get_final_response()
    assert "".join(texts) == final.output_text == "hello wörld"


# Forms


async def test_the_official_client_parses_what_a_schema_answers(tool_served, tool_appliance):
    answers(tool_appliance, '{"name": "Bern", "people": 134}')
    reply = await tool_served.openai.responses.parse(model=MODEL, input="hi", text_format=City)
    assert reply.output_parsed == City(name="Bern", people=134)
    assert tool_appliance.submitted[0].sequences[0].sampling.grammar is not None
    async with tool_served.openai.responses.stream(
        model=MODEL, input="hi", text_format=City
    ) as stream:
        assert (await stream.get_final_response()).output_parsed.name == "Bern"


async def test_any_json_can_be_asked_for(tool_served, tool_appliance):
    answers(tool_appliance, "{}")
    reply = await tool_served.openai.responses.create(
        model=MODEL, input="hi", text={"format": {"type": "json_object"}}
    )
    assert reply.text.format.type == "json_object"
    assert tool_appliance.submitted[0].sequences[0].sampling.grammar is not None


# Calls


async def test_a_function_is_called_and_its_output_answered_to(tool_served, tool_appliance):
    answers(tool_appliance, CALL)
    client = tool_served.openai
    asked = {"role": "user", "content": "weather in Bern?"}
    reply = await client.responses.create(
        model=MODEL, input=[asked], tools=[WEATHER], tool_choice="auto"
    )
    (call,) = reply.output
    assert (call.type, call.name, call.status) == ("function_call", "weather", "completed")
    assert json.loads(call.arguments) == {"city": "Bern"}
    assert reply.tools[0].name == "weather"
    answers(tool_appliance, "sunny")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}
    final = await client.responses.create(
        model=MODEL, input=[asked, call.model_dump(), output], tools=[WEATHER]
    )
    assert final.output_text == "sunny"
    assert '<|im_start|>assistant\n[weather{"city": "Bern"}]<|im_end|>' in prompt_of(tool_appliance)
    assert "<|im_start|>tool\nsun<|im_end|>" in prompt_of(tool_appliance)


async def test_a_call_is_streamed_as_an_item_of_its_own(tool_served, tool_appliance):
    answers(tool_appliance, f"let me see\n{CALL}")
    events = await streamed(tool_served.openai, input="weather?", tools=[WEATHER])
    assert [event.sequence_number for event in events] == list(range(len(events)))
    added = [event for event in events if event.type == "response.output_item.added"]
    assert [(one.output_index, one.item.type) for one in added] == [
        (0, "message"),
        (1, "function_call"),
    ]
    pieces = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    (done,) = [e for e in events if e.type == "response.function_call_arguments.done"]
    assert "".join(pieces) == done.arguments
    assert json.loads(done.arguments) == {"city": "Bern"}
    final = events[-1].response
    assert [item.status for item in final.output] == ["completed", "completed"]
    assert final.output_text.strip() == "let me see"
    assert final.output[1].call_id == added[1].item.call_id


# Refusals


async def test_unknown_fields_are_ignored_and_told(served):
    body = {"input": "hi", "service_tier": "flex", "frobnicate": 1, "user": "me"}
    reply = await served.http.post("/v1/responses", json=body)
    assert reply.status_code == 200
    assert "frobnicate" in reply.headers["x-penstock-ignored"]


def test_calls_that_follow_one_another_belong_to_one_message(appliance):
    call = {"type": "function_call", "name": "weather", "arguments": "{}"}
    items = [{"role": "user", "content": "?"}, *({**call, "call_id": str(n)} for n in range(1000))]
    ask = response_ask({"input": items}, appliance.model)
    (_, said) = ask.chat.messages
    assert [one["id"] for one in said["tool_calls"]] == [str(number) for number in range(1000)]


async def test_input_is_counted_as_it_would_be_used(served):
    asked = {"model": MODEL, "input": "hello", "instructions": "be brief"}
    counted = await served.openai.responses.input_tokens.count(**asked)
    reply = await served.openai.responses.create(**asked, max_output_tokens=1)
    assert (counted.object, counted.input_tokens) == (
        "response.input_tokens",
        reply.usage.input_tokens,
    )
    more = {"input": "more", "previous_response_id": reply.id}
    counted = await served.openai.responses.input_tokens.count(model=MODEL, **more)
    reply = await served.openai.responses.create(model=MODEL, **more, max_output_tokens=1)
    assert counted.input_tokens == reply.usage.input_tokens


@pytest.mark.parametrize("is_parallel", [False, True])
async def test_a_response_repeats_what_was_asked_of_calls(tool_served, tool_appliance, is_parallel):
    answers(tool_appliance, "hello")
    asked = {"model": MODEL, "input": "hi", "tools": [WEATHER]}
    for choice in ("auto", "required"):
        reply = await tool_served.openai.responses.create(
            **asked, tool_choice=choice, parallel_tool_calls=is_parallel
        )
        assert (reply.parallel_tool_calls, reply.tool_choice) == (is_parallel, choice)


# Log-probabilities, and what is told back


LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_answers_log_probabilities_are_told_where_asked_for(served, is_stream):
    body = {"input": "hi", "max_output_tokens": 50, "stream": is_stream, **LOGPROBS}
    reply = await served.http.post("/v1/responses", json=body)
    if is_stream:
        lines = [one[6:] for one in reply.text.split("\n") if one.startswith("data: ")]
        told = json.loads(lines[-1])["response"]
        deltas = [one for line in lines if "delta" in (one := json.loads(line))]
        pieces = [entry for one in deltas for entry in one["logprobs"]]
    else:
        told = reply.json()
    (part,) = told["output"][0]["content"]
    assert all(len(one["top_logprobs"]) == 2 for one in part["logprobs"])
    assert (
        bytes(one for entry in part["logprobs"] for one in entry["bytes"]).decode() == part["text"]
    )
    if is_stream:
        assert pieces == part["logprobs"]


async def test_reasoning_and_calls_have_no_log_probabilities(tool_served, tool_appliance):
    answers(tool_appliance, "Well: " + CALL)
    body = {"input": "hi", "tools": [WEATHER], **LOGPROBS}
    reply = (await tool_served.http.post("/v1/responses", json=body)).json()
    (part,) = reply["output"][0]["content"]
    assert bytes(b for one in part["logprobs"] for b in one["bytes"]).decode() == part["text"]


async def test_fields_are_told_back_as_openai_does(served):
    body = {"input": "hi", "text": {"verbosity": "low"}, "prompt_cache_key": "k"}
    reply = await served.http.post("/v1/responses", json={**body, "max_tool_calls": 3})
    told = reply.json()
    assert told["text"] == {"format": {"type": "text"}}
    assert (told["prompt_cache_key"], told["max_tool_calls"]) == ("k", 3)
    assert (told["service_tier"], told["safety_identifier"]) == ("default", None)
    assert "text.verbosity" in reply.headers["x-penstock-ignored"]


async def test_instructions_may_be_items(served, appliance):
    items = [{"role": "developer", "content": [{"type": "input_text", "text": "be brief"}]}]
    body = {"input": "hi", "instructions": items, "max_output_tokens": 1}
    assert (await served.http.post("/v1/responses", json=body)).status_code == 200
    assert "be brief" in prompt_of(appliance)
