"""Choose which waiting texts are computed next, fairly between owners.

Texts wait for vectors or scores, beside the queue of sequences: they need no blocks, and a worker
computes them between its steps. Turns are start-time fair queueing, as the sequences' are: a text
charges its owner for its tokens over the owner's weight, and the least charged owner is next.
Owns: the order of texts, and the charge of each owner while any text waits.
Invariant: of two owners that keep waiting, neither gets ahead of its share by more than a batch.
Never: knows workers, or reads a clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.errors import QueueFull
from engine.scheduler.queue.waiting_limit import OWNER_SHARE

MAX_TEXTS = 256
"""The most texts of a batch: their vectors are one message."""
RETRY_MS = 1000


@dataclass(eq=False, slots=True)
class WaitingText:
    """One text, until its result has come."""

    model: str
    owner: str
    token_ids: list[int]
    num_deaths: int = field(default=0, kw_only=True)
    """Workers that died with it in their batches."""
    is_dropped: bool = field(default=False, kw_only=True)
    """Its call has ended."""


class TextQueue:
    """Texts by owner, in their order."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[WaitingText]] = {}
        self._charged: dict[str, float] = {}
        self.weights: Mapping[str, float] = {}
        """Weights by owner; the default is 1."""
        self.max_tokens = 1 << 20
        """Tokens that may wait; one call's may be more while nothing waits."""

    def __bool__(self) -> bool:
        return any(not text.is_dropped for texts in self._waiting.values() for text in texts)

    def push(self, texts: list[WaitingText]) -> None:
        """Queue all of a call's texts behind their owners' others, or none.

        Raises:
            QueueFull: too many tokens wait, of all owners or of this one.
        """
        waiting = [text for each in self._waiting.values() for text in each if not text.is_dropped]
        wanted = sum(len(text.token_ids) for text in texts)
        free = self.max_tokens - sum(len(text.token_ids) for text in waiting)
        if waiting and wanted > free:
            num_tokens = self.max_tokens - free + wanted
            what = f"texts of {num_tokens:,} tokens would wait, at most {self.max_tokens:,} may"
            raise QueueFull(what, retry_after_ms=RETRY_MS)
        owners = {text.owner for text in texts}
        held = sum(len(text.token_ids) for text in waiting if text.owner in owners)
        if held and wanted > (share := (OWNER_SHARE * free - held) // (1 + OWNER_SHARE)):
            what = f"{held:,} of your texts' tokens wait, your share allows {max(share, 0):,} more"
            raise QueueFull(what, code="user_quota", retry_after_ms=RETRY_MS)
        for text in texts:
            self._of(text.owner).append(text)

    def put_back(self, texts: list[WaitingText]) -> None:
        """Queue the texts of a lost batch again, before their owners' others."""
        for text in reversed(texts):
            self._of(text.owner).appendleft(text)

    def next_batch(self, max_tokens: int) -> list[WaitingText]:
        """Take out texts of one model, up to `max_tokens` together; a longer text is alone.

        A text that a worker has died with is alone, too: it may be to blame.
        """
        batch: list[WaitingText] = []
        num_tokens = 0
        while len(batch) < MAX_TEXTS and (text := self._next()) is not None:
            num_tokens += len(text.token_ids)
            is_alone = text.num_deaths > 0 or (bool(batch) and batch[0].num_deaths > 0)
            if batch and (num_tokens > max_tokens or text.model != batch[0].model or is_alone):
                break
            owner = text.owner
            self._charged[owner] += len(text.token_ids) / self.weights.get(owner, 1.0)
            self._waiting[owner].popleft()
            batch.append(text)
        return batch

    def _next(self) -> WaitingText | None:
        """Find the first text of the least charged owner; None: nothing waits."""
        for owner in list(self._waiting):
            texts = self._waiting[owner]
            while texts and texts[0].is_dropped:
                texts.popleft()
            if not texts:
                del self._waiting[owner]
        if not self._waiting:
            self._charged.clear()  # tokens that no other owner wanted were free
            return None
        return self._waiting[min(self._waiting, key=lambda owner: (self._charged[owner], owner))][0]

    def _of(self, owner: str) -> deque[WaitingText]:
        """Return an owner's texts; one that begins to wait starts level with the least charged."""
        if owner not in self._waiting:
            level = min((self._charged[other] for other in self._waiting), default=0.0)
            self._charged[owner] = max(self._charged.get(owner, 0.0), level)
            self._waiting[owner] = deque()
        return self._waiting[owner]
