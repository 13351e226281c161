"""Check callers, their roles and their requests' sizes.

Owns: the policy of roles, replaced as a whole when the configuration is read again; the checks in
front of every route: peer, key, Host, sizes of head and body.
Invariant: an identity comes from the kernel or a key, never from what a client claims; roles are
looked up with each request, so that a new policy applies to open connections.
Never: decides what a role may do.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import functools
import grp
import os
import pwd
import re
import socket
import ssl
import struct
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from appliance.api.wire import Arrival, KeptWords, error_response
from appliance.configuration.config import DEFAULT_OPERATORS, ServeConfig
from appliance.http.api_keys import ApiKey, find_key, read_keys
from appliance.http.tls import tls_context
from appliance.journal import Journal
from appliance.request import Peer, Role
from engine.errors import ConfigError, Forbidden, RequestError, Unavailable

CREDENTIAL_NAME = "api-keys"
"""The systemd credential that holds the keys if no file is configured."""
SO_PEERGROUPS = 59
"""The constant in <asm-generic/socket.h>; Python does not define it."""
MAX_OPTION_BYTES = 1024
"""Python's maximum for a socket option: 256 groups."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """A process on the Unix socket, as it was when it connected."""

    uid: int
    gid: int
    pid: int
    gids: frozenset[int]
    """Its groups, including the primary one."""


@dataclass(frozen=True, slots=True)
class UserDirectory:
    """Users and groups by number, resolved by the system."""

    uids: frozenset[int] = frozenset()
    gids: frozenset[int] = frozenset()

    @classmethod
    def named(cls, names: Iterable[str], setting: str) -> UserDirectory:
        """Look up users and groups by name; the default group may be missing.

        Raises:
            ConfigError: no such user or group; a typo must not lock a user out unnoticed.
        """
        uids, gids = set(), set()
        for name in names:
            try:
                if name.startswith("@"):
                    gids.add(grp.getgrnam(name[1:]).gr_gid)
                else:
                    uids.add(pwd.getpwnam(name).pw_uid)
            except KeyError as error:
                if name not in DEFAULT_OPERATORS:
                    kind = "group" if name.startswith("@") else "user"
                    raise ConfigError(
                        f"there is no {kind} {name.removeprefix('@')!r} on this machine",
                        where=setting,
                        hint="a group is written as @name",
                    ) from error
        return cls(frozenset(uids), frozenset(gids))

    def has(self, who: Credentials) -> bool:
        """Say whether the process belongs to one of the users or groups."""
        return who.uid in self.uids or not self.gids.isdisjoint(who.gids)


@dataclass(frozen=True, slots=True)
class AccessPolicy:
    """The rules of access: roles, connection limits and body sizes."""

    operators: UserDirectory = UserDirectory()
    """Operators besides root and the daemon's own user."""
    viewers: UserDirectory = UserDirectory()
    keys: tuple[ApiKey, ...] = ()
    max_connections: int = 1024
    max_body_bytes: int = 8 << 20
    cors_origins: tuple[str, ...] = ()
    """Web pages that may use the API from a browser."""
    tls: ssl.SSLContext | None = None
    """The TLS context for TCP; None: plain TCP, for loopback only."""
    has_open_metrics: bool = False
    """Whether /metrics on TCP is open without a key."""
    asks_for_keys: bool = True
    """False: programs of this machine may use TCP, all as one user; web pages may not."""

    @classmethod
    def from_config(
        cls, config: ServeConfig, environ: Mapping[str, str] = os.environ
    ) -> AccessPolicy:
        """Read names and keys from their present files.

        Raises:
            ConfigError: the file of keys or of a certificate is wrong, or TCP is configured without
                keys.
        """
        path = _keys_path(config, environ)
        if path is None and config.listen is not None and config.auth:
            raise _no_keys("listen")
        return cls(
            operators=UserDirectory.named(config.operators, "operators"),
            viewers=UserDirectory.named(config.viewers, "viewers"),
            keys=() if path is None else read_keys(path),
            max_connections=config.max_connections,
            max_body_bytes=config.max_body_bytes,
            cors_origins=config.cors_origins,
            tls=tls_context(*config.tls) if config.tls is not None else None,
            has_open_metrics=config.open_metrics,
            asks_for_keys=config.auth,
        )

    def check_tcp(self, where: str) -> None:
        """Raise ConfigError if TCP is served, as `where` names, without any key."""
        if not self.keys or not self.asks_for_keys:
            raise _no_keys(where)

    def peer_of(self, who: Credentials) -> Peer:
        """Return the process with its role."""
        return Peer(
            uid=who.uid,
            gid=who.gid,
            pid=who.pid,
            user=_user_name(who.uid),
            role=self._role_of(who),
        )

    def holder_of(self, key: str) -> Peer | None:
        """Find the holder of a key; None: unknown."""
        found = find_key(self.keys, key)
        return None if found is None else Peer(key=found.name, role=found.role)

    def holder_of_any(self, keys: set[str]) -> Peer | None:
        """Find the holder of the keys sent; None: no known key, or two different ones."""
        holders = {one for key in keys if (one := self.holder_of(key)) is not None}
        return holders.pop() if len(holders) == 1 else None

    def _role_of(self, who: Credentials) -> Role:
        # Both can do to the daemon what they like anyway.
        if who.uid in (0, os.geteuid()) or self.operators.has(who):
            return Role.OPERATOR
        return Role.VIEWER if self.viewers.has(who) else Role.USER


