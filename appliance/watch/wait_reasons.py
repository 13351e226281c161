"""Why a prompt is not being computed yet, in words: for whom it waits, behind how much, how long.

Owns: the words.
Invariant: pure; tokens ahead are counted in the order in which the queue will be taken if nothing
else comes.
Never: predicts a time.
"""

from __future__ import annotations

from collections import Counter
from itertools import islice

from engine.schedule.queued_work import Ahead
from engine.schedule.router import Router
from engine.schedule.sequence import Phase, Sequence

MAX_TOLD = 200
"""Of the queue's sequences; for the others nobody asks, and each costs a look at the blocks."""


def waits(router: Router, now_ns: int) -> dict[int, str]:
    """What each sequence waits for whose prompt no step has taken up, by its number."""
    found: dict[int, str] = {}
    for sequence in router.at.resuming.values():
        found[sequence.seq_id] = f"its worker to come back; {_by_now(sequence, now_ns)}"
    for sequence in router.at.paused.values():
        text = _coming(router, sequence) or "KV blocks, for others needed those that it had"
        found[sequence.seq_id] = f"{text}; {_by_now(sequence, now_ns)}"
    left: Counter[str] = Counter()
    spare = router.growth.spare()
    admitted = [s for s in router.at.running.values() if s.phase is Phase.PREFILLING and s.worker]
    for sequence in sorted(admitted, key=_has_begun, reverse=True):
        worker = sequence.worker or ""
        if not _has_begun(sequence):
            found[sequence.seq_id] = _turn(sequence, worker, left[worker], now_ns)
        left[worker] += sequence.num_prompt_tokens - sequence.num_computed_tokens
    under_way = Ahead(router.at.running.values(), now_ns)
    ready = sorted(router.roles.ready_workers)
    busiest = max(ready, key=lambda name: left[name], default=None)
    for sequence in islice(router.queue.forecast(now_ns), MAX_TOLD):
        if busiest is None:
            text = f"a worker to be ready; {_by_now(sequence, now_ns)}"
        elif (coming := _coming(router, sequence)) is not None:
            text = f"{coming}; {_by_now(sequence, now_ns)}"
        elif not router.ways.fits(sequence, spare):
            text = f"KV blocks that others hold; {_by_now(sequence, now_ns)}"
        elif (leader := router.prefixes.leader(sequence, under_way)) is not None:
            # of other users' requests only that there is one
            who = leader.request_id if leader.owner == sequence.owner else "another request"
            text = f"the beginning of its prompt, which {who} computes; {_by_now(sequence, now_ns)}"
        else:
            text = _turn(sequence, busiest, left[busiest], now_ns)
        found[sequence.seq_id] = text
        left[busiest or ""] += sequence.num_prompt_tokens
    return found


def _coming(router: Router, sequence: Sequence) -> str | None:
    """From where blocks of it are brought; None: from nowhere."""
    if (tier := router.prefixes.tiers.loading(sequence.seq_id)) is not None:
        return f"blocks of its prompt from {tier.label}"
    return "blocks of its prompt from another pool" if router.fetches.is_awaited(sequence) else None


def _has_begun(sequence: Sequence) -> bool:
    return sequence.stamps.started_ns is not None


def _turn(sequence: Sequence, worker: str, num_ahead: int, now_ns: int) -> str:
    ahead = f"{num_ahead:,} prompt tokens are before it" if num_ahead else "it is the next"
    return f"its turn on worker {worker}: {ahead}; {_by_now(sequence, now_ns)}"


def _by_now(sequence: Sequence, now_ns: int) -> str:
    return f"{(now_ns - sequence.stamps.arrived_ns) / 1e9:.1f} s by now"
