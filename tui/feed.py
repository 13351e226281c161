"""Connect the console to the daemon: frames in, actions out, reconnects.

Invariant: every failure to reach or understand the daemon is a FeedLost with a sentence for the
operator; `follow` never ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

import h11
import msgspec

from appliance.client.calls import JOIN_GROUP, DaemonUnreachable, PermissionRefused, start_hint
from appliance.observe.frame.protocol import Frame, RequestFrame
from tui.panels.header import version_problem
from tui.view import Caller, DaemonLink

FIRST_RETRY_S = 0.5
LAST_RETRY_S = 5.0
SILENCE_S = 5.0
"""Seconds without a byte after which the daemon hangs; frames come every second."""
MAX_LINE_BYTES = 8 << 20
_READ_BYTES = 1 << 16
_T = TypeVar("_T")


class FeedLost(Exception):
    """The daemon cannot be reached, or violates the protocol."""

    word = "DISCONNECTED"
    is_absent = False
    """Whether nothing listens there."""
    exit_code = DaemonUnreachable.exit_code
    """The exit code of a command that needs the daemon."""
    hint = "`penstock doctor` checks this machine"

    @property
    def link(self) -> DaemonLink:
        """The link's state after this error."""
        return DaemonLink(self.word, str(self), is_absent=self.is_absent)


class FeedAbsent(FeedLost):
    """No daemon listens there."""

    is_absent = True

    def __init__(self, why: str, socket_path: str) -> None:
        super().__init__(f"the daemon is not running ({why}): {socket_path}")
        self.hint = start_hint(Path(socket_path))


class FeedForbidden(FeedLost):
    """The daemon's socket does not let this user in."""

    exit_code = PermissionRefused.exit_code
    hint = JOIN_GROUP


class FeedIncompatible(FeedLost):
    """The daemon is of another release and sends frames that cannot be read."""

    word = "INCOMPATIBLE"
    hint = ""  # what it says is what to do


class _Version(msgspec.Struct):
    version: int


class _ErrorDetail(msgspec.Struct):
    message: str = ""


class _ErrorReply(msgspec.Struct):
    error: _ErrorDetail


class _Requests(msgspec.Struct):
    data: list[RequestFrame]


class _Exchange:
    """One HTTP/1.1 request and its reply on a connection of its own."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._parser = h11.Connection(h11.CLIENT)
        self.status = 0

    async def ask(self, method: str, target: str, content: bytes = b"") -> None:
        """Send the request and read the head of the reply into `status`."""
        headers = [("host", "penstock"), ("accept", "application/json"), ("connection", "close")]
        if method != "GET":
            headers.append(("content-length", str(len(content))))
        request = h11.Request(method=method, target=target, headers=headers)
        self._writer.write(self._parser.send(request) or b"")
        if content:
            self._writer.write(self._parser.send(h11.Data(data=content)) or b"")
        self._writer.write(self._parser.send(h11.EndOfMessage()) or b"")
        await self._writer.drain()
        while not isinstance(event := await self._next_event(), h11.Response):
            if isinstance(event, (h11.ConnectionClosed, h11.EndOfMessage)):
                raise FeedLost("the daemon closed the connection without an answer")
        self.status = event.status_code

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body of the reply as it comes."""
        while isinstance(event := await self._next_event(), h11.Data):
            yield bytes(event.data)

    async def body(self) -> bytes:
        """Read the whole body of the reply."""
        return b"".join([chunk async for chunk in self.chunks()])

    async def _next_event(self) -> h11.Event:
        data = None
        try:
            while (event := self._parser.next_event()) is h11.NEED_DATA:
                async with asyncio.timeout(SILENCE_S):
                    data = await self._reader.read(_READ_BYTES)
                self._parser.receive_data(data)
        except h11.RemoteProtocolError as error:
            # an end inside a reply is a lost daemon, anything else another program's socket
            what = (
                "the connection to the daemon was lost"
                if data == b""
                else f"the answer is not the daemon's: {error}"
            )
            raise FeedLost(what) from None
        if not isinstance(event, h11.Event):
            raise FeedLost("the answer is not the daemon's: it changes the protocol")
        return event


@asynccontextmanager
async def _exchange(socket_path: str) -> AsyncIterator[_Exchange]:
    """Connect; errors of the connection and of the `with` body become FeedLost."""
    writer = None
    try:
        async with asyncio.timeout(SILENCE_S):
            reader, writer = await asyncio.open_unix_connection(socket_path)
        yield _Exchange(reader, writer)
    except FileNotFoundError:
        raise FeedAbsent("no such socket", socket_path) from None
    except ConnectionRefusedError:
        raise FeedAbsent("connection refused", socket_path) from None
    except PermissionError:
        raise FeedForbidden(f"no permission to open {socket_path}") from None
    except TimeoutError:
        raise FeedLost(f"the daemon has been silent for {SILENCE_S:.0f} s") from None
    except OSError as error:
        raise FeedLost(f"lost the daemon: {error.strerror or error}") from None
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise FeedLost(f"the daemon's answer cannot be read: {error}") from None
    finally:
        if writer is not None:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


