"""Threads that copy blocks between pools in host memory and slabs, and wait for the disk.

A job is a Copy with the places of its blocks, or a slab to make, places to sweep, a probe. Bytes go
from the pool's memory to a buffer of the thread's own and from there to the disk, or back: a block
reaches a pool only when its checksums are right. Two threads write, two read, so that the disk has
something to do while a checksum is made; a write never holds up a read for longer than it does.
They have the idle I/O priority and the usual one for cores: a thread that waits for a core while it
has Python's lock would hold up the daemon's loop. Writing is held to a share of a core instead.
Owns: the threads and their buffers. Reports come back by a callback, from the thread.
Invariant: each job is reported once, after its last touch of pool and slab; a job's pairs are done
in order, and the first that fails ends it.
Never: decides what is stored or loaded; raises on what a disk does.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Lock, Thread

from engine.messages import Copied, Copy
from engine.tiers.index import Entry, Place
from engine.tiers.records import SlabHead
from engine.tiers.slabs import DamagedError, RecordBuffer, Slabs

NUM_READERS = NUM_WRITERS = 2
WRITE_SHARE = 0.25
"""Of a core, that writing may take while requests are served."""
PROBE_NAME = ".penstock-probe"
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IOPRIO_WHO_PROCESS, _IOPRIO_IDLE = 1, 3 << 13


@dataclass(slots=True, eq=False)
class Job:
    """Something to be done with the disk; made on the loop, filled in by a thread."""

    is_void: bool = False
    """Set on the loop: nobody needs it any more; if it has not begun, it is not done."""
    is_begun: bool = False
    """A thread has taken it."""
    error: str | None = None
    """Why it could not be done, or not to its end."""
    started_ns: int = 0
    ended_ns: int = 0

    @property
    def elapsed_ms(self) -> float:
        """In the thread, without the wait for one."""
        return (self.ended_ns - self.started_ns) / 1e6


@dataclass(slots=True, eq=False)
class CopyJob(Job):
    """Blocks to the disk, or from there."""

    copy: Copy = field(kw_only=True)
    """One of its pools is a slab's: there the blocks are numbers of entries in the list."""
    entries: list[Entry] = field(kw_only=True)
    is_urgent: bool = False
    """Somebody waits for a store: it comes without a rest after it."""
    num_done: int = 0
    """Pairs, from the first on."""
    is_damaged: bool = False
    """The pair after those was not what had been stored."""

    def copied(self, num_bytes: int) -> Copied:
        """The same as a worker would report it."""
        return Copied(
            self.copy.copy_id,
            self.num_done,
            num_bytes,
            self.started_ns,
            self.ended_ns,
            is_last=True,
            error=self.error,
        )


@dataclass(slots=True, eq=False)
class GrowJob(Job):
    """Another slab."""

    made: SlabHead | None = None
    """None without an error: there is no room for one."""


@dataclass(slots=True, eq=False)
class SweepJob(Job):
    """Zeros over places, and a look at which slabs are still there."""

    places: list[Place] = field(kw_only=True)
    num_done: int = 0
    lost: list[int] = field(default_factory=list)
    """Slabs whose files somebody has deleted."""


@dataclass(slots=True, eq=False)
class ProbeJob(Job):
    """Some bytes written, read back and compared."""

    bytes_per_s: float | None = None
    """Of reading."""


