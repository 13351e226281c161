"""Check each request before its route: peer, key, Host, and the sizes of head and body.

Invariant: a new policy applies to open connections, since roles are looked up with each request.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import cast
from weakref import WeakValueDictionary

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from appliance.api.core.wire import Arrival, KeptWords, error_response
from appliance.daemon.requests.request import Peer, Role
from appliance.daemon.survival.journal import Journal
from appliance.daemon.survival.keeper_channel import BUSY_LOOP
from appliance.http.access import AccessPolicy, Credentials
from appliance.http.api_keys import key_digest
from appliance.http.body_encoding import body_decoder
from appliance.http.bursts import Bursts, Streams
from appliance.http.cross_origin import (
    allowed_origin,
    header_values,
    is_preflight,
    preflight,
    readable,
    single_header,
)
from appliance.http.page import asks_for_page, page
from engine.errors import Forbidden, RequestError, Unavailable

MAX_HEADERS = 100
MAX_HEAD_BYTES = 64 << 10
MAX_ARRIVING_BODIES = 16
"""Maximum partly received bodies in memory, in bodies of maximum size, over all connections."""
UNCOUNTED_BYTES = 64 << 10
"""Uncounted bytes of each body, so that small bodies always pass; connections are limited."""
OPEN_PATHS = ("/health", "/v1/health", "/ping")
METRICS_PATH = "/metrics"
"""Open only by the policy: scraping gateways cannot send a key."""
BUSY_RETRY_MS = 1000
LOCAL_USER = "loopback"
"""The name of all TCP clients while no keys are required."""
_LOCAL_PAGE = re.compile(rb"https?://(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d{1,5})?")
_LOOPBACK = re.compile(rb"(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d{1,5})?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ClientLine:
    """The connection of a request, passed by the server in the scope's state."""

    credentials: Credentials | None
    """The peer's credentials; None on TCP."""
    is_encrypted: Callable[[], bool]
    """Says whether the transport itself is TLS; headers may claim it."""
    on_key: Callable[[str | None], None]
    """Called with the name of a valid key that the client sent."""
    write_part: Callable[[bytes], Awaitable[None]]
    """Called with each part of a reply's body, after its head."""
    hang_up: Callable[[], None]
    """Ends the connection, dropping what has not been read."""
    journal: Callable[[], Journal | None]
    """See Arrival.journal."""
    keep: Callable[[Scope, Journal, KeptWords, bytes], None]
    """Keeps a request, given its scope, journal and body; see Arrival.keep."""
    num_announced: Callable[[], int]
    """Counts the bytes that the current chunk of a body still announces."""
    key_digests: frozenset[bytes] = frozenset()
    """Digests of the keys that were sent to a dead daemon with this request."""


