"""Send messages and descriptors to the daemon's keeper: systemd, or the parent process.

Messages are lines in systemd's format. They go to NOTIFY_SOCKET, or, if the keeper is our own, to a
socket that only this process holds (NOTIFY_FD).
Invariant: messages arrive in the order of the calls, or are reported as lost. The loop never waits.
Never: sends more descriptors than the keeper says that it keeps (FDSTORE).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import logging
import math
import os
import select
import socket
import struct
import termios
import time
from array import array
from collections import Counter, deque
from collections.abc import Mapping, Sequence

PATIENCE_S = 10.0
"""Time with unread messages after which the keeper counts as stuck."""
CLOSE_S = 1.0
"""Maximum wait at the daemon's end for a keeper without room."""
BUSY_TELL_S, BUSY_MAX_S = 5.0, 600.0
"""Seconds between a busy loop's messages, and for how long the watch may be late."""
REPLY = "r-"
"""Begins the names of unfinished replies; a number follows, as names are short."""
POOL = "pool-"
"""Begins the names of KV pools."""
MAX_NAMES_BYTES = 100_000
"""Every descriptor has its name in LISTEN_FDNAMES, and Linux limits a variable to 128 KiB."""

_LOG = logging.getLogger("penstock.notify")
_Message = tuple[bytes, tuple[int, ...], str]
"""The lines, the descriptors, and the name under which they are to be kept."""


class KeeperChannel:
    """The socket to the keeper, and what waits for it.

    Args:
        environ: of the process.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._address = environ.get("NOTIFY_SOCKET", "")
        pid, _, fd = environ.get("NOTIFY_FD", "").partition(":")
        is_own = pid == str(os.getpid())
        self._socket = socket.socket(fileno=int(fd)) if is_own else None
        if self._socket is not None:
            self._socket.setblocking(False)
            self._socket.set_inheritable(False)
        self._is_needed = is_own or bool(self._address)
        max_kept = environ.get("FDSTORE", "")
        self._max_kept = int(max_kept) if max_kept.isdigit() else None
        self._kept = Counter[str]()
        """Number of kept descriptors by name."""
        self._num_bytes = 0
        """Size of their names."""
        self._numbers = itertools.count()
        self._waiting = deque[_Message]()
        self._unread_since_s = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_lost = self._is_full = False

    @property
    def keeps(self) -> bool:
        """Whether descriptors are kept at all."""
        return self._is_needed and self._max_kept != 0

    @property
    def problem(self) -> str | None:
        """Why a crash would end replies that could go on; None: it would not."""
        if self._is_unread() and time.monotonic() - self._unread_since_s > PATIENCE_S:
            return "the keeper takes no messages"
        return "the keeper cannot be reached" if self._is_lost else None

    def send(self, fds: tuple[int, ...], fields: Mapping[str, str | int]) -> bool:
        """Send one message, now or when there is room; see notify()."""
        if not self._is_needed:
            return False
        name = str(fields.get("FDNAME", ""))
        if "FDSTORE" in fields:
            fields = {**fields, "FDPOLL": 0}  # a set stays whole if its client hangs up
            if not self.count(name, len(fds)):
                return False
        elif "FDSTOREREMOVE" in fields and self._forget(name):
            return True
        lines = [f"{key}={' '.join(str(value).splitlines())}" for key, value in fields.items()]
        message = ("\n".join(lines).encode(errors="replace"), fds, name)
        if self._loop is None:
            self._flush()
        if not self._waiting:
            is_sent = self._try(message)
            if is_sent is not None:
                return is_sent
        elif not fds and any(message == each for each in self._waiting):
            return True
        # The caller may close its descriptors before the message is sent.
        self._waiting.append((message[0], tuple(map(os.dup, fds)), name))
        self._watch()
        return True

    def close(self) -> None:
        """Send what waits, if there is room soon; forget the rest."""
        end_s = time.monotonic() + CLOSE_S
        poll = select.poll()
        if self._socket is not None:
            poll.register(self._socket, select.POLLOUT)
        while self._waiting and (left_s := end_s - time.monotonic()) > 0:
            poll.poll(1000 * left_s)
            self._flush()
        while self._waiting:
            _close(self._waiting.popleft())
        self._watch()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def unused_name(self, prefix: str) -> str:
        """Make a short name under which nothing is kept."""
        while (name := f"{prefix}{next(self._numbers):x}") in self._kept:
            pass
        return name

    def count(self, name: str, num_fds: int) -> bool:
        """Count descriptors as kept; False: there is no room for them."""
        num_bytes = num_fds * (len(name) + 1)
        is_full = self._num_bytes + num_bytes > MAX_NAMES_BYTES
        if self._max_kept is not None:
            is_full |= self._kept.total() + num_fds > self._max_kept
        if is_full and not self._is_full:
            _LOG.warning("The keeper is full: a crash would end replies that begin now")
        self._is_full = is_full
        if not is_full:
            self._kept[name] += num_fds
            self._num_bytes += num_bytes
        return not is_full

    def _forget(self, name: str) -> bool:
        """Count them no longer; True: all of them still waited to be sent."""
        num_fds = self._kept.pop(name, 0)
        self._num_bytes -= num_fds * (len(name) + 1)
        waiting = [each for each in self._waiting if each[1] and each[2] == name]
        for each in waiting:
            self._waiting.remove(each)
            _close(each)
        return 0 < num_fds == sum(len(each[1]) for each in waiting)

    def _try(self, message: _Message) -> bool | None:
        """Send it now; None: there is no room, False: it is lost."""
        data, fds, name = message
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
        if not self._is_unread():
            self._unread_since_s = time.monotonic()
        try:
            self._connect().sendmsg([data], rights)
        except BlockingIOError:
            return None
        except OSError as error:
            if not self._is_lost:
                _LOG.warning("Cannot notify the keeper (a crash would end replies): %s", error)
            self._is_lost = True
            if fds:
                self._forget(name)
            if self._address and self._socket is not None:
                self._socket.close()  # a new one may listen at the address
                self._socket = None
            return False
        self._is_lost = False
        return True

    def _connect(self) -> socket.socket:
        if self._socket is None:
            kind = socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
            opened = socket.socket(socket.AF_UNIX, kind)
            address = self._address  # "@": in the abstract namespace
            try:
                opened.connect("\0" + address[1:] if address[:1] == "@" else address)
            except OSError:
                opened.close()
                raise
            self._socket = opened
        return self._socket

    def _is_unread(self) -> bool:
        """Say whether the keeper has not yet read what was sent."""
        if self._socket is None:
            return False
        (num_bytes,) = struct.unpack("i", fcntl.ioctl(self._socket, termios.TIOCOUTQ, bytes(4)))
        return bool(num_bytes)

    def _flush(self) -> None:
        """Send what waits, as far as there is room."""
        while self._waiting:
            message = self._waiting.popleft()
            if self._try(message) is None:
                self._waiting.appendleft(message)
                break
            _close(message)
        self._watch()

    def _watch(self) -> None:
        """Have the loop call once there is room, while something waits."""
        if self._loop is not None and self._socket is not None and not self._loop.is_closed():
            self._loop.remove_writer(self._socket)
        self._loop = None
        if self._waiting and self._socket is not None:
            with contextlib.suppress(RuntimeError):  # no loop: the next call, or close(), sends it
                self._loop = asyncio.get_running_loop()
                self._loop.add_writer(self._socket, self._flush)


def _close(message: _Message) -> None:
    for fd in message[1]:
        os.close(fd)


_CHANNELS: dict[tuple[str | None, ...], KeeperChannel] = {}
"""This process's channel, by the variables that it was opened with."""


