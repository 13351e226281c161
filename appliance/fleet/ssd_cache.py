"""The SSD cache of a running daemon: its folder and cap, its start, its upkeep and its end.

Owns: the slabs and the threads of the disk, from start to end.
Invariants: whatever is wrong with the folder, the daemon serves, and says that it does so without
this cache; at the end it waits for stores no longer than FLUSH_S.
Never: decides what is stored or loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from appliance.configuration.config import ServeConfig
from appliance.fleet.boot import BootPlan
from appliance.fleet.cache_identity import PromptHasher
from appliance.fleet.tier_parts import Prediction, frame_of
from appliance.frame.protocol import TierFrame
from engine.cache.places import SSD
from engine.schedule.router import Router
from engine.tiers.disk import Disk, probe
from engine.tiers.files import BusyError, Contents, slab_bytes
from engine.tiers.index import SlabIndex
from engine.tiers.jobs import Context, Job
from engine.tiers.loads import Costs
from engine.tiers.slabs import RESERVE_BYTES, Reclaimed, Slabs
from engine.tiers.tier import Tier
from engine.units import size_text

# Where an SSD cache may be, and how large it may grow there.
#
# Owns: the sizes when nobody says, and what of a disk stays free.
# Invariant: what is asked for is granted only as far as the disk has it to spare.
# Never: leaves anything in the folder, or makes it.


FREE_SHARE = 10
"""Without a size, this part of the free disk..."""
MAX_DEFAULT_BYTES = 20 << 30
"""...and at most this."""
ASKED_RESERVE_SHARE = 6
"""Where somebody has said a size, this part of the free disk stays free..."""
MIN_RESERVE_BYTES = 1 << 30
"""...and at least this, and no more than RESERVE_BYTES."""
HINT = "name another folder with --ssd-dir, or do without: --ssd-cache off"


@dataclass(frozen=True, slots=True)
class Allowance:
    """How large the cache may grow."""

    cap_bytes: int
    reserve_bytes: int
    """Of the disk, that stays free."""
    asked_bytes: int | None = None
    """What was asked for, where the disk allows less."""

    @property
    def words(self) -> str:
        """Why it is less than was asked for; empty where it is not."""
        if self.asked_bytes is None:
            return ""
        return (
            f"asked for {size_text(self.asked_bytes)}, the disk allows {size_text(self.cap_bytes)}"
        )


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
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if (problem := _problem(folder, there)) is not None:
        return problem
    free_bytes = shutil.disk_usage(there).free + slab_bytes(folder)
    reserve_bytes, most_bytes = RESERVE_BYTES, min(free_bytes // FREE_SHARE, MAX_DEFAULT_BYTES)
    if isinstance(asked, int):
        share = max(free_bytes // ASKED_RESERVE_SHARE, MIN_RESERVE_BYTES)
        reserve_bytes, most_bytes = min(share, RESERVE_BYTES), asked
    cap_bytes = min(most_bytes, free_bytes - reserve_bytes)
    if cap_bytes <= 0:
        free, reserve = size_text(free_bytes), size_text(reserve_bytes)
        return f"{folder}: of its disk {free} are free, and {reserve} stay so"
    is_cut = isinstance(asked, int) and cap_bytes < asked
    return Allowance(cap_bytes, reserve_bytes, most_bytes if is_cut else None)


def ssd_problem(folder: Path, asked: int | str) -> str | None:
    """What is to be said of settings before they are served; None: nothing."""
    if asked == "off":
        return None
    try:
        allowed = allowance(folder, asked)
    except OSError as error:
        allowed = f"{error.filename or folder}: {error.strerror}"
    if isinstance(allowed, str):
        return f"there would be no SSD cache: {allowed}; {HINT}"
    return f"SSD cache in {folder}: {allowed.words}" if allowed.words else None


def _problem(folder: Path, there: Path) -> str | None:
    """Why no file can be made where the folder is, or would be; None: one can."""
    about = str(folder) if there == folder else f"{folder}: {there}"
    if not there.is_dir():
        return f"{about} is not a folder"
    if there == folder and folder.stat().st_uid != os.geteuid():
        return f"{about} belongs to another user"
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        return f"{about} takes no files: {error.strerror}"
    return None


SWEEP_INTERVAL_S = 60.0
FLUSH_S = 5.0
CLOSE_S = 2.0
_DAY_S = 86_400


@dataclass(frozen=True, slots=True)
class Blocks:
    """What the blocks of the served model are, by which the disk's are judged."""

    fingerprint: bytes
    """Of all that a block's bytes depend on."""
    num_bytes: int
    """Of a block."""
    pool_fds: Mapping[str, int]
    """Memory of the pools, by name."""


def _kept_blocks(plan: BootPlan, hasher: PromptHasher) -> Blocks:
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
        self._pool_fds: list[int] = []
        self._timer: asyncio.TimerHandle | None = None
        self._settled: asyncio.Event | None = None
        """Set when nothing is left to be stored."""

    async def open(self, plan: BootPlan, hasher: PromptHasher | None, router: Router) -> None:
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
            self._off(f"{self.folder}: another process has it; {HINT}")
        except OSError as error:
            self._off(f"{error.filename or self.folder}: {error.strerror}; {HINT}")
        else:
            self._attach(slabs, found, bytes_per_s, blocks, router)
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
            SSD,
            index,
            disk,
            blocks.num_bytes,
            now_ns=time.monotonic_ns,
            now_s=lambda: int(time.time()),
            later=loop.call_later,
            tell=self._tell,
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

    def _say_what_is_there(self, slabs: Slabs, allowed: Allowance) -> None:
        if dropped := _dropped(slabs.reclaimed):
            self._tell("warning", "ssd.reclaimed", f"the SSD cache has dropped {dropped}")
        if allowed.words:
            self._tell("warning", "ssd.limited", f"SSD cache in {self.folder}: {allowed.words}")
        way = (
            "" if slabs.is_direct else "; by the page cache, for the file system has no direct I/O"
        )
        num_blocks = 0 if self.tier is None else len(self.tier.index)
        about = f"{_things(num_blocks, 'block')}, {size_text(num_blocks * slabs.block_bytes)}"
        most = size_text(slabs.max_places * slabs.block_bytes)
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
        self.tier = self._disk = None
        if has_ended:
            if self.slabs is not None:
                self.slabs.close()
            for fd in self._pool_fds:
                os.close(fd)
            self._pool_fds = []


def _open(slabs: Slabs) -> tuple[list[Contents], float]:
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
