"""What apps of now send, as they send it: Claude Code, Codex, opencode, and their kind."""

from __future__ import annotations

import json
import re

import pytest

from appliance.daemon.requests.row import LogRow
from appliance.http.access import AccessPolicy
from appliance.http.api_keys import key_digest, new_key, read_keys
from engine.text.tokenizer import Tokenizer
from tests.appliance.api_server import events, says, serving
from tests.byte_tokenizer import CHAT_TEMPLATE
from tests.tiny_tokenizers import byte_level
from tests.worlds.daemon_parts import FakeAppliance

HELLO = [{"role": "user", "content": "hello"}]
ROLES = ("user", "assistant")
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


CLAUDE_CODE_READS = (
    r"input length and `max_tokens` exceed context limit: (\d+) \+ (\d+) > (\d+), .*"
)
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
    found = re.fullmatch(CLAUDE_CODE_READS, error["message"])
    assert found.groups() == ("256", str(CLAUDE_CODES), "256")


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
    assert "256 tokens" in error["message"]


async def test_a_prompt_too_long_for_ollamas_clients_is_said_as_ollama_does(served):
    body = {"messages": LONG, "options": {"num_predict": -1}}
    refused = await served.http.post("/api/chat", json=body)
    assert refused.status_code == 400
    assert "context length" in refused.json()["error"]


# Addresses, keys, paths


@pytest.mark.parametrize(
    "path",
    [
        *(
            "/v1/v1/messages",
            "/v1/messages",
            "/messages",
            "/openai/v1/messages",
            "/openai/messages",
        ),
        *("/v1/v1/v1/messages", "/openai/v1/v1/messages"),
    ],
)
async def test_a_base_address_with_v1_or_openai_in_it_leads_to_the_same(served, path):
    reply = await served.http.post(path, json={"messages": HELLO, "max_tokens": 1})
    assert reply.status_code == 200


async def test_paths_that_other_servers_have_are_answered(served, appliance):
    for path in ("/v1/health", "/ping", "/openai/v1/models", "/v1/version"):
        assert (await served.http.get(path)).status_code == 200
    for path in ("/v1/tokenize", "/tokenize"):
        assert (await served.http.post(path, json={"prompt": "a"})).json()["count"]
    (model,) = (await served.http.get("/api/v0/models")).json()["data"]
    assert (model["id"], model["state"]) == (appliance.model.model_id, "loaded")
    assert model["max_context_length"] == appliance.model.max_model_len
    told = (await served.http.get("/props")).json()
    assert told["default_generation_settings"]["n_ctx"] == appliance.model.max_model_len
    for path in ("/v2/models", "/openai", "/v1/v1", "/v1/audio/speech", "/slots"):
        assert (await served.http.get(path)).status_code == 404


async def test_without_a_key_the_other_names_of_health_are_told_too(appliance, tmp_path):
    async with serving(appliance, tmp_path / "api.sock", "tcp") as served:
        for path in ("/health", "/v1/health", "/ping"):
            reply = await served.http.get(path, headers={"authorization": ""})
            assert reply.status_code == 200
        reply = await served.http.get("/v1/models", headers={"authorization": ""})
        assert reply.status_code == 401


def test_of_two_keys_that_are_both_known_none_counts(tmp_path):
    keys = tmp_path / "keys"
    (ann, line), (bob, other) = new_key("ann", "user"), new_key("bob", "operator")
    keys.write_text(f"{line}\n{other}\n")
    keys.chmod(0o600)
    policy = AccessPolicy(keys=read_keys(keys))
    assert policy.holder_of_any({key_digest(ann), key_digest("sk-ant-other")}).key == "ann"
    assert policy.holder_of_any({key_digest(ann)}).key == "ann"
    assert policy.holder_of_any({key_digest(ann), key_digest(bob)}) is None
    assert policy.holder_of_any({key_digest("sk-ant-other")}) is None
    assert policy.holder_of_any(set()) is None


