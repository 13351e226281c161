"""An arena of the daemon in host memory: the workers copy blocks between it and their pools.

What a GPU has only its worker reaches, so the copies are commands to workers, as those of a ring
are: by a stream of their own there, between two steps where a pool is in the host's memory. They
have negative numbers, by which their reports are told from those of moving sequences.
Owns: copies that workers have not answered.
Invariants: each job is reported once; what a worker that has died was at counts as not done, and is
reported after its commands were reaped.
Never: chooses a block or a place; touches the memory itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from engine.cache.places import DRAM
from engine.tiers.files import SlabHead
from engine.tiers.jobs import CopyJob, GrowJob, Job, Later, SweepJob
from engine.wire.messages import Command, Copied, Copy


class CacheArena:
    """Of one router.

    Args:
        head: of all its blocks, as if they were a slab; the pool has a block of padding before.
        worker_of: who copies for a pool; None: nobody now.
        send: passes a command to a worker.
        later: calls back on the loop.
        report: called with each job that is over.
    """

    def __init__(
        self,
        head: SlabHead,
        worker_of: Callable[[str], str | None],
        send: Callable[[str, Command], None],
        later: Later,
        report: Callable[[Job], None],
    ) -> None:
        self.write_share = 1.0
        self.reach = worker_of
        self._head: SlabHead | None = head
        self._send = send
        self._later = later
        self._report = report
        self._open: dict[int, tuple[str, CopyJob]] = {}
        """By the copy's number, who makes it."""

    def begin(self, job: Job) -> None:
        """Start a job: copies are made by the workers, all else is done at once."""
        match job:
            case CopyJob():
                self._copy(job)
                return
            case GrowJob():
                job.made, self._head = self._head, None
            case SweepJob():  # it is nobody's but the daemon's, and ends with it
                job.num_done = len(job.places)
        self._later(0, partial(self._report, job))

    def cancel(self, job: Job) -> bool:
        """Make it void; the worker was told already."""
        job.is_void = True
        return False

    def _copy(self, job: CopyJob) -> None:
        copy, slots = job.copy, [entry.place.record + 1 for entry in job.entries]
        is_load = copy.from_pool == DRAM
        both = zip(copy.pairs, slots, strict=True)
        pairs = [(slot, to_id) if is_load else (from_id, slot) for (from_id, to_id), slot in both]
        worker = self.reach(copy.to_pool if is_load else copy.from_pool)
        if worker is None:
            self._lose(job, "no worker is there to copy")
            return
        self._open[-copy.copy_id] = (worker, job)
        self._send(worker, Copy(-copy.copy_id, copy.from_pool, copy.to_pool, pairs, None))

    def copied(self, report: Copied) -> None:
        """A worker has copied some more, or will not."""
        _, job = self._open[report.copy_id]
        took_ns = job.ended_ns - job.started_ns + report.ended_ns - report.started_ns
        job.ended_ns, job.started_ns = report.ended_ns, report.ended_ns - took_ns
        job.num_done += report.num_pairs
        if report.is_last:
            del self._open[report.copy_id]
            job.error = report.error
            self._report(job)

    def worker_died(self, worker: str) -> None:
        """Its commands have been reaped."""
        for copy_id, (name, job) in list(self._open.items()):
            if name == worker:
                del self._open[copy_id]
                self._lose(job, f"worker {worker} has died")

    def _lose(self, job: CopyJob, error: str) -> None:
        job.num_done, job.is_void, job.error = 0, True, error
        self._later(0, partial(self._report, job))
