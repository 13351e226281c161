"""What operators read and do over HTTP: requests, frames, cancel, drain, cache, metrics, the log.

Owns: /v1/requests and the routes under /v1/penstock; counts of replies by route, method and class
of status; how many queries run and recordings are open at once.
Invariant: whoever reads the appliance may read all of this; what changes something asks authority.
Never: decides about requests; it asks the Appliance.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import IO

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from appliance.api.admission import Turns
from appliance.api.wire import (
    appliance_of,
    arrival_of,
    is_known,
    json_response,
    not_live,
    peer_of,
    request_not_found,
    require,
    require_owner,
)
from appliance.configuration.settings import ROLES
from appliance.fleet.roles_change import RolesChange
from appliance.json_fields import Fields, invalid_value
from appliance.log.query import event_query, most_rows, row_query, span_query, usage_query
from appliance.metrics.exposition import MEDIA_TYPE, MetricFamily, counter, exposition
from appliance.request import Role
from engine.cache.prefix_index import Hash
from engine.errors import RequestError, Unavailable
from engine.schedule.prefix_cache import Block, CacheContents, ContentsChange

# GET /v1/penstock/cache: what the prefix cache holds by tokens, and each change of that.
# For routers that choose among several appliances the one that has most of a prompt. A line each:
# `{"cleared": true, "block_size": N}` first, and whenever what was told before is void; `{"stored":
# [{"id", "parent", "token_ids"}, ...]}`, each block after the one before it; `{"removed": [id,
# ...]}`.
# Invariant: who reads all lines knows what the asker's own prompts would find in memory.
# Never: tells of what the asker's own prompts would not find, or of prompts with a secret.


LOOK_INTERVAL_S = 0.05
MAX_LINE_BLOCKS = 256


def cache_routes() -> list[Route]:
    """The one of the cache."""
    return [Route("/v1/penstock/cache", cache)]


async def cache(http: Request) -> Response:
    """All that is there, and then each change, until either side leaves.

    It ends when another model is served. Prompts are in it, so it is for operators.
    """
    peer, appliance = require(http, Role.OPERATOR), appliance_of(http)
    contents = appliance.cache_contents
    chain = None if contents is None else appliance.hash_prompt([], None, peer.name)
    if contents is None or chain is None:
        raise RequestError(
            "the prefix cache is off, or not there yet",
            code="no_prefix_cache",
            status=409,
            hint="serve with prefix_cache on",
        )
    lines = _lines(http, contents, chain.root)
    return StreamingResponse(
        lines, media_type="application/x-ndjson", headers={"cache-control": "no-store"}
    )


async def _lines(http: Request, contents: CacheContents, root: Hash) -> AsyncIterator[bytes]:
    if http.method == "HEAD":
        return
    stopping: asyncio.Event = http.app.state.stopping
    told: int | None = None
    while not stopping.is_set() and is_known(http):
        if appliance_of(http).cache_contents is not contents:
            return
        changes = None if told is None else contents.changes(told, root)
        told = contents.num_changes
        if changes is None:
            blocks = contents.blocks(root)  # all of one moment, however slowly they are read
            yield _line({"cleared": True, "block_size": contents.block_size})
            for line in _stored(blocks):
                yield line
        else:
            for line in _of(changes):
                yield line
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stopping.wait(), LOOK_INTERVAL_S)


def _of(changes: Iterable[ContentsChange]) -> Iterator[bytes]:
    for is_stored, group in groupby(changes, key=lambda change: change.is_stored):
        blocks = [change.block for change in group]
        if is_stored:
            yield from _stored(blocks)
        else:
            yield _line({"removed": [block.block_id for block in blocks]})


def _stored(blocks: list[Block]) -> Iterator[bytes]:
    for start in range(0, len(blocks), MAX_LINE_BLOCKS):
        told = [
            {"id": one.block_id, "parent": one.parent_id, "token_ids": one.token_ids.tolist()}
            for one in blocks[start : start + MAX_LINE_BLOCKS]
        ]
        yield _line({"stored": told})


def _line(value: object) -> bytes:
    return msgspec.json.encode(value) + b"\n"


# GET /metrics, and what it says of HTTP itself.
# Invariant: labels are of a fixed set, whatever clients send.
# Never: counts probes, whose refusals are no errors of the api.


PROBES = ("/health", "/ready", "/metrics")
_METHODS = ("GET", "HEAD", "POST", "DELETE", "OPTIONS")


class HttpCounts:
    """Replies since the daemon started."""

    def __init__(self) -> None:
        self._replies: Counter[tuple[str, str, str]] = Counter()
        self._seconds: defaultdict[tuple[str, str], float] = defaultdict(float)

    def count(self, path: str | None, method: str, status: int, seconds: float) -> None:
        """A reply has been sent whole, or its client is gone.

        Args:
            path: of the route; None: there was none.
            method: as the client wrote it.
            status: of the reply.
            seconds: since the request came.
        """
        if path in PROBES:
            return
        handler, method = path or "none", method if method in _METHODS else "other"
        self._replies[handler, method, f"{status // 100}xx"] += 1
        self._seconds[handler, method] += seconds

    def families(self) -> Iterator[MetricFamily]:
        """Metrics under vLLM's names, which most dashboards know."""
        yield counter(
            "http_requests_total",
            "Replies, but for those to probes.",
            [
                ({"handler": handler, "method": method, "status": status}, number)
                for (handler, method, status), number in self._replies.items()
            ],
        )
        totals: Counter[tuple[str, str]] = Counter()
        for (handler, method, _), number in self._replies.items():
            totals[handler, method] += number
        yield MetricFamily(
            "summary",
            "http_request_duration_seconds",
            "To the end of the reply.",
            summaries=[
                ({"handler": handler, "method": method}, number, self._seconds[handler, method])
                for (handler, method), number in totals.items()
            ],
        )


