"""Track which of a tier's copies are overdue, and what its loads and stores have in common.

Invariant: each copy has its own number; exactly the blocks of overdue copies count as stuck.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from engine.scheduler.cache.block_pool import BlockPool
from engine.scheduler.cache.ledger import Ledger
from engine.scheduler.cache.topology import DRAM, SSD
from engine.scheduler.offload.index import SlabIndex
from engine.scheduler.offload.jobs import CopyJob, Job

Later = Callable[[float, Callable[[], None]], object]
"""Calls back after this many seconds, on the loop."""

Tell = Callable[[str, str, str], None]
"""Takes severity, code and message of an event."""


class Store(Protocol):
    """A store of blocks: the disk copies with threads, the arena with the pools' workers."""

    write_share: float

    def reach(self, pool: str) -> str | None:
        """Return the worker or thread that would copy a pool's blocks; None: none can now."""

    def begin(self, job: Job) -> None:
        """Start a job; the store reports it when done."""

    def cancel(self, job: Job) -> bool:
        """Void the job; True if it was not begun."""


@dataclass(frozen=True, slots=True)
class CopyDeadlines:
    """Maximum waits for copies."""

    load_ms: float = 200.0
    """Minimum deadline of a load, besides four times its prediction."""
    store_s: float = 5.0
    """Maximum seconds without a stored block before the store counts as hung."""
    counts_waiting: bool = True
    """Whether a load's time includes the prompt's wait.

    False: only the copying counts, since the worker's steps before it would have run anyway."""


@dataclass(slots=True)
class Counts:
    """Counts of one tier since the daemon's start."""

    stored_blocks: int = 0
    loaded_blocks: int = 0
    loaded_tokens: int = 0
    missed_deadlines: int = 0
    failed_stores: int = 0
    lost_slabs: int = 0


_LABELS = {SSD: "the SSD", DRAM: "DRAM"}
"""Names of the tiers in sentences."""


@dataclass(frozen=True, slots=True)
class Context:
    """The common parts of one tier's loads and stores: its store, index and clocks."""

    ledger: Ledger
    name: str
    """SSD or DRAM."""
    index: SlabIndex
    store: Store
    block_bytes: int
    now_ns: Callable[[], int]
    """Returns the clock of stamps."""
    now_s: Callable[[], int]
    """Returns Unix time."""
    later: Later
    tell: Tell
    patience: CopyDeadlines = CopyDeadlines()
    counts: Counts = field(default_factory=Counts)
    numbers: count[int] = field(default_factory=lambda: count(1))
    """Numbers of copies, common to all tiers of a router."""
    overdue: set[CopyJob] = field(default_factory=set)

    @property
    def label(self) -> str:
        """The tier's name in a sentence."""
        return _LABELS[self.name]

    def is_late(self, job: CopyJob) -> None:
        """Mark the blocks of an overdue job as stuck."""
        if job not in self.overdue:
            self.overdue.add(job)
            self.books_of(job).num_stuck += self._num_named(job)

    def answered(self, job: CopyJob) -> None:
        """Mark the blocks of an overdue job as no longer stuck."""
        if job in self.overdue:
            self.overdue.discard(job)
            self.books_of(job).num_stuck -= self._num_named(job)

    def _num_named(self, job: CopyJob) -> int:
        return len(job.copy.pairs) + sum(map(len, job.windows))

    def books_of(self, job: CopyJob) -> BlockPool:
        """Return the pool that the job copies from or to."""
        copy = job.copy
        return self.ledger.pools[copy.to_pool if copy.from_pool == self.name else copy.from_pool]
