"""All tiers below the pools of one router, the fastest first.

Owns: nothing but their order.
Invariant: a prompt waits for one tier at a time; a victim's blocks go to the first that takes them.
Never: knows what a tier is made of.
"""

from __future__ import annotations

from itertools import count

from engine.cache.prefix_hashes import Hash
from engine.tiers.loads import Restored, Wanted, joined
from engine.tiers.tier import Tier


class Tiers:
    """None, one or several; they come and go while prompts are served."""

    def __init__(self) -> None:
        self.each: list[Tier] = []
        self.numbers = count(1)
        """Of their copies."""

    def __bool__(self) -> bool:
        return bool(self.each)

    def loading(self, seq_id: int) -> Tier | None:
        """The tier that a sequence waits for blocks of."""
        return next((tier for tier in self.each if tier.is_loading(seq_id)), None)

    def has_decided(self, seq_id: int) -> bool:
        """True if all were asked about a queued sequence, or it waits for one of them."""
        if self.loading(seq_id) is not None:
            return True
        return all(tier.has_decided(seq_id) for tier in self.each)

    def decide(self, wanted: Wanted) -> None:
        """Load blocks of a queued prompt from the first tier where that is worth it."""
        for tier in self.each:
            if not tier.has_decided(wanted.seq_id):
                tier.decide(wanted)
                if tier.is_loading(wanted.seq_id):
                    return

    def forget(self, seq_id: int) -> Restored | None:
        """It was admitted, or has ended, and waits for nothing; what it has waited for."""
        found: Restored | None = None
        for tier in self.each:
            found = joined(found, tier.forget(seq_id))
        return found

    def placed(self, hashes: list[Hash], num_found: int) -> None:
        """Tell every tier of it; see Tier.placed()."""
        for tier in self.each:
            tier.placed(hashes, num_found)

    def preempted(self, pool: str, hashes: list[Hash]) -> None:
        """As Tier.preempted(), of the first that takes them."""
        for tier in self.each:
            if tier.preempted(pool, hashes):
                return

    def computed(self, hashes: list[Hash]) -> None:
        """Tell every tier of it; see Tier.computed()."""
        for tier in self.each:
            tier.computed(hashes)
