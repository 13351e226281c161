"""Check a chat's messages and bring them into the form that templates read.

Owns: which roles, parts and sizes a chat may have.
Invariant: token ids are those of the model, and no more than its context.
Invariant: every content is a string, every call's arguments are an object; what cannot be is
refused by its place, like `messages[3].content[0].text`.
Never: knows a template or the tools.
"""

from __future__ import annotations

from typing import Any

import msgspec

from appliance.json_fields import (
    Fields,
    invalid_type,
    invalid_value,
    unsupported,
)

Message = dict[str, Any]

ROLES = {
    "system": "system",
    "developer": "system",  # OpenAI's newer word; open models were trained with `system`
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",  # OpenAI's older word
}
MAX_MESSAGES = 4096
MAX_PARTS = 1024
"""Of one message: parts of its content, and calls."""
LEFT_OUT = " was left out: this model reads text]"
"""The end of what a model reads in the place of an image from an earlier turn."""
MAX_NESTING = 64
"""Of a call's arguments; templates write them out by recursion."""


def read_messages(value: object) -> list[Message]:
    """The conversation, in the order given."""
    if not isinstance(value, list):
        raise invalid_type("messages", "a list of messages", value)
    if not value:
        raise invalid_value("messages", "is empty")
    if len(value) > MAX_MESSAGES:
        raise invalid_value("messages", f"has {len(value)} messages, at most {MAX_MESSAGES} may be")
    last = len(value) - 1
    return [
        _message(Fields.of(one, f"messages[{index}]"), is_last=index == last)
        for index, one in enumerate(value)
    ]


def left_out(param: str, kind: str, *, is_last: bool) -> str:
    """Write in the place of an image that one was there; in the user's newest turn refuse it.

    Raises:
        RequestError: so that whoever sent it hears of it once, and can go on.
    """
    if is_last:
        raise unsupported(param, f"`{kind}` is not supported: this model reads text")
    return f"[{kind}{LEFT_OUT}"


def _message(fields: Fields, *, is_last: bool) -> Message:
    role = fields.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise invalid_value(fields.path("role"), f"must be one of {', '.join(ROLES)}")
    if fields.get("audio"):
        raise unsupported(fields.path("audio"))
    is_asked = is_last and role == "user"
    message: Message = {"role": ROLES[role], "content": _content(fields, role, is_last=is_asked)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (text := fields.text(name)) is not None:
            message[name] = text
    if calls := fields.items("tool_calls", MAX_PARTS):
        if role != "assistant":
            raise invalid_value(fields.path("tool_calls"), "is for the role assistant only")
        places = [f"{fields.path('tool_calls')}[{index}]" for index in range(len(calls))]
        message["tool_calls"] = [
            _call(Fields.of(one, at)) for one, at in zip(calls, places, strict=True)
        ]
    elif function := fields.nested("function_call"):  # OpenAI's older form
        message["tool_calls"] = [_called(function)]
    return message


def _content(fields: Fields, role: str, *, is_last: bool) -> str:
    """A string; parts are joined by line breaks."""
    value, param = fields.get("content"), fields.path("content")
    if value is None and role == "assistant":
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise invalid_type(param, "a string or a list of text parts", value)
    if len(value) > MAX_PARTS:
        raise invalid_value(param, f"has {len(value)} parts, at most {MAX_PARTS} may be")
    texts: list[str] = []
    for index, one in enumerate(value):
        part, where = Fields.of(one, f"{param}[{index}]"), f"{param}[{index}]"
        kind = part.get("type")
        if kind == "image_url":
            texts.append(left_out(where, kind, is_last=is_last))
            continue
        if kind not in ("text", "refusal"):
            raise unsupported(where, "is not supported; only parts of type text are")
        text = part.text(kind)
        if text is None:
            raise invalid_type(part.path(kind), "a string", None)
        texts.append(text)
    return "\n".join(texts)


def _call(fields: Fields) -> dict[str, Any]:
    """A call as templates read it: OpenAI writes arguments as text, templates want the object."""
    if fields.get("type") not in (None, "function"):
        raise unsupported(fields.path("type"), "is not supported; only functions are")
    call = _called(Fields.of(fields.required("function"), fields.path("function")))
    call_id = fields.text("id")
    return call if call_id is None else {"id": call_id, **call}


def _called(function: Fields) -> dict[str, Any]:
    name = function.text("name")
    if not name:
        raise invalid_value(function.path("name"), "is empty")
    return {"type": "function", "function": {"name": name, "arguments": _arguments(function)}}


def _arguments(function: Fields) -> dict[str, Any]:
    value, param = function.get("arguments"), function.path("arguments")
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value) if value.strip() else {}
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
            raise invalid_value(param, f"is not JSON: {error}") from error
    if not isinstance(value, dict | None):
        raise invalid_type(param, "an object, written as a string", value)
    if nesting(value) > MAX_NESTING:
        raise invalid_value(param, f"is nested more than {MAX_NESTING} deep")
    return value or {}


def nesting(value: object) -> int:
    """How deep lists and objects lie in each other; counted to a little over the limit."""
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
