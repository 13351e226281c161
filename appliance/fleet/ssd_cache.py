"""The SSD cache of a running daemon: its start, its upkeep and its end.

Owns: the slabs and the threads of the disk, from start to end.
Invariants: whatever is wrong with the folder, the daemon serves, and says that it does so without
this cache; at the end it waits for stores no longer than FLUSH_S.
Never: decides what is stored or loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from appliance.configuration.config import ServeConfig
from appliance.fleet.boot import BootPlan
from appliance.fleet.cache_identity import PromptHasher
from appliance.fleet.ssd_room import HINT, SsdAllowance, allowance
from appliance.fleet.supervisor import Supervisor
from appliance.fleet.tier_parts import Prediction, frame_of, worker_of
from appliance.frame.protocol import TierFrame
from engine.cache.places import DRAM, SSD
from engine.schedule.router import Router
from engine.tiers.arena import WorkerCopies
from engine.tiers.disk import Disk, probe
from engine.tiers.files import BusyError, SlabContents
from engine.tiers.index import SlabIndex
from engine.tiers.jobs import Context, CopyDeadlines, Job
from engine.tiers.loads import Costs
from engine.tiers.slabs import Reclaimed, Slabs
from engine.tiers.staging import StagedDisk
from engine.tiers.tier import Tier
from engine.units import size_text

SWEEP_INTERVAL_S = 60.0
FLUSH_S = 5.0
CLOSE_S = 2.0
_DAY_S = 86_400
STAGED_PATIENCE = CopyDeadlines(load_ms=1000, store_s=30)
"""Where workers copy, which may be behind a step; a disk that hangs is found out later."""


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Size and fingerprint of the served model's blocks, by which those on disk are judged."""

    fingerprint: bytes
    """Of all that a block's bytes depend on."""
    num_bytes: int
    """Of a block."""
    pool_fds: Mapping[str, int]
    """Memory of the pools, by name: those in the host's memory, and that of the slots."""
    slots: range
    """Blocks in the host's memory, by way of which those go that are on GPUs."""


def _kept_blocks(plan: BootPlan, hasher: PromptHasher) -> BlockFormat:
    """What is kept of a plan's pools, rings left out."""
    setups = [setup for _, setup in plan.workers]
    pool_fds = {setup.pool.name: setup.pool.fd for setup in setups}
    slots = range(0)
    if plan.arena is not None and plan.num_staging:
        pool_fds[DRAM] = plan.arena.fd
        slots = range(plan.arena.num_blocks - plan.num_staging, plan.arena.num_blocks)
    return BlockFormat(
        hasher.fingerprint,
        plan.placement.block_bytes,
        # its own: a thread that is stuck may use them after the pools were closed
        {name: os.dup(fd) for name, fd in pool_fds.items() if fd is not None},
        slots,
    )


