"""Tell what one part of a message is, in the words of any API: text, thought, call, result, media.

Invariant: any JSON value at all is one of them; nothing raises.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from appliance.json.fields import Json
from engine.wire.not_json import NOT_JSON

MAX_NESTING = 64
"""Maximum nesting of a call's arguments, which templates write by recursion."""


class Text(NamedTuple):
    """Words of a message, or of a text file."""

    text: str
    is_marked: bool = False
    """Other prompts go on differently behind it, as Anthropic's `cache_control` says."""


class Thought(NamedTuple):
    """Reasoning; empty where only the server that wrote it can read it."""

    text: str


class Call(NamedTuple):
    """A call of a function that the client runs."""

    name: str
    arguments: Json
    call_id: str | None


class Result(NamedTuple):
    """What a tool gave."""

    content: Any
    call_id: str | None
    is_error: bool = False
    is_marked: bool = False


class Media(NamedTuple):
    """An image, a sound, or another file that is no text."""

    kind: str


class Unread(NamedTuple):
    """A part that no model here reads; its words, where it has any, are kept."""

    kind: str
    text: str
    missing: str = ""
    """The field that a part of a known kind lacks."""


Part = Text | Thought | Call | Result | Media | Unread

_TEXTS = {
    **dict.fromkeys(("text", "input_text", "output_text", "text-plain"), "text"),
    "refusal": "refusal",
}
"""Kinds of texts, and the field that holds them."""
_THOUGHTS = {"thinking", "redacted_thinking", "reasoning", "reasoning_text", "summary_text"}
_THOUGHTS |= {"reasoning.text", "reasoning.summary", "reasoning.encrypted"}
_CALLS = {"tool_use", "function_call", "tool_call", "custom_tool_call", "function", "custom"}
_RESULTS = {"tool_result", "function_call_output", "custom_tool_call_output"}
_FILES = {"document", "file", "input_file", "search_result"}
_MEDIA = {
    *("image", "image_url", "input_image", "image_file", "computer_screenshot"),
    *("audio", "audio_url", "input_audio", "output_audio", "media", "container_upload"),
    *("video", "video_url", "input_video"),
}
_TEXT_TYPE = re.compile(r"text/|application/([\w.-]+\+)?(json|xml|yaml|x-yaml|javascript|toml)\b")
_DATA_URL = re.compile(
    r"data:(?P<type>[^;,]*)[^,]*?(?P<is_base64>;base64)?,(?P<data>.*)", re.DOTALL
)


def part_of(value: Any) -> Part:
    """Tell what a part is."""
    if isinstance(value, str):
        return Text(value)
    if not isinstance(value, dict):
        return Unread("", "")
    kind = value.get("type")
    if kind is None:
        kind = "text" if isinstance(value.get("text"), str) else ""
    if not isinstance(kind, str):
        return Unread("", _words_in(value))
    if kind in _TEXTS:
        text = value.get(_TEXTS[kind])
        is_marked = value.get("cache_control") is not None
        return Text(text, is_marked) if isinstance(text, str) else Unread(kind, "", _TEXTS[kind])
    if kind in _THOUGHTS:
        return Thought(thought_in(value))
    if kind in _CALLS:
        return call_of(value) or Unread(kind, "", "name")
    if kind in _RESULTS:
        return _result(value)
    if kind in _FILES:
        text = _text_of_file(value)
        return Media(kind) if text is None else Text(text, value.get("cache_control") is not None)
    is_heard = isinstance(value.get("transcript"), str)
    return Media(kind) if kind in _MEDIA and not is_heard else Unread(kind, _words_in(value))


