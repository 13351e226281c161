"""Rank snapshots by the computing that they save.

A snapshot saves computing the blocks of a prompt since the snapshot before it. All snapshots of a
model take equally many bytes, so that this number ranks them. A last use long ago counts for less
(GreedyDual): each drop raises the ranks of what is used later, so that large ones go in the end.

Invariant: when a snapshot goes, the next ones on its chain save what it saved.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from engine.scheduler.cache.hashes import Hash


class Saved(NamedTuple):
    """What a snapshot saves."""

    num_blocks: int = 0
    """Blocks of its chain since the snapshot before it."""
    before: Hash | None = None
    """The border of that snapshot; None: the chain's beginning."""


NOTHING = Saved()


class SnapshotWorths:
    """Hold what each snapshot of an index saves, by its border."""

    def __init__(self) -> None:
        self._saved: dict[Hash, Saved] = {}
        self._used: dict[Hash, int] = {}
        """The highest rank dropped before each last use; the least recently used first."""
        self._last_dropped = 0
        """The highest rank of a snapshot that was dropped for another one."""

    def of(self, border: Hash) -> Saved:
        """Return what a snapshot saves; an unknown one saves nothing."""
        return self._saved.get(border, NOTHING)

    def items(self) -> list[tuple[Hash, Saved]]:
        return list(self._saved.items())

    def add(self, border: Hash, saved: Saved) -> None:
        """Add a snapshot."""
        self._saved[border] = saved
        self.use(border)

    def change(self, border: Hash, saved: Saved) -> None:
        """Note that a snapshot, if it is here, saves something else now."""
        if border in self._saved:
            self._saved[border] = saved

    def use(self, border: Hash) -> None:
        """Note a use."""
        self._used.pop(border, None)
        self._used[border] = self._last_dropped

    def cheapest(self, borders: Iterable[Hash]) -> Hash | None:
        """Choose the snapshot to drop for another one; of equals the least recently used."""
        droppable = set(borders)
        among = (border for border in self._used if border in droppable)
        chosen = min(among, key=self._rank, default=None)
        if chosen is not None:
            self._last_dropped = max(self._last_dropped, self._rank(chosen))
        return chosen

    def remove(self, border: Hash) -> None:
        """Remove a snapshot; what it saved is now saved by the next ones on its chain."""
        gone = self._saved.pop(border)
        del self._used[border]
        for later, (num_blocks, before) in self.items():
            if before == border:
                self._saved[later] = Saved(num_blocks + gone.num_blocks, gone.before)

    def _rank(self, border: Hash) -> int:
        return self._used[border] + self._saved[border].num_blocks
