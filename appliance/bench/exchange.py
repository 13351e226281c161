"""One streamed completion on a connection of its own: bytes out, stamped events in.

A load generator shares the machine with what it measures, so this reads just as much HTTP/1.1 and
as much of each server-sent event as a measurement needs, in one callback per read.
Owns: the framing, and the stamp of every event that carries a token.
Called by: load and interference, by way of samples.
Invariant: an event is stamped before it is parsed; whatever goes wrong is a sentence in `problem`.
Never: raises for what a server does, retries, or keeps a connection.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from appliance.address import Address, TcpAddress, UnixAddress
from engine.errors import ConfigError

MAX_HEAD_BYTES = 1 << 16


class Event(NamedTuple):
    """One server-sent event with at least one token."""

    at_ns: int
    num_tokens: int
    """1 where the server does not say which tokens the event has."""


@dataclass(slots=True)
class Reply:
    """What came back so far."""

    sent_ns: int
    status: int | None = None
    events: list[Event] = field(default_factory=list)
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    ended_ns: int | None = None
    problem: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    token_ids: list[int] | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw | None = None


class _Error(msgspec.Struct):
    message: str = ""


class _ErrorBody(msgspec.Struct):
    error: _Error


_event_of = msgspec.json.Decoder(_Event).decode


async def exchange(address: Address, request: bytes, deadline_s: float) -> Reply:
    """Send a request and read its reply until it ends, or until so many seconds have passed.

    Returns:
        What came; a reply that the deadline cut off has neither an end nor a problem.
    """
    loop = asyncio.get_running_loop()
    reply = Reply(sent_ns=time.perf_counter_ns())
    line = _Line(request, reply, loop.create_future())
    try:
        async with asyncio.timeout(deadline_s):
            match address:
                case UnixAddress(path):
                    await loop.create_unix_connection(lambda: line, str(path))
                case TcpAddress(host, port):
                    await loop.create_connection(lambda: line, host, port)
                case _:
                    raise ConfigError(
                        "a benchmark does not go through ssh",
                        where=str(address),
                        hint="run it on that machine",
                    )
            await line.ended
    except TimeoutError:
        pass  # the caller knows whether that was meant
    except OSError as error:
        reply.problem = f"cannot connect: {error.strerror or error}"
    finally:
        line.hang_up()
    return reply


class _Line(asyncio.Protocol):
    """Both directions of one exchange."""

    def __init__(self, request: bytes, reply: Reply, ended: asyncio.Future[None]) -> None:
        self.ended = ended
        self._request = request
        self._reply = reply
        self._transport: asyncio.Transport | None = None
        self._raw = bytearray()
        """Read and not yet unframed."""
        self._body = bytearray()
        """Unframed and not yet a whole line."""
        self._is_chunked = False
        self._is_stream = False
        self._bytes_left: int | None = None
        """Of a body that announced its length."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now_ns = time.perf_counter_ns()
        if self.ended.done():
            return
        self._raw += data
        try:
            if self._reply.status is None and not self._take_head():
                return
            is_last = self._take_chunks() if self._is_chunked else self._take_all()
            if self._is_stream and self._take_events(now_ns):
                self._end(now_ns)
            elif is_last:
                self._end_early(now_ns)
        except (ValueError, IndexError, msgspec.MsgspecError) as error:
            self._reply.problem = f"the reply cannot be read: {error}"
            self._end(now_ns)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self._end_early(time.perf_counter_ns())

    def hang_up(self) -> None:
        """Close at once, which makes a server cancel what it still computes."""
        if self._transport is not None:
            self._transport.abort()

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
        kind = headers.get(b"content-type", b"")
        self._is_stream = self._reply.status == 200 and b"text/event-stream" in kind
        if b"content-length" in headers:
            self._bytes_left = int(headers[b"content-length"])
        return True

    def _take_chunks(self) -> bool:
        """Unframe whole chunks; True after the last one."""
        raw, start = self._raw, 0
        is_last = False
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

    def _take_events(self, now_ns: int) -> bool:
        """Read whole lines; True after the event that says that it is the last."""
        end = self._body.rfind(b"\n") + 1
        lines = bytes(self._body[:end]).split(b"\n")
        del self._body[:end]
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return True
            self._take_event(_event_of(data), now_ns)
        return self._reply.problem is not None

    def _take_event(self, event: _Event, now_ns: int) -> None:
        reply = self._reply
        num_tokens = 0
        for choice in event.choices:
            ids = choice.token_ids
            num_tokens += bool(choice.text) if ids is None else len(ids)
        if num_tokens:
            reply.events.append(Event(now_ns, num_tokens))
        if event.usage is not None:
            reply.prompt_tokens = event.usage.prompt_tokens
            reply.output_tokens = event.usage.completion_tokens
        if event.error is not None:
            reply.problem = _message(b'{"error":%b}' % bytes(event.error)) or "it failed"

    def _end_early(self, now_ns: int) -> None:
        """The reply is over and no event has said so."""
        reply = self._reply
        if reply.status is None:
            reply.problem = "the server closed the connection without an answer"
        elif reply.status != 200:
            reply.problem = _message(bytes(self._body)) or f"HTTP {reply.status}"
        elif not self._is_stream:
            reply.problem = "the server does not stream"
        else:
            reply.problem = "the server closed the connection before the end"
        self._end(now_ns)

    def _end(self, now_ns: int) -> None:
        self._reply.ended_ns = now_ns
        self.ended.set_result(None)


def _message(body: bytes) -> str:
    """The message of an error object; empty if it is none."""
    try:
        return msgspec.json.decode(body, type=_ErrorBody).error.message
    except msgspec.MsgspecError:
        return ""
