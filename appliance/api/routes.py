"""The HTTP surface: one table of routes, what holds for all of them, and refusals before parsing.

Owns: paths, and the handlers of what is asked about the appliance itself; the headers that all
replies carry, OPTIONS, and how an error becomes a reply; which requests a full queue refuses by
their first line, so that a flood costs little.
Invariant: every route is in the document of openapi, and nothing else is.
Never: decides about requests; it asks the Appliance.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import math
import re
import secrets
import time
from collections.abc import Collection, Sequence
from importlib.metadata import version

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Message, Receive, Scope, Send

from appliance.api.admission import AdmissionTurns
from appliance.api.appliance import Appliance
from appliance.api.ask import model_not_found
from appliance.api.generation import ENDPOINTS, generating_routes
from appliance.api.ollama_api import ollama_routes
from appliance.api.openapi import document
from appliance.api.operator_api import (
    HttpCounts,
    cache_routes,
    control_routes,
    log_routes,
    metrics,
    switch_roles,
)
from appliance.api.replies import model_object, other_model_object
from appliance.api.responses import ResponseStore, memory_routes
from appliance.api.tokenize import tokenize_routes
from appliance.api.wire import (
    Dialect,
    appliance_of,
    arrival_of,
    dialect_of,
    error_body,
    error_response,
    json_response,
    peer_of,
    reply_headers,
)
from appliance.frame.protocol import FRAME_VERSION
from appliance.request import CLIENT_CLOSED_REQUEST, Peer, Role
from engine.errors import QueueFull, RequestError, Unavailable

# Refusals before a request is parsed: what a full queue says to a flood.
# Parsing, validating and tokenizing what will be refused anyway takes four times as long as all
# that is done here; a flood's last client would wait for all of it.
# Invariant: the reply is the one that the long way would have given to a request that is in order;
# what is in any way out of the ordinary goes the long way.
# Never: refuses what the queue would take, if its prompt is as long as its body suggests.


_FIRST_LINE = re.compile(rb"POST (/[a-z0-9/]+) HTTP/1\.1\r\n")
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d{1,9})(?=\r\n)")
_SPECIAL = re.compile(
    rb"\r\n(?:connection|expect|origin|transfer-encoding|upgrade|x-request-id) *:"
)
"""Headers that change how a reply looks, or what follows it."""


class EarlyRefusals:
    """Refuses floods for one application before a request is parsed.

    Args:
        appliance: says whether there is room.
        paths: of the requests that take room.
        counts: of replies.
    """

    def __init__(self, appliance: Appliance, paths: Collection[str], counts: HttpCounts) -> None:
        self._appliance = appliance
        self._paths = {path.encode(): path for path in paths}
        self._counts = counts

    def refuse(
        self, data: bytes, peer: Peer, headers: Collection[tuple[bytes, bytes]]
    ) -> bytes | None:
        """The reply to a whole request, if it is one that there is no room for.

        Args:
            data: all that has come since the connection's last reply.
            peer: who asks.
            headers: that every reply carries.
        """
        began_s = time.monotonic()
        line = _FIRST_LINE.match(data)
        path = None if line is None else self._paths.get(line[1])
        if path is None or peer.role < Role.USER or self._appliance.swaps is not None:
            return None
        try:
            self._appliance.check_available()
            if not _is_plain(data):
                return None
            self._appliance.check_room(peer.name, len(data))
        except QueueFull as error:
            reply = _reply(path, error, headers)
            self._counts.count(path, "POST", error.status, time.monotonic() - began_s)
            return reply
        except RequestError:
            return None
        return None


def _is_plain(data: bytes) -> bool:
    """Whether it is a whole request, and its reply is like all others."""
    end = data.find(b"\r\n\r\n")
    head = data[: end + 2].lower()
    length = _LENGTH.findall(head)
    return (
        end > 0
        and len(length) == 1
        and int(length[0]) == len(data) - end - 4
        and _SPECIAL.search(head) is None
    )


def _reply(path: str, error: QueueFull, headers: Collection[tuple[bytes, bytes]]) -> bytes:
    request_id = f"req-{secrets.token_hex(12)}"
    body = msgspec.json.encode(error_body(dialect_of(path), error, request_id))
    assert error.retry_after_ms is not None
    lines = [
        f"HTTP/1.1 {error.status} {http.HTTPStatus(error.status).phrase}".encode(),
        *(b"%b: %b" % header for header in headers),
        b"x-request-id: %b" % request_id.encode(),
        b"openai-processing-ms: 0",
        b"retry-after: %d" % math.ceil(error.retry_after_ms / 1000),
        b"retry-after-ms: %d" % error.retry_after_ms,
        b"content-length: %d" % len(body),
        b"content-type: application/json",
    ]
    if dialect_of(path) is Dialect.ANTHROPIC:
        lines.append(b"request-id: %b" % request_id.encode())
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


# --------------------------------------------------------------------------------------------------


# The outermost layer of the HTTP API: what holds for every route, known or not.
# Invariant: every reply has a request id, every refusal is OpenAI's error object, and a path that
# is not there is 404 however it is written.
# Never: knows a route by name.


_ORIGIN = re.compile(r"https?://[^/]*", re.IGNORECASE)
_BASE = re.compile(r"(/openai)?(/v1)*(?=/)")
"""What base addresses begin with, and clients put in front once more or leave out."""
_OTHER_NAMES = {"/ping": "/health"}
_EVERYTHING = "/*"
"""The path of `OPTIONS *`."""


class ApiApplication(Starlette):
    """The ASGI application in front of an appliance.

    Set `state.stopping` to end the frame streams, which would otherwise never end.
    """

    def __init__(self, appliance: Appliance, routes: Sequence[Route]) -> None:
        super().__init__(
            routes=routes,
            exception_handlers={
                RequestError: _on_request_error,
                HTTPException: _on_http_exception,
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
        """Answer one request, whose path is made plain."""
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        scope["path"] = self._served_path(plain_path(scope["path"]))
        arrived_ns = arrival_of(Request(scope)).arrived_ns
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
    """A path without scheme and host, empty segments, or a slash at its end.

    Clients put base addresses and paths together carelessly; what they mean is clear.
    """
    if not target.startswith("/"):
        target = _ORIGIN.sub("", target, count=1)
    return "/" + "/".join(segment for segment in target.split("/") if segment)


def _allowed_methods(http: Request) -> str:
    """For the header Allow, of all the routes with this path."""
    routes = [
        route
        for route in http.app.routes
        if http.scope["path"] == _EVERYTHING or route.matches(http.scope)[0] is not Match.NONE
    ]
    return ", ".join(sorted({"OPTIONS"}.union(*(route.methods for route in routes))))


async def _on_request_error(http: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(http, error)


async def _on_http_exception(http: Request, error: Exception) -> Response:
    """Starlette's own 404 and 405, and OPTIONS, which no route has."""
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
    refusal = RequestError(what, code=code, status=error.status_code, kind=kind)
    response = error_response(http, refusal)
    response.headers.update(headers)
    return response


