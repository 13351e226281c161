"""Anthropic's POST /v1/messages and count_tokens: their fields, brought into those of a chat.

Owns: which fields and blocks there are, and what is refused by name.
Invariant: what is answered is the chat that a client of /v1/chat/completions would have asked for.
Never: keeps anything between two requests.

Claude Code puts a line `x-anthropic-billing-header: ...` first into its system prompt. It changes
with every request, so that no two prompts would begin alike. The rule: a first line of the system
prompt that begins with this name is left out. It says nothing to a model.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from appliance.api.ask import Ask
from appliance.api.chat_messages import MAX_MESSAGES, MAX_PARTS
from appliance.api.openai import chat_ask
from appliance.api.tools import MAX_TOOLS
from appliance.json_fields import Fields, invalid_type, invalid_value, renamed, unsupported
from appliance.request import ModelInfo
from engine.errors import RequestError

Json = dict[str, Any]

BILLING_LINE = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*", re.IGNORECASE)
PASSED = (
    *("model", "temperature", "top_p", "top_k", "stream", "min_p", "seed", "logit_bias"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "stop_token_ids"),
    *("ignore_eos", "min_tokens"),
)
"""The same in a chat; those that are not Anthropic's are vLLM's additions to both."""
_NO_EFFECT = ("metadata", "service_tier", "betas", "context_management", "cache_control")
_OUR_WORDS = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "response_format": "output_config.format",
    "chat_template_kwargs": "thinking",
}
"""What a chat's fields are called here."""


def messages_ask(fields: Fields, model: ModelInfo) -> Ask:
    """Validate a body of /v1/messages."""
    max_tokens = fields.required("max_tokens")
    ask = _chat_ask(fields, model, max_tokens)
    return dataclasses.replace(ask, include_usage=True)


def count_ask(fields: Fields, model: ModelInfo) -> Ask:
    """Validate a body of /v1/messages/count_tokens, which generates nothing."""
    return _chat_ask(fields, model, None)


def _chat_ask(fields: Fields, model: ModelInfo, max_tokens: object) -> Ask:
    chat: Json = {name: fields.get(name) for name in PASSED}
    ignored: list[str] = [name for name in _NO_EFFECT if fields.get(name) is not None]
    chat["max_completion_tokens"] = max_tokens
    chat["stop"] = fields.items("stop_sequences", MAX_PARTS) or None
    chat["messages"] = _messages(fields)
    if chat["messages"][-1]["role"] == "assistant":
        # the answer goes on where the client's last message ends
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    chat |= _tools(fields, ignored)
    chat["response_format"] = _output_format(fields)
    thinking = fields.nested("thinking")
    if thinking is not None:
        kind = thinking.required("type")
        if kind not in ("enabled", "adaptive", "disabled"):
            raise invalid_value("thinking.type", "must be enabled, adaptive or disabled")
        chat["chat_template_kwargs"] = {"enable_thinking": kind != "disabled"}
    for name in ("container", "mcp_servers"):
        if fields.get(name):
            raise unsupported(name)
    ask = chat_ask(Fields(chat), model)
    return dataclasses.replace(ask, ignored=(*ignored, *fields.ignored))


def _messages(fields: Fields) -> list[Json]:
    """The conversation as a chat has it: results of tools are messages of their own."""
    asked = fields.required("messages")
    if not isinstance(asked, list):
        raise invalid_type("messages", "a list of messages", asked)
    if not asked:
        raise invalid_value("messages", "is empty")
    if len(asked) > MAX_MESSAGES:
        raise invalid_value("messages", f"has {len(asked)} messages, at most {MAX_MESSAGES} may be")
    messages: list[Json] = []
    if system := _system(fields):
        messages.append({"role": "system", "content": system})
    for index, one in enumerate(asked):
        messages += _message(Fields.of(one, f"messages[{index}]"))
    return messages


def _system(fields: Fields) -> str:
    value = fields.get("system")
    blocks = _blocks(value, "system") if value is not None else []
    texts = [_text(block) for block in blocks]
    return BILLING_LINE.sub("", "\n".join(texts))


def _message(fields: Fields) -> list[Json]:
    role = fields.get("role")
    if role not in ("user", "assistant", "system"):
        raise invalid_value(fields.path("role"), "must be user or assistant")
    blocks = _blocks(fields.required("content"), fields.path("content"))
    return _assistant(blocks) if role == "assistant" else _user(blocks, role)


