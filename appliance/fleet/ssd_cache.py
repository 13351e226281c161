"""Open, maintain and close the SSD cache below the KV pools.

Invariant: the cache gets at most the space that the disk can spare.
Invariant: with a faulty folder the daemon serves without this cache and reports it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from appliance.configuration.settings import ServeConfig
from appliance.daemon.process.disk_reads import read_in_thread
from appliance.fleet.boot import BootPlan
from appliance.fleet.boot_check import NO_PREFIX_CACHE, CacheForecast
from appliance.fleet.placement import MIN_CACHED_BLOCKS, Placement, capacity_text
from appliance.fleet.supervisor import Supervisor
from appliance.observe.frame.tier_frames import TierFrame
from engine.errors import PenstockError
from engine.profile.facts import DISK_BYTES_PER_S, FactKey
from engine.scheduler.cache.hashes import PrefixHasher
from engine.scheduler.cache.topology import DRAM, SSD
from engine.scheduler.offload.arena import WorkerCopies
from engine.scheduler.offload.copy_deadlines import Context, CopyDeadlines
from engine.scheduler.offload.disk import Disk, probe
from engine.scheduler.offload.files import BusyError, ModelShare, SlabContents, slab_bytes
from engine.scheduler.offload.index import SlabIndex
from engine.scheduler.offload.jobs import Job
from engine.scheduler.offload.load_costs import Costs
from engine.scheduler.offload.slab_files import RESERVE_BYTES, Reclaimed, Slabs, full_text
from engine.scheduler.offload.staged_disk import StagedDisk
from engine.scheduler.offload.tier import Tier
from engine.scheduler.router import Router
from engine.system.own_files import check_own_folder, existing_part
from engine.units import size_text


def frame_of(
    tier: Tier, folder: str = "", num_damaged: int = 0, others: Iterable[ModelShare] = ()
) -> TierFrame:
    """Describe a tier for a frame.

    Args:
        num_damaged: damaged blocks found before the tier existed.
        others: what is kept of models that are not served.
    """
    costs, counts, index = tier.costs, tier.counts, tier.index
    other_models: Counter[str] = Counter()
    for share in others:
        other_models[share.model or "unknown model"] += share.num_bytes
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
        regret_ms=costs.excess_load_ms,
        missed_deadlines=counts.missed_deadlines,
        evicted_blocks=index.num_evicted,
        expired_blocks=index.num_expired,
        damaged_blocks=index.num_damaged + num_damaged,
        failed_stores=counts.failed_stores,
        read_bytes_per_s=costs.bytes_per_s,
        limit=tier.limit or "",
        other_models=dict(other_models),
    )


FREE_SHARE = 10
"""Without a configured size, the cache takes this part of the free disk..."""
MAX_DEFAULT_BYTES = 20 << 30
"""...and at most this."""
ASKED_RESERVE_SHARE = 6
"""This part of the free disk stays free under a configured size..."""
MIN_RESERVE_BYTES = 1 << 30
"""...at least this, and at most RESERVE_BYTES."""
HINT = "choose another folder (ssd_dir), or set ssd_cache off"


@dataclass(frozen=True, slots=True)
class SsdAllowance:
    """How large the cache may grow."""

    cap_bytes: int
    reserve_bytes: int
    """Disk bytes that stay free."""
    asked_bytes: int | None = None
    """The configured size, if the disk allows less."""
    full: str = ""
    """Set while the disk is full: the cache keeps its blocks and grows later."""

    @property
    def words(self) -> str:
        """Why the cache is smaller than configured; empty: it is not."""
        if self.asked_bytes is None:
            return self.full
        return (
            f"asked for {size_text(self.asked_bytes)}, the disk allows {size_text(self.cap_bytes)}"
        )


def allowance(folder: Path, asked: int | str) -> SsdAllowance | str:
    """Decide how large the cache may grow, or explain why it cannot exist.

    Args:
        folder: of the cache; it may not exist yet.
        asked: a size in bytes, `auto` or `off`.

    Raises:
        OSError: the disk cannot be examined.
    """
    if asked == "off":
        return "switched off by ssd_cache"
    there = existing_part(folder)
    if (problem := _problem(folder, there)) is not None:
        return problem
    disk, held_bytes = shutil.disk_usage(there), slab_bytes(folder)
    free_bytes = disk.free + held_bytes
    reserve_bytes, most_bytes = RESERVE_BYTES, min(free_bytes // FREE_SHARE, MAX_DEFAULT_BYTES)
    if isinstance(asked, int):
        share = max(free_bytes // ASKED_RESERVE_SHARE, MIN_RESERVE_BYTES)
        reserve_bytes, most_bytes = min(share, RESERVE_BYTES), asked
    if held_bytes > max(free_bytes - reserve_bytes, 0):  # it has become full since they were made
        default_bytes = min(disk.total // FREE_SHARE, MAX_DEFAULT_BYTES)
        full = full_text(disk.free, reserve_bytes)
        cap_bytes = asked if isinstance(asked, int) else default_bytes
        return SsdAllowance(cap_bytes, reserve_bytes, full=full)
    cap_bytes = min(most_bytes, free_bytes - reserve_bytes)
    if cap_bytes <= 0:
        free, reserve = size_text(free_bytes), size_text(reserve_bytes)
        return f"of the disk of {folder} {free} are free, and {reserve} stay so"
    is_cut = isinstance(asked, int) and cap_bytes < asked
    return SsdAllowance(cap_bytes, reserve_bytes, most_bytes if is_cut else None)


def is_ssd_asked_for(config: ServeConfig) -> bool:
    """Say whether the operator set its folder or size, so that losing it is an alert."""
    return config.ssd_dir is not None or isinstance(config.ssd_cache, int)


def ssd_forecast(config: ServeConfig, placement: Placement) -> CacheForecast | None:
    """Predict the SSD cache of a start; None: switched off."""
    folder, asked = config.ssd_folder, config.ssd_cache
    if asked == "off":
        return None
    is_missed = is_ssd_asked_for(config)
    if not config.prefix_cache:
        return CacheForecast(f"no SSD cache: {NO_PREFIX_CACHE}", is_missed)
    try:
        slabs, allowed = _slabs(folder, asked, placement.whole_block_bytes, b"")
    except OSError as error:
        why = f"{error.filename or folder} cannot be looked at ({error.strerror})"
        return CacheForecast(f"no SSD cache: {why}; {HINT}", is_missed)
    except PenstockError as error:
        return CacheForecast(f"no SSD cache: {error}; {HINT}", is_missed)
    most = capacity_text(placement, slabs.max_places, allowed.cap_bytes)
    text = "; ".join(filter(None, (f"SSD cache in {folder}: up to {most}", allowed.words)))
    return CacheForecast(text)


def _slabs(
    folder: Path, asked: int | str, block_bytes: int, fingerprint: bytes, model: str = ""
) -> tuple[Slabs, SsdAllowance]:
    """Return the folder's slabs, not yet opened, and their maximum size.

    Raises:
        PenstockError: the disk cannot hold any.
        OSError: the disk cannot be examined.
    """
    allowed = allowance(folder, asked)
    if isinstance(allowed, str):
        raise PenstockError(allowed)
    slabs = Slabs(folder, block_bytes, fingerprint, allowed.cap_bytes, allowed.reserve_bytes, model)
    if not slabs.max_places:
        files, block = size_text(allowed.cap_bytes), size_text(block_bytes)
        raise PenstockError(f"{files} of files hold no block of {block}")
    return slabs, allowed


def _problem(folder: Path, there: Path) -> str | None:
    """Explain why no file can be made in the folder; None: one can."""
    about = str(folder) if there == folder else f"{there}, where {folder} would be made,"
    if not there.is_dir():
        return f"{about} is not a folder"
    try:
        if there == folder:
            check_own_folder(folder, is_roots_fine=False)
    except OSError as error:
        return f"{error.strerror}"
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        return f"{about} takes no files ({error.strerror})"
    return None


CLOSE_S = 2.0
_DAY_S = 86_400
READS = "stored blocks are being read"
"""Why the cache is not in use while it is opened."""
STAGED_PATIENCE = CopyDeadlines(load_ms=1000, store_s=30)
"""Workers copy, possibly after a step; a hung disk is noticed later."""


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Size and fingerprint of the served model's blocks; they identify usable blocks on disk."""

    fingerprint: bytes
    """A digest of everything that a block's bytes depend on."""
    num_bytes: int
    """Bytes of a block."""
    pool_fds: Mapping[str, int]
    """Memory of the pools in the host and of the staging blocks, by name."""
    slots: range
    """Blocks in host memory that stage the blocks of GPU pools."""
    model: str = ""
    """The model's name, for people."""


