"""Open, maintain and close the KV caches in DRAM and on disk.

Owns: the default sizes and the reserved disk space; the slabs and disk threads, from start to end;
the tiers, as long as the router above them.
Invariant: they open when the workers are ready, and close before the workers end.
Never: decides which block is stored or loaded; engine.offload does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from appliance.configuration.config import ServeConfig
from appliance.fleet.boot import BootPlan
from appliance.fleet.dram_cache import DramCache
from appliance.fleet.ssd_cache import SsdCache
from appliance.fleet.supervisor import Supervisor
from appliance.frame.tier_frames import TierFrame
from engine.cache.hashes import PrefixHasher
from engine.offload.arena import WorkerCopies
from engine.schedule.router import Router


class KvCaches:
    """The caches below one daemon's KV pools, opened and closed together.

    Args:
        config: the settings.
        tell: takes severity, code and message of an event.
    """

    def __init__(self, config: ServeConfig, tell: Callable[[str, str, str], None]) -> None:
        self._dram = DramCache(tell)
        self._ssd = SsdCache(config, tell)

    async def open(
        self, plan: BootPlan, hasher: PrefixHasher | None, router: Router, workers: Supervisor
    ) -> None:
        """Attach the caches to the router, and report faults.

        Args:
            plan: what is served.
            hasher: of its prompts; None: the prefix cache is off, so no caches open.
            router: gets the tiers.
            workers: that are ready.
        """
        copies = WorkerCopies(workers.send, asyncio.get_running_loop().call_later)
        router.attach_copies(copies)
        if hasher is not None:
            self._dram.open(plan, router, workers, copies)
        await self._ssd.open(plan, hasher, router, workers, copies)

    def frames(self) -> dict[str, TierFrame | None]:
        return {"dram": self._dram.frame(), "ssd": self._ssd.frame()}

    async def flush(self) -> None:
        """Store recently used blocks on disk; no worker computes any more."""
        await self._ssd.flush()

    async def close(self) -> None:
        """Store recently used blocks, then close both caches."""
        self._dram.close()
        await self._ssd.close()
