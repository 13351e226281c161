"""Serve one HTTP/1.1 connection, and bound slow, silent or absent clients.

A client that shuts down its writing side and waits is served to the end on the Unix socket. On TCP
the kernel cannot tell that from one that is gone, so there it counts as gone.

Owns: sockets that have had their 503 and wait for their clients to hang up; how many there were;
how long each phase of a connection may last, and what is said to who exceeds it.
Invariant: a connection that costs something makes progress, or is waited for by nobody but us.
Never: sends 408 or 409, which OpenAI's clients answer by sending it all again.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import http
import logging
import select
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import h11
import msgspec
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from appliance.api.wire import error_object
from appliance.http.access import ClientLine, Credentials, headers_too_large
from appliance.http.rejected_connections import too_many_connections
from engine.errors import RequestError

log = logging.getLogger("penstock.http")
log.setLevel(logging.ERROR)
"""What a client does wrong is said to the client; one that floods must not flood the journal."""


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Seconds that clients may take."""

    head_s: float = 10.0
    """From the connection, or a head's first byte, to its last."""
    body_s: float = 30.0
    """For each stretch of a body: the rest, or `min_bytes_per_s`."""
    unread_s: float = 30.0
    """The same for a reply that piles up here."""
    linger_s: float = 5.0
    """For the rest of a body that has been answered already."""
    idle_s: float = 60.0
    """Between requests."""
    min_bytes_per_s: float = 1024.0


RefuseEarly = Callable[[bytes, Credentials], bytes | None]
"""What to reply to a whole request of somebody's without having it parsed; None: nothing."""


class ConnectionPhase(enum.Enum):
    """What a connection waits for."""

    HEAD = enum.auto()
    BODY = enum.auto()
    LINGER = enum.auto()
    UNREAD = enum.auto()
    """For the client to take what has been written, at last also after the close."""
    IDLE = enum.auto()
    """For a next request; uvicorn's own timer ends it."""
    REPLY = enum.auto()
    """For us."""


SILENT_S = 5.0
"""After which a connection that has asked nothing yields to another."""
_UNTIMED = (ConnectionPhase.IDLE, ConnectionPhase.REPLY)


@dataclass(frozen=True, slots=True)
class _ByteMark:
    """How far a connection was when it was looked at."""

    phase: ConnectionPhase
    num_requests: int
    since: float
    num_bytes: int
    """Received, or less the more is unread: it grows with whatever the client does."""


