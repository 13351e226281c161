"""The folder of an SSD cache: how a block lies in a file; files found, read, looked after, deleted.

Owns: how a block and a slab's head are written as bytes; names and modes of the files, and the lock
on the folder.
Invariant: what a survey says was read from sealed headers; it takes no lock and changes nothing.
Never: knows what is being written.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

# How a block lies on disk: a header, its bytes, and checksums over both and over the place.
# A slab file begins with a page that says how it is divided; then come records of one length, each
# on a 4 KiB border, so that they can be read and written past the page cache. A record's header has
# the block's hash, a fingerprint of all that its bytes depend on, a sequence number, the time, and
# two checksums: one of the bytes, and one of the header itself together with where it lies, so that
# a header is believed without reading what follows, and a record that strayed to another place is
# not. CRC-32 finds every error within 32 bits of each other, so every damaged byte.
# Invariant: what was not sealed for this place, fingerprint and content is read as None or as
# wrong.
# Never: reads or writes a file.


PAGE = 4096
"""Offsets and lengths of every read and write are multiples of it."""
HEADER_BYTES = 128
"""Of a record, before its bytes."""
DIGEST_BYTES = 32
"""Of a fingerprint; a hash has at most as many."""

_SLAB = struct.Struct("<8sQQQ32s")
_RECORD = struct.Struct("<8sQQQQ32s32sI")
_CRC = struct.Struct("<I")
_MODEL = struct.Struct("<256s")
_MODEL_AT = 256
"""Where a slab's first page has its model's name, with a checksum of its own."""
_PLACE = struct.Struct("<QQ")
_SLAB_MAGIC = b"PnstKVs\x01"
_RECORD_MAGIC = b"PnstKVr\x01"


class SlabHead(NamedTuple):
    """What a slab's first page says."""

    number: int
    """Of the slab, which is in the file's name, too."""
    record_bytes: int
    num_records: int
    fingerprint: bytes
    """Of model, dtype and layout: [DIGEST_BYTES]. All records of a slab have the same."""
    model: str = ""
    """Its model's name, for people; empty: unknown."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole slab file."""
        return PAGE + self.num_records * self.record_bytes

    def offset(self, index: int) -> int:
        """Where a record begins in its slab file, in bytes."""
        return PAGE + index * self.record_bytes


class RecordHead(NamedTuple):
    """What a record's header says."""

    number: int
    """Grows with every store; of two records of one block the newer counts."""
    stored_at_s: int
    """Unix time."""
    num_bytes: int
    """Of the block."""
    block_hash: bytes
    fingerprint: bytes
    payload_crc: int


