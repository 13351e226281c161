"""Blocks on their way from pools to a tier.

A block is stored when it is used a second time, found or computed: most prompts are never seen
again. What was used once is remembered, and stored when the daemon ends.
Owns: which blocks are to be stored, and those that are being stored.
Invariants: what is being stored is named by an open command until the thread is done with it; a
few blocks at a time are, and those of who was preempted. What nobody has said may be stored never
is.
Never: waits; evicts a block of a pool, or keeps one from being evicted before it is its turn.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable

from engine.cache.prefix_index import Hash
from engine.tiers.index import IndexEntry
from engine.tiers.jobs import Context, CopyJob, GrowJob
from engine.wire.messages import Copy

STORED_AT_ONCE = 4
"""Blocks under way to the disk: those cannot be evicted meanwhile."""
URGENT_BYTES = 4 << 20
"""What others wait for is stored by jobs of about so much, and free after each."""
PAUSE_S = 60.0
"""After the disk has refused to take something."""
MAX_REMEMBERED = 1 << 16
"""Blocks that are to be stored, and as many that may be."""


class Stores:
    """Stores to one tier that are under way, and what is to be stored at the end.

    Args:
        context: of the tier.
        max_places: blocks that the cap has room for.
        hangs: called with the reason when the disk takes too long.
    """

    def __init__(self, context: Context, max_places: int, hangs: Callable[[str], None]) -> None:
        self.max_places = max_places
        self.is_off = False
        """What it is stored to cannot be relied on."""
        self._context = context
        self._hangs = hangs
        self._under_way: set[CopyJob] = set()
        self._last_done_ns = 0
        self._wanted: OrderedDict[Hash, None] = OrderedDict()
        """To be stored, the oldest first."""
        self._warm: OrderedDict[Hash, None] = OrderedDict()
        """Used once; the newest last."""
        self._again: OrderedDict[Hash, None] = OrderedDict()
        """Used again when no pool had them any more: to be stored when they are computed."""
        self._grows = False
        self._is_full = False
        """No slab can be made."""
        self._paused_until_ns = 0

    def used_again(self, hashes: Iterable[Hash]) -> None:
        """Blocks that were found in a pool."""
        for block_hash in hashes:
            self._warm.pop(block_hash, None)
            if not self._context.index.is_known(block_hash):
                self._wanted[block_hash] = None
        _shorten(self._wanted)
        self.pump()

    def asked(self, hashes: Iterable[Hash]) -> None:
        """A prompt needs blocks that are in no pool of its way."""
        for block_hash in hashes:
            if block_hash in self._warm and not self._context.index.is_known(block_hash):
                del self._warm[block_hash]
                self._again[block_hash] = None
        _shorten(self._again)

    def store_now(self, pool: str, hashes: Iterable[Hash]) -> None:
        """Blocks that others are waiting for: each is theirs when it has been stored.

        Those that there is no place for now are stored if they are still there when there is.
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
                blocks = context.ledger.pools[pool].index.blocks([left[0]])
                entry = context.index.begin_store(left[0], context.now_s()) if blocks else None
                if entry is None:
                    break
                left.popleft()
                entries.append(entry)
                block_ids.append(blocks[0])
            if not entries:
                break
            self._begin(pool, block_ids, entries, is_urgent=True)
        for block_hash in reversed(left):
            self._wanted[block_hash] = None
            self._wanted.move_to_end(block_hash, last=False)
        self.pump()

    def used(self, hashes: Iterable[Hash]) -> None:
        """Blocks that were computed, which might be of use again."""
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
        """Store what is to be, as much at once as may be."""
        context = self._context
        while self._can_store and self._wanted and len(self._under_way) < STORED_AT_ONCE:
            block_hash = next(iter(self._wanted))
            found = self._find(block_hash)
            if found is None or context.index.is_known(block_hash):
                del self._wanted[block_hash]
                continue
            context.index.evict(self.max_places)
            entry = context.index.begin_store(block_hash, context.now_s())
            if entry is None:
                self._grow()
                return
            del self._wanted[block_hash]
            pool, block_id = found
            self._begin(pool, [block_id], [entry])

    def _begin(
        self, pool: str, block_ids: list[int], entries: list[IndexEntry], *, is_urgent: bool = False
    ) -> None:
        context, copy_id = self._context, next(self._context.numbers)
        pairs = [(block_id, place) for place, block_id in enumerate(block_ids)]
        copy = Copy(copy_id, pool, context.name, pairs, None)
        life = context.ledger.pools[pool].life
        job = CopyJob(copy=copy, life=life, entries=entries, is_urgent=is_urgent)
        who = context.store.reach(pool) or context.name
        context.ledger.open_command(("store", copy_id, 0), who, {pool: block_ids})
        self._under_way.add(job)
        context.store.begin(job)
        context.later(context.patience.store_s, lambda: self._is_due(job))

    def _is_due(self, job: CopyJob) -> None:
        """It has had its time; unless others were before it, and the disk goes on."""
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
        self._hangs(f"no block was written in {context.patience.store_s:.0f} s")

    @property
    def _can_store(self) -> bool:
        return not self.is_off and self._context.now_ns() >= self._paused_until_ns

    def _find(self, block_hash: Hash) -> tuple[str, int] | None:
        for name, books in self._context.ledger.pools.items():
            blocks = books.index.blocks([block_hash])
            if blocks and self._context.store.reach(name) is not None:
                return name, blocks[0]
        return None

    def _grow(self) -> None:
        if self._is_full:
            self._wanted.clear()  # every place is being written or read, or there is none
        elif not self._grows:
            self._grows = True
            self._context.store.begin(GrowJob())

    def grown(self, job: GrowJob) -> None:
        """There is another slab, or none can be made."""
        self._grows = False
        if job.made is not None:
            self._context.index.add_slab(job.made.number, job.made.num_records)
        elif job.error is not None:
            self.refused(job.error)
        else:
            self._is_full = True
            self.max_places = self._context.index.num_places

    def made_room(self, max_places: int) -> None:
        """Somebody may have given the disk more room since it was full."""
        self._is_full, self.max_places = False, max_places

    def done(self, job: CopyJob) -> None:
        """Somebody has stored a block, or could not."""
        if job not in self._under_way:  # it was cancelled, and a thread has come to it since
            return
        context = self._context
        self._last_done_ns = context.now_ns()
        self._under_way.discard(job)
        context.answered(job)
        context.ledger.close_command(("store", job.copy.copy_id, 0))
        for number, entry in enumerate(job.entries):
            context.index.end_store(entry, is_written=number < job.num_done)
        context.counts.stored_blocks += job.num_done
        if job.error is not None and not job.is_void:
            context.counts.failed_stores += 1
            self.refused(job.error)

    def refused(self, error: str) -> None:
        """What it is given is not taken: not so fast again."""
        context = self._context
        if self._can_store:
            about = f"{context.label} takes no blocks: {error}; tried again in {PAUSE_S:.0f} s"
            context.tell("warning", f"{context.name}.refused", about)
        self._paused_until_ns = context.now_ns() + int(PAUSE_S * 1e9)
        context.later(PAUSE_S, self.pump)

    def flush(self) -> None:
        """Store what is warm, the newest first: the daemon is about to end."""
        self._context.store.write_share = 1.0
        self._wanted.update(dict.fromkeys(reversed(self._warm)))
        self._warm.clear()
        self.pump()

    def forget(self) -> None:
        """Nothing of what was said so far is to be stored."""
        self._wanted.clear()
        self._warm.clear()
        self._again.clear()

    @property
    def num_pending(self) -> int:
        """Blocks that are being stored, or are to be and can be."""
        return len(self._under_way) + (len(self._wanted) if self._can_store else 0)


def _shorten(hashes: OrderedDict[Hash, None]) -> None:
    while len(hashes) > MAX_REMEMBERED:
        hashes.popitem(last=False)
