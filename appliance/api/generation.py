"""Answer every POST that generates in four steps: decode, prepare, admit, respond.

Owns: the order of the steps, and where each runs: on the loop if it is quick, else in a thread.
Invariant: large bodies have threads of their own, so that small ones do not wait for them.
Never: knows a field, or how a reply looks.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import cast

import msgspec
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from appliance.api.core.appliance import Appliance
from appliance.api.core.ask import Ask
from appliance.api.core.fair_threads import Turns, hang_up
from appliance.api.core.prepare import Prepared, prepare, request_of
from appliance.api.core.respond import Reply, ReplyForm
from appliance.api.core.wire import (
    KeptWords,
    appliance_of,
    arrival_of,
    client_request_id,
    json_response,
    require,
)
from appliance.api.endpoints import ENDPOINTS, Asked, Endpoint, decode
from appliance.api.ollama.ask import NothingToGenerate, unloaded
from appliance.api.responses.background import begin
from appliance.api.responses.replies import ResponseShape
from appliance.daemon.requests.request import Request, Role
from appliance.daemon.survival.journal import current
from appliance.daemon.survival.journaled_inbox import JournaledInbox
from appliance.fleet.swaps import IncomingRequest
from appliance.json.fields import as_utf8, is_utf8
from engine.errors import RequestError, Unavailable
from engine.wire.not_json import NOT_JSON

MAX_INLINE_BYTES = 2 << 10
"""Larger bodies are decoded in a thread: of these no field takes a millisecond."""
MAX_SMALL_BYTES = 16 << 10
"""Larger bodies have threads of their own."""
MAX_INLINE_CHARS = 4096
"""Longer texts are tokenized in a thread."""
NUM_THREADS = 2
"""Threads for small bodies, and as many for large ones."""
MAX_SMALL_WAITING = 1024
"""Small bodies cost little while they wait; how many may, the queue decides better."""


class BodyTurns:
    """Hold the threads in which bodies are decoded and prepared; the application has one."""

    def __init__(self) -> None:
        self.small = Turns(
            "admission",
            NUM_THREADS,
            max_waiting=MAX_SMALL_WAITING,
            max_waiting_each=MAX_SMALL_WAITING // 2,
        )
        self.large = Turns("large-body", NUM_THREADS)

    def of(self, num_bytes: int) -> Turns:
        """Choose the threads for a body of that size."""
        return self.large if num_bytes > MAX_SMALL_BYTES else self.small


async def generate(http: HttpRequest, endpoint: Endpoint) -> Reply | Response:
    """Decode, prepare and admit what a body asks; the reply responds when starlette calls it.

    Raises:
        ClientDisconnect: the client of a dead daemon's request has left.
        Forbidden: the peer is a viewer.
        Unavailable: the daemon is loading, draining, or too busy.
        QueueFull: too much waits, of this peer or of all.
        RequestError: it cannot be served, whatever room there is.
    """
    appliance, arrival = appliance_of(http), arrival_of(http)
    journal = arrival.journal()
    current.set(journal)
    arrival.generates(endpoint.id_prefix)
    with await _turn(http, appliance):
        try:
            body = await _body(http)
            asked, prepared = await _decoded_and_prepared(http, endpoint, body)
        except NothingToGenerate as ended:
            _keep(appliance, ended.keep_alive_s)
            raise
        except RequestError as error:
            raise endpoint.refusal(error) from error
        if prepared.ignored:
            ignored = (*asked.ask.ignored, *prepared.ignored)
            asked = asked._replace(ask=dataclasses.replace(asked.ask, ignored=ignored))
        request = request_of(http, asked.ask, prepared)
        if journal is not None and journal.is_given_up:
            raise ClientDisconnect
        form = endpoint.form(asked, request, http)
        reply = Reply(http, asked.ask, request, prepared.echoes, form, endpoint.refusal)
        if journal is None or asked.ask.is_background:
            appliance.submit(request)
        else:
            request.inbox = JournaledInbox(journal, request)
            appliance.submit(request)
            arrival.keep(journal, _kept_words(request, form), body)
        _keep(appliance, asked.ask.keep_alive_s)
        if asked.ask.is_background and isinstance(form, ResponseShape):
            return begin(http, reply, form)
        return reply


def _kept_words(request: Request, form: ReplyForm) -> KeptWords:
    """Write the events that a later daemon may send in this one's place."""
    failure = ping = b""
    if request.is_stream:
        about = "the daemon was restarted and cannot continue this reply"
        failure = copy.copy(form).failure(Unavailable(about, code="daemon_died"))
        ping = form.alive(None)
    return KeptWords(request.request_id, request.model, failure, ping)