async def test_what_a_response_answered_to_is_listed(served):
    first = (await served.http.post("/v1/responses", json={"input": "hello"})).json()
    body = {"input": [{"role": "user", "content": "more"}], "previous_response_id": first["id"]}
    second = (await served.http.post("/v1/responses", json=body)).json()
    path = f"/v1/responses/{second['id']}/input_items"
    newest_first = (await served.http.get(path)).json()
    oldest_first = (await served.http.get(path, params={"order": "asc"})).json()
    assert newest_first["data"] == oldest_first["data"][::-1]
    assert [one.get("role") for one in oldest_first["data"]] == ["user", "assistant", "user"]
    assert oldest_first["first_id"] == oldest_first["data"][0]["id"]
    assert (await served.http.get("/v1/responses/none/input_items")).status_code == 404


async def test_a_response_that_is_being_written_can_be_cancelled(served, appliance):
    appliance.gate.clear()
    async with served.http.stream(
        "POST", "/v1/responses", json={"input": "hello", "stream": True}
    ) as reply:
        response_id = reply.headers["x-request-id"]
        done = await served.http.post(f"/v1/responses/{response_id}/cancel")
        assert (done.status_code, done.json()["status"]) == (200, "cancelled")
        assert "cancelled" in (await reply.aread()).decode()
    again = await served.http.post(f"/v1/responses/{response_id}/cancel")
    assert (again.status_code, again.json()["status"]) == (200, "cancelled")
    assert (await served.http.post("/v1/responses/resp_none/cancel")).status_code == 404


# Fields


async def test_codex_tells_a_goal_as_the_output_of_no_call(served, appliance):
    goal = {"type": "function_call_output", "name": "goal_objective", "namespace": "agent"}
    items = [*HELLO, {**goal, "output": "mend the tests"}]
    reply = await served.http.post("/v1/responses", json={"input": items, "max_output_tokens": 1})
    assert reply.status_code == 200
    assert "user\nmend the tests" in appliance.submitted[0].prompt_text
    again = {"input": "on", "previous_response_id": reply.json()["id"], "max_output_tokens": 1}
    assert (await served.http.post("/v1/responses", json=again)).status_code == 200
    assert "mend the tests" in appliance.submitted[1].prompt_text


THINKS = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "[{{ reasoning_effort }},{{ enable_thinking }}]{# <think> #}"
)


@pytest.mark.parametrize(
    ("effort", "told"), [("none", "[none,False]"), ("low", "[low,True]"), (None, "[,]")]
)
async def test_an_effort_is_told_to_the_template_by_chats_and_responses(
    effort, told, appliance, tmp_path
):
    appliance.tokenizer = Tokenizer(byte_level(), chat_template=THINKS)
    async with serving(appliance, tmp_path / "own.sock") as served:
        reply = await served.chat(reasoning_effort=effort, max_tokens=1)
        assert "x-penstock-ignored" not in reply.headers
        body = {"input": "hello", "reasoning": {"effort": effort}, "max_output_tokens": 1}
        await served.http.post("/v1/responses", json=body)
        own = {"chat_template_kwargs": {"enable_thinking": 7, "reasoning_effort": 8}}
        await served.chat(**own, reasoning_effort=effort, max_tokens=1)
    texts = [one.prompt_text for one in appliance.submitted]
    assert texts == [f"hello{told}", f"hello{told}", "hello[8,7]"]


@pytest.mark.parametrize("switch", ["false", False])
async def test_a_switch_of_the_template_may_be_written_as_a_text(switch, appliance, tmp_path):
    appliance.tokenizer = Tokenizer(byte_level(), chat_template=THINKS)
    async with serving(appliance, tmp_path / "own.sock") as served:
        await served.chat(chat_template_kwargs={"enable_thinking": switch}, max_tokens=1)
    assert appliance.submitted[0].prompt_text == "hello[,False]"