class _ReplyTransport(asyncio.Transport):
    """The transport as uvicorn's reply has it, which closes it at once after the last one."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        super().__init__()
        self.write = transport.write  # type: ignore[method-assign]
        self.is_closing = transport.is_closing  # type: ignore[method-assign]
        self.close = close  # type: ignore[method-assign]


class ClientProtocol(H11Protocol):
    """HTTP/1.1 that knows its client.

    Each scope's state has its Line.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        limits: ClientLimits,
        credentials: Credentials | None,
        check_key: Callable[[str], None],
        refuse_early: RefuseEarly,
    ) -> None:
        """Wait for a transport.

        Args:
            config: uvicorn's.
            server_state: uvicorn's; all connections.
            limits: how long what may last.
            credentials: whose it is; None on TCP.
            check_key: raises RequestError if the key of that name may have no more connections.
            refuse_early: see RefuseEarly.
        """
        # Uvicorn copies the state into the scope of each request on the connection.
        calls = (self._on_key, self._write_part, self._hang_up, self._num_announced)
        line = ClientLine(credentials, *calls)
        super().__init__(config, server_state, {"line": line})
        self.logger = log
        self.credentials = credentials
        self.key: str | None = None
        """Name of the last valid key that was shown."""
        self._check_key = check_key
        self._refuse_early = refuse_early
        self._limits = limits
        self._is_half_closed = False
        self._is_lingering = False
        """The last reply is out, and what is still to come of its request is dropped."""
        self._num_received = 0
        self._num_requests = 0
        self._mark: _ByteMark | None = None
        self._handshake: tuple[float, socket.socket] | None = None
        """Since when, and on which socket, TLS is being agreed on."""

    def shakes_hands(self, connection: socket.socket) -> None:
        """It has no transport until TLS is agreed on, and until then others may have its place."""
        self._handshake = time.monotonic(), connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """From here on the client's time runs."""
        super().connection_made(transport)
        self._reply_transport = _ReplyTransport(transport, self._close_after_reply)
        self._socket: socket.socket = transport.get_extra_info("socket")
        self._mark = self._observe(time.monotonic())
        self._opened_at = self._mark.since
        self._handshake = None

    def data_received(self, data: bytes) -> None:
        """Count, for the slow; say at once what a flood would be told anyway."""
        self._num_received += len(data)
        if self._is_lingering:
            return
        is_between = self.conn.our_state is h11.IDLE and not self.conn.trailing_data[0]
        if (
            is_between
            and self.credentials is not None
            and self._phase() is not ConnectionPhase.UNREAD
        ):
            reply = self._refuse_early(data, self.credentials)
            if reply is not None:
                self.transport.write(reply)
                self._num_requests += 1
                self._wait_for_next()
                return
        super().data_received(data)
        if self.conn.their_state is h11.SEND_BODY and self._num_announced():
            # of a chunk that is too large nothing may ever come: who reads the body looks now
            self.cycle.message_event.set()

    def handle_events(self) -> None:
        """As uvicorn does; a reply that has begun has yet to run, and closes as we do."""
        super().handle_events()
        if self.cycle is not None:
            self.cycle.transport = self._reply_transport

    def _close_after_reply(self) -> None:
        """Close; while more of the request is on its way, our side alone.

        What comes to a socket that is closed makes the close a reset, which takes the reply with
        it. look() ends the wait if the client does not.
        """
        if self.conn.their_state is not h11.SEND_BODY:
            self.transport.close()
            return
        self._is_lingering = True
        if self.transport.can_write_eof():  # not on TLS
            self.transport.write_eof()

    def _num_announced(self) -> int:
        """Bytes that are left of the chunk that has begun; h11 has no word for them but its own."""
        num_bytes: int = getattr(self.conn._reader, "_bytes_in_chunk", 0)
        return num_bytes

    def _wait_for_next(self) -> None:
        """For a request on a connection of which uvicorn does not know that it had one."""
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection for a reply that somebody still waits for."""
        is_waiting = (
            self._phase() in (ConnectionPhase.REPLY, ConnectionPhase.UNREAD) and not self._is_gone()
        )
        self._is_half_closed = is_waiting and self._socket.family == socket.AF_UNIX
        return self._is_half_closed

    def on_response_complete(self) -> None:
        """Nothing follows on a connection that is half closed, but what came before that."""
        self._num_requests += 1
        super().on_response_complete()
        if self._is_lingering:  # nothing follows
            self._unset_keepalive_if_required()
        if self._is_half_closed and self.cycle.response_complete:
            self.transport.close()

    def shutdown(self) -> None:
        """End when the reply does; at once if there is none."""
        if not self.transport.is_closing():
            super().shutdown()

    def retire(self) -> bool:
        """End with the reply that is due; False while there may come one more request.

        A close that crosses a request on its way would be a refusal. So who is between two
        requests, or has connected and not asked yet, may ask once more and is told then.
        """
        if self._mark is None or self._phase() in (
            ConnectionPhase.HEAD,
            ConnectionPhase.BODY,
            ConnectionPhase.IDLE,
        ):
            return False
        if not self._is_lingering:
            self.shutdown()
        return True

    def look(self, now: float) -> None:
        """Cut the connection off if its client is gone or takes too long."""
        if (mark := self._mark) is None:
            return  # accepted a moment ago
        if (self._is_half_closed or self.flow.read_paused) and self._is_gone():
            self.transport.abort()
            return
        seen = self._observe(now)
        if seen.phase is not mark.phase or seen.num_requests != mark.num_requests:
            self._mark = seen
            return
        if seen.phase in _UNTIMED or now - mark.since <= self._allowed_s(seen.phase):
            return
        num_moved = seen.num_bytes - mark.num_bytes
        is_steady = num_moved >= self._limits.min_bytes_per_s * (now - mark.since)
        if is_steady and seen.phase in (ConnectionPhase.BODY, ConnectionPhase.UNREAD):
            self._mark = seen
        else:
            self._cut(seen.phase)

    @property
    def spare_since(self) -> float | None:
        """Since when another may have its place; None if it has a claim to it.

        Without a key it never had one: a head that does not end, or a row of probes, would hold a
        place for nothing. Otherwise it has one but between two requests, and before the first for
        SILENT_S: whoever connects in order to ask has asked by then.
        """
        mark = self._mark
        if mark is None:
            return None if self._handshake is None else self._handshake[0]
        if self.transport.is_closing():
            return None
        if self.credentials is None and self.key is None:
            return self._opened_at
        if not self._num_received:
            is_new = time.monotonic() - self._opened_at < SILENT_S
            return None if is_new else self._opened_at
        is_idle = mark.phase is ConnectionPhase.IDLE and self._phase() is ConnectionPhase.IDLE
        return mark.since if is_idle else None

    def give_way(self) -> bool:
        """Another has the place: say so to who has asked nothing, or not all, and close.

        Between two requests nothing is said: it would be taken for the reply to the next one.

        Returns:
            whether it was said.
        """
        if self._mark is None and self._handshake is not None:
            with contextlib.suppress(OSError):  # the handshake fails of it, and closes the socket
                self._handshake[1].shutdown(socket.SHUT_RDWR)
            self._handshake = None
            return False
        if self._phase() is ConnectionPhase.IDLE:
            self._hang_up()
            return False
        self._refuse(too_many_connections())
        return True

    def send_400_response(self, msg: str) -> None:
        """What is not HTTP gets an error object like everything else, and is cut off."""
        cause = sys.exception()  # uvicorn calls this while it handles h11's
        if isinstance(cause, h11.RemoteProtocolError) and cause.error_status_hint == 431:
            self._refuse(headers_too_large())
        else:
            what = "this is not an HTTP request that can be read"
            self._refuse(RequestError(what, code="invalid_http"))

    def _unsupported_upgrade_warning(self) -> None:
        """An upgrade may be ignored, and is."""

    async def _write_part(self, part: bytes) -> None:
        """Send what is not the end of a body without a length, once its head is out.

        The bytes are those of ASGI's message for it. But that passes through every layer, and each
        token of each stream comes this way.
        """
        if self.flow.write_paused and not self.cycle.disconnected:
            await self.flow.drain()
        if part and not self.cycle.disconnected:
            is_chunked = self.scope["http_version"] == "1.1"
            self.transport.write(b"%x\r\n%b\r\n" % (len(part), part) if is_chunked else part)

    def _hang_up(self) -> None:
        """End it now, whatever has not been read; what is still sent on it goes nowhere."""
        self.transport.abort()

    def _on_key(self, name: str | None) -> None:
        if name is not None and name != self.key:
            self._check_key(name)
            self.key = name

    def _phase(self) -> ConnectionPhase:
        is_answered = self.cycle is None or self.cycle.response_complete
        if self.flow.write_paused or self.transport.is_closing():
            return ConnectionPhase.UNREAD
        if self.conn.their_state is h11.SEND_BODY:
            if is_answered or self._is_lingering:
                return ConnectionPhase.LINGER
            # While reading is paused it is our turn, however little has come.
            return ConnectionPhase.REPLY if self.flow.read_paused else ConnectionPhase.BODY
        if not is_answered:
            return ConnectionPhase.REPLY
        is_new = self.cycle is None and not self._num_requests
        has_begun = is_new or bool(self.conn.trailing_data[0])
        return ConnectionPhase.HEAD if has_begun else ConnectionPhase.IDLE

    def _observe(self, now: float) -> _ByteMark:
        num_bytes = self._num_received
        phase = self._phase()
        if phase is ConnectionPhase.UNREAD:
            num_bytes = -self.transport.get_write_buffer_size()
        return _ByteMark(phase, self._num_requests, now, num_bytes)

    def _allowed_s(self, phase: ConnectionPhase) -> float:
        return {
            ConnectionPhase.HEAD: self._limits.head_s,
            ConnectionPhase.BODY: self._limits.body_s,
            ConnectionPhase.LINGER: self._limits.linger_s,
            ConnectionPhase.UNREAD: self._limits.unread_s,
        }[phase]

    def _cut(self, phase: ConnectionPhase) -> None:
        if phase is ConnectionPhase.UNREAD:
            self.transport.abort()
        elif phase is ConnectionPhase.LINGER or not self._num_received:
            self.transport.close()
        else:
            part = "head" if phase is ConnectionPhase.HEAD else "body"
            what = f"the request's {part} did not come in time"
            self._refuse(RequestError(what, code="request_timeout"))

    def _is_gone(self) -> bool:
        """Whether the client has hung up, also where no read would tell."""
        # Unix sockets say when both directions are shut; on TCP all there is to see is its FIN.
        is_unix = self._socket.family == socket.AF_UNIX
        poll = select.poll()
        poll.register(self._socket.fileno(), 0 if is_unix else select.POLLRDHUP)
        return bool(poll.poll(0))

    def _refuse(self, error: RequestError) -> None:
        """Say it if a reply can still begin, and close."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = msgspec.json.encode(error_object(error))
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ]
            reason = http.HTTPStatus(error.status).phrase.encode()
            for event in (
                h11.Response(status_code=error.status, headers=headers, reason=reason),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None and not self.cycle.response_complete:
            # Its handler may be about to write: let it find its client gone, now.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            self.flow.resume_writing()
        self.transport.close()
