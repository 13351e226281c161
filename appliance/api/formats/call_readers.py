"""Read tool calls from a model's output while it streams, one reader per notation.

A reader is given where a call may begin, behind its mark. It consumes nothing until it knows that
one of the request's functions is called; then it reports the call, and its arguments as JSON,
piece by piece, from any notation. It returns None; or, if no function is called, how many
characters are text.

Invariant: arguments that are complete in the model's notation are a JSON object; if a limit cuts
them off they are the beginning of one.
"""

from __future__ import annotations

import ast
import functools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from appliance.api.formats.text_reading import ObjectScanner, Step, TextReading, drop
from engine.wire.not_json import NOT_JSON


def types_of(schema: object) -> set[str]:
    """List the types that a parameter may have; empty where its schema does not say."""
    if not isinstance(schema, dict):
        return set()
    types, options = schema.get("type"), schema.get("anyOf")
    found = {types} if isinstance(types, str) else set()
    if isinstance(types, list):
        found |= {one for one in types if isinstance(one, str)}
    return found.union(*map(types_of, options)) if isinstance(options, list) else found


def as_json(text: str, types: set[str]) -> str:
    """Read a value written as JSON or as Python, if it may be that; else as a text."""
    stripped = text.strip()
    if "string" in types:
        return "null" if stripped == "null" and "null" in types else quoted(text)
    try:
        return as_text(json.loads(stripped))
    except (ValueError, RecursionError):
        return python_as_json(stripped if types else text)