@pytest.fixture
def thinker():
    appliance = FakeAppliance(
        Tokenizer(byte_level(), chat_template=CHAT_TEMPLATE + "{# <think> #}")
    )
    appliance.model = appliance.model.__class__("m", 8192, 300, (257,), None, 0)
    says(appliance, "<think>\nwell\n</think>\n\nhello!")
    return appliance


async def test_reasoning_is_its_own_summary_where_one_is_asked_for(thinker, tmp_path):
    body = {"input": "hi", "reasoning": {"effort": "low", "summary": "auto"}}
    async with serving(thinker, tmp_path / "own.sock") as served:
        thought, _ = (await served.http.post("/v1/responses", json=body)).json()["output"]
        stream = (await served.http.post("/v1/responses", json={**body, "stream": True})).text
        plain = (await served.http.post("/v1/responses", json={"input": "hi"})).json()["output"]
        turn = {"input": [thought, *HELLO], "max_output_tokens": 1}
        assert (await served.http.post("/v1/responses", json=turn)).status_code == 200
    assert (thought["summary"], thought["content"]) == (
        [{"type": "summary_text", "text": "well"}],
        [],
    )
    assert (plain[0]["summary"], plain[0]["content"][0]["text"]) == ([], "well")
    told = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: ")]
    kinds = [one["type"] for one in told if "reasoning" in one["type"]]
    summary = "response.reasoning_summary"
    assert (kinds[0], kinds[1]) == (f"{summary}_part.added", f"{summary}_text.delta")
    assert kinds[-2:] == [f"{summary}_text.done", f"{summary}_part.done"]
    deltas = [one for one in told if one["type"] == f"{summary}_text.delta"]
    assert "".join(one["delta"] for one in deltas) == "well"
    assert {one["summary_index"] for one in deltas} == {0}


@pytest.mark.parametrize(
    "fields",
    [
        {"prediction": {"type": "content", "content": "x"}, "max_tokens": 8},
        {"max_tokens": -1},
        {"max_tokens": 8.0, "seed": 3.0, "top_k": 1.0},
        {"top_p": 0, "max_tokens": 8},
        {"n_predict": -1},
    ],
)
async def test_small_habits_of_apps_are_no_reason_to_refuse(served, fields):
    assert (await served.chat(**fields)).status_code == 200


async def test_a_prediction_reaches_the_worker_as_tokens_and_is_counted_in_the_usage(
    served, appliance
):
    parts = [{"type": "text", "text": "some "}, {"type": "text", "text": "words"}]
    predicted = {"type": "content", "content": parts}
    reply = await served.chat(prediction=predicted, max_tokens=2)
    sequence = appliance.submitted[0].sequences[0]
    encoded = appliance.tokenizer.encode("some words", add_special_tokens=False)
    assert sequence.spec.prediction == encoded
    details = reply.json()["usage"]["completion_tokens_details"]
    assert details == {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
    wrong = await served.chat(prediction={"type": "content", "content": 5})
    assert wrong.status_code == 400


async def test_a_top_p_of_0_keeps_the_likeliest_token_alone(served, appliance):
    await served.chat(top_p=0, max_tokens=1)
    assert 0 < appliance.submitted[0].sequences[0].sampling.top_p < 1e-3


HISTORY = [
    {"role": "system", "content": "S" * 20},
    *[{"role": role, "content": f"{role[0]}{turn}" * 9} for turn in range(9) for role in ROLES],
    {"role": "user", "content": "now"},
]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/chat", {"messages": HISTORY, "stream": False}),
        ("/v1/responses", {"input": HISTORY, "truncation": "auto"}),
    ],
)
async def test_a_history_that_does_not_fit_loses_its_oldest_turns(served, appliance, path, body):
    assert (await served.http.post(path, json=body)).status_code == 200
    (request,) = appliance.submitted
    prompt, (sequence,) = request.prompt_text, request.sequences
    most = appliance.model.max_model_len * 3 // 4
    turn = 2 * len("user0" * 9)
    assert most - turn < sequence.num_prompt_tokens <= most
    assert "S" * 20 in prompt
    assert "now" in prompt
    assert "a8a8" in prompt
    assert "u0u0" not in prompt
    first = min(prompt.find(one) for one in ("user\nu", "assistant\na") if one in prompt)
    assert prompt[first:].startswith("user")
    count = len(HISTORY) - sum(one["content"] in prompt for one in HISTORY)
    assert LogRow.from_request(request).changes == f"{count} oldest messages left out"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/chat", {"messages": HISTORY, "truncate": False}),
        ("/v1/responses", {"input": HISTORY, "truncation": "disabled"}),
        ("/api/chat", {"messages": LONG}),
    ],
)
async def test_without_leave_or_with_one_turn_alone_it_is_refused(served, appliance, path, body):
    assert (await served.http.post(path, json=body)).status_code == 400
    assert appliance.submitted == []


