"""The request log over HTTP: requests, events, usage.

Owns: the three routes, and how many queries run at once.
Called by: routes, which has them in its table.
Invariant: queries run in turns, so that readers of the log leave time to those who wait for a
reply.
Never: writes; knows SQL.
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from appliance.api.turns import Turns
from appliance.log.query import event_query, row_query, usage_query
from appliance.wire import appliance_of, json_response

MAX_READERS = 2


def log_routes() -> list[Route]:
    """GET /v1/penstock/log, /events and /usage; their parameters are those of log.query."""
    api = _LogApi()
    return [
        Route("/v1/penstock/log", api.log),
        Route("/v1/penstock/events", api.events),
        Route("/v1/penstock/usage", api.usage),
    ]


class _LogApi:
    def __init__(self) -> None:
        self._turns = Turns("log-reader", MAX_READERS)

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

    async def _reply(self, http: Request, read: Callable[[], list[dict[str, object]]]) -> Response:
        rows = await self._turns.run(http, read)
        return json_response({"object": "list", "data": rows})
