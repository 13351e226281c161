"""Between HTTP and the handlers: JSON and errors out.

Owns: the headers that replies carry, and what of a client's headers is kept.
Invariant: a refusal that may pass says when to come back, in both headers that clients read.
Never: knows a route.
"""

from __future__ import annotations

import math
import time
from typing import cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from appliance.api.appliance import Appliance
from appliance.api.arrival import arrival_of, client_request_id
from appliance.configuration.dialects import Dialect, dialect_of, error_body
from engine.errors import RequestError

CLIENT_CLOSED_REQUEST = 499
"""Nginx's status for a client that left before its reply; it is only logged."""


def appliance_of(http: Request) -> Appliance:
    """The appliance that the application was built for."""
    return cast(Appliance, http.app.state.appliance)


def error_object(error: RequestError) -> dict[str, object]:
    """OpenAI's error object; `code` is a string or null."""
    return error_body(Dialect.OPENAI, error)


def json_response(
    content: object, *, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """Anything that msgspec encodes."""
    return Response(msgspec.json.encode(content), status, headers, "application/json")


def error_response(http: Request, error: RequestError) -> Response:
    """An error object as the API that was asked has it, and when to come back."""
    headers = reply_headers(http)
    if error.retry_after_ms is not None:
        headers["retry-after"] = str(math.ceil(error.retry_after_ms / 1000))
        headers["retry-after-ms"] = str(error.retry_after_ms)
    body = error_body(dialect_of(http.scope["path"]), error, headers["x-request-id"])
    return json_response(body, status=error.status, headers=headers)


def reply_headers(http: Request) -> dict[str, str]:
    """What every reply carries."""
    arrival = arrival_of(http)
    elapsed_ms = (time.monotonic_ns() - arrival.arrived_ns) // 1_000_000
    headers = {"x-request-id": arrival.request_id, "openai-processing-ms": str(elapsed_ms)}
    if dialect_of(http.scope["path"]) is Dialect.ANTHROPIC:
        headers["request-id"] = arrival.request_id
    if client_id := client_request_id(http):
        headers["x-client-request-id"] = client_id
    return headers
