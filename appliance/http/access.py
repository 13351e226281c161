"""Decide who may connect, in which role, and how large requests may be.

Owns: the keys' file, and how a key is made; the policy of who has which role, replaced as a whole
when the configuration is read again; the checks in front of every route: peer, key, Host, sizes of
head and body.
Invariant: an identity is the kernel's word or a key, never what a client says of itself; roles are
looked up with each request, so that a new policy holds for connections that are open.
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

from appliance.api.wire import Arrival, error_response
from appliance.configuration.config import DEFAULT_OPERATORS, ServeConfig
from appliance.http.api_keys import ApiKey, find_key, read_keys
from appliance.http.tls import tls_context
from appliance.request import Peer, Role
from engine.errors import ConfigError, Forbidden, RequestError, Unavailable

CREDENTIAL_NAME = "api-keys"
"""Of the systemd credential that holds the keys where no file is named."""
SO_PEERGROUPS = 59
"""From <asm-generic/socket.h>; Python has no name for it."""
MAX_OPTION_BYTES = 1024
"""Of a socket option, in Python: 256 groups."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """A process on the Unix socket, as it was when it connected."""

    uid: int
    gid: int
    pid: int
    gids: frozenset[int]
    """Its groups, the first one included."""


@dataclass(frozen=True, slots=True)
class UserDirectory:
    """Names of users and groups by number, as the system has them."""

    uids: frozenset[int] = frozenset()
    gids: frozenset[int] = frozenset()

    @classmethod
    def named(cls, names: Iterable[str], setting: str) -> UserDirectory:
        """By their names; the default's group need not exist.

        Raises:
            ConfigError: there is no such user or group; a typo must not shut somebody out unseen.
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
        """Whether it is one of them, or in one of their groups."""
        return who.uid in self.uids or not self.gids.isdisjoint(who.gids)


@dataclass(frozen=True, slots=True)
class AccessPolicy:
    """Who may come in as what, how many at once, and with how large a body."""

    operators: UserDirectory = UserDirectory()
    """Besides root and the daemon's own user."""
    viewers: UserDirectory = UserDirectory()
    keys: tuple[ApiKey, ...] = ()
    max_connections: int = 1024
    max_body_bytes: int = 8 << 20
    cors_origins: tuple[str, ...] = ()
    """Web pages that may use the API from a browser."""
    tls: ssl.SSLContext | None = None
    """What TCP is spoken with; None: as it is, which is for loopback only."""
    has_open_metrics: bool = False
    """Whoever reaches TCP may read /metrics, without a key."""
    asks_for_keys: bool = True
    """False: programs of this machine may use TCP, all as one user; web pages may not."""

    @classmethod
    def from_config(
        cls, config: ServeConfig, environ: Mapping[str, str] = os.environ
    ) -> AccessPolicy:
        """Read names and keys as they are now.

        Raises:
            ConfigError: the file of keys or of a certificate is wrong, or TCP is to be served
                without keys.
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
        """Raise ConfigError if TCP is served, as `where` says, and nobody has a key."""
        if not self.keys or not self.asks_for_keys:
            raise _no_keys(where)

    def peer_of(self, who: Credentials) -> Peer:
        """A process with its role."""
        return Peer(
            uid=who.uid,
            gid=who.gid,
            pid=who.pid,
            user=_user_name(who.uid),
            role=self._role_of(who),
        )

    def holder_of(self, key: str) -> Peer | None:
        """Whose key it is; None if it is nobody's."""
        found = find_key(self.keys, key)
        return None if found is None else Peer(key=found.name, role=found.role)

    def holder_of_any(self, keys: set[str]) -> Peer | None:
        """Find whose keys were sent: of several the one that is known; None if two are."""
        holders = {one for key in keys if (one := self.holder_of(key)) is not None}
        return holders.pop() if len(holders) == 1 else None

    def _role_of(self, who: Credentials) -> Role:
        # Both can do to the daemon what they like anyway.
        if who.uid in (0, os.geteuid()) or self.operators.has(who):
            return Role.OPERATOR
        return Role.VIEWER if self.viewers.has(who) else Role.USER


