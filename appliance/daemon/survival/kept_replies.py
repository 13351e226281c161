"""Keep what an unfinished reply needs where it outlives the daemon, and take it over from there.

The keeper holds three descriptors under the name of each request: the client's socket, the reply's
memfd and the journal.
Invariant: a reply whose row says that it was answered is only sent, never generated again. What
cannot be continued gets its API's error event, and its row.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from appliance.daemon.requests.request import CLIENT_CLOSED_REQUEST
from appliance.daemon.survival import reply_file
from appliance.daemon.survival.departures import has_left
from appliance.daemon.survival.journal import FD_NAME, Foreign, Journal
from appliance.daemon.survival.keeper_channel import notify
from appliance.daemon.survival.reply_file import HEAD_END, NoRoom, ReplyFile

PING_S = 10.0
"""Silence after which a stream that waits for this daemon gets a ping."""
LOOKS_PER_PING = 10
_UNAVAILABLE = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-length: 0\r\n"
    b"connection: close\r\n\r\n"
)
_STATUS_END = len("HTTP/1.1 200")
_LAST_CHUNK = b"\r\n0\r\n\r\n"
_log = logging.getLogger("penstock")


@dataclass(slots=True, eq=False)
class LeftReply:
    """A reply that a dead daemon has begun."""

    name: str
    """The name under which it is kept."""
    request_id: str
    """Empty if it is unknown."""
    client: socket.socket
    fd: int
    """The reply's memfd."""
    journal: Journal
    foreign: Foreign | None = None
    """Why the journal cannot be read; None: it can."""
    is_answered: bool = False
    """Whether all bytes are in the memfd, and the row is written."""
    on_failed: Callable[[], None] = lambda: None
    """Called if the request is not admitted again; writes its row."""

    @property
    def http_status(self) -> int:
        """The status that was sent; 499 if nothing was, or the client has left."""
        if has_left(self.client):
            return CLIENT_CLOSED_REQUEST
        status = os.pread(self.fd, _STATUS_END, 0)[_STATUS_END - 3 :]
        return int(status) if status.isdigit() else CLIENT_CLOSED_REQUEST

    @property
    def silent_s(self) -> float:
        """Return the time since the reply's last byte."""
        return max(time.time() - os.fstat(self.fd).st_mtime, 0.0)

    def ping(self) -> None:
        """Keep a stream alive that stands between two events."""
        ping = self.journal.head.ping if self.journal.head else b""
        position = os.fstat(self.fd).st_size
        tail = os.pread(self.fd, 64, max(position - 64, 0))
        between = b"\n\n\r\n" if ping.endswith(b"\r\n") else b"\n\n"
        if not ping or tail.endswith(_LAST_CHUNK) or not tail.endswith((between, HEAD_END)):
            return
        self.journal.ping_at(position)
        if self.journal.is_cut:
            return
        with contextlib.suppress(OSError):  # a full socket is noticed when the reply continues
            os.pwrite(self.fd, ping, position)
            num_unsent = position + len(ping) - os.lseek(self.fd, 0, os.SEEK_CUR)
            os.sendfile(self.client.fileno(), self.fd, None, num_unsent)

    def end(self) -> None:
        """End it without continuing: with an error event where it is a stream."""
        if not self.is_answered:
            failure = b""
            if self.foreign is not None:
                _log.warning("request %s cannot continue: %s", self.request_id, self.foreign)
                failure = self.foreign.failure
            elif self.journal.head is not None:
                failure = self.journal.head.failure
            reply = ReplyFile(self.client, self.journal, lambda: None, lambda: None, self.fd)
            if not os.fstat(self.fd).st_size:
                with contextlib.suppress(NoRoom):
                    reply.write(_UNAVAILABLE)
            reply.fail(failure)
            self.on_failed()
            reply.close()
        forget(self.name, self.client)
        self.client.close()
        self.journal.close()


def forget(name: str, client: socket.socket | None) -> None:
    """Have the keeper close its descriptors of a request.

    Args:
        name: see LeftReply.name.
        client: shut down first, since the keeper's copy would keep it open; None: it stays open.
    """
    if client is not None:
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)
    notify(FDSTOREREMOVE=1, FDNAME=name)


