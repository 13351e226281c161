"""The request log over HTTP: requests, events, usage, recordings.

Owns: the four routes, and how many queries run and recordings are open at once.
Invariant: queries run in turns, so that readers of the log leave time to those who wait for a
reply; a recording takes disk only while it is sent, and who does not read theirs keeps nobody out.
Never: writes; knows SQL.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from appliance.api.admission import Turns
from appliance.api.wire import appliance_of, arrival_of, json_response, peer_of
from appliance.log.query import event_query, row_query, span_query, usage_query
from engine.errors import Unavailable

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
