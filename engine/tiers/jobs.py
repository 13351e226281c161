"""What there is to be done with a store of blocks, and what came of it.

A job is a Copy with the places of its blocks, or a slab to make, places to sweep, a probe.
Owns: nothing; records.
Invariant: a job is filled in by one who does it, and read by the loop when it has been reported.
Never: knows who does it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.tiers.index import IndexEntry, RecordPlace
from engine.tiers.records import SlabHead
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
    """Make another slab, if there is room for one."""

    made: SlabHead | None = None
    """None without an error: there is no room for one."""


@dataclass(slots=True, eq=False)
class SweepJob(Job):
    """Zeros over places, and a look at which slabs are still there."""

    places: list[RecordPlace] = field(kw_only=True)
    num_done: int = 0
    lost: list[int] = field(default_factory=list)
    """Slabs whose files somebody has deleted."""


@dataclass(slots=True, eq=False)
class ProbeJob(Job):
    """Some bytes written, read back and compared."""

    bytes_per_s: float | None = None
    """Of reading."""
