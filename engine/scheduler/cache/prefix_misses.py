"""Find out why a prompt's cached prefix ended where it did.

Invariant: a prompt is compared with prompts of its own owner only.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from engine.scheduler.cache.hashes import Hash, PrefixChain
from engine.wire.cache_scope import CacheScope

MAX_PROMPTS = 64
MAX_TOKENS = 1 << 20
"""The tokens of all kept prompts together take 4 MiB."""
MAX_EVICTED = 1 << 15
NUM_SHOWN = 8
"""Tokens that are shown on each side of the index where two prompts part."""


class _Prompt(NamedTuple):
    owner: str
    scope: CacheScope
    words: bytes
    """Its token ids, four bytes each."""


class CacheMiss(NamedTuple):
    """Why a prompt's cached prefix ended."""

    reason: str
    """The token at which it ended, and why."""
    prompt_ids: tuple[int, ...] = ()
    """Tokens around that index; empty: no earlier prompt parts there."""
    earlier_ids: tuple[int, ...] = ()
    """The same of the earlier prompt, which has the same owner and salt."""


class PrefixMisses:
    """Remember prompts and evictions of a daemon's models, and compare new prompts with them."""

    def __init__(self) -> None:
        self._prompts: deque[_Prompt] = deque()
        self._num_tokens = 0
        self._evicted: dict[Hash, None] = {}
        """The oldest first."""

    def evicted(self, block_hash: Hash) -> None:
        """Remember that a block has left a pool."""
        self._evicted.pop(block_hash, None)
        self._evicted[block_hash] = None
        if len(self._evicted) > MAX_EVICTED:
            del self._evicted[next(iter(self._evicted))]

    def stored(self, block_hash: Hash) -> None:
        """Forget an eviction, since the block is there again."""
        self._evicted.pop(block_hash, None)

    def explain(
        self, owner: str, chain: PrefixChain, token_ids: Sequence[int], num_cached: int
    ) -> CacheMiss | None:
        """Say at which token a prompt's cached prefix ended, and why.

        Args:
            owner: of the prompt.
            chain: its hashes.
            token_ids: of the prompt.
            num_cached: tokens that were found computed.

        Returns:
            None: all was found that could be, for the last token is always computed.
        """
        size, words = chain.block_size, array("I", token_ids).tobytes()
        index = num_cached // size
        reason = None
        if index < (len(token_ids) - 1) // size:
            reason = self._reason(owner, chain, words, index)
        self._remember(_Prompt(owner, chain.scope, words))
        return reason

    def _reason(self, owner: str, chain: PrefixChain, words: bytes, index: int) -> CacheMiss:
        at, end = index * chain.block_size, (index + 1) * chain.block_size
        if chain.hashes[index] in self._evicted:
            return CacheMiss(f"token {at}: evicted")
        mine = [prompt for prompt in self._prompts if prompt.owner == owner]
        alike = [prompt.words for prompt in mine if prompt.scope == chain.scope]
        common, earlier = max(((_num_common(t, words), t) for t in alike), default=(0, b""))
        if common < end:
            models = {p.scope.model for p in mine if p.words[: 4 * end] == words[: 4 * end]}
            if models:
                what = "salt" if chain.scope.model in models else "model"
                return CacheMiss(f"token {at}: another {what}")
        if at <= common < min(end, len(earlier) // 4) and common:
            shown = (_around(words, common), _around(earlier, common))
            return CacheMiss(f"token {common}: other text", *shown)
        return CacheMiss(f"token {at}: never stored")

    def _remember(self, prompt: _Prompt) -> None:
        self._prompts.append(prompt)
        self._num_tokens += len(prompt.words) // 4
        while len(self._prompts) > MAX_PROMPTS or self._num_tokens > MAX_TOKENS:
            self._num_tokens -= len(self._prompts.popleft().words) // 4


def _around(words: bytes, index: int) -> tuple[int, ...]:
    """Return the tokens on both sides of an index."""
    first = 4 * max(index - NUM_SHOWN, 0)
    return tuple(array("I", words[first : 4 * (index + NUM_SHOWN)]))


def _num_common(one: bytes, other: bytes) -> int:
    """Count the tokens that two prompts begin with alike, found by halving."""
    low, high = 0, min(len(one), len(other)) // 4
    if one[:4] != other[:4]:  # most prompts that are compared
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        if one[4 * low : 4 * middle] == other[4 * low : 4 * middle]:
            low = middle
        else:
            high = middle - 1
    return low
