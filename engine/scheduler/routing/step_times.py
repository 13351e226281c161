"""Learn how long a worker's steps take from the steps that it has run.

Facts are of powers of two. Between measured sizes straight lines are read, and beyond them a known
form: in proportion to the tokens, plus attention.

Invariant: a prediction is finite, positive, and within a kind never falls when the step grows.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from engine.profile.facts import DECODE_MS, PROMPT_MS, FactKey, Profile
from engine.wire.messages import SHALLOW, MeasuredStep, SequenceStep, StepShape

MIN_STEPS = 3
"""Minimum steps of a kind before it is predicted."""
MARGIN = 1.25
"""Factor on predictions beyond the measured sizes."""
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
            else:
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

    def key(self, place: str = "") -> FactKey:
        """Return the fact of which such a step is a sample: about its prompt, if it has one."""
        if size := self.num_prefill_tokens:
            depth = depth_class(self.num_attended / size - size / 2)
            return FactKey(PROMPT_MS, size_class(size), depth, place)
        batch = max(self.batch, 1)
        return FactKey(DECODE_MS, size_class(batch), depth_class(self.context / batch), place)


def size_class(size: float) -> int:
    """Return the nearest power of two."""
    return 1 << max(round(math.log2(size)), 0) if size > 1 else 1


def depth_class(depth: float) -> int:
    """Return the nearest power of two; 0 if earlier positions hardly count."""
    return 0 if depth < SHALLOW else size_class(depth)


def place_of(worker: str, num_cores: int) -> str:
    return f"{worker} on {num_cores}"


def worker_of(place: str) -> str:
    return place.rpartition(" on ")[0]


class _Line(NamedTuple):
    """Steps of one kind at one place, as their facts say: base(size) + slope * reach."""

    own_share: float
    """The share of its own tokens that each token of a step attends to."""
    sizes: list[int]
    bases: list[float]
    slope: float | None
    """Milliseconds for each pair of a token and a position before; None: not known."""
    extents: list[tuple[float, float]]
    """The largest size and reach that each fact stands for."""
    max_depth: float
    num_steps: int

    @classmethod
    def of(cls, profile: Profile, what: str, place: str) -> _Line | None:
        """Read the facts; None: there are none."""
        own_share = 0.5 if what == PROMPT_MS else 0.0
        found: dict[int, list[tuple[float, float, int]]] = {}
        extents, max_depth, num_steps = [], 0.0, 0
        for key, fact in profile.about(what, place):
            row = _reach(own_share, key.size, key.depth), fact.typical, len(fact.samples)
            found.setdefault(key.size, []).append(row)
            most, deepest = key.size * _SQRT2, max(SHALLOW, key.depth * _SQRT2)
            extents.append((most, _reach(own_share, most, deepest)))
            max_depth = max(max_depth, deepest)
            num_steps += len(fact.samples)
        if not found:
            return None
        ends = [(min(rows), max(rows)) for rows in found.values() if len(rows) > 1]
        slopes = [max(far[1] - near[1], 0.0) / (far[0] - near[0]) for near, far in ends]
        slope = statistics.median(slopes) if slopes else None
        sizes, bases, base_ms = sorted(found), [], 0.0
        for size in sizes:
            reach, ms, _ = max(found[size], key=lambda row: (row[2], -row[0]))
            base_ms = max(base_ms, ms - (slope or 0.0) * reach, ms * _LEAST_SHARE)
            bases.append(base_ms)
        return cls(own_share, sizes, bases, slope, extents, max_depth, num_steps)

    def ms(self, size: float, reach: float) -> float:
        """Estimate such a step by the form."""
        return max(self._base_ms(size) + (self.slope or 0.0) * reach, _MIN_MS)

    def ms_of(self, key: FactKey) -> float:
        return self.ms(key.size, _reach(self.own_share, key.size, key.depth))

    def predict_ms(self, size: int, reach: float) -> float | None:
        """Predict such a step; None: too little is measured."""
        if self.num_steps < MIN_STEPS:
            return None
        if any(size <= most and reach <= deepest for most, deepest in self.extents):
            return self.ms(size, reach)
        is_deeper = reach / size - self.own_share * size > self.max_depth
        if len(self.sizes) < 2 or (is_deeper and self.slope is None):
            return None
        return self.ms(size, reach) * MARGIN

    @property
    def intercept_ms(self) -> float:
        """The time of a step of this kind with nothing in it."""
        return max(self.bases[0] - max(self._base_ms(2) - self._base_ms(1), 0.0), 0.0)

    def _base_ms(self, size: float) -> float:
        """Compute the part of a step's time that does not depend on attention."""
        at = bisect_left(self.sizes, size)
        if at == 0:
            return self.bases[0]
        if at == len(self.sizes):
            return self.bases[-1] * size / self.sizes[-1]
        (left, right), (low, high) = self.sizes[at - 1 : at + 1], self.bases[at - 1 : at + 1]
        return low + (high - low) * (size - left) / (right - left)


def _reach(own_share: float, size: float, depth: float) -> float:
    return size * (depth + own_share * size)


class StepTimes:
    """One worker on one number of cores.

    Args:
        profile: has the facts.
        place: as place_of() names it.
    """

    def __init__(self, profile: Profile, place: str) -> None:
        self._profile = profile
        self._place = place
        self._lines: dict[str, _Line] = {}
        """What the facts say, read anew after steps have been learnt."""
        self._num_steps: Counter[int] = Counter()

    def learn(self, steps: Iterable[tuple[StepLoad, float]]) -> None:
        """Learn from steps: the load of each, and the milliseconds that it took.

        Each is a sample of the fact with the nearest sizes, and is scaled to them.
        """
        for load, elapsed_ms in steps:
            key, at_ms = load.key(self._place), max(elapsed_ms, _MIN_MS)
            size, reach = load[:2] if load.num_prefill_tokens else load[2:]
            decode = self._line(DECODE_MS)
            if load.num_prefill_tokens and load.batch and decode:
                more_ms = decode.ms(load.batch, load.context) - decode.intercept_ms
                at_ms = max(at_ms - max(more_ms, 0.0), at_ms / 4)
            if line := self._line(key.what):
                at_ms *= line.ms_of(key) / line.ms(size, reach)
            self._profile.observe(key, at_ms)
            self._num_steps[key.size] += load.num_prefill_tokens > 0
        self._lines.clear()

    def predict_ms(self, load: StepLoad) -> float | None:
        """Predict such a step; None: it would be a guess."""
        prompt, decode = self._line(PROMPT_MS), self._line(DECODE_MS)
        own_ms = prompt.predict_ms(*load[:2]) if prompt and load.num_prefill_tokens else None
        more_ms = decode.predict_ms(*load[2:]) if decode and load.batch else None
        if not (load.num_prefill_tokens and load.batch):
            return own_ms if load.num_prefill_tokens else more_ms
        if own_ms is None or more_ms is None or decode is None:
            return None
        # single tokens are added where the weights are read anyway
        return own_ms + max(more_ms - decode.intercept_ms, 0.0)

    def guess_prompt_ms(self, num_tokens: int, num_attended: float) -> float | None:
        """Estimate a prompt's step by the form from any facts; None: no fact."""
        line = self._line(PROMPT_MS)
        return None if line is None else line.ms(num_tokens, num_attended)

    def num_prompt_steps(self, size: int) -> int:
        """Count the steps since the start with prompt tokens of a size class."""
        return self._num_steps[size]

    def _line(self, what: str) -> _Line | None:
        if what not in self._lines and (line := _Line.of(self._profile, what, self._place)):
            self._lines[what] = line
        return self._lines.get(what)
