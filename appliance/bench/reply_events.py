"""Read a streamed reply of /v1/completions into timestamped events.

A load generator shares the machine with what it measures, so this reads just as much HTTP/1.1 and
as much of each server-sent event as a measurement needs.
Invariant: however the bytes are cut up, the same events come out, each with the stamp of the read
that completed it; whatever a server does wrong is a sentence in `problem`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from engine.wire.not_json import NOT_JSON

MAX_HEAD_BYTES = 1 << 16


class Event(NamedTuple):
    """One server-sent event with at least one token."""

    at_ns: int
    num_tokens: int
    """1 where the server does not say which tokens the event has."""


@dataclass(slots=True)
class ReceivedReply:
    """What came back so far."""

    sent_ns: int
    status: int | None = None
    events: list[Event] = field(default_factory=list)
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    """Prompt tokens that the server had computed before; None: it does not say."""
    output_tokens: int | None = None
    token_ids: list[int] = field(default_factory=list)
    """The answer's tokens; empty if the server does not say."""
    ended_ns: int | None = None
    """When the server said that this is all; None if it has not."""
    problem: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    token_ids: list[int] | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


class _Error(msgspec.Struct):
    message: str = ""


class _ErrorBody(msgspec.Struct):
    error: _Error


class ReplyReader:
    """Reads one reply; is over once nothing more can come."""

    def __init__(self, reply: ReceivedReply) -> None:
        self.is_over = False
        self._reply = reply
        self._decode = msgspec.json.Decoder(_Event).decode
        self._raw = bytearray()
        """Read and not yet unframed."""
        self._body = bytearray()
        """Unframed and not yet a whole line."""
        self._is_chunked = False
        self._is_stream = False
        self._bytes_left: int | None = None
        """Unread bytes of a body with a known length."""

    def feed(self, data: bytes, now_ns: int) -> None:
        self._raw += data
        try:
            if self._reply.status is None and not self._take_head():
                return
            is_last = self._take_chunks() if self._is_chunked else self._take_all()
            if self._is_stream:
                self._take_events(now_ns)
        except (*NOT_JSON, ValueError, IndexError) as error:
            self._reply.problem = f"the reply cannot be read: {error}"
            self.is_over = True
        else:
            if is_last:
                self.close()

    def close(self) -> None:
        """End the reply; note what is missing."""
        reply, self.is_over = self._reply, True
        if reply.ended_ns is not None or reply.problem is not None:
            return
        if reply.status is None:
            reply.problem = "the server closed the connection without an answer"
        elif reply.status != 200:
            reply.problem = _message(bytes(self._body)) or f"HTTP {reply.status}"
        elif not self._is_stream:
            reply.problem = "the server does not stream"
        else:
            reply.problem = "the server closed the connection before the end"

    def _take_head(self) -> bool:
        end = self._raw.find(b"\r\n\r\n")
        if end < 0:
            if len(self._raw) > MAX_HEAD_BYTES:
                raise ValueError("its head has no end")
            return False
        start_line, *lines = bytes(self._raw[:end]).lower().split(b"\r\n")
        del self._raw[: end + 4]
        self._reply.status = int(start_line.split(b" ")[1])
        headers = dict(line.split(b":", 1) for line in lines)
        self._is_chunked = b"chunked" in headers.get(b"transfer-encoding", b"")
        is_sse = b"text/event-stream" in headers.get(b"content-type", b"")
        self._is_stream = is_sse and self._reply.status == 200
        if b"content-length" in headers:
            self._bytes_left = int(headers[b"content-length"])
        return True

    def _take_chunks(self) -> bool:
        """Unframe whole chunks; True after the last one."""
        raw, start, is_last = self._raw, 0, False
        while not is_last and (end := raw.find(b"\r\n", start)) >= 0:
            size = int(raw[start:end].partition(b";")[0], 16)
            is_last = size == 0
            if not is_last and len(raw) < end + 4 + size:
                break
            self._body += raw[end + 2 : end + 2 + size]
            start = end + 4 + size
        del raw[:start]
        return is_last

    def _take_all(self) -> bool:
        """Take what is there; True once the announced length has come."""
        self._body += self._raw
        if self._bytes_left is not None:
            self._bytes_left -= len(self._raw)
        self._raw.clear()
        return self._bytes_left is not None and self._bytes_left <= 0

    def _take_events(self, now_ns: int) -> None:
        """Read whole lines."""
        end = self._body.rfind(b"\n") + 1
        lines = bytes(self._body[:end]).split(b"\n")
        del self._body[:end]
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data == b"[DONE]":
                    self._reply.ended_ns = now_ns
                else:
                    self._take_event(self._decode(data), now_ns)

    def _take_event(self, event: _Event, now_ns: int) -> None:
        reply, num_tokens = self._reply, 0
        for choice in event.choices:
            num_tokens += bool(choice.text) if choice.token_ids is None else len(choice.token_ids)
            reply.token_ids += choice.token_ids or ()
        if num_tokens:
            reply.events.append(Event(now_ns, num_tokens))
        if (usage := event.usage) is not None:
            reply.prompt_tokens, reply.output_tokens = usage.prompt_tokens, usage.completion_tokens
            if usage.prompt_tokens_details is not None:
                reply.cached_tokens = usage.prompt_tokens_details.cached_tokens
        error = bytes(event.error)
        if error not in (b"", b"null"):
            what = _message(b'{"error":%b}' % error)
            reply.problem = what or "the server broke off with an error"


def _message(body: bytes) -> str:
    """Read the message of an error object; empty for another body."""
    try:
        return msgspec.json.decode(body, type=_ErrorBody).error.message
    except NOT_JSON:
        return ""
