"""Hold all tiers below the pools of one router, the fastest first.

Invariant: a prompt waits for one tier at a time; a victim's blocks go to the first that takes them.
"""

from __future__ import annotations

from itertools import count

from engine.scheduler.cache.hashes import Hash
from engine.scheduler.offload.loads import Restored, WantedBlocks, joined
from engine.scheduler.offload.tier import Tier


class OffloadTiers:
    """None, one or several; they come and go while prompts are served."""

    def __init__(self) -> None:
        self.each: list[Tier] = []
        self.numbers = count(1)
        """Numbers of their copies."""

    def __bool__(self) -> bool:
        return bool(self.each)

    def loading(self, seq_id: int) -> Tier | None:
        """Return the tier that a sequence waits for."""
        return next((tier for tier in self.each if tier.is_loading(seq_id)), None)

    def has_decided(self, seq_id: int) -> bool:
        """Say whether all tiers have decided a queued sequence, or it waits for one."""
        if self.loading(seq_id) is not None:
            return True
        return all(tier.has_decided(seq_id) for tier in self.each)

    def decide(self, wanted: WantedBlocks) -> None:
        """Load blocks of a queued prompt from the first tier where it is worth it."""
        for tier in self.each:
            if not tier.has_decided(wanted.seq_id):
                tier.decide(wanted)
                if tier.is_loading(wanted.seq_id):
                    return

    def end_wait(self, seq_id: int) -> Restored | None:
        """End the waits of an admitted or ended sequence; return the outcome."""
        found: Restored | None = None
        for tier in self.each:
            found = joined(found, tier.end_wait(seq_id))
        return found

    def placed(self, found: list[Hash], missing: list[Hash]) -> None:
        """Call Tier.placed() of every tier."""
        for tier in self.each:
            tier.placed(found, missing)

    def preempted(self, pool: str, hashes: list[Hash], num_tokens: int) -> None:
        for tier in self.each:
            if tier.preempted(pool, hashes, num_tokens):
                return

    def computed(self, hashes: list[Hash]) -> None:
        """Call Tier.computed() of every tier."""
        for tier in self.each:
            tier.computed(hashes)
