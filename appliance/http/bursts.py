"""Begin a burst of requests one in each pass of the loop, so that replies go on meanwhile."""

from __future__ import annotations

import asyncio
from collections import deque


class Bursts:
    """Make whole requests wait for a pass of the loop of their own, owners in turns.

    A request that comes alone begins at once.
    """

    def __init__(self) -> None:
        self._has_begun = False
        """Whether a request began in this pass of the loop."""
        self._lines: dict[str, deque[asyncio.Future[None]]] = {}
        """Waiting requests by owner; the next is the first of the first line."""

    async def begin(self, owner: str) -> None:
        """Return in a pass of the loop in which no other request begins."""
        loop = asyncio.get_running_loop()
        if not self._has_begun:
            self._has_begun = True
            loop.call_soon(self._next_pass)
            return
        turn = loop.create_future()
        self._lines.setdefault(owner, deque()).append(turn)
        await turn

    def _next_pass(self) -> None:
        self._has_begun = False
        while self._lines and not self._has_begun:
            owner = next(iter(self._lines))
            line = self._lines.pop(owner)
            turn = line.popleft()
            if line:
                self._lines[owner] = line  # behind the other owners
            if not turn.done():  # its client's task may have been cancelled
                turn.set_result(None)
                self._has_begun = True
        if self._has_begun:
            asyncio.get_running_loop().call_soon(self._next_pass)
