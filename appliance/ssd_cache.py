"""The SSD cache of a running daemon: its folder and cap, its start, its upkeep and its end.

Owns: the slabs and the threads of the disk, from start to end; where they are and how large they
may grow when nobody says.
Invariants: whatever is wrong with the folder, the daemon serves, and says that it does so without
this cache; at the end it waits for stores no longer than FLUSH_S.
Never: decides what is stored or loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from appliance.boot import Plan
from appliance.cache_identity import PromptHasher
from appliance.config import ServeConfig
from appliance.ssd_frame import SsdFrame
from engine.router import Router
from engine.tiers.context import Context
from engine.tiers.costs import Costs
from engine.tiers.disk import Disk, Job, probe
from engine.tiers.files import BusyError, Contents, slab_bytes
from engine.tiers.index import SlabIndex
from engine.tiers.slabs import RESERVE_BYTES, Slabs
from engine.tiers.ssd import SsdTier

FREE_SHARE = 10
"""Without a size, this part of the free disk..."""
MAX_DEFAULT_BYTES = 20 << 30
"""...and at most this."""
ASKED_RESERVE_BYTES = 1 << 30
"""That the disk keeps free where somebody has said how large the cache may be."""
SWEEP_INTERVAL_S = 60.0
FLUSH_S = 5.0
CLOSE_S = 2.0
_DAY_S = 86_400


@dataclass(frozen=True, slots=True)
class Allowance:
    """How large the cache may grow."""

    cap_bytes: int
    reserve_bytes: int
    """Of the disk, that stays free."""


def allowance(folder: Path, asked: int | str) -> Allowance | str:
    """How large it may grow, or why there is none.

    Args:
        folder: of the cache, there or not.
        asked: a size in bytes, `auto` or `off`.

    Raises:
        OSError: the disk cannot be looked at.
    """
    if asked == "off":
        return "switched off by ssd_cache"
    if isinstance(asked, int):
        return Allowance(asked, ASKED_RESERVE_BYTES)
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free_bytes = shutil.disk_usage(there).free + slab_bytes(folder)
    cap_bytes = min(free_bytes // FREE_SHARE, MAX_DEFAULT_BYTES, free_bytes - RESERVE_BYTES)
    if cap_bytes <= 0:
        return f"{there}: less than {_gib(RESERVE_BYTES)} are free"
    return Allowance(cap_bytes, RESERVE_BYTES)


@dataclass(frozen=True, slots=True)
class Blocks:
    """What is kept."""

    fingerprint: bytes
    """Of all that a block's bytes depend on."""
    num_bytes: int
    """Of a block."""
    pool_fds: Mapping[str, int]
    """Memory of the pools, by name."""


def _kept_blocks(plan: Plan, hasher: PromptHasher) -> Blocks:
    """What is kept of a plan's pools: those in the host's memory, rings left out."""
    setups = [setup for _, setup in plan.workers]
    pool_fds = {setup.pool.name: setup.pool.fd for setup in setups}
    return Blocks(
        hasher.fingerprint,
        plan.placement.block_bytes,
        # its own: a thread that is stuck may use them after the pools were closed
        {name: os.dup(fd) for name, fd in pool_fds.items() if fd is not None},
    )


