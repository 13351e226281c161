"""Serve one HTTP/1.1 connection, and bound slow, silent or absent clients.

A client that shuts down its writing side and waits is served to the end; over TLS it has left.

OpenAI's clients answer 408 and 409 by sending it all again: neither is sent.

Invariant: a connection that holds resources makes progress, or is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import http
import logging
import re
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import h11
import msgspec
from starlette.types import Scope
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from appliance.api.core.wire import KeptWords, error_object
from appliance.daemon.survival.departures import has_left
from appliance.daemon.survival.journal import VERSION, Head, Journal
from appliance.daemon.survival.keeper_channel import REPLY, notify, unused_name
from appliance.daemon.survival.kept_replies import LeftReply, ReplyTransport, forget
from appliance.daemon.survival.reply_file import ReplyFile
from appliance.http.access import Credentials
from appliance.http.bursts import Bursts
from appliance.http.gate import (
    KEY_HEADERS,
    MAX_HEAD_BYTES,
    SECRETS,
    ClientLine,
    headers_too_large,
    key_digests,
)
from appliance.http.strict_heads import read_strictly
from engine.errors import RequestError, Unavailable

log = logging.getLogger("penstock.http")
log.setLevel(logging.ERROR)
"""What a client does wrong is said to the client; one that floods must not flood the journal."""


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Time limits for clients, in seconds."""

    head_s: float = 10.0
    """Maximum time from the connection, or a head's first byte, to its last."""
    body_s: float = 30.0
    """Maximum time for the rest of a body, or for `min_bytes_per_s` of it."""
    unread_s: float = 30.0
    """Maximum time for each stretch of a reply that the client does not read."""
    linger_s: float = 5.0
    """Maximum time for the rest of a body that has been answered already."""
    idle_s: float = 60.0
    """Maximum time between requests."""
    min_bytes_per_s: float = 1024.0


class ConnectionPhase(enum.Enum):
    """The phases of a connection, by what it waits for."""

    HEAD = enum.auto()
    BODY = enum.auto()
    LINGER = enum.auto()
    UNREAD = enum.auto()
    """The client must read what has been written, possibly after the close."""
    IDLE = enum.auto()
    """The next request; uvicorn's own timer ends this phase."""
    REPLY = enum.auto()
    """The daemon's reply."""


_KEY = re.compile(
    rb"\r\n(?:%s):[ \t]*([^\r\n]+)" % b"|".join(map(re.escape, KEY_HEADERS)), re.IGNORECASE
)
SILENT_S = 5.0
"""After which a connection that has asked nothing yields to another."""
_UNTIMED = (ConnectionPhase.IDLE, ConnectionPhase.REPLY)


@dataclass(frozen=True, slots=True)
class _ByteMark:
    """A connection's progress at one look."""

    phase: ConnectionPhase
    num_requests: int
    since: float
    num_bytes: int
    """Bytes received minus bytes unread: it grows with any action of the client."""


def _do_nothing() -> None:
    """Close nothing: the connection is lost."""


