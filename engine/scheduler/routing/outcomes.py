"""Compare what elastic roles predicted of each prompt with what came of it.

Invariants: a forecast is judged once, by steps on the cores that it presumed, and on nothing else;
a route that was twice as bad as predicted is closed until steps of its size have been measured
anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.profile.facts import MAX_RATIO
from engine.scheduler.routing.elastic import Forecast, PredictionKind
from engine.wire.messages import SequenceStep, Stepped

MISS_RATIO = 2.0
"""Ratio to the prediction from which a prompt, or its ITL, is a miss."""
YIELD_RATIO = 1.5
"""Ratio of a worker's mean ITL to the target at which a prompt leaves it."""
CLEAR_STEPS = 3
"""Steps from which one miss is no jitter; with fewer, it takes two in a row."""
ANEW_STEPS = 3
"""Steps of a route's size, after it was closed, that open it again."""
_ERROR_SHARE = 0.3
"""Weight of the newest outcome in a route's average error."""

Measured = Callable[[PredictionKind], int]
"""Steps that have been made of a route's size, on the cores that it uses."""


@dataclass(slots=True)
class PredictionRecord:
    """Outcomes of the predictions of one kind since the start."""

    num_judged: int = 0
    num_missed: int = 0
    """Twice as bad as predicted, or worse."""
    num_gave_way: int = 0
    error: float = 0.0
    """Mean of the natural logarithm of outcome over prediction, without its sign; decays."""
    missed_last: bool = False
    closed_at: int | None = None
    """Steps of its size that had been made when it was closed; None: it is open."""


class Outcome(NamedTuple):
    """What came of the prediction for one prompt."""

    seq_id: int
    about: str
    """Text for people about the prediction."""
    yields: bool = False
    """It should leave the worker, which is in the middle of it."""


@dataclass(slots=True)
class _OpenPrompt:
    """A prompt that is being computed."""

    forecast: Forecast
    num_tokens: int
    placed_ns: int
    waited_ms: float
    num_computed: int = 0
    num_steps: int = 0
    judged_ms: float = 0.0
    """Time of its steps on the presumed cores, and their tokens."""
    judged_tokens: int = 0
    itls_ms: list[float] = field(default_factory=list)


