"""What the caches on disk and in DRAM have in common: predictions, workers, frames.

Owns: nothing.
Invariant: pure, but for what it is given.
Never: opens or closes a tier.
"""

from __future__ import annotations

from collections.abc import Callable

from appliance.frame.protocol import TierFrame
from engine.schedule.router import Router
from engine.tiers.tier import Tier

_RATIOS = (0.5, 1, 2, 4)
"""Sizes of a cache, to the one that there is, of which it is said what they would find."""


class Prediction:
    """What a prompt takes, by what is known of the router's workers."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def prompt_ms(self, pool: str, num_tokens: int, num_before: int) -> float | None:
        """The least of those workers that have their blocks in the pool; None: unknown."""
        places, roles = self._router.places, self._router.roles
        names = [worker.name for worker in places.workers if worker.pool == pool]
        known = [roles.prompt_ms(name, num_tokens, num_before) for name in names]
        return min((each for each in known if each is not None), default=None)


def worker_of(router: Router) -> Callable[[str], str | None]:
    """Who of a router's workers would copy for a pool; None: nobody is ready."""

    def find(pool: str) -> str | None:
        # of those who share it the last one, which decodes: its steps are short
        names = [worker.name for worker in router.places.workers if worker.pool == pool]
        return next((n for n in reversed(names) if n in router.roles.ready_workers), None)

    return find


def frame_of(tier: Tier, folder: str = "", num_damaged: int = 0) -> TierFrame:
    """How a tier stands.

    Args:
        tier: that is there.
        folder: where its files are.
        num_damaged: blocks that were found damaged before it was there.
    """
    costs, counts, index = tier.costs, tier.counts, tier.index
    return TierFrame(
        state="on" if tier.reason is None else "down",
        reason=tier.reason or "",
        folder=folder,
        blocks=len(index),
        num_bytes=tier.num_bytes,
        max_bytes=tier.max_bytes,
        waiting=tier.num_waiting,
        stored_blocks=counts.stored_blocks,
        loaded_blocks=counts.loaded_blocks,
        loaded_tokens=counts.loaded_tokens,
        loads=costs.num_loads,
        declined_loads=costs.num_declined,
        load_ms=costs.load_ms,
        compute_ms=costs.compute_ms,
        regret_ms=costs.regret_ms,
        missed_deadlines=counts.missed_deadlines,
        evicted_blocks=index.num_evicted,
        expired_blocks=index.num_expired,
        damaged_blocks=index.num_damaged + num_damaged,
        failed_stores=counts.failed_stores,
        would_find=_would_find(tier),
        reuse_distances=_distances(tier),
        read_bytes_per_s=costs.bytes_per_s,
    )


def _would_find(tier: Tier) -> dict[str, float]:
    shares = {f"{ratio:g}": tier.would_find(ratio) for ratio in _RATIOS}
    return {ratio: round(share, 4) for ratio, share in shares.items() if share is not None}


def _distances(tier: Tier) -> dict[str, int]:
    counts, share = tier.reuse.counts, tier.reuse.share
    return {str(share << bits): counts[bits] for bits in range(max(counts, default=-1) + 1)}
