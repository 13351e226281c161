"""Anthropic's own client, through both doors, and a conversation in Claude Code's shape."""

from __future__ import annotations

import json

import httpx2
import pytest

from appliance.api.anthropic.ask import messages_ask
from engine.scheduler.cache.hashes import PrefixHasher
from engine.text.tokenizer import Tokenizer
from tests.appliance.api_server import DOORS, says, serving
from tests.byte_tokenizer import CHAT_TEMPLATE
from tests.tiny_tokenizers import byte_level
from tests.worlds.daemon_parts import FakeAppliance

END = "!"
TOOL = {
    "name": "Bash",
    "description": "Run a command.",
    "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "Bash", "arguments": {"command": "ls"}}\n</tool_call>'
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def appliance():
    template = CHAT_TEMPLATE + "{# <think> #}"
    appliance = FakeAppliance(Tokenizer(byte_level(), chat_template=template))
    appliance.model = appliance.model.__class__("m", 8192, 300, (), None, 0, aliases=("claude-*",))
    return appliance


@pytest.fixture(params=DOORS)
async def served(request, appliance, tmp_path):
    async with serving(appliance, tmp_path / "api.sock", request.param) as served:
        yield served


@pytest.fixture
async def client(served):
    import anthropic  # a second, in each process that collects this file

    transport = httpx2.AsyncHTTPTransport(uds=served.uds)
    async with anthropic.AsyncAnthropic(
        base_url=served.url,
        api_key=served.key,
        http_client=httpx2.AsyncClient(transport=transport),
        max_retries=0,
    ) as client:
        yield client


async def test_a_message_is_answered(client, appliance):
    says(appliance, "hello wörld" + END)
    message = await client.messages.create(
        model="claude-next", max_tokens=50, messages=HELLO, system="Be kind."
    )
    assert [block.text for block in message.content] == ["hello wörld"]
    assert (message.stop_reason, message.role) == ("end_turn", "assistant")
    assert message.id == message._request_id == appliance.submitted[0].request_id
    assert message.usage.input_tokens == appliance.submitted[0].sequences[0].num_prompt_tokens
    assert message.usage.cache_read_input_tokens == 0
    assert "Be kind." in appliance.submitted[0].prompt_text


async def test_what_was_found_computed_is_no_input_in_replies_and_at_streams_ends(
    client, appliance
):
    appliance.hasher = PrefixHasher(bytes(32), b"", 4)
    says(appliance, "hello" + END)
    asked = {"model": "m", "max_tokens": 50, "messages": HELLO}
    first, second = [await client.messages.create(**asked) for _ in range(2)]
    length = appliance.submitted[0].sequences[0].num_prompt_tokens
    num_cached = (length - 1) // 4 * 4
    assert (first.usage.input_tokens, first.usage.cache_read_input_tokens) == (length, 0)
    told = second.usage.input_tokens, second.usage.cache_read_input_tokens
    assert told == (length - num_cached, num_cached)
    async with client.messages.stream(**asked) as stream:
        streamed = await stream.get_final_message()
    assert streamed.usage.cache_read_input_tokens == num_cached


async def test_a_stream_adds_up_to_the_message(client, appliance):
    says(appliance, "<think>\nwell\n</think>\n\nso I look\n" + CALL + END)
    asked = {"model": "m", "max_tokens": 200, "messages": HELLO, "tools": [TOOL]}
    whole = await client.messages.create(**asked)
    async with client.messages.stream(**asked) as stream:
        kinds = [event.type async for event in stream]
        message = await stream.get_final_message()
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use"]
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    assert message.content[0].thinking == whole.content[0].thinking == "well"
    assert message.content[1].text == whole.content[1].text == "so I look"
    assert message.content[2].input == whole.content[2].input == {"command": "ls"}
    assert message.stop_reason == whole.stop_reason == "tool_use"
    assert message.usage.output_tokens == whole.usage.output_tokens
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "Bash"}])
async def test_a_call_can_be_required(client, appliance, choice):
    appliance.model = appliance.model.__class__("m", 8192, 300, (257,), None, 0)
    says(appliance, CALL + END)
    message = await client.messages.create(
        model="m", max_tokens=200, messages=HELLO, tools=[TOOL], tool_choice=choice
    )
    assert message.content[0].name == "Bash"
    assert appliance.submitted[0].sequences[0].sampling.grammar is not None


@pytest.mark.parametrize(("disabled", "num_calls"), [(None, 1), (True, 1), (False, 2)])
async def test_any_call_is_one_unless_several_are_asked_for(client, appliance, disabled, num_calls):
    appliance.model = appliance.model.__class__("m", 8192, 300, (257,), None, 0)
    says(appliance, f"{CALL}\n{CALL}{END}")
    choice = {"type": "any"}
    if disabled is not None:
        choice["disable_parallel_tool_use"] = disabled
    message = await client.messages.create(
        model="m", max_tokens=400, messages=HELLO, tools=[TOOL], tool_choice=choice
    )
    assert len(message.content) == num_calls


