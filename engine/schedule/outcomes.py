"""What was predicted of each prompt that elastic roles placed, and what came of it.

Owns: the prompts that are being computed as a forecast said, each way's record since the start, and
which ways are closed.
Invariants: a forecast is judged once, by steps on the cores that it presumed, and on nothing else;
a way that was twice as bad as predicted is closed until steps of its size have been measured anew.
Never: reads a clock, predicts, touches a sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.schedule.elastic import Forecast, Way
from engine.schedule.step_times import MAX_ERROR
from engine.wire.messages import SequenceStep, Stepped

MISS_RATIO = 2.0
"""A prompt, or the gaps beside it, that took so many times what was predicted is a miss."""
GIVE_WAY_RATIO = 1.5
"""Gaps beside a prompt that exceed what was promised by this end its stay on their worker."""
CLEAR_STEPS = 3
"""A miss of so many steps is no jitter; one of fewer has to be the second in a row."""
ANEW_STEPS = 3
"""Steps of a way's size, after it was closed, that open it again."""
_ERROR_SHARE = 0.3
"""That the newest outcome has in a way's average error."""

Measured = Callable[[Way], int]
"""Steps that have been made of a way's size, on the cores that it uses."""


@dataclass(slots=True)
class Record:
    """A way's outcomes since the start."""

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
    """For people, to follow what was predicted."""
    gives_way: bool = False
    """It should leave the worker, which is in the middle of it."""


@dataclass(slots=True)
class _OpenPrompt:
    """A prompt under way."""

    forecast: Forecast
    num_tokens: int
    placed_ns: int
    num_computed: int = 0
    num_steps: int = 0
    judged_ms: float = 0.0
    """Of its steps on the cores presumed, and the tokens that those computed."""
    judged_tokens: int = 0
    gaps_ms: list[float] = field(default_factory=list)


class Outcomes:
    """All ways and all prompts under way.

    Args:
        measured: counts steps.
    """

    def __init__(self, measured: Measured) -> None:
        self.records: dict[Way, Record] = {}
        self._measured = measured
        self._open: dict[int, _OpenPrompt] = {}

    def closed(self) -> frozenset[Way]:
        """Ways not to be taken; those that have been measured anew are open again."""
        ways = [way for way, record in self.records.items() if record.closed_at is not None]
        for way in ways:
            record = self.records[way]
            if self._measured(way) >= (record.closed_at or 0) + ANEW_STEPS:
                record.closed_at, record.error, record.missed_last = None, 0.0, False
        return frozenset(way for way in ways if self.records[way].closed_at is not None)

    def begin(
        self,
        seq_id: int,
        forecast: Forecast,
        *,
        num_tokens: int,
        at_ns: int,
    ) -> None:
        """A prompt has been placed.

        Args:
            seq_id: whose.
            forecast: by which it was placed.
            num_tokens: of the prompt.
            at_ns: now, by the clock of the workers' steps.
        """
        self._open[seq_id] = _OpenPrompt(forecast, num_tokens, at_ns)

    def forget(self, seq_id: int) -> None:
        """It has ended, or its worker has: nothing can be said of its forecast any more."""
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
            way = prompt.forecast.way
            computes, decodes = way.pair
            entry = entries.get(seq_id) if worker == computes else None
            is_in_it = entry is not None and entry.num_scheduled_tokens > 0
            if is_in_it and num_cores == way.num_cores:
                assert entry is not None
                prompt.num_steps += 1
                prompt.judged_ms += elapsed_ms
                prompt.judged_tokens += entry.num_scheduled_tokens
            # of another worker's steps those count that began when the prompt was there
            is_beside = is_in_it or (
                worker == decodes != computes and step.started_ns > prompt.placed_ns
            )
            if is_beside and decoding - {seq_id}:
                prompt.gaps_ms.append(elapsed_ms)
            if entry is not None and (outcome := self._outcome(seq_id, prompt, entry, step)):
                outcomes.append(outcome)
        return outcomes

    def _outcome(
        self, seq_id: int, prompt: _OpenPrompt, entry: SequenceStep, step: Stepped
    ) -> Outcome | None:
        """Of a prompt that is complete, or has to give way; None: it goes on."""
        prompt.num_computed = entry.num_computed_tokens
        way, gap_ms = prompt.forecast.way, _mean(prompt.gaps_ms)
        is_done = bool(entry.token_ids)
        exceeds = gap_ms > prompt.forecast.promise_ms * GIVE_WAY_RATIO
        gives_way = not way.pair.moves and exceeds and not is_done
        if not (is_done or gives_way):
            if entry.finish_reason is not None or entry.released is not None:
                self.forget(seq_id)
            return None
        self.forget(seq_id)
        took_ms = (step.ended_ns - prompt.placed_ns) / 1e6
        gaps = f" and gaps of {gap_ms:.1f} ms" if prompt.gaps_ms else ""
        is_miss = self._judge(prompt, gives_way)
        about = f"; it took {took_ms:.0f} ms{gaps}"
        if gives_way:
            about = f"; gave way after {prompt.num_computed} tokens{gaps}"
        if is_miss:
            about += ", twice as bad or worse"
        return Outcome(seq_id, about, gives_way)

    def _judge(self, prompt: _OpenPrompt, gave_way: bool) -> bool:
        """Enter an outcome into its way's record; True if it is a miss."""
        forecast = prompt.forecast
        record = self.records.setdefault(forecast.way, Record())
        record.num_gave_way += gave_way
        ratios = []
        if prompt.judged_tokens * 2 >= prompt.num_tokens or (gave_way and prompt.judged_tokens):
            expected_ms = forecast.own_ms * prompt.judged_tokens / prompt.num_tokens
            ratios.append(prompt.judged_ms / expected_ms)
        if forecast.way.is_beside and prompt.gaps_ms:
            ratios.append(_mean(prompt.gaps_ms) / forecast.itl_ms)
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
        is_far = record.num_judged >= CLEAR_STEPS and record.error > MAX_ERROR
        if not forecast.way.pair.moves and ((is_miss and is_clear) or is_far):
            record.closed_at = self._measured(forecast.way)
        record.missed_last = is_miss
        return is_miss


def _mean(values_ms: list[float]) -> float:
    return sum(values_ms) / len(values_ms) if values_ms else 0.0
