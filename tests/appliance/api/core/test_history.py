"""A conversation never dies of its past: what any server may have put into it is read, or named."""

from __future__ import annotations

import contextlib
import json

import pytest

from appliance.api.core.chat_messages import read_messages
from appliance.api.core.fields import ChatMessage
from appliance.api.ollama.fields import OllamaMessage
from engine.errors import RequestError
from engine.text.tokenizer import Tokenizer
from tests.appliance.api_server import says, serving
from tests.tiny_tokenizers import CHATML_WITH_CALLS, byte_level
from tests.worlds.daemon_parts import FakeAppliance

ONE = '<tool_call>\n{"name": "f", "arguments": {"a": "b"}}\n</tool_call>'
REPLIES = {
    "text": "hello wö",
    "reasoning": "<think>\nhm\n</think>\n\nyes",
    "a call": ONE,
    "two calls": f"ok\n{ONE}\n{ONE}",
}
PARAMETERS = {"type": "object", "properties": {"a": {"type": "string"}}}
FUNCTION = {"name": "f", "parameters": PARAMETERS}
CHAT_TOOLS = [{"type": "function", "function": FUNCTION}]
USER = {"role": "user", "content": "go on"}


@pytest.fixture
def appliance():
    return FakeAppliance(
        Tokenizer(byte_level(), chat_template=CHATML_WITH_CALLS), max_model_len=8192
    )


# What is sent, and what a client makes of the reply: the messages behind the first.


def _chat(size):
    return {"messages": [USER], "tools": CHAT_TOOLS, "max_tokens": size}


def _after_chat(reply):
    said = reply["choices"][0]["message"]
    calls = said.get("tool_calls") or []
    return [said, *({"role": "tool", "tool_call_id": c["id"], "content": "r"} for c in calls), USER]


def _responses(size):
    tools = [{"type": "function", **FUNCTION}]
    return {"input": [USER], "tools": tools, "max_output_tokens": size}


def _after_responses(reply):
    return [*reply["output"], *_outputs(reply), USER]


def _outputs(reply):
    ids = [one["call_id"] for one in reply["output"] if one["type"] == "function_call"]
    return [{"type": "function_call_output", "call_id": one, "output": "r"} for one in ids]


def _messages(size):
    tools = [{"name": "f", "input_schema": PARAMETERS}]
    return {"messages": [USER], "tools": tools, "max_tokens": size}


def _after_messages(reply):
    calls = [one["id"] for one in reply["content"] if one["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": one, "content": "r"} for one in calls]
    said = {"role": "assistant", "content": reply["content"]}
    return [said, {"role": "user", "content": [*results, {"type": "text", "text": "go on"}]}]


def _ollama(size):
    options = {"num_predict": size}
    return {"messages": [USER], "tools": CHAT_TOOLS, "options": options, "stream": False}


def _after_ollama(reply):
    said = reply["message"]
    results = [
        {"role": "tool", "tool_name": "f", "content": "r"} for _ in said.get("tool_calls", ())
    ]
    return [said, *results, USER]


APIS = {
    "/v1/chat/completions": (_chat, "messages", _after_chat),
    "/v1/responses": (_responses, "input", _after_responses),
    "/v1/messages": (_messages, "messages", _after_messages),
    "/api/chat": (_ollama, "messages", _after_ollama),
}


@pytest.mark.parametrize("path", APIS)
async def test_every_reply_cut_at_each_length_can_be_sent_back(served, appliance, path):
    ask, place, behind = APIS[path]
    num_walked = 0
    for text in REPLIES.values():
        says(appliance, text)
        for size in range(1, len(text.encode()) + 1):
            reply = await served.http.post(path, json=ask(size))
            assert reply.status_code == 200, reply.text
            body = {**ask(1), place: [USER, *behind(reply.json())]}
            again = await served.http.post(path, json=body)
            assert again.status_code == 200, (text[:size], again.text)
            num_walked += 1
    assert num_walked == sum(len(one.encode()) for one in REPLIES.values())