async def test_a_refusal_in_the_history_is_read(served, appliance):
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "never"}]}
    reply = await served.chat(messages=[*HELLO, refused, *HELLO], max_tokens=8)
    assert reply.status_code == 200
    assert "assistant\nnever" in appliance.submitted[0].prompt_text


URL = {"url": "data:image/png;base64,AAAA"}
IMAGES = {
    "/v1/chat/completions": ("messages", "content", {"type": "image_url", "image_url": URL}),
    "/v1/messages": ("messages", "content", {"type": "image", "source": {"type": "base64"}}),
    "/v1/responses": ("input", "content", {"type": "input_image", "image_url": "data:"}),
    "/api/chat": ("messages", "images", "AAAA"),
}


@pytest.mark.parametrize("path", IMAGES)
async def test_an_image_is_refused_once_and_left_out_of_later_turns(served, appliance, path):
    name, place, image = IMAGES[path]
    seen = {"role": "user", "content": "look", place: [image]}
    limits = {"max_tokens": 8, "max_output_tokens": 8, "options": {"num_predict": 8}}
    body = {name: [seen], "stream": False, **limits}
    assert (await served.http.post(path, json=body)).status_code == 400
    body[name] = [seen, {"role": "assistant", "content": "no"}, *HELLO]
    assert (await served.http.post(path, json=body)).status_code == 200
    (request,) = appliance.submitted
    assert "was left out" in request.prompt_text
    assert LogRow.from_request(request).changes == "1 attachment left out"


