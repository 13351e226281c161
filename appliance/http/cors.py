"""Cross-origin requests: which web pages may use the API from a browser.

Owns: the answer to a preflight, and the headers that let a page read a reply.
Invariant: without the setting `cors_origins` no page may; with it a page still needs a key for all
but the preflight, which tells nothing else.
Never: allows credentials such as cookies.
"""

from __future__ import annotations

from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import Message, Scope, Send

METHODS = "GET, POST, DELETE, OPTIONS"
MAX_AGE_S = 600
EXPOSED = "x-request-id, request-id, retry-after, retry-after-ms, x-penstock-ignored"


def allowed_origin(scope: Scope, origins: Collection[str]) -> str | None:
    """The page's origin if it may use the API; None: it may not, or this is no page's request."""
    origin = Headers(scope=scope).get("origin")
    return origin if origin and (origin in origins or "*" in origins) else None


def is_preflight(scope: Scope) -> bool:
    """Whether a browser asks if a page may ask."""
    headers = Headers(scope=scope)
    return scope["method"] == "OPTIONS" and "access-control-request-method" in headers


def preflight(scope: Scope, origin: str) -> Response:
    """The answer to an allowed page; it may send whatever headers it wants to."""
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
    """Sends replies that a page of this origin may read."""

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["access-control-allow-origin"] = origin
            headers["access-control-expose-headers"] = EXPOSED
            headers.add_vary_header("origin")
        await send(message)

    return send_with_headers