async def test_reasons_to_stop(client, appliance):
    says(appliance, "abc STOP and so on")
    asked = {"model": "m", "messages": HELLO}
    message = await client.messages.create(**asked, max_tokens=99, stop_sequences=["STOP"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "STOP")
    assert message.content[0].text == "abc "
    message = await client.messages.create(**asked, max_tokens=2)
    assert message.stop_reason == "max_tokens"


async def test_tokens_are_counted_as_they_would_be_used(client, appliance):
    asked = {"model": "m", "messages": HELLO, "tools": [TOOL], "system": "Be kind."}
    counted = await client.messages.count_tokens(**asked)
    message = await client.messages.create(**asked, max_tokens=2)
    assert counted.input_tokens == message.usage.input_tokens


@pytest.mark.parametrize(
    ("change", "error", "kind"),
    [
        ({"model": "gpt-9"}, "NotFoundError", "not_found_error"),
        ({"max_tokens": 0}, "BadRequestError", "invalid_request_error"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "image", "source": {"type": "url", "url": "http://x"}}
                        ],
                    }
                ]
            },
            "BadRequestError",
            "invalid_request_error",
        ),
    ],
)
async def test_refusals_are_anthropics(client, change, error, kind):
    import anthropic

    with pytest.raises(getattr(anthropic, error)) as refused:
        await client.messages.create(**{"model": "m", "max_tokens": 5, "messages": HELLO, **change})
    assert refused.value.body["type"] == "error"
    assert refused.value.body["error"]["type"] == kind
    assert refused.value.body["request_id"] == refused.value.request_id


async def test_a_key_is_needed_on_tcp(served):
    if served.uds is not None:
        pytest.skip("the kernel says who asks")
    reply = await served.http.post("/v1/messages", headers={"authorization": ""}, json={})
    assert (reply.status_code, reply.json()["error"]["type"]) == (401, "authentication_error")
    for one, other, status in (
        (served.key, "another", 400),  # as Claude Code sends the key of an account beside ours
        ("another", served.key, 400),
        ("another", "a third", 401),
    ):
        both = {"authorization": f"Bearer {one}", "x-api-key": other}
        reply = await served.http.post("/v1/messages", headers=both, json={})
        assert reply.status_code == status


async def test_models_are_listed_as_anthropic_does(client):
    (model,) = [model async for model in client.models.list()]
    assert (model.id, model.type, model.display_name) == ("m", "model", "m")


def billing(number: int) -> dict:
    line = f"x-anthropic-billing-header: cc_version=2.1.15.abc; cc_entrypoint=cli; cch={number:05};"
    return {"type": "text", "text": line}


async def test_a_conversation_of_claude_code_goes_on_from_a_prompt_that_does_not_change(
    served, appliance
):
    """Its first request and the next: cache marks, tools, results, and the line that changes."""
    system = [
        {"type": "text", "text": "You are Claude Code.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
    ]
    reminder = {"type": "text", "text": "<system-reminder>\nToday.\n</system-reminder>"}
    question = {"type": "text", "text": "What is here?", "cache_control": {"type": "ephemeral"}}
    first = {
        "model": "claude-opus-4-6",
        "max_tokens": 400,
        "stream": True,
        "temperature": 1,
        "metadata": {"user_id": "user_1_session_2"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "tools": [TOOL, {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
        "system": [billing(1), *system],
        "messages": [{"role": "user", "content": [reminder, question]}],
    }
    says(appliance, CALL + END)
    reply = await served.http.post("/v1/messages?beta=true", json=first)
    assert reply.status_code == 200
    assert "tools.1" in reply.headers["x-penstock-ignored"]
    used = {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "ls"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "a.py", "is_error": True}
    second = {
        **first,
        "system": [billing(2), *system],
        "messages": [
            *first["messages"],
            {"role": "assistant", "content": [used]},
            {"role": "user", "content": [result, {"type": "text", "text": "go on"}]},
        ],
    }
    await served.http.post("/v1/messages?beta=true", json=second)
    before, after = (request.prompt_text for request in appliance.submitted)
    assert "billing" not in before
    assert after.startswith(before.removesuffix("<|im_start|>assistant\n"))
    assert "Error: a.py" in after
    events = [line for line in reply.text.splitlines() if line.startswith("event: ")]
    assert events[0] == "event: message_start"


def ask_of(**fields):
    body = {"messages": HELLO, "max_tokens": 5, **fields}
    return messages_ask(json.loads(json.dumps(body)), FakeAppliance(Tokenizer(byte_level())).model)


def test_a_last_message_of_the_assistant_is_continued():
    ask = ask_of(messages=[*HELLO, {"role": "assistant", "content": "Once"}])
    assert ask.chat.continue_final_message
    assert not ask.chat.add_generation_prompt


def test_thinking_is_told_to_the_template():
    assert ask_of(thinking={"type": "disabled"}).chat.variables == {"enable_thinking": False}
    assert ask_of(thinking={"type": "adaptive"}).chat.variables == {"enable_thinking": True}
    assert ask_of().chat.variables == {}
