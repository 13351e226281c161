"""Compute batches of whole texts between the steps of sequences.

Invariant: each batch is answered once; a text whose result is no number fails alone.
Never: delays a step by more than a part of a layer.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping

import torch

from engine.wire.messages import ComputeTexts, TextsComputed
from engine.worker.model.text_transformer import TextTransformer

TURN_NS = 1_000_000
"""CPU time after which other threads have the core, if one waits; a part may take longer.

The kernel may see only every 4 ms that a thread waits for it.
"""


class TextBatches:
    """The texts that a worker has been given.

    Args:
        models: by name.
        send: passes a report on.
        beat: called after each part; None: nothing counts them.
        give_way: lets other threads run that wait for the core.
    """

    def __init__(
        self,
        models: Mapping[str, TextTransformer],
        send: Callable[[TextsComputed], None],
        beat: Callable[[], None] | None,
        *,
        give_way: Callable[[], None] = os.sched_yield,
    ) -> None:
        self._models, self._send = models, send
        self._give_way = give_way
        self._beat = beat or (lambda: None)
        self._batches: deque[ComputeTexts] = deque()
        self._parts: Iterator[torch.Tensor | None] | None = None
        """The parts that are left of the first batch; None: it has not begun."""
        self._started_ns = 0
        self._turn_ends_ns = 0
        """The thread's CPU time at which others have the core."""

    @property
    def has_work(self) -> bool:
        return bool(self._batches)

    def take(self, batch: ComputeTexts) -> None:
        """Queue a batch."""
        self._batches.append(batch)

    def compute(self, until: Callable[[], bool]) -> None:
        """Compute a part, and the next ones until it is said to stop or nothing is left."""
        while self._batches:
            batch = self._batches[0]
            if self._parts is None:
                self._started_ns = time.monotonic_ns()
                self._parts = self._models[batch.model].compute(batch.texts, batch.num_unpooled)
            with torch.inference_mode():
                found = next(self._parts)
            self._beat()
            if found is not None:
                self._parts = None
                self._batches.popleft()
                self._answer(batch, found)
            if time.thread_time_ns() >= self._turn_ends_ns:
                self._give_way()
                self._turn_ends_ns = time.thread_time_ns() + TURN_NS
            if until():
                return

    def _answer(self, batch: ComputeTexts, found: torch.Tensor) -> None:
        is_number = torch.isfinite(found).all(-1).tolist()
        rows = found.cpu().numpy()
        results = [
            row.tobytes() if is_good else b"" for row, is_good in zip(rows, is_number, strict=True)
        ]
        ended_ns = time.monotonic_ns()
        self._send(TextsComputed(batch.batch_id, self._started_ns, ended_ns, results))
