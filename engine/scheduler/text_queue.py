"""Choose which waiting texts are computed next, fairly between owners.

Texts wait for vectors or scores, beside the queue of sequences: they need no blocks, and a worker
computes them between its steps. Turns are start-time fair queueing, as the sequences' are: a text
charges its owner for its tokens over the owner's weight, and the least charged owner is next.
Invariant: of two owners that keep waiting, neither gets ahead of its share by more than a batch.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.errors import QueueFull
from engine.scheduler.queue.waiting_limit import OWNER_SHARE

MAX_TEXTS = 256
"""The most texts of a batch: their vectors are one message."""
MAX_WAITING = 1 << 16
"""The most texts that wait, however short they are."""
RETRY_MS = 1000


@dataclass(eq=False, slots=True)
class WaitingText:
    """One text, until its result has come."""

    model: str
    owner: str
    token_ids: list[int]
    num_unpooled: int = field(default=0, kw_only=True)
    """The first tokens that its pooling leaves out."""
    num_deaths: int = field(default=0, kw_only=True)
    """Workers that died with it in their batches."""
    is_dropped: bool = field(default=False, kw_only=True)
    """Its call has ended."""
    waits_for: int = field(default=0, kw_only=True)
    """Tokens that it counts for while it waits; 0: it does not."""


class TextQueue:
    """Texts by owner, in their order."""

    def __init__(self) -> None:
        self._waiting: dict[str, OrderedDict[WaitingText, None]] = {}
        self._charged: dict[str, float] = {}
        self._held: Counter[str] = Counter()
        """Tokens that wait by owner, counted as texts come and go: many may wait at each push."""
        self.weights: Mapping[str, float] = {}
        """Weights by owner; the default is 1."""
        self.max_tokens = 1 << 20
        """Tokens that may wait; one call's may be more while nothing waits."""

    def __bool__(self) -> bool:
        return bool(self._held)

    def push(self, texts: list[WaitingText]) -> None:
        """Queue all of a call's texts behind their owners' others, or none.

        Raises:
            QueueFull: too many tokens wait, of all owners or of this one.
        """
        wanted = sum(map(self._cost, texts))
        free = self.max_tokens - self._held.total()
        if self._held and wanted > free:
            num_tokens = self.max_tokens - free + wanted
            what = f"texts of {num_tokens:,} tokens would wait, at most {self.max_tokens:,} may"
            raise QueueFull(what, retry_after_ms=RETRY_MS)
        held = sum(self._held[owner] for owner in {text.owner for text in texts})
        if held and wanted > (share := (OWNER_SHARE * free - held) // (1 + OWNER_SHARE)):
            what = f"{held:,} of your texts' tokens wait, your share allows {max(share, 0):,} more"
            raise QueueFull(what, code="user_quota", retry_after_ms=RETRY_MS)
        for text in texts:
            self._of(text.owner)[text] = None
            self._count(text)

    def drop(self, text: WaitingText) -> None:
        """Leave a text out, whose call has ended, wherever it is."""
        text.is_dropped = True
        self._take_out(text)

    def put_back(self, texts: list[WaitingText]) -> None:
        """Queue the texts of a lost batch again, before their owners' others."""
        for text in reversed(texts):
            line = self._of(text.owner)
            line[text] = None
            line.move_to_end(text, last=False)
            self._count(text)

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
            self._take_out(text)
            batch.append(text)
        return batch

    def _next(self) -> WaitingText | None:
        """Find the first text of the least charged owner; None: nothing waits."""
        if not self._waiting:
            self._charged.clear()  # tokens that no other owner wanted were free
            return None
        owner = min(self._waiting, key=lambda one: (self._charged[one], one))
        return next(iter(self._waiting[owner]))

    def _of(self, owner: str) -> OrderedDict[WaitingText, None]:
        """Return an owner's texts; one that begins to wait starts level with the least charged."""
        if owner not in self._waiting:
            level = min((self._charged[other] for other in self._waiting), default=0.0)
            self._charged[owner] = max(self._charged.get(owner, 0.0), level)
            self._waiting[owner] = OrderedDict()
        return self._waiting[owner]

    def _cost(self, text: WaitingText) -> int:
        """Count a text's tokens, and its place among MAX_WAITING in tokens."""
        return len(text.token_ids) + self.max_tokens // MAX_WAITING

    def _count(self, text: WaitingText) -> None:
        text.waits_for = self._cost(text)
        self._held[text.owner] += text.waits_for

    def _take_out(self, text: WaitingText) -> None:
        """Take a text out of its owner's line, if it is there."""
        if not text.waits_for:
            return
        owner, line = text.owner, self._waiting[text.owner]
        del line[text]
        self._held[owner] -= text.waits_for
        text.waits_for = 0
        if not line:
            del self._waiting[owner], self._held[owner]