class Disk:
    """All threads of one folder.

    Args:
        slabs: open.
        pool_fds: by name, memory of the pools that blocks are copied from and to.
        report: called with each job that is over, in the thread that has done it.
        write_share: of a core, for writing; 1 is no limit.
    """

    tier = "ssd"

    def __init__(
        self,
        slabs: Slabs,
        pool_fds: Mapping[str, int],
        report: Callable[[Job], None],
        *,
        write_share: float = WRITE_SHARE,
    ) -> None:
        self._slabs = slabs
        self._pool_fds = pool_fds
        self._report = report
        self.write_share = write_share
        """May change at any time: what is stored at the end is waited for."""
        self._reads: SimpleQueue[Job | None] = SimpleQueue()
        self._writes: SimpleQueue[Job | None] = SimpleQueue()
        queues = [self._reads] * NUM_READERS + [self._writes] * NUM_WRITERS
        self._beginning = Lock()
        self._threads = [
            Thread(target=self._run, args=(queue,), name="ssd", daemon=True) for queue in queues
        ]
        for thread in self._threads:
            thread.start()

    def begin(self, job: Job) -> None:
        """Have it done."""
        is_read = isinstance(job, ProbeJob) or (
            isinstance(job, CopyJob) and job.copy.from_pool == self.tier
        )
        (self._reads if is_read else self._writes).put(job)

    def cancel(self, job: Job) -> bool:
        """Make it void; True if no thread has begun with it, nor will."""
        with self._beginning:
            job.is_void = True
            return not job.is_begun

    def close(self, timeout_s: float) -> bool:
        """End the threads when they have done what they were given; False: one is stuck."""
        for _ in range(NUM_READERS):
            self._reads.put(None)
        for _ in range(NUM_WRITERS):
            self._writes.put(None)
        end_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(end_s - time.monotonic(), 0))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self, queue: SimpleQueue[Job | None]) -> None:
        _be_idle()
        buffer = RecordBuffer(self._slabs.block_bytes)
        while (job := queue.get()) is not None:
            with self._beginning:
                job.is_begun = True
            job.started_ns, began_s = time.monotonic_ns(), time.thread_time()
            try:
                self._do(job, buffer)
            except OSError as error:
                job.error = f"{error.strerror or type(error).__name__}"
            job.ended_ns = time.monotonic_ns()
            used_s = time.thread_time() - began_s
            self._report(job)
            is_urgent = isinstance(job, CopyJob) and job.is_urgent
            if queue is self._writes and self.write_share < 1 and not is_urgent:
                time.sleep(used_s * (NUM_WRITERS / self.write_share - 1))

    def _do(self, job: Job, buffer: RecordBuffer) -> None:
        match job:
            case _ if job.is_void:
                job.error = "not needed any more"
            case CopyJob(copy=copy) if copy.from_pool == self.tier:
                self._load(job, buffer)
            case CopyJob():
                self._store(job, buffer)
            case GrowJob():
                job.made = self._slabs.grow()
            case SweepJob(places=places):
                job.lost = self._slabs.forget_lost()
                for place in places:
                    if place.slab not in job.lost:
                        self._slabs.erase(place)
                    job.num_done += 1
            case ProbeJob():
                job.bytes_per_s = probe(self._slabs)

    def _store(self, job: CopyJob, buffer: RecordBuffer) -> None:
        fd, size = self._pool_fds[job.copy.from_pool], self._slabs.block_bytes
        for (block_id, _), entry in zip(job.copy.pairs, job.entries, strict=True):
            if os.preadv(fd, [buffer.block], block_id * size) != size:
                raise OSError(0, "the pool's memory is cut off")
            self._slabs.write(
                entry.place, entry.block_hash, entry.number, entry.stored_at_s, buffer
            )
            job.num_done += 1

    def _load(self, job: CopyJob, buffer: RecordBuffer) -> None:
        fd, size = self._pool_fds[job.copy.to_pool], self._slabs.block_bytes
        for (_, block_id), entry in zip(job.copy.pairs, job.entries, strict=True):
            if job.is_void:
                job.error = "not needed any more"
                return
            try:
                self._slabs.read(entry.place, entry.block_hash, buffer)
            except DamagedError as error:
                job.error, job.is_damaged = str(error), True
                return
            if os.pwritev(fd, [buffer.block], block_id * size) != size:
                raise OSError(0, "the pool's memory is cut off")
            job.num_done += 1


def probe(slabs: Slabs) -> float:
    """Write and read a file of its own in the folder; bytes per second of reading.

    Raises:
        OSError: it cannot be done, or what was read is not what was written.
    """
    slabs.remake_folder()
    path = slabs.folder / PROBE_NAME
    path.unlink(missing_ok=True)  # of a process that was killed
    size = slabs.probe_bytes
    memory = mmap.mmap(-1, size)
    pattern = bytes(range(256)) * (size // 256)
    memory[:] = pattern
    fd = slabs.open_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        if os.pwritev(fd, [memory], 0) != size:
            raise OSError(0, "a file could not be written to its end")
        memory[:] = bytes(size)
        started_ns = time.monotonic_ns()
        os.preadv(fd, [memory], 0)
        elapsed_ns = max(time.monotonic_ns() - started_ns, 1)
    finally:
        os.close(fd)
        with suppress(OSError):
            path.unlink()
    if memory[:] != pattern:
        raise OSError(0, "what was read is not what was written")
    return size / elapsed_ns * 1e9


def _be_idle() -> None:
    """This thread's I/O comes after everybody else's, where the disk's scheduler knows that."""
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        ctypes.CDLL(None, use_errno=True).syscall(number, _IOPRIO_WHO_PROCESS, 0, _IOPRIO_IDLE)
