"""Serve operators: requests, frames, cancel, drain, cache, metrics, log.

Invariant: clients that may read the appliance may read all of this; changes ask for authority.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import IO, Annotated

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from appliance.api.core.fair_threads import Turns
from appliance.api.core.wire import (
    appliance_of,
    arrival_of,
    is_known,
    json_response,
    not_live,
    peer_of,
    request_not_found,
    require,
    require_owner,
    small_object,
    streamed,
)
from appliance.configuration.settings import ROLES
from appliance.daemon.requests.request import Role
from appliance.fleet.roles_change import RolesChange
from appliance.json.fields import check, invalid_value, undeclared
from appliance.observe.log.query import event_query, most_rows, row_query, span_query, usage_query
from engine.errors import Unavailable


def control_routes() -> list[Route]:
    """List the routes of the console and the CLI."""
    return [
        Route("/v1/requests", requests),
        Route("/v1/requests/{id}", request),
        Route("/v1/requests/{id}", cancel, methods=["DELETE"]),
        Route("/v1/requests/{id}/cancel", cancel, methods=["POST"]),
        Route("/v1/penstock/state", state),
        Route("/v1/penstock/stream", stream),
        Route("/v1/penstock/whoami", whoami),
        Route("/v1/penstock/drain", drain, methods=["POST"]),
        Route("/v1/penstock/resume", resume, methods=["POST"]),
        Route("/v1/penstock/measure", measured),
        Route("/v1/penstock/measure", measure, methods=["POST"]),
    ]


async def requests(http: Request) -> Response:
    """Answer live requests, then the last finished ones; at most `limit`."""
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
    """Show the present state."""
    return Response(appliance_of(http).frame_json(), media_type="application/json")


async def stream(http: Request) -> Response:
    """Stream frames: the newest at once, then each new one, until either side leaves."""
    wants_events = "text/event-stream" in http.headers.get("accept", "")
    prefix, suffix = (b"data: ", b"\n\n") if wants_events else (b"", b"\n")
    media_type = "text/event-stream" if wants_events else "application/x-ndjson"

    async def lines() -> AsyncIterator[bytes]:
        if http.method == "HEAD":
            return
        async for frame_json in _frames(http):
            yield prefix + frame_json + suffix

    return streamed(lines(), media_type)


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
                return  # its model has come: the next request sees another
    finally:
        stopped.cancel()


async def whoami(http: Request) -> Response:
    """Tell clients their name and role."""
    peer = peer_of(http)
    known = {"name": peer.name, "role": peer.role.name.lower(), "uid": peer.uid, "key": peer.key}
    return json_response(known)


async def drain(http: Request) -> Response:
    """Take no new work; finish what is accepted."""
    appliance_of(http).drain(require(http, Role.OPERATOR).name)
    return json_response({"status": "draining"})


async def resume(http: Request) -> Response:
    """Take work again after a drain; for operators."""
    appliance_of(http).resume(require(http, Role.OPERATOR).name)
    return json_response({"status": "resumed"})


async def measured(http: Request) -> Response:
    """Tell how far the profile of the model is."""
    return json_response(appliance_of(http).measurement())


async def measure(http: Request) -> Response:
    """Measure what the profile lacks, also where the time for it has been spent."""
    require(http, Role.OPERATOR)
    return json_response(appliance_of(http).measure())


MAX_TARGET_MS = 86_400_000
_TargetMs = Annotated[int, Meta(ge=0, le=MAX_TARGET_MS)]


class RolesRequest(msgspec.Struct):
    """A body of /v1/penstock/roles."""

    roles: Annotated[str, Meta(extra_json_schema={"enum": list(ROLES)})] | None = None
    slo_ttft_ms: _TargetMs | None = None
    slo_itl_ms: _TargetMs | None = None


async def switch_roles(http: Request) -> Response:
    """Change roles, targets or both; an empty object changes nothing and shows the present ones."""
    peer = require(http, Role.OPERATOR)
    values = await small_object(http)
    body = check(values, RolesRequest)
    if body.roles not in (None, *ROLES):
        raise invalid_value("roles", f"must be one of {', '.join(ROLES)}")
    if unknown := undeclared(values, RolesRequest):
        raise invalid_value(unknown[0], "is not known here")
    change = RolesChange(body.roles, body.slo_ttft_ms, body.slo_itl_ms)
    return json_response(appliance_of(http).set_roles(change, peer.name))


MAX_READERS = 2
MAX_OPEN_RECORDINGS = 4
MAX_OPEN_EACH = 2
"""Recordings that one peer may have under way."""
PATIENCE_S = 5.0
"""Maximum time for a chunk; then the next client is served."""
RECORDING_TYPE = "application/vnd.sqlite3"
_CHUNK_BYTES = 1 << 18
_RETRY_MS = 5_000


def log_routes() -> list[Route]:
    """Route GET /v1/penstock/log, /events, /usage and /recording to log.query."""
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
        """Answer finished requests, the newest first; the oldest first after a cursor."""
        query = row_query(http.query_params)
        return await self._reply(http, lambda: appliance_of(http).log_rows(query))

    async def events(self, http: Request) -> Response:
        """List what operators should know, in the order of log()."""
        query = event_query(http.query_params)
        return await self._reply(http, lambda: appliance_of(http).log_events(query))

    async def usage(self, http: Request) -> Response:
        """Answer requests, errors, tokens and time by user, model or day."""
        query = usage_query(http.query_params)
        return await self._reply(http, lambda: appliance_of(http).log_usage(query))

    async def recording(self, http: Request) -> Response:
        """Send a recording, as a file that `penstock top --replay` shows."""
        span = span_query(http.query_params)
        place = self._place_for(http)
        try:
            file = await self._turns.run(http, lambda: appliance_of(http).log_recording(span))
        except BaseException:
            self._give_back(place)
            raise
        return _FileReply(file, place, lambda: self._give_back(place))

    def _place_for(self, http: Request) -> _Place:
        """Take a place for one more recording, if need be from a client that reads too slowly.

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
        return await self._turns.run(
            http, lambda: json_response({"object": "list", "data": read()})
        )


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