def _channel() -> KeeperChannel:
    key = os.environ.get("NOTIFY_SOCKET"), os.environ.get("NOTIFY_FD")
    if key not in _CHANNELS:
        close_channel()
        _CHANNELS[key] = KeeperChannel(os.environ)
    return _CHANNELS[key]


def close_channel() -> None:
    """Send what waits, if there is room soon."""
    while _CHANNELS:
        _CHANNELS.popitem()[1].close()


def notify(*fds: int, **fields: str | int) -> bool:
    """Send one message to the keeper: systemd, or our own.

    Fields of use: READY=1, STOPPING=1, STATUS=text, EXTEND_TIMEOUT_USEC=microseconds, and
    FDSTOREREMOVE=1 with FDNAME=name.

    Args:
        fds: descriptors to keep, with the fields FDSTORE=1 and FDNAME=name.
        fields: name and value of each line.

    Returns:
        False without a keeper, if it is full or if the message could not be sent.
    """
    return _channel().send(fds, fields)


def notify_watchdog() -> bool:
    """Tell the keeper that all is well, if it asked for that; silence ends the daemon."""
    is_for_us = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    return bool(is_for_us and os.environ.get("WATCHDOG_USEC")) and notify(WATCHDOG=1)


class BusyLoop:
    """Tell the keeper that requests are answered while nothing else gets its turn.

    A loop that has very many ready requests takes them all before it looks at its timers.
    """

    def __init__(self) -> None:
        self._watched_s = self._told_s = -math.inf

    def watched(self) -> None:
        """Note that the daemon's watch has had its turn, and told the keeper."""
        self._watched_s = self._told_s = time.monotonic()

    def answers(self) -> None:
        """Tell the keeper between two requests, if the watch is late but not lost."""
        now_s = time.monotonic()
        if now_s - self._told_s >= BUSY_TELL_S and now_s - self._watched_s < BUSY_MAX_S:
            self._told_s = now_s
            notify_watchdog()


BUSY_LOOP = BusyLoop()


def has_keeper() -> bool:
    """Say whether descriptors outlive this process."""
    return _channel().keeps


def unused_name(prefix: str) -> str:
    """Make a short name for descriptors that the keeper is to have."""
    return _channel().unused_name(prefix)


def count_kept(names: Sequence[str]) -> None:
    """Count descriptors that the keeper has given to this process."""
    for name in names:
        _channel().count(name, 1)


def keeper_problem() -> str | None:
    """Say why a crash would end replies that could go on; None: it would not."""
    return _channel().problem
