"""Track the window blocks of a pool: KV of layers with sliding windows, beside each block.

A block of a model with windows holds the layers that read all tokens; its window blocks hold the
others, for the same tokens. They are needed by tables whose sequence may still read them. Others
are spare: they serve prompts that begin alike until a table needs room, and are taken before any
cached block.

Invariant: a block that is needed has window blocks; spare ones are needed by no table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from engine.errors import InvariantViolated

TILE_TOKENS = 64
"""Positions behind a window that kernels may read, with the weight 0: they read whole tiles."""
AHEAD_TOKENS = 1024
"""Tokens that a prompt has window blocks for: two steps of 512, the second until more have come."""


class Windows(NamedTuple):
    """The shape of a pool's window blocks."""

    num_each: int
    """Window blocks of a block; 0: no layers are kept apart."""
    num_tokens: int
    """Positions before a sequence's next token that its steps may read."""
    ahead_tokens: int
    """Tokens after the computed ones that a sequence has window blocks for."""

    @classmethod
    def of(cls, num_groups: int, window: int | None) -> Windows:
        """Describe the window blocks of a model's groups of layers."""
        return (
            NO_WINDOWS
            if window is None
            else cls(num_groups - 1, window + TILE_TOKENS, AHEAD_TOKENS)
        )


NO_WINDOWS = Windows(0, 0, 0)


class Span(NamedTuple):
    """Places of a table, from the first to before the end."""

    first: int
    end: int

    def has(self, index: int) -> bool:
        """Return whether a place is within."""
        return self.first <= index < self.end

    def of(self, table: Sequence[int]) -> list[int]:
        """Return the blocks of a table at these places."""
        return list(table[self.first : self.end])

    def num_within(self, first: int, end: int) -> int:
        """Count the places from `first` to before `end` that are within."""
        return max(min(end, self.end) - max(first, self.first), 0)


NO_SPAN, WHOLE = Span(0, 0), Span(0, 1 << 62)


class WindowBlocks:
    """The window blocks of one pool.

    Args:
        shape: how many, and how far back they are read.
        num_blocks: of the pool.
        block_size: tokens of a block.
    """

    def __init__(self, shape: Windows, num_blocks: int, block_size: int) -> None:
        self.shape = shape
        self.num_each = shape.num_each
        self._block_size = block_size
        self._of: dict[int, list[int]] = {}
        self.num_needing = [0] * (num_blocks if shape.num_each else 0)
        """Tables and copies that need each block's window blocks."""
        self.pins: Counter[int] = Counter()
        """Of them, copies."""
        self.spare: dict[int, None] = {}
        """Blocks with unneeded window blocks, in the order in which they were passed."""

    def of(self, block_id: int) -> list[int]:
        """Return a block's window blocks; empty: it has none. Do not modify."""
        return self._of.get(block_id, [])

    def are_missing(self, block_id: int) -> bool:
        """Return whether a block has lost, or never had, its window blocks."""
        return self.num_each > 0 and block_id not in self._of

    def give(self, block_id: int, window_blocks: list[int]) -> None:
        self._of[block_id] = window_blocks

    def take_from(self, block_id: int) -> list[int]:
        self.spare.pop(block_id, None)
        return self._of.pop(block_id)

    def set_spare(self, block_id: int, *, is_spare: bool) -> None:
        if is_spare:
            self.spare[block_id] = None
        else:
            del self.spare[block_id]

    def owners(self) -> dict[int, int]:
        """Return the block of each window block."""
        return {window: block for block, windows in self._of.items() for window in windows}

    def span(self, num_tokens: int) -> Span:
        """Return the places that a sequence with these computed tokens needs window blocks for."""
        if not self.num_each:
            return WHOLE
        ahead = num_tokens + self.shape.ahead_tokens
        return Span(self.num_behind(num_tokens), -(-ahead // self._block_size))

    @property
    def most_places(self) -> int:
        """The largest number of places that span() returns."""
        shape = self.shape
        return -(-(shape.num_tokens + shape.ahead_tokens) // self._block_size) + 2

    def num_behind(self, num_tokens: int) -> int:
        """Count the leading blocks that a sequence with these computed tokens reads no more of."""
        if not self.num_each:
            return 0
        return max(num_tokens - self.shape.num_tokens, 0) // self._block_size

    def border(self, blocks: Sequence[int]) -> int:
        """Count a chain's leading blocks up to the last place with all window blocks before it."""
        if not self.num_each:
            return len(blocks)
        best, first_whole = 0, 0
        for count, block_id in enumerate(blocks, 1):
            if block_id not in self._of:
                first_whole = count
            if self.num_behind(count * self._block_size) >= first_whole:
                best = count
        return best

    def tables(self, blocks: Sequence[int], span: Span) -> list[list[int]]:
        """Return a table's window blocks by group, to the span's end; block 0: it needs none."""
        if not self.num_each:
            return []
        nothing = [0] * self.num_each
        within = blocks[: span.end]
        rows = [self._of[b] if span.has(i) else nothing for i, b in enumerate(within)]
        return [[row[group] for row in rows] for group in range(self.num_each)]

    def check_invariants(self, needing: Counter[int], pool: str) -> None:
        """Raise InvariantViolated unless what is needed and what is spare agree."""
        if not self.num_each:
            return
        wrong = [b for b, count in enumerate(self.num_needing) if count != needing[b]]
        wrong += [b for b in self.spare if needing[b] or b not in self._of]
        if wrong:
            raise InvariantViolated(f"window blocks of {wrong} are miscounted", where=pool)