class SsdCache:
    """The SSD cache of one daemon: start, upkeep, end, and what frames tell of it.

    Args:
        config: where it is kept, how large it may be, and how long a block is kept: as the log.
        tell: takes severity, code and message of an event.
    """

    def __init__(self, config: ServeConfig, tell: Callable[[str, str, str], None]) -> None:
        self.folder = config.ssd_folder
        self.tier: Tier | None = None
        self.slabs: Slabs | None = None
        self.reason = "it is being opened"
        """Why there is no tier."""
        self.is_off = False
        """For good."""
        self._is_asked_for = config.ssd_dir is not None or isinstance(config.ssd_cache, int)
        self._has_failed = False
        """There is none although somebody has asked for one."""
        self._asked, self._keep_days = config.ssd_cache, config.log_keep_days
        self._tell = tell
        self._disk: Disk | None = None
        self._staged: StagedDisk | None = None
        """In front of the disk, where pools are on GPUs."""
        self._pool_fds: list[int] = []
        self._timer: asyncio.TimerHandle | None = None
        self._settled: asyncio.Event | None = None
        """Set when nothing is left to be stored."""

    async def open(
        self,
        plan: BootPlan,
        hasher: PromptHasher | None,
        router: Router,
        workers: Supervisor,
        copies: WorkerCopies,
    ) -> None:
        """Read what is there, and attach it to the router; what is wrong is said."""
        self.is_off = self._has_failed = False
        if hasher is None:
            self._off("it keeps the prefix cache, which is off", is_wanted=False)
            return
        blocks = _kept_blocks(plan, hasher)
        self._pool_fds = list(blocks.pool_fds.values())
        try:
            allowed = allowance(self.folder, self._asked)
            if isinstance(allowed, str):
                hint = "" if self._asked == "off" else f"; {HINT}"
                self._off(f"{allowed}{hint}", is_wanted=self._asked != "off")
                return
            copied_per_s = min(
                (w.probes.get(DRAM, 0.0) for w in workers.workers.values()), default=0.0
            )
            if blocks.slots and not copied_per_s:
                self._off("what went from GPUs to the host's memory at start did not come back")
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
            self._off(f"{self.folder}: another process has it; {HINT}")
        except OSError as error:
            self._off(f"{error.filename or self.folder}: {error.strerror}; {HINT}")
        else:
            if blocks.slots:  # one half after the other
                bytes_per_s = 1 / (1 / bytes_per_s + 1 / copied_per_s)
            self._attach(slabs, found, bytes_per_s, blocks, router, copies)
            self._say_what_is_there(slabs, allowed)

    def frame(self) -> TierFrame:
        """The state of the cache, as a part of a frame."""
        tier = self.tier
        if tier is None or self.slabs is None:
            off = "failed" if self._has_failed else "off"
            state = off if self.is_off else "opening"
            return TierFrame(state, self.reason, str(self.folder))
        num_damaged = self.slabs.reclaimed.num_damaged_records
        return frame_of(tier, str(self.folder), num_damaged)

    def _off(self, reason: str, *, is_wanted: bool = True) -> None:
        self.reason, self.is_off = reason, True
        self._has_failed = is_wanted and self._is_asked_for
        if is_wanted and not self._has_failed:  # else there is an alert, which tells the same
            self._tell("warning", "ssd.off", f"there is no SSD cache: {reason}")

    def _attach(
        self,
        slabs: Slabs,
        found: list[SlabContents],
        bytes_per_s: float,
        blocks: BlockFormat,
        router: Router,
        copies: WorkerCopies,
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
        self._staged = None
        if blocks.slots:
            done = partial(self._tell_tier, disk)
            self._staged = StagedDisk(disk, blocks.slots, worker_of(router), copies, done)
        context = Context(
            router.ledger,
            SSD,
            index,
            self._staged or disk,
            blocks.num_bytes,
            now_ns=time.monotonic_ns,
            now_s=lambda: int(time.time()),
            later=loop.call_later,
            tell=self._tell,
            patience=CopyDeadlines() if self._staged is None else STAGED_PATIENCE,
            numbers=router.prefixes.tiers.numbers,
        )
        self.tier = Tier(
            context,
            slabs.max_places,
            Costs(bytes_per_s),
            Prediction(router).prompt_ms,
            changed=lambda: router.dispatch(time.monotonic_ns()),
        )
        router.prefixes.tiers.each.append(self.tier)
        self._sweep()

    def _say_what_is_there(self, slabs: Slabs, allowed: SsdAllowance) -> None:
        if dropped := _dropped(slabs.reclaimed):
            self._tell("warning", "ssd.reclaimed", f"the SSD cache has dropped {dropped}")
        if allowed.words:
            self._tell("warning", "ssd.limited", f"SSD cache in {self.folder}: {allowed.words}")
        way = (
            "" if slabs.is_direct else "; by the page cache, for the file system has no direct I/O"
        )
        num_blocks = 0 if self.tier is None else len(self.tier.index)
        if self._staged is not None:
            way += "; to and from GPUs by way of the host's memory, which no GPU has proved yet"
        about = f"{_things(num_blocks, 'block')}, {size_text(num_blocks * slabs.block_bytes)}"
        most = size_text(slabs.max_places * slabs.block_bytes)
        self._tell("info", "ssd.on", f"SSD cache in {self.folder}: {about} of {most}{way}")

    def _done(self, disk: Disk, job: Job) -> None:
        if disk is self._disk and self._staged is not None:
            self._staged.told(job)
        else:
            self._tell_tier(disk, job)

    def _tell_tier(self, disk: Disk, job: Job) -> None:
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
        if self.tier is None or self.tier.reason is not None:  # a disk that hangs is not waited for
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
        self.tier = self._disk = self._staged = None
        if has_ended:
            if self.slabs is not None:
                self.slabs.close()
            for fd in self._pool_fds:
                os.close(fd)
            self._pool_fds = []


def _open(slabs: Slabs) -> tuple[list[SlabContents], float]:
    """What is in the folder, and bytes per second at which it is read."""
    try:
        found = slabs.open()
        return found, probe(slabs)
    except OSError:
        slabs.close()
        raise


def _dropped(reclaimed: Reclaimed) -> str:
    """What was in the folder and is not served, in words; empty: nothing."""
    parts = []
    if reclaimed.num_foreign_slabs:
        size = size_text(reclaimed.num_foreign_bytes)
        blocks = _things(reclaimed.num_foreign_records, "block")
        parts.append(f"{blocks} ({size}) of another model, dtype or layout than is served now")
    counts = [
        (reclaimed.num_damaged_slabs, "damaged file", ""),
        (reclaimed.num_surplus_slabs, "file", " beyond the cap"),
        (reclaimed.num_damaged_records, "damaged block", ""),
    ]
    parts += [_things(count, what) + rest for count, what, rest in counts if count]
    return ", ".join(parts)


def _things(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