async def metrics(http: Request) -> Response:
    """All there is to chart, as Prometheus reads it."""
    readings = appliance_of(http).readings()
    http_counts: HttpCounts = http.app.state.http_counts
    body = exposition(readings.frame, readings.histograms, http_counts.families())
    return Response(body, media_type=MEDIA_TYPE)


# --------------------------------------------------------------------------------------------------


def control_routes() -> list[Route]:
    """What the console and the CLI use."""
    return [
        Route("/v1/requests", requests),
        Route("/v1/requests/{id}", request),
        Route("/v1/requests/{id}", cancel, methods=["DELETE"]),
        Route("/v1/requests/{id}/cancel", cancel, methods=["POST"]),
        Route("/v1/responses/{id}/cancel", cancel, methods=["POST"]),
        Route("/v1/penstock/state", state),
        Route("/v1/penstock/stream", stream),
        Route("/v1/penstock/whoami", whoami),
        Route("/v1/penstock/drain", drain, methods=["POST"]),
        Route("/v1/penstock/resume", resume, methods=["POST"]),
        Route("/v1/penstock/measure", measured),
        Route("/v1/penstock/measure", measure, methods=["POST"]),
    ]


async def requests(http: Request) -> Response:
    """Live requests, then the last finished ones; at most `limit`."""
    most = most_rows(http.query_params)
    return json_response({"object": "list", "data": appliance_of(http).request_frames()[:most]})


async def request(http: Request) -> Response:
    """GET /v1/requests/{id}: a request, live or from the log."""
    request_id = http.path_params["id"]
    frame = appliance_of(http).request_frame(request_id)
    if frame is None:
        frame = await asyncio.to_thread(appliance_of(http).logged_frame, request_id)
    if frame is None:
        raise request_not_found(request_id)
    return json_response(frame)


async def cancel(http: Request) -> Response:
    """End a live request; its own client reads finish reason `abort`."""
    request_id = http.path_params["id"]
    peer = require_owner(http, request_id)
    if not appliance_of(http).cancel(request_id, peer.name):
        raise not_live(request_id)
    return json_response({"id": request_id, "status": "cancelled"})


