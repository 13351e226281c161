"""What apps of now send, as they send it: Claude Code, Codex, opencode, and their kind."""

from __future__ import annotations

import re

import pytest

from appliance.log.row import LogRow
from tests.appliance.api_server import events

HELLO = [{"role": "user", "content": "hello"}]
CLAUDE_CODES = 64_000
OPENCODES = 32_000


async def test_a_chat_that_names_no_limit_has_the_room_left(served, appliance):
    for path, body in (
        ("/v1/chat/completions", {"messages": HELLO}),
        ("/v1/responses", {"input": "hello"}),
        ("/api/chat", {"messages": HELLO, "stream": False}),
        ("/api/generate", {"prompt": "hello", "stream": False}),
        ("/api/generate", {"prompt": "hello", "raw": True, "stream": False}),
    ):
        assert (await served.http.post(path, json=body)).status_code == 200
        (sequence,) = appliance.submitted[-1].sequences
        assert sequence.num_tokens == appliance.model.max_model_len
        assert appliance.submitted[-1].changes is None


@pytest.mark.parametrize(
    ("path", "body", "asked"),
    [
        ("/v1/messages", {"messages": HELLO, "max_tokens": CLAUDE_CODES}, CLAUDE_CODES),
        ("/v1/chat/completions", {"messages": HELLO, "max_tokens": OPENCODES}, OPENCODES),
        ("/v1/chat/completions", {"messages": HELLO, "max_completion_tokens": 10**9}, 10**9),
        ("/v1/responses", {"input": "hello", "max_output_tokens": OPENCODES}, OPENCODES),
        ("/v1/completions", {"prompt": "hello", "max_tokens": OPENCODES}, OPENCODES),
    ],
)
async def test_a_limit_beyond_the_room_is_cut_and_that_is_told(
    served, appliance, path, body, asked
):
    reply = (await served.http.post(path, json=body)).json()
    (request,) = appliance.submitted
    (sequence,) = request.sequences
    room = appliance.model.max_model_len - sequence.num_prompt_tokens
    assert reply["usage"]["max_tokens_cut_to"] == sequence.num_output_tokens == room
    row = LogRow.from_request(request)
    assert row.max_tokens == room
    assert re.findall(r"\d+", row.changes) == [str(asked), str(room)]


async def test_a_stream_tells_in_its_usage_that_the_limit_was_cut(served):
    body = {"messages": HELLO, "max_tokens": OPENCODES, "stream": True}
    reply = await served.chat(**body, stream_options={"include_usage": True})
    usage = events(reply.text)[-1]["usage"]
    assert usage["max_tokens_cut_to"] == usage["completion_tokens"]


async def test_a_limit_that_fits_is_not_spoken_of(served, appliance):
    reply = (await served.chat(max_tokens=8)).json()
    assert "max_tokens_cut_to" not in reply["usage"]
    assert LogRow.from_request(appliance.submitted[0]).changes is None


LONG = [{"role": "user", "content": "x" * 400}]


async def test_claude_code_can_read_how_much_a_prompt_is_too_long(served, appliance):
    body = {"messages": LONG, "max_tokens": CLAUDE_CODES}
    refused = await served.http.post("/v1/messages", json=body)
    error = refused.json()["error"]
    assert (refused.status_code, error["type"]) == (400, "invalid_request_error")
    found = re.fullmatch(r"prompt is too long: (\d+) tokens > (\d+) maximum", error["message"])
    count = await served.http.post("/v1/messages/count_tokens", json={"messages": LONG})
    assert int(found[1]) == count.json()["input_tokens"]
    assert int(found[2]) == appliance.model.max_model_len


async def test_claude_code_can_read_that_a_prompt_leaves_no_room(served, appliance):
    counted = await served.http.post("/v1/messages/count_tokens", json={"messages": HELLO})
    longer = "hello" + "x" * (appliance.model.max_model_len - counted.json()["input_tokens"])
    body = {"messages": [{"role": "user", "content": longer}], "max_tokens": CLAUDE_CODES}
    error = (await served.http.post("/v1/messages", json=body)).json()["error"]
    assert error["message"] == (
        "input length and `max_tokens` exceed context limit: 256 + 64000 > 256, "
        "decrease input length or `max_tokens` and try again"
    )


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": LONG, "max_tokens": OPENCODES}),
        ("/v1/responses", {"input": "x" * 400}),
        ("/v1/completions", {"prompt": "x" * 400}),
    ],
)
async def test_clients_of_openai_find_the_code_and_the_words_they_look_for(served, path, body):
    refused = await served.http.post(path, json=body)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "this model's maximum context length is 256 tokens" in error["message"].lower()


async def test_a_prompt_too_long_for_ollamas_clients_is_said_as_ollama_does(served):
    body = {"messages": LONG, "options": {"num_predict": -1}}
    refused = await served.http.post("/api/chat", json=body)
    assert refused.status_code == 400
    assert "exceeds the context length" in refused.json()["error"]
