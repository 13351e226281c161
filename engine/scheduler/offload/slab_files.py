"""Keep KV blocks in slab files of a folder, under a cap.

Invariant: physical bytes never exceed the cap; a slab's number is used once per process; a
descriptor stays open until close(), since a thread may be stuck in it.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from engine.scheduler.cache.snapshot_worths import NOTHING, Saved
from engine.scheduler.offload.files import (
    ModelShare,
    SlabContents,
    SlabSummary,
    contents_of,
    head_of,
    lock,
    make_private,
    physical_bytes,
    shares_of,
    slab_paths,
    write_all,
)
from engine.scheduler.offload.index import RecordPlace
from engine.scheduler.offload.records import (
    HEADER_BYTES,
    PAGE,
    RecordHead,
    SlabHead,
    payload_crc,
    read_record,
    record_bytes,
    seal_record,
    seal_slab,
)
from engine.system.own_files import open_own
from engine.units import size_text

SLAB_BYTES = 64 << 20
MIN_SLABS = 8
"""Minimum slabs per cap, if they still hold a record."""
RESERVE_BYTES = 10 << 30
"""Free disk bytes that a slab never takes."""
PROBE_BYTES = 4 << 20
_INDEX_RECORDS = 160
"""Records per page of the file system's own metadata."""


def _need_bytes(head: SlabHead) -> int:
    """Return the disk bytes of a full slab."""
    pages = 2 + head.num_records // _INDEX_RECORDS  # the first page, and the file system's own
    return head.num_records * head.record_bytes + pages * PAGE


class DamagedError(Exception):
    """A record differs from what was stored."""


class RecordBuffer:
    """Hold one record at a time, aligned for O_DIRECT; each thread has its own."""

    def __init__(self, block_bytes: int) -> None:
        self.record = memoryview(mmap.mmap(-1, record_bytes(block_bytes)))
        self.block = self.record[HEADER_BYTES : HEADER_BYTES + block_bytes]


@dataclass(slots=True)
class Reclaimed:
    """The files and blocks deleted at start."""

    num_damaged_slabs: int = 0
    """Slabs with an unreadable first page, or that could not be completed."""
    num_surplus_slabs: int = 0
    """Slabs of any model beyond a reduced cap."""
    num_damaged_records: int = 0
    num_bytes: int = 0
    """Bytes given back to the disk."""


@dataclass(slots=True)
class _Slab:
    head: SlabHead
    path: Path
    fd: int


def full_text(free_bytes: int, reserve_bytes: int) -> str:
    """Explain that the disk is full: its free and its reserved bytes."""
    free, reserve = size_text(free_bytes), size_text(reserve_bytes)
    return f"its disk is full: {free} free, {reserve} reserved"


