"""Between HTTP and the handlers: bodies in, JSON and errors out.

Owns: the body limit, the headers that replies carry, and what of a client's headers is kept.
Called by: api, generation.
Invariant: a refusal that may pass says when to come back, in both headers that clients read.
Never: knows a route.
"""

from __future__ import annotations

import math
import re
import time
from typing import cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from appliance.replies import error_object
from appliance.request import Appliance
from engine.errors import RequestError

MAX_BODY_BYTES = 32 * 2**20


def appliance_of(http: Request) -> Appliance:
    """The appliance that the application was built for."""
    return cast(Appliance, http.app.state.appliance)


async def read_body(http: Request) -> bytes:
    """The whole body.

    Raises:
        RequestError: 413 `body_too_large`, as soon as it is known.
    """
    declared = http.headers.get("content-length", "0")
    body = bytearray()
    # The server has checked that the header is digits, but not how many.
    is_too_large = len(declared) > 15 or int(declared) > MAX_BODY_BYTES
    if not is_too_large:
        async for chunk in http.stream():
            body += chunk
            if is_too_large := len(body) > MAX_BODY_BYTES:
                break
    if is_too_large:
        raise RequestError(
            f"the body is larger than {MAX_BODY_BYTES} bytes", code="body_too_large", status=413
        )
    return bytes(body)


def json_response(
    content: object, *, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """Anything that msgspec encodes."""
    return Response(msgspec.json.encode(content), status, headers, "application/json")


def error_response(http: Request, error: RequestError) -> Response:
    """An error object, with the headers of a generation's reply if it was to be one."""
    headers = reply_headers(http)
    if error.retry_after_ms is not None:
        headers["retry-after"] = str(math.ceil(error.retry_after_ms / 1000))
        headers["retry-after-ms"] = str(error.retry_after_ms)
    return json_response(error_object(error), status=error.status, headers=headers)


def reply_headers(http: Request) -> dict[str, str]:
    """What every reply to a generation carries, also its refusal; nothing for other routes."""
    state = http.scope["state"]
    if "request_id" not in state:
        return {}
    elapsed_ms = (time.monotonic_ns() - state["arrived_ns"]) // 1_000_000
    headers = {"x-request-id": state["request_id"], "openai-processing-ms": str(elapsed_ms)}
    if client_id := client_request_id(http):
        headers["x-client-request-id"] = client_id
    return headers


def client_request_id(http: Request) -> str | None:
    """The client's own id for the request, of harmless characters; None if it has none."""
    given = http.headers.get("x-request-id", "")
    return re.sub(r"[^A-Za-z0-9._:-]", "", given)[:128] or None