def _keep(appliance: Appliance, keep_alive_s: float | None) -> None:
    """Let the served model stay loaded for as long as a request asks, where there are several."""
    if appliance.swaps is not None and keep_alive_s is not None:
        appliance.swaps.keep(keep_alive_s)


async def _body(http: HttpRequest) -> bytes:
    """Read a body whose peer may generate, and for which there is room."""
    appliance, arrival = appliance_of(http), arrival_of(http)
    require(http, Role.USER)
    body = await http.body()
    arrival.has_body()
    appliance.check_available()
    journal = current.get()
    if journal is not None and journal.is_replay:
        journal.take_up(appliance.model.model_id)
    else:
        appliance.check_room(arrival.peer.name, len(body))
    return body


async def _decoded_and_prepared(
    http: HttpRequest, endpoint: Endpoint, body: bytes
) -> tuple[Asked, Prepared]:
    """Take the two steps that may take time; on the loop only what is quick."""
    turns = cast(BodyTurns, http.app.state.turns)
    appliance, user = appliance_of(http), arrival_of(http).peer.name

    def both() -> tuple[Asked, Prepared]:
        asked = decode(http, endpoint, body)
        return asked, prepare(appliance, asked.ask, user)

    if len(body) > MAX_INLINE_BYTES:
        return await turns.of(len(body)).run(http, both)
    asked = decode(http, endpoint, body)
    if _is_quick(asked.ask):
        return asked, prepare(appliance, asked.ask, user)
    return asked, await turns.small.run(http, partial(prepare, appliance, asked.ask, user))


def _is_quick(ask: Ask) -> bool:
    """Tell whether the prompts of a small body are prepared at once."""
    has_more = ask.is_chat or ask.constraint or ask.bad_words
    return not has_more and sum(map(len, ask.prompts)) <= MAX_INLINE_CHARS


class _Asked(msgspec.Struct):
    """All of a body that decides which model it is for."""

    model: str | None = None


async def _turn(http: HttpRequest, appliance: Appliance) -> AbstractContextManager[None]:
    """Wait for the model that a request names, where several may be named, and hold it.

    Raises:
        ClientDisconnect: the client left meanwhile.
    """
    swaps, arrival = appliance.swaps, arrival_of(http)
    if swaps is None:
        return nullcontext()
    require(http, Role.USER)
    body = await http.body()
    arrival.has_body()
    if not is_utf8(body):
        body = await asyncio.to_thread(as_utf8, body)
    try:
        asked = msgspec.json.decode(body, type=_Asked).model or ""
    except NOT_JSON:
        asked = ""  # it will be refused in the usual words
    journal = current.get()
    if journal is not None and journal.head is not None:
        asked = journal.head.model  # also where the request names none
    name = swaps.name_of(asked)
    unloading = unloaded(http.url.path, body, name)
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
    arrival.swap_wait_ns = time.monotonic_ns() - arrival.arrived_ns
    return swaps


def generating_routes() -> list[Route]:
    """Make a POST route for each row of ENDPOINTS."""
    return [Route(path, _handler(one), methods=["POST"]) for path, one in ENDPOINTS.items()]


def _handler(endpoint: Endpoint) -> Callable[[HttpRequest], Awaitable[Reply | Response]]:
    async def handle(http: HttpRequest) -> Reply | Response:
        try:
            return await generate(http, endpoint)
        except NothingToGenerate as ended:
            is_unloaded = ended.keep_alive_s == 0 and _is_unloaded(http, ended)
            return json_response(ended.told(is_unloaded=is_unloaded))

    return handle


def _is_unloaded(http: HttpRequest, ended: NothingToGenerate) -> bool:
    """Say whether a model that is not to stay is gone, or goes: the first stays while served."""
    swaps = appliance_of(http).swaps
    return swaps is not None and not swaps.stays(ended.reply["model"])
