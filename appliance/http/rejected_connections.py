"""Answer connections that there is no room for with 503, and close them in time.

Owns: the sockets that wait for their clients to hang up.
Invariant: whoever connects and asks within LINGER_S reads an answer, while there are descriptors
to wait with; what is turned away is told to the journal, counted, never line by line.
Never: reads what a client says.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
from collections import Counter

import msgspec

from appliance.api.wire import error_object
from engine.errors import Unavailable

LINGER_S = 5.0
"""A client that writes to a socket that is closed may never read what was said before."""
MAX_LINGERING = 256
"""Of them the oldest is closed when there are more."""
TELL_EVERY_S = 10.0
RETRY_AFTER_MS = 1000
_READ_BYTES = 1 << 16

_TOLD = logging.getLogger("penstock")


def too_many_connections() -> Unavailable:
    """What is said to them."""
    return Unavailable(
        "too many connections", code="too_many_connections", retry_after_ms=RETRY_AFTER_MS
    )


class RejectedConnections:
    """Connections of one server that there was no room for: answered 503 or closed, counted."""

    def __init__(self) -> None:
        self._lingering: dict[socket.socket, float] = {}
        """With the time of the loop until which each is kept; the oldest first."""
        self._counts: Counter[str] = Counter()
        self._num_told = 0
        """Of those; the others could not read it, or would take it for another reply."""
        self._told_s = -math.inf
        self._loop = asyncio.get_running_loop()

    def drop(self, connection: socket.socket, whose: str) -> None:
        """Close one that could not read an answer, for it has not agreed on how to encrypt it."""
        self.count(whose, is_told=False)
        connection.close()

    def tell(self, connection: socket.socket, whose: str) -> None:
        """Answer 503 in one write, which the empty buffer of a new connection takes, and wait."""
        self.count(whose, is_told=True)
        try:
            connection.send(_reply())
            connection.shutdown(socket.SHUT_WR)
        except OSError:  # it is gone
            connection.close()
            return
        if len(self._lingering) >= MAX_LINGERING:
            self._close(next(iter(self._lingering)))
        self._lingering[connection] = self._loop.time() + LINGER_S
        self._loop.add_reader(connection, self._read, connection)

    def count(self, whose: str, *, is_told: bool) -> None:
        """One more had to go, a new one or an old one, and was told so or not."""
        self._counts[whose] += 1
        self._num_told += is_told

    def look(self) -> None:
        """Close those whose time is over, and tell how many there were."""
        now_s = self._loop.time()
        for connection in [one for one, until_s in self._lingering.items() if until_s <= now_s]:
            self._close(connection)
        if self._counts and now_s - self._told_s >= TELL_EVERY_S:
            whose = ", ".join(f"{name} {number}" for name, number in self._counts.most_common(5))
            _TOLD.warning(
                "no room (max_connections) for %d connections, %d of which were told so: %s",
                self._counts.total(),
                self._num_told,
                whose,
            )
            self._counts.clear()
            self._num_told = 0
            self._told_s = now_s

    def close(self) -> None:
        """Wait for nobody any longer."""
        for connection in list(self._lingering):
            self._close(connection)

    def _read(self, connection: socket.socket) -> None:
        """What lies unread would make a close a reset, which takes the reply with it."""
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


def _reply() -> bytes:
    body = msgspec.json.encode(error_object(too_many_connections()))
    head = (
        "HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\n"
        "content-type: application/json\r\n"
        f"content-length: {len(body)}\r\n"
        f"retry-after: {math.ceil(RETRY_AFTER_MS / 1000)}\r\nretry-after-ms: {RETRY_AFTER_MS}\r\n"
        "\r\n"
    )
    return head.encode() + body
