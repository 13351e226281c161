"""Answer connections above the limit with 503, and close them in time.

Invariant: a client that connects and asks within LINGER_S reads an answer, while descriptors are
left; rejections are counted in the journal, not listed line by line.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
from collections import Counter
from collections.abc import Callable

import msgspec

from appliance.api.core.wire import error_object
from appliance.daemon.process.limits import descriptors_for, too_few_files
from engine.errors import Unavailable

LINGER_S = 5.0
"""Seconds to keep a rejected socket open; a client that writes to a closed one may lose the reply.
"""
MAX_LINGERING = 256
"""Maximum rejected sockets kept open; above it the oldest is closed."""
TELL_EVERY_S = 10.0
RETRY_AFTER_MS = 1000
_READ_BYTES = 1 << 16

_TOLD = logging.getLogger("penstock")


def too_many_connections(wanted: int) -> Unavailable:
    """Make the error for a rejected connection; it names the limit of open files if that is why.

    Args:
        wanted: connections, as the settings allow them.
    """
    about = too_few_files(wanted)
    what = "too many connections" + (f": {about}" if about else "")
    return Unavailable(what, code="too_many_connections", retry_after_ms=RETRY_AFTER_MS)


class RejectedConnections:
    """Reject connections of one server: answer 503 or close, and count.

    Args:
        wanted: says how many connections the settings allow.
    """

    def __init__(self, wanted: Callable[[], int]) -> None:
        self._wanted = wanted
        self._lingering: dict[socket.socket, float] = {}
        """Rejected sockets with the loop time of their close; the oldest first."""
        self._counts: Counter[str] = Counter()
        self._num_told = 0
        """Rejected connections that were sent the 503."""
        self._told_s = -math.inf
        self._loop = asyncio.get_running_loop()

    def drop(self, connection: socket.socket, whose: str) -> None:
        """Close a connection in its TLS handshake, which could not read an answer."""
        self.count(whose, is_told=False)
        connection.close()

    def tell(self, connection: socket.socket, whose: str) -> None:
        """Answer 503 in one write, which a new connection's empty buffer takes, and wait."""
        self.count(whose, is_told=True)
        try:
            connection.send(_reply(too_many_connections(self._wanted())))
            connection.shutdown(socket.SHUT_WR)
        except OSError:  # it is gone
            connection.close()
            return
        if len(self._lingering) >= descriptors_for(MAX_LINGERING, least=1):
            self._close(next(iter(self._lingering)))
        self._lingering[connection] = self._loop.time() + LINGER_S
        self._loop.add_reader(connection, self._read, connection)

    def count(self, whose: str, *, is_told: bool) -> None:
        """Count one rejected or evicted connection, with or without a reply."""
        self._counts[whose] += 1
        self._num_told += is_told

    def look(self) -> None:
        """Close the connections past their time, and log the counts."""
        now_s = self._loop.time()
        for connection in [one for one, until_s in self._lingering.items() if until_s <= now_s]:
            self._close(connection)
        if self._counts and now_s - self._told_s >= TELL_EVERY_S:
            whose = ", ".join(f"{name} {number}" for name, number in self._counts.most_common(5))
            _TOLD.warning(
                "%s: rejected %d connections, %d with a reply: %s",
                too_few_files(self._wanted()) or "max_connections reached",
                self._counts.total(),
                self._num_told,
                whose,
            )
            self._counts.clear()
            self._num_told = 0
            self._told_s = now_s

    def close(self) -> None:
        """Close all rejected connections at once."""
        for connection in list(self._lingering):
            self._close(connection)

    def _read(self, connection: socket.socket) -> None:
        """Discard input: closing with unread data would reset and destroy the reply."""
        with contextlib.suppress(BlockingIOError):
            try:
                if connection.recv(_READ_BYTES):
                    return
            except ConnectionError:
                pass
            self._close(connection)

    def _close(self, connection: socket.socket) -> None:
        del self._lingering[connection]
        self._loop.remove_reader(connection)
        connection.close()


def _reply(error: Unavailable) -> bytes:
    body = msgspec.json.encode(error_object(error))
    head = (
        "HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\n"
        "content-type: application/json\r\n"
        f"content-length: {len(body)}\r\n"
        f"retry-after: {math.ceil(RETRY_AFTER_MS / 1000)}\r\nretry-after-ms: {RETRY_AFTER_MS}\r\n"
        "\r\n"
    )
    return head.encode() + body
