"""Choose whose blocks are taken when too few are free.

An owner's share of a pool is its part by weight, among the owners that hold blocks there or wait.
An owner with more than its share loses blocks first, and of its sequences the oldest last.

Invariants: no owner loses blocks to one that holds more for its weight, unless none could continue
otherwise; an owner's oldest sequence loses its blocks only to an owner within its share that would
have no other sequence there, and not before it has gained by coming back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from engine.scheduler.routing.worker_routes import MAX_PREEMPTIONS
from engine.scheduler.sequences.sequence import On, Sequence
from engine.scheduler.sequences.sequence_table import age


@dataclass(frozen=True, slots=True)
class PreemptionCandidate:
    """The facts about one sequence by which a victim is chosen."""

    sequence: Sequence
    num_freed: int
    """Blocks of the pool that would become free."""
    num_lost: int
    """Positions that would have to be computed again: what others keep is not lost."""
    is_short: bool = False
    """It waits for blocks itself."""

    @property
    def owner(self) -> str:
        return self.sequence.owner


class PoolShares:
    """What each owner holds of one pool, and its share.

    Args:
        capacity: of the pool.
        sizes: an owner's name and the number of its blocks, any number of times.
        waiting: owners of which something waits.
        weights: by owner; others have 1.
    """

    def __init__(
        self,
        capacity: int,
        sizes: Iterable[tuple[str, int]],
        waiting: Iterable[str],
        weights: Mapping[str, float],
    ) -> None:
        self._weights = weights
        self.held: Counter[str] = Counter()
        for owner, size in sizes:
            self.held[owner] += size
        total = sum(map(self._weight, sorted({*self.held, *waiting})))
        self._level = capacity / total if total else 0.0
        """Blocks of an owner of weight one that holds its share."""

    def load(self, owner: str) -> float:
        """Divide what an owner holds by its weight."""
        return self.held[owner] / self._weight(owner)

    def is_over(self, owner: str, num_more: int = 0) -> bool:
        """Say whether an owner would hold more than its share with `num_more` blocks."""
        return self.held[owner] + num_more > self._level * self._weight(owner)

    def over(self) -> set[str]:
        """Return the owners that hold more than their shares."""
        return {owner for owner in self.held if self.is_over(owner)}

    def _weight(self, owner: str) -> float:
        return self._weights.get(owner, 1.0)


def victim(
    holders: Collection[PreemptionCandidate], shares: PoolShares
) -> PreemptionCandidate | None:
    """Choose the sequence to preempt so that running ones can grow.

    Of the owner with the heaviest load it is the one with least to recompute per freed block; of
    equals the youngest. Sequences that were preempted MAX_PREEMPTIONS times come last, and lose
    their blocks to their owner's others only while they are short themselves: if all of them kept
    their blocks, none could continue.

    Args:
        holders: of blocks in one pool, each owner's oldest among them.
        shares: of that pool.

    Returns:
        None if the short ones have to wait for others to end.
    """
    asking = [one for one in holders if one.is_short]
    if not asking:
        return None
    oldest = _oldest(holders)
    least = min(shares.load(one.owner) for one in asking)
    for owner in _by_load(oldest, shares):
        if shares.load(owner) < least:
            break
        claims: list[PreemptionCandidate] = []
        if shares.is_over(owner):
            claims = [o for o in asking if o.owner != owner and not shares.is_over(o.owner)]
        elif all(one.owner != owner for one in asking):
            continue
        is_lone = any(one is oldest[one.owner] for one in claims)
        if chosen := _giving(holders, oldest[owner], is_claimed=bool(claims), is_lone=is_lone):
            return max(chosen, key=_gain)
    if all(map(_is_stuck, holders)):
        first = min(oldest.values(), key=_age)
        others = [one for one in holders if one is not first and one.num_freed]
        return max(others, key=_gain, default=None)
    return None


def victim_for(
    owner: str,
    num_blocks: int,
    num_missing: int,
    holders: Collection[PreemptionCandidate],
    shares: PoolShares,
) -> PreemptionCandidate | None:
    """Choose the sequence to preempt so that a waiting one of another owner can begin.

    Its owner must hold none of the pool, or no more than its share with it. If one victim is
    enough, it is the one with least to recompute.

    Args:
        owner: of the waiting sequence.
        num_blocks: that it would hold.
        num_missing: blocks that have to become free for it.
        holders: of blocks in the pool, each owner's oldest among them.
        shares: of that pool.

    Returns:
        None if no other owner has to give blocks up for it.
    """
    is_newcomer, is_within = not shares.held[owner], not shares.is_over(owner, num_blocks)
    if not (is_newcomer or is_within):
        return None
    oldest = _oldest(holders)
    for other in _by_load(oldest, shares):
        if other == owner or not shares.is_over(other):
            continue
        is_lone = is_newcomer and is_within
        chosen = _giving(holders, oldest[other], is_claimed=True, is_lone=is_lone)
        if enough := [one for one in chosen if one.num_freed >= num_missing]:
            return max(enough, key=lambda one: (-one.num_lost, _age(one)))
        if chosen:
            return max(chosen, key=_gain)
    return None


def _oldest(holders: Iterable[PreemptionCandidate]) -> dict[str, PreemptionCandidate]:
    """Find each owner's oldest sequence."""
    oldest: dict[str, PreemptionCandidate] = {}
    for one in holders:
        oldest[one.owner] = min(oldest.get(one.owner, one), one, key=_age)
    return oldest


def _by_load(oldest: Mapping[str, PreemptionCandidate], shares: PoolShares) -> list[str]:
    """List owners, the heaviest load first; of equals the one whose oldest came last."""
    return sorted(oldest, key=lambda o: (shares.load(o), _age(oldest[o])), reverse=True)


def _giving(
    holders: Iterable[PreemptionCandidate],
    oldest: PreemptionCandidate,
    *,
    is_claimed: bool,
    is_lone: bool,
) -> list[PreemptionCandidate]:
    """List the sequences of which an owner loses the next.

    Args:
        holders: of all owners.
        oldest: of this owner.
        is_claimed: another owner claims its share.
        is_lone: that owner has no older sequence there.
    """
    others = [one for one in holders if one.owner == oldest.owner and one is not oldest]
    younger = [one for one in others if one.num_freed]
    fresh = [one for one in younger if one.sequence.num_preemptions < MAX_PREEMPTIONS]
    chosen = fresh or (younger if is_claimed else [one for one in younger if one.is_short])
    is_kept = oldest.sequence.num_tokens < oldest.sequence.keeps_blocks_until
    if chosen or not is_lone or is_kept or not oldest.num_freed:
        return chosen
    return [oldest]


def _is_stuck(holder: PreemptionCandidate) -> bool:
    return holder.is_short or not isinstance(holder.sequence.where, On)


def _age(holder: PreemptionCandidate) -> tuple[int, int]:
    return age(holder.sequence)


def _gain(holder: PreemptionCandidate) -> tuple[float, tuple[int, int]]:
    return -holder.num_lost / holder.num_freed, _age(holder)
