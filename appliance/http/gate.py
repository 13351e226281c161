"""In front of every route: who asks, whether the request is sound, how much it may send.

Owns: the request's Arrival with its peer; the key that TCP asks for, and the limits on heads and
bodies.
Invariant: no handler runs for a peer that is not known, and none sees more body than allowed. Of
the memory for half-sent bodies nobody holds more than is left for all others.
Never: knows a route but /health, which tells nothing and is open so that probes need no key, and
/metrics, which can be opened, for it names no user and no request.

Browsers: a page cannot send a key without asking first (CORS), and only pages of `cors_origins`
are answered with yes. Otherwise the Origin header proves nothing that the key does not, and is not
read. The Host header is: a page whose name was rebound to this machine sends its own.
"""

from __future__ import annotations

import asyncio
import functools
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import cast

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from appliance.api.wire import Arrival, error_response
from appliance.http.access import (
    AccessPolicy,
    Credentials,
    allowed_origin,
    is_preflight,
    preflight,
    readable,
)
from appliance.request import Peer, Role
from engine.errors import Forbidden, RequestError, Unavailable

MAX_HEADERS = 100
MAX_HEAD_BYTES = 64 << 10
MAX_ARRIVING_BODIES = 16
"""Bodies of the greatest size that may be in memory half sent, all connections together."""
UNCOUNTED_BYTES = 64 << 10
"""Of each body, so that a small one always gets in; the number of connections bounds these."""
OPEN_PATH = "/health"
METRICS_PATH = "/metrics"
"""Open only where the policy says so: gateways that scrape it cannot show a key."""
BUSY_RETRY_MS = 1000

