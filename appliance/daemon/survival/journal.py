"""Record what a reply depends on, so that the next daemon can write the same bytes again.

A reply follows from its request, from values that were taken for it (ids, seeds, times), and from
its tokens, in the batches in which the reply took them. The journal records all three in a memfd
that outlives the daemon. The next daemon sends the request through the same code, and answers each
such value and each wait for tokens from the journal.
Invariant: a record is in the memfd before the first byte of the reply that depends on it. A torn
last record is dropped.
"""

from __future__ import annotations

import enum
import os
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import msgspec

from engine.errors import PenstockError, Unavailable
from engine.scheduler.cache.prefix_misses import CacheMiss
from engine.scheduler.sequences.sequence import Stamps
from engine.wire.not_json import NOT_JSON
from engine.wire.sampling import TokenLogprob

T = TypeVar("T")

VERSION = 2
"""Version of the records. A journal of another version cannot be replayed."""
MAX_UNWRITTEN = 32
"""Maximum records that wait for a reply's next bytes."""
MAX_TAKE_UPS = 2
"""Maximum daemons that take a request up and die before it makes progress."""
FD_NAME = "penstock-journal-"
_FRAME = struct.Struct("<IB")


class _Kind(enum.IntEnum):
    """What a record is; a number is never given another meaning."""

    HEAD = 1
    REQUEST = 2
    VALUE = 3
    BATCH = 4
    TAKEN_UP = 5
    PING = 6
    COMPLETE = 7


class Foreign(PenstockError):
    """A journal that this version cannot read.

    Args:
        what: why.
        failure: bytes that end its stream with an error; empty: unknown.
    """

    def __init__(self, what: str, failure: bytes = b"") -> None:
        super().__init__(what)
        self.failure = failure


class Differs(PenstockError):
    """A reply that is written again is different."""


class Head(msgspec.Struct, array_like=True, frozen=True):
    """What the next daemon must know before it sends the request again.

    Every version begins with the first two fields.
    """

    version: int
    failure: bytes
    """Bytes that end the stream with an error; empty: a whole reply, which has no events."""
    ping: bytes
    """Bytes that keep the stream alive; empty: its clients know none."""
    model: str
    credentials: tuple[int, int, int, tuple[int, ...]] | None
    """The user, group, process and groups of the Unix socket's peer; None: TCP."""
    key_digests: tuple[bytes, ...] = ()
    """Digests of the keys sent. An older journal has none: its request holds the keys."""


class Facts(msgspec.Struct, array_like=True):
    """What a row and a reply tell of a sequence besides its tokens."""

    stamps: Stamps
    num_cached_tokens: int
    cache_miss: CacheMiss | None
    workers: list[str]
    links: list[str]
    transport: str | None
    route_reason: str | None


class End(msgspec.Struct, array_like=True):
    """How a sequence ended."""

    finish_reason: str | None
    error: str | None
    is_refused: bool
    cancelled_by: str | None
    failure: dict[str, Any] | None
    """The arguments of a RequestError."""


class Tokens(msgspec.Struct, array_like=True):
    """New tokens of one sequence."""

    index: int
    token_ids: list[int]
    logprobs: list[TokenLogprob]
    num_preemptions: int
    facts: Facts | None
    """Given with the first tokens and with the last."""
    end: End | None
    """Given with the last tokens."""
    prompt_logprobs: list[TokenLogprob] = []
    """Given with the first tokens, where they are asked for."""


_BATCH = msgspec.msgpack.Decoder(list[Tokens])
_HEAD = msgspec.msgpack.Decoder(Head)
_encode = msgspec.msgpack.Encoder().encode


class Replayed(Protocol):
    """Take a value that a reply depends on, an id, a seed or a time, as the dead daemon took it."""

    def __call__(self, source: Callable[..., T], *args: Any) -> T:
        """Return what `source` gave the dead daemon; without one, what it gives now."""


def anew(source: Callable[..., T], *args: Any) -> T:
    """Take a value for a reply that ends with this daemon."""
    return source(*args)