async def state(http: Request) -> Response:
    """Everything as it is now."""
    return Response(appliance_of(http).frame_json(), media_type="application/json")


async def stream(http: Request) -> Response:
    """Frames, the newest at once and each new one when it is made, until either side leaves.

    A key that is revoked meanwhile gets no further one.
    """
    wants_events = "text/event-stream" in http.headers.get("accept", "")
    prefix, suffix = (b"data: ", b"\n\n") if wants_events else (b"", b"\n")
    media_type = "text/event-stream" if wants_events else "application/x-ndjson"

    async def lines() -> AsyncIterator[bytes]:
        if http.method == "HEAD":
            return
        async for frame_json in _frames(http):
            yield prefix + frame_json + suffix

    return StreamingResponse(lines(), media_type=media_type, headers={"cache-control": "no-store"})


async def _frames(http: Request) -> AsyncIterator[bytes]:
    """Frames until the server stops, or knows its client no longer."""
    appliance, seq = appliance_of(http), -1
    stopped = asyncio.create_task(http.app.state.stopping.wait())
    try:
        while True:
            newer = asyncio.create_task(appliance.next_frame_json(seq))
            try:
                await asyncio.wait({newer, stopped}, return_when=asyncio.FIRST_COMPLETED)
                if stopped.done() or not is_known(http):
                    return
                seq, frame_json = newer.result()
            finally:
                newer.cancel()
            yield frame_json
            if appliance_of(http) is not appliance:
                return  # its model has come: whoever asks again sees another
    finally:
        stopped.cancel()


async def whoami(http: Request) -> Response:
    """Who the appliance takes its client for."""
    peer = peer_of(http)
    known = {"name": peer.name, "role": peer.role.name.lower(), "uid": peer.uid, "key": peer.key}
    return json_response(known)


async def drain(http: Request) -> Response:
    """Take no new work; what is accepted goes on."""
    appliance_of(http).drain(require(http, Role.OPERATOR).name)
    return json_response({"status": "draining"})


async def resume(http: Request) -> Response:
    """Take work again after a drain; for operators."""
    appliance_of(http).resume(require(http, Role.OPERATOR).name)
    return json_response({"status": "resumed"})


async def measured(http: Request) -> Response:
    """How far the profile of the model is."""
    return json_response(appliance_of(http).measurement())


async def measure(http: Request) -> Response:
    """Measure what the profile lacks, also where the time for it has been spent."""
    require(http, Role.OPERATOR)
    return json_response(appliance_of(http).measure())


# POST /v1/penstock/roles: what the workers are for, switched while they run.
#
# Owns: its body.
# Invariant: only operators change anything, and a body with something wrong changes nothing.
# Never: decides where a request goes.


MAX_TARGET_MS = 86_400_000


async def switch_roles(http: Request) -> Response:
    """Change roles, targets or both; an empty object changes nothing and tells what is so."""
    peer = require(http, Role.OPERATOR)
    fields = Fields.of_body(await http.body())
    roles = fields.text("roles")
    if roles not in (None, *ROLES):
        raise invalid_value("roles", f"must be one of {', '.join(ROLES)}")
    change = RolesChange(
        roles,
        fields.integer("slo_ttft_ms", 0, MAX_TARGET_MS),
        fields.integer("slo_itl_ms", 0, MAX_TARGET_MS),
    )
    if fields.ignored:
        raise invalid_value(fields.ignored[0], "is not known here")
    return json_response(appliance_of(http).set_roles(change, peer.name))


# The request log over HTTP: requests, events, usage, recordings.
# Invariant: queries run in turns, so that readers of the log leave time to those who wait for a
# reply; a recording takes disk only while it is sent, and who does not read theirs keeps nobody
# out.
# Never: writes; knows SQL.


MAX_READERS = 2
MAX_OPEN_RECORDINGS = 4
MAX_OPEN_EACH = 2
"""Recordings that one peer may have under way."""
PATIENCE_S = 5.0
"""A client that takes longer for a chunk gives way to the next who asks."""
RECORDING_TYPE = "application/vnd.sqlite3"
_CHUNK_BYTES = 1 << 18
_RETRY_MS = 5_000


