"""Have whole texts computed on the prefill workers, in batches beside their steps.

Invariant: each text's result is given once; what a dead worker had is sent again, and a text that
ends worker after worker fails alone.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, repeat
from typing import Literal, Protocol

from appliance.daemon.requests.text_encoder import TextEncoder
from appliance.fleet.text_models import LoadedTexts
from engine.errors import RequestError, Unavailable
from engine.scheduler.text_queue import TextQueue, WaitingText
from engine.wire.messages import Command, ComputeTexts, TextsComputed

MAX_BATCHES = 2
"""The most batches that a worker has at once: the next one is there when one ends."""
MAX_DEATHS = 3
"""A text that this often was in a dying worker's batch fails; after the first time it is alone."""


class TextWorkers(Protocol):
    """The workers that hold models of texts."""

    def ready(self) -> list[str]:
        """List the workers that take batches now."""

    @property
    def cpus(self) -> list[int]:
        """List the cores that compute texts; empty: GPUs do."""

    @property
    def is_lost(self) -> bool:
        """Whether none of them can come back."""

    def send(self, worker: str, command: Command) -> None:
        """Send a command."""


@dataclass(slots=True)
class _Call:
    """One call's results as they come."""

    results: list[array[float]]
    num_left: int
    done: asyncio.Future[list[array[float]]]


class TextComputing:
    """All that is asked of models of texts.

    Args:
        check_available: raises if nothing is taken now.
        on_change: called with the workers that have batches, whenever these change.
    """

    def __init__(
        self,
        check_available: Callable[[], None],
        on_change: Callable[[frozenset[str]], None],
    ) -> None:
        self._check_available, self._on_change = check_available, on_change
        self.queue = TextQueue()
        self.encoders: Mapping[str, TextEncoder] = {}
        """By name."""
        self._workers: TextWorkers | None = None
        self._batch_tokens = 0
        self._calls: dict[WaitingText, tuple[_Call, int]] = {}
        """Each text's call and its place there."""
        self._open: dict[str, dict[int, list[WaitingText]]] = {}
        """Each worker's batches by number."""
        self._batch_ids = count(1)
        self._busy: frozenset[str] = frozenset()
        self.num_texts = self.num_tokens = 0
        """Computed so far."""

    def serve(self, texts: Sequence[LoadedTexts], workers: TextWorkers, batch_tokens: int) -> None:
        """Compute by these models on these workers from now on; what was under way begins again.

        Args:
            batch_tokens: of a batch, at most; a longer text is alone.
        """
        self.encoders = {one.model.name: _Encoder(one, self) for one in texts}
        for worker in list(self._open):
            self._take_back(worker)
        self._workers, self._batch_tokens = workers, batch_tokens
        self.pump()

    @property
    def is_idle(self) -> bool:
        return not self._calls

    @property
    def cpus(self) -> list[int]:
        """The cores that texts may have, tokenizing included: others are decode's."""
        return [] if self._workers is None else self._workers.cpus

    @property
    def is_lost(self) -> bool:
        """Whether no worker can compute texts any more."""
        return self._workers is not None and self._workers.is_lost

    async def compute(
        self, model: str, owner: str, texts: Sequence[list[int]], num_unpooled: Sequence[int] = ()
    ) -> list[array[float]]:
        """Compute texts as TextEncoder.compute() does."""
        self._check_available()
        if self.is_lost:
            raise Unavailable("no worker is left that computes texts", code="engine_dead")
        if not texts:
            return []
        call = _Call(
            [array("f")] * len(texts), len(texts), asyncio.get_running_loop().create_future()
        )
        waiting = [
            WaitingText(model, owner, ids, num_unpooled=number)
            for ids, number in zip(texts, num_unpooled or repeat(0), strict=False)
        ]
        self.queue.push(waiting)
        self._calls |= {text: (call, place) for place, text in enumerate(waiting)}
        self.pump()
        try:
            return await call.done
        finally:
            for text in waiting:
                self.queue.drop(text)
                self._calls.pop(text, None)

    def computed(self, worker: str, report: TextsComputed) -> None:
        """Take a batch's results."""
        batch = self._open.get(worker, {}).pop(report.batch_id, None)
        if batch is None:  # of a model that was swapped out meanwhile
            return
        for text, result in zip(batch, report.results, strict=True):
            self.num_texts += 1
            self.num_tokens += len(text.token_ids)
            self._give(text, result)
        self.pump()

    def worker_died(self, worker: str) -> None:
        """Send a dead worker's batches again; a text that was alone at several deaths fails."""
        for text in self._take_back(worker):
            text.num_deaths += 1
            if text.num_deaths >= MAX_DEATHS:
                self.queue.drop(text)
                what = f"{text.num_deaths} workers died while computing a text"
                error = RequestError(what, code="worker_died", status=500, kind="server_error")
                self._fail(text, error)
        self.pump()

    def end_all(self, error: RequestError) -> None:
        """End every open call with an error."""
        for text in list(self._calls):
            self._fail(text, error)

    def pump(self) -> None:
        """Send batches to workers with room for one, the one with fewest first."""
        ready = [] if self._workers is None else self._workers.ready()
        for worker in ready:
            self._open.setdefault(worker, {})
        while ready and self._workers is not None:
            worker = min(ready, key=lambda name: len(self._open[name]))
            if len(self._open[worker]) >= MAX_BATCHES:
                break
            batch = self.queue.next_batch(self._batch_tokens)
            if not batch:
                break
            # equal lengths are computed as one, and pooled as one behind equal prompts
            batch.sort(key=lambda text: (len(text.token_ids), text.num_unpooled))
            number = next(self._batch_ids)
            self._open[worker][number] = batch
            self._workers.send(worker, _command(number, batch))
        busy = frozenset(name for name, batches in self._open.items() if batches)
        if busy != self._busy:
            self._busy = busy
            self._on_change(busy)

    def _take_back(self, worker: str) -> list[WaitingText]:
        """Queue what a worker has not answered again, and return it."""
        texts = [text for batch in self._open.pop(worker, {}).values() for text in batch]
        texts = [text for text in texts if not text.is_dropped]
        self.queue.put_back(texts)
        return texts

    def _give(self, text: WaitingText, result: bytes) -> None:
        found = self._calls.pop(text, None)
        if found is None:
            return
        call, place = found
        if not result:
            what = f"the model's result for text {place} is not a number"
            self._end(call, RequestError(what, code="not_finite", status=500, kind="server_error"))
            return
        call.results[place] = array("f", result)
        call.num_left -= 1
        if not call.num_left and not call.done.done():
            call.done.set_result(call.results)

    def _fail(self, text: WaitingText, error: RequestError) -> None:
        found = self._calls.pop(text, None)
        if found is not None:
            self._end(found[0], error)

    @staticmethod
    def _end(call: _Call, error: RequestError) -> None:
        if not call.done.done():
            call.done.set_exception(error)


