"""POST /v1/responses, as far as it needs no memory: its fields, brought into those of a chat.

Owns: which fields and items there are, and what is refused because it would need one.
Called by: endpoints.
Invariant: what is answered is the chat that a client of /v1/chat/completions would have asked for.
Never: keeps a response; `store` asks for nothing that a client could notice, and is ignored.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from appliance.api.ask import Ask
from appliance.api.messages import MAX_MESSAGES, MAX_PARTS, Message
from appliance.api.openai import chat_ask, refuse_unsupported
from appliance.api.tools import MAX_TOOLS
from appliance.fields import Fields, invalid_type, invalid_value, unsupported
from appliance.request import ModelInfo
from engine.errors import RequestError

NEUTRAL: dict[str, tuple[object, ...]] = {
    "previous_response_id": (),
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
    *("stop_token_ids", "ignore_eos", "min_tokens", "chat_template_kwargs"),
)
"""The same in a chat, or vLLM's additions to both."""

_OUR_WORDS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
}
"""What a chat's fields are called here."""

_TEXT_PARTS = ("input_text", "output_text", "text")


def response_ask(fields: Fields, model: ModelInfo) -> Ask:
    """Validate a body of /v1/responses."""
    refuse_unsupported(fields, NEUTRAL)
    chat = {name: fields.get(name) for name in PASSED}
    chat["messages"] = _messages(fields)
    chat["max_completion_tokens"] = fields.integer("max_output_tokens", 1)
    chat["response_format"] = _response_format(fields.nested("text"))
    chat["tools"] = [
        _tool(Fields.of(one, f"tools[{index}]"))
        for index, one in enumerate(fields.items("tools", MAX_TOOLS))
    ]
    chat["tool_choice"] = _tool_choice(fields.get("tool_choice"))
    _check_metadata(fields.nested("metadata"))
    return dataclasses.replace(chat_ask(Fields(chat), model), ignored=fields.ignored)


def _messages(fields: Fields) -> list[Message]:
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
    for index, item in enumerate(items):
        message = _message(Fields.of(item, f"input[{index}]"))
        last = messages[-1] if messages else {}
        if message.get("tool_calls") and last.get("role") == "assistant":
            last.setdefault("tool_calls", []).extend(message["tool_calls"])
        else:
            messages.append(message)
    return messages


def _message(item: Fields) -> Message:
    kind = item.get("type")
    if kind in (None, "message"):
        return {"role": _string(item, "role"), "content": _text(item, "content")}
    if kind == "function_call":
        function = {"name": _string(item, "name"), "arguments": _string(item, "arguments")}
        call = {"type": "function", "id": _string(item, "call_id"), "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind == "function_call_output":
        call_id = _string(item, "call_id")
        return {"role": "tool", "tool_call_id": call_id, "content": _text(item, "output")}
    raise unsupported(item.path("type"), "is not supported; messages and function calls are")


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
    if tool.get("type") != "function":
        raise unsupported(tool.path("type"), "is not supported; only functions are")
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
    param = error.param or ""
    name = _OUR_WORDS.get(re.split(r"[.[]", param)[0])
    if name is None:
        return error
    return RequestError(
        error.what.replace(f"`{param}`", f"`{name}`"),
        code=error.code,
        param=name,
        status=error.status,
        kind=error.kind,
        hint=error.hint,
    )
