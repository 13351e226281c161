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
from dataclasses import dataclass
from functools import partial

from engine.cache.places import DRAM
from engine.tiers.files import SlabHead
from engine.tiers.jobs import CopyJob, GrowJob, Job, Later, SweepJob
from engine.wire.messages import Command, Copied, Copy

Pairs = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class _Part:
    """What a worker is to do."""

    worker: str
    job: CopyJob
    done: Callable[[CopyJob], None]


class WorkerCopies:
    """Copies that workers make for the tiers of one router.

    Args:
        send: passes a command to a worker.
        later: calls back on the loop.
    """

    def __init__(self, send: Callable[[str, Command], None], later: Later) -> None:
        self.later = later
        self._send = send
        self._open: dict[int, _Part] = {}
        """By the number that the worker is told."""

    def begin(self, worker: str, job: CopyJob, done: Callable[[CopyJob], None]) -> None:
        """A worker has a part in a job from now on: should it die, the job is void.

        Args:
            worker: that is ready.
            job: filled in with what the worker reports.
            done: called with the job once, when the worker will not touch its blocks any more.
        """
        self._open[-job.copy.copy_id] = _Part(worker, job, done)

    def send(self, job: CopyJob, pairs: Pairs) -> None:
        """Have the worker copy these blocks; it is void already if that one has died."""
        copy_id = -job.copy.copy_id
        if copy_id in self._open:
            copy = Copy(copy_id, job.copy.from_pool, job.copy.to_pool, pairs, None)
            self._send(self._open[copy_id].worker, copy)

    def end(self, job: CopyJob) -> None:
        """The worker is not needed, and was told nothing."""
        self._open.pop(-job.copy.copy_id, None)

    def copied(self, report: Copied) -> None:
        """A worker has copied some more, or will not."""
        job = self._open[report.copy_id].job
        took_ns = job.ended_ns - job.started_ns + report.ended_ns - report.started_ns
        job.ended_ns, job.started_ns = report.ended_ns, report.ended_ns - took_ns
        job.num_done += report.num_pairs
        if report.is_last:
            job.error = report.error
            self._open.pop(report.copy_id).done(job)

    def worker_died(self, worker: str) -> None:
        """Its commands have been reaped."""
        for copy_id, part in list(self._open.items()):
            if part.worker == worker:
                del self._open[copy_id]
                self.lose(part.job, part.done, f"worker {worker} has died")

    def lose(self, job: CopyJob, done: Callable[[CopyJob], None], error: str) -> None:
        """Nothing of it counts as done; whoever waits for it is told on the loop's next turn."""
        job.num_done, job.is_void, job.error = 0, True, error
        self.later(0, partial(done, job))


class CacheArena:
    """The store of the DRAM cache: host memory that one router's workers copy to and from.

    Args:
        head: of all its blocks, as if they were a slab; the pool has a block of padding before.
        worker_of: who copies for a pool; None: nobody now.
        copies: those of the router's workers.
        report: called with each job that is over.
    """

    def __init__(
        self,
        head: SlabHead,
        worker_of: Callable[[str], str | None],
        copies: WorkerCopies,
        report: Callable[[Job], None],
    ) -> None:
        self.write_share = 1.0
        self.reach = worker_of
        self._head: SlabHead | None = head
        self._copies = copies
        self._report = report

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
        self._copies.later(0, partial(self._report, job))

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
            self._copies.lose(job, self._report, "no worker is there to copy")
            return
        self._copies.begin(worker, job, self._report)
        self._copies.send(job, pairs)
