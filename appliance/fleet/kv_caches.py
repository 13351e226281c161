"""The caches below the KV pools, in DRAM and on disk, as the daemon opens and closes them.

Owns: the tier, as long as the router whose pools it is below; both.
Invariant: they are opened when the workers are ready, and closed before they end.
Never: decides anything.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from appliance.configuration.config import ServeConfig
from appliance.fleet.boot import BootPlan
from appliance.fleet.cache_identity import PromptHasher
from appliance.fleet.ssd_cache import SsdCache
from appliance.fleet.supervisor import Supervisor
from appliance.fleet.tier_parts import Prediction, frame_of, worker_of
from appliance.frame.protocol import TierFrame
from engine.cache.places import DRAM
from engine.schedule.router import Router
from engine.tiers.arena import CacheArena, WorkerCopies
from engine.tiers.files import DIGEST_BYTES, PAGE, SlabHead
from engine.tiers.index import SlabIndex
from engine.tiers.jobs import Context, CopyDeadlines, Job
from engine.tiers.loads import Costs
from engine.tiers.tier import Tier
from engine.units import size_text

# The DRAM cache of a running daemon: an arena that the workers copy blocks to and from.
# Invariant: it is there only if every worker has tried the way to the arena at start.
# Never: decides what is stored or loaded; reads or writes the arena.


PATIENCE = CopyDeadlines(load_ms=60_000, store_s=60, counts_waiting=False)
"""Copies come behind steps, which may be long; of a worker that hangs the watchdog takes care."""


class DramCache:
    """The DRAM cache of one daemon: its arena, and what frames tell of it.

    Args:
        tell: takes severity, code and message of an event.
    """

    def __init__(self, tell: Callable[[str, str, str], None]) -> None:
        self.tier: Tier | None = None
        self._reason: str | None = None
        """Why there is none although there is to be one."""
        self._tell = tell

    def open(
        self, plan: BootPlan, router: Router, workers: Supervisor, copies: WorkerCopies
    ) -> None:
        """Attach it to the router, if the plan has room for it; the workers are ready."""
        self.tier = self._reason = None
        num_blocks = 0 if plan.arena is None else plan.arena.num_blocks - 1 - plan.num_staging
        if not num_blocks:
            return
        rates = [state.probes.get(DRAM, 0.0) for state in workers.workers.values()]
        if not all(rates):
            self._reason = "what came back from it at start is not what was sent"
            self._tell("warning", "dram.off", f"there is no DRAM cache: {self._reason}")
            return
        costs, block_bytes = Costs(min(rates)), plan.placement.block_bytes
        tier = self.tier = _tier(num_blocks, block_bytes, router, copies, costs, self._tell)
        router.prefixes.tiers.each.insert(0, tier)
        size, rate = size_text(tier.max_bytes), f"{size_text(min(rates))}/s"
        self._tell("info", "dram.on", f"DRAM cache of {size}, copied to and from at {rate}")

    def frame(self) -> TierFrame | None:
        """How it stands; None: nobody wants one."""
        if self.tier is not None:
            return frame_of(self.tier)
        return None if self._reason is None else TierFrame("failed", self._reason, "")

    def close(self) -> None:
        """The router is about to go: end its jobs, and unmap."""
        self.tier = self._reason = None


def _tier(
    num_blocks: int,
    block_bytes: int,
    router: Router,
    copies: WorkerCopies,
    costs: Costs,
    tell: Callable[[str, str, str], None],
) -> Tier:
    loop = asyncio.get_running_loop()

    def report(job: Job) -> None:
        tier.done(job)

    head = SlabHead(0, PAGE, num_blocks, bytes(DIGEST_BYTES))
    arena = CacheArena(head, worker_of(router), copies, report)
    context = Context(
        router.ledger,
        DRAM,
        SlabIndex(),
        arena,
        block_bytes,
        now_ns=time.monotonic_ns,
        now_s=lambda: int(time.time()),
        later=loop.call_later,
        tell=tell,
        patience=PATIENCE,
        numbers=router.prefixes.tiers.numbers,
    )
    tier = Tier(
        context,
        num_blocks,
        costs,
        Prediction(router).prompt_ms,
        changed=lambda: router.dispatch(time.monotonic_ns()),
    )
    return tier


# --------------------------------------------------------------------------------------------------


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
        self, plan: BootPlan, hasher: PromptHasher | None, router: Router, workers: Supervisor
    ) -> None:
        """Attach them to the router; what is wrong is said.

        Args:
            plan: what is served.
            hasher: of its prompts; None: there is no prefix cache, so none of these.
            router: gets the tiers.
            workers: that are ready.
        """
        copies = WorkerCopies(workers.send, asyncio.get_running_loop().call_later)
        router.copies.of_tiers = copies
        if hasher is not None:
            self._dram.open(plan, router, workers, copies)
        await self._ssd.open(plan, hasher, router, workers, copies)

    def frames(self) -> dict[str, TierFrame | None]:
        """How they stand, by their names in a frame."""
        return {"dram": self._dram.frame(), "ssd": self._ssd.frame()}

    async def flush(self) -> None:
        """Nobody computes any more: what is warm is stored where it outlives the daemon."""
        await self._ssd.flush()

    async def close(self) -> None:
        """End both caches: store what is warm, then close."""
        self._dram.close()
        await self._ssd.close()