class LeftReplies:
    """The replies of a dead daemon, until this one is ready to continue them.

    Args:
        kept: the descriptors by name.
    """

    def __init__(self, kept: dict[str, list[int]]) -> None:
        read = [_read(name, fds) for name, fds in kept.items()]
        self.replies = [each for each in read if each is not None]

    @property
    def request_ids(self) -> set[str]:
        return {each.request_id for each in self.replies}

    def end_foreign(self) -> None:
        """End the replies whose journals this version cannot read."""
        for left in [each for each in self.replies if each.foreign is not None]:
            self.replies.remove(left)
            left.end()

    async def ping(self) -> None:
        """Keep the streams alive until they are taken."""
        while True:
            await asyncio.sleep(PING_S / LOOKS_PER_PING)
            for left in self.replies:
                if not left.is_answered and left.silent_s >= PING_S:
                    left.ping()

    def hand_over(self) -> list[LeftReply]:
        """Hand the replies over to the caller."""
        taken, self.replies = self.replies, []
        for left in taken:
            left.journal.silent_s = left.silent_s
        return taken

    def end(self) -> None:
        """End what has not been taken: this daemon stops."""
        for left in self.hand_over():
            left.end()


def end_kept(kept: dict[str, list[int]]) -> None:
    """End replies that no daemon continues; takes their descriptors by name."""

    async def end() -> None:  # a reply's file needs a loop
        LeftReplies(kept).end()

    asyncio.run(end())


def _read(name: str, fds: Iterable[int]) -> LeftReply | None:
    """Sort a request's descriptors by what they are; None: its client or reply is missing."""
    client, reply, journal, request_id = None, -1, -1, ""
    for fd in fds:
        target = os.readlink(f"/proc/self/fd/{fd}")
        if client is None and stat.S_ISSOCK(os.fstat(fd).st_mode):
            client = socket.socket(fileno=fd)
            client.setblocking(False)
        elif reply < 0 and reply_file.FD_NAME in target:
            reply = fd
        elif journal < 0 and FD_NAME in target:
            journal, request_id = fd, target.partition(FD_NAME)[2].partition(" ")[0]
        else:
            os.close(fd)
    if client is None or reply < 0:
        _log.warning("a reply cannot continue: the keeper's descriptors of %s are incomplete", name)
        forget(name, client)
        return None
    try:
        if journal < 0:
            raise Foreign("its journal is missing")
        return LeftReply(name, request_id, client, reply, Journal(journal))
    except Foreign as error:
        return LeftReply(name, request_id, client, reply, Journal(), error)


class ReplyTransport(asyncio.Transport):
    """A connection whose replies may go through a file; uvicorn writes to it.

    Args:
        transport: asyncio's.
        when_forgotten: called once the file is sent after close(), or has no room; leaves the file.
    """

    def __init__(self, transport: asyncio.Transport, when_forgotten: Callable[[], None]) -> None:
        super().__init__()
        self._transport, self.when_forgotten = transport, when_forgotten
        self.file: ReplyFile | None = None
        self._is_closing = False
        self.abort = transport.abort  # type: ignore[method-assign]
        self.get_extra_info = transport.get_extra_info  # type: ignore[method-assign]
        self.pause_reading = transport.pause_reading  # type: ignore[method-assign]
        self.resume_reading = transport.resume_reading  # type: ignore[method-assign]
        self.can_write_eof = transport.can_write_eof  # type: ignore[method-assign]
        self.write_eof = transport.write_eof  # type: ignore[method-assign]
        self.set_protocol = transport.set_protocol  # type: ignore[method-assign]

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write to the file while there is one with room, else to the connection."""
        rest = bytes(data)
        if self.file is not None:
            try:
                self.file.write(rest)
            except NoRoom as error:
                _log.warning("a reply ends with the daemon: %s", error.__cause__ or error)
                rest = error.rest
                self.when_forgotten()
            else:
                return
        self._transport.write(rest)

    def is_closing(self) -> bool:
        """Say whether close() was called, or the connection is lost."""
        return self._is_closing or self._transport.is_closing()

    def close(self) -> None:
        """Close the connection once all is sent."""
        self._is_closing = True
        if self.file is None:
            self._transport.close()
        else:
            self.file.when_sent(self.when_forgotten)

    def get_write_buffer_size(self) -> int:
        """Count the bytes that wait for the client."""
        unsent = 0 if self.file is None else self.file.num_unsent
        return unsent + self._transport.get_write_buffer_size()

    def end_file(self) -> None:
        """Leave the file; close the connection if that has been asked for."""
        if self.file is not None:
            self.file.close()
            self.file = None
        if self._is_closing:
            self._transport.close()
