"""Count guessed tokens and how many of them were right, by source and place in the guess.

Invariant: no more tokens are right than guessed, at every place.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from engine.wire.messages import SequenceStep


@dataclass(slots=True)
class DraftCounts:
    """What speculation has guessed."""

    num_steps: int = 0
    """Decode steps of sequences, with and without guesses."""
    num_tokens: int = 0
    """Tokens that these have yielded."""
    guessed: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Guessed tokens by drafter and place, from 0."""
    right: Counter[tuple[str, int]] = field(default_factory=Counter)

    def add(self, entry: SequenceStep) -> None:
        """Count a decode step of one sequence."""
        self.num_steps += 1
        self.num_tokens += len(entry.token_ids)
        for place in range(entry.num_drafted):
            self.guessed[entry.drafter, place] += 1
        for place in range(len(entry.token_ids) - 1 if entry.num_drafted else 0):
            self.right[entry.drafter, place] += 1

    def __add__(self, other: DraftCounts) -> DraftCounts:
        """Add up two counts."""
        return DraftCounts(
            self.num_steps + other.num_steps,
            self.num_tokens + other.num_tokens,
            self.guessed + other.guessed,
            self.right + other.right,
        )

    def of(self, drafter: str) -> tuple[int, int]:
        """Return the tokens guessed by one drafter, and how many of them were right."""
        guessed, right = (
            sum(number for (name, _), number in each.items() if name == drafter)
            for each in (self.guessed, self.right)
        )
        return guessed, right

    @property
    def drafters(self) -> list[str]:
        """The names of the drafters that have guessed."""
        return sorted({name for name, _ in self.guessed})

    @property
    def about(self) -> str | None:
        """Tell tokens per step, and the right guesses by drafter; None: nothing was guessed."""
        if not self.guessed:
            return None
        parts = [f"{self.num_tokens / max(self.num_steps, 1):.1f} tokens per step"]
        for drafter in self.drafters:
            guessed, right = self.of(drafter)
            parts.append(f"{right} of {guessed} guesses from {drafter.replace('_', ' ')} right")
        return ", ".join(parts)