async def test_every_response_cut_at_each_length_can_be_continued_by_its_id(served, appliance):
    num_walked = 0
    for text in REPLIES.values():
        says(appliance, text)
        for size in range(1, len(text.encode()) + 1):
            first = (await served.http.post("/v1/responses", json=_responses(size))).json()
            body = {"input": [*_outputs(first), USER], "previous_response_id": first["id"]}
            again = await served.http.post("/v1/responses", json=body | {"max_output_tokens": 1})
            assert again.status_code == 200, (text[:size], again.text)
            num_walked += 1
    assert num_walked == sum(len(one.encode()) for one in REPLIES.values())


ODD_ARGUMENTS = [
    *('{"a": "unfin', "[]", '"x"', "42", '{"a":1}{"b":2}', "{'a': 1}", "[" * 70 + "]" * 70),
    *("", " ", "null", None, [1], 42, {"a": 1}),
]


@pytest.mark.parametrize("arguments", ODD_ARGUMENTS)
@pytest.mark.parametrize("path", APIS)
async def test_any_arguments_of_an_earlier_call_are_kept(served, appliance, path, arguments):
    function = {"name": "f", "arguments": arguments}
    calls = {"role": "assistant", "tool_calls": [{"id": "c1", "function": function}]}
    past = {
        "/v1/chat/completions": [calls],
        "/v1/responses": [{"type": "function_call", "call_id": "c1", **function}],
        "/v1/messages": [
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "c1", "name": "f", "input": arguments}],
            }
        ],
        "/api/chat": [calls],
    }[path]
    ask, place, _ = APIS[path]
    reply = await served.http.post(path, json={**ask(1), place: [USER, *past, USER]})
    assert reply.status_code == 200, reply.text
    prompt = appliance.submitted[-1].prompt_text
    assert "[f {" in prompt
    if isinstance(arguments, str) and arguments.strip() not in ("", "null"):
        assert json.dumps(arguments, ensure_ascii=False) in prompt


