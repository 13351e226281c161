"""Decide which blocks of the pools to store in a tier, and store them.

Invariant: blocks being stored are named by an open command until the copy is done.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from itertools import islice

from engine.scheduler.cache.hashes import Hash, border_of
from engine.scheduler.offload.copy_deadlines import Context
from engine.scheduler.offload.index import LOW_WATERMARK, IndexEntry
from engine.scheduler.offload.jobs import CopyJob, GrowJob, SweepJob
from engine.wire.messages import Copy

STORED_AT_ONCE = 4
"""Maximum blocks being stored; they cannot be evicted meanwhile."""
URGENT_BYTES = 4 << 20
"""Approximate bytes of an urgent store's job; its blocks are free after each job."""
PAUSE_S = 10.0
"""Pause after the disk has rejected a block."""
LOOK_S = 5.0
"""Interval of checks on a disk with less space than the cache's cap."""
MAX_REMEMBERED = 1 << 16
"""Maximum remembered blocks to store, and as many candidates."""


class Stores:
    """Run the stores to one tier, and choose what to store.

    Args:
        hangs: called with the reason when the disk takes too long.
    """

    def __init__(self, context: Context, max_places: int, hangs: Callable[[str], None]) -> None:
        self.max_places = max_places
        self.is_off = False
        """Whether the tier is out of use after failures."""
        self._context = context
        self._hangs = hangs
        self._under_way: set[CopyJob] = set()
        self._last_done_ns = 0
        self._wanted: OrderedDict[Hash, None] = OrderedDict()
        """Blocks to store, the oldest first."""
        self._warm: OrderedDict[Hash, None] = OrderedDict()
        """Blocks used once; the newest last."""
        self._again: OrderedDict[Hash, None] = OrderedDict()
        """Blocks needed again after eviction: stored once they are computed."""
        self._grows = False
        self._is_full = False
        """Whether no slab can be made."""
        self._shortage: str | None = None
        self._refusal: str | None = None
        self._paused_until_ns = 0
        self._will_look = False

    @property
    def limit(self) -> str | None:
        """Why it holds less than its cap at the last check; None: it does not."""
        return self._refusal or self._shortage

    def used_again(self, hashes: Iterable[Hash]) -> None:
        """Store blocks that were found in a pool again."""
        for block_hash in hashes:
            self._warm.pop(block_hash, None)
            if not self._context.index.is_known(block_hash):
                self._wanted[block_hash] = None
        _shorten(self._wanted)
        self.pump()

    def asked(self, hashes: Iterable[Hash]) -> None:
        """Note blocks that a prompt needs and no pool on its route has."""
        for block_hash in hashes:
            if block_hash in self._warm and not self._context.index.is_known(block_hash):
                del self._warm[block_hash]
                self._again[block_hash] = None
        _shorten(self._again)

    def store_now(self, pool: str, hashes: Iterable[Hash]) -> None:
        """Store blocks at once for waiting sequences; each block is theirs when stored.

        Blocks without a place now are stored later, if they still exist.
        """
        context, left = self._context, deque(hashes)
        if not self._can_store:
            return
        per_job = max(URGENT_BYTES // context.block_bytes, 1)
        while left:
            context.index.evict(self.max_places)
            entries: list[IndexEntry] = []
            block_ids: list[int] = []
            while left and len(entries) < per_job:
                kv_pool = context.ledger.pools[pool]
                block_id = kv_pool.index.block_of(left[0])
                if block_id is None or kv_pool.windows.are_missing(block_id):
                    break
                entry = self._begin_store(pool, left[0])
                if entry is None:
                    break
                left.popleft()
                entries.append(entry)
                block_ids.append(block_id)
            if not entries:
                break
            self._begin(pool, block_ids, entries, is_urgent=True)
        for block_hash in reversed(left):
            self._wanted[block_hash] = None
            self._wanted.move_to_end(block_hash, last=False)
        self.pump()

    def used(self, hashes: Iterable[Hash]) -> None:
        """Note computed blocks that may be useful again."""
        for block_hash in hashes:
            if block_hash in self._again:
                del self._again[block_hash]
                self._wanted[block_hash] = None
            else:
                self._warm[block_hash] = None
                self._warm.move_to_end(block_hash)
        _shorten(self._warm)
        _shorten(self._wanted)
        self.pump()

    def pump(self) -> None:
        """Start waiting stores, as many as allowed at once."""
        context = self._context
        while self._can_store and self._wanted and len(self._under_way) < STORED_AT_ONCE:
            block_hash = next(iter(self._wanted))
            found = self._find(block_hash)
            if found is None or context.index.is_known(block_hash):
                del self._wanted[block_hash]
                continue
            context.index.evict(self.max_places)
            pool, block_id = found
            entry = self._begin_store(pool, block_hash)
            if entry is None:
                self._grow()
                return
            del self._wanted[block_hash]
            self._begin(pool, [block_id], [entry])

    def _begin_store(self, pool: str, block_hash: Hash) -> IndexEntry | None:
        """Choose a block's place; a snapshot saves there what it saves in the pool."""
        index, worths = self._context.index, self._context.ledger.pools[pool].index.worths
        border = border_of(block_hash)
        if border is None:
            return index.begin_store(block_hash, self._context.now_s())
        entry = index.begin_store(block_hash, self._context.now_s(), worths.of(border))
        for later, saved in worths.items():
            if entry is not None and saved.before == border:
                index.worths.change(later, saved)
        return entry

    def _begin(
        self, pool: str, block_ids: list[int], entries: list[IndexEntry], *, is_urgent: bool = False
    ) -> None:
        context, copy_id = self._context, next(self._context.numbers)
        pairs = [(block_id, place) for place, block_id in enumerate(block_ids)]
        copy = Copy(copy_id, pool, context.name, pairs, None)
        kv_pool = context.ledger.pools[pool]
        windows = kv_pool.windows
        beside = [list(windows.of(b)) for b in block_ids] if windows.num_each else []
        job = CopyJob(
            copy=copy, life=kv_pool.life, entries=entries, is_urgent=is_urgent, windows=beside
        )
        self._pin(job, 1)
        who = context.store.reach(pool) or context.name
        context.ledger.open_command(("store", copy_id, 0), who, {pool: block_ids})
        self._under_way.add(job)
        context.store.begin(job)
        context.later(context.patience.store_s, lambda: self._is_due(job))

    def _pin(self, job: CopyJob, count: int) -> None:
        """Keep the window blocks of a job's blocks where they are, or no longer."""
        kv_pool = self._context.books_of(job)
        for block_id, _ in job.copy.pairs if job.windows else ():
            kv_pool.windows.pins[block_id] += count
            kv_pool.need_windows(block_id, count)

    def _is_due(self, job: CopyJob) -> None:
        """Cancel an overdue store, unless the disk is still working on earlier ones."""
        if job not in self._under_way:
            return
        context = self._context
        left_s = context.patience.store_s - (context.now_ns() - self._last_done_ns) / 1e9
        if left_s > 0:
            context.later(left_s, lambda: self._is_due(job))
            return
        for waiting in list(self._under_way - context.overdue):
            if context.store.cancel(waiting):
                self.done(waiting)
            else:
                context.is_late(waiting)
        self._hangs(f"no block was stored in {context.patience.store_s:.0f} s")

    @property
    def _can_store(self) -> bool:
        return not self.is_off and self._context.now_ns() >= self._paused_until_ns

    def _find(self, block_hash: Hash) -> tuple[str, int] | None:
        for name, kv_pool in self._context.ledger.pools.items():
            block_id = kv_pool.index.block_of(block_hash)
            if block_id is None or kv_pool.windows.are_missing(block_id):
                continue
            if self._context.store.reach(name) is not None:
                return name, block_id
        return None

    def _grow(self) -> None:
        if self._is_full:
            self._wanted.clear()  # every place is being written or read, or no place exists
        elif not self._grows:
            self._grows = True
            self._context.store.begin(GrowJob(unused_since_s=self._context.index.unused_since_s))

    def grown(self, job: GrowJob) -> None:
        """Take in a new slab, or note that none can be made."""
        self._grows = False
        if job.made is not None:
            self._context.index.add_slab(job.made.number, job.made.num_records)
            self._refusal = self._shortage = None
        elif job.error is not None:
            self.refused(job.error)
        else:
            self._is_full = True
            self.max_places = self._context.index.num_places
            self._is_short(job.limit)

    def looked(self, max_places: int, limit: str | None) -> None:
        """Update the disk's limit after a check."""
        self._is_short(limit)
        if limit is None:
            self._is_full, self.max_places = False, max_places

    def _is_short(self, limit: str | None) -> None:
        self._shortage = limit
        if limit is not None and not self._will_look:
            self._will_look = True
            self._context.later(LOOK_S, self._look)

    def _look(self) -> None:
        self._will_look = False
        self._context.store.begin(SweepJob(places=[]))

    def done(self, job: CopyJob) -> None:
        """Take in a completed or failed store."""
        if job not in self._under_way:  # it was cancelled, and a thread has come to it since
            return
        context = self._context
        self._last_done_ns = context.now_ns()
        self._under_way.discard(job)
        context.answered(job)
        context.ledger.close_command(("store", job.copy.copy_id, 0))
        self._pin(job, -1)
        for number, entry in enumerate(job.entries):
            context.index.end_store(entry, is_written=number < job.num_done)
        context.counts.stored_blocks += job.num_done
        if job.num_done:
            self._refusal = None
        if job.error is not None and not job.is_void:
            context.counts.failed_stores += 1
            self.refused(job.error)

    def refused(self, error: str) -> None:
        """Pause after the disk rejected a block."""
        context = self._context
        if self._can_store and self._refusal is None:
            about = f"{context.label} accepts no blocks: {error}; retry every {PAUSE_S:.0f} s"
            context.tell("warning", f"{context.name}.refused", about)
        self._refusal = f"it accepts no blocks: {error}"
        self._paused_until_ns = context.now_ns() + int(PAUSE_S * 1e9)
        context.later(PAUSE_S, self.pump)

    def flush(self) -> None:
        """Store recently used blocks, the newest first and as many as fit: the pools end soon."""
        self._context.store.write_share = 1.0
        most = int(self.max_places * LOW_WATERMARK)
        self._wanted.update(dict.fromkeys(islice(reversed(self._warm), most)))
        self._warm.clear()
        self.pump()

    def drop_waiting(self) -> None:
        """Drop all waiting stores."""
        self._wanted.clear()
        self._warm.clear()
        self._again.clear()

    @property
    def num_pending(self) -> int:
        """Blocks being stored, or waiting to be."""
        return len(self._under_way) + (len(self._wanted) if self._can_store else 0)


def _shorten(hashes: OrderedDict[Hash, None]) -> None:
    while len(hashes) > MAX_REMEMBERED:
        hashes.popitem(last=False)