class Gate:
    """Check each request before the wrapped ASGI application; `policy` is replaceable."""

    def __init__(
        self,
        app: ASGIApp,
        policy: AccessPolicy,
        on_refused: Callable[[Peer, RequestError], None] = lambda *_: None,
    ) -> None:
        self.policy = policy
        self._on_refused = on_refused
        self.arriving_bytes: Counter[str] = Counter()
        """Bytes of incomplete bodies, by owner."""
        self.decoding: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """The turn of each owner whose compressed bodies are being read."""
        self.bursts = Bursts(Streams())
        self.is_open = asyncio.Event()
        """Until it is set, requests that change something wait; reads pass."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request to the application, or refuse it."""
        state = scope["state"]
        try:
            await self._answer(scope, receive, send)
        finally:
            state.clear()  # it refers back to the connection, which is freed at once so

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        BUSY_LOOP.answers()
        origin = allowed_origin(scope, self.policy.cors_origins)
        if origin is not None:
            if is_preflight(scope):
                await preflight(scope, origin)(scope, receive, send)
                return
            send = readable(send, origin)
        if self.policy.has_page and asks_for_page(scope):
            await page()(scope, receive, send)
            return
        line = _line(scope)
        arrival = Arrival(
            line.write_part,
            journal=line.journal,
            keep=functools.partial(line.keep, scope),
            hang_up=line.hang_up,
        )
        arrival.put_into(scope)
        arrival.peer = Peer(address=_address(scope))
        try:
            _check_head(scope)
            arrival.peer = replace(self._peer(scope, line), address=arrival.peer.address)
            arrival.is_known = functools.partial(self._is_known, scope, arrival.peer)
            body = _Body(self, scope, receive, arrival.peer.name)
        except RequestError as error:
            self._on_refused(arrival.peer, error)
            response = error_response(Request(scope), error)
            if error.status == 401:
                response.headers["www-authenticate"] = "Bearer"
            if error.code in ("invalid_http", "headers_too_large", "too_many_connections"):
                response.headers["connection"] = "close"
            await response(scope, receive, send)
            return
        if scope["method"] == "POST":
            await self.is_open.wait()
        try:
            await self._app(scope, body.receive, send)
        finally:
            body.stop_counting()

    def _peer(self, scope: Scope, line: ClientLine) -> Peer:
        if line.credentials is not None:
            return self.policy.peer_of(line.credentials)
        # a page whose name was rebound to this machine has no certificate for it
        is_encrypted = line.is_encrypted()
        if not is_encrypted and any(not _LOOPBACK.fullmatch(each) for each in _hosts(scope)):
            raise _wrong_host("the Host header names another machine")
        digests = key_digests(scope)
        peer = self.policy.holder_of_any(digests)
        if peer is None and scope["path"] in OPEN_PATHS:
            return Peer()
        if peer is None and not self.policy.asks_for_keys:
            if not is_encrypted and len(_hosts(scope)) != 1:
                raise _wrong_host("without API keys, requests need one Host header")
            _refuse_foreign_page(scope, self.policy.cors_origins)
            return Peer(user=LOCAL_USER)
        if peer is None and scope["path"] == METRICS_PATH and self.policy.has_open_metrics:
            return Peer(role=Role.VIEWER)
        if peer is None:
            raise RequestError(
                _KEY_PROBLEMS.get(len(digests), "several different API keys were sent"),
                code="invalid_api_key",
                status=401,
                kind="authentication_error",
                hint="send the header Authorization: Bearer KEY, or x-api-key",
            )
        line.on_key(peer.key)
        return peer

    def _is_known(self, scope: Scope, peer: Peer) -> bool:
        """Say whether the request's identity still has its key and role."""
        credentials = _line(scope).credentials
        if credentials is not None:
            return self.policy.peer_of(credentials).role >= peer.role
        if peer.key is None:  # no key was required
            return True
        now = self.policy.holder_of_any(key_digests(scope))
        return now is not None and now.role >= peer.role


def _wrong_host(what: str) -> Forbidden:
    hint = "call it localhost or 127.0.0.1, also from a proxy"
    return Forbidden(what, code="host_not_allowed", hint=hint)


def _refuse_foreign_page(scope: Scope, origins: Collection[str]) -> None:
    """Refuse a web page of another site, which browsers let post and load here without asking.

    Raises:
        Forbidden: the Origin header names a page that is neither local nor in `cors_origins`; or
            it is missing, and Sec-Fetch-Site says that another site's page asks.
    """
    named = header_values(scope, b"origin")
    is_local = len(named) == 1 and _LOCAL_PAGE.fullmatch(named[0]) is not None
    if named and not is_local and allowed_origin(scope, origins) is None:
        raise _foreign_page("the Origin header names a web page of another site")
    if not named and b"cross-site" in header_values(scope, b"sec-fetch-site"):
        raise _foreign_page("the browser says that a web page of another site asks")


def _foreign_page(what: str) -> Forbidden:
    hint = "allow it with the setting cors_origins"
    return Forbidden(what, code="origin_not_allowed", hint=hint)


class _Body:
    """Limit one request's body while it arrives."""

    def __init__(self, gate: Gate, scope: Scope, receive: Receive, owner: str) -> None:
        self._gate = gate
        self._receive = receive
        self._max_bytes = gate.policy.max_body_bytes
        self._declared = single_header(scope, b"content-length") or b"0"
        self._num_announced = _line(scope).num_announced
        turn = gate.decoding.setdefault(owner, asyncio.Lock())
        self._decoder = body_decoder(scope, self._max_bytes, turn)
        self._owner = owner
        self._num_bytes = 0
        self._num_counted_bytes = 0
        self._is_complete = False

    async def receive(self) -> Message:
        """Receive the next part.

        Raises:
            RequestError: 413 `body_too_large`, as early as possible; 503 `busy` if its owner has
                more on its way than its share; 400 `invalid_encoding`.
        """
        # The server has checked that the header is digits, but not how many.
        if len(self._declared) > 15 or int(self._declared) > self._max_bytes:
            raise body_too_large(self._max_bytes)
        message = await self._receive()
        if message["type"] == "http.request" and not self._is_complete:
            if self._decoder is not None:
                is_last = not message.get("more_body", False)
                body = await self._decoder.decode(message.get("body", b""), is_last=is_last)
                message = {**message, "body": body}
            self._num_bytes += len(message.get("body", b""))
            if self._num_bytes + self._num_announced() > self._max_bytes:
                raise body_too_large(self._max_bytes)
            if message.get("more_body", False):
                self._count(max(self._num_bytes - UNCOUNTED_BYTES, 0))
            else:
                self.stop_counting()
                await self._gate.bursts.begin(self._owner)
        return message

    def stop_counting(self) -> None:
        """Stop counting the body: it is complete or dropped."""
        self._is_complete = True
        self._count(0)

    def _count(self, num_bytes: int) -> None:
        """Count the bytes held; refuse an owner above its share, never another one."""
        held = self._gate.arriving_bytes
        held[self._owner] += num_bytes - self._num_counted_bytes
        self._num_counted_bytes = num_bytes
        if not held[self._owner]:
            del held[self._owner]
        if num_bytes and held[self._owner] > MAX_ARRIVING_BODIES * self._max_bytes - held.total():
            raise Unavailable(
                "too many of your large bodies arrive at once",
                code="busy",
                retry_after_ms=BUSY_RETRY_MS,
            )