def record_bytes(block_bytes: int) -> int:
    """Length of a record: header and block, up to the next border."""
    return -(-(HEADER_BYTES + block_bytes) // PAGE) * PAGE


def payload_crc(payload: bytes | memoryview) -> int:
    """The checksum of a block's bytes; Python's lock is free meanwhile."""
    return zlib.crc32(payload)


def seal_slab(head: SlabHead) -> bytes:
    """The first page of a slab."""
    packed = _SLAB.pack(
        _SLAB_MAGIC, head.number, head.record_bytes, head.num_records, head.fingerprint
    )
    model = _MODEL.pack(head.model.encode())
    sealed = (packed + _CRC.pack(zlib.crc32(packed))).ljust(_MODEL_AT, b"\0")
    return (sealed + model + _CRC.pack(zlib.crc32(model))).ljust(PAGE, b"\0")


def read_slab(page: bytes) -> SlabHead | None:
    """What a first page says; None if it is none."""
    packed = page[: _SLAB.size]
    crc = page[_SLAB.size : _SLAB.size + _CRC.size]
    if len(crc) < _CRC.size or _CRC.pack(zlib.crc32(packed)) != crc:
        return None
    magic, *values = _SLAB.unpack(packed)
    head = SlabHead(*values)._replace(model=_read_model(page))
    is_sound = head.record_bytes > 0 and head.record_bytes % PAGE == 0 and head.num_records > 0
    return head if magic == _SLAB_MAGIC and is_sound else None


def _read_model(page: bytes) -> str:
    """A slab's model; empty where the page has no such name, or a damaged one."""
    end = _MODEL_AT + _MODEL.size
    model = page[_MODEL_AT:end]
    if page[end : end + _CRC.size] != _CRC.pack(zlib.crc32(model)):
        return ""
    return model.rstrip(b"\0").decode(errors="replace")


def seal_record(head: RecordHead, slab: int, index: int) -> bytes:
    """The header of a record that is to lie there, HEADER_BYTES long."""
    packed = _RECORD.pack(
        _RECORD_MAGIC,
        head.number,
        head.stored_at_s,
        head.num_bytes,
        len(head.block_hash),
        head.block_hash,
        head.fingerprint,
        head.payload_crc,
    )
    return (packed + _CRC.pack(_header_crc(packed, slab, index))).ljust(HEADER_BYTES, b"\0")


def read_record(header: bytes, slab: int, index: int) -> RecordHead | None:
    """What a record's header says; None if it was not sealed for this place, or is damaged."""
    packed = header[: _RECORD.size]
    crc = header[_RECORD.size : _RECORD.size + _CRC.size]
    if len(crc) < _CRC.size or _CRC.pack(_header_crc(packed, slab, index)) != crc:
        return None
    magic, number, stored_at_s, num_bytes, hash_bytes, padded, *rest = _RECORD.unpack(packed)
    if magic != _RECORD_MAGIC or hash_bytes > len(padded):
        return None
    return RecordHead(number, stored_at_s, num_bytes, padded[:hash_bytes], *rest)


def _header_crc(packed: bytes, slab: int, index: int) -> int:
    return zlib.crc32(_PLACE.pack(slab, index), zlib.crc32(packed))


# --------------------------------------------------------------------------------------------------


_NAME = re.compile(r"slab-(\d{6,15})\.kv")
_LOCK = "lock"


class BusyError(OSError):
    """Another process has the folder."""


@dataclass(slots=True)
class SlabContents:
    """A slab file as it was found at start: its head and its records."""

    head: SlabHead
    records: list[tuple[int, RecordHead]] = field(default_factory=list)
    damaged: list[int] = field(default_factory=list)
    """Numbers of records that are neither empty nor whole by their headers."""

    @property
    def age(self) -> tuple[int, int]:
        """When its newest block was stored; smaller is older, and empty the oldest."""
        return max(((r.stored_at_s, r.number) for _, r in self.records), default=(0, 0))

    @property
    def block_bytes(self) -> int:
        """Bytes of all its blocks."""
        return sum(record.num_bytes for _, record in self.records)


class ModelShare(NamedTuple):
    """What a folder has of one model."""

    model: str
    """Its name; empty: unknown."""
    num_blocks: int
    num_bytes: int
    """Of these blocks."""


def shares_of(slabs: Iterable[SlabContents]) -> list[ModelShare]:
    """What slabs have of each model, dtype and layout, the most first."""
    shares: dict[bytes, ModelShare] = {}
    for each in slabs:
        was = shares.get(each.head.fingerprint, ModelShare(each.head.model, 0, 0))
        shares[each.head.fingerprint] = ModelShare(
            each.head.model or was.model,
            was.num_blocks + len(each.records),
            was.num_bytes + each.block_bytes,
        )
    return sorted(shares.values(), key=lambda share: -share.num_bytes)


def survey(folder: Path) -> Iterator[tuple[Path, SlabContents | None]]:
    """Each slab in a folder and what its headers say; None: its first page is damaged.

    Reads only, and takes no lock: of a daemon's folder it is how it was a moment ago.
    """
    for number, path in sorted(slab_paths(folder)):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            head = head_of(fd, number)
            yield path, None if head is None else contents_of(fd, head)
        finally:
            os.close(fd)


def check_records(path: Path, contents: SlabContents) -> Iterator[bool]:
    """Read each of a slab's records to its end; True if it is as it was stored."""
    head = contents.head
    with path.open("rb") as file:
        for index, record in contents.records:
            file.seek(head.offset(index))
            data = file.read(HEADER_BYTES + record.num_bytes)
            now = read_record(data[:HEADER_BYTES], head.number, index)
            yield now is not None and now.payload_crc == payload_crc(data[HEADER_BYTES:])


def delete_slabs(folder: Path) -> int:
    """Delete everything that is kept in a folder; bytes given back.

    Raises:
        BusyError: a daemon has it.
        OSError: a file cannot be deleted.
    """
    if not (folder / _LOCK).is_file():
        return 0
    lock_fd = lock(folder)
    try:
        num_bytes = slab_bytes(folder)
        for _, path in slab_paths(folder):
            path.unlink()
        return num_bytes
    finally:
        os.close(lock_fd)


def lock(folder: Path) -> int:
    """The folder is this process's as long as the returned descriptor is open.

    Raises:
        BusyError: another has it.
    """
    fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise BusyError(errno.EBUSY, "another process has the folder") from error
    return fd


def slab_bytes(folder: Path) -> int:
    """Physical bytes of all slabs in a folder, there or not."""
    return sum(path.stat().st_blocks * 512 for _, path in slab_paths(folder))


def slab_paths(folder: Path) -> list[tuple[int, Path]]:
    """The slabs of a folder, there or not, and their numbers, in any order.

    What bears a slab's name and is no file, a link for one, is none.
    """
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        names = [e.name for e in entries if e.is_file(follow_symlinks=False)]
    matches = ((_NAME.fullmatch(name), folder / name) for name in names)
    return [(int(match[1]), path) for match, path in matches if match]


def head_of(fd: int, number: int) -> SlabHead | None:
    """A slab's first page; None if it is damaged, or another slab's."""
    page = memoryview(mmap.mmap(-1, PAGE))
    try:
        size = os.preadv(fd, [page], 0)
    except OSError:
        return None
    head = read_slab(bytes(page)) if size == PAGE else None
    return head if head is not None and head.number == number else None


def contents_of(fd: int, head: SlabHead) -> SlabContents:
    """What the headers of a slab's records say."""
    contents, page = SlabContents(head), memoryview(mmap.mmap(-1, PAGE))
    for index in range(head.num_records):
        try:
            size = os.preadv(fd, [page], head.offset(index))
        except OSError:
            contents.damaged.append(index)
            continue
        if size < PAGE:  # it was cut off here
            break
        header = bytes(page[:HEADER_BYTES])
        record = read_record(header, head.number, index)
        if record is not None and record.fingerprint == head.fingerprint:
            contents.records.append((index, record))
        elif any(header):
            contents.damaged.append(index)
    return contents


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """Write to a place in a file.

    Raises:
        OSError: not all of it is there.
    """
    if os.pwritev(fd, [data], offset) != len(data):
        raise OSError(errno.ENOSPC, "the record was not written to its end")


def physical_bytes(fd: int) -> int:
    """What a file takes, and what it could take without growing."""
    stat = os.fstat(fd)
    return max(stat.st_blocks * 512, stat.st_size)


def make_private(folder: Path) -> None:
    """Make the folder, and see to it that it is its owner's alone.

    A folder that was there is taken if it is empty or has been a cache before: what is in it may be
    deleted.

    Raises:
        OSError: it cannot be made, belongs to somebody else, or holds something else.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    stat = folder.stat()
    if stat.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "the folder belongs to another user", str(folder))
    if not (folder / _LOCK).is_file() and any(folder.iterdir()):
        about = "the folder holds other files, and the cache wants one of its own"
        raise FileExistsError(errno.EEXIST, about, str(folder))
    if stat.st_mode & 0o077:
        folder.chmod(0o700)
