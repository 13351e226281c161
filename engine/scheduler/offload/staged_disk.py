"""Copy GPU blocks to disk and back in two halves, through slots in host memory.

Only its worker reaches a GPU's memory. The worker copies a block to a slot in host memory, and a
thread of the disk writes it from there; loads go the other way. A block of the pool is named by its
command until both halves are done.

Invariant: a slot belongs to one job until its last touch; loads and stores have slots of their own,
so that neither waits for the other; each job is reported once; only blocks with right checksums are
copied to a pool, and only by the worker that was ready when the job began.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.scheduler.cache.topology import DRAM, SSD
from engine.scheduler.offload.arena import WorkerCopies
from engine.scheduler.offload.disk import Disk
from engine.scheduler.offload.jobs import CopyJob, Job
from engine.wire.messages import Copy

STAGING_BYTES = 64 << 20
"""Host memory for slots; half of it for loads, half for stores."""
MIN_SLOTS = 4


def num_slots_for(block_bytes: int) -> int:
    """Count the slots of a staging area."""
    return max(STAGING_BYTES // block_bytes, MIN_SLOTS)


@dataclass(slots=True, eq=False)
class _Staged:
    """A job and its halves."""

    job: CopyJob
    is_load: bool
    by_worker: CopyJob
    by_disk: CopyJob
    slots: list[int] = field(default_factory=list)
    is_at_disk: bool = False


class StagedDisk:
    """Connect a disk's threads with pools that only workers reach, through slots.

    Args:
        disk: reaches the slots as a pool named DRAM; its jobs' reports come to told().
        worker_of: the worker that copies for a pool; None: none now.
        report: called with each job that is over.
    """

    def __init__(
        self,
        disk: Disk,
        slots: Sequence[int],
        worker_of: Callable[[str], str | None],
        copies: WorkerCopies,
        report: Callable[[Job], None],
    ) -> None:
        half = len(slots) // 2
        self._disk = disk
        self._worker_of = worker_of
        self._copies = copies
        self._report = report
        self._free = {True: list(slots[:half]), False: list(slots[half:])}
        """Free slots, by whether they are for loads."""
        self._waiting: dict[bool, deque[_Staged]] = {True: deque(), False: deque()}
        """Jobs waiting for slots, by whether they are loads."""
        self._staged: dict[Job, _Staged] = {}
        """Staged jobs, by the job and by its half at the disk."""

    @property
    def write_share(self) -> float:
        return self._disk.write_share

    @write_share.setter
    def write_share(self, share: float) -> None:
        self._disk.write_share = share

    def reach(self, pool: str) -> str | None:
        return self._disk.reach(pool) or self._worker_of(pool)

    def begin(self, job: Job) -> None:
        """Start a job, or let it wait for slots."""
        if not isinstance(job, CopyJob):
            self._disk.begin(job)
            return
        is_load = job.copy.from_pool == SSD
        pool = job.copy.to_pool if is_load else job.copy.from_pool
        if self._disk.reach(pool) is not None:
            self._disk.begin(job)
            return
        worker = self._worker_of(pool)
        if worker is None:
            self._copies.lose(job, self._report, "no worker is available to copy")
            return
        ways = [(DRAM, pool), (SSD, DRAM)] if is_load else [(pool, DRAM), (DRAM, SSD)]
        by_worker, by_disk = (
            CopyJob(
                copy=Copy(job.copy.copy_id, from_pool, to_pool, [], None),
                life=job.life,
                entries=job.entries,
                is_urgent=job.is_urgent,
            )
            for from_pool, to_pool in ways
        )
        staged = self._staged[job] = _Staged(job, is_load, by_worker, by_disk)
        self._staged[staged.by_disk] = staged
        self._copies.begin(worker, staged.by_worker, lambda _: self._worker_done(staged))
        self._waiting[is_load].append(staged)
        self._pump(is_load=is_load)

    def cancel(self, job: Job) -> bool:
        """Void the job; True if its blocks are untouched for good."""
        staged = self._staged.get(job)
        if staged is None:
            return self._disk.cancel(job)
        job.is_void = True
        if not staged.slots:
            self._copies.end(staged.by_worker)
            self._waiting[staged.is_load].remove(staged)
        elif not staged.is_at_disk or not self._disk.cancel(staged.by_disk):
            return False
        else:
            self._copies.end(staged.by_worker)
        self._let_go(staged)
        return True

    def told(self, job: Job) -> None:
        """Take in the disk's report of a job, or of its half of one."""
        staged = self._staged.get(job)
        if staged is not None and staged.by_disk is job:
            staged.is_at_disk = False
            self._disk_done(staged)
        elif not isinstance(job, CopyJob) or DRAM not in (job.copy.from_pool, job.copy.to_pool):
            self._report(job)  # else it was cancelled before a thread came to it

    def _pump(self, *, is_load: bool) -> None:
        waiting, free = self._waiting[is_load], self._free[is_load]
        while waiting and len(waiting[0].job.copy.pairs) <= len(free):
            staged = waiting.popleft()
            count = len(staged.job.copy.pairs)
            staged.slots, free[:] = free[:count], free[count:]
            if is_load:
                self._to_disk(staged, count)
            else:
                pairs = [(block, s) for (block, _), s in self._pairs(staged)]
                self._copies.send(staged.by_worker, pairs)

    def _pairs(self, staged: _Staged) -> list[tuple[tuple[int, int], int]]:
        return list(zip(staged.job.copy.pairs, staged.slots, strict=True))

    def _to_disk(self, staged: _Staged, count: int) -> None:
        slots, half = staged.slots[:count], staged.by_disk
        half.entries = staged.job.entries[:count]
        half.copy.pairs.extend(
            (n, slot) if staged.is_load else (slot, n) for n, slot in enumerate(slots)
        )
        staged.is_at_disk = True
        self._disk.begin(half)

    def _worker_done(self, staged: _Staged) -> None:
        half, job = staged.by_worker, staged.job
        if job not in self._staged:  # it was cancelled meanwhile
            return
        if half.is_void:
            job.is_void = staged.by_disk.is_void = True
            job.error = half.error
            if staged.is_at_disk:  # a thread may be at the slots
                return
            if not staged.slots:
                self._waiting[staged.is_load].remove(staged)
        elif not staged.is_load and half.num_done and not job.is_void:
            self._to_disk(staged, half.num_done)
            return
        self._end(staged)

    def _disk_done(self, staged: _Staged) -> None:
        half, job = staged.by_disk, staged.job
        if staged.is_load and half.num_done and not job.is_void:
            pairs = [(slot, block) for (_, block), slot in self._pairs(staged)]
            self._copies.send(staged.by_worker, pairs[: half.num_done])
            return
        self._copies.end(staged.by_worker)
        self._end(staged)

    def _end(self, staged: _Staged) -> None:
        first, last = staged.by_worker, staged.by_disk
        job = staged.job
        if staged.is_load:
            first, last = last, first
        took_ns = sum(half.ended_ns - half.started_ns for half in (first, last))
        job.ended_ns = last.ended_ns or first.ended_ns
        job.started_ns = job.ended_ns - took_ns
        job.num_done = last.num_done
        job.error = job.error or last.error or first.error
        # the damaged block follows the completed ones
        job.is_damaged = first.is_damaged and last.num_done == first.num_done
        self._let_go(staged)
        self._report(job)

    def _let_go(self, staged: _Staged) -> None:
        del self._staged[staged.job], self._staged[staged.by_disk]
        self._free[staged.is_load] += staged.slots
        self._pump(is_load=staged.is_load)
