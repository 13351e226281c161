"""Convert a chat's validated fields into plain messages for templates.

Invariant: every content is a string, every call's arguments are an object; an error names the
place, like `messages[3].content[0].text`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import msgspec

from appliance.api import openai_bodies as chats
from appliance.json_fields import Json, invalid_type, invalid_value, required, unsupported
from engine.wire.not_json import NOT_JSON

Message = dict[str, Any]

_OLDER = {"developer": "system", "function": "tool"}
"""Roles in OpenAI's words, and in the words that open models were trained with."""
LEFT_OUT = " was left out: this model reads text]"
"""The end of the text that replaces an image of an earlier turn."""
MAX_NESTING = 64
"""Maximum nesting of a call's arguments, which templates write by recursion."""


def read_messages(messages: Sequence[chats.ChatMessage]) -> list[Message]:
    """Bring a conversation into the form that templates read, in the order given."""
    last = len(messages) - 1
    return [
        _message(one, f"messages[{index}]", is_last=index == last)
        for index, one in enumerate(messages)
    ]


def marks_of(messages: Sequence[chats.ChatMessage]) -> tuple[tuple[int, int], ...]:
    """List cache marks: the index of a message, and characters of its content up to the mark."""
    found: list[tuple[int, int]] = []
    for index, one in enumerate(messages):
        if isinstance(one.content, list):
            # each text with the line break behind it
            ends = accumulate(len(text) + 1 for text in _texts(one.content, "", is_last=False))
            found += [
                (index, end - 1)
                for part, end in zip(one.content, ends, strict=True)
                if isinstance(part, chats.TextPart) and part.cache_control is not None
            ]
    return tuple(found)


def left_out(param: str, kind: str, *, is_last: bool) -> str:
    """Write in the place of an image that one was there; in the user's newest turn refuse it.

    Raises:
        RequestError: so that the client hears of it once, and can continue.
    """
    if is_last:
        raise unsupported(param, f"`{kind}` is not supported: this model reads text")
    return f"[{kind}{LEFT_OUT}"


def _message(said: chats.ChatMessage, where: str, *, is_last: bool) -> Message:
    is_answer = said.role == "assistant"
    if said.content is None and not is_answer:
        raise required(f"{where}.content")
    if said.audio:
        raise unsupported(f"{where}.audio")
    content = _content(said.content, where, is_last=is_last and said.role == "user")
    message: Message = {"role": _OLDER.get(said.role, said.role), "content": content}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (text := getattr(said, name)) is not None:
            message[name] = text
    if said.tool_calls:
        if not is_answer:
            raise invalid_value(f"{where}.tool_calls", "is for the role assistant only")
        message["tool_calls"] = [
            _call(one, f"{where}.tool_calls[{index}]") for index, one in enumerate(said.tool_calls)
        ]
    elif said.function_call:  # OpenAI's older form
        message["tool_calls"] = [_called(said.function_call, f"{where}.function_call")]
    return message


def _content(content: chats.Content | None, where: str, *, is_last: bool) -> str:
    """Join the parts of a content by line breaks."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(_texts(content, where, is_last=is_last))


def _texts(
    parts: Sequence[chats.TextPart | chats.RefusalPart | chats.ImagePart],
    where: str,
    *,
    is_last: bool,
) -> Iterator[str]:
    for index, part in enumerate(parts):
        if isinstance(part, chats.TextPart):
            yield part.text
        elif isinstance(part, chats.RefusalPart):
            yield part.refusal
        else:
            yield left_out(f"{where}.content[{index}]", "image_url", is_last=is_last)


def _call(call: chats.ToolCall, where: str) -> Json:
    """Write a call as templates read it: with its arguments as an object."""
    called = _called(call.function, f"{where}.function")
    return called if call.id is None else {"id": call.id, **called}


def _called(function: chats.CalledFunction, where: str) -> Json:
    arguments = _arguments(function.arguments, f"{where}.arguments")
    return {"type": "function", "function": {"name": function.name, "arguments": arguments}}


def _arguments(value: Any, param: str) -> Json:
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value) if value.strip() else {}
        except NOT_JSON as error:
            raise invalid_value(param, f"is not JSON: {error}") from error
    if not isinstance(value, dict | None):
        raise invalid_type(param, "an object, written as a string", value)
    if nesting(value) > MAX_NESTING:
        raise invalid_value(param, f"is nested more than {MAX_NESTING} deep")
    return value or {}


def nesting(value: object) -> int:
    """Count how deep lists and objects are nested, to a little over the limit."""
    depth, level = 0, [value]
    while level and depth <= MAX_NESTING:
        level = [
            inner
            for one in level
            if isinstance(one, list | dict)
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
        depth += 1
    return depth