class OtherSlabs:
    """Slabs of other models, dtypes and layouts: kept, aged and given up.

    Of each file only its figures are in memory, about 1 KiB, however many blocks it has.
    """

    def __init__(self) -> None:
        self._slabs: dict[Path, SlabSummary] = {}
        self.shares: list[ModelShare] = []
        """The bytes of each model; readable from any thread."""

    @property
    def heads(self) -> list[SlabHead]:
        return [summary.head for summary in self._slabs.values()]

    @property
    def num_bytes(self) -> int:
        return sum(p.stat().st_blocks * 512 for p in self._slabs if p.exists())

    def add(self, path: Path, contents: SlabContents) -> None:
        """Keep a slab."""
        self._slabs[path] = contents.summary
        self.shares = shares_of(self._slabs.values())

    def drop_oldest(self, unused_since_s: int | None) -> bool:
        """Delete the slab whose newest block is the oldest; False: all are newer.

        Args:
            unused_since_s: slabs with newer blocks stay; None: any may go.
        """
        path = min(self._slabs, key=lambda each: self._slabs[each].age, default=None)
        if path is None:
            return False
        if unused_since_s is not None and self._slabs[path].age[0] > unused_since_s:
            return False
        self._drop(path)
        return True

    def expire(self, oldest_s: int) -> None:
        """Erase blocks stored before a time, and forget deleted slabs.

        Raises:
            OSError: one cannot be erased; it is tried again the next time.
        """
        for path, summary in list(self._slabs.items()):
            if not path.exists() or summary.age[0] < oldest_s:
                self._drop(path)
            elif summary.oldest_s < oldest_s:
                self._slabs[path] = _erase_old(path, summary.head, oldest_s).summary
        self.shares = shares_of(self._slabs.values())

    def _drop(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        del self._slabs[path]
        self.shares = shares_of(self._slabs.values())


def _erase_old(path: Path, head: SlabHead, oldest_s: int) -> SlabContents:
    """Erase a slab's blocks stored before a time, and return the others; raises OSError."""
    fd = open_own(path, os.O_RDWR)
    try:
        contents = contents_of(fd, head)
        old = [index for index, record in contents.records if record.stored_at_s < oldest_s]
        for index in old:
            write_all(fd, memoryview(bytes(head.record_bytes)), head.offset(index))
    finally:
        os.close(fd)
    kept = [(index, r) for index, r in contents.records if r.stored_at_s >= oldest_s]
    return SlabContents(head, kept)


class Slabs:
    """Manage the folder of one daemon.

    Args:
        folder: made if missing.
        fingerprint: of everything that a block's bytes depend on: [DIGEST_BYTES].
        cap_bytes: maximum physical bytes of all slabs.
        reserve_bytes: free bytes that the disk keeps.
    """

    def __init__(
        self,
        folder: Path,
        block_bytes: int,
        fingerprint: bytes,
        cap_bytes: int,
        reserve_bytes: int = RESERVE_BYTES,
        model: str = "",
    ) -> None:
        self.folder = folder
        self.block_bytes = block_bytes
        self.is_direct = True
        """False: the file system lacks direct I/O, so the page cache is used."""
        self.reclaimed = Reclaimed()
        self.others = OtherSlabs()
        self._model = model
        self._fingerprint = fingerprint
        self._reserve_bytes = reserve_bytes
        self._record_bytes = record_bytes(block_bytes)
        self.probe_bytes = min(PROBE_BYTES, max(cap_bytes // 64 // PAGE, 1) * PAGE)
        """Bytes of the temporary file that measures the disk's rate."""
        self._slab_cap_bytes = cap_bytes - self.probe_bytes
        wanted = min(SLAB_BYTES, self._slab_cap_bytes // MIN_SLABS)
        self._num_records = max(1, (wanted - PAGE) // self._record_bytes)
        self._slabs: dict[int, _Slab] = {}
        self._gone: list[_Slab] = []
        self._next_number = 0
        self._adopted: set[int] = set()
        """Numbers of slabs that existed at start."""
        self._lock_fd: int | None = None
        self._growing = Lock()
        self._zeros = memoryview(mmap.mmap(-1, self._record_bytes))

    @property
    def max_places(self) -> int:
        """Records that fit under the cap."""
        num_slabs = self._slab_cap_bytes // self._own_bytes
        return max(num_slabs, 0) * self._num_records

    @property
    def num_bytes(self) -> int:
        """Physical bytes of all slabs, including unlinked ones."""
        own = sum(physical_bytes(slab.fd) for slab in [*self._slabs.values(), *self._gone])
        return own + self.others.num_bytes

    # Start and end

    def open(self) -> list[SlabContents]:
        """Lock the folder and read the served model's slabs. Other models' slabs are kept, too.

        Slabs beyond the cap are deleted, the oldest first, of any model.

        Raises:
            BusyError: another process has it.
            OSError: it cannot be made, or belongs to another user.
        """
        make_private(self.folder)  # refuses what holds files of others
        self._lock_fd = lock(self.folder)
        whole: list[tuple[SlabContents, Path, int]] = []
        for number, path in sorted(slab_paths(self.folder)):
            fd = self.open_file(path, os.O_RDWR)
            head = head_of(fd, number)
            if head is None:
                self.reclaimed.num_damaged_slabs += 1
                self._reclaim(path, fd)
            else:
                whole.append((contents_of(fd, head), path, fd))
        found = []
        for contents, path, fd in sorted(whole, key=lambda each: each[0].summary.age, reverse=True):
            if self._claimed_bytes() + _need_bytes(contents.head) > self._slab_cap_bytes:
                self.reclaimed.num_surplus_slabs += 1
                self._reclaim(path, fd)
            elif not self._is_own(contents.head):
                self._keep(contents, path, fd)
            elif self._adopt(contents, path, fd):
                found.append(contents)
        return sorted(found, key=lambda contents: contents.head.number)

    def _is_own(self, head: SlabHead) -> bool:
        return (head.fingerprint, head.record_bytes) == (self._fingerprint, self._record_bytes)

    def _keep(self, contents: SlabContents, path: Path, fd: int) -> None:
        """Keep another model's slab, unless it is empty."""
        if not contents.records:
            self._reclaim(path, fd)
            return
        os.close(fd)
        self._adopted.add(contents.head.number)
        self.others.add(path, contents)

    def _adopt(self, contents: SlabContents, path: Path, fd: int) -> bool:
        """Complete a slab of the served model; False: impossible."""
        head = contents.head
        try:
            os.ftruncate(fd, min(os.fstat(fd).st_size, head.num_bytes))
            os.posix_fallocate(fd, 0, head.num_bytes)  # where it had been cut off
            for index in contents.damaged:
                write_all(fd, self._zeros, head.offset(index))
        except OSError:
            self.reclaimed.num_damaged_slabs += 1
            self._reclaim(path, fd)
            return False
        self._adopted.add(head.number)
        self._slabs[head.number] = _Slab(head, path, fd)
        self.reclaimed.num_damaged_records += len(contents.damaged)
        return True

    def _reclaim(self, path: Path, fd: int) -> None:
        self.reclaimed.num_bytes += physical_bytes(fd)
        os.close(fd)
        path.unlink()

    def close(self) -> None:
        """Unlock the folder, once no thread works in it."""
        for slab in [*self._slabs.values(), *self._gone]:
            os.close(slab.fd)
        self._slabs.clear()
        self._gone.clear()
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    # Slabs

    def grow(self, unused_since_s: int | None = None) -> SlabHead | None:
        """Make another slab; None: the cap or the disk has no space.

        Args:
            unused_since_s: another model's slab with newer blocks stays; None: any may go.

        Raises:
            OSError: it could not be made, and was removed.
        """
        self.remake_folder()
        with self._growing:
            if not self._make_room(unused_since_s):
                return None
            # the lowest, whatever lies there: a name with too many digits would never be found
            while self._next_number in self._adopted:
                self._next_number += 1
            number, self._next_number = self._next_number, self._next_number + 1
            head = SlabHead(
                number, self._record_bytes, self._num_records, self._fingerprint, self._model
            )
            path = self.folder / f"slab-{number:06}.kv"
            fd = self.open_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            try:
                os.posix_fallocate(fd, 0, head.num_bytes)
                page = memoryview(mmap.mmap(-1, PAGE))
                page[:] = seal_slab(head)
                write_all(fd, page, 0)
            except OSError:
                os.close(fd)
                path.unlink(missing_ok=True)
                raise
            self._slabs[number] = _Slab(head, path, fd)
            return head

    def _make_room(self, unused_since_s: int | None) -> bool:
        """Delete old slabs of other models to fit one more; False: it does not fit."""
        while self._claimed_bytes() + self._own_bytes > self._slab_cap_bytes:
            if not self.others.drop_oldest(unused_since_s):
                return False
        while self.limit() is not None:
            free_bytes = shutil.disk_usage(self.folder).free + self.others.num_bytes
            if free_bytes - self._own_bytes < self._reserve_bytes:
                return False  # nor would there be without them
            if not self.others.drop_oldest(unused_since_s):
                return False
        return True

    def limit(self) -> str | None:
        """Explain why no slab can be made below the cap; None: one can, or the cap is full.

        Raises:
            OSError: the disk cannot be examined.
        """
        need = self._own_bytes
        free_bytes = shutil.disk_usage(self.folder).free
        is_at_cap = self._claimed_bytes() + need > self._slab_cap_bytes
        if is_at_cap or free_bytes - need >= self._reserve_bytes:
            return None
        return full_text(free_bytes, self._reserve_bytes)

    def any_slab(self) -> int | None:
        """Return a descriptor of any slab; None: no slabs."""
        with self._growing:
            return next((slab.fd for slab in self._slabs.values()), None)

    def remake_folder(self) -> None:
        """Make and lock the folder again if it, or its lock, was deleted.

        Raises:
            BusyError: another process was faster.
            OSError: it cannot be made.
        """
        with self._growing:
            if self._lock_fd is None or os.fstat(self._lock_fd).st_nlink:
                return
            if not self.folder.is_dir():
                make_private(self.folder)
            lock_fd, self._lock_fd = self._lock_fd, lock(self.folder)
            os.close(lock_fd)

    def expire_others(self, oldest_s: int) -> None:
        """Erase other models' blocks stored before a time; raises OSError."""
        with self._growing:
            self.others.expire(oldest_s)

    def forget_lost(self) -> list[int]:
        """Drop slabs whose files were deleted, and return their numbers."""
        with self._growing:
            lost = [n for n, slab in self._slabs.items() if not os.fstat(slab.fd).st_nlink]
            for number in lost:
                slab = self._slabs.pop(number)
                self._gone.append(slab)
                with suppress(OSError):
                    os.ftruncate(slab.fd, 0)
            return lost

    def _claimed_bytes(self) -> int:
        """Return the bytes of all slabs once they are full."""
        heads = [*(slab.head for slab in self._slabs.values()), *self.others.heads]
        return max(sum(map(_need_bytes, heads)), self.num_bytes)

    @property
    def _own_bytes(self) -> int:
        return _need_bytes(SlabHead(0, self._record_bytes, self._num_records, self._fingerprint))

    def open_file(self, path: Path, flags: int) -> int:
        """Open a file in the folder, with direct I/O if possible."""
        if self.is_direct:
            try:
                return open_own(path, flags | os.O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.is_direct = False
                flags &= ~os.O_EXCL  # the failed attempt may have made the file
        return open_own(path, flags)

    # Records

    def write(
        self,
        place: RecordPlace,
        block_hash: bytes,
        number: int,
        stored_at_s: int,
        buffer: RecordBuffer,
        saved: Saved = NOTHING,
    ) -> None:
        """Write the buffer's block to a place.

        Raises:
            OSError: it was written incompletely.
        """
        slab = self._slab(place)
        head = RecordHead(
            number,
            stored_at_s,
            self.block_bytes,
            block_hash,
            self._fingerprint,
            payload_crc(buffer.block),
            saved,
        )
        buffer.record[:HEADER_BYTES] = seal_record(head, *place)
        write_all(slab.fd, buffer.record, slab.head.offset(place.record))

    def read(self, place: RecordPlace, block_hash: bytes, buffer: RecordBuffer) -> None:
        """Read a block into the buffer.

        Raises:
            DamagedError: the place does not hold that block intact.
            OSError: it cannot be read.
        """
        slab = self._slab(place)
        size = os.preadv(slab.fd, [buffer.record], slab.head.offset(place.record))
        if size < self._record_bytes:
            raise DamagedError("the slab file is truncated")
        head = read_record(bytes(buffer.record[:HEADER_BYTES]), *place)
        if head is None or head.num_bytes != self.block_bytes:
            raise DamagedError("its header is damaged")
        if (head.block_hash, head.fingerprint) != (block_hash, self._fingerprint):
            raise DamagedError("it holds another block")
        if head.payload_crc != payload_crc(buffer.block):
            raise DamagedError("checksum mismatch")

    def erase(self, place: RecordPlace) -> None:
        """Write zeros over a place, so that its old bytes are gone.

        Raises:
            OSError: it failed.
        """
        slab = self._slab(place)
        write_all(slab.fd, self._zeros, slab.head.offset(place.record))

    def _slab(self, place: RecordPlace) -> _Slab:
        try:
            return self._slabs[place.slab]
        except KeyError:
            raise OSError(errno.ENOENT, "the slab file is missing", f"slab {place.slab}") from None
