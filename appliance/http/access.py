"""Identify callers by the kernel or by a key, and look up their roles.

Invariant: an identity comes from the kernel or a key, never from what a client claims.
"""

from __future__ import annotations

import errno
import functools
import grp
import os
import pwd
import select
import socket
import ssl
import struct
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from appliance.configuration.settings import DEFAULT_OPERATORS, ServeConfig
from appliance.daemon.requests.request import Peer, Role
from appliance.http.api_keys import ApiKey, find_key, read_keys
from appliance.http.tls import tls_context
from engine.errors import ConfigError

CREDENTIAL_NAME = "api-keys"
"""The systemd credential that holds the keys if no file is configured."""
_UCRED = struct.Struct("iII")
"""A process, its user and its group; numbers of users go beyond 2^31."""
SO_PEERGROUPS, SO_PEERPIDFD = 59, 77
"""Constants in <asm-generic/socket.h>; Python does not define them."""
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
    program: str | None = None
    """Name of the program that it ran then; None: it had ended, or may not be seen."""


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
    has_page: bool = True
    """Whether browsers get a page at /, without a key; what it shows needs one."""
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
            has_page=config.page,
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
            program=who.program,
            user=_user_name(who.uid),
            role=self._role_of(who),
        )

    def holder_of(self, digest: bytes) -> Peer | None:
        """Find the holder of the key with this digest; None: unknown."""
        found = find_key(self.keys, digest)
        return None if found is None else Peer(key=found.name, role=found.role)

    def holder_of_any(self, digests: Collection[bytes]) -> Peer | None:
        """Find the holder of the keys sent; None: no known key, or two different ones."""
        holders = {one for each in digests if (one := self.holder_of(each)) is not None}
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
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, gid = _UCRED.unpack(raw)
    gids = frozenset({gid, *_peer_groups(connection, uid, gid)})
    return Credentials(uid, gid, pid, gids, program_of(connection, pid, uid))


def program_of(connection: socket.socket, pid: int, uid: int) -> str | None:
    """Read the name of the program at the other end of a Unix socket; never its arguments.

    Its process may have ended, and another may have its number: the kernel gives a descriptor of
    the process itself. Before Linux 6.5 the number alone is known, so the user must match, too.
    """
    fd = -1
    try:
        fd = _process_fd(connection, pid, uid)
        name = Path(f"/proc/{pid}/comm").read_bytes() if pid else b""
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        has_ended = bool(poll.poll(0))
    except OSError:
        return None
    finally:
        if fd >= 0:
            os.close(fd)
    text = name.decode(errors="replace").strip()
    plain = "".join(each if each.isprintable() and each != " " else "_" for each in text)
    return None if has_ended or not plain else plain


def _process_fd(connection: socket.socket, pid: int, uid: int) -> int:
    """Open a descriptor of the peer's process; raises OSError if it is not known to be that."""
    try:
        return connection.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            raise
    fd = os.pidfd_open(pid)
    if os.stat(f"/proc/{pid}").st_uid != uid:
        os.close(fd)
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
    return fd


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