FOREIGN = {
    "file": {"type": "file", "file": {"file_data": "data:application/pdf;base64,AAAA"}},
    "sound": {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    "video": {"type": "video_url", "video_url": {"url": "http://x"}},
    "image of a chat": {"type": "image_url", "image_url": {"url": "data:"}},
    "image of a response": {"type": "input_image", "image_url": "data:"},
    "image of a message": {"type": "image", "source": {"type": "base64"}},
    "document": {"type": "document", "source": {"type": "url", "url": "http://x"}},
    "encrypted": {"type": "redacted_thinking", "data": "x"},
    "server's call": {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
    "server's result": {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
    "call over MCP": {"type": "mcp_tool_use", "id": "s", "name": "x", "server_name": "y"},
    "reference": {"type": "tool_reference", "tool_name": "x"},
    "container": {"type": "container_upload", "file_id": "x"},
    "compaction": {"type": "compaction", "content": None},
    "of no server": {"type": "hologram"},
    "no type": {"foo": 1},
    "a number": 42,
    "nothing": None,
    "text without one": {"type": "text"},
}
WORDS = {
    "of a chat": {"type": "text", "text": "WORDS"},
    "of a question": {"type": "input_text", "text": "WORDS"},
    "of an answer": {"type": "output_text", "text": "WORDS"},
    "of a refusal": {"type": "refusal", "refusal": "WORDS"},
    "without a type": {"text": "WORDS"},
    "over MCP": {"type": "mcp_tool_result", "content": [{"type": "text", "text": "WORDS"}]},
    "of no server": {"type": "hologram", "text": "WORDS"},
    "of a file": {"type": "file", "file": {"file_data": "data:text/plain;base64,V09SRFM="}},
    "of a document": {"type": "document", "source": {"type": "text", "data": "WORDS"}},
    "of parts": {"type": "document", "source": {"type": "content", "content": "WORDS"}},
    "of an input file": {"type": "input_file", "file_data": "data:text/csv;base64,V09SRFM="},
    "of a search": {
        "type": "search_result",
        "source": "x",
        "content": [{"type": "text", "text": "WORDS"}],
    },
}


def _with_past(path, role, part):
    """A conversation with a part in an earlier turn, in any API."""
    ask, place, _ = APIS[path]
    said = {"role": role, "content": [{"type": "text", "text": "before"}, part]}
    last = [{"role": "assistant", "content": "ok"}, USER]
    return {**ask(1), place: [USER, {"role": "assistant", "content": "yes"}, said, *last]}


@pytest.mark.parametrize("part", FOREIGN.values(), ids=FOREIGN)
@pytest.mark.parametrize("role", ["user", "assistant"])
@pytest.mark.parametrize("path", APIS)
async def test_what_no_model_reads_is_left_out_of_the_past_and_named(
    served, appliance, path, role, part
):
    reply = await served.http.post(path, json=_with_past(path, role, part))
    assert reply.status_code == 200, reply.text
    place = "input" if path == "/v1/responses" else "messages"
    assert f"{place}.2.content.1" in reply.headers["x-penstock-ignored"]
    assert "before" in appliance.submitted[-1].prompt_text


@pytest.mark.parametrize("part", WORDS.values(), ids=WORDS)
@pytest.mark.parametrize("role", ["user", "assistant"])
@pytest.mark.parametrize("path", APIS)
async def test_words_are_kept_in_whatever_part_they_stand(served, appliance, path, role, part):
    reply = await served.http.post(path, json=_with_past(path, role, part))
    assert reply.status_code == 200, reply.text
    assert "before\nWORDS" in appliance.submitted[-1].prompt_text.replace("x\nWORDS", "WORDS")


@pytest.mark.parametrize("kind", ["file", "sound", "video", "image of a chat", "document"])
@pytest.mark.parametrize("path", APIS)
async def test_only_the_newest_turn_is_refused_and_says_where(served, path, kind):
    ask, place, _ = APIS[path]
    asked = {"role": "user", "content": [{"type": "text", "text": "look"}, FOREIGN[kind]]}
    reply = await served.http.post(path, json={**ask(1), place: [USER, asked]})
    assert reply.status_code == 400
    assert f"{place}[1].content[1].type" in reply.text


ITEMS = [
    {"type": "web_search_call", "id": "ws_1", "status": "completed"},
    {"type": "code_interpreter_call", "id": "ci_1", "code": "1", "outputs": []},
    {"type": "mcp_list_tools", "id": "m", "server_label": "x", "tools": []},
    {"type": "mcp_approval_request", "id": "m", "name": "x", "arguments": "{}"},
    {"type": "computer_call", "id": "c", "call_id": "c", "action": {}},
    {"type": "computer_call_output", "call_id": "c", "output": {"type": "computer_screenshot"}},
    {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}},
    {"type": "compaction", "id": "c", "encrypted_content": "x"},
    {"type": "reasoning", "id": "rs_1", "encrypted_content": "x", "summary": []},
    {"type": "item_reference", "id": "msg_unknown"},
    {"id": "msg_unknown"},
    {"type": "hologram"},
    {"type": "function_call", "call_id": "c", "arguments": "{}"},
    {"type": "message", "role": None, "content": "x"},
    {"type": 3},
    "words",
    None,
]


@pytest.mark.parametrize("item", ITEMS, ids=str)
@pytest.mark.parametrize("path", APIS)
async def test_unknown_items_of_the_past_are_left_out_and_named(served, path, item):
    ask, place, _ = APIS[path]
    reply = await served.http.post(path, json={**ask(1), place: [USER, item, USER]})
    assert reply.status_code == 200, reply.text
    assert f"{place}.1" in reply.headers["x-penstock-ignored"]


SPOKEN = [
    ({"role": "model", "content": "WORDS"}, "assistant"),
    ({"role": "model", "parts": [{"text": "WORDS"}]}, "assistant"),
    ({"role": "ai", "content": [{"type": "text", "text": "WORDS"}]}, "assistant"),
    ({"role": "Assistant", "content": "WORDS"}, "assistant"),
    ({"role": "human", "content": "WORDS"}, "user"),
    ({"role": "developer", "content": "WORDS"}, "system"),
    ({"role": "ipython", "content": "WORDS"}, "tool"),
    ({"role": "tool", "tool_call_id": 7, "content": "WORDS"}, "tool"),
    ({"role": "user", "name": 3, "content": "WORDS"}, "user"),
    ({"type": "function_call_output", "call_id": "c", "output": "WORDS"}, "tool"),
    ({"type": "tool_result", "tool_use_id": 7, "content": "WORDS"}, "tool"),
    ({"role": "tool", "content": "WORDS", "is_error": False}, "tool"),
    ({"role": "assistant", "audio": {"id": "a", "transcript": "WORDS"}}, "assistant"),
    ({"role": "user", "content": [{"type": "input_audio", "transcript": "WORDS"}]}, "user"),
]


@pytest.mark.parametrize(("message", "role"), SPOKEN, ids=str)
@pytest.mark.parametrize("path", APIS)
async def test_messages_of_the_past_are_read_in_the_words_of_any_api(
    served, appliance, path, message, role
):
    ask, place, _ = APIS[path]
    reply = await served.http.post(path, json={**ask(1), place: [USER, message, USER]})
    assert reply.status_code == 200, reply.text
    assert f"<|im_start|>{role}\nWORDS<|im_end|>" in appliance.submitted[-1].prompt_text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/chat"])
async def test_a_failure_of_a_tool_is_told_before_its_words(served, appliance, path):
    ask, place, _ = APIS[path]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "c", "content": "no such file", "is_error": True}
    past = [USER, {"role": "assistant", "tool_calls": [call]}, result]
    reply = await served.http.post(path, json={**ask(1), place: past})
    assert "x-penstock-ignored" not in reply.headers
    assert f"Error: {result['content']}" in appliance.submitted[-1].prompt_text


@pytest.mark.parametrize("role", ["critic", 5, None])
@pytest.mark.parametrize("path", APIS)
async def test_words_of_an_unknown_speaker_are_kept_as_the_users_and_named(
    served, appliance, path, role
):
    ask, place, _ = APIS[path]
    message = {"role": role, "content": "WORDS"}
    reply = await served.http.post(path, json={**ask(1), place: [USER, message, USER]})
    assert f"{place}.1" in reply.headers["x-penstock-ignored"]
    assert "<|im_start|>user\nWORDS<|im_end|>" in appliance.submitted[-1].prompt_text


@pytest.mark.parametrize("path", APIS)
async def test_calls_of_the_past_are_read_in_the_words_of_any_api(served, appliance, path):
    ask, place, _ = APIS[path]
    function = {"name": "f", "arguments": '{"a": "b"}'}
    past = [
        {"role": "assistant", "tool_calls": [{"id": 7, "type": "function", "function": function}]},
        {"role": "model", "function_call": function},
        {"type": "function_call", "call_id": "c", **function},
        {"role": "assistant", "content": [{"type": "tool_use", "name": "f", "input": {"a": "b"}}]},
    ]
    reply = await served.http.post(path, json={**ask(1), place: [USER, *past, USER]})
    assert reply.status_code == 200, reply.text
    assert appliance.submitted[-1].prompt_text.count('[f {"a": "b"}]') == len(past)


UNKNOWN = [{"role": "critic", "content": "x"}, {"content": "x"}, "x", None]


@pytest.mark.parametrize("message", UNKNOWN, ids=str)
@pytest.mark.parametrize("path", APIS)
async def test_a_newest_message_without_a_speaker_is_refused_by_its_place(served, path, message):
    ask, place, _ = APIS[path]
    reply = await served.http.post(path, json={**ask(1), place: [USER, message]})
    assert reply.status_code == 400
    assert f"{place}[1]" in reply.text


@pytest.mark.parametrize("item", [{"type": "item_reference", "id": "msg_x"}, {"type": "hologram"}])
async def test_an_unknown_item_that_is_the_newest_is_refused_by_its_place(served, item):
    reply = await served.http.post("/v1/responses", json={"input": [USER, item]})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"].startswith("input[1].")


NOT_TO_BE_READ = {
    "audio": {"audio": {"id": "audio_1"}},
    "unknown": {"attachments": [{"id": 1}]},
    "a call without a name": {"tool_calls": [{"id": "c", "function": {"arguments": "{}"}}]},
    "calls that are none": {"tool_calls": ["f()"]},
    "encrypted thoughts": {"reasoning_details": [{"type": "reasoning.encrypted", "data": "x"}]},
}


@pytest.mark.parametrize("fields", NOT_TO_BE_READ.values(), ids=NOT_TO_BE_READ)
@pytest.mark.parametrize("path", APIS)
async def test_fields_of_earlier_messages_that_are_not_read_are_named(served, path, fields):
    ask, place, _ = APIS[path]
    answer = {"role": "assistant", "content": "yes", **fields}
    reply = await served.http.post(path, json={**ask(1), place: [USER, answer, USER]})
    assert reply.status_code == 200, reply.text
    (name,) = fields
    assert f"{place}.1.{name}" in reply.headers["x-penstock-ignored"]


THOUGHTS = {
    "reasoning": "THOUGHT",
    "reasoning_content": "THOUGHT",
    "thinking": "THOUGHT",
    "reasoning_details": [{"type": "reasoning.text", "text": "THOUGHT"}],
    "thinking_blocks": [{"type": "thinking", "thinking": "THOUGHT", "signature": ""}],
}


@pytest.mark.parametrize("name", THOUGHTS)
@pytest.mark.parametrize("path", APIS)
async def test_thoughts_are_used_under_each_of_their_names(served, appliance, path, name):
    ask, place, _ = APIS[path]
    answer = {"role": "assistant", "content": "yes", name: THOUGHTS[name]}
    reply = await served.http.post(path, json={**ask(1), place: [USER, answer, USER]})
    assert "x-penstock-ignored" not in reply.headers
    assert "THOUGHTyes" in appliance.submitted[-1].prompt_text


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
async def test_a_template_gets_thoughts_under_the_name_that_it_reads(tmp_path, field):
    template = CHATML_WITH_CALLS.replace("reasoning_content", field)
    appliance = FakeAppliance(Tokenizer(byte_level(), chat_template=template))
    async with serving(appliance, tmp_path / "api.sock") as served:
        answer = {"role": "assistant", "content": "yes", "reasoning": "THOUGHT"}
        await served.chat(messages=[USER, answer, USER], max_tokens=1)
    assert "THOUGHTyes" in appliance.submitted[0].prompt_text


async def test_thoughts_that_a_template_does_not_read_are_named(tmp_path):
    template = CHATML_WITH_CALLS.replace("m.reasoning_content", "''")
    appliance = FakeAppliance(Tokenizer(byte_level(), chat_template=template))
    async with serving(appliance, tmp_path / "api.sock") as served:
        answer = {"role": "assistant", "content": "yes", "reasoning": "THOUGHT"}
        reply = await served.chat(messages=[USER, answer, USER], max_tokens=1)
    assert reply.headers["x-penstock-ignored"] == "messages.reasoning_content"


ODD = [True, 3, "x", [], {}, [True], [[1]], {"a": 1}, [{"type": 3}], [None], [{"function": True}]]
ODD += [[{"function": {"name": 3}}], {"name": True, "arguments": 3}, [{"type": "text", "text": 3}]]


@pytest.mark.parametrize("kind", [ChatMessage, OllamaMessage])
@pytest.mark.parametrize("role", ["user", "assistant", "tool", "ctx"])
@pytest.mark.parametrize(
    "name", ["role", "content", "parts", "images", "tool_calls", "audio", "thinking"]
)
def test_no_value_of_an_earlier_message_is_more_than_a_refusal(kind, role, name):
    user = {"role": "user", "content": "a"}
    for odd in ODD:
        past = {"role": role, "content": "hi", name: odd}
        with contextlib.suppress(RequestError):
            read_messages([user, past, user], kind, may_be_empty=True)
