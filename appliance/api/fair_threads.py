"""Run slow work in threads, a few pieces at once, and share them fairly between callers.

Invariant: at most `num_at_once` pieces are in threads, also counting clients that have left;
the queue is bounded, altogether and for each peer, and peers are served in turn.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from typing import TypeVar

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from appliance.api.wire import peer_of
from appliance.process import standing_threads
from engine.errors import QueueFull, Unavailable

MAX_WAITING = 16
MAX_WAITING_EACH = 4
RETRY_MS = 1000

R = TypeVar("R")


class Turns:
    """Threads for one kind of work.

    Args:
        max_waiting: maximum pieces of waiting work of all peers.
        max_waiting_each: maximum pieces of waiting work per peer.
    """

    def __init__(
        self,
        name: str,
        num_at_once: int,
        *,
        max_waiting: int = MAX_WAITING,
        max_waiting_each: int = MAX_WAITING_EACH,
    ) -> None:
        self._threads = standing_threads(num_at_once, name)
        self._num_free = num_at_once
        self._max_waiting = max_waiting
        self._max_waiting_each = max_waiting_each
        self._lines: dict[str, deque[asyncio.Future[None]]] = {}
        """Waiting work by the peer's name; the next peer is the first."""

    @property
    def num_waiting(self) -> int:
        """Pieces of work that have not begun."""
        return sum(map(len, self._lines.values()))

    async def run(self, http: HttpRequest, work: Callable[[], R]) -> R:
        """Do a piece of work in a thread when it is its client's turn.

        Raises:
            Unavailable: `busy`: too much waits already.
            QueueFull: `user_quota`: too much of this peer's does.
            ClientDisconnect: the client left before it began.
        """
        if self._num_free:
            self._num_free -= 1
        else:
            await self._turn(http)
        job = asyncio.get_running_loop().run_in_executor(
            self._threads, partial(copy_context().run, work)
        )
        job.add_done_callback(lambda _: self._pass_on())
        # A thread cannot be stopped: its turn is not over when its client leaves.
        return await asyncio.shield(job)

    async def _turn(self, http: HttpRequest) -> None:
        """Wait for a thread; returns when it is this client's."""
        owner = peer_of(http).name
        self._check_room(owner)
        turn = asyncio.get_running_loop().create_future()
        self._lines.setdefault(owner, deque()).append(turn)
        gone = asyncio.create_task(hang_up(http))
        has_turn = False
        try:
            await asyncio.wait((turn, gone), return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                raise ClientDisconnect
            has_turn = True
        finally:
            gone.cancel()
            if not has_turn:
                self._leave(owner, turn)

    def _check_room(self, owner: str) -> None:
        if self.num_waiting >= self._max_waiting:
            raise Unavailable("too much work is waiting", code="busy", retry_after_ms=RETRY_MS)
        if len(self._lines.get(owner, ())) >= self._max_waiting_each:
            raise QueueFull(
                f"{self._max_waiting_each} requests of yours wait to be worked on already",
                code="user_quota",
                retry_after_ms=RETRY_MS,
            )

    def _leave(self, owner: str, turn: asyncio.Future[None]) -> None:
        """Give up a place in line, or the turn that has just come."""
        if turn.done():
            self._pass_on()
            return
        line = self._lines[owner]
        line.remove(turn)
        if not line:
            del self._lines[owner]

    def _pass_on(self) -> None:
        """Give a free thread to the next peer, which then comes last."""
        if not self._lines:
            self._num_free += 1
            return
        owner = next(iter(self._lines))
        line = self._lines.pop(owner)
        line.popleft().set_result(None)
        if line:
            self._lines[owner] = line


async def hang_up(http: HttpRequest) -> None:
    """Wait until the client is gone, after its body was read."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