def _kept_blocks(plan: BootPlan, hasher: PrefixHasher) -> BlockFormat:
    """Return the format of a plan's blocks; staging buffers are left out."""
    setups = [setup for _, setup in plan.workers]
    pool_fds = {setup.pool.name: setup.pool.fd for setup in setups}
    slots = range(0)
    if plan.arena is not None and plan.num_staging:
        pool_fds[DRAM] = plan.arena.fd
        slots = range(plan.arena.num_blocks - plan.num_staging, plan.arena.num_blocks)
    return BlockFormat(
        hasher.fingerprint,
        plan.placement.whole_block_bytes,
        # its own: a thread that is stuck may use them after the pools were closed
        {name: os.dup(fd) for name, fd in pool_fds.items() if fd is not None},
        slots,
        f"{plan.model_id} in {plan.dtype}",
    )


class SsdCache:
    """Open, maintain and close the daemon's SSD cache, and describe it in frames.

    Args:
        config: its folder, its size, and the days to keep a block (as for the log).
        tell: takes severity, code and message of an event.
    """

    def __init__(self, config: ServeConfig, tell: Callable[[str, str, str], None]) -> None:
        self.folder = config.ssd_folder
        self.tier: Tier | None = None
        self.slabs: Slabs | None = None
        self.reason = READS
        """Why the cache is not in use."""
        self.is_off = False
        """True if the cache will not be opened any more."""
        self._is_asked_for = is_ssd_asked_for(config)
        self._has_failed = False
        """True if the operator configured the cache but it is unavailable."""
        self._asked, self._keep_days = config.ssd_cache, config.log_keep_days
        self._tell = tell
        self._disk: Disk | None = None
        self._staged: StagedDisk | None = None
        """The staging store in front of the disk, for pools on GPUs."""
        self._pool_fds: list[int] = []

    async def open(
        self,
        plan: BootPlan,
        hasher: PrefixHasher | None,
        router: Router,
        workers: Supervisor,
        copies: WorkerCopies,
    ) -> None:
        """Read the stored blocks and attach the cache to the router; report faults."""
        self.is_off = self._has_failed = False
        if hasher is None:
            self._off(NO_PREFIX_CACHE, is_wanted=False)
            return
        blocks = _kept_blocks(plan, hasher)
        self._pool_fds = list(blocks.pool_fds.values())
        if self._asked == "off":
            self._off("switched off by ssd_cache", is_wanted=False)
            return
        copied_per_s = min((w.probes.get(DRAM, 0.0) for w in workers.workers.values()), default=0.0)
        if blocks.slots and not copied_per_s:
            self._off("the trial copy from GPUs to host memory failed")
            return
        try:
            opened = await read_in_thread(
                f"the SSD cache's folder {self.folder}",
                partial(_open, self.folder, self._asked, blocks),
                self._waits,
                late=_OpenedSlabs.close,
            )
        except BusyError:
            self._off(f"{self.folder}: another process has it; {HINT}")
        except OSError as error:
            self._off(f"{error.filename or self.folder}: {error.strerror}; {HINT}")
        except PenstockError as error:
            self._off(f"{error}; {HINT}")
        else:
            slabs = self.slabs = opened.slabs
            bytes_per_s = opened.bytes_per_s
            if plan.known is not None:
                key = FactKey(DISK_BYTES_PER_S, place=str(self.folder))
                bytes_per_s = plan.known.profile.observe(key, bytes_per_s)
            if blocks.slots:  # one half after the other
                bytes_per_s = 1 / (1 / bytes_per_s + 1 / copied_per_s)
            try:
                self._attach(slabs, opened.found, bytes_per_s, blocks, router, copies)
            except PenstockError as error:
                slabs.close()
                self.slabs = None
                self._off(f"{error}; {error.hint}")
                return
            self._say_what_is_there(slabs, opened.allowed, plan.placement)

    def frame(self) -> TierFrame:
        """Describe the cache for a frame."""
        tier = self.tier
        if tier is None or self.slabs is None:
            off = "failed" if self._has_failed else "off"
            state = off if self.is_off else "opening"
            return TierFrame(state, self.reason, str(self.folder))
        num_damaged = self.slabs.reclaimed.num_damaged_records
        return frame_of(tier, str(self.folder), num_damaged, self.slabs.others.shares)

    def _waits(self, about: str) -> None:
        self.reason = about
        self._tell("warning", "ssd.slow", about)

    def _off(self, reason: str, *, is_wanted: bool = True) -> None:
        self.reason, self.is_off = reason, True
        self._has_failed = is_wanted and self._is_asked_for
        if is_wanted and not self._has_failed:  # otherwise an alert reports it
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

        host = router.tier_host
        disk = self._disk = Disk(slabs, blocks.pool_fds, report)
        self._staged = None
        if blocks.slots:
            done = partial(self._tell_tier, disk)
            self._staged = StagedDisk(disk, blocks.slots, host.copier_of, copies, done)
        context = Context(
            host.ledger,
            SSD,
            index,
            self._staged or disk,
            blocks.num_bytes,
            now_ns=time.monotonic_ns,
            now_s=lambda: int(time.time()),
            later=loop.call_later,
            tell=self._tell,
            patience=CopyDeadlines() if self._staged is None else STAGED_PATIENCE,
            numbers=host.numbers,
        )
        self.tier = Tier(
            context,
            slabs.max_places,
            Costs(bytes_per_s),
            host.prompt_ms,
            changed=lambda: router.dispatch(time.monotonic_ns()),
        )
        router.attach_tier(self.tier, is_fastest=False)

    def _say_what_is_there(self, slabs: Slabs, allowed: SsdAllowance, placement: Placement) -> None:
        if dropped := _dropped(slabs.reclaimed):
            self._tell("warning", "ssd.reclaimed", f"the SSD cache deleted {dropped}")
        if allowed.words and not allowed.full:  # of which there is an alert
            self._tell("warning", "ssd.limited", f"SSD cache in {self.folder}: {allowed.words}")
        way = (
            "" if slabs.is_direct else "; through the page cache: the file system lacks direct I/O"
        )
        num_blocks = 0 if self.tier is None else len(self.tier.index)
        if self._staged is not None:
            way += "; to and from GPUs through host memory, not yet tried on a GPU"
        held = size_text(num_blocks * slabs.block_bytes)
        if others := sum(share.num_bytes for share in slabs.others.shares):
            way += f"; {size_text(others)} of other models are kept"
        is_small = slabs.max_places < MIN_CACHED_BLOCKS
        room = f"room for {slabs.max_places * placement.block_size:,} tokens"
        room += ", too little to help" * is_small
        about = f"SSD cache {held} of {size_text(allowed.cap_bytes)} ({room}) in {self.folder}"
        self._tell("warning" if is_small else "info", "ssd.on", about + way)

    def _done(self, disk: Disk, job: Job) -> None:
        if disk is self._disk and self._staged is not None:
            self._staged.told(job)
        else:
            self._tell_tier(disk, job)

    def _tell_tier(self, disk: Disk, job: Job) -> None:
        if self.tier is not None and disk is self._disk:
            self.tier.done(job)

    async def close(self) -> None:
        """Close the folder; a thread stuck in the disk holds it until the process exits."""
        self.reason = READS
        has_ended = self._disk is None or await asyncio.to_thread(self._disk.close, CLOSE_S)
        await asyncio.sleep(0)  # what the threads have reported comes first
        self.tier = self._disk = self._staged = None
        if has_ended:
            if self.slabs is not None:
                self.slabs.close()
            for fd in self._pool_fds:
                os.close(fd)
            self._pool_fds = []


