"""Begin a burst of requests one by one, with rests while replies are streamed.

The steps that compute those replies want the same cores.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Hashable

STREAMING_S = 1.0
"""How long after a part of a reply another one is expected."""
MAX_REST_S = 0.005


class Streams:
    """Knows whether replies are being streamed."""

    def __init__(self) -> None:
        self._wrote_s = float("-inf")

    def wrote(self) -> None:
        """Note a part of a reply."""
        self._wrote_s = asyncio.get_running_loop().time()

    @property
    def are_open(self) -> bool:
        """Whether a part was written lately."""
        return asyncio.get_running_loop().time() - self._wrote_s < STREAMING_S


class Bursts:
    """Make requests wait for a pass of the loop of their own, owners in turns.

    While replies are streamed the loop rests after each for as long as that took. A request that
    comes alone begins at once.
    """

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self._has_begun = False
        """Whether a request has begun, and the next must still wait."""
        self._began_s = 0.0
        self._lines: dict[Hashable, deque[asyncio.Future[None]]] = {}
        """Waiting requests by owner; the next is the first of the first line."""

    def begins_at_once(self) -> bool:
        """Begin a request now, unless another has just begun."""
        if self._has_begun:
            return False
        self._begin()
        return True

    async def begin(self, owner: Hashable) -> None:
        """Return in a pass of the loop in which no other request begins."""
        if self.begins_at_once():
            return
        turn = asyncio.get_running_loop().create_future()
        self._lines.setdefault(owner, deque()).append(turn)
        await turn

    def _begin(self) -> None:
        loop = asyncio.get_running_loop()
        self._has_begun, self._began_s = True, loop.time()
        loop.call_soon(self._rest)

    def _rest(self) -> None:
        loop = asyncio.get_running_loop()
        if self.streams.are_open:
            loop.call_later(min(loop.time() - self._began_s, MAX_REST_S), self._next)
        else:
            self._next()

    def _next(self) -> None:
        self._has_begun = False
        while self._lines and not self._has_begun:
            owner = next(iter(self._lines))
            line = self._lines.pop(owner)
            turn = line.popleft()
            if line:
                self._lines[owner] = line  # behind the other owners
            if not turn.done():  # its client's task may have been cancelled
                turn.set_result(None)
                self._begin()