class _ReplyTransport(asyncio.Transport):
    """The transport as uvicorn's reply has it, which closes it at once after the last one."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        super().__init__()
        self.write = transport.write  # type: ignore[method-assign]
        self.is_closing = transport.is_closing  # type: ignore[method-assign]
        self.close = close  # type: ignore[method-assign]


class ClientProtocol(H11Protocol):
    """HTTP/1.1 protocol with per-client limits.

    Each scope's state has its ClientLine.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        limits: ClientLimits,
        credentials: Credentials | None,
        check_key: Callable[[str], None],
        bursts: Bursts,
        *,
        keeps: bool = False,
        left: LeftReply | None = None,
    ) -> None:
        """Wait for a transport.

        Args:
            server_state: uvicorn's; all connections.
            limits: time limits of the phases.
            credentials: the peer's; None on TCP.
            check_key: raises RequestError if the key of that name may have no more connections.
            bursts: of requests that begin to arrive, on all connections.
            keeps: whether replies are to outlive the daemon.
            left: the reply of a dead daemon that this connection is for.
        """
        # Uvicorn copies the state into the scope of each request on the connection.
        calls = (self._is_encrypted, self._on_key, self._write_part, self.hang_up)
        head = None if left is None else left.journal.head
        line = ClientLine(
            credentials,
            *calls,
            self._new_journal,
            self._keep,
            self._num_announced,
            frozenset() if head is None else frozenset(head.key_digests),
        )
        super().__init__(config, server_state, {"line": line})
        read_strictly(self.conn)
        self.logger = log
        self._keeps, self._left = keeps, left
        self._kept_name = "" if left is None else left.name
        """The keeper's name of the request that is being answered; empty: it is not kept."""
        self._journal: Journal | None = None if left is None else left.journal
        self.is_taken_up = left is not None and not left.is_answered
        """Whether a dead daemon's request is on its way to the router."""
        self.credentials = credentials
        self.key: str | None = None
        """Name of the last valid key that was sent."""
        self._check_key = check_key
        self._bursts = bursts
        self._turn: asyncio.Task[None] | None = None
        """Waits to begin a request of which something has come."""
        self._limits = limits
        self._is_half_closed = False
        self._is_lingering = False
        """The last reply is sent; the rest of its request is dropped."""
        self._num_received = 0
        self._num_requests = 0
        self._mark: _ByteMark | None = None
        self._handshake: tuple[float, socket.socket] | None = None
        """Start time and socket of the TLS handshake."""

    @property
    def is_left(self) -> bool:
        """Say whether a dead daemon accepted it."""
        return self._left is not None

    def shakes_hands(self, connection: socket.socket) -> None:
        """Note the TLS handshake; until it ends the connection may be evicted."""
        self._handshake = time.monotonic(), connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the client's time limits."""
        if self._keeps or self._left is not None:
            transport = ReplyTransport(transport, self._forget)
        super().connection_made(transport)
        self._reply_transport = _ReplyTransport(transport, self._close_after_reply)
        self._socket: socket.socket = transport.get_extra_info("socket")
        self._mark = self._observe(time.monotonic())
        self._opened_at = self._mark.since
        self._handshake = None
        if self._left is not None:
            self._take_up(self._left)

    def connection_lost(self, exc: Exception | None) -> None:
        """Have the keeper close its copy, too."""
        super().connection_lost(exc)
        self._forget(is_lost=True)
        self._drop_references()

    def _drop_references(self) -> None:
        """Drop what refers back here: collecting a burst's connections would stop the loop."""
        self.app_state = {}
        self._reply_transport.close = _do_nothing  # type: ignore[method-assign]
        if isinstance(self.transport, ReplyTransport):
            self.transport.when_forgotten = _do_nothing

    def _take_up(self, left: LeftReply) -> None:
        """Send what is unsent, and a dead daemon's request through the code that answers it."""
        self._num_received = 1
        self._open_file(left.journal, left.fd)
        if left.is_answered:
            self.loop.call_soon(self._end_kept)
        else:
            self.loop.call_soon(super().data_received, left.journal.request)

    def _open_file(self, journal: Journal, fd: int = -1) -> ReplyFile:
        transport = cast(ReplyTransport, self.transport)
        calls = (self.pause_writing, self.resume_writing)
        transport.file = ReplyFile(self._socket, journal, *calls, fd)
        return transport.file

    def _new_journal(self) -> Journal | None:
        """Return a dead daemon's journal, or a new one where the reply outlives this daemon."""
        if self._left is not None:
            return self._left.journal
        is_busy = self._kept_name or self.transport.get_write_buffer_size()
        return Journal() if self._keeps and not is_busy else None

    def _keep(self, scope: Scope, journal: Journal, words: KeptWords, body: bytes) -> None:
        """Give the keeper an admitted request's socket, reply and journal."""
        if self._left is not None:
            self._left.on_failed = lambda: None  # the service writes its row from now on
            self.is_taken_up = False
            return
        if self._socket.fileno() < 0:  # the client has left
            journal.close()
            return
        try:
            request = [*_head_lines(scope, len(body)), body]
            journal.open(self._head(scope, words), request, words.request_id)
            file = self._open_file(journal)
        except OSError as error:
            about = "request %s ends with the daemon: %s"
            logging.getLogger("penstock").warning(about, words.request_id, error.strerror)
            journal.close()
            return
        name, fds = unused_name(REPLY), (self._socket.fileno(), file.fd, journal.fd)
        if notify(*fds, FDSTORE=1, FDNAME=name):
            self._kept_name, self._journal = name, journal
        else:  # the channel has told why
            cast(ReplyTransport, self.transport).end_file()
            journal.close()

    def _head(self, scope: Scope, words: KeptWords) -> Head:
        who = self.credentials
        credentials = None if who is None else (who.uid, who.gid, who.pid, tuple(who.gids))
        failure, ping = words.failure, words.ping
        if scope["http_version"] == "1.1":
            failure = failure and _chunk(failure) + b"0\r\n\r\n"
            ping = ping and _chunk(ping)
        digests = () if who is not None else tuple(key_digests(scope))
        return Head(VERSION, failure, ping, words.model, credentials, digests)

    def _end_kept(self) -> None:
        """Give up what is kept once all is sent; a dead daemon's connection closes then."""
        file = cast(ReplyTransport, self.transport).file
        if self._journal is not None:
            self._journal.complete()
        if self._left is not None:
            self.transport.close()
        elif file is not None:
            file.when_sent(self._forget)

    def _forget(self, *, is_lost: bool = False) -> None:
        if not self._kept_name:
            return
        if self._left is not None:
            self._left.on_failed()  # which looks whether the client is there: before the shutdown
        forget(self._kept_name, self._socket if is_lost or self.transport.is_closing() else None)
        self._kept_name = ""
        if self._journal is not None:
            self._journal.close()
        cast(ReplyTransport, self.transport).end_file()

    def data_received(self, data: bytes) -> None:
        """Count the bytes; let requests begin in turns."""
        if self._left is not None:
            return  # nothing but an end is expected of its client
        self._num_received += len(data)
        if self._is_lingering:
            return
        is_between = self.conn.our_state is h11.IDLE and not self.conn.trailing_data[0]
        if not is_between or data.startswith(b"GET ") or self._bursts.begins_at_once():
            self._parse(data)
        else:
            self.flow.pause_reading()
            self._unset_keepalive_if_required()
            self._turn = self.loop.create_task(self._begin_in_turn(data))

    async def _begin_in_turn(self, data: bytes) -> None:
        key = _KEY.search(data, 0, MAX_HEAD_BYTES)
        await self._bursts.begin((self.caller, key and key[1]))
        self._turn = None
        if not self.transport.is_closing():
            self.flow.resume_reading()
            self._parse(data)

    def _parse(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.SEND_BODY and self._num_announced():
            # a too large chunk may never arrive: wake the body's reader to check it now
            self.cycle.message_event.set()

    def handle_events(self) -> None:
        """Handle events as uvicorn does; replies then close through our transport."""
        super().handle_events()
        if self.cycle is not None:
            self.cycle.transport = self._reply_transport

    def _close_after_reply(self) -> None:
        """Close the connection; while more of the request arrives, close only our side.

        Data arriving at a closed socket turns the close into a reset, which can destroy the reply.
        look() ends the wait if the client does not.
        """
        if self.conn.their_state is not h11.SEND_BODY:
            self.transport.close()
            return
        self._is_lingering = True
        if self.transport.can_write_eof():  # not on TLS
            self.transport.write_eof()

    def _num_announced(self) -> int:
        """Return the bytes left of the current chunk; h11 offers only a private field."""
        num_bytes: int = getattr(self.conn._reader, "_bytes_in_chunk", 0)
        return num_bytes

    def _wait_for_next(self) -> None:
        """Start the idle timer where uvicorn does not know of the last request."""
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep a half-closed connection while its client waits for a reply."""
        is_waiting = self._phase() in (
            ConnectionPhase.REPLY,
            ConnectionPhase.UNREAD,
        ) and not has_left(self._socket)
        self._is_half_closed = is_waiting and self.transport.can_write_eof()  # not on TLS
        return self._is_half_closed

    def on_response_complete(self) -> None:
        """Close a half-closed connection unless earlier requests wait."""
        self._num_requests += 1
        if self._kept_name:
            self._end_kept()
        elif self._left is not None:  # there was no room for its last bytes
            self.transport.close()
        super().on_response_complete()
        if self._is_lingering:  # nothing follows
            self._unset_keepalive_if_required()
        if self._is_half_closed and self.cycle.response_complete:
            self.transport.close()

    def shutdown(self) -> None:
        """End after the current reply; at once without one."""
        if not self.transport.is_closing():
            super().shutdown()

    @property
    def is_kept(self) -> bool:
        """Whether the next daemon can continue the reply."""
        return bool(self._kept_name)

    @property
    def num_unread(self) -> int:
        """Bytes that its client has not read."""
        return 0 if self._mark is None else self.transport.get_write_buffer_size()

    @property
    def caller(self) -> tuple[int | None, str | None]:
        """The uid and the key of its client; clients with neither are one caller."""
        return None if self.credentials is None else self.credentials.uid, self.key

    @property
    def is_silent(self) -> bool:
        """Whether the client has sent nothing yet."""
        return not self._num_received

    def retire(self) -> bool:
        """End with the current reply; return False while one more request may come.

        A close that crosses a request on its way would be a refusal. An idle or new connection may
        therefore send one more request, whose reply announces the close.
        """
        if (
            self._mark is None
            or self._turn is not None
            or self._phase()
            in (
                ConnectionPhase.HEAD,
                ConnectionPhase.BODY,
                ConnectionPhase.IDLE,
            )
        ):
            return False
        if not self._is_lingering:
            self.shutdown()
        return True

    def look(self, now: float, *, may_cut: bool = True) -> bool:
        """Cut the connection off if its client disconnected or is too slow; say whether it was."""
        if (mark := self._mark) is None:
            return False  # accepted a moment ago
        if (self._is_half_closed or self.flow.read_paused) and has_left(self._socket):
            self.transport.abort()
            return True
        seen = self._observe(now)
        if seen.phase is not mark.phase or seen.num_requests != mark.num_requests:
            self._mark = seen
            return False
        if seen.phase in _UNTIMED or now - mark.since <= self._allowed_s(seen.phase):
            return False
        num_moved = seen.num_bytes - mark.num_bytes
        is_steady = num_moved >= self._limits.min_bytes_per_s * (now - mark.since)
        if is_steady and seen.phase in (ConnectionPhase.BODY, ConnectionPhase.UNREAD):
            self._mark = seen
            return False
        if may_cut:
            self._cut(seen.phase)
        return may_cut

    @property
    def spare_since(self) -> float | None:
        """Return since when the connection may be evicted; None: it may not.

        Without a key it may be evicted at once: an endless head, or a row of probes, would hold a
        place for nothing. With one it may be evicted between two requests, or if it sent nothing
        for SILENT_S.
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

    def give_way(self, why: Unavailable) -> bool:
        """Evict the connection: reply 503 with `why` unless it is idle, and close.

        An idle connection gets no reply, since the client would take it for the reply to its next
        request.

        Returns:
            whether the 503 was sent.
        """
        if self._mark is None and self._handshake is not None:
            with contextlib.suppress(OSError):  # the handshake fails of it, and closes the socket
                self._handshake[1].shutdown(socket.SHUT_RDWR)
            self._handshake = None
            return False
        if self._phase() is ConnectionPhase.IDLE:
            self.hang_up()
            return False
        self._refuse(why)
        return True

    def send_400_response(self, msg: str) -> None:
        """Reply with an error object to malformed HTTP, and cut the connection off."""
        cause = sys.exception()  # uvicorn calls this while it handles h11's
        if isinstance(cause, h11.RemoteProtocolError) and cause.error_status_hint == 431:
            self._refuse(headers_too_large())
        else:
            what = "the HTTP request is malformed"
            self._refuse(RequestError(what, code="invalid_http"))

    def _unsupported_upgrade_warning(self) -> None:
        """Ignore an upgrade, as HTTP allows."""

    async def _write_part(self, part: bytes) -> None:
        """Send one part of a body without a length, once its head is sent.

        The bytes equal an ASGI message's, which would pass through every layer for each token.
        """
        if self.flow.write_paused and not self.cycle.disconnected:
            await self.flow.drain()
        if part and not self.cycle.disconnected:
            self._bursts.streams.wrote()
            is_chunked = self.scope["http_version"] == "1.1"
            self.transport.write(_chunk(part) if is_chunked else part)

    def hang_up(self) -> None:
        """End the connection now; drop unread input and further output."""
        self.transport.abort()

    def cut_unfinished(self) -> None:
        """Refuse a request that has not come whole."""
        if self._phase() in (ConnectionPhase.HEAD, ConnectionPhase.BODY) and self._num_received:
            self._refuse(Unavailable("the daemon is stopping", code="draining"))

    def _is_encrypted(self) -> bool:
        return self.transport.get_extra_info("ssl_object") is not None

    def _on_key(self, name: str | None) -> None:
        if name is not None and name != self.key:
            self._check_key(name)
            self.key = name

    def _phase(self) -> ConnectionPhase:
        is_answered = self.cycle is None or self.cycle.response_complete
        if self.flow.write_paused or self.transport.is_closing():
            return ConnectionPhase.UNREAD
        if self._turn is not None:
            return ConnectionPhase.REPLY
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

    def _refuse(self, error: RequestError) -> None:
        """Send the error if a reply can still begin, and close."""
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


def _chunk(part: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(part), part)


def _head_lines(scope: Scope, num_bytes: int) -> list[bytes]:
    """Write a request's head again, without its secrets, for a plain body in one piece."""
    left_out = (b"transfer-encoding", b"content-length", b"content-encoding", b"expect", *SECRETS)
    target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
    first = (scope["method"].encode(), target, scope["http_version"].encode())
    lines = [b"%b %b HTTP/%b\r\n" % first, b"content-length: %d\r\n" % num_bytes]
    lines += [b"%b: %b\r\n" % pair for pair in scope["headers"] if pair[0] not in left_out]
    return [b"".join(lines) + b"\r\n"]
