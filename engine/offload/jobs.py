"""Define the jobs of a block store and their results, for every kind of store.

A job is a Copy with the places of its blocks, or a slab to make, places to sweep, a probe.

Owns: the numbers of copies between pools and tiers, and which of them have not been answered in
time although they were begun.
Invariant: a job is filled in by one who does it, and read by the loop when it has been reported.
Never: knows who does it.
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
    """Something to be done with a store; made on the loop, filled in by who does it."""

    is_void: bool = False
    """Set on the loop: nobody needs it any more; if it has not begun, it is not done."""
    is_begun: bool = False
    """A thread of the disk has taken it."""
    error: str | None = None
    """Why it could not be done, or not to its end."""
    started_ns: int = 0
    ended_ns: int = 0

    @property
    def elapsed_ms(self) -> float:
        """Without the wait for who does it."""
        return (self.ended_ns - self.started_ns) / 1e6


@dataclass(slots=True, eq=False)
class CopyJob(Job):
    """Blocks to a tier, or from there."""

    copy: Copy = field(kw_only=True)
    """One of its pools is the tier: there the blocks are numbers of entries in the list."""
    life: int = field(kw_only=True)
    """The pool's, in which it was begun: what was copied in another is nothing."""
    entries: list[IndexEntry] = field(kw_only=True)
    is_urgent: bool = False
    """Somebody waits for a store: it comes without a rest after it."""
    num_done: int = 0
    """Pairs, from the first on."""
    is_damaged: bool = False
    """The pair after those was not what had been stored."""


@dataclass(slots=True, eq=False)
class GrowJob(Job):
    """Make another slab, if there is room for one, or if another model's can make room."""

    unused_since_s: int | None = None
    """Other models' slabs with newer blocks stay; None: none does."""
    made: SlabHead | None = None
    """None without an error: there is no room for one."""
    limit: str | None = None
    """Why, if it is not the cap that has none."""


@dataclass(slots=True, eq=False)
class SweepJob(Job):
    """Zeros over places, and a look at which slabs are still there."""

    places: list[RecordPlace] = field(kw_only=True)
    num_done: int = 0
    lost: list[int] = field(default_factory=list)
    """Slabs whose files somebody has deleted."""
    limit: str | None = None
    """Why no slab could be made now although the cap has room for one."""
    oldest_s: int | None = None
    """Other models' blocks that were stored before are erased; None: none is."""


@dataclass(slots=True, eq=False)
class ProbeJob(Job):
    """Some bytes written, read back and compared."""

    bytes_per_s: float | None = None
    """Of reading."""


# What loads and stores of a tier have in common: pools, who copies, clocks, and who is told.
# Invariants: no two copies have one number; the blocks of those that are overdue, and no others,
# are counted as stuck in their pool.
# Never: decides anything.


Later = Callable[[float, Callable[[], None]], object]
"""Calls back after so many seconds, on the loop."""

Tell = Callable[[str, str, str], None]
"""Takes severity, code and message of an event."""


class Store(Protocol):
    """Where blocks are kept, and who copies: Disk by threads, Arena by the workers of the pools."""

    write_share: float

    def reach(self, pool: str) -> str | None:
        """The worker or thread that would copy a pool's blocks; None: nobody can now."""

    def begin(self, job: Job) -> None:
        """Start a job; the store tells what came of it when it is done."""

    def cancel(self, job: Job) -> bool:
        """Make it void; True if nobody has begun with it, nor will."""


@dataclass(frozen=True, slots=True)
class CopyDeadlines:
    """How long copies are waited for before they count as missed."""

    load_ms: float = 200.0
    """A load is given up after four times what was predicted of it, but not before this."""
    store_s: float = 5.0
    """Without a block stored, after which the store is taken to hang."""
    counts_waiting: bool = True
    """A load takes what the prompt has waited for it; False: what copying took alone, for it was
    behind steps of the worker that were to be made anyway."""


@dataclass(slots=True)
class Counts:
    """What one tier has done since the daemon's start."""

    stored_blocks: int = 0
    loaded_blocks: int = 0
    loaded_tokens: int = 0
    missed_deadlines: int = 0
    failed_stores: int = 0
    lost_slabs: int = 0


_LABELS = {SSD: "the SSD", DRAM: "DRAM"}
"""Of each tier."""


@dataclass(frozen=True, slots=True)
class Context:
    """What loads and stores of one tier share: its store, index and clocks."""

    ledger: Ledger
    name: str
    """SSD or DRAM."""
    index: SlabIndex
    store: Store
    block_bytes: int
    now_ns: Callable[[], int]
    """The clock of stamps."""
    now_s: Callable[[], int]
    """Unix time."""
    later: Later
    tell: Tell
    patience: CopyDeadlines = CopyDeadlines()
    counts: Counts = field(default_factory=Counts)
    numbers: count[int] = field(default_factory=lambda: count(1))
    """All tiers of a router have the same."""
    overdue: set[CopyJob] = field(default_factory=set)

    @property
    def label(self) -> str:
        """The tier in a sentence."""
        return _LABELS[self.name]

    def is_late(self, job: CopyJob) -> None:
        """It was begun and does not end: nobody knows when its blocks will be free."""
        if job not in self.overdue:
            self.overdue.add(job)
            self.books_of(job).num_stuck += len(job.copy.pairs)

    def answered(self, job: CopyJob) -> None:
        """Nobody will touch its blocks any more."""
        if job in self.overdue:
            self.overdue.discard(job)
            self.books_of(job).num_stuck -= len(job.copy.pairs)

    def books_of(self, job: CopyJob) -> BlockPool:
        """The ledger's record of the pool that it copies from or to."""
        copy = job.copy
        return self.ledger.pools[copy.to_pool if copy.from_pool == self.name else copy.from_pool]