class _OpenedSlabs(NamedTuple):
    slabs: Slabs
    found: list[SlabContents]
    bytes_per_s: float
    """The measured read rate."""
    allowed: SsdAllowance

    def close(self) -> None:
        """Close slabs that are no longer needed."""
        self.slabs.close()


def _open(folder: Path, asked: int | str, blocks: BlockFormat) -> _OpenedSlabs:
    """Open the SSD cache; raises what _slabs() raises."""
    slabs, allowed = _slabs(folder, asked, blocks.num_bytes, blocks.fingerprint, blocks.model)
    try:
        found = slabs.open()
        is_empty = not (found or slabs.others.shares)
        if allowed.full and is_empty and (about := slabs.limit()) is not None:
            raise PenstockError(about)  # all that was there has been dropped
        return _OpenedSlabs(slabs, found, probe(slabs), allowed)
    except (OSError, PenstockError):
        slabs.close()
        raise


def _dropped(reclaimed: Reclaimed) -> str:
    """Describe the files and blocks that were deleted at opening; empty: none."""
    counts = [
        (reclaimed.num_damaged_slabs, "damaged file", ""),
        (reclaimed.num_surplus_slabs, "old file", " beyond the cap"),
        (reclaimed.num_damaged_records, "damaged block", ""),
    ]
    return ", ".join(_things(count, what) + rest for count, what, rest in counts if count)


def _things(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
