"""Learn how long a worker's steps take from the steps that it has run.

Owns: how a step of any size is read out of facts in powers of two: by straight lines between
measured sizes, and beyond them by a known form (in proportion to the tokens, plus attention).
Invariant: a prediction is finite, positive, and within a kind never falls when the step grows.
Never: reads a clock; predicts beyond the measured sizes from fewer than two of them.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from engine.profile.facts import DECODE_MS, PROMPT_MS, FactKey, Profile
from engine.wire.messages import MeasuredStep, SequenceStep, StepShape

MIN_STEPS = 3
"""Minimum steps of a kind before it is predicted."""
MARGIN = 1.25
"""Factor on predictions beyond the measured sizes."""
SHALLOW = 128
"""Positions before a step's tokens that hardly count."""
_SQRT2 = math.sqrt(2)
_MIN_MS = 1e-3
_LEAST_SHARE = 0.25
"""Minimum share of a measured step that is not attention over earlier positions."""


class StepLoad(NamedTuple):
    """What one step computes.

    Kinds follow from what a token costs: alone it is read-bound, among others of its sequence
    compute-bound, in either phase.
    """

    num_prefill_tokens: int = 0
    num_attended: float = 0.0
    """Pairs of a prompt token and a position before it."""
    batch: int = 0
    """Tokens of decoding sequences: one each, besides their drafts."""
    context: int = 0
    """Positions that those attend to, all together."""

    @classmethod
    def of(cls, entries: Iterable[SequenceStep]) -> StepLoad:
        """Compute the load of a finished step."""
        num_prefill_tokens, num_attended, batch, context = 0, 0.0, 0, 0
        for entry in entries:
            count = entry.num_scheduled_tokens
            if entry.is_decoding:
                batch += count
                context += entry.num_computed_tokens
            elif count:
                num_prefill_tokens += count
                num_attended += count * (entry.num_computed_tokens - count / 2)
        return cls(num_prefill_tokens, num_attended, batch, context)

    @classmethod
    def alike(cls, step: MeasuredStep | StepShape) -> StepLoad:
        """Compute the load of a step of equal sequences."""
        computed = step.num_before + step.num_tokens
        if step.num_tokens == 1:
            return cls(batch=step.num_sequences, context=step.num_sequences * computed)
        num_tokens = step.num_sequences * step.num_tokens
        return cls(num_tokens, num_tokens * (computed - step.num_tokens / 2))


def size_class(size: float) -> int:
    """Return the nearest power of two."""
    return 1 << max(round(math.log2(size)), 0) if size > 1 else 1


def depth_class(depth: float) -> int:
    """Return the nearest power of two; 0 if earlier positions hardly count."""
    return 0 if depth < SHALLOW else size_class(depth)


class _Row(NamedTuple):
    """A fact in the form in which it is read."""

    reach: float
    ms: float
    num_samples: int


class _Line(NamedTuple):
    """Facts of one kind at one place, ready to be read: base(size) + slope * reach."""

    sizes: list[int]
    bases: list[float]
    slope: float | None
    """Milliseconds for each pair of a token and a position before; None: not known."""
    extents: list[tuple[float, float]]
    """The largest size and reach that each fact stands for."""
    max_depth: float
    num_steps: int

    def base_ms(self, size: float) -> float:
        """Compute the part of a step's time that does not depend on attention."""
        at = bisect_left(self.sizes, size)
        if at == 0:
            return self.bases[0]
        if at == len(self.sizes):
            return self.bases[-1] * size / self.sizes[-1]
        (left, right), (low, high) = self.sizes[at - 1 : at + 1], self.bases[at - 1 : at + 1]
        return low + (high - low) * (size - left) / (right - left)


