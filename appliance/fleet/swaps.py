"""Swap models: decide which requests may enter and which wait.

B waits ── A's stay is over, or A idle ── no request enters A ── A's last is out ── swap ── B in

Invariant: a model is stopped only when none of its requests is running; the longest wait decides
the next model; every waiting request is admitted or gets an error; a closed connection frees its
place.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple, Protocol

from appliance.daemon.requests.request import HUNG_UP, Peer
from appliance.fleet.failed_models import FailedModels
from appliance.observe.frame.protocol import RequestFrame, ResidentFrame, SwapsFrame
from engine.errors import PenstockError, RequestError, Unavailable
from engine.scheduler.queue.waiting_limit import WaitingLimit

IDLE_S = 1.0
"""Idle seconds after which a model is swapped out before its stay is over."""


class SwapLimits(NamedTuple):
    """The limits from the settings; a reload may change them."""

    min_stay_s: float
    """Minimum seconds that a busy model stays."""
    max_waiting: int
    """Maximum requests that wait for another model."""
    max_waiting_bytes: int
    """Maximum bytes of their bodies, which stay in memory."""
    max_wait_s: float = 0.0
    """Maximum wait of a request; 0: no limit."""


class ResidentModels(Protocol):
    """Models that are loaded and not served."""

    def frames(self) -> list[ResidentFrame]:
        """List them."""

    def keep_loaded(self, name: str, keep_s: float) -> None:
        """Let a model stay for so long after its last use."""

    def served_expires_at(self, name: str) -> str | None:
        """Return when the served model goes if it stays unused; None: never."""

    async def unload(self, name: str, why: str) -> bool:
        """End a model; False: it is not among them."""


class IncomingRequest(NamedTuple):
    """The facts of a request that are known before its body is read."""

    owner: str
    num_bytes: int
    """Bytes of its body."""
    request_id: str = ""
    endpoint: str = ""
    received_at: str = ""
    arrived_ns: int = 0
    peer: Peer = Peer()
    client_request_id: str | None = None


RefusedRequest = Callable[[IncomingRequest, RequestFrame | None, RequestError | None], None]
"""Takes the request, its frame (None: it did not wait) and its error (None: disconnected)."""


Swap = Callable[[], Awaitable[str | None]]
"""Serves another model; on failure it restores the old one and returns the reason."""


@dataclass(slots=True, eq=False)
class _WaitingRequest:
    name: str
    """The model's name; empty: unknown, so that any refuses it."""
    asker: IncomingRequest
    cancelled_by: str | None = None
    is_in: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Swaps(AbstractContextManager[None]):
    """Let requests in to the model that they name.

    As a context it holds the model for one request that enter() has let in, until the request is in
    the queue, or refused.
    """

    def __init__(
        self,
        current: str,
        names: Collection[str],
        *,
        prepare: Callable[[str], Awaitable[Swap]],
        idle: asyncio.Event,
        limits: Callable[[], SwapLimits],
        refused: RefusedRequest = lambda *_: None,
        aliases: Collection[str] = (),
        residents: ResidentModels | None = None,
        failed: FailedModels | None = None,
    ) -> None:
        """Begin with `current` as the served model.

        Args:
            current: the model that is served.
            names: all models, including `current`.
            prepare: downloads and checks the files of another model while the old one serves;
                raises PenstockError or OSError.
            idle: set while no admitted request is running.
            refused: called for each request that is not admitted.
            aliases: other names of the first model; `*` in them is any text.
            residents: models that are loaded and not served; None: there are never any.
            failed: models that failed to load.
        """
        self.current = current
        self.names = names
        self.next: str | None = None
        """The model being swapped in; no request enters meanwhile."""
        self._prepare, self._idle = prepare, idle
        self._limits, self._refused = limits, refused
        self._first, self._aliases, self._residents = current, aliases, residents
        self._goes_home = False
        """Whether the first model is to be served again although no request waits for it."""
        self._since_s = time.monotonic()
        self._used_s = -math.inf
        """When a request of the served model was last seen."""
        self._waiting: list[_WaitingRequest] = []
        self._places = WaitingLimit("requests for another model", limits().max_waiting)
        self._bytes = WaitingLimit(
            "bytes of requests for another model", limits().max_waiting_bytes
        )
        self._failed = failed or FailedModels()
        self._num_entering = 0
        self._is_loading = False
        """True once the last reply of the previous model has ended."""
        self._changed = asyncio.Event()
        self._is_closed = False
        self._num_swaps = 0
        self._last_swap_ms: float | None = None

    def name_of(self, asked: str) -> str:
        """Find the model that a requested name means: the first where a request names none.

        Returns:
            empty for a name that is not known: the served model refuses it.
        """
        plain = asked.removesuffix(":latest")
        if not plain:
            return self._first
        is_alias = any(fnmatchcase(plain, one) for one in self._aliases)
        names = (asked, plain, plain.removesuffix(".gguf"))
        known = next((name for name in names if name in self.names), "")
        return known or (self._first if is_alias else "")

    def can_enter(self, name: str) -> bool:
        """Say whether enter() would return at once."""
        is_served = name in ("", self.current) and self.next is None
        return is_served and not self._is_closed and not self._waits_for(name)

    async def enter(
        self, name: str, asker: IncomingRequest, gone: asyncio.Future[None] | None = None
    ) -> bool:
        """Wait until a request may come in; it holds the model from then until __exit__().

        Args:
            asker: the request, with its owner and size.
            gone: done when its client has disconnected.

        Returns:
            False if its client has disconnected: it holds nothing then.

        Raises:
            Unavailable: the model cannot start, or not in time, or the daemon drains.
            QueueFull: too many requests wait for another model, of all owners or of this one.
        """
        if self.can_enter(name):
            self._num_entering += 1
            return True
        await self._failed.look(name)
        one = _WaitingRequest(name, asker)
        try:
            self._check(one)
        except RequestError as error:
            self._refused(asker, None, error)
            raise
        self._waiting.append(one)
        self._places.enter(asker.owner, 1)
        self._bytes.enter(asker.owner, asker.num_bytes)
        self.look()
        is_in = False
        try:
            is_in = await self._wait(one, gone)
            if not is_in:
                one.cancelled_by = HUNG_UP
                self._refused(asker, self._frame(one, time.monotonic_ns()), None)
            return is_in
        except RequestError as error:
            self._refused(asker, self._frame(one, time.monotonic_ns()), error)
            raise
        finally:
            if not is_in:
                self._leave(one)

    async def _wait(self, one: _WaitingRequest, gone: asyncio.Future[None] | None) -> bool:
        """Wait until the request may enter; return False if its client disconnected."""
        limit_s = self._limits().max_wait_s
        waits = (one.is_in,) if gone is None else (one.is_in, gone)
        done, _ = await asyncio.wait(
            waits, timeout=limit_s or None, return_when=asyncio.FIRST_COMPLETED
        )
        if one.is_in in done:
            one.is_in.result()
        elif not done:
            raise Unavailable(
                f"it waited {limit_s:g} s for {self._waits_for_what(one.name)}, "
                "longer than max_queue_wait",
                code="queue_timeout",
                retry_after_ms=int(limit_s * 1e3),
            )
        return one.is_in in done

    def __exit__(self, *_: object) -> None:
        """Release the model: the admitted request is in the queue by now, or refused."""
        self._num_entering -= 1
        self._used_s = time.monotonic()
        self.look()

    def look(self) -> None:
        """Wake run(): a request waits or has entered."""
        self._changed.set()

    def close(self) -> None:
        """Refuse all waiting requests: the daemon drains."""
        self._is_closed = True
        self._refuse(_draining(), None)

    def open(self) -> None:
        """Admit requests again: a model is served."""
        self._is_closed = False

    def frame(self) -> SwapsFrame:
        """Return the models and swaps as a part of a frame."""
        others = [name for name in self.names if name != self.current]
        waiting, took_ms = len(self._waiting), self._last_swap_ms
        loaded, expires_at = self._resident, None
        if self._residents is not None and self.current != self._first:
            expires_at = self._residents.served_expires_at(self.current)
        return SwapsFrame(
            others,
            self.next,
            waiting,
            self._num_swaps,
            took_ms,
            loaded,
            expires_at,
            self._failed.frames(),
        )

    @property
    def _resident(self) -> list[ResidentFrame]:
        return [] if self._residents is None else self._residents.frames()

    def keep_loaded(self, keep_s: float) -> None:
        """Let the served model stay loaded for so long after its last request."""
        if self._residents is not None:
            self._residents.keep_loaded(self.current, keep_s)

    def stays(self, name: str) -> bool:
        """Say whether a model stays loaded whatever a request asks: the first, while served."""
        return name == self.current == self._first

    def is_resident(self, name: str) -> bool:
        """Say whether a model that is not served is loaded."""
        return any(each.model == name for each in self._resident)

    async def unload(self, name: str) -> bool:
        """Unload a model that is loaded and not served; False: it is not loaded."""
        return self._residents is not None and await self._residents.unload(name, "asked for")

    def go_home(self) -> None:
        """Serve the first model again once the served one is unused."""
        self._goes_home = self.current != self._first and not self._failed.rest_s(self._first)
        self.look()

    @property
    def is_busy(self) -> bool:
        """Whether a request of any model runs, or waits."""
        return bool(self._waiting) or not self._is_unused

    def owner_of(self, request_id: str) -> str | None:
        """Return the owner of a waiting request; None: no such id."""
        ids = {one.asker.request_id: one.asker.owner for one in self._waiting}
        return ids.get(request_id)

    def cancel(self, request_id: str, by: str) -> bool:
        """End a request's wait with an error; False if it does not wait here."""
        found = [one for one in self._waiting if one.asker.request_id == request_id]
        for one in found:
            self._take(one)
            one.cancelled_by = by
            about = f"cancelled by {by} while it waited for its model"
            one.is_in.set_exception(RequestError(about, code="cancelled", status=409))
        return bool(found)

    def requests(self, now_ns: int) -> list[RequestFrame]:
        """List the waiting requests, the oldest first."""
        return [self._frame(one, now_ns) for one in self._waiting]

    def _frame(self, one: _WaitingRequest, now_ns: int) -> RequestFrame:
        asker = one.asker
        return RequestFrame(
            id=asker.request_id,
            endpoint=asker.endpoint,
            phase="queued",
            model=one.name or self.next or self.current,
            user=asker.owner,
            stream=False,
            num_sequences=1,
            prompt_tokens=0,
            computed_tokens=0,
            output_tokens=0,
            max_tokens=0,
            num_blocks=0,
            worker=None,
            transport=None,
            received_at=asker.received_at,
            age_ms=(now_ns - asker.arrived_ns) / 1e6,
            waits_for=self._waits_for_what(one.name),
            cancelled_by=one.cancelled_by,
            client=asker.peer.client or None,
            waited_for="a swap to its model",
        )

    def _waits_for_what(self, name: str) -> str:
        wanted = name or self.next or self.current
        if self.next is None and wanted == self._first_wanted and self._stay_s > 0:
            soon = f"once {self.current} is idle for {IDLE_S:g} s"
            return f"model {wanted}, to be loaded {soon}, in {self._stay_s:.0f} s at most"
        if self.next == wanted and not self._is_loading:
            return f"model {wanted}, to be loaded after the last reply of {self.current}"
        if self.next == wanted:
            return f"model {wanted}, now loading"
        return f"model {wanted}, queued after {self.next or self.current}"

    async def run_until(self, stopping: asyncio.Task[bool]) -> None:
        """Run until `stopping` is done; then refuse the waiting requests.

        Raises:
            PenstockError: as run().
        """
        running = asyncio.create_task(self.run())
        try:
            await asyncio.wait({stopping, running}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.close()
            running.cancel()
            await asyncio.wait({running})
        if not stopping.done():
            running.result()

    async def run(self) -> None:
        """Swap whenever a request waits for another model; runs until it is cancelled.

        Raises:
            PenstockError: neither the next model nor the last one could be started.
        """
        while True:
            self._let_in()
            wanted = self._first_wanted
            if wanted is None:
                await self._change()
                continue
            if not self._is_unused:
                self._used_s = time.monotonic()
            stay_s = self._stay_s
            if stay_s <= 0:
                await self._swap_to(wanted)
            elif self._is_unused:
                await self._change(stay_s)
            else:
                await self._change_or_unused(stay_s)
                self._used_s = time.monotonic()

    async def _swap_to(self, name: str) -> None:
        goes_home, self._goes_home = self._goes_home, False
        try:
            swap = await self._prepare(name)
        except (PenstockError, OSError) as error:
            self._refuse(self._failed.add(name, str(error), has_stopped_served=False), name)
            return
        self.next = name
        try:
            # stop waiting once every request for this model has been cancelled
            while self._waits_for(name) or goes_home:
                if self._is_unused:
                    await self._do(swap, name)
                    return
                await self._change_or_unused()
        finally:
            self.next, self._is_loading = None, False

    @property
    def _first_wanted(self) -> str | None:
        """The model named by the request that has waited longest."""
        home = self._first if self._goes_home else None
        return next((each.name for each in self._waiting if each.name), home)

    @property
    def _stay_s(self) -> float:
        """Maximum seconds that the served model stays; an idle one goes sooner."""
        now_s, wanted = time.monotonic(), self._first_wanted
        if wanted is not None and self.is_resident(wanted):
            return 0.0  # nothing is loaded, so taking turns costs little
        stay_s = self._since_s + self._limits().min_stay_s - now_s
        return min(stay_s, self._used_s + IDLE_S - now_s) if self._is_unused else stay_s

    @property
    def _is_unused(self) -> bool:
        """Whether no request of the served model is running or on its way in."""
        return not self._num_entering and self._idle.is_set()

    async def _do(self, swap: Swap, name: str) -> None:
        began_s = time.monotonic()
        self._is_loading = True
        about = await swap()
        now_s = self._since_s = time.monotonic()
        if about is None:
            self.current = name
            self._failed.forget(name)
            self._num_swaps, self._last_swap_ms = self._num_swaps + 1, 1e3 * (now_s - began_s)
            return
        self._refuse(self._failed.add(name, about, has_stopped_served=True), name)

    def _check(self, one: _WaitingRequest) -> None:
        """Refuse a request that cannot wait."""
        if self._is_closed:
            raise _draining()
        self._failed.check(one.name)
        limits = self._limits()
        self._places.limit, self._bytes.limit = limits.max_waiting, limits.max_waiting_bytes
        self._places.check(one.asker.owner, 1, is_single=True)
        self._bytes.check(one.asker.owner, one.asker.num_bytes, is_single=True)

    def _leave(self, one: _WaitingRequest) -> None:
        """Remove a disconnected client's request, or release the model it had entered."""
        if not one.is_in.done():
            self._take(one)
        elif one.is_in.exception() is None:
            self._num_entering -= 1
        self.look()

    def _take(self, one: _WaitingRequest) -> None:
        self._waiting.remove(one)
        self._places.leave(one.asker.owner, 1)
        self._bytes.leave(one.asker.owner, one.asker.num_bytes)

    def _waits_for(self, name: str) -> bool:
        return any(each.name == name for each in self._waiting)

    def _let_in(self) -> None:
        """Admit every waiting request for the served model, or for one that is not known."""
        for one in [each for each in self._waiting if each.name in ("", self.current)]:
            self._take(one)
            self._num_entering += 1
            one.is_in.set_result(None)

    def _refuse(self, error: Unavailable, name: str | None) -> None:
        for one in [each for each in self._waiting if name in (None, each.name)]:
            self._take(one)
            one.is_in.set_exception(error)

    async def _change(self, patience_s: float | None = None) -> None:
        """Wait for a change, at most this long."""
        self._changed.clear()
        try:
            await asyncio.wait_for(self._changed.wait(), patience_s)
        except TimeoutError:
            return

    async def _change_or_unused(self, patience_s: float | None = None) -> None:
        """Wait for a change or an unused model, at most this long."""
        self._changed.clear()
        events = (self._changed,) if self._num_entering else (self._changed, self._idle)
        waits = [asyncio.create_task(each.wait()) for each in events]
        try:
            await asyncio.wait(waits, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()


def _draining() -> Unavailable:
    return Unavailable("the daemon is draining", code="draining")
