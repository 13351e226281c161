"""What loads and stores of a tier have in common: pools, who copies, clocks, and who is told.

Owns: the numbers of copies between pools and tiers, and which of them have not been answered in
time although they were begun.
Invariants: no two copies have one number; the blocks of those that are overdue, and no others, are
counted as stuck in their pool.
Never: decides anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from engine.cache.blocks import BlockPool, Ledger
from engine.cache.places import SSD
from engine.tiers.index import SlabIndex
from engine.tiers.jobs import CopyJob, Job

Later = Callable[[float, Callable[[], None]], object]
"""Calls back after so many seconds, on the loop."""

Tell = Callable[[str, str, str], None]
"""Takes severity, code and message of an event."""


class Store(Protocol):
    """Where blocks are kept, and who copies: Disk by threads, Arena by the workers of the pools."""

    write_share: float

    def reach(self, pool: str) -> str | None:
        """Who would copy a pool's blocks, as the ledger names them; None: nobody can now."""

    def begin(self, job: Job) -> None:
        """Start a job; the store tells what came of it when it is done."""

    def cancel(self, job: Job) -> bool:
        """Make it void; True if nobody has begun with it, nor will."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long is waited for copies."""

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
    patience: Patience = Patience()
    counts: Counts = field(default_factory=Counts)
    numbers: count[int] = field(default_factory=lambda: count(1))
    """All tiers of a router have the same."""
    overdue: set[CopyJob] = field(default_factory=set)

    @property
    def label(self) -> str:
        """The tier in a sentence."""
        return "the SSD" if self.name == SSD else "DRAM"

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
        """Of the pool that it copies from or to."""
        copy = job.copy
        return self.ledger.pools[copy.to_pool if copy.from_pool == self.name else copy.from_pool]