class SsdCache:
    """Of one daemon.

    Args:
        config: where it is kept, how large it may be, and how long a block is kept: as the log.
        tell: takes severity, code and message of an event.
    """

    def __init__(self, config: ServeConfig, tell: Callable[[str, str, str], None]) -> None:
        self.folder = config.ssd_folder
        self.tier: SsdTier | None = None
        self.slabs: Slabs | None = None
        self.reason = "it is being opened"
        """Why there is no tier."""
        self.is_off = False
        """For good."""
        self._asked, self._keep_days = config.ssd_cache, config.log_keep_days
        self._tell = tell
        self._disk: Disk | None = None
        self._pool_fds: list[int] = []
        self._timer: asyncio.TimerHandle | None = None
        self._settled: asyncio.Event | None = None
        """Set when nothing is left to be stored."""

    async def open(self, plan: Plan, hasher: PromptHasher | None, router: Router) -> None:
        """Read what is there, and attach it to the router; what is wrong is said."""
        self.is_off = False
        if hasher is None:
            self._off("it keeps the prefix cache, which is off", is_wanted=False)
            return
        blocks = _kept_blocks(plan, hasher)
        self._pool_fds = list(blocks.pool_fds.values())
        try:
            allowed = allowance(self.folder, self._asked)
            if isinstance(allowed, str):
                self._off(allowed, is_wanted=self._asked != "off")
                return
            if not blocks.pool_fds:
                self._off("the KV pools are on a GPU, which it does not reach yet")
                return
            slabs = self.slabs = Slabs(
                self.folder,
                blocks.num_bytes,
                blocks.fingerprint,
                allowed.cap_bytes,
                allowed.reserve_bytes,
            )
            found, bytes_per_s = await asyncio.to_thread(_open, slabs)
        except BusyError:
            self._off(f"{self.folder}: another process has it")
        except OSError as error:
            self._off(f"{error.filename or self.folder}: {error.strerror}")
        else:
            self._attach(slabs, found, bytes_per_s, blocks, router)

    def frame(self) -> SsdFrame:
        """How it stands."""
        tier = self.tier
        if tier is None or self.slabs is None:
            state = "off" if self.is_off else "opening"
            return SsdFrame(state, self.reason, str(self.folder))
        costs, counts, index = tier.costs, tier.counts, tier.index
        return SsdFrame(
            state="on" if tier.reason is None else "down",
            reason=tier.reason or "",
            folder=str(self.folder),
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
            damaged_blocks=index.num_damaged + self.slabs.reclaimed.num_damaged_records,
            failed_stores=counts.failed_stores,
            would_find=_would_find(tier),
            reuse_distances=_distances(tier),
            read_bytes_per_s=costs.bytes_per_s,
        )

    def _off(self, reason: str, *, is_wanted: bool = True) -> None:
        self.reason, self.is_off = reason, True
        if is_wanted:
            self._tell("warning", "ssd.off", f"there is no SSD cache: {reason}")

    def _attach(
        self,
        slabs: Slabs,
        found: list[Contents],
        bytes_per_s: float,
        blocks: Blocks,
        router: Router,
    ) -> None:
        loop = asyncio.get_running_loop()
        index = SlabIndex(self._keep_days * _DAY_S)
        for contents in found:
            head = contents.head
            index.add_slab(head.number, head.num_records, contents.records)
        index.order_by_age()

        def report(job: Job) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._done, disk, job)

        disk = self._disk = Disk(slabs, blocks.pool_fds, report)
        context = Context(
            router.ledger,
            list(blocks.pool_fds),
            index,
            disk,
            blocks.num_bytes,
            now_ns=time.monotonic_ns,
            now_s=lambda: int(time.time()),
            later=loop.call_later,
            tell=self._tell,
        )
        self.tier = SsdTier(
            context,
            slabs.max_places,
            Costs(bytes_per_s),
            _Prediction(router).prompt_ms,
            changed=lambda: router.dispatch(time.monotonic_ns()),
        )
        router.prefixes.tier = self.tier
        self._say_what_is_there(slabs, index)
        self._sweep()

    def _say_what_is_there(self, slabs: Slabs, index: SlabIndex) -> None:
        reclaimed = slabs.reclaimed
        counts = {
            "files of another model or layout": reclaimed.num_foreign_slabs,
            "damaged files": reclaimed.num_damaged_slabs,
            "files beyond the cap": reclaimed.num_surplus_slabs,
            "damaged blocks": reclaimed.num_damaged_records,
        }
        if any(counts.values()):
            words = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
            self._tell("warning", "ssd.reclaimed", f"the SSD cache has dropped {words}")
        way = (
            "" if slabs.is_direct else "; by the page cache, for the file system has no direct I/O"
        )
        about = f"{len(index)} blocks, {_gib(len(index) * slabs.block_bytes)}"
        most = _gib(slabs.max_places * slabs.block_bytes)
        self._tell("info", "ssd.on", f"SSD cache in {self.folder}: {about} of {most}{way}")

    def _done(self, disk: Disk, job: Job) -> None:
        if self.tier is not None and disk is self._disk:
            self.tier.done(job)
            if self._settled is not None and not self.tier.num_pending:
                self._settled.set()

    def _sweep(self) -> None:
        if self.tier is not None:
            self.tier.sweep()
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(SWEEP_INTERVAL_S, self._sweep)

    async def flush(self) -> None:
        """Nobody computes any more: store what is warm, as long as that takes, but for a limit."""
        if self.tier is None:
            return
        self._settled = asyncio.Event()
        self.tier.flush()
        if self.tier.num_pending:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._settled.wait(), FLUSH_S)

    async def close(self) -> None:
        """Let go of the folder; a thread that is stuck in the disk keeps it until we exit."""
        if self._timer is not None:
            self._timer.cancel()
        self.reason = "it is being opened"
        has_ended = self._disk is None or await asyncio.to_thread(self._disk.close, CLOSE_S)
        await asyncio.sleep(0)  # what the threads have reported comes first
        self.tier = self._disk = None
        if has_ended:
            if self.slabs is not None:
                self.slabs.close()
            for fd in self._pool_fds:
                os.close(fd)
            self._pool_fds = []


class _Prediction:
    """What a prompt takes, by what is known of the router's workers."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def prompt_ms(self, pool: str, num_tokens: int, num_before: int) -> float | None:
        """The least of those workers that have their blocks in the pool; None: unknown."""
        places, roles = self._router.places, self._router.roles
        names = [worker.name for worker in places.workers if worker.pool == pool]
        known = [roles.prompt_ms(name, num_tokens, num_before) for name in names]
        return min((each for each in known if each is not None), default=None)


def _open(slabs: Slabs) -> tuple[list[Contents], float]:
    """What is in the folder, and bytes per second at which it is read."""
    try:
        found = slabs.open()
        return found, probe(slabs)
    except OSError:
        slabs.close()
        raise


def _would_find(tier: SsdTier) -> dict[str, float]:
    shares = {f"{ratio:g}": tier.would_find(ratio) for ratio in (0.5, 1, 2, 4)}
    return {ratio: round(share, 4) for ratio, share in shares.items() if share is not None}


def _distances(tier: SsdTier) -> dict[str, int]:
    counts, share = tier.reuse.counts, tier.reuse.share
    return {str(share << bits): counts[bits] for bits in range(max(counts, default=-1) + 1)}


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
