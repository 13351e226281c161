"""The HTTP surface: one table of routes, one handler per verb.

Owns: paths, status codes, headers, and how an error becomes a reply.
Called by: server, with the daemon as the Appliance; generation answers the two POSTs of OpenAI.
Invariant: every reply is JSON, errors are OpenAI's error object, and handlers take milliseconds:
whatever is slow runs in a thread.
Never: decides about requests; it asks the Appliance.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from importlib.metadata import version

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from appliance.generation import chat, complete
from appliance.log_api import log_routes
from appliance.openai import model_not_found
from appliance.protocol import FRAME_VERSION
from appliance.replies import model_object
from appliance.request import Appliance
from appliance.wire import appliance_of, error_response, json_response
from engine.errors import RequestError, Unavailable

_log = logging.getLogger(__name__)


def build_app(appliance: Appliance) -> Starlette:
    """The ASGI application in front of an appliance.

    Set `app.state.stopping` to end the frame streams, which would otherwise never end.
    """
    app = Starlette(
        routes=[
            Route("/v1/completions", complete, methods=["POST"]),
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{id:path}", model),
            Route("/health", health),
            Route("/ready", ready),
            Route("/version", show_version),
            Route("/v1/requests", requests),
            Route("/v1/requests/{id}", request),
            Route("/v1/requests/{id}/cancel", cancel, methods=["POST"]),
            Route("/v1/penstock/state", state),
            Route("/v1/penstock/stream", stream),
            *log_routes(),
        ],
        exception_handlers={
            RequestError: _on_request_error,
            HTTPException: _on_http_exception,
            ClientDisconnect: _on_disconnect,
            Exception: _on_bug,
        },
    )
    app.router.redirect_slashes = False
    app.state.appliance = appliance
    app.state.stopping = asyncio.Event()
    return app


async def models(http: Request) -> Response:
    """The one model there is, as a list."""
    return json_response({"object": "list", "data": [model_object(appliance_of(http).model)]})


async def model(http: Request) -> Response:
    """The one model there is, by its id, which may contain slashes."""
    served = appliance_of(http).model
    asked = http.path_params["id"]
    if asked != served.model_id:
        raise model_not_found(asked, served.model_id)
    return json_response(model_object(served))


async def health(http: Request) -> Response:
    """Liveness: the loop answers."""
    return json_response({"status": "ok"})


async def ready(http: Request) -> Response:
    """Readiness: a completion asked for now would be accepted."""
    reason = appliance_of(http).not_ready_reason()
    if reason is not None:
        raise Unavailable(reason, code="not_ready")
    return json_response({"status": "ready"})


async def show_version(http: Request) -> Response:
    """What is running, and the frames that it speaks."""
    return json_response({"version": version("penstock"), "frame_version": FRAME_VERSION})


async def requests(http: Request) -> Response:
    """Live requests, then the last finished ones."""
    return json_response({"object": "list", "data": appliance_of(http).request_frames()})


async def request(http: Request) -> Response:
    """One request by its id."""
    request_id = http.path_params["id"]
    frame = appliance_of(http).request_frame(request_id)
    if frame is None:
        frame = await asyncio.to_thread(appliance_of(http).logged_frame, request_id)
    if frame is None:
        raise _request_not_found(request_id)
    return json_response(frame)


async def cancel(http: Request) -> Response:
    """End a live request; its own client reads finish reason `abort`."""
    request_id = http.path_params["id"]
    if not appliance_of(http).cancel(request_id, "api"):
        raise _request_not_found(request_id)
    return json_response({"id": request_id, "status": "cancelled"})


async def state(http: Request) -> Response:
    """The newest frame."""
    return Response(appliance_of(http).frame_json(), media_type="application/json")


async def stream(http: Request) -> Response:
    """Frames, the newest at once and each new one when it is made, until either side leaves."""
    wants_events = "text/event-stream" in http.headers.get("accept", "")
    prefix, suffix = (b"data: ", b"\n\n") if wants_events else (b"", b"\n")
    media_type = "text/event-stream" if wants_events else "application/x-ndjson"
    appliance, stopping = appliance_of(http), http.app.state.stopping

    async def lines() -> AsyncIterator[bytes]:
        async for frame_json in _frames(appliance, stopping):
            yield prefix + frame_json + suffix

    return StreamingResponse(lines(), media_type=media_type, headers={"cache-control": "no-store"})


async def _frames(appliance: Appliance, stopping: asyncio.Event) -> AsyncIterator[bytes]:
    """Frames until `stopping` is set."""
    seq = -1
    stopped = asyncio.create_task(stopping.wait())
    try:
        while True:
            newer = asyncio.create_task(appliance.next_frame_json(seq))
            try:
                await asyncio.wait({newer, stopped}, return_when=asyncio.FIRST_COMPLETED)
                if stopped.done():
                    return
                seq, frame_json = newer.result()
            finally:
                newer.cancel()
            yield frame_json
    finally:
        stopped.cancel()


def _request_not_found(request_id: str) -> RequestError:
    return RequestError(
        f"no request `{request_id[:200]}` is known, or it has ended",
        code="request_not_found",
        param="id",
        status=404,
        kind="not_found_error",
    )


async def _on_request_error(http: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(http, error)


async def _on_http_exception(http: Request, error: Exception) -> Response:
    """Starlette's own 404 and 405."""
    assert isinstance(error, HTTPException)
    code, kind = "http_error", "invalid_request_error"
    what = error.detail
    if error.status_code == 404:
        what = f"there is no {http.method} {http.url.path[:200]}"
        code, kind = "unknown_url", "not_found_error"
    elif error.status_code == 405:
        what, code = f"{http.method} is not allowed for {http.url.path}", "method_not_allowed"
    refusal = RequestError(what, code=code, status=error.status_code, kind=kind)
    response = error_response(http, refusal)
    response.headers.update(error.headers or {})
    return response


async def _on_disconnect(http: Request, error: Exception) -> Response:
    """The client left before its body was complete: nobody reads this."""
    return Response(status_code=499)


async def _on_bug(http: Request, error: Exception) -> Response:
    """Starlette raises the error again after this reply, and the server logs the traceback."""
    request_id = http.scope["state"].get("request_id")
    _log.error("request %s failed: %r", request_id, error)
    what = "internal error" + (f" in request {request_id}" if request_id else "")
    return error_response(
        http, RequestError(what, code="internal", status=500, kind="server_error")
    )
