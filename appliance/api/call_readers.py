"""How calls are read while they come, in each way that models write them: one reader for each.

A reader is given where a call may begin, behind its mark. It consumes nothing until it knows that
one of the request's functions is called; then it reports the call, and its arguments as JSON,
piece by piece, whatever notation they are written in. It returns None; or, if there is no such
call, how much of the text is none.

Owns: what is not reported yet, and the parts that are: text, reasoning, calls; the notations.
Invariant: arguments that are complete in the model's notation are a JSON object; those that a
limit cuts off are the beginning of one.
Never: decides what is content.
"""

from __future__ import annotations

import ast
import functools
import json
import re
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

# A model's text read while it comes, by steps that wait for more where they cannot tell yet.
# A step is a generator: it yields when it needs more text, and returns what it has found. Steps
# call each other with `yield from`, so that a format reads like the grammar that it is.
# Invariant: what a step finds depends on the text alone, never on where it was cut: each looks at a
# text that is long enough to decide, or complete.
# Never: knows a format, or tokens.


T = TypeVar("T")
Step = Generator[None, None, T]
Emit = Callable[[str], None]

MAX_NAME_CHARS = 128
"""Of a function's name with what may stand before it; a longer word is none."""
_NAME = re.compile(r"[A-Za-z0-9_.\-]*")


@dataclass(slots=True)
class CallDelta:
    """A part of a call: first its name and id, then its arguments, piece by piece."""

    index: int
    arguments: str = ""
    call_id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A part of the reasoning before an answer."""

    text: str


Part = str | ReasoningDelta | CallDelta


class TextReading:
    """One sequence's text, and what has been found in it.

    Args:
        schemas: of the functions that may be called, by their names; None is any object.
        new_call_id: makes a call's id.
        is_reasoning: the text begins as reasoning, whose beginning stands in the prompt.
    """

    def __init__(
        self,
        schemas: Mapping[str, Mapping[str, Any] | None],
        new_call_id: Callable[[], str],
        *,
        is_reasoning: bool = False,
    ) -> None:
        self.schemas = schemas
        self.text = ""
        """What is not reported yet."""
        self.is_ended = False
        """Nothing more comes."""
        self.is_reasoning = is_reasoning
        self.has_text = False
        """Some of the answer itself has been reported."""
        self.is_after_call = False
        """Nothing but space has come since the last call."""
        self.num_calls = 0
        self.parts: list[Part] = []
        self._new_call_id = new_call_id
        self._arguments: list[str] = []
        """Of the last call."""

    @property
    def has_whole_arguments(self) -> bool:
        """Those of the last call are an object, not the beginning of one."""
        try:
            return isinstance(msgspec.json.decode("".join(self._arguments)), dict)
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
            return False

    def more(self) -> Step[bool]:
        """Wait for more text; False if there is none."""
        if self.is_ended:
            return False
        yield
        return True

    def take(self, size: int) -> str:
        """Consume so much of the text."""
        piece, self.text = self.text[:size], self.text[size:]
        return piece

    def say(self, text: str) -> None:
        """Report text: of the answer, or of the reasoning that is under way."""
        if text and self.is_reasoning:
            self.parts.append(ReasoningDelta(text))
        elif text:
            self.parts.append(text)
            self.has_text = True
        self.is_after_call = self.is_after_call and not text

    def begin_call(self, name: str, size: int) -> None:
        """Report a call; what was read of the text so far is consumed."""
        self.parts.append(CallDelta(self.num_calls, "", self._new_call_id(), name))
        self.num_calls += 1
        self._arguments = []
        self.take(size)

    def argue(self, text: str) -> None:
        """Report a piece of the arguments of the call under way."""
        if text:
            self.parts.append(CallDelta(self.num_calls - 1, text))
            self._arguments.append(text)

    def skip_space(self, at: int, also: str = "") -> Step[int]:
        """Where the first character stands that is no space; the text's length at its end."""
        while True:
            rest = self.text[at:].lstrip(" \t\r\n" + also)
            if rest or not (yield from self.more()):
                return len(self.text) - len(rest)

    def starts(self, at: int, *literals: str) -> Step[str | None]:
        """Which of these stands there, the longest if several do; None if none does."""
        while True:
            rest = self.text[at:]
            is_open = any(len(rest) < len(one) and one.startswith(rest) for one in literals)
            if is_open and (yield from self.more()):
                continue
            return max((one for one in literals if rest.startswith(one)), key=len, default=None)

    def name(self, at: int) -> Step[int]:
        """Where the name that begins there ends; `at` if there is none."""
        while True:
            match = _NAME.match(self.text, at)
            end = match.end() if match else at
            is_whole = end < len(self.text) or end - at > MAX_NAME_CHARS
            if is_whole or not (yield from self.more()):
                return end

    def pass_until(self, marks: tuple[str, ...], emit: Emit) -> Step[str | None]:
        """Pass text on up to the first of the marks, which stays; None: the text has ended."""
        while True:
            hits = [(at, mark) for mark in marks if (at := self.text.find(mark)) >= 0]
            if hits:
                at, mark = min(hits)
                emit(self.take(at))
                return mark
            held = max(partial_match_chars(self.text, mark) for mark in marks)
            emit(self.take(len(self.text) - held))
            if not (yield from self.more()):
                emit(self.take(len(self.text)))
                return None

    def pass_object(self, emit: Emit, depth: int = 0) -> Step[bool]:
        """Pass a JSON object on as it is; False if the text ends within it.

        Args:
            emit: gets its pieces.
            depth: how many brackets are open already.
        """
        scanner = ObjectScanner(depth)
        while True:
            is_complete = scanner.feed(self.text)
            emit(self.take(scanner.num_new))
            if is_complete or not (yield from self.more()):
                return is_complete


