"""Read and write KV blocks on disk, in slab files, with threads.

Bytes go from the pool's memory to a thread's buffer and from there to the disk, or back: a block
reaches a pool only if its checksums are right. Two threads write, two read, so that the disk works
while a checksum is computed; a write delays a read by at most its own length. The threads have the
idle I/O priority but the usual CPU priority: a thread waiting for a core while holding Python's
lock would block the daemon's loop. Writing is limited to a share of a core instead.

Reports come back by a callback, from the thread.

Invariant: each job is reported once, after its last touch of pool and slab; a job's pairs are done
in order, and the first failure ends it.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from queue import SimpleQueue
from threading import Lock, Thread

from engine.errors import PenstockError
from engine.scheduler.offload.jobs import CopyJob, GrowJob, Job, ProbeJob, SweepJob
from engine.scheduler.offload.slab_files import DamagedError, RecordBuffer, Slabs
from engine.system.threads import start

NUM_READERS = NUM_WRITERS = 2
WRITE_SHARE = 0.25
"""Maximum share of a core for writing while requests are served."""
PROBE_NAME = ".penstock-probe"
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IOPRIO_WHO_PROCESS, _IOPRIO_IDLE = 1, 3 << 13


class Disk:
    """Store blocks in one folder of slab files, with threads that read and write.

    Args:
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
        """May change at any time; the final stores run without a limit."""
        self._reads: SimpleQueue[Job | None] = SimpleQueue()
        self._writes: SimpleQueue[Job | None] = SimpleQueue()
        queues = [self._reads] * NUM_READERS + [self._writes] * NUM_WRITERS
        self._beginning = Lock()
        self._threads: list[Thread] = []
        try:
            for queue in queues:
                thread = Thread(target=self._run, args=(queue,), name="ssd", daemon=True)
                start(thread)
                self._threads.append(thread)
        except PenstockError:
            self.close(timeout_s=1.0)
            raise

    def reach(self, pool: str) -> str | None:
        """Return no worker: the disk's threads reach host memory."""
        return self.tier if pool in self._pool_fds else None

    def begin(self, job: Job) -> None:
        """Give the job to a thread; reads and writes have threads of their own."""
        is_read = isinstance(job, ProbeJob) or (
            isinstance(job, CopyJob) and job.copy.from_pool == self.tier
        )
        (self._reads if is_read else self._writes).put(job)

    def cancel(self, job: Job) -> bool:
        """Void the job; True if no thread has begun it."""
        with self._beginning:
            job.is_void = True
            return not job.is_begun

    def close(self, timeout_s: float) -> bool:
        """End the threads after their jobs; False: one is stuck."""
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
            used_s = self.run_job(job, buffer)
            is_urgent = isinstance(job, CopyJob) and job.is_urgent
            if queue is self._writes and self.write_share < 1 and not is_urgent:
                time.sleep(used_s * (NUM_WRITERS / self.write_share - 1))

    def run_job(self, job: Job, buffer: RecordBuffer) -> float:
        """Do a job and report it, in a thread; return the CPU seconds that it took."""
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
        return used_s

    def _do(self, job: Job, buffer: RecordBuffer) -> None:
        match job:
            case _ if job.is_void:
                job.error = "no longer needed"
            case CopyJob(copy=copy) if copy.from_pool == self.tier:
                self._load(job, buffer)
            case CopyJob():
                self._store(job, buffer)
            case GrowJob():
                job.made = self._slabs.grow(job.unused_since_s)
                job.limit = None if job.made is not None else self._slabs.limit()
            case SweepJob(places=places):
                job.lost = self._slabs.forget_lost()
                for place in places:
                    if place.slab not in job.lost:
                        self._slabs.erase(place)
                    job.num_done += 1
                if job.oldest_s is not None:
                    self._slabs.expire_others(job.oldest_s)
                job.limit = self._slabs.limit()
            case ProbeJob():
                job.bytes_per_s = probe(self._slabs)

    def _store(self, job: CopyJob, buffer: RecordBuffer) -> None:
        fd = self._pool_fds[job.copy.from_pool]
        for index, entry in enumerate(job.entries):
            for block_id, part in _parts(job, index, job.copy.pairs[index][0], buffer):
                if os.preadv(fd, [part], block_id * len(part)) != len(part):
                    raise OSError(0, "the pool's memory is truncated")
            self._slabs.write(
                entry.place,
                entry.block_hash,
                entry.number,
                entry.stored_at_s,
                buffer,
                entry.saved,
            )
            job.num_done += 1

    def _load(self, job: CopyJob, buffer: RecordBuffer) -> None:
        fd = self._pool_fds[job.copy.to_pool]
        for index, entry in enumerate(job.entries):
            if job.is_void:
                job.error = "no longer needed"
                return
            try:
                self._slabs.read(entry.place, entry.block_hash, buffer)
            except DamagedError as error:
                job.error, job.is_damaged = str(error), True
                return
            for block_id, part in _parts(job, index, job.copy.pairs[index][1], buffer):
                if os.pwritev(fd, [part], block_id * len(part)) != len(part):
                    raise OSError(0, "the pool's memory is truncated")
            job.num_done += 1


def _parts(
    job: CopyJob, index: int, block_id: int, buffer: RecordBuffer
) -> Iterator[tuple[int, memoryview]]:
    """Divide a record between a block and its window blocks, which are as large."""
    block_ids = [block_id, *(job.windows[index] if job.windows else ())]
    size = len(buffer.block) // len(block_ids)
    for place, each in enumerate(block_ids):
        yield each, buffer.block[place * size : (place + 1) * size]


def probe(slabs: Slabs) -> float:
    """Write and read a probe file in the folder; return the bytes per second of reading.

    Without space for that file, a slab is read, if one exists.

    Raises:
        OSError: it failed, or data read differs from data written.
    """
    slabs.remake_folder()
    try:
        return _probe_file(slabs)
    except OSError as error:
        slab = slabs.any_slab()
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or slab is None:
            raise
        memory = mmap.mmap(-1, slabs.probe_bytes)
        return _read_timed(slab, memory)


def _probe_file(slabs: Slabs) -> float:
    path = slabs.folder / PROBE_NAME
    path.unlink(missing_ok=True)  # of a process that was killed
    size = slabs.probe_bytes
    memory = mmap.mmap(-1, size)
    pattern = bytes(range(256)) * (size // 256)
    memory[:] = pattern
    fd = slabs.open_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        if os.pwritev(fd, [memory], 0) != size:
            raise OSError(errno.ENOSPC, "a file was written incompletely")
        memory[:] = bytes(size)
        bytes_per_s = _read_timed(fd, memory)
    finally:
        os.close(fd)
        with suppress(OSError):
            path.unlink()
    if memory[:] != pattern:
        raise OSError(0, "data read differs from data written")
    return bytes_per_s


def _read_timed(fd: int, memory: mmap.mmap) -> float:
    """Read a file's beginning; return the bytes per second."""
    started_ns = time.monotonic_ns()
    num_bytes = os.preadv(fd, [memory], 0)
    return num_bytes / max(time.monotonic_ns() - started_ns, 1) * 1e9


def _be_idle() -> None:
    """Give this thread the idle I/O priority, where the disk's scheduler supports it."""
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        ctypes.CDLL(None, use_errno=True).syscall(number, _IOPRIO_WHO_PROCESS, 0, _IOPRIO_IDLE)
