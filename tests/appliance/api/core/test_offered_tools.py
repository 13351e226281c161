"""Tools as they come: hosted ones and their choices, namespaces, odd schemas, hundreds of them."""

from __future__ import annotations

import dataclasses
import json

import pytest

from appliance.api.core.fields import MAX_TOOLS
from engine.text.tokenizer import Tokenizer
from tests.appliance.api_server import events, says
from tests.tiny_tokenizers import byte_level
from tests.worlds.daemon_parts import FakeAppliance

TEMPLATE = (
    "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}"
    "[{{ call.function.name }}]{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
USER = {"role": "user", "content": "hi"}
OBJECT = {"type": "object", "properties": {"city": {"type": "string"}}}
HOSTED = {"type": "web_search", "name": "web_search"}
PATHS = {
    "/v1/chat/completions": ("messages", {"max_tokens": 1}),
    "/v1/responses": ("input", {"max_output_tokens": 1}),
    "/v1/messages": ("messages", {"max_tokens": 1}),
    "/api/chat": ("messages", {"stream": False, "options": {"num_predict": 1}}),
}


def function_for(path, name="get", **fields):
    """A function in an API's form."""
    told = {"name": name, "parameters": OBJECT, **fields}
    if path == "/v1/responses":
        return {"type": "function", **told}
    if path == "/v1/messages":
        return {"name": name, "input_schema": told["parameters"]}
    return {"type": "function", "function": told}


def body_for(path, tools, **fields):
    place, limits = PATHS[path]
    return {place: [USER], "tools": tools, **limits, **fields}


def called(name, **arguments):
    text = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{text}\n</tool_call>"


@pytest.fixture
def appliance():
    tokenizer = Tokenizer(byte_level(), chat_template=TEMPLATE)
    appliance = FakeAppliance(tokenizer, max_model_len=1 << 21)
    end_id = tokenizer.special_id("<|end|>")
    appliance.model = dataclasses.replace(appliance.model, eos_token_ids=(end_id,))
    return appliance


# Hosted tools


@pytest.mark.parametrize("path", PATHS)
async def test_a_hosted_tool_is_left_out_and_named(served, appliance, path):
    body = body_for(path, [HOSTED, function_for(path)])
    reply = await served.http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-penstock-ignored"] == "tools.0"
    assert '"name": "get"' in appliance.submitted[0].prompt_text


CHOICES = [
    ("/v1/chat/completions", {"type": "web_search"}),
    ("/v1/chat/completions", "required"),
    ("/v1/chat/completions", {"type": "function", "function": {"name": "web_search"}}),
    ("/v1/responses", {"type": "web_search"}),
    ("/v1/responses", {"type": "mcp", "server_label": "x"}),
    ("/v1/responses", {"type": "allowed_tools", "mode": "required", "tools": [HOSTED]}),
    ("/v1/responses", "required"),
    ("/v1/messages", {"type": "tool", "name": "web_search"}),
    ("/v1/messages", {"type": "any"}),
]


@pytest.mark.parametrize(("path", "choice"), CHOICES)
async def test_a_choice_of_hosted_tools_is_left_out_with_them(served, path, choice):
    reply = await served.http.post(path, json=body_for(path, [HOSTED], tool_choice=choice))
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-penstock-ignored"] == "tools.0, tool_choice"


async def test_of_allowed_tools_the_functions_stay_allowed(served, appliance):
    path = "/v1/responses"
    choice = {"type": "allowed_tools", "mode": "required", "tools": [HOSTED, {"name": "get"}]}
    choice["tools"][1]["type"] = "function"
    tools = [HOSTED, function_for(path), function_for(path, "other")]
    reply = await served.http.post(path, json=body_for(path, tools, tool_choice=choice))
    assert reply.headers["x-penstock-ignored"] == "tools.0, tool_choice"
    grammar = appliance.submitted[0].sequences[0].sampling.grammar
    assert "get" in grammar
    assert "other" not in grammar


async def test_a_choice_without_any_tool_and_of_an_unknown_function_are_refused(served):
    path = "/v1/responses"
    for tools, choice in (([], "required"), ([function_for(path)], {"type": "function"})):
        if isinstance(choice, dict):
            choice = {**choice, "name": "nope"}
        reply = await served.http.post(path, json=body_for(path, tools, tool_choice=choice))
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tool_choice")


async def test_what_hosted_tools_would_include_is_named(served):
    body = body_for("/v1/responses", [HOSTED], include=["web_search_call.action.sources"])
    reply = await served.http.post("/v1/responses", json=body)
    assert reply.headers["x-penstock-ignored"] == "tools.0, include.0"


# Namespaces


def namespace(name, *names):
    tools = [{"type": "function", "name": one, "parameters": OBJECT} for one in names]
    return {"type": "namespace", "name": name, "description": "of a server", "tools": tools}


@pytest.mark.parametrize("is_stream", [False, True])
async def test_functions_of_a_namespace_are_told_and_their_calls_come_with_it(
    served, appliance, is_stream
):
    says(appliance, called("get", city="Bern"))
    tools = [namespace("mcp__weather", "get"), function_for("/v1/responses", "shell")]
    body = {"input": "hi", "tools": tools, "tool_choice": "required", "stream": is_stream}
    reply = await served.http.post("/v1/responses", json=body)
    if is_stream:
        lines = [one[6:] for one in reply.text.split("\n") if one.startswith("data: ")]
        told = json.loads(lines[-1])["response"]
    else:
        told = reply.json()
    (item,) = told["output"]
    assert (item["type"], item["name"], item["namespace"]) == (
        "function_call",
        "get",
        "mcp__weather",
    )
    assert json.loads(item["arguments"]) == {"city": "Bern"}
    assert '"name": "get"' in appliance.submitted[0].prompt_text


async def test_a_name_that_two_namespaces_have_is_told_with_its_own(served, appliance):
    says(appliance, called("b__get", city="Bern"))
    tools = [namespace("a", "get"), namespace("b", "get", "put")]
    call = {"type": "function_call", "name": "get", "namespace": "a", "call_id": "c"}
    past = [USER, {**call, "arguments": "{}"}]
    past.append({"type": "function_call_output", "call_id": "c", "output": "1"})
    reply = await served.http.post("/v1/responses", json={"input": past, "tools": tools})
    prompt = appliance.submitted[0].prompt_text
    for name in ("a__get", "b__get", "put"):
        assert f'"name": "{name}"' in prompt
    assert "[a__get]" in prompt
    (item,) = reply.json()["output"]
    assert (item["name"], item["namespace"]) == ("get", "b")


async def test_functions_of_namespaces_count_and_a_namespace_within_one_is_left_out(served):
    many = [namespace("n", *(f"f{number}" for number in range(MAX_TOOLS + 1)))]
    refused = await served.http.post("/v1/responses", json=body_for("/v1/responses", many))
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == f"tools[0].tools[{MAX_TOOLS}]"
    inner = {**namespace("a"), "tools": [namespace("b", "get")]}
    reply = await served.http.post("/v1/responses", json=body_for("/v1/responses", [inner]))
    assert reply.status_code == 200
    assert reply.headers["x-penstock-ignored"] == "tools.0.tools.0"


# Tools that take a text, in chats

PATCH = {"type": "custom", "custom": {"name": "patch", "description": "Change a file."}}


async def test_a_chats_custom_tool_is_called_with_a_text(served, appliance):
    says(appliance, called("patch", input="a\nb"))
    body = {"messages": [USER], "tools": [PATCH], "max_tokens": 200}
    reply = (await served.http.post("/v1/chat/completions", json=body)).json()
    (call,) = reply["choices"][0]["message"]["tool_calls"]
    assert (call["type"], call["custom"]) == ("custom", {"name": "patch", "input": "a\nb"})
    assert reply["choices"][0]["finish_reason"] == "tool_calls"
    streamed = await served.http.post("/v1/chat/completions", json={**body, "stream": True})
    deltas = [one["choices"][0]["delta"] for one in events(streamed.text)]
    (told,) = [call for one in deltas for call in one.get("tool_calls", ())]
    assert (told["index"], told["custom"]) == (0, call["custom"])
    past = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    past.append({"role": "tool", "tool_call_id": call["id"], "content": "done"})
    again = {**body, "messages": past}
    assert (await served.http.post("/v1/chat/completions", json=again)).status_code == 200
    assert "[patch]" in appliance.submitted[-1].prompt_text


# Odd schemas, many tools, long names

ODD = {"type": "object", "properties": {"mail": {"type": "string", "pattern": "^(?!x)a"}}}


@pytest.mark.parametrize("path", PATHS)
async def test_an_odd_schema_is_enforced_loosely_alone_and_named(served, appliance, path):
    tools = [function_for(path, "good"), function_for(path, "odd", parameters=ODD)]
    reply = await served.http.post(path, json=body_for(path, tools))
    assert reply.status_code == 200, reply.text
    left_out = "tools.odd.parameters.properties.mail.pattern"
    assert reply.headers["x-penstock-ignored"] == left_out
    assert "city" in appliance.submitted[0].sequences[0].sampling.grammar


@pytest.mark.parametrize("parameters", [[], True, "a text", [1], 3])
@pytest.mark.parametrize("path", PATHS)
async def test_what_is_no_schema_means_any_arguments_of_that_function(
    served, appliance, path, parameters
):
    tools = [function_for(path, "good"), function_for(path, "odd", parameters=parameters)]
    reply = await served.http.post(path, json=body_for(path, tools))
    assert reply.status_code == 200, reply.text
    is_empty = parameters in ([], True)
    assert reply.headers.get("x-penstock-ignored") == (None if is_empty else "tools.1.parameters")
    assert "odd" in appliance.submitted[0].sequences[0].sampling.grammar


@pytest.mark.parametrize("parameters", [[], {"type": "object", "properties": []}])
async def test_an_empty_list_is_an_empty_object_also_where_a_call_must_match(
    served, appliance, parameters
):
    path = "/v1/chat/completions"
    tools = [function_for(path, "odd", parameters=parameters)]
    reply = await served.http.post(path, json=body_for(path, tools, tool_choice="required"))
    assert reply.status_code == 200, reply.text
    assert "x-penstock-ignored" not in reply.headers
    assert "[]" not in appliance.submitted[0].prompt_text


async def test_what_is_no_schema_is_refused_where_it_must_be_matched(served):
    path = "/v1/responses"
    tools = [function_for(path, "odd", parameters="a text", strict=True)]
    reply = await served.http.post(path, json=body_for(path, tools))
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tools[0].parameters")


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "odd"}}},
        {"is_strict": True},
    ],
)
async def test_where_a_call_must_match_the_function_and_the_place_are_named(served, fields):
    path = "/v1/chat/completions"
    is_strict = fields.pop("is_strict", False)
    tools = [function_for(path, "good"), function_for(path, "odd", parameters=ODD)]
    tools[1]["function"]["strict"] = is_strict
    reply = await served.http.post(path, json=body_for(path, tools, **fields))
    assert reply.status_code == 400
    told = reply.json()["error"]["message"]
    assert "`odd`" in told
    assert "parameters.properties.mail.pattern" in told


