"""Find which API a path belongs to, and write errors in its form.

Invariant: a request is refused in the form that its API's official client understands.
"""

from __future__ import annotations

from enum import Enum

from engine.errors import RequestError


class Dialect(Enum):
    """An API that is spoken here."""

    OPENAI = "/"
    ANTHROPIC = "/v1/messages"
    OLLAMA = "/api"
    COHERE = "/v2"


def dialect_of(path: str) -> Dialect:
    """Find the API that a path belongs to; OpenAI's where no other does."""
    for dialect in (Dialect.ANTHROPIC, Dialect.OLLAMA, Dialect.COHERE):
        if path == dialect.value or path.startswith(dialect.value + "/"):
            return dialect
    return Dialect.OPENAI


_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
"""Anthropic's types, by status; every other 4xx is an invalid_request_error."""


def error_body(dialect: Dialect, error: RequestError, request_id: str = "") -> dict[str, object]:
    """Write an error's body; its message ends with the hint, if there is one."""
    message = f"{error.what}; {error.hint}" if error.hint else error.what
    if dialect is Dialect.OLLAMA:
        return {"error": message}
    if dialect is Dialect.COHERE:
        return {"id": request_id, "message": message}
    if dialect is Dialect.ANTHROPIC:
        kind = _ANTHROPIC_KINDS.get(error.status, "invalid_request_error")
        told = {"type": kind, "message": message}
        return {"type": "error", "error": told, "request_id": request_id}
    names = {"type": error.kind, "param": error.param, "code": error.code}
    return {"error": {"message": message, **names}}