def _check_head(scope: Scope) -> None:
    """Refuse valid HTTP that no client of this API would send."""
    headers: Iterable[tuple[bytes, bytes]] = scope["headers"]
    names = [name for name, _ in headers]
    num_bytes = sum(len(name) + len(value) for name, value in headers) + len(scope["raw_path"])
    if len(names) > MAX_HEADERS or num_bytes > MAX_HEAD_BYTES:
        raise headers_too_large()
    if scope["http_version"] not in ("1.0", "1.1"):
        raise RequestError("only HTTP/1.1 is supported", code="invalid_http")
    # In either case two programs can disagree on where the body ends, and smuggling begins.
    if b"transfer-encoding" in names and scope["http_version"] == "1.0":
        raise RequestError("HTTP/1.0 has no transfer-encoding", code="invalid_http")
    if b"transfer-encoding" in names and b"content-length" in names:
        raise RequestError(
            "a body has a content-length or a transfer-encoding, not both", code="invalid_http"
        )


def body_too_large(max_bytes: int) -> RequestError:
    """Make the error of a body that is, or is announced as, too large."""
    return RequestError(
        f"the body is larger than {max_bytes} bytes", code="body_too_large", status=413
    )


def headers_too_large() -> RequestError:
    """Make the error of too many or too large headers."""
    return RequestError(
        f"more than {MAX_HEADERS} headers or {MAX_HEAD_BYTES} bytes of them",
        code="headers_too_large",
        status=431,
    )


def _line(scope: Scope) -> ClientLine:
    return cast(ClientLine, scope["state"]["line"])


KEY_HEADERS = (b"authorization", b"x-api-key", b"api-key")
"""Headers that may hold a key."""
SECRETS = (*KEY_HEADERS, b"cookie", b"proxy-authorization")
"""Headers that are kept nowhere."""
_KEY_PROBLEMS = {0: "the API key is missing", 1: "the API key is not valid"}
"""Errors by the number of keys sent."""


def key_digests(scope: Scope) -> frozenset[bytes]:
    """Digest the keys sent; of a dead daemon's request its journal has the digests."""
    return _line(scope).key_digests | {key_digest(each) for each in _shown_keys(scope)}


def _shown_keys(scope: Scope) -> set[str]:
    """Read the keys from OpenAI's, Anthropic's and Azure's headers and from Basic credentials."""
    credentials, *bare = (
        (single_header(scope, name) or b"").decode("latin-1") for name in KEY_HEADERS
    )
    scheme, _, shown = credentials.partition(" ")
    keys = {shown.strip()} if scheme.lower() == "bearer" else set()
    if scheme.lower() == "basic":
        keys = {_password(shown.strip())}
    keys.update(key.strip() for key in bare)
    keys.discard("")
    return keys


def _password(credentials: str) -> str:
    """Return the password of `Basic` credentials; the raw text if it is not base64."""
    try:
        return base64.b64decode(credentials, validate=True).decode().partition(":")[2]
    except ValueError:
        return credentials


def _address(scope: Scope) -> str | None:
    """Write a TCP client's address and port; None on the Unix socket."""
    if _line(scope).credentials is not None or not scope.get("client"):
        return None
    host, port = scope["client"]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _hosts(scope: Scope) -> list[bytes]:
    """List the Host headers; HTTP/1.0 may have none."""
    return header_values(scope, b"host")
