"""Apply what holds for every route: request ids, error objects, OPTIONS.

Invariant: every reply has a request id, every refusal is OpenAI's error object, and a path that
is not there is 404 however it is written.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Message, Receive, Scope, Send

from appliance.api.core.appliance import Appliance
from appliance.api.core.wire import appliance_of, arrival_of, error_response, reply_headers
from appliance.api.operator.cache import PROBES, HttpCounts
from appliance.daemon.requests.request import CLIENT_CLOSED_REQUEST
from engine.errors import RequestError

_ORIGIN = re.compile(r"https?://[^/]*", re.IGNORECASE)
_BASE = re.compile(r"(/openai)?(/v1)*(?=/)")
"""What base addresses begin with, and clients put in front once more or leave out."""
_OTHER_NAMES = {"/ping": "/health"}
_EVERYTHING = "/*"
"""The path of `OPTIONS *`."""
_INSTEAD = {
    "/v1/conversations": "continue with `previous_response_id`, or send all items as `input`",
    "/v1/responses/compact": "`truncation: auto` leaves out the oldest turns",
}
"""What does here what other servers have paths for."""


class ApiApplication(Starlette):
    """Build the ASGI application in front of an appliance.

    Set `state.stopping` to end the frame streams, which would otherwise never end.
    """

    def __init__(self, appliance: Appliance, routes: Sequence[Route]) -> None:
        super().__init__(
            routes=routes,
            exception_handlers={
                RequestError: _on_request_error,
                HTTPException: _on_http_exception,
                RecursionError: _on_recursion,
                ClientDisconnect: _on_disconnect,
                Exception: _on_bug,
            },
        )
        self.router.redirect_slashes = False
        self.state.appliance = appliance
        self.state.stopping = asyncio.Event()
        self.state.http_counts = HttpCounts()
        self._paths: dict[object, str] = {route.endpoint: route.path for route in routes}
        self._plain_paths = {route.path for route in routes if not route.param_convertors}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, with its path made plain."""
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        scope["path"] = self._served_path(plain_path(scope["path"]))
        arrival = arrival_of(Request(scope))
        arrived_ns = arrival.arrived_ns
        status = CLIENT_CLOSED_REQUEST

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message).update(reply_headers(Request(scope)))
            await send(message)

        try:
            await super().__call__(scope, receive, send_with_headers)
        finally:
            path = self._paths.get(scope.get("endpoint"))
            elapsed_s = (time.monotonic_ns() - arrived_ns) / 1e9
            self.state.http_counts.count(path, scope["method"], status, elapsed_s)
            error = arrival.refusal
            if error is not None and path not in PROBES and error.code != "request_not_found":
                self.state.appliance.refused(arrival.peer, error)

    def _served_path(self, path: str) -> str:
        """Find the route that is meant: clients leave out `/v1`, double it, or put it too often."""
        if path in self._plain_paths:
            return path
        rest = _BASE.sub("", path, count=1)
        routes = [route for route in self.routes if isinstance(route, Route)]
        for meant in (path, f"/v1{rest}", rest, _OTHER_NAMES.get(rest, path)):
            if any(one.path_regex.match(meant) for one in routes):
                return meant
        return path


def plain_path(target: str) -> str:
    """Strip a path of scheme and host, empty segments, and a slash at its end.

    Clients put base addresses and paths together carelessly; what they mean is clear.
    """
    if not target.startswith("/"):
        target = _ORIGIN.sub("", target, count=1)
    return "/" + "/".join(segment for segment in target.split("/") if segment)


def _allowed_methods(http: Request) -> str:
    """List the methods of a path's routes, for the header Allow."""
    routes = [
        route
        for route in http.app.routes
        if http.scope["path"] == _EVERYTHING or route.matches(http.scope)[0] is not Match.NONE
    ]
    return ", ".join(sorted({"OPTIONS"}.union(*(route.methods for route in routes))))


async def _on_request_error(http: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(http, error)


async def _on_recursion(http: Request, error: Exception) -> Response:
    """Refuse what nests deeper than what reads it can follow: only a body does."""
    what = "the body is nested too deeply"
    return error_response(http, RequestError(what, code="invalid_json"))


async def _on_http_exception(http: Request, error: Exception) -> Response:
    """Answer Starlette's own 404 and 405, and OPTIONS, which no route has."""
    assert isinstance(error, HTTPException)
    path = http.scope["path"]
    is_known = error.status_code == 405 or path == _EVERYTHING
    if http.method == "OPTIONS" and is_known:
        return Response(status_code=204, headers={"allow": _allowed_methods(http)})
    code, kind, what = "http_error", "invalid_request_error", error.detail
    headers = dict(error.headers or {})
    if error.status_code == 404:
        what = f"there is no {http.method} {path[:200]}"
        code, kind = "unknown_url", "not_found_error"
    elif error.status_code == 405:
        what, code = f"{http.method} is not allowed for {path[:200]}", "method_not_allowed"
        headers = {"allow": _allowed_methods(http)}
    hint = next((does for begin, does in _INSTEAD.items() if path.startswith(begin)), "")
    refusal = RequestError(what, code=code, status=error.status_code, kind=kind, hint=hint)
    response = error_response(http, refusal)
    response.headers.update(headers)
    return response


async def _on_disconnect(http: Request, error: Exception) -> Response:
    """Answer a client that left before its body was complete."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _on_bug(http: Request, error: Exception) -> Response:
    """Starlette raises the error again after this reply, and the server logs the traceback."""
    request_id = reply_headers(http)["x-request-id"]
    about = f"{request_id}: {type(error).__name__} in {http.method} {http.scope['path'][:200]}"
    appliance_of(http).event("error", "request.internal", f"{about}; the journal says where")
    what = f"internal error in request {request_id}"
    return error_response(
        http, RequestError(what, code="internal", status=500, kind="server_error")
    )
