"""What loads and stores have in common: the pools, the disk, the clocks, and who is told.

Owns: the numbers of copies between pools and the disk, and which of them have not been answered in
time although a thread has begun them.
Invariants: no two copies have one number; the blocks of those that are overdue, and no others, are
counted as stuck in their pool.
Never: decides anything.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from engine.blocks import BlockPool, Ledger
from engine.tiers.disk import CopyJob, Disk, Job
from engine.tiers.index import SlabIndex

TIER = Disk.tier

Later = Callable[[float, Callable[[], None]], object]
"""Calls back after so many seconds, on the loop."""

Tell = Callable[[str, str, str], None]
"""Takes severity, code and message of an event."""


class Jobs(Protocol):
    """Who does what is to be done with the disk, as Disk does."""

    write_share: float

    def begin(self, job: Job) -> None:
        """Have it done."""

    def cancel(self, job: Job) -> bool:
        """Make it void; True if no thread has begun with it, nor will."""


@dataclass(slots=True)
class Counts:
    """Since the start."""

    stored_blocks: int = 0
    loaded_blocks: int = 0
    loaded_tokens: int = 0
    missed_deadlines: int = 0
    failed_stores: int = 0
    lost_slabs: int = 0


@dataclass(frozen=True, slots=True)
class Context:
    """Of one tier."""

    ledger: Ledger
    pools: Collection[str]
    """Those whose memory the threads can reach."""
    index: SlabIndex
    disk: Jobs
    block_bytes: int
    now_ns: Callable[[], int]
    """The clock of stamps."""
    now_s: Callable[[], int]
    """Unix time."""
    later: Later
    tell: Tell
    counts: Counts = field(default_factory=Counts)
    numbers: count[int] = field(default_factory=lambda: count(1))
    overdue: set[CopyJob] = field(default_factory=set)

    def is_late(self, job: CopyJob) -> None:
        """A thread has begun it and does not end: nobody knows when its blocks will be free."""
        if job not in self.overdue:
            self.overdue.add(job)
            self._books(job).num_stuck += len(job.copy.pairs)

    def answered(self, job: CopyJob) -> None:
        """A thread will not touch its blocks any more."""
        if job in self.overdue:
            self.overdue.discard(job)
            self._books(job).num_stuck -= len(job.copy.pairs)

    def _books(self, job: CopyJob) -> BlockPool:
        """Of the pool that it copies from or to."""
        copy = job.copy
        return self.ledger.pools[copy.to_pool if copy.from_pool == TIER else copy.from_pool]
