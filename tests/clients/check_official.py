"""openai, anthropic and ollama: an answer, a call of a function, and what is said to its result."""

from __future__ import annotations

import json

import pytest

from tests.clients.doors import http_library

openai = pytest.importorskip("openai")

QUESTION = {"role": "user", "content": "What is the capital city of Germany?"}
WEATHER = {"role": "user", "content": "What is the weather in Paris?"}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "London"]}},
    "required": ["city"],
    "additionalProperties": False,
}
NAME, ABOUT, RESULT = "get_weather", "The weather of a city.", "22 degrees and sunny"
FUNCTION = {"name": NAME, "description": ABOUT, "parameters": PARAMETERS}


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def stream(request):
    return request.param


def assert_calls(name: str, arguments: object) -> None:
    assert name == NAME
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert list(arguments) == ["city"]
    assert arguments["city"] in ("Paris", "London")


# OpenAI: chats and completions


@pytest.fixture
def of_openai(door):
    with door.http(http_library(openai)) as http:
        yield openai.OpenAI(
            base_url=f"{door.url}/v1", api_key=door.key, max_retries=0, http_client=http
        )


def chat(client, stream, **fields):
    """Text, calls by their ids with name and arguments, why it ended."""
    fixed = {"model": "any", "max_tokens": 60, "temperature": 0}
    reply = client.chat.completions.create(**fixed, **fields, stream=stream)
    if not stream:
        (choice,) = reply.choices
        assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
        calls = choice.message.tool_calls or []
        found = [(one.id, one.function.name, one.function.arguments) for one in calls]
        return choice.message.content or "", found, choice.finish_reason
    text, reason, parts = "", None, {}
    for chunk in reply:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
            for call in choice.delta.tool_calls or []:
                begun = parts.setdefault(call.index, [call.id, call.function.name, ""])
                begun[2] += call.function.arguments or ""
    return text, [tuple(one) for one in parts.values()], reason


def test_a_chat_of_openais(of_openai, stream):
    text, calls, reason = chat(of_openai, stream, messages=[QUESTION])
    assert "Berlin" in text
    assert (calls, reason) == ([], "stop")


def test_a_function_of_openais_is_called_and_its_result_answered(of_openai, stream):
    tools = [{"type": "function", "function": FUNCTION}]
    text, calls, reason = chat(
        of_openai, stream, messages=[WEATHER], tools=tools, tool_choice="required",
        parallel_tool_calls=False,
    )  # fmt: skip
    ((call_id, name, arguments),) = calls
    assert (text, reason) == ("", "tool_calls")
    assert_calls(name, arguments)
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    said = [
        WEATHER,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": RESULT},
    ]
    text, calls, reason = chat(of_openai, stream, messages=said, tools=tools, tool_choice="none")
    assert text
    assert (calls, reason in ("stop", "length")) == ([], True)


def test_a_completion_of_openais(of_openai, stream):
    fields = {"model": "any", "max_tokens": 8, "temperature": 0}
    reply = of_openai.completions.create(prompt="The capital of France is", **fields, stream=stream)
    text = "".join(one.choices[0].text for one in (reply if stream else [reply]) if one.choices)
    assert "Paris" in text


# OpenAI: responses


def respond(client, stream, **fields):
    fixed = {"model": "any", "max_output_tokens": 60, "temperature": 0}
    reply = client.responses.create(**fixed, **fields, stream=stream)
    if not stream:
        return reply
    events = list(reply)
    assert [one.sequence_number for one in events] == list(range(len(events)))
    text = "".join(one.delta for one in events if one.type == "response.output_text.delta")
    assert events[-1].type in ("response.completed", "response.incomplete")
    assert events[-1].response.output_text == text
    return events[-1].response


def test_a_response_and_one_that_goes_on_from_it(of_openai, stream):
    first = respond(of_openai, stream, input="What is the capital city of Germany?")
    assert "Berlin" in first.output_text
    counted = of_openai.responses.input_tokens.count(model="any", input=QUESTION["content"])
    assert counted.input_tokens == first.usage.input_tokens
    second = respond(of_openai, stream, input="Say it again.", previous_response_id=first.id)
    assert second.usage.input_tokens > first.usage.input_tokens
    assert second.output_text


