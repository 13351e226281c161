"""Open and close the DRAM cache below the KV pools.

The blocks of models that were served before stay in the cache's memory, within its cap.

Invariant: it is there only if every worker has tried the way to the arena at start.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from appliance.fleet.boot import BootPlan
from appliance.fleet.placement import MIN_CACHED_BLOCKS, capacity_text
from appliance.fleet.ssd_cache import frame_of
from appliance.fleet.supervisor import Supervisor
from appliance.observe.frame.figures import things
from appliance.observe.frame.tier_frames import TierFrame
from engine.scheduler.cache.hashes import PrefixHasher
from engine.scheduler.cache.topology import DRAM
from engine.scheduler.offload.arena import CacheArena, WorkerCopies
from engine.scheduler.offload.cache_memory import CacheMemory
from engine.scheduler.offload.copy_deadlines import Context, CopyDeadlines
from engine.scheduler.offload.index import SlabIndex
from engine.scheduler.offload.jobs import Job
from engine.scheduler.offload.load_costs import Costs
from engine.scheduler.offload.tier import Tier
from engine.scheduler.router import Router
from engine.units import size_text

PATIENCE = CopyDeadlines(load_ms=60_000, store_s=60, counts_waiting=False)
"""Copies wait behind steps, which may be long; the watchdog handles hung workers."""


class DramCache:
    """Hold the daemon's DRAM cache, and describe it in frames.

    Args:
        memory: of the blocks of all models.
        tell: takes severity, code and message of an event.
    """

    def __init__(self, memory: CacheMemory, tell: Callable[[str, str, str], None]) -> None:
        self._memory = memory
        self.tier: Tier | None = None
        self._reason: str | None = None
        """Why the configured cache is unavailable; None: it is available or off."""
        self._tell = tell

    def open(
        self,
        plan: BootPlan,
        hasher: PrefixHasher,
        router: Router,
        workers: Supervisor,
        copies: WorkerCopies,
    ) -> None:
        """Attach the cache to the router if there is one; the workers are ready."""
        self.tier = self._reason = None
        block_bytes = plan.placement.whole_block_bytes
        num_blocks = self._memory.max_places(block_bytes)
        if not self._memory.cap_bytes:
            return
        if not num_blocks:
            self._off(f"a block takes {size_text(block_bytes)}, too much for dram_cache")
            return
        rates = [state.probes.get(DRAM, 0.0) for state in workers.workers.values()]
        if not all(rates):
            self._off("the trial copy came back changed")
            return
        name, now_s = f"{plan.model_id} in {plan.dtype}", int(time.time())
        index = self._memory.serve(hasher.fingerprint, name, block_bytes, now_s)
        self.tier = self._tier(num_blocks, block_bytes, index, router, copies, Costs(min(rates)))
        router.attach_tier(self.tier, is_fastest=True)
        about = f"DRAM cache of {capacity_text(plan.placement, num_blocks)}"
        about += f", copied to and from at {size_text(min(rates))}/s"
        about += f"; {things(len(index), 'block')} kept from before" if len(index) else ""
        severity = "warning" if num_blocks < MIN_CACHED_BLOCKS else "info"
        self._tell(severity, "dram.on", about)

    def _off(self, reason: str) -> None:
        self._reason = reason
        self._tell("warning", "dram.off", f"there is no DRAM cache: {reason}")

    def frame(self) -> TierFrame | None:
        """Return the cache's state for a frame; None: not configured."""
        if self.tier is not None:
            return frame_of(self.tier, others=self._memory.shares())
        return None if self._reason is None else TierFrame("failed", self._reason, "")

    def close(self) -> None:
        """Close the cache before its router goes; its blocks stay."""
        self.tier = self._reason = None

    def _tier(
        self,
        num_blocks: int,
        block_bytes: int,
        index: SlabIndex,
        router: Router,
        copies: WorkerCopies,
        costs: Costs,
    ) -> Tier:
        loop, host = asyncio.get_running_loop(), router.tier_host

        def report(job: Job) -> None:
            tier.done(job)

        context = Context(
            host.ledger,
            DRAM,
            index,
            CacheArena(self._memory, host.copier_of, copies, report),
            block_bytes,
            now_ns=time.monotonic_ns,
            now_s=lambda: int(time.time()),
            later=loop.call_later,
            tell=self._tell,
            patience=PATIENCE,
            numbers=host.numbers,
        )
        tier = Tier(
            context,
            num_blocks,
            costs,
            host.prompt_ms,
            changed=lambda: router.dispatch(time.monotonic_ns()),
        )
        return tier