async def stream_frames(socket_path: str) -> AsyncGenerator[Frame, None]:
    """Yield frames as the daemon sends them, until it ends the stream.

    Raises:
        FeedLost: it cannot be reached, was lost, or hangs.
    """
    decoder = msgspec.json.Decoder(Frame)
    async with _exchange(socket_path) as exchange:
        await exchange.ask("GET", "/v1/penstock/stream")
        if exchange.status != 200:
            raise FeedLost(_refusal(exchange.status, await exchange.body()))
        pending = b""
        async for chunk in exchange.chunks():
            *lines, pending = (pending + chunk).split(b"\n")
            if len(pending) > MAX_LINE_BYTES:
                raise FeedLost("the daemon's frame is too long")
            for line in filter(bytes.strip, lines):
                yield _decoded(decoder, line)


async def first_frame(socket_path: str) -> Frame:
    """Read one frame."""
    async with aclosing(stream_frames(socket_path)) as frames:
        async for frame in frames:
            return frame
    raise FeedLost("the daemon closed the stream")


def encoded(frame: Frame) -> str:
    return msgspec.json.encode(frame).decode()


def _decoded(decoder: msgspec.json.Decoder[Frame], line: bytes) -> Frame:
    """Decode a frame after its version: one of another version may lack fields."""
    problem = version_problem(msgspec.json.decode(line, type=_Version).version)
    if problem:
        raise FeedIncompatible(problem)
    return decoder.decode(line)


async def follow(
    socket_path: str,
    on_frame: Callable[[Frame], object],
    on_lost: Callable[[FeedLost, float], object],
) -> None:
    """Pass frames on for ever; after each loss report why, and when it tries again."""
    retry_s = FIRST_RETRY_S
    while True:
        loss = FeedLost("the daemon closed the stream")
        try:
            async with aclosing(stream_frames(socket_path)) as frames:
                async for frame in frames:
                    on_frame(frame)
                    retry_s = FIRST_RETRY_S
        except FeedLost as error:
            loss = error
        on_lost(loss, retry_s)
        await asyncio.sleep(retry_s)
        retry_s = min(2 * retry_s, LAST_RETRY_S)


async def cancel(socket_path: str, request_id: str) -> str:
    """Ask the daemon to cancel a request; return the outcome as a sentence."""
    status, body = await _call(socket_path, "POST", f"{_request_path(request_id)}/cancel")
    if status == 200:
        return f"cancelled {request_id}"
    if status == 404:
        return f"{request_id} had ended already"
    raise FeedLost(_refusal(status, body))


async def drain(socket_path: str) -> str:
    """Ask the daemon to reject new requests; return the outcome."""
    await _change(socket_path, "/v1/penstock/drain")
    return "draining: new requests are rejected"


async def resume(socket_path: str) -> str:
    """Ask the daemon to accept requests again; return the outcome."""
    await _change(socket_path, "/v1/penstock/resume")
    return "resumed: new requests are accepted"


async def switch_roles(socket_path: str, change: Mapping[str, str | int]) -> str:
    """Ask the daemon for other roles or targets; return the outcome.

    Args:
        change: `roles`, `slo_ttft_ms` or `slo_itl_ms`; missing keys stay unchanged.
    """
    await _change(socket_path, "/v1/penstock/roles", msgspec.json.encode(change))
    return "set: " + ", ".join(f"{name} {value}" for name, value in change.items())


async def fetch_caller(socket_path: str) -> Caller:
    """Fetch the caller's user and role."""
    return await _read(socket_path, "/v1/penstock/whoami", Caller)


async def fetch_finished(socket_path: str, most: int) -> tuple[RequestFrame, ...]:
    """Fetch finished requests, among the newest `most` requests of any phase."""
    requests = await _read(socket_path, f"/v1/requests?limit={most}", _Requests)
    return tuple(request for request in requests.data if request.phase == "finished")


async def fetch_recording(socket_path: str, num_s: int) -> bytes:
    """Fetch what the daemon recorded in the last seconds."""
    async with _exchange(socket_path) as exchange:
        await exchange.ask("GET", f"/v1/penstock/recording?since={num_s}s")
        body = await exchange.body()
        if exchange.status != 200:
            raise FeedLost(_refusal(exchange.status, body))
        return body


async def fetch_request(socket_path: str, request_id: str) -> RequestFrame | None:
    """Fetch one live or finished request; None: the daemon does not know it any more."""
    async with _exchange(socket_path) as exchange:
        await exchange.ask("GET", _request_path(request_id))
        body = await exchange.body()
        return msgspec.json.decode(body, type=RequestFrame) if exchange.status == 200 else None


async def _read(socket_path: str, target: str, kind: type[_T]) -> _T:
    async with _exchange(socket_path) as exchange:
        await exchange.ask("GET", target)
        body = await exchange.body()
        if exchange.status != 200:
            raise FeedLost(_refusal(exchange.status, body))
        return msgspec.json.decode(body, type=kind)


async def _change(socket_path: str, target: str, content: bytes = b"") -> None:
    status, body = await _call(socket_path, "POST", target, content)
    if status != 200:
        raise FeedLost(_refusal(status, body))


async def _call(
    socket_path: str, method: str, target: str, content: bytes = b""
) -> tuple[int, bytes]:
    async with _exchange(socket_path) as exchange:
        await exchange.ask(method, target, content)
        return exchange.status, await exchange.body()


def _request_path(request_id: str) -> str:
    return f"/v1/requests/{quote(request_id, safe='')}"


def _refusal(status: int, body: bytes) -> str:
    """Return the daemon's message if it sent an error object."""
    try:
        message = msgspec.json.decode(body, type=_ErrorReply).error.message
    except (msgspec.MsgspecError, UnicodeError):
        message = ""
    return f"the daemon answered {status}{': ' if message else ''}{message}"
