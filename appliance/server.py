"""The daemon's socket: bound by us, served by uvicorn inside the daemon's own loop.

Owns: the socket file from bind to removal, and who is at the other end of a connection.
Called by: daemon.
Invariant: the file is never open to others, not for a moment, and a live daemon's is never taken.
Never: handles a signal, or configures logging.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import pwd
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

import h11
import msgspec
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from appliance.replies import error_object
from appliance.request import Peer
from engine.errors import ConfigError, PenstockError, RequestError

SOCKET_MODE = 0o660
FOLDER_MODE = 0o750
BACKLOG = 512
MAX_PATH_BYTES = 107
"""sun_path has 108 bytes, the last one zero."""


def bind_socket(path: Path) -> socket.socket:
    """A listening socket at `path`, in place of one that a dead daemon left.

    Raises:
        ConfigError: the path cannot be a socket of ours.
        PenstockError: another daemon answers there.
    """
    where = str(path)
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise ConfigError(
            f"the socket path is longer than {MAX_PATH_BYTES} bytes",
            where=where,
            hint="choose a shorter one with --socket or PENSTOCK_SOCKET",
        )
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.parent.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        _remove_stale(path)
        # Linux gives the file the mode of the unbound socket, so there is no moment in which it
        # is wider, as there is with bind and chmod. The umask may have narrowed it.
        os.fchmod(listener.fileno(), SOCKET_MODE)
        listener.bind(where)
        os.chmod(path, SOCKET_MODE)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen there: {error.strerror}",
            where=where,
            hint="choose another with --socket or PENSTOCK_SOCKET",
        ) from error
    except PenstockError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


def _remove_stale(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(
            "this is not a socket, and it is not ours to remove",
            where=str(path),
            hint="choose another path with --socket or PENSTOCK_SOCKET",
        )
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
    raise PenstockError(
        "another daemon is listening here",
        where=str(path),
        hint="stop it first, or choose another path with --socket",
    )


class ApiServer:
    """Serves an application on a bound socket until stopped; then the socket file is gone."""

    def __init__(self, app: Starlette, listener: socket.socket) -> None:
        self._app = app
        self._listener = listener
        self._path = Path(listener.getsockname())
        self._inode = _inode(self._path)
        config = uvicorn.Config(
            app,
            http=PeerProtocol,
            ws="none",
            lifespan="off",
            loop="none",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=60,
        )
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Return when connections are accepted."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        started = asyncio.create_task(self._server.has_started.wait())
        await asyncio.wait({self._task, started}, return_when=asyncio.FIRST_COMPLETED)
        started.cancel()
        if self._task.done():
            self._task.result()

    async def stop(self, grace_s: float) -> None:
        """Accept nothing new, end the frame streams, let replies end, cut what is left."""
        if self._task is None:
            self._listener.close()
        else:
            self._app.state.stopping.set()
            self._server.config.timeout_graceful_shutdown = grace_s  # type: ignore[assignment]
            self._server.should_exit = True
            await self._task
            await self._cut()
        if self._inode is not None and _inode(self._path) == self._inode:
            self._path.unlink(missing_ok=True)

    async def _cut(self) -> None:
        """Uvicorn has cancelled the tasks that outlived the grace; see them and theirs out."""
        state = self._server.server_state
        for connection in list(state.connections):
            connection.transport.abort()
        if state.tasks:
            await asyncio.wait(state.tasks)


class _Server(uvicorn.Server):
    """Uvicorn without its hands on the process's signals."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.has_started = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.has_started.set()


class PeerProtocol(H11Protocol):
    """HTTP/1.1 that tells the application its peer, in `scope["state"]["peer"]`."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Read who connected; the kernel noted it then, so it cannot be forged later."""
        super().connection_made(transport)
        peer = peer_of(transport.get_extra_info("socket"))
        # Uvicorn copies this into the scope of each request on the connection.
        self.app_state = {**self.app_state, "peer": peer}

    def send_400_response(self, msg: str) -> None:
        """What is not HTTP gets an error object like everything else, and is cut off."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()  # in the middle of a reply: there is nothing left to say it in
            return
        error = RequestError("this is not an HTTP request that can be read", code="invalid_http")
        body = msgspec.json.encode(error_object(error))
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        for event in (
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def peer_of(connection: socket.socket) -> Peer:
    """The process at the other end as it was when it connected."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, gid = struct.unpack("3i", raw)
    return Peer(uid=uid, gid=gid, pid=pid, user=_user_name(uid))


@functools.lru_cache(maxsize=256)
def _user_name(uid: int) -> str | None:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return None


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
