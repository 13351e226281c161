"""The request log over HTTP: requests, events, usage, recordings.

Owns: the four routes, and how many queries run and recordings are open at once.
Called by: routes, which has them in its table.
Invariant: queries run in turns, so that readers of the log leave time to those who wait for a
reply; a recording takes disk only while it is sent.
Never: writes; knows SQL.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import IO

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from appliance.api.turns import Turns
from appliance.log.query import event_query, row_query, span_query, usage_query
from appliance.wire import appliance_of, json_response
from engine.errors import Unavailable

MAX_READERS = 2
MAX_OPEN_RECORDINGS = 2
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
        self._num_open = 0

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
        if self._num_open >= MAX_OPEN_RECORDINGS:
            raise Unavailable(
                "as many recordings as may be are being sent", code="busy", retry_after_ms=_RETRY_MS
            )
        self._num_open += 1
        try:
            file = await self._turns.run(http, lambda: appliance_of(http).log_recording(span))
        except BaseException:
            self._num_open -= 1
            raise
        return _FileReply(file, self._closed)

    def _closed(self) -> None:
        self._num_open -= 1

    async def _reply(self, http: Request, read: Callable[[], list[dict[str, object]]]) -> Response:
        rows = await self._turns.run(http, read)
        return json_response({"object": "list", "data": rows})


class _FileReply(Response):
    """Sends an open file, chunk by chunk, and closes it."""

    def __init__(self, file: IO[bytes], on_closed: Callable[[], None]) -> None:
        num_bytes = file.seek(0, os.SEEK_END)
        file.seek(0)
        super().__init__(media_type=RECORDING_TYPE, headers={"content-length": str(num_bytes)})
        self._file = file
        self._on_closed = on_closed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it, as fast as the client reads."""
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        try:
            await send(start)
            is_wanted = scope["method"] != "HEAD"
            while is_wanted and (chunk := await asyncio.to_thread(self._file.read, _CHUNK_BYTES)):
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            self._file.close()
            self._on_closed()