class _Kind:
    """Steps of prompts, or of decoding, on one worker and number of cores.

    Args:
        profile: has the facts.
        what: their name.
        place: where they were measured.
        own_share: of a step's tokens, how many each of them attends to in the step itself.
    """

    def __init__(self, profile: Profile, what: str, place: str, own_share: float) -> None:
        self._profile = profile
        self._what = what
        self._place = place
        self._own_share = own_share
        self._line: _Line | None = None

    def observe(self, size: int, reach: float, elapsed_ms: float) -> None:
        """Enter a step under the nearest sizes, scaled to them.

        Predictions include it after refresh(), so that many steps are read together.
        """
        depth = depth_class(self._depth(size, reach))
        key = FactKey(self._what, size_class(size), depth, self._place)
        at_ms = max(elapsed_ms, _MIN_MS)
        known_ms = self.guess_ms(size, reach)
        if known_ms is not None:
            centre_ms = self.guess_ms(key.size, self._reach(key.size, key.depth))
            at_ms *= (centre_ms or known_ms) / known_ms
        self._profile.observe(key, at_ms)

    def refresh(self) -> None:
        """Read the facts anew before the next prediction."""
        self._line = None

    def predict_ms(self, size: int, reach: float) -> float | None:
        """Predict such a step; None: too little is measured."""
        line = self._read()
        if line is None or line.num_steps < MIN_STEPS:
            return None
        guess_ms = self._at(line, size, reach)
        if any(size <= most and reach <= deepest for most, deepest in line.extents):
            return guess_ms
        is_deeper = self._depth(size, reach) > line.max_depth
        if len(line.sizes) < 2 or (is_deeper and line.slope is None):
            return None
        return guess_ms * MARGIN

    def guess_ms(self, size: int, reach: float) -> float | None:
        """Estimate such a step by the form from any facts; None: no fact."""
        line = self._read()
        return None if line is None else self._at(line, size, reach)

    @property
    def intercept_ms(self) -> float:
        """The time of a step of this kind with nothing in it."""
        line = self._read()
        if line is None:
            return 0.0
        return max(line.bases[0] - max(line.base_ms(2) - line.base_ms(1), 0.0), 0.0)

    def _at(self, line: _Line, size: float, reach: float) -> float:
        return max(line.base_ms(size) + (line.slope or 0.0) * reach, _MIN_MS)

    def _reach(self, size: float, depth: float) -> float:
        return size * (depth + self._own_share * size)

    def _depth(self, size: float, reach: float) -> float:
        """Positions before the step's tokens, on average."""
        return max(reach / size - self._own_share * size, 0.0)

    def _read(self) -> _Line | None:
        """Read the facts; cache them until one changes."""
        if self._line is None:
            found: dict[int, list[_Row]] = {}
            extents, max_depth, num_steps = [], 0.0, 0
            for key, fact in self._profile.about(self._what, self._place):
                reach = self._reach(key.size, key.depth)
                row = _Row(reach, fact.typical, len(fact.samples))
                found.setdefault(key.size, []).append(row)
                most, deepest = key.size * _SQRT2, max(SHALLOW, key.depth * _SQRT2)
                extents.append((most, self._reach(most, deepest)))
                max_depth = max(max_depth, deepest)
                num_steps += len(fact.samples)
            if not found:
                return None
            slope = _slope(found.values())
            sizes, bases, base_ms = sorted(found), [], 0.0
            for size in sizes:
                reach, ms, _ = max(found[size], key=lambda row: (row.num_samples, -row.reach))
                base_ms = max(base_ms, ms - (slope or 0.0) * reach, ms * _LEAST_SHARE)
                bases.append(base_ms)
            self._line = _Line(sizes, bases, slope, extents, max_depth, num_steps)
        return self._line


def _slope(by_size: Iterable[list[_Row]]) -> float | None:
    """Milliseconds for each pair that is attended to: between the least and the most, by size."""
    slopes = []
    for rows in by_size:
        near, far = min(rows), max(rows)
        if far.reach > near.reach:
            slopes.append(max(far.ms - near.ms, 0.0) / (far.reach - near.reach))
    return statistics.median(slopes) if slopes else None


def place_of(worker: str, num_cores: int) -> str:
    return f"{worker} on {num_cores}"


def worker_of(place: str) -> str:
    return place.rpartition(" on ")[0]


class StepTimes:
    """One worker on one number of cores.

    Args:
        profile: has the facts.
        place: as place_of() names it.
    """

    def __init__(self, profile: Profile, place: str) -> None:
        self._decode = _Kind(profile, DECODE_MS, place, 0.0)
        self._prompt = _Kind(profile, PROMPT_MS, place, 0.5)
        self._num_steps: Counter[int] = Counter()

    def learn(self, steps: Iterable[tuple[StepLoad, float]]) -> None:
        """Learn from steps: the load of each, and the milliseconds that it took."""
        for load, elapsed_ms in steps:
            self._observe(load, elapsed_ms)
        self._prompt.refresh()
        self._decode.refresh()

    def _observe(self, load: StepLoad, elapsed_ms: float) -> None:
        if load.num_prefill_tokens:
            extra_ms = 0.0
            if load.batch:
                guess_ms = self._decode.guess_ms(load.batch, load.context) or 0.0
                extra_ms = max(guess_ms - self._decode.intercept_ms, 0.0)
            own_ms = max(elapsed_ms - extra_ms, elapsed_ms / 4)
            self._prompt.observe(load.num_prefill_tokens, load.num_attended, own_ms)
            self._num_steps[size_class(load.num_prefill_tokens)] += 1
        elif load.batch:
            self._decode.observe(load.batch, load.context, elapsed_ms)

    def predict_ms(self, load: StepLoad) -> float | None:
        """Predict such a step; None: it would be a guess."""
        decode_ms = self._decode.predict_ms(load.batch, load.context) if load.batch else None
        if not load.num_prefill_tokens:
            return decode_ms
        own_ms = self._prompt.predict_ms(load.num_prefill_tokens, load.num_attended)
        return self._together(own_ms, decode_ms, load)

    def guess_ms(self, load: StepLoad) -> float | None:
        """Estimate such a step by the form from any facts; None: no fact."""
        decode_ms = self._decode.guess_ms(load.batch, load.context) if load.batch else None
        if not load.num_prefill_tokens:
            return decode_ms
        own_ms = self._prompt.guess_ms(load.num_prefill_tokens, load.num_attended)
        return self._together(own_ms, decode_ms or 0.0, load)

    def num_prompt_steps(self, size: int) -> int:
        """Count the steps since the start with prompt tokens of a size class."""
        return self._num_steps[size]

    def _together(
        self, own_ms: float | None, decode_ms: float | None, load: StepLoad
    ) -> float | None:
        """Add to a prompt's step what single tokens add where the weights are read anyway."""
        if own_ms is None or not load.batch:
            return own_ms
        if decode_ms is None:
            return None
        return own_ms + max(decode_ms - self._decode.intercept_ms, 0.0)