class Journal:
    """The journal of one request: a new one, or the one that a dead daemon left.

    Args:
        fd: the dead daemon's memfd; -1: the request is new.

    Raises:
        Foreign: this version cannot read it.
    """

    def __init__(self, fd: int = -1) -> None:
        self.fd = fd
        self.head: Head | None = None
        """Given for a request of a dead daemon."""
        self.request = b""
        """The dead daemon's request as it came: HTTP head and body."""
        self.pings: list[int] = []
        """Positions in the reply of pings that were sent between two daemons."""
        self.batches: deque[list[Tokens]] = deque()
        """The batches that the dead daemon's reply took."""
        self.is_complete = False
        """Whether all bytes of the reply are in its file."""
        self.died_ns = 0
        """CLOCK_MONOTONIC of the dead daemon's last record."""
        self.silent_s = 0.0
        """How long the reply had been silent when this daemon took it up."""
        self._values: deque[Any] = deque()
        self._unwritten: list[bytes] = []
        self.num_deaths = 0
        """Daemons that have died during the request."""
        self._num_take_ups = 0
        self._is_off = False
        self.is_cut = False
        """Whether a record could not be written: no byte may depend on the journal from then on."""
        if fd >= 0:
            self.died_ns = time.monotonic_ns() - time.time_ns() + os.fstat(fd).st_mtime_ns
            try:
                self._read(os.pread(fd, os.fstat(fd).st_size, 0))
            except (*NOT_JSON, ValueError) as error:
                raise Foreign("the journal is damaged", _failure_of(self.head)) from error
            self.num_deaths += 1
            if self.head is None or not self.request:
                raise Foreign("the journal is damaged", _failure_of(self.head))

    def _read(self, data: bytes) -> None:
        num_bytes = 0
        for kind, record in _records(data):
            num_bytes += _FRAME.size + len(record)
            if kind == _Kind.HEAD:
                version, failure = msgspec.msgpack.decode(record, type=list)[:2]
                if version != VERSION:
                    raise Foreign(f"the journal has version {version}, not {VERSION}", failure)
                self.head = _HEAD.decode(record)
            elif kind == _Kind.REQUEST:
                self.request = record
            elif kind == _Kind.BATCH:
                self.batches.append(_BATCH.decode(record))
                if self.batches[-1]:
                    self._num_take_ups = 0
            elif kind == _Kind.VALUE:
                self._values.append(msgspec.msgpack.decode(record))
            elif kind == _Kind.TAKEN_UP:
                self._num_take_ups += 1
                self.num_deaths += 1
            elif kind == _Kind.PING:
                self.pings.append(msgspec.msgpack.decode(record))
            elif kind == _Kind.COMPLETE:
                self.is_complete = True
        os.ftruncate(self.fd, num_bytes)  # a kill in mid-write has torn the last record
        os.lseek(self.fd, num_bytes, os.SEEK_SET)

    def open(self, head: Head, request: list[bytes], request_id: str = "") -> None:
        """Begin the memfd of a request that has been admitted; its name ends with the id.

        Raises:
            OSError: there is no memory or no descriptor left.
        """
        self.fd = os.memfd_create(FD_NAME + request_id, os.MFD_CLOEXEC)
        size = sum(map(len, request))
        parts = [_framed(_Kind.HEAD, _encode(head)), _FRAME.pack(size, _Kind.REQUEST), *request]
        if os.writev(self.fd, parts) < sum(map(len, parts)):
            raise OSError("the journal is cut")
        self.flush()

    def close(self) -> None:
        """Record nothing any more: the reply ends with this daemon, or has ended."""
        self._is_off = True
        self._unwritten.clear()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    @property
    def num_tokens(self) -> int | None:
        """Count the tokens that a dead daemon's reply has taken; None: it cannot be read."""
        if self.head is None:
            return None
        return sum(len(each.token_ids) for batch in self.batches for each in batch)

    @property
    def is_replay(self) -> bool:
        """Say whether a dead daemon left it."""
        return self.head is not None

    @property
    def is_given_up(self) -> bool:
        """Say whether a dead daemon's request has its row already: its client has left."""
        return self.is_replay and self.fd < 0

    def replayed(self, source: Callable[..., T], *args: Any) -> T:
        """Return the dead daemon's value, or take and record a new one."""
        if self._values:
            value: T = self._values.popleft()
            return value
        value = source(*args)
        self._add(_Kind.VALUE, value)
        return value

    def took(self, batch: list[Tokens]) -> None:
        """Record a batch before anything of it is written."""
        self._add(_Kind.BATCH, batch)
        if len(self._unwritten) >= MAX_UNWRITTEN:
            self.flush()

    def complete(self) -> None:
        """Record that all bytes of the reply are in its file: the next daemon only sends them."""
        if not self.is_complete:
            self.is_complete = True
            self._add(_Kind.COMPLETE, True)
            self.flush()

    def take_up(self, model: str) -> None:
        """Record that this daemon continues the request.

        Raises:
            Unavailable: it cannot.
        """
        assert self.head is not None
        if self._num_take_ups >= MAX_TAKE_UPS:
            about = f"the daemon died {self._num_take_ups + 1} times during this request"
            raise Unavailable(about, code="daemon_died")
        if self.head.model != model:
            about = f"the daemon restarted with another model than {self.head.model}"
            raise Unavailable(about, code="daemon_died")
        self._add(_Kind.TAKEN_UP, True)
        self.flush()

    def ping_at(self, position: int) -> None:
        """Record that a ping is about to be written at this position of the reply."""
        self.pings.append(position)
        self._add(_Kind.PING, position)
        self.flush()

    def flush(self) -> None:
        """Write the records; called before the bytes that depend on them are written."""
        if self._unwritten and self.fd >= 0:
            data = b"".join(self._unwritten)
            self._unwritten.clear()
            try:
                self.is_cut = os.write(self.fd, data) < len(data)
            except OSError:  # no memory, or a limit on the size of files
                self.is_cut = True
            self._is_off |= self.is_cut

    def _add(self, kind: _Kind, content: object) -> None:
        if not self._is_off:
            self._unwritten.append(_framed(kind, _encode(content)))


def _failure_of(head: Head | None) -> bytes:
    return b"" if head is None else head.failure


def _framed(kind: _Kind, data: bytes) -> bytes:
    return _FRAME.pack(len(data), kind) + data


def _records(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + _FRAME.size <= len(data):
        size, kind = _FRAME.unpack_from(data, at)
        at += _FRAME.size
        if at + size > len(data):
            return
        yield kind, data[at : at + size]
        at += size