async def test_a_strict_function_does_not_make_the_others_strict(served):
    path = "/v1/chat/completions"
    loose = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tools = [function_for(path, "good"), function_for(path, "odd", parameters=loose)]
    tools[0]["function"]["strict"] = True
    reply = await served.http.post(path, json=body_for(path, tools))
    assert reply.status_code == 200
    assert "x-penstock-ignored" not in reply.headers


@pytest.mark.parametrize("path", PATHS)
async def test_130_tools_with_long_names_are_taken(served, path):
    tools = [function_for(path, f"mcp__my_company__{'x' * 100}_{i}") for i in range(130)]
    reply = await served.http.post(path, json=body_for(path, tools), timeout=120)
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_512_tools_are_taken_with_any_arguments_and_it_is_said(served, appliance, choice):
    path = "/v1/chat/completions"
    wide = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(6)}}
    tools = [function_for(path, f"name_of_tool_{i}", parameters=wide) for i in range(512)]
    body = body_for(path, tools, tool_choice=choice)
    reply = await served.http.post(path, json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-penstock-ignored"] == "tools.parameters"
    assert "name_of_tool_511" in appliance.submitted[0].sequences[0].sampling.grammar


async def test_descriptions_do_not_count_as_grammar(served):
    path = "/v1/chat/completions"
    wordy = {
        "type": "object",
        "properties": {"a": {"type": "string", "description": "d" * 1700}},
    }
    tools = [function_for(path, f"f{i}", parameters=wordy) for i in range(60)]
    reply = await served.http.post(path, json=body_for(path, tools, tool_choice="required"))
    assert reply.status_code == 200, reply.text
    assert "x-penstock-ignored" not in reply.headers


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v1/messages", "computer_20250124"),
        ("/v1/messages", "mcp_toolset"),
        ("/v1/responses", "computer_use_preview"),
        ("/v1/responses", "computer"),
        ("/v1/chat/completions", "computer_use_preview"),
        ("/api/chat", "computer"),
    ],
)
async def test_a_computer_is_left_out_with_its_choice_and_named(served, path, kind):
    tool = {"type": kind, "name": "computer", "display_width_px": 1, "display_height_px": 1}
    chosen = {"/v1/messages": {"type": "tool", "name": "computer"}, "/api/chat": None}
    choice = chosen.get(path, {"type": kind})
    reply = await served.http.post(path, json=body_for(path, [tool], tool_choice=choice))
    assert reply.status_code == 200, reply.text
    named = ["tools.0", "tool_choice"][: 1 + bool(choice)]
    assert reply.headers["x-penstock-ignored"] == ", ".join(named)


async def test_servers_that_anthropic_would_ask_are_named(served):
    body = body_for("/v1/messages", [], mcp_servers=[{"name": "x"}], container={"skills": [1]})
    reply = await served.http.post("/v1/messages", json=body)
    assert reply.headers["x-penstock-ignored"] == "mcp_servers, container"


async def test_anthropics_memory_is_a_function_that_the_client_runs(served, appliance):
    tool = {"type": "memory_20250818", "name": "memory"}
    reply = await served.http.post("/v1/messages", json=body_for("/v1/messages", [tool]))
    assert "x-penstock-ignored" not in reply.headers
    assert '"rename"' in appliance.submitted[0].prompt_text
