"""Serve the page that people open in a browser: chat, and what the daemon does now."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Scope

_TEXT = files(__package__).joinpath("page.html").read_text()


def _digests(tag: str) -> str:
    """List what a page has between these tags, as its policy names it."""
    parts = re.findall(rf"<{tag}>(.*?)</{tag}>", _TEXT, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(part.encode()).digest()) for part in parts)
    return " ".join(f"'sha256-{digest.decode()}'" for digest in digests)


POLICY = "; ".join(
    [
        *("default-src 'none'", "connect-src 'self'", "img-src data:", "base-uri 'none'"),
        *("form-action 'none'", "frame-ancestors 'none'"),
        *(f"script-src {_digests('script')}", f"style-src {_digests('style')}"),
    ]
)
"""The page loads nothing, and runs no script but its own."""
_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def asks_for_page(scope: Scope) -> bool:
    """Say whether a browser asks for the page; others get Ollama's answer at the same path."""
    is_read = scope["method"] in ("GET", "HEAD") and scope["path"] == "/"
    return is_read and "text/html" in Headers(scope=scope).get("accept", "")


def page() -> Response:
    """Answer with the page, which holds nothing of this daemon: its script asks, with the key."""
    return Response(_TEXT, media_type="text/html", headers=_HEADERS)
