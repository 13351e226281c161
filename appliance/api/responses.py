"""POST /v1/responses: its fields, brought into those of a chat.

Owns: which fields and items there are, as OpenAI's client and Codex send them, and what is refused.
Invariant: what is answered is the chat that a client of /v1/chat/completions would have asked for.
Never: keeps a response; response_memory does.

Tools that are no functions (a shell, a search, a patch in a grammar of its own) are left out, and
told in x-penstock-ignored: their clients offer functions beside them. So are items that only their
own server could read: reasoning that is encrypted, searches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from appliance.api.ask import Ask
from appliance.api.chat_messages import MAX_MESSAGES, MAX_PARTS, Message
from appliance.api.openai import chat_ask, refuse_unsupported
from appliance.api.tools import MAX_TOOLS
from appliance.json_fields import Fields, invalid_type, invalid_value, renamed, unsupported
from appliance.request import ModelInfo
from engine.errors import RequestError

NEUTRAL: dict[str, tuple[object, ...]] = {
    "conversation": (),
    "prompt": (),
    "background": (False,),
    "truncation": ("disabled",),
    "top_logprobs": (0,),
    "include": ([], ["reasoning.encrypted_content"]),
}
"""Known, not supported: the values that ask for nothing."""

PASSED = (
    *("model", "temperature", "top_p", "top_k", "min_p", "seed", "stream", "parallel_tool_calls"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "stop"),
    *("stop_token_ids", "ignore_eos", "min_tokens", "cache_salt"),
)
"""The same in a chat, or vLLM's additions to both."""

_OUR_WORDS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
}
"""What a chat's fields are called here."""

_TEXT_PARTS = ("input_text", "output_text", "text")


def response_ask(fields: Fields, model: ModelInfo, earlier: Sequence[Any] = ()) -> Ask:
    """Validate a body of /v1/responses; it goes on from the items of an `earlier` response."""
    refuse_unsupported(fields, NEUTRAL)
    fields.get("previous_response_id"), fields.get("store")
    chat = {name: fields.get(name) for name in PASSED}
    chat["messages"] = _messages(fields, earlier)
    chat["max_completion_tokens"] = fields.integer("max_output_tokens", 1)
    chat["response_format"] = _response_format(fields.nested("text"))
    tools = [
        Fields.of(one, f"tools[{index}]")
        for index, one in enumerate(fields.items("tools", MAX_TOOLS))
    ]
    chat["tools"] = [_tool(tool) for tool in tools if tool.get("type") == "function"]
    others = [f"tools.{index}" for index, one in enumerate(tools) if one.get("type") != "function"]
    choice = fields.get("tool_choice")
    has_none = bool(others) and not chat["tools"]
    chat["tool_choice"] = None if has_none and choice == "auto" else _tool_choice(choice)
    chat["chat_template_kwargs"] = _variables(fields)
    _check_metadata(fields.nested("metadata"))
    return dataclasses.replace(chat_ask(Fields(chat), model), ignored=(*others, *fields.ignored))


def _variables(fields: Fields) -> object:
    """What the template is told; an effort of `none` is to think not at all."""
    own = fields.get("chat_template_kwargs")
    reasoning = fields.nested("reasoning")
    effort = reasoning.text("effort") if reasoning else None
    if effort is None or not isinstance(own, dict | None):
        return own
    said = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    return {**said, **(own or {})}


def _messages(fields: Fields, earlier: Sequence[Any]) -> list[Message]:
    """The conversation; an assistant's calls belong to what it said just before."""
    asked = fields.required("input")
    if isinstance(asked, str):
        items: list[Any] = [{"role": "user", "content": asked}]
    else:
        items = fields.items("input", MAX_MESSAGES)
    if not items:
        raise invalid_value("input", "is empty")
    instructions = fields.text("instructions")
    messages: list[Message] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    if len(earlier) + len(items) > MAX_MESSAGES:
        raise invalid_value("input", f"has more than {MAX_MESSAGES} items, earlier ones included")
    thought = ""
    for index, item in enumerate([*earlier, *items], start=-len(earlier)):
        message = _message(Fields.of(item, f"input[{index}]"))
        if message is None:
            continue
        if message["role"] == "":
            thought = message["content"]  # of what the assistant says next
            continue
        if thought and message["role"] == "assistant":
            message["reasoning_content"], thought = thought, ""
        last = messages[-1] if messages else {}
        if message.get("tool_calls") and last.get("role") == "assistant":
            last.setdefault("tool_calls", []).extend(message["tool_calls"])
        else:
            messages.append(message)
    return messages


