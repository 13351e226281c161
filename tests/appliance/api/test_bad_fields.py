"""Bad fields get an error that names them: one table for every endpoint that takes a body."""

from __future__ import annotations

import pytest

from engine.text.tokenizer import Tokenizer
from tests.appliance.peers import OPERATOR, client_of
from tests.tiny_tokenizers import CHATML, byte_level
from tests.worlds.daemon_parts import FakeAppliance

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSE, MESSAGE = "/v1/responses", "/v1/messages"
COUNT = "/v1/responses/input_tokens"
OLLAMA, GENERATE = "/api/chat", "/api/generate"
USER = {"role": "user", "content": "hi"}
BODIES = {
    COMPLETION: {"prompt": "hi"},
    CHAT: {"messages": [USER]},
    RESPONSE: {"input": "hi"},
    COUNT: {"input": "hi"},
    MESSAGE: {"messages": [USER], "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": [USER]},
    OLLAMA: {"messages": [USER]},
    GENERATE: {"prompt": "hi"},
    "/api/show": {},
    "/api/pull": {"model": "a/b"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1]},
    "/v1/penstock/roles": {},
}
"""A good body for each endpoint."""
TYPE, VALUE, MISSING = "invalid_type", "invalid_value", "missing_required_parameter"
UNSUPPORTED = "unsupported_parameter"


def function(name="f", **fields):
    return {"type": "function", "function": {"name": name, **fields}}


def said(content, role="user", **fields):
    return {"messages": [{"role": role, "content": content, **fields}]}


def schema(value, **fields):
    form = {"type": "json_schema", "json_schema": {"schema": value, **fields}}
    return {"response_format": form}


def item(**fields):
    return {"input": [fields]}


