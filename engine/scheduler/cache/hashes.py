"""Hash a prompt's blocks, each with all blocks before it.

Invariant: two blocks with one hash have equal bytes, from any computation.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from time import perf_counter_ns

from engine.wire.cache_scope import CacheScope

KEY_BYTES = 32
HASH_BYTES = 16
_PLACE_BYTES = 4

Hash = bytes
"""The hash of a block, or of a chain's root."""


def record_hashes(border: Hash, num_blocks: int) -> list[Hash]:
    """Name the blocks of the record that a chain leaves at a border, which its last hash names."""
    return [border + place.to_bytes(_PLACE_BYTES, "little") for place in range(num_blocks)]


def border_of(block_hash: Hash) -> Hash | None:
    """Return the border whose record a block is of; None: it holds keys and values."""
    return block_hash[:HASH_BYTES] if len(block_hash) == HASH_BYTES + _PLACE_BYTES else None


class PrefixHasher:
    """Hash the blocks of one daemon.

    Args:
        key: KEY_BYTES secret bytes.
        extra: everything besides tokens that blocks depend on, in any unambiguous form.
        block_size: tokens in a block.
        isolates_users: no user finds blocks that another has left.
    """

    def __init__(
        self, key: bytes, extra: bytes, block_size: int, *, isolates_users: bool = False
    ) -> None:
        self.block_size = block_size
        self._isolates_users = isolates_users
        self._key = key
        self._extra = blake2b(extra).digest()
        self._block = blake2b(digest_size=HASH_BYTES, key=key, person=b"block")

    @property
    def fingerprint(self) -> bytes:
        """32 bytes that name the key and all that a block's values depend on besides its tokens."""
        return blake2b(self._extra, digest_size=32, key=self._key, person=b"kept").digest()

    def scope(self, salt: str | None = None, user: str = "") -> CacheScope:
        """Name the prompts that find each other's blocks: no hash of another scope is alike.

        Args:
            salt: a client's secret; None: it has none.
            user: of the prompt; it counts only where users are isolated.
        """
        root = blake2b(self._extra, digest_size=HASH_BYTES, key=self._key, person=b"root")
        for part in (salt or "", user if self._isolates_users else ""):
            data = part.encode("utf-8", "surrogatepass")
            root.update(len(data).to_bytes(8, "little") + data)
        return CacheScope(root.digest(), bool(salt), self._extra)

    def chain(self, token_ids: Sequence[int], scope: CacheScope | None = None) -> PrefixChain:
        """Hash a prompt's full blocks; from any thread.

        Args:
            token_ids: the prompt.
            scope: of its blocks; None: that of prompts without salt and user.
        """
        began_ns = perf_counter_ns()
        chain = PrefixChain(self, scope or self.scope())
        chain.grow(token_ids)
        chain.took_ns = perf_counter_ns() - began_ns
        return chain

    def hashes(self, parent: Hash, token_ids: Sequence[int]) -> list[Hash]:
        """Hash the full blocks of these tokens, after a parent."""
        data = memoryview(array("I", token_ids).tobytes())
        num_bytes = 4 * self.block_size
        hashes = []
        for end in range(num_bytes, len(data) + 1, num_bytes):
            block = self._block.copy()
            block.update(parent)
            block.update(data[end - num_bytes : end])
            parent = block.digest()
            hashes.append(parent)
        return hashes


class PrefixChain:
    """Hold the hashes of one sequence's full blocks, as far as its tokens are known.

    Args:
        hasher: that makes them.
        scope: the prompts that may find its blocks.
    """

    __slots__ = ("_hasher", "hashes", "scope", "took_ns")

    def __init__(self, hasher: PrefixHasher, scope: CacheScope) -> None:
        self._hasher = hasher
        self.scope = scope
        self.hashes: list[Hash] = []
        self.took_ns = 0
        """Time to hash the prompt; 0 for a copy."""

    def __len__(self) -> int:
        return len(self.hashes)

    @property
    def block_size(self) -> int:
        return self._hasher.block_size

    @property
    def num_tokens(self) -> int:
        return len(self.hashes) * self._hasher.block_size

    def parent(self, index: int) -> Hash:
        """Return the hash before a block."""
        return self.hashes[index - 1] if index else self.scope.root

    def grow(self, token_ids: Sequence[int]) -> None:
        """Hash the full blocks of the tokens after the hashed blocks."""
        self.hashes += self._hasher.hashes(self.parent(len(self.hashes)), token_ids)

    def num_common(self, other: PrefixChain) -> int:
        """Count the leading blocks that two chains have in common.

        A hash covers everything before it, so the last common one is found by halving.
        """
        mine, theirs = self.hashes, other.hashes
        low, high = 0, min(len(mine), len(theirs))
        while low < high:
            middle = (low + high + 1) // 2
            if mine[middle - 1] == theirs[middle - 1]:
                low = middle
            else:
                high = middle - 1
        return low

    def copy(self) -> PrefixChain:
        """Copy the chain, so that each of several answers to a prompt grows its own."""
        twin = PrefixChain(self._hasher, self.scope)
        twin.hashes = list(self.hashes)
        return twin
