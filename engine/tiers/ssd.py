"""The tier below the pools: blocks kept on disk, and whether the disk can be relied on.

A block that is used a second time is stored; a queued prompt waits for blocks on disk where loading
them beats computing them. After three misses in a row, deadlines or errors, nothing is stored or
loaded until a probe has passed.
Owns: which sequences it has decided about, misses, probes.
Invariant: nothing waits for the disk but a queued prompt, and that one no longer than a deadline.
Never: stores what was salted; serves a block whose checksum is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from engine.prefix_hashes import Hash
from engine.tiers.context import TIER, Context, Counts
from engine.tiers.costs import Costs
from engine.tiers.disk import CopyJob, GrowJob, Job, ProbeJob, SweepJob
from engine.tiers.index import SlabIndex
from engine.tiers.loads import Loads, PredictMs, Wanted
from engine.tiers.stores import Stores

MAX_MISSES = 3
PROBE_DEADLINE_S = 1.0
PROBE_INTERVAL_S = 10.0


class SsdTier:
    """All of it, on the daemon's loop.

    Args:
        context: the pools, the disk and the clocks.
        max_places: blocks that the cap has room for.
        costs: what loading takes.
        predict_ms: what computing takes.
        changed: called when a prompt waits no longer.
    """

    def __init__(
        self,
        context: Context,
        max_places: int,
        costs: Costs,
        predict_ms: PredictMs,
        changed: Callable[[], None],
    ) -> None:
        self.reason: str | None = None
        """Why nothing is stored or loaded now; None: it is."""
        self.costs = costs
        self._context = context
        self._max_places = max_places
        self._changed = changed
        self._num_misses = 0
        self._seen: set[int] = set()
        """Queued sequences about which it has been decided."""
        self._loads = Loads(context, costs, predict_ms, self._ended)
        self._stores = Stores(context, max_places)

    @property
    def index(self) -> SlabIndex:
        """What is on disk."""
        return self._context.index

    @property
    def counts(self) -> Counts:
        """Since the start."""
        return self._context.counts

    @property
    def max_bytes(self) -> int:
        """Of all blocks that the cap has room for."""
        return self._max_places * self._context.block_bytes

    @property
    def num_bytes(self) -> int:
        """Of all blocks that are there."""
        return len(self.index) * self._context.block_bytes

    @property
    def num_waiting(self) -> int:
        """Prompts that wait for blocks."""
        return len(self._loads)

    # What the router asks

    def has_decided(self, seq_id: int) -> bool:
        """True if it was asked about a queued sequence before."""
        return seq_id in self._seen

    def decide(self, wanted: Wanted) -> None:
        """Load blocks of a queued prompt, if that is worth it."""
        self._seen.add(wanted.seq_id)
        if self.reason is None and wanted.pool in self._context.pools:
            self._loads.begin(wanted)

    def is_loading(self, seq_id: int) -> bool:
        """True while a sequence waits for the disk."""
        return seq_id in self._loads

    def forget(self, seq_id: int) -> None:
        """It was admitted, or has ended: it waits for nothing."""
        self._seen.discard(seq_id)
        self._loads.forget(seq_id)

    def found(self, hashes: list[Hash]) -> None:
        """A prompt has found blocks of its own in a pool: they are used a second time.

        Args:
            hashes: of the blocks that its chain begins with; none of them salted.
        """
        self.index.touch(hashes)
        self._stores.used_again(hashes)

    def computed(self, hashes: list[Hash]) -> None:
        """Blocks are full, and can be found from now on; none of them is salted."""
        self._stores.used(hashes)

    # What the daemon says

    def done(self, job: Job) -> None:
        """A thread has done something; on the loop."""
        match job:
            case CopyJob(copy=copy) if copy.from_pool == TIER:
                self._loaded(job)
            case CopyJob():
                self._stores.done(job)
            case GrowJob():
                self._stores.grown(job)
            case SweepJob():
                self._swept(job)
            case ProbeJob():
                self._probed(job)
        self._stores.pump()

    def sweep(self) -> None:
        """Once in a while: let go of what is too old, notice slabs that are gone."""
        self._context.disk.begin(SweepJob(places=self.index.expire(self._context.now_s())))

    def clear(self) -> int:
        """Forget all that is on disk, and have it erased; how many blocks that is."""
        count = len(self.index)
        self._stores.forget()
        self._context.disk.begin(SweepJob(places=self.index.clear()))
        return count

    def flush(self) -> None:
        """Store what is warm: the daemon is about to end."""
        self._stores.flush()

    @property
    def num_pending(self) -> int:
        """Blocks that are being stored, or are to be."""
        return self._stores.num_pending

    # The disk

    def _loaded(self, job: CopyJob) -> None:
        if job.is_damaged:
            about = f"a block on disk was damaged ({job.error}) and is computed again"
            self._context.tell("warning", "ssd.damaged", about)
        elif job.error is not None and not job.is_void:
            self._missed(f"reading fails: {job.error}")
        elif not job.is_void:
            self._num_misses = 0
        self._loads.done(job)

    def _ended(self, is_in_time: bool) -> None:
        if not is_in_time:
            self._missed("a block did not come in time")
        self._changed()

    def _missed(self, about: str) -> None:
        self._num_misses += 1
        if self._num_misses < MAX_MISSES or self.reason is not None:
            return
        self.reason, self._stores.is_off = about, True
        said = f"the SSD cache is off until a probe passes: {about}, {MAX_MISSES} times in a row"
        self._context.tell("warning", "ssd.down", said)
        self._probe_later()

    def _probe_later(self) -> None:
        self._context.later(PROBE_INTERVAL_S, partial(self._context.disk.begin, ProbeJob()))

    def _probed(self, job: ProbeJob) -> None:
        if job.error is not None or job.elapsed_ms > PROBE_DEADLINE_S * 1e3:
            self._probe_later()
            return
        self.reason, self._num_misses, self._stores.is_off = None, 0, False
        self.costs.bytes_per_s = job.bytes_per_s or self.costs.bytes_per_s
        self._context.tell("info", "ssd.up", "the SSD cache is on again: a probe has passed")

    def _swept(self, job: SweepJob) -> None:
        for slab in job.lost:
            self.index.remove_slab(slab)
        self.index.erased(job.places[: job.num_done])
        self.index.not_erased(job.places[job.num_done :])
        if job.lost:
            self.counts.lost_slabs += len(job.lost)
            about = f"{len(job.lost)} of its files were deleted by somebody; their blocks are gone"
            self._context.tell("warning", "ssd.lost", about)
        if job.error is not None:
            self._stores.refused(job.error)
        self._stores.made_room(self._max_places)
