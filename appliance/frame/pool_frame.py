"""One KV pool as a part of a frame: blocks by state, who holds them, what is kept for others.

Owns: the shape.
Invariant: blocks by state add up to num_blocks.
Never: knows the ledger.
"""

from __future__ import annotations

import msgspec


class OwnerFrame(msgspec.Struct):
    """Who holds blocks of a pool."""

    user: str
    num_blocks: int
    num_requests: int


class HolderFrame(msgspec.Struct):
    """Whose prompts and answers have left blocks that can be found."""

    user: str
    num_blocks: int


class PoolFrame(msgspec.Struct):
    """Blocks of one KV pool (or of the transfer ring) by state; they add up to num_blocks."""

    name: str
    num_blocks: int
    block_size: int
    block_bytes: int
    free: int
    reserved: int
    active: int
    draining: int
    owners: list[OwnerFrame] = []
    """Most blocks first; at most MAX_POOL_OWNERS."""
    cached: int = 0
    """In use by nobody, and kept as long as nothing else needs the room."""
    holders: list[HolderFrame] = []
    """Who has left what others find, in use or not; as owners."""
    evicted: int = 0
    """Blocks that were kept and then taken for something else, since the start."""

    @property
    def used_ratio(self) -> float | None:
        """Share of blocks that new work cannot have; None: it has none at all."""
        if self.num_blocks <= 0:
            return None
        return 1 - (self.free + self.cached) / self.num_blocks
