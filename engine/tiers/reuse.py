"""How far apart uses of the same block are: what a larger cache would have earned.

A block that is used again after d other blocks is found by a cache of d blocks that forgets the
least recently used, and by no smaller one. So the distances of all uses say what a cache of any
size would have found, that of twice ours too, which has forgotten the blocks in question. Of all
blocks one in eight is watched, chosen by its hash; distances among those are an eighth.
Owns: when each of the blocks watched was used last, and the counts of distances.
Invariant: a distance is exact among the blocks watched; a first use has none, and is found by no
cache.
Never: knows what is in a pool or on disk; keeps more than MAX_WATCHED blocks.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

WATCHED_SHARE = 8
"""One in so many blocks is watched."""
MAX_WATCHED = 1 << 14
"""A use after more blocks than so many watched ones counts as a first one."""


class ReuseDistances:
    """Of all blocks of prompts."""

    def __init__(self, max_watched: int = MAX_WATCHED, share: int = WATCHED_SHARE) -> None:
        self.share = share
        self.num_uses = 0
        """Of the blocks that are watched."""
        self.counts: Counter[int] = Counter()
        """Uses by the number of bits of their distance, in blocks watched: the distances from
        2**(n-1) to 2**n - 1 are at n, and 0 is at 0."""
        self._max_watched = max_watched
        self._used_at: OrderedDict[bytes, int] = OrderedDict()
        """By hash, the place of its last use among all; the least recently used first."""
        self._size = 4 * max_watched
        self._tree = [0] * (self._size + 1)
        """Of sums (Fenwick's): 1 at the places in use."""
        self._next = 0

    def use(self, hashes: Iterable[bytes]) -> None:
        """A prompt needs these blocks."""
        for block_hash in hashes:
            if block_hash[0] % self.share:
                continue
            self.num_uses += 1
            before = self._used_at.get(block_hash)
            if before is not None:
                distance = len(self._used_at) - self._num_up_to(before)
                self.counts[distance.bit_length()] += 1
            self._put(block_hash, before)

    def add(self, hashes: Iterable[bytes]) -> None:
        """Blocks are there that nobody has asked for yet, as those of an answer."""
        for block_hash in hashes:
            if not block_hash[0] % self.share and block_hash not in self._used_at:
                self._put(block_hash, None)

    def found_by(self, num_blocks: int) -> float | None:
        """The share of uses that a cache of so many blocks would have found; None: no use yet.

        Within a step of twice the size the distances are taken to be evenly spread.
        """
        if not self.num_uses:
            return None
        size, found = num_blocks / self.share, 0.0
        for bits, count in self.counts.items():
            low, high = (1 << bits >> 1, 1 << bits) if bits else (0, 1)
            found += count * min(max((size - low) / (high - low), 0.0), 1.0)
        return found / self.num_uses

    def _put(self, block_hash: bytes, before: int | None) -> None:
        if before is not None:
            self._count(before, -1)
        elif len(self._used_at) >= self._max_watched:
            _, oldest = self._used_at.popitem(last=False)
            self._count(oldest, -1)
        if self._next == self._size:
            self._compact(block_hash)
        self._used_at[block_hash] = self._next
        self._used_at.move_to_end(block_hash)
        self._count(self._next, 1)
        self._next += 1

    def _compact(self, leaving: bytes) -> None:
        """Give the places in use the numbers from 0 on."""
        self._used_at.pop(leaving, None)
        self._next = len(self._used_at)
        self._used_at = OrderedDict(zip(self._used_at, range(self._next), strict=True))
        # of ones at the first places: at each place those that its sum is of, up to the last one
        self._tree = [0, *(min(at & -at, max(self._next - at + (at & -at), 0))
                           for at in range(1, self._size + 1))]  # fmt: skip

    def _count(self, place: int, step: int) -> None:
        at = place + 1
        while at <= self._size:
            self._tree[at] += step
            at += at & -at

    def _num_up_to(self, place: int) -> int:
        """Places in use, from the first up to this one."""
        at, total = place + 1, 0
        while at:
            total += self._tree[at]
            at &= at - 1
        return total