async def test_an_image_that_a_tool_gave_claude_code_is_left_out_at_once(served, appliance):
    call = {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {}}
    given = {"type": "image", "source": {"type": "base64", "data": "AAAA"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [given]}
    said = [
        *HELLO,
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    body = {"messages": said, "max_tokens": 8}
    assert (await served.http.post("/v1/messages", json=body)).status_code == 200
    assert LogRow.from_request(appliance.submitted[0]).changes == "1 attachment left out"


# Tools


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>!'
ADD = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}


async def test_a_client_from_before_tools_gets_a_function_call(thinker, tmp_path):
    says(thinker, CALL)
    asked = {"functions": [ADD], "function_call": {"name": "add"}, "max_tokens": 99}
    async with serving(thinker, tmp_path / "own.sock") as served:
        (choice,) = (await served.chat(**asked)).json()["choices"]
        chunks = events((await served.chat(**asked, stream=True)).text)
        said = [
            *HELLO,
            choice["message"],
            {"role": "function", "name": "add", "content": "3"},
        ]
        says(thinker, "fine!")
        later = await served.chat(messages=said, functions=[ADD], max_tokens=9)
        none = await served.chat(functions=[ADD], function_call="none", max_tokens=9)
        wrong = await served.chat(functions=[{"name": "a b"}])
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"] == {"name": "add", "arguments": '{"a": 2}'}
    assert "tool_calls" not in choice["message"]
    deltas = [one["choices"][0]["delta"].get("function_call", {}) for one in chunks]
    assert "".join(one.get("arguments", "") for one in deltas) == '{"a": 2}'
    assert chunks[-1]["choices"][0]["finish_reason"] == "function_call"
    assert later.json()["choices"][0]["message"]["content"] == "fine"
    assert none.status_code == 200
    assert wrong.json()["error"]["param"] == "functions[0].name"


def both(mode: str, *names: str, is_flat: bool = False) -> dict:
    tools = [
        {"type": "function"} | ({"name": n} if is_flat else {"function": {"name": n}})
        for n in names
    ]
    inner = {"mode": mode, "tools": tools}
    return {"type": "allowed_tools"} | (inner if is_flat else {"allowed_tools": inner})


async def test_only_the_allowed_of_the_tools_may_be_called(thinker, tmp_path):
    says(thinker, CALL)
    tools = [{"type": "function", "function": {**ADD, "name": name}} for name in ("add", "sub")]
    async with serving(thinker, tmp_path / "own.sock") as served:
        for choice in (both("auto", "add"), both("required", "add", "sub"), both("auto", "sub")):
            await served.chat(tools=tools, tool_choice=choice, max_tokens=99)
        flat = [{"type": "function", **one["function"]} for one in tools]
        body = {"input": "hi", "tools": flat, "tool_choice": both("required", "sub", is_flat=True)}
        assert (await served.http.post("/v1/responses", json=body)).status_code == 200
        for choice in (both("auto", "mul"), both("any", "add"), {"type": "allowed_tools"}):
            reply = await served.chat(tools=tools, tool_choice=choice)
            assert reply.status_code == 400
            assert reply.json()["error"]["param"].startswith("tool_choice")
    grammars = [one.sequences[0].sampling.grammar for one in thinker.submitted]
    assert all("add" in one.prompt_text and "sub" in one.prompt_text for one in thinker.submitted)
    assert "sub" in grammars[1]
    assert "add" in grammars[1]
    assert "add" not in grammars[3]


@pytest.mark.parametrize(
    ("tool", "argument"),
    [
        ({"type": "bash_20250124", "name": "bash"}, "restart"),
        ({"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"}, "old_str"),
    ],
)
async def test_anthropics_tools_that_a_client_runs_are_functions(thinker, tmp_path, tool, argument):
    says(thinker, CALL.replace('"add"', f'"{tool["name"]}"'))
    others = [{"type": "web_search_20250305", "name": "web_search"}]
    body = {"messages": HELLO, "max_tokens": 99, "tools": [tool, *others]}
    async with serving(thinker, tmp_path / "own.sock") as served:
        reply = await served.http.post("/v1/messages", json=body)
    assert reply.json()["content"][-1]["name"] == tool["name"]
    assert reply.headers["x-penstock-ignored"] == "tools.1"
    assert f'"{argument}"' in thinker.submitted[0].prompt_text


PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edit files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}


async def test_codexs_patch_is_a_call_with_a_text(thinker, tmp_path):
    arguments = json.dumps({"input": "*** Begin\n+1"})
    says(
        thinker, f'<tool_call>\n{{"name": "apply_patch", "arguments": {arguments}}}\n</tool_call>!'
    )
    body = {"input": "hi", "tools": [PATCH], "store": False}
    async with serving(thinker, tmp_path / "own.sock") as served:
        reply = await served.http.post("/v1/responses", json=body)
        (call,) = reply.json()["output"]
        stream = (await served.http.post("/v1/responses", json={**body, "stream": True})).text
        result = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "done"}
        later = {**body, "input": [*HELLO, call, result]}
        assert (await served.http.post("/v1/responses", json=later)).status_code == 200
    assert (call["type"], call["name"]) == ("custom_tool_call", "apply_patch")
    assert call["input"] == "*** Begin\n+1"
    assert "x-penstock-ignored" not in reply.headers
    told = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: ")]
    custom = [one for one in told if "custom_tool_call_input" in one["type"]]
    assert [one.get("delta", one.get("input")) for one in custom] == [call["input"]] * 2
    assert not any("function_call" in one["type"] for one in told)
    assert "start: /.+/" in thinker.submitted[0].prompt_text