def python_as_json(text: str) -> str:
    """Read a value written as Python; else as a text."""
    names = {"true": "True", "false": "False", "null": "None"}
    try:
        value = ast.literal_eval(names.get(text.strip(), text.strip()))
        return as_text(value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return quoted(text)


def quoted(text: str) -> str:
    """Write a text as a JSON string."""
    return as_text(text)


def as_text(value: object) -> str:
    """Write a value as JSON; half a surrogate pair, which no reply can carry, becomes `?`.

    Raises:
        ValueError: it has a number that JSON has not.
    """
    written = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return written.encode("utf-8", "replace").decode()


def inner(text: str) -> str:
    """Escape a text for the inside of a JSON string."""
    return quoted(text)[1:-1]


@dataclass(frozen=True, slots=True)
class ElementSyntax:
    """Calls whose parameters are elements; a text stands for itself, without quotes."""

    name_begin: str
    """Before the function's name; empty where the mark is just before it."""
    name_end: str
    key_begin: str
    key_ends: tuple[str, ...]
    """Each of them ends a key; text from there to `value_begin` is skipped."""
    value_begin: str
    value_ends: tuple[str, ...]
    """The first is right; models forget it, so that the others end a value, too."""
    end: str
    """Of the call."""
    is_on_lines: bool = False
    """A value begins and ends with a line break that is not its own."""


QWEN_ELEMENTS = ElementSyntax(
    name_begin="<function=",
    name_end=">",
    key_begin="<parameter=",
    key_ends=(">",),
    value_begin=">",
    value_ends=("</parameter>", "<parameter=", "</function>", "</tool_call>"),
    end="</function>",
    is_on_lines=True,
)
GLM_ELEMENTS = ElementSyntax(
    name_begin="",
    name_end="",
    key_begin="<arg_key>",
    key_ends=("</arg_key>",),
    value_begin="<arg_value>",
    value_ends=("</arg_value>", "<arg_key>", "</tool_call>"),
    end="</tool_call>",
)


def read_elements(reading: TextReading, at: int, *, syntax: ElementSyntax) -> Step[int | None]:
    """Read parameters written as elements, with the types of the function's schema."""
    begin = yield from reading.skip_space(at)
    if syntax.name_begin:
        # where this is itself the mark, it stands just before
        is_read = reading.text[:begin].endswith(syntax.name_begin)
        if not is_read and not (yield from reading.starts(begin, syntax.name_begin)):
            return begin
        begin += 0 if is_read else len(syntax.name_begin)
    end = yield from reading.name(begin)
    name = reading.text[begin:end]
    if name not in reading.schemas:
        return end
    if syntax.name_end and not (yield from reading.starts(end, syntax.name_end)):
        return end
    if not syntax.name_end:
        after = yield from reading.skip_space(end)
        if not (yield from reading.starts(after, syntax.key_begin, syntax.end)):
            return end
    reading.begin_call(name, end + len(syntax.name_end))
    yield from _element_arguments(reading, name, syntax)
    return None


def _element_arguments(reading: TextReading, name: str, syntax: ElementSyntax) -> Step[None]:
    schema = reading.schemas[name] or {}
    types = schema.get("properties")
    separator = "{"
    while (yield from reading.pass_until((syntax.key_begin, syntax.end), drop)) is not None:
        is_key = reading.text.startswith(syntax.key_begin)
        reading.consume(len(syntax.key_begin if is_key else syntax.end))
        if not is_key:
            break
        key: list[str] = []
        if (yield from reading.pass_until(syntax.key_ends, key.append)) is None:
            return
        if (yield from reading.pass_until((syntax.value_begin,), drop)) is None:
            return
        reading.consume(len(syntax.value_begin))
        text = "".join(key).strip()
        reading.argue(f"{separator}{quoted(text)}: ")
        separator = ", "
        own = types.get(text) if isinstance(types, dict) else None
        if not (yield from _element_value(reading, syntax, types_of(own))):
            return
    reading.argue("{}" if separator == "{" else "}")


def _element_value(reading: TextReading, syntax: ElementSyntax, types: set[str]) -> Step[bool]:
    """Read one value up to its end, which is consumed if it is its own; false if cut off."""
    ends = syntax.value_ends
    if syntax.is_on_lines:
        if (yield from reading.starts(0, "\n")):
            reading.consume(1)
        ends = (*ends, *(f"\n{one}" for one in ends))
    if types == {"string"}:
        reading.argue('"')
        mark = yield from reading.pass_until(ends, lambda text: reading.argue(inner(text)))
        if mark is None:
            return False
        reading.argue('"')
    else:
        pieces: list[str] = []
        mark = yield from reading.pass_until(ends, pieces.append)
        if mark is None:
            return False
        reading.argue(as_json("".join(pieces), types))
    own = syntax.value_ends[0]
    if mark in (own, f"\n{own}"):
        reading.consume(len(mark))
    return True


CallReader = Callable[[TextReading, int], Step[int | None]]

_HEAD = re.compile(r'\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
"""How a call begins if it says its name first; any other is read when it is complete."""
MAX_HEAD_CHARS = 1024
"""Longer beginnings are not looked for: one that never ends would be matched for each token."""
MAX_DEPTH = 64
"""Maximum nesting of a value that is read by parts; what is deeper becomes a text."""


class _Call(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()


def read_json(reading: TextReading, at: int, *, also: str = "") -> Step[int | None]:
    """Read `{"name": "f", "arguments": {...}}`, in a list if `also` is its bracket."""
    at = yield from reading.skip_space(at, also)
    if reading.text[at : at + 1] != "{":
        return at
    scanner = ObjectScanner()
    is_new = True
    while True:
        head = _HEAD.match(reading.text, at, at + MAX_HEAD_CHARS) if is_new else None
        is_new = len(reading.text) - at < MAX_HEAD_CHARS
        if head and head[1] in reading.schemas:
            reading.begin_call(head[1], head.end())
            if (yield from reading.pass_object(reading.argue)):
                yield from reading.pass_object(drop, depth=1)
            return None
        if scanner.feed(reading.text[at + scanner.num_chars :]):
            break
        if not (yield from reading.more()):
            return len(reading.text)
    end = at + scanner.num_chars
    call = _whole_call(reading, reading.text[at:end])
    if call is None:
        return end
    reading.begin_call(call[0], end)
    reading.argue(call[1])
    return None


read_json_list: CallReader = functools.partial(read_json, also="[")


def _whole_call(reading: TextReading, text: str) -> tuple[str, str] | None:
    """Name and arguments of a call of one of the functions."""
    try:
        call = msgspec.json.decode(text, type=_Call)
    except NOT_JSON:
        return None
    arguments = (bytes(call.arguments) or bytes(call.parameters) or b"{}").decode()
    if call.name not in reading.schemas or not arguments.startswith("{"):
        return None
    return call.name, arguments


def read_mistral(reading: TextReading, at: int) -> Step[int | None]:
    """Read `[{"name": ...}]`, or newer models' `f[ARGS]{...}`, perhaps with `[CALL_ID]id`."""
    begin = yield from reading.skip_space(at)
    if reading.text[begin : begin + 1] in ("[", "{"):
        return (yield from read_json_list(reading, at))
    end = yield from reading.name(begin)
    name, after = reading.text[begin:end], end
    if (yield from reading.starts(after, "[CALL_ID]")):
        after = yield from reading.name(after + len("[CALL_ID]"))
    if (yield from reading.starts(after, "[ARGS]")):
        after += len("[ARGS]")
    return (yield from _named_object(reading, name, after))


def read_deepseek(reading: TextReading, at: int) -> Step[int | None]:
    """Read `function<sep>f`, a line break and a fenced object, or `f<sep>{...}`."""
    mark, sep, fence = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "```json"
    begin = yield from reading.skip_space(at)
    if (yield from reading.starts(begin, mark)):  # behind the mark of all calls
        begin = yield from reading.skip_space(begin + len(mark))
    end = yield from reading.name(begin)
    if not (yield from reading.starts(end, sep)):
        return end
    name, after = reading.text[begin:end], end + len(sep)
    if name == "function" and name not in reading.schemas:
        begin = yield from reading.skip_space(after)
        after = yield from reading.name(begin)
        name = reading.text[begin:after]
    after = yield from reading.skip_space(after)
    if (yield from reading.starts(after, fence)):
        after += len(fence)
    return (yield from _named_object(reading, name, after))


def _named_object(reading: TextReading, name: str, at: int) -> Step[int | None]:
    """Read the arguments of a function after its name."""
    at = yield from reading.skip_space(at)
    if name not in reading.schemas or reading.text[at : at + 1] != "{":
        return at
    reading.begin_call(name, at)
    yield from reading.pass_object(reading.argue)
    return None


# Python


def read_pythonic(reading: TextReading, at: int) -> Step[int | None]:
    """Read `[f(a=1, b="x"), g()]`; each argument is passed on when it is complete."""
    at = yield from reading.skip_space(at)
    if reading.text[at : at + 1] != "[":
        return at
    num_before = reading.num_calls
    at += 1
    while True:
        begin = yield from reading.skip_space(at)
        end = yield from reading.name(begin)
        name = reading.text[begin:end]
        if name not in reading.schemas or not (yield from reading.starts(end, "(")):
            return None if reading.num_calls > num_before else max(end, begin + 1)
        reading.begin_call(name, end + 1)
        if not (yield from _python_arguments(reading)):
            reading.consume(len(reading.text))
            return None
        at = yield from reading.skip_space(0)
        if reading.text[at : at + 1] != ",":
            reading.consume(at + (reading.text[at : at + 1] == "]"))
            return None
        reading.consume(at + 1)
        at = 0


def _python_arguments(reading: TextReading) -> Step[bool]:
    """Read the arguments of one call; false if the text ends in them."""
    separator = "{"
    while True:
        piece = yield from _python_piece(reading)
        if piece is None:
            return False
        key, equals, value = piece[:-1].partition("=")
        if equals:
            text = python_as_json(value.strip())
            reading.argue(f"{separator}{quoted(key.strip())}: {text}")
            separator = ", "
        if piece.endswith(")"):
            reading.argue("{}" if separator == "{" else "}")
            return True


def _python_piece(reading: TextReading) -> Step[str | None]:
    """Read up to a comma or the bracket that closes the call, it included."""
    at, depth, quote = 0, 0, ""
    while True:
        while at < len(reading.text):
            character = reading.text[at]
            at += 1
            if quote:
                if character == "\\":
                    at += 1
                elif character == quote:
                    quote = ""
            elif character in "\"'":
                quote = character
            elif character in "([{":
                depth += 1
            elif character in ")]}" and depth:
                depth -= 1
            elif character in ",)" and not depth:
                return reading.consume(at)
        if not (yield from reading.more()):
            return None


# Gemma


def read_gemma(reading: TextReading, at: int, *, quote: str) -> Step[int | None]:
    """Read `call:f{key:<|"|>text<|"|>,other:3}`: like JSON, with quotes that no text contains."""
    begin = yield from reading.skip_space(at)
    if not (yield from reading.starts(begin, "call:")):
        return begin
    begin += len("call:")
    end = yield from reading.name(begin)
    name = reading.text[begin:end]
    if name not in reading.schemas or not (yield from reading.starts(end, "{")):
        return max(end, begin)
    reading.begin_call(name, end)
    yield from _gemma_value(reading, quote)
    return None


def _gemma_value(reading: TextReading, quote: str, depth: int = 0) -> Step[bool]:
    """Read one value; false if the text ends in it."""
    reading.consume((yield from reading.skip_space(0)))
    if (yield from reading.starts(0, quote)):
        reading.consume(len(quote))
        return (yield from _gemma_text(reading, quote))
    first = reading.text[:1]
    if first in ("{", "[") and depth < MAX_DEPTH:
        closer = "}" if first == "{" else "]"
        return (yield from _gemma_members(reading, quote, closer, depth + 1))
    pieces: list[str] = []
    is_whole = (yield from reading.pass_until((",", "}", "]"), pieces.append)) is not None
    if is_whole:
        reading.argue(as_json("".join(pieces).strip() or "null", set()))
    return is_whole


def _gemma_text(reading: TextReading, quote: str) -> Step[bool]:
    reading.argue('"')
    mark = yield from reading.pass_until((quote,), lambda text: reading.argue(inner(text)))
    if mark is None:
        return False
    reading.consume(len(quote))
    reading.argue('"')
    return True


def _gemma_members(reading: TextReading, quote: str, closer: str, depth: int) -> Step[bool]:
    """Read the entries of an object or a list, up to its end."""
    reading.argue(reading.consume(1))
    separator = ""
    while True:
        reading.consume((yield from reading.skip_space(0, also=",")))
        if not reading.text:
            return False
        if reading.text[0] in "}]":
            reading.consume(1)
            reading.argue(closer)
            return True
        reading.argue(separator)
        separator = ", "
        if closer == "}":
            key: list[str] = []
            if (yield from reading.pass_until((":",), key.append)) is None:
                return False
            reading.consume(1)
            reading.argue(f"{quoted(''.join(key).replace(quote, '').strip())}: ")
        if not (yield from _gemma_value(reading, quote, depth)):
            return False
