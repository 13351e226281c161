"""Define a block store's jobs (copy, grow, sweep, probe), and track which copies are overdue.

A job is a copy with the places of its blocks, a slab to make, places to sweep, or a probe.

Owns: the numbers of copies between pools and tiers, and which of them are overdue.
Invariant: a job is filled in by its executor, and read by the loop once reported.
Never: knows the executor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from engine.cache.blocks import BlockPool, Ledger
from engine.cache.topology import DRAM, SSD
from engine.offload.index import IndexEntry, RecordPlace, SlabIndex
from engine.offload.records import SlabHead
from engine.wire.messages import Copy


@dataclass(slots=True, eq=False)
class Job:
    """One task of a store; made on the loop, filled in by its executor."""

    is_void: bool = False
    """Set on the loop: the job is no longer needed, and skipped if it has not begun."""
    is_begun: bool = False
    """Whether a thread of the disk has taken it."""
    error: str | None = None
    """Why it failed or ended early."""
    started_ns: int = 0
    ended_ns: int = 0

    @property
    def elapsed_ms(self) -> float:
        """Return the job's time without waiting for its executor."""
        return (self.ended_ns - self.started_ns) / 1e6


@dataclass(slots=True, eq=False)
class CopyJob(Job):
    """Blocks to copy to or from a tier, each with its window blocks."""

    copy: Copy = field(kw_only=True)
    """One of its pools is the tier, where blocks are indexes into the list."""
    life: int = field(kw_only=True)
    """The pool's life when it began: copies of an earlier life are worthless."""
    entries: list[IndexEntry] = field(kw_only=True)
    windows: list[list[int]] = field(kw_only=True, default_factory=list)
    """The window blocks of each of the pool's blocks, stored with it; empty: it has none."""
    is_urgent: bool = False
    """Whether a sequence waits for this store: no pause follows it."""
    num_done: int = 0
    """Completed pairs, from the first on."""
    is_damaged: bool = False
    """Whether the next pair differed from what had been stored."""


@dataclass(slots=True, eq=False)
class GrowJob(Job):
    """Make another slab, if the cap allows it or another model's slab can go."""

    unused_since_s: int | None = None
    """Other models' slabs with newer blocks stay; None: any may go."""
    made: SlabHead | None = None
    """The new slab; None without an error: no space."""
    limit: str | None = None
    """The reason, if it is not the cap."""


@dataclass(slots=True, eq=False)
class SweepJob(Job):
    """Erase places, and check which slabs still exist."""

    places: list[RecordPlace] = field(kw_only=True)
    num_done: int = 0
    lost: list[int] = field(default_factory=list)
    """Slabs with deleted files."""
    limit: str | None = None
    """Why no slab could be made now although the cap allows one."""
    oldest_s: int | None = None
    """Other models' blocks stored earlier are erased; None: no limit."""


@dataclass(slots=True, eq=False)
class ProbeJob(Job):
    """Write some bytes, read them back and compare."""

    bytes_per_s: float | None = None
    """The rate of reading."""


# The common parts of a tier's loads and stores.
# Invariants: each copy has its own number; exactly the blocks of overdue copies count as stuck.
# Never: decides anything.


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
