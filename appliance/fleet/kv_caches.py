"""Open, maintain and close the KV caches in DRAM and on disk.

Invariant: they open when the workers are ready, and close before the workers end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from appliance.configuration.settings import ServeConfig
from appliance.fleet.boot import BootPlan, make_cache_memory
from appliance.fleet.dram_cache import DramCache
from appliance.fleet.ssd_cache import SsdCache
from appliance.fleet.supervisor import Supervisor
from appliance.observe.frame.tier_frames import TierFrame
from engine.scheduler.cache.hashes import PrefixHasher
from engine.scheduler.offload.arena import WorkerCopies
from engine.scheduler.router import Router

FLUSH_S = 5.0
FLUSH_POLL_S = 0.01
SWEEP_INTERVAL_S = 60.0


class KvCaches:
    """The caches below one daemon's KV pools, opened and closed together.

    Args:
        tell: takes severity, code and message of an event.
    """

    def __init__(self, config: ServeConfig, tell: Callable[[str, str, str], None]) -> None:
        self.memory = make_cache_memory(config)
        """Memory of the DRAM cache, which keeps the blocks of several models."""
        self._dram = DramCache(self.memory, tell)
        self._ssd = SsdCache(config, tell)
        self._timer: asyncio.TimerHandle | None = None
        self._opening: asyncio.Task[None] | None = None

    def open_meanwhile(
        self, plan: BootPlan, hasher: PrefixHasher | None, router: Router, workers: Supervisor
    ) -> None:
        """Attach the caches as open() does, while requests are served already."""
        self._opening = asyncio.create_task(self.open(plan, hasher, router, workers))

    async def open(
        self, plan: BootPlan, hasher: PrefixHasher | None, router: Router, workers: Supervisor
    ) -> None:
        """Attach the caches to the router, and report faults.

        Args:
            hasher: of its prompts; None: the prefix cache is off, so no caches open.
        """
        copies = WorkerCopies(workers.send, asyncio.get_running_loop().call_later)
        router.attach_copies(copies)
        if hasher is not None:
            self._dram.open(plan, hasher, router, workers, copies)
        await self._ssd.open(plan, hasher, router, workers, copies)
        self._sweep()

    def frames(self) -> dict[str, TierFrame | None]:
        return {"dram": self._dram.frame(), "ssd": self._ssd.frame()}

    def drop_waiting(self) -> None:
        """Store nothing more than what is under way."""
        for tier in (self._dram.tier, self._ssd.tier):
            if tier is not None:
                tier.drop_waiting()

    async def flush(self, *, is_end: bool) -> None:
        """Store recently used blocks, within FLUSH_S; no worker computes any more.

        Args:
            is_end: the daemon ends, and its memory with it.
        """
        kept = (self._ssd.tier,) if is_end else (self._dram.tier, self._ssd.tier)
        # a disk that hangs is not waited for
        tiers = [tier for tier in kept if tier is not None and tier.reason is None]
        for tier in tiers:
            tier.flush()
        end_s = time.monotonic() + FLUSH_S
        while any(tier.num_pending for tier in tiers) and time.monotonic() < end_s:  # noqa: ASYNC110
            await asyncio.sleep(FLUSH_POLL_S)

    def _sweep(self) -> None:
        """Erase what is too old, and look whether more blocks fit now."""
        for tier in (self._dram.tier, self._ssd.tier):
            if tier is not None:
                tier.sweep()
        self._timer = asyncio.get_running_loop().call_later(SWEEP_INTERVAL_S, self._sweep)

    async def close(self) -> None:
        """Close both caches; their blocks stay."""
        if self._opening is not None:
            await asyncio.wait({self._opening})
            self._opening = None
        if self._timer is not None:
            self._timer.cancel()
        self._dram.close()
        await self._ssd.close()
