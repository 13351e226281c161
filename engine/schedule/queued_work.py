"""How many prompt tokens each worker would compute before a prompt that still waits.

Owns: a reading of the prompts under way, kept up while the queue is being placed.
Invariant: prompts are counted in the order in which the workers' plans will take them.
Never: places anything.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.schedule.plan import prefill_key
from engine.schedule.sequence import Phase, Sequence


class Ahead:
    """Prompts that the workers have to compute.

    Args:
        running: all that is admitted.
        now_ns: CLOCK_MONOTONIC, for ageing.
    """

    def __init__(self, running: Iterable[Sequence], now_ns: int) -> None:
        self._now_ns = now_ns
        self._prompts: list[tuple[str | None, str, int, float]] = []
        self.sequences: list[Sequence] = []
        """Those whose prompts are counted."""
        for sequence in running:
            if sequence.phase is Phase.PREFILLING:
                self.add(sequence)

    def add(self, sequence: Sequence) -> None:
        """Count the prompt of a sequence that has just been admitted to a worker."""
        self.sequences.append(sequence)
        num_tokens = sequence.num_tokens - sequence.num_computed_tokens
        key = self._key(sequence, num_tokens)
        self._prompts.append((sequence.worker, sequence.owner, num_tokens, key))

    def num_tokens(self, sequence: Sequence, worker: str) -> int:
        """Prompt tokens that the worker has to compute first.

        Its owner's older prompts keep their place. Of others' the longer ones are passed, as they
        will be in the worker's plan: how long they waited was their owners' affair.
        """
        owner, own_tokens = sequence.owner, sequence.num_uncached_tokens
        own_key = self._key(sequence, own_tokens)
        return sum(
            num_tokens
            for at, other, num_tokens, other_key in self._prompts
            if at == worker
            and (other_key <= own_key if other == owner else num_tokens <= own_tokens)
        )

    def with_fewer_than(
        self, most_tokens: int, sequence: Sequence, workers: Iterable[str]
    ) -> set[str]:
        """Those of the workers that have less to compute first."""
        return {name for name in workers if self.num_tokens(sequence, name) < most_tokens}

    def _key(self, sequence: Sequence, num_tokens: int) -> float:
        return prefill_key(num_tokens, self._now_ns - sequence.stamps.arrived_ns)
