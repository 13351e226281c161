"""A model of texts that computes on the loop, and a vector and a score that tests can foretell."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from engine.errors import QueueFull, RequestError
from engine.text.tokenizer import Tokenizer

DIMENSIONS = 8


class FakeEncoder:
    """A TextEncoder: a vector counts the tokens by their ids modulo DIMENSIONS.

    A score is the number of the document's tokens that the query has, less 2.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        kind: Literal["embedding", "rerank"],
        *,
        end_id: int | None = None,
    ) -> None:
        self.name = f"fake/tiny-{kind}"
        self.kind = kind
        self.max_tokens = 64
        self.num_dimensions = DIMENSIONS if kind == "embedding" else None
        self.prompts = {"query": "query: "} if kind == "embedding" else {}
        self.default_prompt: str | None = None
        self.pools_prompt = True
        self.unpooled: list[int] = []
        """What the last call asked to leave out of each text's pooling."""
        self.gate = asyncio.Event()
        """Nothing is computed until it is set."""
        self.gate.set()
        self.asked: list[tuple[str, list[list[int]]]] = []
        """Owners and their texts, in order."""
        self.num_dropped = 0
        self.is_full = False
        self.failure: Exception | None = None
        self._tokenizer = tokenizer
        self._end = tokenizer.special_id("<|end|>") if end_id is None else end_id

    def ids(self, text: str) -> list[int]:
        """The tokens of one text."""
        return [*self._tokenizer.encode(text), self._end]

    def pair_ids(self, query: str, document: str) -> list[int]:
        """The tokens of one pair."""
        return [*self.ids(query), *self._tokenizer.encode(document, False), self._end]

    def tokenize(self, texts: Iterable[str]) -> Iterator[list[int]]:
        return map(self.ids, texts)

    def tokenize_pairs(self, pairs: Iterable[tuple[str, str]]) -> Iterator[list[int]]:
        return (self.pair_ids(query, document) for query, document in pairs)

    def num_unpooled(self, prompt: str) -> int:
        return 0 if self.pools_prompt or not prompt else len(self.ids(prompt)) - 1

    def check(self, texts: Sequence[Sequence[int]]) -> None:
        assert all(1 <= len(ids) <= self.max_tokens for ids in texts)
        if not all(0 <= one < self._tokenizer.vocab_size for ids in texts for one in ids):
            raise RequestError("a token that the model does not know", code="unknown_token")

    async def compute(
        self, owner: str, texts: Sequence[list[int]], num_unpooled: Sequence[int] = ()
    ) -> list[array[float]]:
        if self.is_full:
            raise QueueFull("texts wait", retry_after_ms=1000)
        self.asked.append((owner, [list(ids) for ids in texts]))
        self.unpooled = list(num_unpooled)
        try:
            await self.gate.wait()
            await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            self.num_dropped += 1
            raise
        if self.failure is not None:
            raise self.failure
        return [self.vector(ids) if self.kind == "embedding" else self.score(ids) for ids in texts]

    def vector(self, ids: Sequence[int]) -> array[float]:
        counts = [0.0] * DIMENSIONS
        for token_id in ids:
            counts[token_id % DIMENSIONS] += 1.0
        return array("f", counts)

    def score(self, ids: Sequence[int]) -> array[float]:
        border = list(ids).index(self._end)
        query, document = set(ids[1:border]), ids[border + 1 : -1]
        return array("f", [sum(one in query for one in document) - 2.0])