def _command(number: int, batch: Sequence[WaitingText]) -> ComputeTexts:
    unpooled = [text.num_unpooled for text in batch]
    texts = [text.token_ids for text in batch]
    return ComputeTexts(number, batch[0].model, texts, unpooled if any(unpooled) else [])


_JUDGE = (
    "".join(
        (
            "<|im_start|>system\n",
            "Judge whether the Document meets the requirements based on the Query ",
            "and the Instruct provided. ",
            'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n',
            "<Instruct>: Given a web search query, ",
            "retrieve relevant passages that answer the query\n<Query>: ",
        )
    ),
    "\n<Document>: ",
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
)
"""What Qwen3-Reranker is asked, around a query and a document; as its makers publish it."""


class _Encoder:
    """One model, as the API sees it; see TextEncoder."""

    def __init__(self, texts: LoadedTexts, computing: TextComputing) -> None:
        self._config, self._tokenizer = texts.model.config, texts.tokenizer
        self._computing = computing
        self.name = texts.model.name
        self.kind: Literal["embedding", "rerank"] = self._config.kind
        self.max_tokens = self._config.max_tokens
        self.num_dimensions = self._config.num_dimensions if self.kind == "embedding" else None
        self.prompts = self._config.prompts
        self.default_prompt = self._config.default_prompt

    def tokenize(self, texts: Iterable[str]) -> Iterator[list[int]]:
        lowers_case, cpus = self._config.lowers_case, self._computing.cpus
        cased = (text.lower() if lowers_case else text for text in texts)
        return self._tokenizer.encode_each(cased, cpus=cpus)

    def tokenize_pairs(self, pairs: Iterable[tuple[str, str]]) -> Iterator[list[int]]:
        cpus = self._computing.cpus
        if not self._config.compares_tokens:
            return self._tokenizer.encode_each(pairs, cpus=cpus)
        before, between, after = _JUDGE
        asked = (f"{before}{query}{between}{document}{after}" for query, document in pairs)
        return self._tokenizer.encode_each(asked, add_special_tokens=False, cpus=cpus)

    def num_unpooled(self, prompt: str) -> int:
        if self._config.pools_prompt or not prompt:
            return 0
        (ids,) = self.tokenize([prompt])
        # the special token behind a text is no part of the prompt
        return len(ids) - (bool(ids) and self._tokenizer.is_silent(ids[-1]))

    def check(self, texts: Sequence[Sequence[int]]) -> None:
        for place, ids in enumerate(texts):
            if not 1 <= len(ids) <= self.max_tokens:
                what = f"text {place} has {len(ids)} tokens; the model takes 1 to {self.max_tokens}"
                raise RequestError(what, code="text_too_long" if ids else "text_empty")
            if not 0 <= min(ids) <= max(ids) < self._config.vocab_size:
                what = f"text {place} has a token that the model does not know"
                raise RequestError(what, code="unknown_token")

    async def compute(
        self, owner: str, texts: Sequence[list[int]], num_unpooled: Sequence[int] = ()
    ) -> list[array[float]]:
        if self._computing.encoders.get(self.name) is not self:
            raise Unavailable("the model was swapped out", code="model_loading")
        return await self._computing.compute(self.name, owner, texts, num_unpooled)
