"""Who comes in, and as what: processes on the socket, holders of API keys on TCP.

Owns: the file's format, and how a key is made; the policy, which is replaced as a whole when the
configuration is read again.
Invariant: an identity is the kernel's word or a key, never what a client says of itself; roles are
looked up with each request, so that a new policy holds for connections that are open.
Never: decides what a role may do.
"""

from __future__ import annotations

import errno
import functools
import grp
import hashlib
import hmac
import os
import pwd
import re
import secrets
import socket
import ssl
import stat
import struct
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import Message, Scope, Send

from appliance.configuration.config import DEFAULT_OPERATORS, ServeConfig
from appliance.http.listeners import tls_context
from appliance.request import Peer, Role
from engine.errors import ConfigError, UsageError

# API keys: a file of names, roles and hashes; the keys themselves are kept by those who use them.
# Invariant: keys are 256 random bits. Nobody can try them all, so one round of SHA-256 hides them
# as well as a slow hash would, and a request need not pay for one.
# Never: shows a key a second time, or quotes the file in an error: someone may have put a key
# there.


KEY_PREFIX = "penstock-"
KEY_BYTES = 32
MAX_FILE_BYTES = 1 << 20

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HASH = re.compile(r"sha256:([0-9a-f]{64})")
_ROLES = {role.name.lower(): role for role in Role}
_FORMAT = "a line is NAME ROLE sha256:HEX; `penstock keys new NAME` makes one"


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One line of the file of API keys: a hash, its name and its role."""

    name: str
    role: Role
    digest: bytes


def new_key(name: str, role: str = "user") -> tuple[str, str]:
    """A fresh key, to be shown once, and the line for the file.

    Raises:
        UsageError: the name or the role is not one that the file may have.
    """
    if not _NAME.fullmatch(name):
        what = f"{name!r} is no name of a key"
        raise UsageError(what, where="NAME", hint="give 1 to 64 letters, digits, '.', '_' or '-'")
    if role not in _ROLES:
        hint = f"give one of {', '.join(_ROLES)}"
        raise UsageError(f"{role!r} is no role", where="--role", hint=hint)
    key = KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)
    return key, f"{name} {role} sha256:{_digest(key).hex()}"


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """The keys of a file; `#` begins a comment.

    Raises:
        ConfigError: it cannot be read, others may write to it, or a line is wrong.
    """
    try:
        with path.open("rb") as file:
            _check_owner(path, os.fstat(file.fileno()))
            text = file.read(MAX_FILE_BYTES + 1).decode()
    except OSError as error:
        hint = f"for the unit: chown root:penstock {path}; chmod 640 {path}"
        raise ConfigError(
            f"cannot read the keys: {error.strerror}",
            where=str(path),
            hint=hint if isinstance(error, PermissionError) else "",
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError("not UTF-8", where=str(path), hint=_FORMAT) from error
    if len(text) > MAX_FILE_BYTES:
        raise ConfigError(f"larger than {MAX_FILE_BYTES} bytes", where=str(path), hint=_FORMAT)
    keys: dict[str, ApiKey] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        fields = line.partition("#")[0].split()
        if not fields:
            continue
        try:
            key = _parse(fields)
            if key.name in keys:
                raise ValueError(f"the name {key.name!r} is taken by a line above")
        except ValueError as error:
            raise ConfigError(str(error), where=f"{path}:{number}", hint=_FORMAT) from error
        keys[key.name] = key
    return tuple(keys.values())


def find_key(keys: Iterable[ApiKey], given: str) -> ApiKey | None:
    """The key that was given; how long it takes says nothing of how near a wrong one was."""
    digest = _digest(given)
    found = None
    for key in keys:
        if hmac.compare_digest(key.digest, digest):
            found = key
    return found


def _parse(fields: list[str]) -> ApiKey:
    if len(fields) != 3:
        raise ValueError(f"{len(fields)} fields in place of 3")
    name, role, hashed = fields
    match = _HASH.fullmatch(hashed)
    if not _NAME.fullmatch(name):
        raise ValueError("the name may have 64 letters, digits, '.', '_' or '-'")
    if role not in _ROLES:
        raise ValueError(f"the role is not one of {', '.join(_ROLES)}")
    if match is None:
        raise ValueError("the hash is not sha256: and 64 lower-case hex digits")
    return ApiKey(name, _ROLES[role], bytes.fromhex(match[1]))


def _check_owner(path: Path, status: os.stat_result) -> None:
    """Whoever can write to the file can give himself a key."""
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError("not a file", where=str(path))
    if status.st_uid not in (0, os.geteuid()):
        raise ConfigError(
            f"the keys belong to another user (uid {status.st_uid})",
            where=str(path),
            hint="they must be root's, or of the user who runs the daemon",
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"others may write to the keys (mode {stat.S_IMODE(status.st_mode):04o})",
            where=str(path),
            hint=f"chmod go-w {path}",
        )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


# --------------------------------------------------------------------------------------------------


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
        if path is None and config.listen is not None:
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
        )

    def check_tcp(self, where: str) -> None:
        """Raise ConfigError if TCP is served, as `where` says, and nobody has a key."""
        if not self.keys:
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
        hint="`penstock keys new NAME` makes a key; name its file with --api-keys",
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


# Cross-origin requests: which web pages may use the API from a browser.
#
# Owns: the answer to a preflight, and the headers that let a page read a reply.
# Invariant: without the setting `cors_origins` no page may; with it a page still needs a key for
# all but the preflight, which tells nothing else.
# Never: allows credentials such as cookies.


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