def test_a_function_is_called_by_a_response_and_its_result_answered(of_openai, stream):
    tools = [{"type": "function", **FUNCTION}, {"type": "web_search"}]
    asked = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    first = respond(of_openai, stream, input=[WEATHER], **asked)
    (call,) = first.output
    assert call.type == "function_call"
    assert_calls(call.name, call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
    second = respond(
        of_openai, stream, input=[result], previous_response_id=first.id, tools=tools,
        tool_choice="none",
    )  # fmt: skip
    assert second.output_text


# Anthropic


@pytest.fixture
def of_anthropic(door):
    anthropic = pytest.importorskip("anthropic")
    with door.http(http_library(anthropic)) as http:
        yield anthropic.Anthropic(
            api_key=door.key, max_retries=0, base_url=door.url, http_client=http
        )


def message(client, stream, **fields):
    fixed = {"model": "any", "max_tokens": 60, "extra_body": {"temperature": 0}}
    if not stream:
        return client.messages.create(**fixed, **fields)
    with client.messages.stream(**fixed, **fields) as events:
        for _ in events:
            pass
        return events.get_final_message()


def test_a_message_of_anthropics(of_anthropic, stream):
    fields = {"messages": [QUESTION], "system": "You are a helpful assistant."}
    reply = message(of_anthropic, stream, **fields)
    (block,) = reply.content
    assert "Berlin" in block.text
    assert reply.stop_reason == "end_turn"
    counted = of_anthropic.messages.count_tokens(model="any", **fields)
    usage = reply.usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_a_function_of_anthropics_is_called_and_its_result_answered(of_anthropic, stream):
    tools = [{"name": NAME, "description": ABOUT, "input_schema": PARAMETERS}]
    choice = {"type": "any", "disable_parallel_tool_use": True}
    reply = message(of_anthropic, stream, messages=[WEATHER], tools=tools, tool_choice=choice)
    (call,) = reply.content
    assert reply.stop_reason == "tool_use"
    assert_calls(call.name, call.input)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": RESULT}
    said = [
        WEATHER,
        {"role": "assistant", "content": [call.model_dump()]},
        {"role": "user", "content": [result]},
    ]
    none = {"type": "none"}
    reply = message(of_anthropic, stream, messages=said, tools=tools, tool_choice=none)
    assert reply.content[0].text


# Ollama


@pytest.fixture
def of_ollama(door):
    ollama = pytest.importorskip("ollama")
    client = ollama.Client(host=door.url, headers={"authorization": f"Bearer {door.key}"})
    if door.socket is not None:
        client._client = door.http()
        client._client.base_url = door.url
    return client


def test_a_chat_of_ollamas_and_what_it_says_of_the_model(of_ollama, stream):
    (model,) = of_ollama.list().models
    assert of_ollama.show(model.model).template
    assert of_ollama.ps().models
    options = {"temperature": 0, "num_predict": 60}
    reply = of_ollama.chat(model.model, [QUESTION], stream=stream, options=options)
    parts = list(reply) if stream else [reply]
    assert "Berlin" in "".join(one.message.content or "" for one in parts)
    assert (parts[-1].done, parts[-1].done_reason) == (True, "stop")


def test_a_prompt_of_ollamas(of_ollama, stream):
    options = {"temperature": 0, "num_predict": 60}
    prompt = QUESTION["content"]
    reply = of_ollama.generate("any", prompt, stream=stream, options=options)
    assert "Berlin" in "".join(one.response for one in (reply if stream else [reply]))


def test_tools_of_ollamas_are_offered_and_a_result_is_answered(of_ollama, stream):
    """Ollama has no way to require a call, and a small model may answer without one."""
    tools = [{"type": "function", "function": FUNCTION}]
    options = {"temperature": 0, "num_predict": 60}
    call = {"function": {"name": NAME, "arguments": {"city": "Paris"}}}
    said = [WEATHER]
    for more in ([], [{"role": "assistant", "content": "", "tool_calls": [call]}]):
        said += more and [*more, {"role": "tool", "tool_name": NAME, "content": RESULT}]
        reply = of_ollama.chat("any", said, tools=tools, stream=stream, options=options)
        parts = list(reply) if stream else [reply]
        calls = [call for one in parts for call in one.message.tool_calls or []]
        for one in calls:
            assert one.function.name == NAME
        assert calls or "".join(one.message.content or "" for one in parts)
