"""Define a block store's jobs: copy, grow, sweep, probe.

A job is a copy with the places of its blocks, a slab to make, places to sweep, or a probe.

Invariant: a job is filled in by its executor, and read by the loop once reported.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.scheduler.offload.index import IndexEntry, RecordPlace
from engine.scheduler.offload.records import SlabHead
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