_LOOPBACK = re.compile(rb"(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d{1,5})?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ClientLine:
    """The connection that a request came by, as the server passes it on in the scope's state."""

    credentials: Credentials | None
    """Whose it is; None on TCP."""
    on_key: Callable[[str | None], None]
    """To be called with the name of a valid key that was shown."""
    write_part: Callable[[bytes], Awaitable[None]]
    """To be called with each part of a reply's body, once its head is out."""
    hang_up: Callable[[], None]
    """Ends it, whatever has not been read."""


class Gate:
    """An ASGI application around another; `policy` may be replaced at any time."""

    def __init__(self, app: ASGIApp, policy: AccessPolicy) -> None:
        self.policy = policy
        self.arriving_bytes: Counter[str] = Counter()
        """Of bodies that are not complete, by the name of whose they are."""
        self.is_open = asyncio.Event()
        """Until it is set, what would change something waits; looking is always possible."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through to the application, or refuse it."""
        origin = allowed_origin(scope, self.policy.cors_origins)
        if origin is not None:
            if is_preflight(scope):
                await preflight(scope, origin)(scope, receive, send)
                return
            send = readable(send, origin)
        line = _line(scope)
        arrival = Arrival(line.write_part, hang_up=line.hang_up)
        arrival.keep(scope)
        try:
            _check_head(scope)
            arrival.peer = self._peer(scope, line)
            arrival.is_known = functools.partial(self._is_known, scope, arrival.peer)
        except RequestError as error:
            response = error_response(Request(scope), error)
            if error.status == 401:
                response.headers["www-authenticate"] = "Bearer"
            if error.code in ("invalid_http", "headers_too_large", "too_many_connections"):
                response.headers["connection"] = "close"
            await response(scope, receive, send)
            return
        if scope["method"] == "POST":
            await self.is_open.wait()
        body = _Body(self, scope, receive, arrival.peer.name)
        try:
            await self._app(scope, body.receive, send)
        finally:
            body.settle()

    def _peer(self, scope: Scope, line: ClientLine) -> Peer:
        if line.credentials is not None:
            return self.policy.peer_of(line.credentials)
        # a page whose name was rebound to this machine has no certificate for it
        is_encrypted = scope["scheme"] == "https"
        if not is_encrypted and not _LOOPBACK.fullmatch(_header(scope, b"host") or b"localhost"):
            raise Forbidden(
                "the Host header names another machine",
                code="host_not_allowed",
                hint="call it localhost or 127.0.0.1, also from a proxy",
            )
        key = _shown_key(scope)
        peer = self.policy.holder_of(key)
        if peer is None and scope["path"] == OPEN_PATH:
            return Peer()
        if peer is None and scope["path"] == METRICS_PATH and self.policy.has_open_metrics:
            return Peer(role=Role.VIEWER)
        if peer is None:
            raise RequestError(
                "the API key is missing" if not key else "the API key is not valid",
                code="invalid_api_key",
                status=401,
                kind="authentication_error",
                hint="send the header Authorization: Bearer KEY, or x-api-key",
            )
        line.on_key(peer.key)
        return peer

    def _is_known(self, scope: Scope, peer: Peer) -> bool:
        """False once the policy has lost the key by which it came in, or gives it a lesser role."""
        credentials = _line(scope).credentials
        if credentials is not None:
            return self.policy.peer_of(credentials).role >= peer.role
        if peer.key is None:  # it showed none, where none is asked for
            return True
        now = self.policy.holder_of(_shown_key(scope))
        return now is not None and now.role >= peer.role


class _Body:
    """One request's body on its way in."""

    def __init__(self, gate: Gate, scope: Scope, receive: Receive, owner: str) -> None:
        self._gate = gate
        self._receive = receive
        self._max_bytes = gate.policy.max_body_bytes
        self._declared = _header(scope, b"content-length") or b"0"
        self._owner = owner
        self._num_bytes = 0
        self._num_counted_bytes = 0
        self._is_complete = False

    async def receive(self) -> Message:
        """The next part.

        Raises:
            RequestError: 413 `body_too_large`, as soon as it is known; 503 `busy` when its owner
                has more on its way than is left for others.
        """
        # The server has checked that the header is digits, but not how many.
        if len(self._declared) > 15 or int(self._declared) > self._max_bytes:
            raise self._too_large()
        message = await self._receive()
        if message["type"] == "http.request" and not self._is_complete:
            self._num_bytes += len(message.get("body", b""))
            if self._num_bytes > self._max_bytes:
                raise self._too_large()
            if message.get("more_body", False):
                self._count(max(self._num_bytes - UNCOUNTED_BYTES, 0))
            else:
                self.settle()
        return message

    def settle(self) -> None:
        """It is not arriving any more."""
        self._is_complete = True
        self._count(0)

    def _count(self, num_bytes: int) -> None:
        """Hold so much; refuse only whoever holds too much, never one who comes after them."""
        held = self._gate.arriving_bytes
        held[self._owner] += num_bytes - self._num_counted_bytes
        self._num_counted_bytes = num_bytes
        if not held[self._owner]:
            del held[self._owner]
        if num_bytes and held[self._owner] > MAX_ARRIVING_BODIES * self._max_bytes - held.total():
            raise Unavailable(
                "too many of your large bodies are on their way at once",
                code="busy",
                retry_after_ms=BUSY_RETRY_MS,
            )

    def _too_large(self) -> RequestError:
        return RequestError(
            f"the body is larger than {self._max_bytes} bytes", code="body_too_large", status=413
        )


def _check_head(scope: Scope) -> None:
    """Refuse what is HTTP to the letter, but nothing that a client of this API would send."""
    headers: Iterable[tuple[bytes, bytes]] = scope["headers"]
    names = [name for name, _ in headers]
    num_bytes = sum(len(name) + len(value) for name, value in headers) + len(scope["raw_path"])
    if len(names) > MAX_HEADERS or num_bytes > MAX_HEAD_BYTES:
        raise headers_too_large()
    if scope["http_version"] not in ("1.0", "1.1"):
        raise RequestError("only HTTP/1.1 is spoken here", code="invalid_http")
    # With both, two programs can disagree on where the body ends, and smuggling begins.
    if b"transfer-encoding" in names and b"content-length" in names:
        raise RequestError(
            "a body has a content-length or a transfer-encoding, not both", code="invalid_http"
        )


def headers_too_large() -> RequestError:
    """The same whether they were read, or given up before they had ended."""
    return RequestError(
        f"more than {MAX_HEADERS} headers or {MAX_HEAD_BYTES} bytes of them",
        code="headers_too_large",
        status=431,
    )


def _line(scope: Scope) -> ClientLine:
    return cast(ClientLine, scope["state"]["line"])


def _shown_key(scope: Scope) -> str:
    """As OpenAI's clients show it, or Anthropic's, or Azure's; empty if none is, which is nobody's.

    Where several are shown they must be the same: nobody would know which counts.
    """
    scheme, _, bearer = (_header(scope, b"authorization") or b"").decode("latin-1").partition(" ")
    keys = {bearer.strip()} if scheme.lower() == "bearer" else set()
    for name in (b"x-api-key", b"api-key"):
        keys.add((_header(scope, name) or b"").decode("latin-1").strip())
    keys.discard("")
    return keys.pop() if len(keys) == 1 else ""


def _header(scope: Scope, name: bytes) -> bytes | None:
    """A header's value; None if it is not there, or there twice: then nobody knows which counts."""
    values = [value for key, value in scope["headers"] if key == name]
    return values[0] if len(values) == 1 else None