_UNREADABLE = ("web_search_call", "file_search_call", "image_generation_call", "local_shell_call")
"""Items of tools that are not served here, and say nothing to a model."""


def _message(item: Fields) -> Message | None:
    """One item; None if it says nothing. Reasoning has no role of its own."""
    kind = item.get("type")
    if kind in _UNREADABLE:
        return None
    if kind == "reasoning":
        return {"role": "", "content": _reasoning(item)}
    if kind == "custom_tool_call":
        function = {"name": _string(item, "name"), "arguments": {"input": _string(item, "input")}}
        call = {"type": "function", "id": _string(item, "call_id"), "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind in (None, "message"):
        return {"role": _string(item, "role"), "content": _text(item, "content")}
    if kind == "function_call":
        function = {"name": _string(item, "name"), "arguments": _string(item, "arguments")}
        call = {"type": "function", "id": _string(item, "call_id"), "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind in ("function_call_output", "custom_tool_call_output", "local_shell_call_output"):
        call_id = _string(item, "call_id")
        return {"role": "tool", "tool_call_id": call_id, "content": _text(item, "output")}
    raise unsupported(item.path("type"), "is not supported; messages and function calls are")


def _reasoning(item: Fields) -> str:
    """Its text, or its summary; what is encrypted only says nothing here."""
    parts = item.items("content", MAX_PARTS) or item.items("summary", MAX_PARTS)
    places = [f"{item.path('content')}[{index}]" for index in range(len(parts))]
    texts = [Fields.of(one, at).text("text") for one, at in zip(parts, places, strict=True)]
    return "\n".join(filter(None, texts))


def _text(item: Fields, name: str) -> str:
    """A string; parts are joined by line breaks, as in a chat."""
    value = item.required(name)
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise invalid_type(item.path(name), "a string or a list of text parts", value)
    if len(value) > MAX_PARTS:
        raise invalid_value(item.path(name), f"has {len(value)} parts, at most {MAX_PARTS} may be")
    parts = [Fields.of(one, f"{item.path(name)}[{index}]") for index, one in enumerate(value)]
    texts = []
    for part in parts:
        if part.get("type") == "refusal":
            texts.append(_string(part, "refusal"))
            continue
        if part.get("type") not in _TEXT_PARTS:
            raise unsupported(part.path("type"), "is not supported; only text is")
        texts.append(_string(part, "text"))
    return "\n".join(texts)


def _response_format(text: Fields | None) -> dict[str, Any] | None:
    """A chat has a schema's name and strictness in an object of their own."""
    form = text.nested("format") if text else None
    if form is None:
        return None
    kind = form.required("type")
    if kind != "json_schema":
        return {"type": kind}
    schema = {name: form.get(name) for name in ("name", "schema", "strict")}
    return {"type": kind, "json_schema": schema | {"schema": form.required("schema")}}


def _tool(tool: Fields) -> dict[str, Any]:
    names = ("name", "description", "parameters", "strict")
    function = {name: tool.get(name) for name in names if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: object) -> object:
    if not isinstance(choice, dict):
        return choice
    fields = Fields(choice, "tool_choice")
    if fields.get("type") != "function":
        raise unsupported("tool_choice.type", "is not supported; only functions are")
    return {"type": "function", "function": {"name": _string(fields, "name")}}


def _check_metadata(metadata: Fields | None) -> None:
    """It comes back with the response, so it is what OpenAI says it is."""
    if metadata is not None:
        for name in metadata.ignored:
            metadata.text(name)


def _string(fields: Fields, name: str) -> str:
    fields.required(name)
    return fields.text(name) or ""


def in_our_words(error: RequestError) -> RequestError:
    """A chat's refusal, naming the field that the client knows."""
    return renamed(error, _OUR_WORDS)