class Outcomes:
    """What was predicted of prompts and what came of it: per kind since the start, and open ones.

    Args:
        measured: counts steps.
    """

    def __init__(self, measured: Measured) -> None:
        self.records: dict[PredictionKind, PredictionRecord] = {}
        self._measured = measured
        self._open: dict[int, _OpenPrompt] = {}

    def closed(self) -> frozenset[PredictionKind]:
        """Return the routes not to take; newly measured ones are open again."""
        kinds = [kind for kind, record in self.records.items() if record.closed_at is not None]
        for kind in kinds:
            record = self.records[kind]
            if self._measured(kind) >= (record.closed_at or 0) + ANEW_STEPS:
                record.closed_at, record.error, record.missed_last = None, 0.0, False
        return frozenset(kind for kind in kinds if self.records[kind].closed_at is not None)

    def begin(
        self,
        seq_id: int,
        forecast: Forecast,
        *,
        num_tokens: int,
        waited_ms: float,
        at_ns: int,
    ) -> None:
        """Begin to judge a placed prompt.

        Args:
            seq_id: of its sequence.
            forecast: by which it was placed.
            num_tokens: of the prompt.
            waited_ms: from its arrival until now.
            at_ns: now, by the clock of the workers' steps.
        """
        self._open[seq_id] = _OpenPrompt(forecast, num_tokens, at_ns, waited_ms)

    def stop_judging(self, seq_id: int) -> None:
        """Stop judging a prompt that ended, or whose worker died."""
        self._open.pop(seq_id, None)

    def stepped(self, worker: str, step: Stepped, num_cores: int) -> list[Outcome]:
        """Take in a step; what has become of prompts with it."""
        if not self._open:
            return []
        entries = {entry.seq_id: entry for entry in step.entries}
        decoding = {entry.seq_id for entry in step.entries if entry.is_decoding}
        elapsed_ms = (step.ended_ns - step.started_ns) / 1e6
        outcomes = []
        for seq_id, prompt in list(self._open.items()):
            kind = prompt.forecast.kind
            computes, decodes = kind.pair
            entry = entries.get(seq_id) if worker == computes else None
            is_in_it = entry is not None and entry.num_scheduled_tokens > 0
            if is_in_it and num_cores == kind.num_cores:
                assert entry is not None
                prompt.num_steps += 1
                prompt.judged_ms += elapsed_ms
                prompt.judged_tokens += entry.num_scheduled_tokens
            # of another worker's steps those count that began when the prompt was there
            is_beside = is_in_it or (
                worker == decodes != computes and step.started_ns > prompt.placed_ns
            )
            if is_beside and decoding - {seq_id}:
                prompt.itls_ms.append(elapsed_ms)
            if entry is not None and (outcome := self._outcome(seq_id, prompt, entry, step)):
                outcomes.append(outcome)
        return outcomes

    def _outcome(
        self, seq_id: int, prompt: _OpenPrompt, entry: SequenceStep, step: Stepped
    ) -> Outcome | None:
        """Report a prompt that is complete, or has to yield; None while it continues."""
        prompt.num_computed = entry.num_computed_tokens
        kind, max_itl_ms = prompt.forecast.kind, _mean(prompt.itls_ms)
        is_done = bool(entry.token_ids)
        exceeds = max_itl_ms > prompt.forecast.promise_ms * YIELD_RATIO
        yields = not kind.pair.moves and exceeds and not is_done
        if not (is_done or yields):
            if entry.finish_reason is not None or entry.released is not None:
                self.stop_judging(seq_id)
            return None
        self.stop_judging(seq_id)
        took_ms = prompt.waited_ms + (step.ended_ns - prompt.placed_ns) / 1e6
        itl = f" and ITL {max_itl_ms:.1f} ms" if prompt.itls_ms else ""
        is_miss = self._judge(prompt, yields)
        about = f"; took {took_ms:.0f} ms{itl}"
        if yields:
            about = f"; yielded after {prompt.num_computed} tokens{itl}"
        if is_miss:
            about += ", its steps far slower than predicted"
        return Outcome(seq_id, about, yields)

    def _judge(self, prompt: _OpenPrompt, gave_way: bool) -> bool:
        """Enter an outcome into its route's record; True if it is a miss."""
        forecast = prompt.forecast
        record = self.records.setdefault(forecast.kind, PredictionRecord())
        record.num_gave_way += gave_way
        ratios = []
        if prompt.judged_tokens * 2 >= prompt.num_tokens or (gave_way and prompt.judged_tokens):
            expected_ms = forecast.own_ms * prompt.judged_tokens / prompt.num_tokens
            ratios.append(prompt.judged_ms / expected_ms)
        if forecast.kind.is_beside and prompt.itls_ms:
            ratios.append(_mean(prompt.itls_ms) / forecast.max_itl_ms)
        if not ratios:  # others came or went, and with them the cores
            return False
        record.num_judged += 1
        worst = max(ratios)
        share = max(_ERROR_SHARE, 1 / record.num_judged)
        off = min(max(abs(math.log(max(ratio, 1e-3))) for ratio in ratios), math.log(4))
        record.error += share * (off - record.error)
        is_miss = worst >= MISS_RATIO
        record.num_missed += is_miss
        is_clear = prompt.num_steps >= CLEAR_STEPS or record.missed_last
        is_far = record.num_judged >= CLEAR_STEPS and record.error > math.log(MAX_RATIO)
        if not forecast.kind.pair.moves and ((is_miss and is_clear) or is_far):
            record.closed_at = self._measured(forecast.kind)
        record.missed_last = is_miss
        return is_miss


def _mean(values_ms: list[float]) -> float:
    return sum(values_ms) / len(values_ms) if values_ms else 0.0
