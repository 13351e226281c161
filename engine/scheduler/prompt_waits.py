"""Find what each waiting prompt waits for, and behind how many tokens.

Invariant: tokens ahead are counted in the order in which the queue is taken if nothing else comes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from enum import Enum, auto
from itertools import islice
from typing import NamedTuple

from engine.scheduler.block_allocator import BlockAllocator
from engine.scheduler.prefixes.prefix_cache import PrefixCache
from engine.scheduler.prefixes.prefix_copies import PrefixCopies
from engine.scheduler.queue.queue import FairQueue, PromptsAhead
from engine.scheduler.routing.worker_routes import Routes
from engine.scheduler.sequences.sequence import Phase, Sequence
from engine.scheduler.sequences.sequence_table import SequenceTable

MAX_TOLD = 200
"""Sequences of the queue whose wait is found; each costs a look at the blocks."""


class WaitsFor(Enum):
    """Name what keeps a prompt waiting."""

    RESTART = auto()
    """Its worker is coming back."""
    PREEMPTED = auto()
    """Others needed its blocks."""
    TIER = auto()
    """Blocks are being loaded; the subject is the tier's label."""
    FETCH = auto()
    """Blocks are being copied from another pool."""
    NO_WORKER = auto()
    BLOCKS = auto()
    """Others hold the blocks that it needs."""
    PREFIX = auto()
    """A request computes the beginning of its prompt; the subject is empty if that is another
    owner's."""
    TURN = auto()
    """Other prompts come first at a worker, the subject."""


class PromptWait(NamedTuple):
    """What one prompt waits for."""

    reason: WaitsFor
    subject: str = ""
    behind: str | None = None
    """The request with most prompt tokens among those computed before it."""
    behind_tokens: int | None = None
    """Prompt tokens left of all requests computed before it."""


class _Ahead(NamedTuple):
    """Prompts that a worker computes first."""

    num_tokens: int = 0
    most_tokens: int = 0
    request_id: str = ""

    def plus(self, sequence: Sequence) -> _Ahead:
        """Add another prompt."""
        num_left = sequence.num_prefill_tokens_left
        largest = (self.most_tokens, self.request_id)
        if num_left > self.most_tokens:
            largest = (num_left, sequence.request_id)
        return _Ahead(self.num_tokens + num_left, *largest)


class PromptWaits:
    """Find what waiting prompts wait for, from the router's parts."""

    def __init__(
        self,
        at: SequenceTable,
        queue: FairQueue,
        allocator: BlockAllocator,
        routes: Routes,
        prefixes: PrefixCache,
        prefix_copies: PrefixCopies,
        step_tokens: int,
    ) -> None:
        self._at, self._queue, self._allocator, self._routes = at, queue, allocator, routes
        self._prefixes, self._prefix_copies, self._step_tokens = (
            prefixes,
            prefix_copies,
            step_tokens,
        )

    def find(self, ready_workers: Iterable[str], now_ns: int) -> dict[int, PromptWait]:
        """Find the wait of each sequence whose prompt no step has taken up, by its id."""
        found: dict[int, PromptWait] = {}
        for sequence in self._at.resuming.values():
            found[sequence.seq_id] = PromptWait(WaitsFor.RESTART)
        for sequence in self._at.paused.values():
            found[sequence.seq_id] = self._coming(sequence) or PromptWait(WaitsFor.PREEMPTED)
        running = self._at.running.values()
        turns = _Turns([s for s in running if s.phase is Phase.PREFILLING], self._step_tokens)
        under_way, num_free = (
            PromptsAhead(running, self._step_tokens, now_ns),
            self._allocator.num_free(),
        )
        busiest = turns.busiest(ready_workers)
        for sequence in islice(self._queue.forecast(now_ns), MAX_TOLD):
            if busiest is None:
                wait = PromptWait(WaitsFor.NO_WORKER)
            elif (coming := self._coming(sequence)) is not None:
                wait = coming
            elif not self._routes.fits(sequence, num_free):
                wait = PromptWait(WaitsFor.BLOCKS)
            elif (leader := self._prefixes.leader(sequence, under_way)) is not None:
                is_own = leader.owner == sequence.owner
                wait = PromptWait(WaitsFor.PREFIX, leader.request_id if is_own else "")
            else:
                wait = turns.turn(busiest)
            found[sequence.seq_id] = wait
            turns.add(sequence, busiest or "")
        return found | turns.found

    def _coming(self, sequence: Sequence) -> PromptWait | None:
        """Say where blocks of it are brought from; None: from nowhere."""
        if (tier := self._prefixes.tiers.loading(sequence.seq_id)) is not None:
            return PromptWait(WaitsFor.TIER, tier.label)
        is_fetched = self._prefix_copies.is_awaited(sequence)
        return PromptWait(WaitsFor.FETCH) if is_fetched else None


class _Turns:
    """Count the prompt tokens that each worker computes before a waiting prompt.

    Args:
        admitted: sequences on workers with a prompt to compute.
        step_tokens: prompt tokens in a worker's step.
    """

    def __init__(self, admitted: Iterable[Sequence], step_tokens: int) -> None:
        self.found: dict[int, PromptWait] = {}
        """Waits of admitted sequences that no step has taken up, by id."""
        self._ahead: defaultdict[str, _Ahead] = defaultdict(_Ahead)
        for sequence in sorted(admitted, key=_has_begun, reverse=True):
            worker = sequence.worker or ""
            # what fits into one step with those before it may be in the one that is being computed
            if not _has_begun(sequence) and self._ahead[worker].num_tokens >= step_tokens:
                self.found[sequence.seq_id] = self.turn(worker)
            self.add(sequence, worker)

    def busiest(self, workers: Iterable[str]) -> str | None:
        """Return the worker with most to compute first; None if there is no worker."""
        return max(sorted(workers), key=lambda name: self._ahead[name].num_tokens, default=None)

    def turn(self, worker: str) -> PromptWait:
        """Describe the wait of a prompt that comes next at a worker."""
        ahead = self._ahead[worker]
        behind = (ahead.request_id, ahead.num_tokens) if ahead.num_tokens else (None, None)
        return PromptWait(WaitsFor.TURN, worker, *behind)

    def add(self, sequence: Sequence, worker: str) -> None:
        """Count a prompt before later ones."""
        self._ahead[worker] = self._ahead[worker].plus(sequence)


def _has_begun(sequence: Sequence) -> bool:
    return sequence.stamps.started_ns is not None