TO_BOTH = [
    ({"temperature": -0.1}, VALUE, "temperature"),
    ({"temperature": 2.1}, VALUE, "temperature"),
    ({"temperature": True}, TYPE, "temperature"),
    ({"temperature": "1"}, TYPE, "temperature"),
    ({"temperature": 2**70}, VALUE, "temperature"),
    ({"top_p": -0.1}, VALUE, "top_p"),
    ({"top_p": 1.01}, VALUE, "top_p"),
    ({"top_k": -2}, VALUE, "top_k"),
    ({"top_k": 1.5}, TYPE, "top_k"),
    ({"min_p": 1.5}, VALUE, "min_p"),
    ({"max_tokens": 0}, VALUE, "max_tokens"),
    ({"max_tokens": -2}, VALUE, "max_tokens"),
    ({"max_tokens": 2**63}, VALUE, "max_tokens"),
    ({"max_tokens": "16"}, TYPE, "max_tokens"),
    ({"max_tokens": True}, TYPE, "max_tokens"),
    ({"n_predict": -2}, VALUE, "n_predict"),
    ({"seed": 2**63}, VALUE, "seed"),
    ({"seed": 0.5}, TYPE, "seed"),
    ({"stop": ["a"] * 65}, VALUE, "stop"),
    ({"stop": ["a" * 1025]}, VALUE, "stop"),
    ({"stop": [1]}, TYPE, "stop"),
    ({"stop": {"a": 1}}, TYPE, "stop"),
    ({"stop_token_ids": [300]}, VALUE, "stop_token_ids"),
    ({"stop_token_ids": [1] * 129}, VALUE, "stop_token_ids"),
    ({"stop_token_ids": 1}, TYPE, "stop_token_ids"),
    ({"ignore_eos": 1}, TYPE, "ignore_eos"),
    ({"stream": "yes"}, TYPE, "stream"),
    ({"return_token_ids": 0}, TYPE, "return_token_ids"),
    ({"stream_options": {"include_usage": True}}, VALUE, "stream_options"),
    ({"stream_options": []}, TYPE, "stream_options"),
    (
        {"stream": True, "stream_options": {"include_usage": 1}},
        TYPE,
        "stream_options.include_usage",
    ),
    ({"model": 3}, TYPE, "model"),
    ({"n": 0}, VALUE, "n"),
    ({"n": 129}, VALUE, "n"),
    ({"n": True}, TYPE, "n"),
    ({"n": 3, "best_of": 2}, VALUE, "best_of"),
    ({"best_of": 2, "stream": True}, VALUE, "best_of"),
    ({"presence_penalty": 2.1}, VALUE, "presence_penalty"),
    ({"frequency_penalty": -2.1}, VALUE, "frequency_penalty"),
    ({"repetition_penalty": 0}, VALUE, "repetition_penalty"),
    ({"repetition_penalty": 1e-320}, VALUE, "repetition_penalty"),
    ({"repetition_penalty": "1"}, TYPE, "repetition_penalty"),
    ({"min_tokens": -1}, VALUE, "min_tokens"),
    ({"min_tokens": 6, "max_tokens": 5}, VALUE, "min_tokens"),
    ({"logit_bias": []}, TYPE, "logit_bias"),
    ({"logit_bias": {"5": 1, "300": 1}}, VALUE, "logit_bias.300"),
    ({"logit_bias": {"-1": 1}}, VALUE, "logit_bias.-1"),
    ({"logit_bias": {"\u0663": 1}}, VALUE, "logit_bias.\u0663"),
    ({"logit_bias": {"5": 1, "1": 101}}, VALUE, "logit_bias.1"),
    ({"logit_bias": {"1": "1"}}, TYPE, "logit_bias.1"),
    ({"logit_bias": {f"{'0' * i}1": 1 for i in range(1025)}}, VALUE, "logit_bias"),
    ({"prompt_logprobs": -1}, VALUE, "prompt_logprobs"),
    ({"prompt_logprobs": 21}, VALUE, "prompt_logprobs"),
    ({"prompt_logprobs": True}, TYPE, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, VALUE, "prompt_logprobs"),
    ({"allowed_token_ids": []}, VALUE, "allowed_token_ids"),
    ({"allowed_token_ids": 3}, TYPE, "allowed_token_ids"),
    ({"allowed_token_ids": [True]}, TYPE, "allowed_token_ids"),
    ({"allowed_token_ids": [1, 10**6]}, VALUE, "allowed_token_ids"),
    ({"allowed_token_ids": [7] * 4097}, VALUE, "allowed_token_ids"),
    ({"bad_words": 3}, TYPE, "bad_words"),
    ({"bad_words": [3]}, TYPE, "bad_words"),
    ({"bad_words": ["  "]}, VALUE, "bad_words"),
    ({"bad_words": ["x" * 2000]}, VALUE, "bad_words"),
    ({"bad_words": ["x"] * 200}, VALUE, "bad_words"),
    ({"cache_salt": ""}, VALUE, "cache_salt"),
    ({"use_beam_search": True}, UNSUPPORTED, "use_beam_search"),
    ({"length_penalty": True}, UNSUPPORTED, "length_penalty"),
    ({"typical_p": 0.5}, UNSUPPORTED, "typical_p"),
    ({"mirostat": 2}, UNSUPPORTED, "mirostat"),
    ({"truncation_side": "right"}, UNSUPPORTED, "truncation_side"),
    ({"response_format": "json"}, TYPE, "response_format"),
    ({"response_format": {}}, MISSING, "response_format.type"),
    ({"response_format": {"type": "xml"}}, UNSUPPORTED, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, MISSING, "response_format.json_schema"),
    ({"response_format": {"type": "json_object", "schema": 1}}, TYPE, "response_format.schema"),
    (schema(None), MISSING, "response_format.json_schema.schema"),
    (schema([]), TYPE, "response_format.json_schema.schema"),
    (schema({"$ref": "#"}, strict=True), VALUE, "response_format.json_schema.schema"),
    (schema({}, strict=1), TYPE, "response_format.json_schema.strict"),
    ({"structured_outputs": {"choice": []}}, VALUE, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": [""]}}, VALUE, "structured_outputs.choice[0]"),
    ({"structured_outputs": {"choice": ["a", 3]}}, TYPE, "structured_outputs.choice[1]"),
    ({"structured_outputs": {"choice": "a"}}, TYPE, "structured_outputs.choice"),
    ({"structured_outputs": {"regex": 3}}, TYPE, "structured_outputs.regex"),
    ({"structured_outputs": {"json": "{"}}, VALUE, "structured_outputs.json"),
    ({"structured_outputs": {"other": "x"}}, UNSUPPORTED, "structured_outputs.other"),
    (
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        VALUE,
        "structured_outputs.choice",
    ),
    (
        {"guided_regex": "a", "response_format": {"type": "json_object"}},
        VALUE,
        "guided_regex",
    ),
    ({"structured_outputs": {"regex": "a" * 100_000}}, VALUE, "structured_outputs.regex"),
    ({"guided_json": {"a" * 70_000: {}}}, VALUE, "guided_json"),
]
"""Of chats and of completions."""
ROWS = [
    *((path, *row) for row in TO_BOTH for path in (COMPLETION, CHAT)),
    (COMPLETION, {"prompt": None}, MISSING, "prompt"),
    (COMPLETION, {"prompt": ""}, VALUE, "prompt"),
    (COMPLETION, {"prompt": []}, VALUE, "prompt"),
    (COMPLETION, {"prompt": [[]]}, VALUE, "prompt"),
    (COMPLETION, {"prompt": ["a", ""]}, VALUE, "prompt"),
    (COMPLETION, {"prompt": [300]}, VALUE, "prompt"),
    (COMPLETION, {"prompt": [-1]}, VALUE, "prompt"),
    (COMPLETION, {"prompt": [1.5]}, TYPE, "prompt"),
    (COMPLETION, {"prompt": [True]}, TYPE, "prompt"),
    (COMPLETION, {"prompt": [1, "a"]}, TYPE, "prompt"),
    (COMPLETION, {"prompt": ["a", 1]}, TYPE, "prompt"),
    (COMPLETION, {"prompt": [[["a"]]]}, TYPE, "prompt"),
    (COMPLETION, {"prompt": {"a": 1}}, TYPE, "prompt"),
    (COMPLETION, {"prompt": 3}, TYPE, "prompt"),
    (COMPLETION, {"prompt": ["a"] * 500}, VALUE, "prompt"),
    (COMPLETION, {"prompt": [2**70]}, VALUE, "prompt"),
    (COMPLETION, {"logprobs": 21}, VALUE, "logprobs"),
    (COMPLETION, {"logprobs": True}, TYPE, "logprobs"),
    (COMPLETION, {"tools": [{"type": "function"}]}, UNSUPPORTED, "tools"),
    (COMPLETION, {"functions": [{}]}, UNSUPPORTED, "functions"),
    (COMPLETION, {"function_call": {"name": "f"}}, UNSUPPORTED, "function_call"),
    (COMPLETION, {"suffix": "x"}, UNSUPPORTED, "suffix"),
    *(
        (COMPLETION, {"output_offset": 1, **change}, VALUE, "output_offset")
        for change in (
            {"prompt": "text"},
            {"prompt": [[1, 2], [3, 4]]},
            {"prompt": [1]},
            {"prompt": [1, 2], "output_offset": 2},
            {"prompt": [1, 2], "output_offset": -1},
            {"prompt": [1, 2], "n": 2},
            {"prompt": [1, 2], "echo": True},
            {"prompt": [1, 2], "truncate_prompt_tokens": 1},
        )
    ),
    (CHAT, {"priority": 1}, UNSUPPORTED, "priority"),
    (CHAT, {"audio": {}}, UNSUPPORTED, "audio"),
    (CHAT, {"modalities": ["audio"]}, UNSUPPORTED, "modalities"),
    (CHAT, {"output_offset": 1}, UNSUPPORTED, "output_offset"),
    (CHAT, {"max_completion_tokens": 0}, VALUE, "max_completion_tokens"),
    (CHAT, {"logprobs": 1}, TYPE, "logprobs"),
    (CHAT, {"top_logprobs": 3}, VALUE, "top_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, VALUE, "top_logprobs"),
    (
        CHAT,
        {"continue_final_message": True, "add_generation_prompt": True},
        VALUE,
        "continue_final_message",
    ),
    (
        CHAT,
        {"chat_template_kwargs": {"messages": []}},
        VALUE,
        "chat_template_kwargs.messages",
    ),
    (CHAT, {"tools": {}}, TYPE, "tools"),
    (CHAT, {"tools": [3]}, TYPE, "tools[0]"),
    (CHAT, {"tools": [function()] * 2}, VALUE, "tools"),
    (CHAT, {"tools": [function(str(i)) for i in range(1025)]}, VALUE, "tools"),
    (CHAT, {"tools": [{"type": "function"}]}, MISSING, "tools[0].name"),
    (CHAT, {"tools": [function("a b")]}, VALUE, "tools[0].function.name"),
    (CHAT, {"tools": [function("ab\n")]}, VALUE, "tools[0].function.name"),
    (CHAT, {"tools": [function(strict=1)]}, TYPE, "tools[0].function.strict"),
    (CHAT, {"functions": [{"name": "a b"}]}, VALUE, "functions[0].name"),
    (CHAT, {"tool_choice": "required"}, VALUE, "tool_choice"),
    (CHAT, {"tool_choice": "maybe", "tools": [function()]}, VALUE, "tool_choice"),
    (CHAT, {"tool_choice": function("h"), "tools": [function()]}, VALUE, "tool_choice"),
    (
        CHAT,
        {"tool_choice": {"type": "custom"}, "tools": [function()]},
        MISSING,
        "tool_choice.custom.name",
    ),
    (CHAT, {"parallel_tool_calls": 1}, TYPE, "parallel_tool_calls"),
    (CHAT, {"messages": None}, MISSING, "messages"),
    (CHAT, {"messages": "hi"}, TYPE, "messages"),
    (CHAT, {"messages": []}, VALUE, "messages"),
    (CHAT, {"messages": ["hi"]}, TYPE, "messages[0]"),
    (CHAT, {"messages": [USER] * 4097}, VALUE, "messages"),
    (CHAT, {"messages": [{"content": "hi"}]}, MISSING, "messages[0].role"),
    (CHAT, said("hi", ["user"]), TYPE, "messages[0].role"),
    (CHAT, {"messages": [USER, *said("hi", "boss")["messages"]]}, VALUE, "messages[1].role"),
    (CHAT, said(None), MISSING, "messages[0].content"),
    (CHAT, said(3), TYPE, "messages[0].content"),
    (CHAT, said([{"type": "text", "text": "a"}] * 1025), VALUE, "messages[0].content"),
    (CHAT, said([3]), TYPE, "messages[0].content[0]"),
    (CHAT, said([{"type": "hologram"}]), UNSUPPORTED, "messages[0].content[0].type"),
    (CHAT, said([{"type": "text", "text": 3}]), TYPE, "messages[0].content[0].text"),
    (CHAT, said([{"type": "image_url"}]), UNSUPPORTED, "messages[0].content[0].type"),
    (CHAT, said([{"type": "input_audio"}]), UNSUPPORTED, "messages[0].content[0].type"),
    (CHAT, said([{"type": "text"}]), MISSING, "messages[0].content[0].text"),
    (CHAT, said("", tool_calls=[function()]), VALUE, "messages[0].tool_calls"),
    (RESPONSE, {"conversation": "conv-1"}, UNSUPPORTED, "conversation"),
    (RESPONSE, {"background": True, "store": False}, VALUE, "background"),
    (RESPONSE, {"prompt": {"id": "p"}}, UNSUPPORTED, "prompt"),
    (RESPONSE, {"truncation": "middle"}, VALUE, "truncation"),
    (RESPONSE, item(type="item_reference", id="x"), VALUE, "input[0].id"),
    (
        RESPONSE,
        item(role="user", content=[{"type": "input_image"}]),
        UNSUPPORTED,
        "input[0].content[0].type",
    ),
    (RESPONSE, {"input": None}, MISSING, "input"),
    (RESPONSE, {"input": []}, VALUE, "input"),
    (RESPONSE, {"input": 3}, TYPE, "input"),
    (RESPONSE, {"input": ["hi"]}, TYPE, "input[0]"),
    (RESPONSE, {"input": [USER] * 4097}, VALUE, "input"),
    (RESPONSE, item(content="hi"), MISSING, "input[0].role"),
    (RESPONSE, item(role="user"), MISSING, "input[0].content"),
    (RESPONSE, item(type="function_call", call_id="c"), MISSING, "input[0].name"),
    (
        RESPONSE,
        item(role="user", content=[{"type": "input_text", "text": "a"}] * 1025),
        VALUE,
        "input[0].content",
    ),
    (RESPONSE, {"text": {"format": {"type": "json_schema"}}}, MISSING, "text.format.schema"),
    (RESPONSE, {"text": {"format": {"type": "xml"}}}, UNSUPPORTED, "text.format.type"),
    (RESPONSE, item(role="king", content="hi"), VALUE, "input[0].role"),
    (RESPONSE, {"input": "hi " * 300}, "context_length_exceeded", "input"),
    (RESPONSE, {"tools": [{"type": "function"}]}, MISSING, "tools[0].name"),
    (COUNT, {"input": 3}, TYPE, "input"),
    (COUNT, {"reasoning": 3}, TYPE, "reasoning"),
    (COUNT, {"previous_response_id": "none"}, "previous_response_not_found", None),
    (RESPONSE, {"instructions": 3}, TYPE, "instructions"),
    (RESPONSE, {"max_output_tokens": 0}, VALUE, "max_output_tokens"),
    (RESPONSE, {"metadata": {"a": 1}}, TYPE, "metadata.a"),
    (RESPONSE, {"temperature": 9}, VALUE, "temperature"),
    (RESPONSE, {"tools": [{"type": "function", "name": "f"}] * 1025}, VALUE, "tools"),
    (RESPONSE, {"previous_response_id": "none"}, "previous_response_not_found", None),
]
UNNAMED = [
    (MESSAGE, {"max_tokens": None}, "max_tokens"),
    (MESSAGE, {"max_tokens": 0}, "max_tokens"),
    (MESSAGE, {"messages": None}, "messages"),
    (MESSAGE, {"messages": []}, "messages"),
    (MESSAGE, said("x", "robot"), "messages[0].role"),
    (MESSAGE, said([{"type": "image"}]), "messages[0].content[0].type"),
    (MESSAGE, said([{"type": "audio"}]), "messages[0].content[0].type"),
    (MESSAGE, {"system": 3}, "system"),
    (MESSAGE, {"tools": [{"input_schema": {}}]}, "tools[0].name"),
    (MESSAGE, {"tool_choice": {"type": "maybe"}}, "tool_choice.type"),
    (MESSAGE, {"stop_sequences": [""]}, "stop_sequences"),
    (MESSAGE, {"thinking": {"type": "hard"}}, "thinking.type"),
    (MESSAGE, {"temperature": "hot"}, "temperature"),
    ("/v1/messages/count_tokens", {"messages": 3}, "messages"),
    (OLLAMA, {"messages": 3}, "messages"),
    (OLLAMA, {"messages": [3]}, "messages[0]"),
    (OLLAMA, said("x", "robot"), "messages[0].role"),
    (OLLAMA, said("x", images=["aGk="]), "messages[0].images"),
    (OLLAMA, {"options": 3}, "options"),
    (OLLAMA, {"options": {"temperature": -1}}, "options.temperature"),
    (OLLAMA, {"options": {"num_predict": "x"}}, "options.num_predict"),
    (OLLAMA, {"format": "yaml"}, "format"),
    (OLLAMA, {"keep_alive": "soon"}, "keep_alive"),
    (OLLAMA, {"keep_alive": []}, "keep_alive"),
    (OLLAMA, {"keep_alive": True}, "keep_alive"),
    (OLLAMA, {"keep_alive": "1" * 33}, "keep_alive"),
    (GENERATE, {"prompt": 3}, "prompt"),
    (GENERATE, {"template": "x"}, "template"),
    (GENERATE, {"images": ["x"]}, "images"),
    (GENERATE, {"suffix": "x"}, "suffix"),
    ("/api/show", {"model": 3}, "model"),
    ("/api/pull", {"model": 3}, "model"),
    ("/api/pull", {"model": "/a/folder"}, "model"),
    ("/api/pull", {"stream": 1}, "stream"),
]
"""Anthropic's and Ollama's errors have no place for a code or a field: their sentence names it."""
OURS = [
    ("/tokenize", {"prompt": None}, MISSING, "prompt"),
    ("/tokenize", {"prompt": 3}, TYPE, "prompt"),
    ("/tokenize", {"content": "x"}, VALUE, "content"),
    ("/tokenize", {"with_pieces": 1}, TYPE, "with_pieces"),
    ("/tokenize", {"prompt": None, "messages": 3}, TYPE, "messages"),
    ("/tokenize", {"prompt": "x" * (2**20 + 1)}, VALUE, "prompt"),
    ("/detokenize", {"tokens": None}, MISSING, "tokens"),
    ("/detokenize", {"tokens": 3}, TYPE, "tokens"),
    ("/detokenize", {"tokens": ["a"]}, TYPE, "tokens"),
    ("/detokenize", {"tokens": [-1]}, VALUE, "tokens"),
    ("/detokenize", {"tokens": [True]}, TYPE, "tokens"),
    ("/detokenize", {"tokens": [10**6]}, VALUE, "tokens"),
    ("/v1/penstock/roles", {"roles": "odd"}, VALUE, "roles"),
    ("/v1/penstock/roles", {"roles": 3}, TYPE, "roles"),
    ("/v1/penstock/roles", {"slo_ttft_ms": -1}, VALUE, "slo_ttft_ms"),
    ("/v1/penstock/roles", {"slo_itl_ms": "x"}, TYPE, "slo_itl_ms"),
]


_SENTENCES = ("previous_response_not_found", "context_length_exceeded")
"""Codes of errors that clients read as they are."""


@pytest.fixture(scope="module")
def appliance():
    appliance = FakeAppliance(Tokenizer(byte_level(), chat_template=CHATML))
    appliance.model = appliance.model.__class__("m", 256, 300, (257,), None, 0)
    return appliance


async def asked(appliance, path, change):
    async with client_of(appliance, OPERATOR) as client:
        return await client.post(path, json={**BODIES[path], **change})


@pytest.mark.parametrize(("path", "change", "code", "param"), [*ROWS, *OURS])
async def test_openais_error_has_the_code_and_the_field(appliance, path, change, code, param):
    reply = await asked(appliance, path, change)
    error = reply.json()["error"]
    param = param or next(iter(change))
    told = (reply.status_code, error["type"], error["code"], error["param"])
    assert told == (400, "invalid_request_error", code, param)
    assert f"`{param}`" in error["message"] or code in _SENTENCES


@pytest.mark.parametrize(("path", "change", "param"), UNNAMED)
async def test_anthropics_and_ollamas_sentence_names_the_field(appliance, path, change, param):
    reply = await asked(appliance, path, change)
    error = reply.json()["error"]
    assert reply.status_code == 400
    if path.startswith("/v1/messages"):
        assert error["type"] == "invalid_request_error"
        error = error["message"]
    assert f"`{param}`" in error


@pytest.mark.parametrize("path", BODIES)
async def test_a_good_body_is_taken_also_with_fields_that_are_null_or_unknown(appliance, path):
    if path == "/api/pull":
        return  # would download
    unknown = {} if path == "/v1/penstock/roles" else {"frobnicate": [1]}
    reply = await asked(appliance, path, {"stop": None, "nothing": None, **unknown})
    assert reply.status_code == 200
    if path in (COMPLETION, CHAT, RESPONSE, MESSAGE, OLLAMA, GENERATE):
        assert reply.headers["x-penstock-ignored"] == "frobnicate"
