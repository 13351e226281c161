"""Let web pages of allowed origins use the API (CORS)."""

from __future__ import annotations

from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import Message, Scope, Send

METHODS = "GET, POST, DELETE, OPTIONS"
MAX_AGE_S = 600
EXPOSED = "x-request-id, request-id, retry-after, retry-after-ms, x-penstock-ignored"


def allowed_origin(scope: Scope, origins: Collection[str]) -> str | None:
    """Return the page's origin if it may use the API; None: not allowed, or no page."""
    origin = (single_header(scope, b"origin") or b"").decode("latin-1")
    return origin if origin and (origin in origins or "*" in origins) else None


def is_preflight(scope: Scope) -> bool:
    """Say whether the request is a browser's CORS preflight."""
    headers = Headers(scope=scope)
    return scope["method"] == "OPTIONS" and "access-control-request-method" in headers


def preflight(scope: Scope, origin: str) -> Response:
    """Answer an allowed page's preflight; it may send any headers."""
    asked = Headers(scope=scope).get("access-control-request-headers", "authorization")
    return Response(
        status_code=200,  # some that stand between take 204 for a failure
        headers={
            "access-control-allow-origin": origin,
            "access-control-allow-methods": METHODS,
            "access-control-allow-headers": asked,
            "access-control-max-age": str(MAX_AGE_S),
            "vary": "origin",
        },
    )


def readable(send: Send, origin: str) -> Send:
    """Wrap `send` so that a page of this origin may read the reply."""

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["access-control-allow-origin"] = origin
            headers["access-control-expose-headers"] = EXPOSED
            headers.add_vary_header("origin")
        await send(message)

    return send_with_headers


def single_header(scope: Scope, name: bytes) -> bytes | None:
    """Return a header's value; None: missing, or given twice, which is ambiguous."""
    values = header_values(scope, name)
    return values[0] if len(values) == 1 else None


def header_values(scope: Scope, name: bytes) -> list[bytes]:
    """List the values of a header, as it was sent."""
    return [value for key, value in scope["headers"] if key == name]
