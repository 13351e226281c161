"""Which sequence is to blame when a worker dies.

A sequence that keeps killing workers is found out: after its second death each that was there makes
its next step with no other suspect beside it, and a death then is blamed on it alone.
Owns: how many deaths are too many.
Invariant: a sequence that makes progress is not on probation any more, but its deaths still count.
Never: ends a sequence.
"""

from __future__ import annotations

from engine.schedule.sequence import Sequence

PROBATION_SUSPICIONS = 2
MAX_SUSPICIONS = 3


def blame(victims: list[Sequence]) -> None:
    """Suspect those of a dead worker's sequences that are on probation; if none is, all."""
    for sequence in [s for s in victims if s.is_on_probation] or victims:
        sequence.num_suspicions += 1
        sequence.is_on_probation = sequence.num_suspicions >= PROBATION_SUSPICIONS


def is_proven(sequence: Sequence) -> bool:
    """True if too many workers have died under it."""
    return sequence.num_suspicions > MAX_SUSPICIONS


def must_wait(sequence: Sequence, at_worker: list[Sequence]) -> bool:
    """True if it is on probation, and so is one that is at its worker already."""
    return sequence.is_on_probation and any(other.is_on_probation for other in at_worker)
