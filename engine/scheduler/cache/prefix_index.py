"""Find a pool's cached blocks by the hash of their content, and choose which to evict.

Among the users with more than an equal share of the hashed blocks, the largest loses its least
recently used block. So one user's flood of prompts evicts only that user's earlier blocks, and
other conversations stay.

Invariants: a hash has one block, and a block one hash; an evicted block is in no table and named by
no command, and has no cached successor in a chain: a tail goes before its head.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.errors import InvariantViolated
from engine.scheduler.cache.hashes import Hash, border_of, record_hashes
from engine.scheduler.cache.published_blocks import PublishedBlocks
from engine.scheduler.cache.snapshot_worths import Saved, SnapshotWorths


@dataclass(slots=True)
class _Hashed:
    hash: Hash
    parent: Hash
    user: str
    released_at: int | None = None
    """When its last user released it; None while it is in use."""

    @property
    def border(self) -> Hash | None:
        """The border of its snapshot; None: it holds keys and values."""
        return border_of(self.hash)


class PrefixIndex:
    """Index one pool's blocks by hash."""

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self._blocks: dict[Hash, int] = {}
        self._hashed: dict[int, _Hashed] = {}
        self._num_behind: Counter[Hash] = Counter()
        """Evictable successors of each hash."""
        self._tails: dict[str, list[tuple[int, int]]] = {}
        """A heap of (released_at, block) per user: all evictable tails, and outdated entries."""
        self.held: Counter[str] = Counter()
        """Hashed blocks by user, in use or not."""
        self.num_evicted = 0
        self.snapshots: dict[Hash, list[int]] = {}
        """The blocks of each snapshot, by the hash of the block before it."""
        self.worths = SnapshotWorths()
        """What each of them saves."""
        self._num_next: Counter[Hash] = Counter()
        """Successors of each hash."""
        self.published: PublishedBlocks | None = None
        """The record of hashes for the next daemon; None: the pool's memory ends with this one."""
        self._now = 0

    def __len__(self) -> int:
        return len(self._hashed)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._hashed

    # Finding

    def has_hash(self, block_hash: Hash) -> bool:
        return block_hash in self._blocks

    def block_of(self, block_hash: Hash) -> int | None:
        """Return the block with a hash; None: none has it."""
        return self._blocks.get(block_hash)

    def hashes(self) -> Iterable[Hash]:
        return self._blocks

    def num_hit(self, hashes: Sequence[Hash]) -> int:
        """Estimate how many leading blocks of a chain are here.

        Tails go before heads, so the end is found by halving. In rare cases an earlier block is
        missing, which `blocks` notices.
        """
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high + 1) // 2
            if hashes[middle - 1] in self._blocks:
                low = middle
            else:
                high = middle - 1
        return low

    def blocks(self, hashes: Sequence[Hash]) -> list[int]:
        """Find the leading blocks of a chain that are here, up to the first missing one."""
        found = []
        for block_hash in hashes:
            block_id = self._blocks.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def border(self, hashes: Sequence[Hash]) -> int:
        """Count a chain's blocks up to the last one with a snapshot; 0: no block has one."""
        places = range(len(hashes), 0, -1)
        return next((n for n in places if hashes[n - 1] in self.snapshots), 0)

    def with_snapshot(self, hashes: list[Hash]) -> list[Hash]:
        """Return the hashes of a chain's blocks, and of the snapshot at their end, if any."""
        record = self.snapshots.get(hashes[-1], []) if hashes else []
        return [*hashes, *(self._hashed[block_id].hash for block_id in record)]

    def border_of(self, block_id: int) -> Hash | None:
        """Return the border whose snapshot a block is in; None: it is in none."""
        hashed = self._hashed.get(block_id)
        return None if hashed is None else hashed.border

    # Hashes

    def publish_snapshot(self, record: list[int], border: Hash, user: str) -> bool:
        """Let others find the record at a border, in blocks that are not written again.

        Returns:
            False: another one is found there already.
        """
        if border in self.snapshots:
            return False
        parent = border
        for block_id, block_hash in zip(record, record_hashes(border, len(record)), strict=True):
            self.publish(block_id, block_hash, parent, user)
            parent = block_hash
        saved = self._saved_at(border)
        if self._num_next[border] > 1:  # besides the record's first block
            for later, (count, before) in self.worths.items():
                if before == saved.before and (since := self._num_since(border, later, count)):
                    self.worths.change(later, Saved(since, border))
        self.worths.add(border, saved)
        self.snapshots[border] = list(record)
        return True

    def _saved_at(self, border: Hash) -> Saved:
        """Walk back from a border to the snapshot before it, as far as its blocks are here."""
        count, before = 0, border
        while (block_id := self._blocks.get(before)) is not None:
            before = self._hashed[block_id].parent
            count += 1
            if before in self.snapshots:
                return Saved(count, before)
        return Saved(count)

    def _num_since(self, border: Hash, later: Hash, most: int) -> int:
        """Count the blocks from a border to a later one, up to `most`; 0: none leads there."""
        for count in range(1, most):
            block_id = self._blocks.get(later)
            if block_id is None:
                return 0
            later = self._hashed[block_id].parent
            if later == border:
                return count
        return 0

    def cheapest_snapshot(self) -> list[int]:
        """Choose the unused snapshot to drop for another one; no blocks if all are in use."""
        border = self.worths.cheapest(
            b for b, r in self.snapshots.items() if self._hashed[r[0]].released_at is not None
        )
        return [] if border is None else self.snapshots[border]

    def publish(self, block_id: int, block_hash: Hash, parent: Hash, user: str) -> bool:
        """Give a hash to a full, computed block in use.

        Returns:
            False: another block has it already, or this one has a hash.
        """
        if block_hash in self._blocks or block_id in self._hashed:
            return False
        self._blocks[block_hash] = block_id
        self._hashed[block_id] = _Hashed(block_hash, parent, user)
        self._num_next[parent] += 1
        self.held[user] += 1
        if self.published is not None:
            self.published.add(block_id, block_hash, parent, user)
        return True

    def remove(self, block_id: int) -> Hash:
        """Remove the hash of a block in use or evicted."""
        if self.published is not None:
            self.published.remove(block_id)
        hashed = self._hashed.pop(block_id)
        del self._blocks[hashed.hash]
        if hashed.border is not None and hashed.border in self.snapshots:
            del self.snapshots[hashed.border]
            self.worths.remove(hashed.border)
        self._num_next[hashed.parent] -= 1
        if not self._num_next[hashed.parent]:
            del self._num_next[hashed.parent]
        self.held[hashed.user] -= 1
        if not self.held[hashed.user]:
            del self.held[hashed.user]
            self._tails.pop(hashed.user, None)
        return hashed.hash

    # Eviction

    def released(self, block_id: int) -> None:
        """Make an unused hashed block evictable."""
        hashed = self._hashed[block_id]
        self._now += 1
        hashed.released_at = self._now
        if hashed.border is not None:
            self.worths.use(hashed.border)
        self._num_behind[hashed.parent] += 1
        if not self._num_behind[hashed.hash]:
            self._push(block_id, hashed)

    def taken(self, block_id: int) -> None:
        """Make a hashed block unevictable: it is used again, or being evicted."""
        hashed = self._hashed[block_id]
        hashed.released_at = None
        self._num_behind[hashed.parent] -= 1
        if not self._num_behind[hashed.parent]:
            del self._num_behind[hashed.parent]
            before = self._blocks.get(hashed.parent)
            if before is not None and self._is_tail(before):
                self._push(before, self._hashed[before])

    def choose(self) -> int:
        """Choose the block to evict next.

        Raises:
            InvariantViolated: none is evictable.
        """
        share = len(self._hashed) / len(self.held) if self.held else 0.0
        oldest: tuple[int, int] | None = None
        for user, num_held in self.held.most_common():
            tail = self._oldest_tail(user)
            if tail is not None and num_held > share:
                return tail[1]
            if tail is not None and (oldest is None or tail < oldest):
                oldest = tail
        if oldest is None:
            raise InvariantViolated("no block can be evicted", where=self._pool)
        return oldest[1]

    def _oldest_tail(self, user: str) -> tuple[int, int] | None:
        """Find a user's least recently used tail, dropping outdated entries before it."""
        heap = self._tails.get(user, [])
        while heap:
            released_at, block_id = heap[0]
            hashed = self._hashed.get(block_id)
            is_its = hashed is not None and (hashed.released_at, hashed.user) == (released_at, user)
            if is_its and self._is_tail(block_id):
                return heap[0]
            heapq.heappop(heap)
        return None

    def _is_tail(self, block_id: int) -> bool:
        """Say whether it is evictable without an evictable successor."""
        hashed = self._hashed[block_id]
        return hashed.released_at is not None and hashed.hash not in self._num_behind

    def _push(self, block_id: int, hashed: _Hashed) -> None:
        assert hashed.released_at is not None
        heap = self._tails.setdefault(hashed.user, [])
        heapq.heappush(heap, (hashed.released_at, block_id))
        if len(heap) > 2 * self.held[hashed.user] + 16:  # mostly old entries
            kept = {(self._hashed[b].released_at, b) for _, b in heap if b in self._hashed}
            heap[:] = sorted(entry for entry in set(heap) if entry in kept)

    def check_invariants(self, evictable: set[int]) -> None:
        """Raise InvariantViolated unless hashes, users and the order of eviction agree.

        Args:
            evictable: blocks that have a hash and nothing else.
        """
        hashed = self._hashed
        behind = Counter(hashed[b].parent for b in evictable if b in hashed)
        waiting = {b for b, one in hashed.items() if one.released_at is not None}
        tails = {b for b in waiting if not behind[hashed[b].hash]}
        listed = {(at, b) for heap in self._tails.values() for at, b in heap}
        problems = {
            "hashes": {one.hash: b for b, one in hashed.items()} != self._blocks,
            "users": Counter(one.user for one in hashed.values()) != self.held,
            "evictable blocks": waiting != evictable,
            "chains": behind != self._num_behind,
            "snapshots": {b for r in self.snapshots.values() for b in r}
            != {b for b, one in hashed.items() if one.border is not None},
            "what snapshots save": {b for b, _ in self.worths.items()} != self.snapshots.keys(),
            "successors": Counter(one.parent for one in hashed.values()) != self._num_next,
            "tails": any((hashed[b].released_at, b) not in listed for b in tails),
        }
        wrong = [what for what, is_wrong in problems.items() if is_wrong]
        if wrong:
            raise InvariantViolated(f"{', '.join(wrong)} do not agree", where=self._pool)
