"""The router's books: where every unfinished sequence is, and what has been done, as numbers.

A sequence is in one container, which follows from `Sequence.where`: in the queue (`Waiting`),
paused (`Paused`), resuming (`Waiting` for a leg's worker), running (`On`) or moving (`Moving`).

Owns: the numbers; all of them but the queue, which has an order of its own.
Invariant: a sequence is said to be where its container is; those in the queue and those paused hold
no blocks, the others do; those that run, and no others, have an open admit.
Never: reserves or frees a block, sends a message.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields

from engine.cache.blocks import Ledger
from engine.errors import InvariantViolated
from engine.schedule.sequence import Moving, On, Paused, Sequence, Waiting, Where

# What the router has done since the daemon started, as numbers.
# Invariant: none of them ever falls.
# Never: decides anything.


@dataclass(slots=True)
class Counters:
    """Since the daemon started; read by telemetry."""

    handoffs: int = 0
    handoff_bytes: int = 0
    failed_handoffs: int = 0
    """Whose blocks could not be copied, or were lost on the way, and were computed again."""
    prefix_cache_queries: int = 0
    """Prompt tokens of sequences that could use what others have computed; of these..."""
    prefix_cache_hits: int = 0
    """...those that were not computed."""
    prefix_cache_fetches: int = 0
    """Tokens whose blocks were copied to where a prompt was about to compute them again."""
    prefix_cache_ns: int = 0
    """Time spent in hashing, finding and publishing blocks."""
    stale_messages: int = 0
    recovered_sequences: int = 0
    preemptions: int = 0
    """Times that a sequence's blocks were taken away for others."""

    def go_on_from(self, earlier: Counters) -> None:
        """Count on where another router's numbers have ended: a daemon's never fall."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(earlier, each.name))


# --------------------------------------------------------------------------------------------------


def age(sequence: Sequence) -> tuple[int, int]:
    """Sort key: the oldest first."""
    return sequence.stamps.arrived_ns, sequence.seq_id


class SequenceTable:
    """Every sequence that is neither in the queue nor ended, by the container it is in."""

    def __init__(self) -> None:
        self.paused: dict[int, Sequence] = {}
        """Preempted, without blocks; placed before the queue, the oldest first. All by seq_id."""
        self.resuming: dict[int, Sequence] = {}
        """Waiting and holding blocks, after a worker's death or where it gave way; placed first."""
        self.running: dict[int, Sequence] = {}
        """On a worker."""
        self.moving: dict[int, Sequence] = {}
        """Between two workers."""

    def put(self, sequence: Sequence, where: Where) -> None:
        """It is there from now on. The queue is left, and the end is reached, by the caller."""
        if (before := self._container(sequence.where)) is not None:
            before.pop(sequence.seq_id, None)
        if isinstance(where, On):
            has_moved = isinstance(sequence.where, Moving)
            sequence.runs_at(where.leg.worker, sequence.transport if has_moved else None)
        sequence.where = where
        if (after := self._container(where)) is not None:
            after[sequence.seq_id] = sequence

    def _container(self, where: Where) -> dict[int, Sequence] | None:
        match where:
            case Paused():
                return self.paused
            case Waiting(leg) if leg is not None:
                return self.resuming
            case On():
                return self.running
            case Moving():
                return self.moving
        return None

    def held(self) -> list[Sequence]:
        """On workers, or between two."""
        return [*self.running.values(), *self.moving.values()]

    def holders(self) -> list[Sequence]:
        """Every sequence that holds KV blocks."""
        return [*self.held(), *self.resuming.values()]

    def check_invariants(
        self, ledger: Ledger, queue: Iterable[Sequence], others: Collection[int] = ()
    ) -> None:
        """Raise InvariantViolated unless sequences are where their container and the ledger say.

        Args:
            ledger: of all pools.
            queue: what has never held a block.
            others: owners of blocks that are no sequences.
        """
        owners, seen = ledger.owners() - set(others), set()
        for container, kind, has_blocks, is_admitted in (
            (queue, Waiting, False, False),
            (self.paused.values(), Paused, False, False),
            (self.resuming.values(), Waiting, True, False),
            (self.running.values(), On, True, True),
            (self.moving.values(), Moving, True, False),
        ):
            for sequence in container:
                key = ("admit", sequence.seq_id, sequence.generation)
                found = (type(sequence.where), sequence.seq_id in owners, ledger.is_open(key))
                if found != (kind, has_blocks, is_admitted) or sequence.seq_id in seen:
                    raise InvariantViolated(
                        f"sequence {sequence.seq_id} is {sequence.where}; blocks {found[1]}, "
                        f"admitted {found[2]}",
                        where=f"those that are {kind.__name__}",
                    )
                seen.add(sequence.seq_id)
        if owners - seen:
            raise InvariantViolated(f"{owners - seen} hold blocks and are nowhere", where="router")