def credentials_of(connection: socket.socket) -> Credentials | None:
    """Who is at the other end of a connection; None on TCP, where only a key tells.

    The kernel noted it when the process connected, so it cannot be forged later.
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
        # More groups than Python lets us read: those that the user database knows will do.
        name = _user_name(uid)
        return [] if name is None else os.getgrouplist(name, gid)
    return struct.unpack(f"{len(raw) // 4}I", raw)


def _no_keys(where: str) -> ConfigError:
    return ConfigError(
        "TCP clients need API keys, and there is no file of them",
        where=where,
        hint="penstock keys add NAME --file keys, then --api-keys keys; or --no-auth on loopback",
    )


def _keys_path(config: ServeConfig, environ: Mapping[str, str]) -> Path | None:
    if config.api_keys is not None:
        return config.api_keys
    return credential_path(environ)


def credential_path(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Where systemd has put the keys, by LoadCredential=api-keys:FILE; None if it has not.

    They stay as they were at the start: only a restart copies the file again.

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


MAX_HEADERS = 100
MAX_HEAD_BYTES = 64 << 10
MAX_ARRIVING_BODIES = 16
"""Bodies of the greatest size that may be in memory half sent, all connections together."""
UNCOUNTED_BYTES = 64 << 10
"""Of each body, so that a small one always gets in; the number of connections bounds these."""
OPEN_PATHS = ("/health", "/v1/health", "/ping")
METRICS_PATH = "/metrics"
"""Open only where the policy says so: gateways that scrape it cannot show a key."""
BUSY_RETRY_MS = 1000

LOCAL_USER = "loopback"
"""Name of all clients on TCP that are asked for no key."""
_LOCAL_PAGE = re.compile(rb"https?://(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d{1,5})?")
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
    num_announced: Callable[[], int]
    """Bytes of a body that are to come by what its chunks have said, and by no length."""


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
        peer = self.policy.holder_of_any(_shown_keys(scope))
        if peer is None and scope["path"] in OPEN_PATHS:
            return Peer()
        if peer is None and not self.policy.asks_for_keys:
            _refuse_foreign_page(scope, self.policy.cors_origins)
            return Peer(user=LOCAL_USER)
        if peer is None and scope["path"] == METRICS_PATH and self.policy.has_open_metrics:
            return Peer(role=Role.VIEWER)
        if peer is None:
            raise RequestError(
                _KEY_PROBLEMS.get(
                    len(_shown_keys(scope)), "none of the API keys sent counts alone"
                ),
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
        now = self.policy.holder_of_any(_shown_keys(scope))
        return now is not None and now.role >= peer.role


def _refuse_foreign_page(scope: Scope, origins: Collection[str]) -> None:
    """Refuse a web page of another site, which a browser lets post here without asking.

    Raises:
        Forbidden: the Origin header names a page that is neither local nor in `cors_origins`.
    """
    origin = _header(scope, b"origin")
    is_local = origin is None or _LOCAL_PAGE.fullmatch(origin) is not None
    if not is_local and allowed_origin(scope, origins) is None:
        raise Forbidden(
            "the Origin header names a web page of another site",
            code="origin_not_allowed",
            hint="allow it with the setting cors_origins",
        )


class _Body:
    """One request's body on its way in."""

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
        """The next part.

        Raises:
            RequestError: 413 `body_too_large`, as soon as it is known; 503 `busy` when its owner
                has more on its way than is left for others.
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


def body_too_large(max_bytes: int) -> RequestError:
    """The same whether it came, or was announced."""
    return RequestError(
        f"the body is larger than {max_bytes} bytes", code="body_too_large", status=413
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


_KEY_PROBLEMS = {0: "the API key is missing", 1: "the API key is not valid"}
"""By how many were sent."""


def _shown_keys(scope: Scope) -> set[str]:
    """As OpenAI's clients show it, Anthropic's, Azure's, or an address as http://x:KEY@host."""
    scheme, _, shown = (_header(scope, b"authorization") or b"").decode("latin-1").partition(" ")
    keys = {shown.strip()} if scheme.lower() == "bearer" else set()
    if scheme.lower() == "basic":
        keys = {_password(shown.strip())}
    for name in (b"x-api-key", b"api-key"):
        keys.add((_header(scope, name) or b"").decode("latin-1").strip())
    keys.discard("")
    return keys


def _password(credentials: str) -> str:
    """The password of `Basic` credentials, whatever the name; as they are if they are none."""
    try:
        return base64.b64decode(credentials, validate=True).decode().partition(":")[2]
    except ValueError:
        return credentials


def _header(scope: Scope, name: bytes) -> bytes | None:
    """A header's value; None if it is not there, or there twice: then nobody knows which counts."""
    values = [value for key, value in scope["headers"] if key == name]
    return values[0] if len(values) == 1 else None