async def _on_disconnect(http: Request, error: Exception) -> Response:
    """The client left before its body was complete: nobody reads this."""
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


# --------------------------------------------------------------------------------------------------


def build_app(appliance: Appliance) -> ApiApplication:
    """The ASGI application in front of an appliance."""
    edge = ApiApplication(
        appliance,
        [
            *generating_routes(),
            *memory_routes(),
            *tokenize_routes(),
            *ollama_routes(),
            Route("/v1/models", models),
            Route("/v1/models/{id:path}", model),
            Route("/api/v0/models", lm_studio_models),
            Route("/props", props),
            Route("/health", health),
            Route("/ready", ready),
            Route("/version", show_version),
            Route("/openapi.json", openapi),
            Route("/metrics", metrics),
            *control_routes(),
            *cache_routes(),
            Route("/v1/penstock/roles", switch_roles, methods=["POST"]),
            *log_routes(),
        ],
    )
    edge.state.early = EarlyRefusals(appliance, ENDPOINTS, edge.state.http_counts)
    edge.state.turns = AdmissionTurns()
    edge.state.responses = ResponseStore()
    return edge


async def models(http: Request) -> Response:
    """The model that is served, and those that a request may name instead."""
    served = appliance_of(http).model
    listed = [model_object(served), *map(other_model_object, served.others)]
    return json_response({"object": "list", "data": listed})


async def lm_studio_models(http: Request) -> Response:
    """Answer LM Studio's clients, which look for the state and the longest context."""
    served = appliance_of(http).model
    listed = [
        {"id": name, "object": "model", "type": "llm", "publisher": "penstock", "state": state}
        | ({"max_context_length": served.max_model_len} if name == served.model_id else {})
        for state, names in (("loaded", [served.model_id]), ("not-loaded", served.others))
        for name in names
    ]
    return json_response({"object": "list", "data": listed})


async def props(http: Request) -> Response:
    """Answer llama.cpp's clients, which look for the context and the chat template."""
    appliance = appliance_of(http)
    template = appliance.tokenizer.chat_template
    return json_response(
        {
            "default_generation_settings": {"n_ctx": appliance.model.max_model_len},
            "model_alias": appliance.model.model_id,
            "chat_template": "" if template is None else template.tool_source,
        }
    )


async def model(http: Request) -> Response:
    """A model by its id, which may contain slashes."""
    served, asked = appliance_of(http).model, http.path_params["id"]
    if asked in served.others:
        return json_response(other_model_object(asked))
    if not served.is_called(asked):
        raise model_not_found(asked, served)
    return json_response(model_object(served))


async def health(http: Request) -> Response:
    """Liveness: the loop answers."""
    return json_response({"status": "ok"})


async def ready(http: Request) -> Response:
    """Readiness: a completion asked for now would be accepted."""
    reason = appliance_of(http).not_ready_reason()
    if reason is not None:
        raise Unavailable(reason, code="not_ready")
    if (reason := appliance_of(http).degraded_reason()) is not None:
        return json_response({"status": "degraded", "reason": reason})
    return json_response({"status": "ready"})


async def show_version(http: Request) -> Response:
    """What is running, and the frames that it speaks."""
    return json_response({"version": version("penstock"), "frame_version": FRAME_VERSION})


async def openapi(http: Request) -> Response:
    """What this server can be asked, as an OpenAPI document."""
    needs_key, vocab_size = peer_of(http).key is not None, None
    with contextlib.suppress(Unavailable):  # while a model is fetched
        vocab_size = appliance_of(http).tokenizer.vocab_size
    return json_response(document(version("penstock"), needs_key=needs_key, vocab_size=vocab_size))
