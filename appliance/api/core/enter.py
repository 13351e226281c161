"""Let a request in to the model that it names, with its whole body."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from appliance.api.core.appliance import Appliance
from appliance.api.core.body_threads import MAX_INLINE_BYTES, threads_for
from appliance.api.core.endpoint import Endpoint
from appliance.api.core.fair_threads import Turn, Turns, hang_up
from appliance.api.core.wire import appliance_of, arrival_of, client_request_id, require
from appliance.daemon.requests.request import Role
from appliance.daemon.survival.journal import Journal, Replayed, anew
from appliance.fleet.swaps import IncomingRequest, Swaps
from appliance.json.fields import as_utf8, is_utf8
from engine.errors import RequestError
from engine.text.reading import Asker, Late
from engine.wire.not_json import NOT_JSON

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Entry:
    """A request that has entered its model."""

    http: HttpRequest
    endpoint: Endpoint
    body: bytes
    journal: Journal | None
    """Outlives the daemon; None: the reply ends with it."""
    replayed: Replayed
    entered_ns: int
    """CLOCK_MONOTONIC. What came before, a swap or a dead daemon's time, is of the queue."""
    _turn: Turn

    @property
    def appliance(self) -> Appliance:
        """The appliance that serves the model."""
        return appliance_of(self.http)

    @property
    def owner(self) -> str:
        """The name of its client."""
        return arrival_of(self.http).peer.name

    async def run(self, work: Callable[[], R], *, is_quick: bool) -> R:
        """Do a step's work: on the loop if that is quick and the body small, else in its thread.

        A chat that renders slowly begins again, apart from all others.
        """
        if is_quick and len(self.body) <= MAX_INLINE_BYTES:
            return work()
        try:
            return await self._turn.run(partial(Asker().do, work))
        except Late:
            return await self._begin_again(work)

    async def compile(self, work: Callable[[], R]) -> R:
        """Do a step's work that compiles grammars, apart from bodies; again if these are late."""
        try:
            return await self._ask(threads_for(self.http, self.body).grammars, Asker(), work)
        except Late:
            return await self._begin_again(work)

    async def _begin_again(self, work: Callable[[], R]) -> R:
        """Do late work, one piece at a time; it ends with its client's connection."""
        return await self._ask(threads_for(self.http, self.body).late, Asker(is_late=True), work)

    async def _ask(self, turns: Turns, asker: Asker, work: Callable[[], R]) -> R:
        self._turn.go_to(turns)
        return await self._turn.run(partial(asker.do, work), asker.leave)

    def keep_loaded(self, keep_alive_s: float | None) -> None:
        """Let the model stay loaded for as long as the request asks, where there are several."""
        if self.appliance.swaps is not None and keep_alive_s is not None:
            self.appliance.swaps.keep_loaded(keep_alive_s)


@asynccontextmanager
async def enter_model(http: HttpRequest, endpoint: Endpoint) -> AsyncIterator[Entry]:
    """Wait for a request's model and body, and hold the model until it is admitted or refused.

    Raises:
        ClientDisconnect: the client has left.
        Forbidden: the peer is a viewer.
        Unavailable: the daemon is loading, draining, or too busy.
        QueueFull: too much waits, of this peer or of all.
        RequestError: any of these steps refuses it, in the words of its API.
    """
    arrival = arrival_of(http)
    journal = arrival.journal()
    replayed: Replayed = anew if journal is None else journal.replayed
    arrival.generates(endpoint.id_prefix, replayed)
    swaps = appliance_of(http).swaps
    held = nullcontext() if swaps is None else await _hold(swaps, http, endpoint, journal, replayed)
    with held:
        try:
            body = await _body(http, replayed)
            check = partial(_check_room, http, body, journal)
            check()
            if journal is not None and journal.is_replay:
                journal.take_up(appliance_of(http).model.model_id)
            with threads_for(http, body).bodies.turn(http, check) as turn:
                now_ns = time.monotonic_ns()
                yield Entry(http, endpoint, body, journal, replayed, now_ns, turn)
        except RequestError as error:
            raise endpoint.refusal(error) from error.__cause__  # it may be the same error


async def _body(http: HttpRequest, replayed: Replayed) -> bytes:
    """Read the body, if its peer may generate."""
    require(http, Role.USER)
    body = await http.body()
    arrival_of(http).has_body(replayed)
    return body


def _check_room(http: HttpRequest, body: bytes, journal: Journal | None) -> None:
    """Refuse a body that nothing has room for; a dead daemon's request has had its place."""
    appliance = appliance_of(http)
    appliance.check_available()
    if journal is None or not journal.is_replay:
        appliance.check_room(arrival_of(http).peer.name, len(body))


class _Named(msgspec.Struct):
    """All of a body that decides which model it is for."""

    model: str | None = None


async def _hold(
    swaps: Swaps,
    http: HttpRequest,
    endpoint: Endpoint,
    journal: Journal | None,
    replayed: Replayed,
) -> AbstractContextManager[None]:
    """Wait for the model that a request names, of several, and hold it."""
    arrival, body = arrival_of(http), await _body(http, replayed)
    begun_ns = time.monotonic_ns()  # since its arrival another daemon may have died
    if not is_utf8(body):
        body = await asyncio.to_thread(as_utf8, body)
    if journal is not None and journal.head is not None:
        name = swaps.name_of(journal.head.model)  # also where the request names none
    else:
        name = swaps.name_of(_named_model(body))
    unloading = endpoint.unloads(body, name)
    if unloading is not None and name not in ("", swaps.current):
        await swaps.unload(name)
        raise unloading
    asker = IncomingRequest(
        arrival.peer.name,
        len(body),
        arrival.request_id,
        http.url.path,
        arrival.received_at,
        arrival.arrived_ns,
        arrival.peer,
        client_request_id(http),
    )
    if swaps.can_enter(name):
        await swaps.enter(name, asker)
        return swaps
    gone = asyncio.create_task(hang_up(http))
    try:
        is_in = await swaps.enter(name, asker, gone)
    finally:
        gone.cancel()
    if not is_in:
        raise ClientDisconnect
    arrival.swap_wait_ns = time.monotonic_ns() - begun_ns
    return swaps


def _named_model(body: bytes) -> str:
    """Read which model a body names; empty where it names none, or will be refused."""
    try:
        return msgspec.json.decode(body, type=_Named).model or ""
    except NOT_JSON:
        return ""