def credentials_of(connection: socket.socket) -> Credentials | None:
    """Read the credentials of a connection's peer; None on TCP, where only a key identifies it.

    The kernel recorded them when the process connected, so they cannot be forged later.
    """
    if connection.family != socket.AF_UNIX:
        return None
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, gid = struct.unpack("3i", raw)
    return Credentials(uid, gid, pid, frozenset({gid, *_peer_groups(connection, uid, gid)}))


def _peer_groups(connection: socket.socket, uid: int, gid: int) -> Iterable[int]:
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, MAX_OPTION_BYTES)
    except OSError as error:
        if error.errno != errno.ERANGE:
            raise
        # More groups than Python can read: use the user database instead.
        name = _user_name(uid)
        return [] if name is None else os.getgrouplist(name, gid)
    return struct.unpack(f"{len(raw) // 4}I", raw)


def _no_keys(where: str) -> ConfigError:
    return ConfigError(
        "TCP clients need API keys, but no key file is set",
        where=where,
        hint="penstock keys add NAME --file keys, then --api-keys keys; or --no-auth on loopback",
    )


def _keys_path(config: ServeConfig, environ: Mapping[str, str]) -> Path | None:
    if config.api_keys is not None:
        return config.api_keys
    return credential_path(environ)


def credential_path(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the path of the keys from systemd's LoadCredential=api-keys:FILE; None: not set.

    The content is fixed at the start: only a restart copies the file again.

    Raises:
        ConfigError: the folder of credentials may not be entered.
    """
    folder = environ.get("CREDENTIALS_DIRECTORY")
    if not folder:
        return None
    path = Path(folder, CREDENTIAL_NAME)
    try:
        path.lstat()
    except FileNotFoundError:
        return None
    except OSError as error:
        what = f"cannot look for the keys among the credentials: {error.strerror}"
        raise ConfigError(what, where=str(path)) from error
    return path


@functools.lru_cache(maxsize=256)
def _user_name(uid: int) -> str | None:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return None


METHODS = "GET, POST, DELETE, OPTIONS"
MAX_AGE_S = 600
EXPOSED = "x-request-id, request-id, retry-after, retry-after-ms, x-penstock-ignored"


def allowed_origin(scope: Scope, origins: Collection[str]) -> str | None:
    """Return the page's origin if it may use the API; None: not allowed, or no page."""
    origin = (_header(scope, b"origin") or b"").decode("latin-1")
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


class Gate:
    """Check each request before the wrapped ASGI application; `policy` is replaceable."""

    def __init__(self, app: ASGIApp, policy: AccessPolicy) -> None:
        self.policy = policy
        self.arriving_bytes: Counter[str] = Counter()
        """Bytes of incomplete bodies, by owner."""
        self.is_open = asyncio.Event()
        """Until it is set, requests that change something wait; reads pass."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request to the application, or refuse it."""
        origin = allowed_origin(scope, self.policy.cors_origins)
        if origin is not None:
            if is_preflight(scope):
                await preflight(scope, origin)(scope, receive, send)
                return
            send = readable(send, origin)
        line = _line(scope)
        arrival = Arrival(
            line.write_part,
            journal=line.journal,
            keep=functools.partial(line.keep, scope),
            hang_up=line.hang_up,
        )
        arrival.put_into(scope)
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
        if not is_encrypted and any(not _LOOPBACK.fullmatch(each) for each in _hosts(scope)):
            raise _wrong_host("the Host header names another machine")
        peer = self.policy.holder_of_any(_shown_keys(scope))
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
                _KEY_PROBLEMS.get(len(_shown_keys(scope)), "several different API keys were sent"),
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
        now = self.policy.holder_of_any(_shown_keys(scope))
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
    named = _values(scope, b"origin")
    is_local = len(named) == 1 and _LOCAL_PAGE.fullmatch(named[0]) is not None
    if named and not is_local and allowed_origin(scope, origins) is None:
        raise _foreign_page("the Origin header names a web page of another site")
    if not named and b"cross-site" in _values(scope, b"sec-fetch-site"):
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
        self._declared = _header(scope, b"content-length") or b"0"
        self._num_announced = _line(scope).num_announced
        self._owner = owner
        self._num_bytes = 0
        self._num_counted_bytes = 0
        self._is_complete = False

    async def receive(self) -> Message:
        """Receive the next part.

        Raises:
            RequestError: 413 `body_too_large`, as early as possible; 503 `busy` if its owner has
                more on its way than its share.
        """
        # The server has checked that the header is digits, but not how many.
        if len(self._declared) > 15 or int(self._declared) > self._max_bytes:
            raise body_too_large(self._max_bytes)
        message = await self._receive()
        if message["type"] == "http.request" and not self._is_complete:
            self._num_bytes += len(message.get("body", b""))
            if self._num_bytes + self._num_announced() > self._max_bytes:
                raise body_too_large(self._max_bytes)
            if message.get("more_body", False):
                self._count(max(self._num_bytes - UNCOUNTED_BYTES, 0))
            else:
                self.settle()
        return message

    def settle(self) -> None:
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
    # With both, two programs can disagree on where the body ends, and smuggling begins.
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


_KEY_PROBLEMS = {0: "the API key is missing", 1: "the API key is not valid"}
"""Errors by the number of keys sent."""


def _shown_keys(scope: Scope) -> set[str]:
    """Read the keys from OpenAI's, Anthropic's and Azure's headers and from Basic credentials."""
    scheme, _, shown = (_header(scope, b"authorization") or b"").decode("latin-1").partition(" ")
    keys = {shown.strip()} if scheme.lower() == "bearer" else set()
    if scheme.lower() == "basic":
        keys = {_password(shown.strip())}
    for name in (b"x-api-key", b"api-key"):
        keys.add((_header(scope, name) or b"").decode("latin-1").strip())
    keys.discard("")
    return keys


def _password(credentials: str) -> str:
    """Return the password of `Basic` credentials; the raw text if it is not base64."""
    try:
        return base64.b64decode(credentials, validate=True).decode().partition(":")[2]
    except ValueError:
        return credentials


def _header(scope: Scope, name: bytes) -> bytes | None:
    """Return a header's value; None: missing, or given twice, which is ambiguous."""
    values = _values(scope, name)
    return values[0] if len(values) == 1 else None


def _values(scope: Scope, name: bytes) -> list[bytes]:
    return [value for key, value in scope["headers"] if key == name]


def _hosts(scope: Scope) -> list[bytes]:
    """List the Host headers; HTTP/1.0 may have none."""
    return _values(scope, b"host")
