"""How calls are read in each way that models write them: one reader for each.

A reader is given where a call may begin, behind its mark. It consumes nothing until it knows that
one of the request's functions is called; then it reports the call, and its arguments as JSON,
piece by piece, whatever notation they are written in. It returns None; or, if there is no such
call, how much of the text is none.

Owns: the notations.
Invariant: arguments that are complete in the model's notation are a JSON object; those that a
limit cuts off are the beginning of one.
Never: decides what is content.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import msgspec

from appliance.api.call_values import as_json, inner, python_as_json, quoted
from appliance.api.reading import ObjectScanner, Step, TextReading, drop

CallReader = Callable[[TextReading, int], Step[int | None]]

_HEAD = re.compile(r'\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
"""How a call begins if it says its name first; any other is read when it is complete."""


class _Call(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()


def read_json(reading: TextReading, at: int, *, also: str = "") -> Step[int | None]:
    """`{"name": "f", "arguments": {...}}`, in a list if `also` is its bracket."""
    at = yield from reading.skip_space(at, also)
    if reading.text[at : at + 1] != "{":
        return at
    scanner = ObjectScanner()
    while True:
        head = _HEAD.match(reading.text, at)
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
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return None
    arguments = (bytes(call.arguments) or bytes(call.parameters) or b"{}").decode()
    if call.name not in reading.schemas or not arguments.startswith("{"):
        return None
    return call.name, arguments


def read_mistral(reading: TextReading, at: int) -> Step[int | None]:
    """`[{"name": ...}]`, or as newer models write it `f[ARGS]{...}`, perhaps with `[CALL_ID]id`."""
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
    """`function<sep>f`, a line break and a fenced object, or `f<sep>{...}`."""
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
    """The arguments of a function whose name has been read."""
    at = yield from reading.skip_space(at)
    if name not in reading.schemas or reading.text[at : at + 1] != "{":
        return at
    reading.begin_call(name, at)
    yield from reading.pass_object(reading.argue)
    return None


# Python


def read_pythonic(reading: TextReading, at: int) -> Step[int | None]:
    """`[f(a=1, b="x"), g()]`: each argument is passed on when it is complete."""
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
            reading.take(len(reading.text))
            return None
        at = yield from reading.skip_space(0)
        if reading.text[at : at + 1] != ",":
            reading.take(at + (reading.text[at : at + 1] == "]"))
            return None
        reading.take(at + 1)
        at = 0


def _python_arguments(reading: TextReading) -> Step[bool]:
    """Those of one call; false if the text ends in them."""
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
    """The text up to a comma or the bracket that closes the call, it included."""
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
                return reading.take(at)
        if not (yield from reading.more()):
            return None


# Gemma


def read_gemma(reading: TextReading, at: int, *, quote: str) -> Step[int | None]:
    """`call:f{key:<|"|>text<|"|>,other:3}`: like JSON, with quotes that no text has in it."""
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


def _gemma_value(reading: TextReading, quote: str) -> Step[bool]:
    """One value; false if the text ends in it."""
    reading.take((yield from reading.skip_space(0)))
    if (yield from reading.starts(0, quote)):
        reading.take(len(quote))
        return (yield from _gemma_text(reading, quote))
    first = reading.text[:1]
    if first in ("{", "["):
        return (yield from _gemma_members(reading, quote, "}" if first == "{" else "]"))
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
    reading.take(len(quote))
    reading.argue('"')
    return True


def _gemma_members(reading: TextReading, quote: str, closer: str) -> Step[bool]:
    """An object's or a list's, up to its end."""
    reading.argue(reading.take(1))
    separator = ""
    while True:
        reading.take((yield from reading.skip_space(0, also=",")))
        if not reading.text:
            return False
        if reading.text[0] in "}]":
            reading.take(1)
            reading.argue(closer)
            return True
        reading.argue(separator)
        separator = ", "
        if closer == "}":
            key: list[str] = []
            if (yield from reading.pass_until((":",), key.append)) is None:
                return False
            reading.take(1)
            reading.argue(f"{quoted(''.join(key).replace(quote, '').strip())}: ")
        if not (yield from _gemma_value(reading, quote)):
            return False
