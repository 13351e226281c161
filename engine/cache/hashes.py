"""Hash a prompt's blocks, each with all blocks before it.

Owns: the chain of a prompt's hashes.
Invariant: of two blocks with one hash the bytes are alike, whoever computed them.
Never: knows a pool.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from time import perf_counter_ns

KEY_BYTES = 32
HASH_BYTES = 16

Hash = bytes
"""Of a block, or of what its chain begins with."""


class PrefixHasher:
    """Makes the hashes of one daemon's blocks.

    Args:
        key: KEY_BYTES secret bytes.
        extra: all that the bytes of blocks depend on beside tokens, in any unambiguous form.
        block_size: tokens in a block.
    """

    def __init__(self, key: bytes, extra: bytes, block_size: int) -> None:
        self.block_size = block_size
        self._key = key
        self._extra = blake2b(extra).digest()
        self._block = blake2b(digest_size=HASH_BYTES, key=key, person=b"block")

    @property
    def fingerprint(self) -> bytes:
        """32 bytes that name the key and all that a block's values depend on besides its tokens."""
        return blake2b(self._extra, digest_size=32, key=self._key, person=b"kept").digest()

    def root(self, *salts: str) -> Hash:
        """What the chains of all prompts with these salts begin with; of others no hash is alike.

        Args:
            salts: whose prompts find each other's blocks, as a client's secret and a user's name.
        """
        root = blake2b(self._extra, digest_size=HASH_BYTES, key=self._key, person=b"root")
        for salt in salts:
            data = salt.encode("utf-8", "surrogatepass")
            root.update(len(data).to_bytes(8, "little") + data)
        return root.digest()

    def chain(self, token_ids: Sequence[int], *salts: str) -> PrefixChain:
        """The hashes of a prompt's full blocks."""
        began_ns = perf_counter_ns()
        chain = PrefixChain(self, self.root(*salts))
        chain.grow(token_ids)
        chain.took_ns = perf_counter_ns() - began_ns
        return chain

    def hashes(self, parent: Hash, token_ids: Sequence[int]) -> list[Hash]:
        """Those of the full blocks that so many tokens make, after a parent."""
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
    """The hashes of one sequence's full blocks, as far as its tokens are known.

    Args:
        hasher: that makes them.
        root: what the chain begins with.
    """

    __slots__ = ("_hasher", "hashes", "is_secret", "root", "took_ns")

    def __init__(self, hasher: PrefixHasher, root: Hash) -> None:
        self._hasher = hasher
        self.root = root
        self.hashes: list[Hash] = []
        self.took_ns = 0
        """To hash the prompt; of a copy 0."""
        self.is_secret = False
        """A client's secret is in its root: its blocks never reach a disk."""

    def __len__(self) -> int:
        return len(self.hashes)

    @property
    def num_tokens(self) -> int:
        return len(self.hashes) * self._hasher.block_size

    def parent(self, place: int) -> Hash:
        """The hash before that of the block at a place."""
        return self.hashes[place - 1] if place else self.root

    def grow(self, token_ids: Sequence[int]) -> None:
        """Hash the full blocks of the tokens that follow those of hashed blocks."""
        self.hashes += self._hasher.hashes(self.parent(len(self.hashes)), token_ids)

    def num_common(self, other: PrefixChain) -> int:
        """How many blocks two chains begin with alike.

        A hash stands for all that comes before it, so the last that is alike is found by halving.
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
        """One that can grow on its own, as each of several answers to one prompt does."""
        twin = PrefixChain(self._hasher, self.root)
        twin.is_secret = self.is_secret
        twin.hashes = list(self.hashes)
        return twin