def _user(blocks: list[Fields], role: str) -> list[Json]:
    """Texts between results are joined by line breaks, as in a chat."""
    messages: list[Json] = []
    for block in blocks:
        if block.get("type") == "tool_result":
            content = _result(block)
            call_id = _string(block, "tool_use_id")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
            continue
        text = _text(block)
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"] += f"\n{text}"
        else:
            messages.append({"role": role, "content": text})
    return messages or [{"role": role, "content": ""}]


def _assistant(blocks: list[Fields]) -> list[Json]:
    texts, thoughts, calls = [], [], []
    for block in blocks:
        kind = block.get("type")
        if kind == "thinking":
            thoughts.append(_string(block, "thinking"))
        elif kind == "tool_use":
            arguments = block.required("input")
            if not isinstance(arguments, dict):
                raise invalid_type(block.path("input"), "an object", arguments)
            function = {"name": _string(block, "name"), "arguments": arguments}
            calls.append({"type": "function", "id": _string(block, "id"), "function": function})
        elif kind != "redacted_thinking":  # which says nothing that a model could read
            texts.append(_text(block))
    message: Json = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return [message]


def _result(block: Fields) -> str:
    """What a function gave; that it failed is said before it."""
    value = block.get("content")
    parts = _blocks(value, block.path("content")) if value is not None else []
    text = "\n".join(_text(part) for part in parts)
    return f"Error: {text}" if block.boolean("is_error") else text


def _blocks(value: object, param: str) -> list[Fields]:
    """A string is one block of text."""
    if isinstance(value, str):
        return [Fields({"type": "text", "text": value}, f"{param}[0]")]
    if not isinstance(value, list):
        raise invalid_type(param, "a string or a list of blocks", value)
    if len(value) > MAX_PARTS:
        raise invalid_value(param, f"has {len(value)} blocks, at most {MAX_PARTS} may be")
    return [Fields.of(one, f"{param}[{index}]") for index, one in enumerate(value)]


def _text(block: Fields) -> str:
    kind = block.get("type")
    if kind != "text":
        named = kind if isinstance(kind, str) else "without a type"
        raise unsupported(
            block.path("type"), f"`{named[:40]}` is not supported: this model reads text"
        )
    return _string(block, "text")


def _string(fields: Fields, name: str) -> str:
    fields.required(name)
    return fields.text(name) or ""


def _tools(fields: Fields, ignored: list[str]) -> Json:
    """Functions; tools that Anthropic's own servers run are left out, and told as ignored."""
    tools: list[Json] = []
    for index, one in enumerate(fields.items("tools", MAX_TOOLS)):
        tool = Fields.of(one, f"tools[{index}]")
        if tool.get("type") not in (None, "custom"):
            ignored.append(f"tools.{index}")
            continue
        function: Json = {"name": tool.required("name"), "parameters": tool.get("input_schema")}
        function |= {name: tool.get(name) for name in ("description", "strict")}
        tools.append({"type": "function", "function": function})
    choice = fields.nested("tool_choice")
    found: Json = {"tools": tools}
    if choice is None:
        return found
    kind = choice.required("type")
    if kind == "tool":
        name = _string(choice, "name")
        found["tool_choice"] = {"type": "function", "function": {"name": name}}
    elif kind in ("auto", "any", "none"):
        found["tool_choice"] = "required" if kind == "any" else kind
    else:
        raise invalid_value("tool_choice.type", "must be auto, any, tool or none")
    found["parallel_tool_calls"] = not choice.boolean("disable_parallel_tool_use")
    return found


def _output_format(fields: Fields) -> Json | None:
    """`output_config.format`, or `output_format` as it was called before."""
    config = fields.nested("output_config")
    form = config.nested("format") if config else None
    form = form or fields.nested("output_format")
    if form is None:
        return None
    if form.required("type") != "json_schema":
        raise unsupported(form.path("type"), "must be json_schema")
    return {"type": "json_schema", "json_schema": {"schema": form.required("schema")}}


def in_anthropics_words(error: RequestError) -> RequestError:
    """A chat's refusal, naming the field that the client knows."""
    return renamed(error, _OUR_WORDS)
