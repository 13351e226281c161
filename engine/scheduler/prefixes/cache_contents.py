"""List what the prefix cache holds by tokens, and its last changes.

Invariant: a block is told as stored once, and as removed when no pool has it any more.
Never: tells of prompts that have a secret.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from engine.scheduler.cache.block_pool import BlockPool
from engine.scheduler.cache.hashes import Hash
from engine.scheduler.sequences.sequence import Sequence

MAX_CHANGES = 1 << 14
"""Maximum changes kept for listeners; a slower listener starts again."""


class Block(NamedTuple):
    """A full block that can be found."""

    block_id: int
    """A signed 64-bit number of its content: equal for equal tokens after equal tokens."""
    parent_id: int | None
    """The block before it; None: it begins a prompt."""
    number: int
    """Number of blocks before it."""
    root: Hash
    """The first hash of its chain, which depends on the users that may share it."""
    token_ids: array[int]


class ContentsChange(NamedTuple):
    """A block has come or gone."""

    is_stored: bool
    block: Block


class CacheContents:
    """What all pools of a router hold by token ids, and how that changes."""

    def __init__(self, pools: Mapping[str, BlockPool]) -> None:
        self._pools = pools
        self._blocks: dict[Hash, Block] = {}
        self._changes: deque[ContentsChange] = deque(maxlen=MAX_CHANGES)
        self.num_changes = 0
        """Since the start: a place in the row of changes."""
        for kv_pool in pools.values():
            kv_pool.on_forget = self.forgotten

    @property
    def block_size(self) -> int:
        return next(iter(self._pools.values())).block_size

    def stored(self, sequence: Sequence, numbers: range) -> None:
        """Note that these blocks of a sequence can be found, perhaps as before."""
        chain = sequence.prefix
        if chain is None or chain.scope.is_secret:
            return
        for number in numbers:
            block_hash = chain.hashes[number]
            if block_hash in self._blocks or not self._is_found(block_hash):
                continue
            start = number * self.block_size
            block = self._blocks[block_hash] = Block(
                block_id=_id_of(block_hash),
                parent_id=_id_of(chain.hashes[number - 1]) if number else None,
                number=number,
                root=chain.scope.root,
                token_ids=array("I", sequence.tokens_between(start, start + self.block_size)),
            )
            self._tell(ContentsChange(True, block))

    def forgotten(self, block_hash: Hash) -> None:
        """Note that a pool dropped a block."""
        if block_hash in self._blocks and not self._is_found(block_hash):
            self._tell(ContentsChange(False, self._blocks.pop(block_hash)))

    def blocks(self, root: Hash) -> list[Block]:
        """List all blocks that can be found below this root, each after its parent."""
        mine = (block for block in self._blocks.values() if block.root == root)
        return sorted(mine, key=lambda block: block.number)

    def changes(self, since: int, root: Hash) -> list[ContentsChange] | None:
        """List this root's changes after change number `since`; None: too long ago."""
        num_new = self.num_changes - since
        if num_new > len(self._changes):
            return None
        newest = [self._changes[-back] for back in range(num_new, 0, -1)]
        return [change for change in newest if change.block.root == root]

    def _is_found(self, block_hash: Hash) -> bool:
        return any(kv_pool.index.has_hash(block_hash) for kv_pool in self._pools.values())

    def _tell(self, change: ContentsChange) -> None:
        self._changes.append(change)
        self.num_changes += 1


def _id_of(block_hash: Hash) -> int:
    return int.from_bytes(block_hash[:8], "little", signed=True)
