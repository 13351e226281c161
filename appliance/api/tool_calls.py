"""Tool calls found in a model's text while it comes.

Owns: the text that may still turn out to be a call. Called by: stream, one parser per sequence.
Invariant: the parts do not depend on how the text was cut; a call is reported once it is known to
be of one of the request's functions, and text that is no such call stays text, marks included.
Never: knows tokens, or waits for the end of arguments before it passes them on.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

import msgspec

from appliance.api.tool_format import ToolFormat


@dataclass(slots=True)
class CallDelta:
    """A part of a call: first its name and id, then its arguments, piece by piece."""

    index: int
    arguments: str = ""
    call_id: str | None = None
    name: str | None = None


Part = str | CallDelta

_HEAD = re.compile(r'\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
"""How a call begins if it says its name first; any other is read when it is complete."""


class _Call(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()


class CallParser:
    """Reads one sequence's text.

    Args:
        tool_format: how the model writes calls.
        names: of the functions that may be called.
        is_parallel: there may be several calls; otherwise all ends with the first.
    """

    def __init__(
        self, tool_format: ToolFormat, names: Collection[str], *, is_parallel: bool
    ) -> None:
        self._format = tool_format
        self._names = names
        self._is_parallel = is_parallel
        self._text = ""
        """What is not reported yet."""
        self._block_at = 0
        """Where in it the JSON of a call should begin."""
        self._step = self._outside
        self._scanner = _ObjectScanner()
        self._has_text = False
        self._is_after_call = False
        self.num_calls = 0
        self.is_done = False
        """Nothing more is read: the one call that was allowed is complete."""

    def push(self, text: str) -> list[Part]:
        """Take more text; returns what is certain by now."""
        self._text += text
        parts: list[Part] = []
        while self._text and not self.is_done and self._step(parts):
            pass
        return parts

    def flush(self) -> list[Part]:
        """What is still held back, at the end."""
        rest, self._text = self._text, ""
        if self.is_done or self._step in (self._in_arguments, self._in_tail):
            return []
        if self._is_after_call and self._format.end.startswith(rest.strip()):
            return []
        return [rest] if rest else []

    def _outside(self, parts: list[Part]) -> bool:
        """No call is under way. Space is held back: before and after calls it is no content."""
        if self._is_after_call and self._skip_closers():
            return True
        text, mark = self._text, self._format.mark
        begins = text.lstrip()[:1] == "{"
        if begins and (self._is_after_call or not self._has_text) and self._has_loose_calls():
            return self._enter_block(text.index("{"))
        at = text.find(mark)
        safe = at if at >= 0 else len(text) - partial_match_chars(text, mark)
        safe = len(text[:safe].rstrip())
        if self._is_after_call and self._format.end.startswith(text.strip()):
            safe = 0  # it may become the mark that ends the call
        self._say(safe, parts)
        return at >= 0 and self._enter_block(at - safe + len(mark))

    def _has_loose_calls(self) -> bool:
        return self._format.is_bare or (self._format.is_list and self._is_after_call)

    def _skip_closers(self) -> bool:
        """Drop one mark that ends or parts calls."""
        rest = self._text.lstrip()
        for closer in (self._format.end, "]", ",", ";"):
            if closer and rest.startswith(closer):
                self._text = rest[len(closer) :]
                return True
        return False

    def _enter_block(self, at: int) -> bool:
        self._block_at = at
        self._scanner = _ObjectScanner()
        self._step = self._in_block
        return True

    def _say(self, size: int, parts: list[Part]) -> None:
        if size:
            parts.append(self._text[:size])
            self._text = self._text[size:]
            self._has_text, self._is_after_call = True, False

    def _in_block(self, parts: list[Part]) -> bool:
        """Behind the mark, before the name of the function is known."""
        text, at = self._text, self._block_at
        skipped = " \t\r\n[" if self._format.is_list else None
        start = len(text) - len(text[at:].lstrip(skipped))
        if start == len(text):
            return False
        if text[start] != "{":
            return self._leave_block(start, parts)
        head = _HEAD.match(text, start)
        if head and head[1] in self._names:
            self._begin_call(head[1], "", head.end(), parts)
            self._step = self._in_arguments
            return True
        if not self._scanner.feed(text[start + self._scanner.num_chars :]):
            return False
        end = start + self._scanner.num_chars
        call = self._whole_call(text[start:end])
        if call is None:
            return self._leave_block(end, parts)
        self._begin_call(*call, end, parts)
        self._end_call()
        return True

    def _leave_block(self, size: int, parts: list[Part]) -> bool:
        """It was no call."""
        self._say(size, parts)
        self._step = self._outside
        return True

    def _whole_call(self, text: str) -> tuple[str, str] | None:
        """Name and arguments of a call of one of the functions."""
        try:
            call = msgspec.json.decode(text, type=_Call)
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
            return None
        arguments = (bytes(call.arguments) or bytes(call.parameters) or b"{}").decode()
        if call.name not in self._names or not arguments.startswith("{"):
            return None
        return call.name, arguments

    def _begin_call(self, name: str, arguments: str, end: int, parts: list[Part]) -> None:
        call_id = self._format.new_call_id()
        parts.append(CallDelta(self.num_calls, arguments, call_id, name))
        self.num_calls += 1
        self._text = self._text[end:]
        self._scanner = _ObjectScanner()

    def _in_arguments(self, parts: list[Part]) -> bool:
        is_complete = self._scanner.feed(self._text)
        size = self._scanner.num_new
        parts.append(CallDelta(self.num_calls - 1, self._text[:size]))
        self._text = self._text[size:]
        if is_complete:
            self._scanner = _ObjectScanner(depth=1)
            self._step = self._in_tail
        return is_complete

    def _in_tail(self, parts: list[Part]) -> bool:
        """Between the end of the arguments and the end of the call's own object."""
        is_complete = self._scanner.feed(self._text)
        self._text = self._text[self._scanner.num_new :]
        if is_complete:
            self._end_call()
        return is_complete

    def _end_call(self) -> None:
        self._step = self._outside
        self._is_after_call = True
        self.is_done = not self._is_parallel


class _ObjectScanner:
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
