"""Read a model's text while it streams, in steps that wait for more.

Invariant: what a step finds depends on the text alone, never on where it was cut: each looks at
a text that is long enough to decide, or complete.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from engine.wire.not_json import NOT_JSON

T = TypeVar("T")
Step = Generator[None, None, T]
Emit = Callable[[str], None]

MAX_NAME_CHARS = 128
"""Maximum length of a function's name and the text before it."""
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
        is_reasoning: the text begins as reasoning, which the prompt began.
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
        """Say whether the last call's arguments are a complete object."""
        try:
            return isinstance(msgspec.json.decode("".join(self._arguments)), dict)
        except NOT_JSON:
            return False

    def more(self) -> Step[bool]:
        """Wait for more text; False if the text has ended."""
        if self.is_ended:
            return False
        yield
        return True

    def consume(self, size: int) -> str:
        """Consume `size` characters of the text."""
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
        self.consume(size)

    def argue(self, text: str) -> None:
        """Report a piece of the arguments of the call under way."""
        if text:
            self.parts.append(CallDelta(self.num_calls - 1, text))
            self._arguments.append(text)

    def skip_space(self, at: int, also: str = "") -> Step[int]:
        """Find the first character that is no space; the text's length if there is no such one."""
        while True:
            rest = self.text[at:].lstrip(" \t\r\n" + also)
            at = len(self.text) - len(rest)  # space that was seen is not looked at again
            if rest or not (yield from self.more()):
                return at

    def starts(self, at: int, *literals: str) -> Step[str | None]:
        """Find which of these begins there, the longest if several do; None if no one does."""
        while True:
            rest = self.text[at:]
            is_open = any(len(rest) < len(one) and one.startswith(rest) for one in literals)
            if is_open and (yield from self.more()):
                continue
            return max((one for one in literals if rest.startswith(one)), key=len, default=None)

    def name(self, at: int) -> Step[int]:
        """Find the end of the name that begins at `at`; `at` itself: no name."""
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
                emit(self.consume(at))
                return mark
            held = max(partial_match_chars(self.text, mark) for mark in marks)
            emit(self.consume(len(self.text) - held))
            if not (yield from self.more()):
                emit(self.consume(len(self.text)))
                return None

    def pass_object(self, emit: Emit, depth: int = 0) -> Step[bool]:
        """Pass a JSON object on unchanged; False if the text ends within it.

        Args:
            depth: brackets that are open already.
        """
        scanner = ObjectScanner(depth)
        while True:
            is_complete = scanner.feed(self.text)
            emit(self.consume(scanner.num_new))
            if is_complete or not (yield from self.more()):
                return is_complete


def drop(_text: str) -> None:
    """Ignore text that says nothing."""


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
    """Measure the longest end of `text` that begins `mark` without completing it."""
    start = text.find(mark[0], max(0, len(text) - len(mark) + 1))
    while start >= 0:
        if mark.startswith(text[start:]):
            return len(text) - start
        start = text.find(mark[0], start + 1)
    return 0
