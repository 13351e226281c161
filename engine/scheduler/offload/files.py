"""Find, survey, lock and delete the files of an SSD cache.

Invariant: a survey reads sealed headers; it takes no lock and changes nothing.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from engine.scheduler.offload.records import (
    HEADER_BYTES,
    PAGE,
    RecordHead,
    SlabHead,
    payload_crc,
    read_record,
    read_slab,
)
from engine.system.own_files import check_own_folder, open_file, open_own

_NAME = re.compile(r"slab-(\d{6,15})\.kv")
_LOCK = "lock"
WEIGHTS_FOLDER = "weights"
"""A folder within it that is not the cache's: packed weights."""


class BusyError(OSError):
    """Another process uses the folder."""


class SlabSummary(NamedTuple):
    """The figures of a slab, without its records."""

    head: SlabHead
    num_blocks: int
    block_bytes: int
    """Bytes of its blocks."""
    age: tuple[int, int]
    """When its newest block was stored; smaller is older, empty is oldest."""
    oldest_s: int
    """When its oldest block was stored."""


@dataclass(slots=True)
class SlabContents:
    """A slab file found at start: its head and its records."""

    head: SlabHead
    records: list[tuple[int, RecordHead]] = field(default_factory=list)
    damaged: list[int] = field(default_factory=list)
    """Numbers of records that are neither empty nor whole by their headers."""

    @property
    def summary(self) -> SlabSummary:
        stored = [(record.stored_at_s, record.number) for _, record in self.records]
        num_bytes = sum(record.num_bytes for _, record in self.records)
        newest, (oldest_s, _) = max(stored, default=(0, 0)), min(stored, default=(0, 0))
        return SlabSummary(self.head, len(stored), num_bytes, newest, oldest_s)


class ModelShare(NamedTuple):
    """One model's blocks in a folder."""

    model: str
    """Its name; empty: unknown."""
    num_blocks: int
    num_bytes: int
    """Bytes of these blocks."""


def shares_of(slabs: Iterable[SlabSummary]) -> list[ModelShare]:
    """Add up the slabs' blocks by model, dtype and layout, the most first."""
    shares: dict[bytes, ModelShare] = {}
    for each in slabs:
        was = shares.get(each.head.fingerprint, ModelShare(each.head.model, 0, 0))
        shares[each.head.fingerprint] = ModelShare(
            each.head.model or was.model,
            was.num_blocks + each.num_blocks,
            was.num_bytes + each.block_bytes,
        )
    return sorted(shares.values(), key=lambda share: -share.num_bytes)


def survey(folder: Path) -> Iterator[tuple[Path, SlabContents | None]]:
    """Yield each slab in a folder with its records; None: its first page is damaged.

    It only reads, without a lock: a running daemon's folder may have changed since.
    """
    for number, path in sorted(slab_paths(folder)):
        fd = open_file(path, os.O_RDONLY)
        try:
            head = head_of(fd, number)
            yield path, None if head is None else contents_of(fd, head)
        finally:
            os.close(fd)


def check_records(path: Path, contents: SlabContents) -> Iterator[bool]:
    """Read each of a slab's records; say whether all are intact."""
    head = contents.head
    with open(open_file(path, os.O_RDONLY), "rb") as file:
        for index, record in contents.records:
            file.seek(head.offset(index))
            data = file.read(HEADER_BYTES + record.num_bytes)
            now = read_record(data[:HEADER_BYTES], head.number, index)
            yield now is not None and now.payload_crc == payload_crc(data[HEADER_BYTES:])


def delete_slabs(folder: Path) -> int:
    """Delete everything that is kept in a folder; return the freed bytes.

    Raises:
        BusyError: a daemon uses it.
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
    """Lock the folder for this process, as long as the returned descriptor is open.

    Raises:
        BusyError: another process has it.
    """
    fd = open_own(folder / _LOCK, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise BusyError(errno.EBUSY, "another process uses the folder") from error
    return fd


def slab_bytes(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for _, path in slab_paths(folder))


def slab_paths(folder: Path) -> list[tuple[int, Path]]:
    """List the slabs of a folder with their numbers, in any order; empty without the folder.

    Links and folders with a slab's name are ignored.
    """
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        names = [e.name for e in entries if e.is_file(follow_symlinks=False)]
    matches = ((_NAME.fullmatch(name), folder / name) for name in names)
    return [(int(match[1]), path) for match, path in matches if match]


def head_of(fd: int, number: int) -> SlabHead | None:
    """Read a slab's first page; None: it is damaged, or another slab's."""
    page = memoryview(mmap.mmap(-1, PAGE))
    try:
        size = os.preadv(fd, [page], 0)
    except OSError:
        return None
    head = read_slab(bytes(page)) if size == PAGE else None
    return head if head is not None and head.number == number else None


def contents_of(fd: int, head: SlabHead) -> SlabContents:
    """Read the headers of a slab's records."""
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
        OSError: it was written incompletely.
    """
    if os.pwritev(fd, [data], offset) != len(data):
        raise OSError(errno.ENOSPC, "the record was written incompletely")


def physical_bytes(fd: int) -> int:
    """Return the bytes a file takes, or could take without growing."""
    stat = os.fstat(fd)
    return max(stat.st_blocks * 512, stat.st_size)


def make_private(folder: Path) -> None:
    """Make the folder, and check that only its owner can enter.

    An existing folder is used if it is empty or was a cache before: its contents may be deleted.

    Raises:
        OSError: it cannot be made, belongs to another user, or holds other files.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    check_own_folder(folder, is_roots_fine=False)
    others = any(each.name != WEIGHTS_FOLDER for each in folder.iterdir())
    if others and not (folder / _LOCK).is_file():
        about = "the folder holds other files; the cache needs its own"
        raise FileExistsError(errno.EEXIST, about, str(folder))
    folder.chmod(0o700)
