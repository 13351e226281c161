"""Open the listening sockets: Unix, TCP and TLS.

Invariant: the socket file is never open to others, not for a moment, and a live daemon's socket is
never replaced, not even by two daemons that start at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import ipaddress
import logging
import os
import socket
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from pathlib import Path
from typing import NamedTuple

from appliance.configuration.paths import TEMPORARY_DIR, check_private, own_temporary_dir
from appliance.daemon.process.limits import descriptors_for
from appliance.daemon.survival.keeper_channel import POOL, REPLY, count_kept, notify
from appliance.daemon.survival.kept_pools import KeptPools
from engine.errors import AlreadyRunning, ConfigError, PenstockError

SOCKET_MODE = 0o660
BACKLOG = 4096
"""Wanted queue of the kernel; net.core.somaxconn may limit it further."""
MAX_PATH_BYTES = 107
"""sun_path has 108 bytes, the last one zero."""
LOCK_PATIENCE_S = 5.0
ACCEPTS_PER_TURN, BEGINS_PER_TURN = 64, 8
"""Maximum per turn of the loop; a flood must leave time for open connections.

To accept one takes 10 us, to begin one 300."""
MAX_ACCEPTED = 1024
"""Maximum accepted connections that have not begun; more wait in the kernel."""
_READS = b"GET "
ACCEPT_PAUSE_S = 1.0
FIRST_INHERITED_FD = 3
"""The constant SD_LISTEN_FDS_START."""
KEPT = "listen"
"""Name of our listeners where they are kept for the next daemon."""
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_HINT = "choose another with --socket"

log = logging.getLogger("penstock")


def check_path(path: Path) -> None:
    """Check a future socket path without making anything.

    Raises:
        ConfigError: the path cannot be a socket of ours.
    """
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise ConfigError(
            f"the socket path is longer than {MAX_PATH_BYTES} bytes",
            where=str(path),
            hint="choose a shorter one with --socket",
        )
    _is_socket(path)


def bind_socket(path: Path) -> socket.socket:
    """Bind a listening socket at `path`, replacing one that a dead daemon left.

    Raises:
        ConfigError: the path cannot be a socket of ours.
        AlreadyRunning: another daemon answers there.
    """
    where = str(path)
    check_path(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _locked(path.parent):
            _remove_stale(path)
            # Linux gives the file the mode of the unbound socket, so there is no moment in which
            # it is wider, as there is with bind and chmod. The umask may have narrowed it.
            os.fchmod(listener.fileno(), SOCKET_MODE)
            listener.bind(where)
            os.chmod(path, SOCKET_MODE)
            listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        what = f"cannot listen there: {error.strerror}"
        raise ConfigError(what, where=where, hint=_HINT) from error
    except PenstockError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


def bind_tcp(host: str, port: int) -> list[socket.socket]:
    """Bind listening TCP sockets; `localhost` takes both families, so that no other user gets one.

    Raises:
        ConfigError: the port is taken, or the address does not exist.
    """
    addresses = _addresses(host)
    listeners: list[socket.socket] = []
    for address in addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            listener = socket.socket(family, socket.SOCK_STREAM)
            listeners.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address, port))
            listener.listen(BACKLOG)
            listener.setblocking(False)
        except OSError as error:
            if len(addresses) > 1 and error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                if listeners and listeners[-1].family == family:
                    listeners.pop().close()
                continue  # the machine has only the other family
            for listener in listeners:
                listener.close()
            raise ConfigError(
                f"cannot listen on {host}:{port}: {error.strerror}",
                where="listen",
                hint="choose another port with --port or --listen",
            ) from error
        port = listener.getsockname()[1]
    return listeners


def _addresses(host: str) -> list[str]:
    return ["127.0.0.1", "::1"] if host == "localhost" else [host]


def open_listeners(
    path: Path | None, tcp: tuple[str, int] | None, kept: Sequence[socket.socket]
) -> list[socket.socket]:
    """Open the Unix socket and TCP, or take them over from a dead daemon; have them kept.

    Args:
        path: of the Unix socket; None: a socket unit has it.
        tcp: host and port; None: no TCP.
        kept: the dead daemon's listeners; those at other addresses are closed.

    Raises:
        ConfigError: see bind_socket() and bind_tcp().
        AlreadyRunning: see bind_socket().
    """
    on_unix = [each for each in kept if path is not None and _is_at(each, path)]
    on_tcp = [each for each in kept if tcp is not None and _is_on(each, *tcp)]
    for each in kept:
        if each not in on_unix + on_tcp:
            ListenerCloser(each).close()
        else:
            each.listen(BACKLOG)  # its clients are told of this process, not the dead one
    if path is not None:
        on_unix = on_unix or [bind_socket(path)]
    try:
        if tcp is not None:
            on_tcp = on_tcp or bind_tcp(*tcp)
    except ConfigError:
        for each in on_unix:
            ListenerCloser(each).close()  # no file may be left of a daemon that has not started
        raise
    opened = on_unix + on_tcp
    if set(kept) - set(opened):
        notify(FDSTOREREMOVE=1, FDNAME=KEPT)
        kept = ()
    notify(*(each.fileno() for each in opened if each not in kept), FDSTORE=1, FDNAME=KEPT)
    return opened


def _is_at(listener: socket.socket, path: Path) -> bool:
    is_unix = listener.family == socket.AF_UNIX
    return is_unix and listener.getsockname() == str(path) and _is_socket(path)


def _is_on(listener: socket.socket, host: str, port: int) -> bool:
    if listener.family == socket.AF_UNIX:
        return False
    own_host, own_port = listener.getsockname()[:2]
    return own_host in _addresses(host) and port in (0, own_port)


class PassedSockets(NamedTuple):
    """Listening sockets that this process was started with."""

    of_unit: list[socket.socket]
    kept: list[socket.socket]
    """Listeners of a daemon that has died."""
    replies: dict[str, list[int]]
    """Descriptors of its unfinished replies, by the name of the request."""
    pools: KeptPools


def passed_sockets(environ: MutableMapping[str, str]) -> PassedSockets:
    """Take over listening sockets of a socket unit and of a dead daemon (sd_listen_fds).

    Their variables are removed from `environ`, so that no child uses them.

    Raises:
        ConfigError: one of them is no listening stream socket, or not on loopback.
    """
    is_ours = environ.pop("LISTEN_PID", "") == str(os.getpid())
    count = environ.pop("LISTEN_FDS", "")
    names = environ.pop("LISTEN_FDNAMES", "").split(":")
    passed = PassedSockets([], [], {}, KeptPools({}))
    if not is_ours or not count.isdigit():
        return passed
    count_kept(names)
    pools: dict[str, list[int]] = {}
    for fd in range(FIRST_INHERITED_FD, FIRST_INHERITED_FD + int(count)):
        name = "".join(names[fd - FIRST_INHERITED_FD :][:1])
        is_kept = name == KEPT
        os.set_inheritable(fd, False)
        if name.startswith((REPLY, POOL)):
            is_pool = name.startswith(POOL)
            (pools if is_pool else passed.replies).setdefault(name, []).append(fd)
            continue
        listener = socket.socket(fileno=fd)
        is_listening = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if listener.type != socket.SOCK_STREAM or not is_listening:
            raise ConfigError(
                "not a stream socket that listens",
                where=f"descriptor {fd} of the socket unit",
                hint="ListenStream= of penstock.socket; `penstock install-service` writes it",
            )
        if not is_kept and listener.family != socket.AF_UNIX and not _is_loopback(listener):
            raise ConfigError(
                "TCP sockets of a unit must be on loopback",
                where=f"{listener.getsockname()[0]}, of the socket unit",
                hint="ListenStream=127.0.0.1:8000; beyond loopback with the setting listen",
            )
        listener.setblocking(False)
        (passed.kept if is_kept else passed.of_unit).append(listener)
    return passed._replace(pools=KeptPools(pools))


def _is_loopback(listener: socket.socket) -> bool:
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


class ListenerCloser:
    """Close a listener, and remove its Unix socket file unless another daemon replaced it.

    Args:
        listener: bound by us, or inherited.
        is_inherited: its file and the waiting connections stay for the next daemon.
    """

    def __init__(self, listener: socket.socket, *, is_inherited: bool = False) -> None:
        self._listener, self._is_inherited = listener, is_inherited
        is_unix = listener.family == socket.AF_UNIX and not is_inherited
        self._path = Path(listener.getsockname()) if is_unix else None
        self._inode = None if self._path is None else _inode(self._path)

    def close(self) -> None:
        """Close the listener once; later calls do nothing."""
        if self._listener.fileno() < 0:
            return
        # The file goes first: its inode cannot be another file's while the socket is open.
        if self._path is not None:
            with contextlib.suppress(OSError, PenstockError), _locked(self._path.parent):
                if _inode(self._path) == self._inode:
                    self._path.unlink()
        if not self._is_inherited:  # a keeper has another descriptor of it, which would listen on
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


class Acceptor:
    """Accept connections of one listener on the running loop, until closed.

    Args:
        listener: bound.
        on_connection: takes each accepted connection.
        make_room: called when no descriptor is left for the next one.
    """

    def __init__(
        self,
        listener: socket.socket,
        on_connection: Callable[[socket.socket], None],
        make_room: Callable[[], object],
    ) -> None:
        self._listener = listener
        self._on_connection = on_connection
        self._make_room = make_room
        self._loop = asyncio.get_running_loop()
        self._resume: asyncio.TimerHandle | None = None
        self._silent, self._heard = deque[socket.socket](), deque[socket.socket]()
        """Accepted connections from which nothing, or more than a GET, has come."""
        self._beginning: asyncio.Handle | None = None
        self._most = descriptors_for(MAX_ACCEPTED, least=BEGINS_PER_TURN)
        self._listen()

    def close(self) -> None:
        """Stop accepting; the listener stays open."""
        if self._resume is not None:
            self._resume.cancel()
        self._loop.remove_reader(self._listener)
        while self._silent or self._heard:
            self._on_connection((self._heard or self._silent).popleft())

    def _listen(self) -> None:
        self._resume = None
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        room = self._most - len(self._silent) - len(self._heard)
        for _ in range(min(ACCEPTS_PER_TURN, room)):
            try:
                connection, _address = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    self._make_room()
                    self._pause(error)
                    break
                continue  # it was gone before it was accepted
            connection.setblocking(False)
            if connection.family != socket.AF_UNIX:  # a short reply would wait for the last's ack
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._silent.append(connection)
        if self._beginning is None:
            self._begin_some()

    def _begin_some(self) -> None:
        """Begin connections that read, and a few others, the oldest first."""
        self._listen_in()
        for _ in range(BEGINS_PER_TURN):
            if not self._heard and not self._silent:
                break
            self._on_connection((self._heard or self._silent).popleft())
        is_rest = self._heard or self._silent
        self._beginning = self._loop.call_soon(self._begin_some) if is_rest else None

    def _listen_in(self) -> None:
        """Begin each silent connection that sends a GET now; queue it if it sends anything else."""
        for _ in range(len(self._silent)):
            connection = self._silent.popleft()
            try:
                first = connection.recv(len(_READS), socket.MSG_PEEK)
            except BlockingIOError:
                self._silent.append(connection)
                continue
            except OSError:  # its protocol finds out
                first = b""
            if first == _READS:
                self._on_connection(connection)
            else:
                self._heard.append(connection)

    def _pause(self, error: OSError) -> None:
        """Pause accepting: the listener stays readable, so the loop would spin."""
        log.warning("cannot accept connections for now: %s", error.strerror)
        self._loop.remove_reader(self._listener)
        self._resume = self._loop.call_later(ACCEPT_PAUSE_S, self._listen)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the folder among daemons that bind or remove a socket in it.

    It is held for a moment only: a listening daemon is found by connecting to it. The folder itself
    is locked, so that no lock file stays behind; but in one that others can open, and so lock, this
    user's own in /tmp.
    """
    if folder.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH) and os.access(TEMPORARY_DIR, os.W_OK):
        folder = own_temporary_dir()
        folder.mkdir(mode=0o700, exist_ok=True)
        check_private(folder)
    folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + LOCK_PATIENCE_S
        while True:
            try:
                fcntl.flock(folder_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise PenstockError(
                        "another program keeps this folder locked", where=str(folder), hint=_HINT
                    ) from None
                time.sleep(0.01)
        yield
    finally:
        os.close(folder_fd)


def _is_socket(path: Path) -> bool:
    """Say whether a socket is at the path; raise ConfigError for anything else."""
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    if not stat.S_ISSOCK(mode):
        raise ConfigError("it is not a socket, so it is not removed", where=str(path), hint=_HINT)
    return True


def _remove_stale(path: Path) -> None:
    if not _is_socket(path):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # a daemon with a full backlog must not block us
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except FileNotFoundError:
            return
        except BlockingIOError:
            pass
    raise AlreadyRunning(
        "another daemon is listening here",
        where=str(path),
        hint="stop it first, or choose another path with --socket",
    )


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