def log_routes() -> list[Route]:
    """GET /v1/penstock/log, /events, /usage and /recording; parameters are those of log.query."""
    api = _LogApi()
    return [
        Route("/v1/penstock/log", api.log),
        Route("/v1/penstock/events", api.events),
        Route("/v1/penstock/usage", api.usage),
        Route("/v1/penstock/recording", api.recording),
    ]


class _LogApi:
    def __init__(self) -> None:
        self._turns = Turns("log-reader", MAX_READERS)
        self._open: list[_Place] = []

    async def log(self, http: Request) -> Response:
        """Finished requests, the newest first; the oldest first after a cursor."""
        query = row_query(http.query_params)
        return await self._reply(http, lambda: appliance_of(http).log_rows(query))

    async def events(self, http: Request) -> Response:
        """What operators should know, in the order of log()."""
        query = event_query(http.query_params)
        return await self._reply(http, lambda: appliance_of(http).log_events(query))

    async def usage(self, http: Request) -> Response:
        """Requests, errors, tokens and time by user, model or day."""
        query = usage_query(http.query_params)
        return await self._reply(http, lambda: appliance_of(http).log_usage(query))

    async def recording(self, http: Request) -> Response:
        """A recording, as a file that `penstock top --replay` shows."""
        span = span_query(http.query_params)
        place = self._place_for(http)
        try:
            file = await self._turns.run(http, lambda: appliance_of(http).log_recording(span))
        except BaseException:
            self._give_back(place)
            raise
        return _FileReply(file, place, lambda: self._give_back(place))

    def _place_for(self, http: Request) -> _Place:
        """A place for one more recording, if need be that of somebody who does not read theirs.

        Raises:
            Unavailable: all that are open are being read.
        """
        owner = peer_of(http).name
        crowd = [place for place in self._open if place.owner == owner]
        if len(crowd) < MAX_OPEN_EACH:
            crowd = self._open if len(self._open) >= MAX_OPEN_RECORDINGS else []
        if crowd:
            slowest = min(crowd, key=lambda place: place.moved_s)
            if time.monotonic() - slowest.moved_s < PATIENCE_S:
                raise Unavailable(
                    "as many recordings as may be are being sent",
                    code="busy",
                    retry_after_ms=_RETRY_MS,
                )
            self._give_back(slowest)
            slowest.hang_up()
        place = _Place(owner, arrival_of(http).hang_up)
        self._open.append(place)
        return place

    def _give_back(self, place: _Place) -> None:
        if place in self._open:
            self._open.remove(place)

    async def _reply(self, http: Request, read: Callable[[], list[dict[str, object]]]) -> Response:
        rows = await self._turns.run(http, read)
        return json_response({"object": "list", "data": rows})


@dataclass(eq=False, slots=True)
class _Place:
    """A recording that is being made or sent."""

    owner: str
    hang_up: Callable[[], None]
    """Ends the connection; what is sent on it afterwards goes nowhere."""
    moved_s: float = field(default_factory=time.monotonic)
    """When it was asked for, or its client took the last chunk."""


class _FileReply(Response):
    """Sends an open file, chunk by chunk, and closes it."""

    def __init__(self, file: IO[bytes], place: _Place, on_closed: Callable[[], None]) -> None:
        num_bytes = file.seek(0, os.SEEK_END)
        file.seek(0)
        super().__init__(media_type=RECORDING_TYPE, headers={"content-length": str(num_bytes)})
        self._file = file
        self._place = place
        self._on_closed = on_closed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it, as fast as the client reads."""
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        try:
            await send(start)
            is_wanted = scope["method"] != "HEAD"
            while is_wanted and (chunk := await asyncio.to_thread(self._file.read, _CHUNK_BYTES)):
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                self._place.moved_s = time.monotonic()
            await send({"type": "http.response.body", "body": b""})
        finally:
            self._file.close()
            self._on_closed()