def thought_in(value: Any) -> str:
    """Read the text of a thought, under any of the names that it has."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "\n".join(filter(None, map(thought_in, value)))
    if not isinstance(value, dict):
        return ""
    names = ("thinking", "reasoning", "text", "content", "summary")
    return next((text for name in names if (text := thought_in(value.get(name)))), "")


def call_of(value: Any) -> Call | None:
    """Read a call in any API's form; None where it names no function."""
    if not isinstance(value, dict):
        return None
    inner = value.get("function") or value.get("custom") or value
    if not isinstance(inner, dict):
        return None
    name = inner.get("name")
    if not isinstance(name, str) or not name:
        return None
    given = (inner.get(one) for one in ("arguments", "args", "parameters"))
    arguments = next((one for one in given if one is not None), None)
    text = inner.get("input")
    if arguments is None and text is not None:  # of a function an object, of a custom tool a text
        arguments = {"input": text} if isinstance(text, str) else text
    return Call(name, arguments_of(arguments), id_of(value.get("call_id") or value.get("id")))


def id_of(value: Any) -> str | None:
    """Read a call's id, which some servers count."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return value if isinstance(value, str) else None


def arguments_of(value: Any) -> Json:
    """Read a call's arguments; what is no object, as where a limit cut it off, is kept as text."""
    given, text = value, value if isinstance(value, str) else None
    if text is not None:
        try:
            given = msgspec.json.decode(text) if text.strip() else None
        except (*NOT_JSON, RecursionError):
            given = text
    if given is None:
        return {}
    if isinstance(given, dict) and nesting(given) <= MAX_NESTING:
        return given
    return {"_incomplete": msgspec.json.encode(value).decode() if text is None else text}


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


def _result(value: Json) -> Result:
    call_id = value.get("tool_use_id") or value.get("call_id")
    return Result(
        value.get("output") if value.get("content") is None else value["content"],
        id_of(call_id),
        bool(value.get("is_error")),
        value.get("cache_control") is not None,
    )


def _words_in(value: Json) -> str:
    """Read the words of a part of an unknown kind."""
    found = (value.get(name) for name in ("text", "content", "output", "transcript"))
    return next(("\n".join(_words(one)) for one in found if one), "")


def _words(value: Any) -> Iterator[str]:
    for one in value if isinstance(value, list) else [value]:
        part = part_of(one)
        if isinstance(part, Text) and part.text:
            yield part.text


def _text_of_file(value: Json) -> str | None:
    """Read a file of text with its title; None where it is no text."""
    inner = value.get("file")
    fields = {**value, **inner} if isinstance(inner, dict) else value
    text = _text_in(fields)
    if text is None:
        return None
    titles = (fields.get(name) for name in ("title", "filename", "name", "context"))
    return "\n\n".join([*(one for one in titles if isinstance(one, str) and one), text])


def _text_in(fields: Json) -> str | None:
    source = fields.get("source")
    if isinstance(source, dict):
        kind, data = source.get("type"), source.get("data")
        if kind == "content":
            return "\n".join(_words(source.get("content")))
        if kind == "text":
            return data if isinstance(data, str) else None
        return _decoded(data, source.get("media_type")) if kind == "base64" else None
    if fields.get("type") == "search_result":
        where = [source] if isinstance(source, str) else []
        return "\n".join([*where, *_words(fields.get("content"))])
    if isinstance(fields.get("text"), str):
        return str(fields["text"])
    data = next((fields[n] for n in ("file_data", "base64", "data") if fields.get(n)), None)
    url = _DATA_URL.fullmatch(data) if isinstance(data, str) else None
    if url is None:
        return _decoded(data, fields.get("mime_type") or fields.get("media_type"))
    if not url["is_base64"]:
        return None
    return _decoded(url["data"], url["type"])


def _decoded(data: Any, media_type: Any) -> str | None:
    """Decode base64 of a text; None: it is something else."""
    is_text = isinstance(media_type, str) and _TEXT_TYPE.match(media_type)
    if not is_text or not isinstance(data, str):
        return None
    try:
        return base64.b64decode(data, validate=False).decode("utf-8-sig")
    except (binascii.Error, ValueError):
        return None
