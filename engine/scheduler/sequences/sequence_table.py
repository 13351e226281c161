"""List all unfinished sequences by where they stand."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from engine.errors import InvariantViolated
from engine.scheduler.cache.ledger import Ledger
from engine.scheduler.sequences.sequence import Moving, On, Paused, Sequence, Waiting, Where


def age(sequence: Sequence) -> tuple[int, int]:
    """Sort key: the oldest first."""
    return sequence.stamps.arrived_ns, sequence.seq_id


class SequenceTable:
    """Every sequence that is neither in the queue nor ended, by the container it is in."""

    def __init__(self) -> None:
        self.paused: dict[int, Sequence] = {}
        """Preempted, without blocks; placed in the order of the queue. All by seq_id."""
        self.resuming: dict[int, Sequence] = {}
        """Waiting and holding blocks, after a worker's death or where it yielded; placed first."""
        self.running: dict[int, Sequence] = {}
        """On a worker."""
        self.moving: dict[int, Sequence] = {}
        """Between two workers."""

    def put(self, sequence: Sequence, where: Where) -> None:
        """Move a sequence to another container; the caller handles the queue and the end."""
        if (before := self._container(sequence.where)) is not None:
            before.pop(sequence.seq_id, None)
        if isinstance(where, On):
            has_moved = isinstance(sequence.where, Moving)
            sequence.runs_at(where.stage.worker, sequence.transport if has_moved else None)
        sequence.where = where
        if (after := self._container(where)) is not None:
            after[sequence.seq_id] = sequence

    def _container(self, where: Where) -> dict[int, Sequence] | None:
        match where:
            case Paused():
                return self.paused
            case Waiting(stage) if stage is not None:
                return self.resuming
            case On():
                return self.running
            case Moving():
                return self.moving
        return None

    def held(self) -> list[Sequence]:
        """List sequences on workers, or between two."""
        return [*self.running.values(), *self.moving.values()]

    def holders(self) -> list[Sequence]:
        """List every sequence that holds KV blocks."""
        return [*self.held(), *self.resuming.values()]

    def check_invariants(
        self, ledger: Ledger, queue: Iterable[Sequence], others: Collection[int] = ()
    ) -> None:
        """Raise InvariantViolated unless sequences are where their container and the ledger say.

        Args:
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
