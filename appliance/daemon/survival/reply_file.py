"""Send a reply from a memfd, whose offset counts exactly the bytes that were sent.

The offset belongs to the open file, which the keeper holds too. It outlives the daemon, and the
next daemon continues with the first unsent byte.
Invariant: the file is only appended to; bytes are in it before they are sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable

from appliance.daemon.survival.journal import Differs, Journal

HIGH_BYTES = 64 << 10
"""Unsent bytes at which the reply waits for its client."""
LOW_BYTES = 16 << 10
"""Unsent bytes at which the reply continues."""
HEAD_END = b"\r\n\r\n"
FD_NAME = "penstock-reply"


class NoRoom(OSError):
    """The file or the journal cannot grow.

    Args:
        rest: bytes that have not been sent.
    """

    def __init__(self, rest: bytes) -> None:
        super().__init__("no room for a reply's bytes")
        self.rest = rest


class ReplyFile:
    """One reply, from its first byte until the last one is sent.

    Args:
        connection: to the client, non-blocking.
        journal: its records are written before the bytes.
        pause: called when much is unsent.
        resume: called when there is room again.
        fd: a dead daemon's memfd, whose bytes are expected to be written again; -1: a new reply.

    Raises:
        OSError: there is no memory or no descriptor left.
    """

    def __init__(
        self,
        connection: socket.socket,
        journal: Journal,
        pause: Callable[[], None],
        resume: Callable[[], None],
        fd: int = -1,
    ) -> None:
        self.fd = fd if fd >= 0 else os.memfd_create(FD_NAME, os.MFD_CLOEXEC)
        self._socket_fd = connection.fileno()
        self._watched_fd = -1
        """A copy of the socket, while its client does not read: asyncio watches the other one."""
        self._journal, self._pause, self._resume = journal, pause, resume
        self._loop = asyncio.get_running_loop()
        self._size = os.fstat(self.fd).st_size
        self._num_sent = os.lseek(self.fd, 0, os.SEEK_CUR)
        self._expected = expected_bytes(self.fd, journal)
        self._num_compared = 0
        self._has_differed = self._is_paused = self._is_broken = self._is_closed = False
        self._on_sent: Callable[[], None] | None = None
        if self.num_unsent:
            self._send()

    @property
    def num_unsent(self) -> int:
        """Count the bytes that wait for the client."""
        return 0 if self._is_broken else self._size - self._num_sent

    def write(self, data: bytes) -> None:
        """Append and send bytes; only compare what a dead daemon has written.

        Raises:
            Differs: a byte of the body is different; the stream has been ended with an error.
            NoRoom: the bytes have to be sent without the file.
        """
        if self._expected:
            data = self._compare(data)
        if not data or self._is_broken or self._has_differed:
            return
        self._journal.flush()
        size = self._size
        try:
            if self._journal.is_cut:
                raise NoRoom(b"")
            self._append(data)
        except OSError as error:
            unsent = os.pread(self.fd, self.num_unsent, self._num_sent)
            raise NoRoom(unsent + data[self._size - size :]) from error

    def when_sent(self, on_sent: Callable[[], None]) -> None:
        """Call back once all is sent, or cannot be; at once if there is nothing to send."""
        if self.num_unsent:
            self._on_sent = on_sent
        else:
            on_sent()

    def fail(self, failure: bytes) -> None:
        """End a stream that cannot continue with the API's error event; drop what follows."""
        if not self._has_differed and self._size:
            with contextlib.suppress(OSError):  # no memory
                self._append(failure)
        self._has_differed = True

    def close(self) -> None:
        """Give up the file; no byte is sent from now on."""
        self._watch(is_wanted=False)
        if not self._is_closed:
            os.close(self.fd)
        self._is_broken = self._is_closed = True
        if self._is_paused:
            self._is_paused = False
            self._resume()

    def _compare(self, data: bytes) -> bytes:
        """Return the bytes that follow a dead daemon's."""
        if not self._num_compared and not self._has_differed:
            data = self._skip_head(data)
        if self._has_differed:
            return b""
        num_same = min(len(data), len(self._expected) - self._num_compared)
        end = self._num_compared + num_same
        if data[:num_same] != self._expected[self._num_compared : end]:
            self._fail()
            raise Differs("the reply differs from the one that was begun")
        self._num_compared = end
        if end == len(self._expected):
            self._expected = b""
        return data[num_same:]

    def _skip_head(self, data: bytes) -> bytes:
        """Return what follows the head, which has a date; another status ends the reply."""
        first, _, rest = data.partition(HEAD_END)
        head, border, _ = self._expected.partition(HEAD_END)
        if not border or first.partition(b"\r\n")[0] != head.partition(b"\r\n")[0]:
            self._fail()
            return b""
        self._num_compared = len(head) + len(border)
        return rest

    def _fail(self) -> None:
        self.fail(b"" if self._journal.head is None else self._journal.head.failure)

    def _append(self, data: bytes) -> None:
        while data:
            num_written = os.pwrite(self.fd, data, self._size)
            self._size += num_written
            data = data[num_written:]
        if self._watched_fd < 0:
            self._send()

    def _send(self) -> None:
        num_unsent = self.num_unsent
        try:
            while num_unsent:
                num_sent = os.sendfile(self._socket_fd, self.fd, None, num_unsent)
                self._num_sent += num_sent
                num_unsent -= num_sent
        except BlockingIOError:
            pass
        except OSError:
            self._is_broken, num_unsent = True, 0  # the connection's own reader hears of it
        self._watch(is_wanted=bool(num_unsent))
        if self._is_paused != (num_unsent > (LOW_BYTES if self._is_paused else HIGH_BYTES)):
            self._is_paused = not self._is_paused
            (self._pause if self._is_paused else self._resume)()
        if not num_unsent and self._on_sent is not None:
            on_sent, self._on_sent = self._on_sent, None
            on_sent()

    def _watch(self, *, is_wanted: bool) -> None:
        """Wait for room in the socket, or end the wait."""
        if is_wanted and self._watched_fd < 0:
            self._watched_fd = os.dup(self._socket_fd)
            self._loop.add_writer(self._watched_fd, self._send)
        elif not is_wanted and self._watched_fd >= 0:
            self._loop.remove_writer(self._watched_fd)
            os.close(self._watched_fd)
            self._watched_fd = -1


def expected_bytes(fd: int, journal: Journal) -> bytes:
    """Read the bytes that a replay writes again: all but the pings of the time between daemons."""
    data, ping = os.pread(fd, os.fstat(fd).st_size, 0), journal.head.ping if journal.head else b""
    for position in sorted(journal.pings, reverse=True):
        if data[position : position + len(ping)] == ping:
            data = data[:position] + data[position + len(ping) :]
    return data
