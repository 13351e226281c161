"""Present a store of blocks below the pools as a tier.

A block that is used a second time is stored; a queued prompt waits for stored blocks if loading
beats computing. SSD and DRAM differ only by their store. After three misses in a row, deadlines or
errors, nothing is stored or loaded until a probe succeeds.

Invariant: only a queued prompt waits for a tier, at most until a deadline.
Never: stores salted blocks; serves a block with a wrong checksum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

from engine.scheduler.cache.hashes import Hash
from engine.scheduler.offload.copy_deadlines import Context, Counts
from engine.scheduler.offload.index import SlabIndex
from engine.scheduler.offload.jobs import CopyJob, GrowJob, Job, ProbeJob, SweepJob
from engine.scheduler.offload.load_costs import Costs
from engine.scheduler.offload.loads import Loads, PredictMs, Restored, WantedBlocks
from engine.scheduler.offload.stores import Stores

MAX_MISSES = 3
MAX_DECLINED = 8
"""Loads declined in a row before the disk's rate is measured again."""
MAX_PARTS = 16
"""Maximum parts in which a prompt is loaded, each of the maximum size."""
PROBE_DEADLINE_S = 1.0
PROBE_INTERVAL_S = 10.0


class Tier:
    """Run one tier below the pools on the daemon's loop: index, loads, stores, its health.

    Args:
        context: the pools, the disk and the clocks.
        changed: called when a prompt stops waiting, or blocks of a pool are free again.
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
        """Why nothing is stored or loaded now; None: it works."""
        self.costs = costs
        self._context = context
        self._max_places = max_places
        self._changed = changed
        self._predict_ms = predict_ms
        self._num_misses = 0
        self._decisions: Counter[int] = Counter()
        """Decisions per queued seq_id..."""
        self._undecided: set[int] = set()
        """...and the sequences that got a part, and may get more."""
        self._loads = Loads(context, costs, predict_ms, self._ended)
        self._stores = Stores(context, max_places, self._hangs)

    @property
    def index(self) -> SlabIndex:
        """The index of its blocks."""
        return self._context.index

    @property
    def counts(self) -> Counts:
        """What this tier has done since the daemon's start."""
        return self._context.counts

    @property
    def label(self) -> str:
        """Its name in a sentence: `DRAM`, `the SSD`."""
        return self._context.label

    @property
    def max_bytes(self) -> int:
        """Maximum bytes of blocks under its cap."""
        return self._max_places * self._context.block_bytes

    @property
    def num_bytes(self) -> int:
        return len(self.index) * self._context.block_bytes

    @property
    def limit(self) -> str | None:
        """Why it holds less than its cap; None: it does not."""
        return self._stores.limit

    @property
    def num_waiting(self) -> int:
        """Prompts that wait for blocks."""
        return len(self._loads)

    # What the router asks

    def has_decided(self, seq_id: int) -> bool:
        """Say whether a queued sequence was decided before."""
        return seq_id in self._decisions and seq_id not in self._undecided

    def decide(self, wanted: WantedBlocks) -> None:
        """Load blocks of a queued prompt, if that is worth it."""
        self._decisions[wanted.seq_id] += 1
        self._undecided.discard(wanted.seq_id)
        if self.reason is None and self._context.store.reach(wanted.pool) is not None:
            self._loads.begin(wanted)
            if self.costs.num_declined_in_a_row >= MAX_DECLINED:
                self.costs.num_declined_in_a_row = 0
                self._context.store.begin(ProbeJob())

    def is_loading(self, seq_id: int) -> bool:
        """Say whether a sequence waits for its blocks."""
        return seq_id in self._loads

    def end_wait(self, seq_id: int) -> Restored | None:
        """End the wait of an admitted or ended sequence; return its outcome."""
        self._decisions.pop(seq_id, None)
        self._undecided.discard(seq_id)
        return self._loads.end_wait(seq_id)

    def placed(self, found: list[Hash], missing: list[Hash]) -> None:
        """Count the use of a prompt's blocks before its first computation.

        Args:
            found: hashes of its leading blocks, and of a snapshot, in the pool and without salt.
            missing: of its other full blocks.
        """
        self.index.touch(found)
        self._stores.used_again(found)
        self._stores.asked(missing)

    def preempted(self, pool: str, hashes: list[Hash], num_tokens: int) -> bool:
        """Store a preempted sequence's blocks, if storing and loading beats computing.

        Args:
            hashes: of the leading blocks of its chain, and of a snapshot, all in the pool and
                without salt.

        Returns:
            True: they are stored, or will be.
        """
        context, index = self._context, self.index
        missing = [block_hash for block_hash in hashes if not index.is_known(block_hash)]
        if self.reason is not None or context.store.reach(pool) is None:
            return False
        if not missing:
            return True
        size = context.block_bytes
        compute_ms = self._predict_ms(pool, num_tokens, 0)
        if compute_ms is None:
            return False
        if not self.costs.is_worth_storing(len(missing) * size, len(hashes) * size, compute_ms):
            return False
        self._stores.store_now(pool, missing)
        return True

    def computed(self, hashes: list[Hash]) -> None:
        """Note full, published blocks without salt."""
        self._stores.used(hashes)

    # What the daemon says

    def done(self, job: Job) -> None:
        """Take in a completed job, on the loop."""
        if isinstance(job, CopyJob) and job.life != self._context.books_of(job).life:
            job.num_done, job.is_void = 0, True  # the pool's memory was lost meanwhile
        match job:
            case CopyJob(copy=copy) if copy.from_pool == self._context.name:
                self._loaded(job)
            case CopyJob():
                self._stores.done(job)
                if job.num_done:
                    self.costs.stored(job.num_done * self._context.block_bytes, job.elapsed_ms)
                self._changed()  # a sequence may wait for its blocks
            case GrowJob():
                self._stores.grown(job)
            case SweepJob():
                self._swept(job)
            case ProbeJob():
                self._probed(job)
        self._stores.pump()

    def sweep(self) -> None:
        """Expire old records, and notice deleted slabs; called periodically."""
        now_s = self._context.now_s()
        places = self.index.expire(now_s)
        self._context.store.begin(SweepJob(places=places, oldest_s=self.index.oldest_s(now_s)))

    def clear(self) -> int:
        """Erase the whole cache; return the number of blocks."""
        count = len(self.index)
        self._stores.drop_waiting()
        self._context.store.begin(SweepJob(places=self.index.clear()))
        return count

    def drop_waiting(self) -> None:
        """Store nothing more than what is under way."""
        self._stores.drop_waiting()

    def flush(self) -> None:
        """Store recently used blocks: the pools above end soon."""
        self._stores.flush()

    @property
    def num_pending(self) -> int:
        """Blocks being stored, or waiting to be."""
        return self._stores.num_pending

    # The disk

    def _loaded(self, job: CopyJob) -> None:
        if job.is_damaged:
            about = f"a block on disk is damaged: {job.error}; erased; prompts recompute it"
            self._tell("warning", "damaged", about)
        elif job.error is not None and not job.is_void:
            self._missed(f"reading fails: {job.error}")
        elif not job.is_void:
            self._num_misses = 0
        self._loads.done(job)
        if damaged := self.index.damaged():
            self._context.store.begin(SweepJob(places=damaged))

    def _ended(self, seq_id: int, is_in_time: bool, has_more: bool) -> None:
        if has_more and self._decisions[seq_id] < MAX_PARTS:
            self._undecided.add(seq_id)
        if not is_in_time:
            self._missed("loading a block timed out")
        self._changed()

    @property
    def _kind(self) -> str:
        return self._context.name.upper()

    def _tell(self, severity: str, what: str, message: str) -> None:
        self._context.tell(severity, f"{self._context.name}.{what}", message)

    def _missed(self, about: str) -> None:
        self._num_misses += 1
        if self._num_misses >= MAX_MISSES:
            self._down(about, f", {MAX_MISSES} times in a row")

    def _hangs(self, about: str) -> None:
        self._down(about)
        self._changed()  # what was to be written, and has not been begun, is free

    def _down(self, about: str, how_often: str = "") -> None:
        if self.reason is not None:
            return
        self.reason, self._stores.is_off = about, True
        said = f"the {self._kind} cache is off until a probe succeeds: {about}{how_often}"
        self._tell("warning", "down", said)
        self._probe_later()

    def _probe_later(self) -> None:
        self._context.later(PROBE_INTERVAL_S, partial(self._context.store.begin, ProbeJob()))

    def _probed(self, job: ProbeJob) -> None:
        if self.reason is None:  # it was asked for the rate alone
            self.costs.bytes_per_s = job.bytes_per_s or self.costs.bytes_per_s
            return
        if job.error is not None or job.elapsed_ms > PROBE_DEADLINE_S * 1e3:
            self._probe_later()
            return
        self.reason, self._num_misses, self._stores.is_off = None, 0, False
        self.costs.bytes_per_s = job.bytes_per_s or self.costs.bytes_per_s
        self._tell("info", "up", f"the {self._kind} cache is on again: a probe succeeded")

    def _swept(self, job: SweepJob) -> None:
        for slab in job.lost:
            self.index.remove_slab(slab)
        self.index.erased(job.places[: job.num_done])
        self.index.not_erased(job.places[job.num_done :])
        if job.lost:
            self.counts.lost_slabs += len(job.lost)
            about = f"{len(job.lost)} of its files were deleted; their blocks are lost"
            self._tell("warning", "lost", about)
        if job.error is not None:
            self._stores.refused(job.error)
        else:
            self._stores.looked(self._max_places, job.limit)
