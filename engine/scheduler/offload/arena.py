"""Keep KV blocks in host memory: the DRAM tier.

Only its worker reaches a GPU's memory, so the copies are commands to workers, as for a staging
buffer: on a stream of their own there, or between two steps if a pool is in host memory. They have
negative numbers, which distinguish their reports from reports about moving sequences.

Invariants: each job is reported once; unfinished work of a dead worker counts as not done, and is
reported after its commands were reaped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from engine.scheduler.cache.topology import DRAM
from engine.scheduler.offload.cache_memory import CacheMemory
from engine.scheduler.offload.copy_deadlines import Later
from engine.scheduler.offload.jobs import CopyJob, GrowJob, Job, SweepJob
from engine.wire.messages import Command, Copied, Copy

Pairs = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class _Part:
    """A worker's part of a job."""

    worker: str
    job: CopyJob
    done: Callable[[CopyJob], None]


class WorkerCopies:
    """Let workers copy blocks for the tiers of one router.

    Args:
        send: passes a command to a worker.
        later: calls back on the loop.
    """

    def __init__(self, send: Callable[[str, Command], None], later: Later) -> None:
        self.later = later
        self._send = send
        self._open: dict[int, _Part] = {}
        """Parts by the copy's number."""

    def begin(self, worker: str, job: CopyJob, done: Callable[[CopyJob], None]) -> None:
        """Register a worker's part in a job: should it die, the job is void.

        Args:
            job: filled in with what the worker reports.
            done: called with the job once, when the worker will not touch its blocks any more.
        """
        self._open[-job.copy.copy_id] = _Part(worker, job, done)

    def send(self, job: CopyJob, pairs: Pairs, window_pairs: list[Pairs] | None = None) -> None:
        """Make the worker copy these blocks; the job is void if the worker has died."""
        copy_id = -job.copy.copy_id
        if copy_id in self._open:
            pools = job.copy.from_pool, job.copy.to_pool
            copy = Copy(copy_id, *pools, pairs, None, window_pairs or [])
            self._send(self._open[copy_id].worker, copy)

    def end(self, job: CopyJob) -> None:
        """Drop the part of a worker that was told nothing."""
        self._open.pop(-job.copy.copy_id, None)

    def copied(self, report: Copied) -> None:
        job = self._open[report.copy_id].job
        took_ns = job.ended_ns - job.started_ns + report.ended_ns - report.started_ns
        job.ended_ns, job.started_ns = report.ended_ns, report.ended_ns - took_ns
        job.num_done += report.num_pairs
        if report.is_last:
            job.error = report.error
            self._open.pop(report.copy_id).done(job)

    def worker_died(self, worker: str) -> None:
        """End the parts of a dead worker, whose commands have been reaped."""
        for copy_id, part in list(self._open.items()):
            if part.worker == worker:
                del self._open[copy_id]
                self.lose(part.job, part.done, f"worker {worker} has died")

    def lose(self, job: CopyJob, done: Callable[[CopyJob], None], error: str) -> None:
        """Void a job; its waiters are called on the loop's next turn."""
        job.num_done, job.is_void, job.error = 0, True, error
        self.later(0, partial(done, job))


class CacheArena:
    """Store the DRAM cache's blocks in host memory, copied by one router's workers.

    Args:
        memory: that models share; the served one's blocks are stored.
        worker_of: the worker that copies for a pool; None: none now.
        report: called with each job that is over.
    """

    def __init__(
        self,
        memory: CacheMemory,
        worker_of: Callable[[str], str | None],
        copies: WorkerCopies,
        report: Callable[[Job], None],
    ) -> None:
        self.write_share = 1.0
        self.reach = worker_of
        self._memory = memory
        self._copies = copies
        self._report = report

    def begin(self, job: Job) -> None:
        """Start a job: workers copy, other jobs are done at once."""
        match job:
            case CopyJob():
                self._copy(job)
                return
            case GrowJob():
                job.made = self._memory.grow(job.unused_since_s)
            case SweepJob():  # the memory ends with the daemon
                job.num_done = len(job.places)
        self._copies.later(0, partial(self._report, job))

    def cancel(self, job: Job) -> bool:
        """Void the job; the worker was told already."""
        job.is_void = True
        return False

    def _copy(self, job: CopyJob) -> None:
        copy, slots = job.copy, [self._memory.block_of(entry.place) for entry in job.entries]
        is_load = copy.from_pool == DRAM
        pairs: Pairs = []
        window_pairs: list[Pairs] = []
        for (from_id, to_id), slot, windows in zip(
            copy.pairs, slots, job.windows or [[] for _ in slots], strict=True
        ):
            block_ids = [to_id if is_load else from_id, *windows]
            first = slot * len(block_ids)
            whole = [
                (place, block_id) if is_load else (block_id, place)
                for place, block_id in enumerate(block_ids, first)
            ]
            pairs.append(whole[0])
            window_pairs.append(whole[1:])
        worker = self.reach(copy.to_pool if is_load else copy.from_pool)
        if worker is None:
            self._copies.lose(job, self._report, "no worker is available to copy")
            return
        self._copies.begin(worker, job, self._report)
        self._copies.send(job, pairs, window_pairs if job.windows else None)
