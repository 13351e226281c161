"""Open and close the DRAM cache below the KV pools.

Owns: the arena that workers copy blocks to and from.
Invariant: it is there only if every worker has tried the way to the arena at start.
Never: decides which block is stored or loaded.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from appliance.fleet.boot import BootPlan
from appliance.fleet.placement import MIN_CACHED_BLOCKS, capacity_text
from appliance.fleet.ssd_cache import frame_of
from appliance.fleet.supervisor import Supervisor
from appliance.frame.tier_frames import TierFrame
from engine.cache.topology import DRAM
from engine.offload.arena import CacheArena, WorkerCopies
from engine.offload.index import SlabIndex
from engine.offload.jobs import Context, CopyDeadlines, Job
from engine.offload.load_costs import Costs
from engine.offload.records import DIGEST_BYTES, PAGE, SlabHead
from engine.offload.tier import Tier
from engine.schedule.router import Router
from engine.units import size_text

PATIENCE = CopyDeadlines(load_ms=60_000, store_s=60, counts_waiting=False)
"""Copies wait behind steps, which may be long; the watchdog handles hung workers."""


class DramCache:
    """Hold the daemon's DRAM cache: its arena, and its figures in frames.

    Args:
        tell: takes severity, code and message of an event.
    """

    def __init__(self, tell: Callable[[str, str, str], None]) -> None:
        self.tier: Tier | None = None
        self._reason: str | None = None
        """Why the configured cache is unavailable; None: it is available or off."""
        self._tell = tell

    def open(
        self, plan: BootPlan, router: Router, workers: Supervisor, copies: WorkerCopies
    ) -> None:
        """Attach the cache to the router if the plan has one; the workers are ready."""
        self.tier = self._reason = None
        num_blocks = 0 if plan.arena is None else plan.arena.num_blocks - 1 - plan.num_staging
        if not num_blocks:
            return
        rates = [state.probes.get(DRAM, 0.0) for state in workers.workers.values()]
        if not all(rates):
            self._reason = "the trial copy came back changed"
            self._tell("warning", "dram.off", f"there is no DRAM cache: {self._reason}")
            return
        costs, block_bytes = Costs(min(rates)), plan.placement.block_bytes
        tier = self.tier = _tier(num_blocks, block_bytes, router, copies, costs, self._tell)
        router.attach_tier(tier, is_fastest=True)
        held, rate = capacity_text(plan.placement, num_blocks), f"{size_text(min(rates))}/s"
        severity = "warning" if num_blocks < MIN_CACHED_BLOCKS else "info"
        self._tell(severity, "dram.on", f"DRAM cache of {held}, copied to and from at {rate}")

    def frame(self) -> TierFrame | None:
        """Return the cache's state for a frame; None: not configured."""
        if self.tier is not None:
            return frame_of(self.tier)
        return None if self._reason is None else TierFrame("failed", self._reason, "")

    def close(self) -> None:
        """Close the cache before the router goes: end its jobs and unmap it."""
        self.tier = self._reason = None


def _tier(
    num_blocks: int,
    block_bytes: int,
    router: Router,
    copies: WorkerCopies,
    costs: Costs,
    tell: Callable[[str, str, str], None],
) -> Tier:
    loop, host = asyncio.get_running_loop(), router.tier_host

    def report(job: Job) -> None:
        tier.done(job)

    head = SlabHead(0, PAGE, num_blocks, bytes(DIGEST_BYTES))
    arena = CacheArena(head, host.copier_of, copies, report)
    context = Context(
        host.ledger,
        DRAM,
        SlabIndex(),
        arena,
        block_bytes,
        now_ns=time.monotonic_ns,
        now_s=lambda: int(time.time()),
        later=loop.call_later,
        tell=tell,
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
