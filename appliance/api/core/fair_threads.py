"""Run slow work in threads, a few pieces at once, and share them fairly between callers.

Invariant: at most `num_at_once` pieces are in threads, and `num_each` of a peer, also counting
clients that have left; the queue is bounded, altogether and for each peer. The peer comes next
whose work, refused or not, took least while others waited; of equal ones the one that waits
longest.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from appliance.api.core.wire import peer_of
from appliance.daemon.process.limits import standing_threads
from engine.errors import QueueFull, Unavailable

MAX_WAITING = 16
MAX_WAITING_EACH = 4
RETRY_MS = 1000
TURN_S = 0.05
"""Work that takes less than this counts alike."""

R = TypeVar("R")


class Turns:
    """Threads for one kind of work.

    Args:
        num_each: of one peer at once; None: all.
        max_waiting: maximum pieces of waiting work of all peers.
        max_waiting_each: maximum pieces of waiting work per peer.
    """

    def __init__(
        self,
        name: str,
        num_at_once: int,
        *,
        num_each: int | None = None,
        max_waiting: int = MAX_WAITING,
        max_waiting_each: int = MAX_WAITING_EACH,
    ) -> None:
        self._threads = standing_threads(num_at_once, name)
        self._num_free = num_at_once
        self._num_each = num_each or num_at_once
        self._working: Counter[str] = Counter()
        """Threads that each peer has."""
        self._max_waiting = max_waiting
        self._max_waiting_each = max_waiting_each
        self._lines: dict[str, deque[asyncio.Future[None]]] = {}
        """Waiting work by the peer's name; of equal peers the next is the first."""
        self._spent_s: dict[str, float] = {}
        """What the work of the peers in line has taken, and of those before them."""

    @property
    def num_waiting(self) -> int:
        """Pieces of work that have not begun."""
        return sum(map(len, self._lines.values()))

    async def run(self, http: HttpRequest, work: Callable[[], R]) -> R:
        """Do a piece of work in a thread when it is its client's turn; raises as Turn.run."""
        with self.turn(http) as turn:
            return await turn.run(work)

    def turn(self, http: HttpRequest, check: Callable[[], None] = lambda: None) -> Turn:
        """Make a turn for several pieces of work of one request.

        Args:
            check: raises if the request, having waited, is not to be worked on any more.
        """
        return Turn(self, http, check)

    async def wait(self, http: HttpRequest) -> Executor:
        """Wait until a thread is this client's."""
        owner = peer_of(http).name
        if self._num_free and self._working[owner] < self._num_each:
            self._give(owner)
        else:
            await self._wait_in_line(http)
        return self._threads

    def _give(self, owner: str) -> None:
        self._num_free -= 1
        self._working[owner] += 1

    def _take_back(self, owner: str) -> None:
        self._num_free += 1
        self._working[owner] -= 1
        if not self._working[owner]:
            del self._working[owner]
        self._pass_on()

    async def _wait_in_line(self, http: HttpRequest) -> None:
        owner = peer_of(http).name
        self._check_room(owner)
        turn = asyncio.get_running_loop().create_future()
        if owner not in self._lines:  # it comes first, without credit for when it wanted nothing
            least_s = min(map(self._spent, self._lines), default=0.0)
            self._spent_s[owner] = max(self._spent(owner), least_s - TURN_S)
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
            self._take_back(owner)
            return
        line = self._lines[owner]
        line.remove(turn)
        if not line:
            del self._lines[owner]

    def _spent(self, owner: str) -> float:
        return self._spent_s.get(owner, 0.0)

    def end(self, owner: str, took_s: float) -> None:
        """Give a thread back, in which so long was worked for a peer."""
        self._spent_s[owner] = self._spent(owner) + took_s
        self._take_back(owner)

    def _pass_on(self) -> None:
        """Give a free thread to the next peer, which then comes last of its equals."""
        if not self._lines:
            self._spent_s.clear()
        may = [one for one in self._lines if self._working[one] < self._num_each]
        if not may:
            return
        owner = min(may, key=lambda one: int(self._spent(one) / TURN_S))
        line = self._lines.pop(owner)
        self._give(owner)
        line.popleft().set_result(None)
        if line:
            self._lines[owner] = line


class Turn(AbstractContextManager["Turn"]):
    """A thread for one request: waited for at its first piece of work, and kept until the end."""

    def __init__(self, turns: Turns, http: HttpRequest, check: Callable[[], None]) -> None:
        self._turns, self._http, self._check = turns, http, check
        self._threads: Executor | None = None
        self._began_s = 0.0
        self._job: asyncio.Future[Any] | None = None

    def go_to(self, turns: Turns) -> None:
        """Give the thread back; further work waits for others."""
        self._end()
        self._turns, self._threads, self._job = turns, None, None

    async def run(self, work: Callable[[], R], leave: Callable[[], None] | None = None) -> R:
        """Do a piece of work.

        Args:
            leave: ends it early, if its client leaves meanwhile; None: nothing can.

        Raises:
            Unavailable: `busy`: too much waits already.
            QueueFull: `user_quota`: too much of this peer's does.
            ClientDisconnect: the client left before it began, or it was ended for that.
        """
        if self._threads is None:
            self._threads = await self._turns.wait(self._http)
            self._began_s = time.monotonic()
            self._check()
        job = asyncio.get_running_loop().run_in_executor(self._threads, work)
        self._job = job
        result = asyncio.shield(job)
        if leave is None:
            return await result
        gone = asyncio.create_task(hang_up(self._http))
        try:
            await asyncio.wait((result, gone), return_when=asyncio.FIRST_COMPLETED)
            if not result.done():
                raise ClientDisconnect
            return await result
        finally:
            gone.cancel()
            if result.cancel():
                leave()

    def __exit__(self, *_: object) -> None:
        """Give the thread back. One that works on cannot be stopped: its turn ends when it does."""
        if self._job is None or self._job.done():
            self._end()
        else:
            self._job.add_done_callback(self._end_alone)

    def _end_alone(self, job: asyncio.Future[Any]) -> None:
        """End after work whose answer is not awaited: its client has left."""
        if not job.cancelled():
            job.exception()
        self._end()

    def _end(self) -> None:
        if self._threads is not None:
            self._turns.end(peer_of(self._http).name, time.monotonic() - self._began_s)


async def hang_up(http: HttpRequest) -> None:
    """Wait until the client is gone, after its body was read."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