def drop(_text: str) -> None:
    """Takes text that says nothing."""


class ObjectScanner:
    """Finds the end of a JSON object or list that comes in pieces."""

    _INSIDE = re.compile(r'["\\]')
    _OUTSIDE = re.compile(r'["{}\[\]]')

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._is_in_string = False
        self._num_skipped = 0
        """Characters of the next piece that a backslash has used up."""
        self.num_chars = 0
        """Characters read in all; num_new: of the last piece."""
        self.num_new = 0

    def feed(self, text: str) -> bool:
        """Read on; true if the object is complete. Nothing behind its end is read."""
        at = self._num_skipped
        is_complete = False
        while not is_complete:
            found = (self._INSIDE if self._is_in_string else self._OUTSIDE).search(text, at)
            if found is None:
                break
            at = found.end()
            if found[0] == "\\":
                at += 1
            elif found[0] == '"':
                self._is_in_string = not self._is_in_string
            else:
                self._depth += 1 if found[0] in "{[" else -1
                is_complete = self._depth == 0
        self.num_new = at if is_complete else len(text)
        self.num_chars += self.num_new
        self._num_skipped = max(at - len(text), 0)
        return is_complete


def partial_match_chars(text: str, mark: str) -> int:
    """Length of the longest end of `text` that is a beginning of `mark`, short of all of it."""
    start = text.find(mark[0], max(0, len(text) - len(mark) + 1))
    while start >= 0:
        if mark.startswith(text[start:]):
            return len(text) - start
        start = text.find(mark[0], start + 1)
    return 0


# --------------------------------------------------------------------------------------------------


# Values of arguments as models write them, to JSON.
#
# Owns: how a text becomes a value where a notation has no quotes.
# Invariant: whatever a model writes gives JSON; what is no value of any kind is a string.
# Never: reads calls.


def types_of(schema: object) -> set[str]:
    """The types that a parameter may have; empty where its schema does not say."""
    if not isinstance(schema, dict):
        return set()
    types, options = schema.get("type"), schema.get("anyOf")
    found = {types} if isinstance(types, str) else set()
    if isinstance(types, list):
        found |= {one for one in types if isinstance(one, str)}
    return found.union(*map(types_of, options)) if isinstance(options, list) else found


def as_json(text: str, types: set[str]) -> str:
    """A value that is written as JSON or as Python, if it may be that; else it is a text."""
    stripped = text.strip()
    if "string" in types:
        return "null" if stripped == "null" and "null" in types else quoted(text)
    try:
        return json.dumps(json.loads(stripped), ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return python_as_json(stripped if types else text)


def python_as_json(text: str) -> str:
    """A value that is written as Python; else it is a text."""
    names = {"true": "True", "false": "False", "null": "None"}
    try:
        value = ast.literal_eval(names.get(text.strip(), text.strip()))
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return quoted(text)


def quoted(text: str) -> str:
    """A text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def inner(text: str) -> str:
    """Text as it stands between the quotes of a JSON string."""
    return quoted(text)[1:-1]


# Calls whose parameters are elements: Qwen's coders, GLM, DeepSeek's DSML.
#
# Owns: these notations.
# Never: decides what is content.


@dataclass(frozen=True, slots=True)
class ElementSyntax:
    """Calls whose parameters are elements; a text stands for itself, without quotes."""

    name_begin: str
    """Before the function's name; empty where the mark is just before it."""
    name_end: str
    key_begin: str
    key_ends: tuple[str, ...]
    """One of them ends a key, whatever stands in it after the key, up to `value_begin`."""
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
DSML_ELEMENTS = ElementSyntax(
    name_begin='<｜DSML｜invoke name="',
    name_end='">',
    key_begin='<｜DSML｜parameter name="',
    key_ends=('"',),
    value_begin=">",
    value_ends=("</｜DSML｜parameter>", "</｜DSML｜invoke>"),
    end="</｜DSML｜invoke>",
)


def read_elements(reading: TextReading, at: int, *, syntax: ElementSyntax) -> Step[int | None]:
    """Parameters as elements; their types are those of the function's schema."""
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
        reading.take(len(syntax.key_begin if is_key else syntax.end))
        if not is_key:
            break
        key: list[str] = []
        if (yield from reading.pass_until(syntax.key_ends, key.append)) is None:
            return
        if (yield from reading.pass_until((syntax.value_begin,), drop)) is None:
            return
        reading.take(len(syntax.value_begin))
        text = "".join(key).strip()
        reading.argue(f"{separator}{quoted(text)}: ")
        separator = ", "
        own = types.get(text) if isinstance(types, dict) else None
        if not (yield from _element_value(reading, syntax, types_of(own))):
            return
    reading.argue("{}" if separator == "{" else "}")


def _element_value(reading: TextReading, syntax: ElementSyntax, types: set[str]) -> Step[bool]:
    """One value, up to its end, which is consumed if it is its own; false if cut off."""
    ends = syntax.value_ends
    if syntax.is_on_lines:
        if (yield from reading.starts(0, "\n")):
            reading.take(1)
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
        reading.take(len(mark))
    return True


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
