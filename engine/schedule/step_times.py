"""How long a worker's steps take, learnt from the steps that it has made.

Owns: one model for each worker and number of cores: a step's time by its prompt tokens, its batch
and what they attend to; how large the steps were that it has learnt from, and how far it was off.
Invariant: a prediction is finite, positive, and within a kind never falls when the step grows; an
outlier moves it no further than a step of thrice the expected time would.
Never: reads a clock; guesses before it has seen a few steps of a kind, beyond the largest that it
has seen, or where steps of such a size keep taking another time than it says.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from engine.wire.messages import RehearsedStep, SequenceStep

MIN_STEPS = 3
"""Of a kind, before it is predicted: as many as a fit has weights."""
MEMORY_STEPS = 200.0
"""After so many more steps, one counts for a third of the newest."""
MAX_ERROR = math.log(1.5)
"""Of the natural logarithm of a step's time, on average: half as long again, or two thirds. Jitter
to both sides averages out; what stays is what a line cannot follow."""
_ERROR_SHARE = 0.05
"""That the newest step has in the average error."""
_SLACK = 1.1
"""A step this much deeper than the deepest that was measured still counts as measured."""
_OUTLIER_RATIO = 3.0
_MIN_MS = 1e-3
_TINY = 1e-9


class StepLoad(NamedTuple):
    """What there is to compute in one step.

    Kinds follow from what a token costs: alone it is read-bound, among others of its sequence
    compute-bound, whatever the phase is called.
    """

    num_prefill_tokens: int = 0
    num_attended: float = 0.0
    """Pairs of a prompt token and a position before it."""
    batch: int = 0
    """Sequences with one token."""
    context: int = 0
    """Positions that those attend to, all together."""

    @classmethod
    def of(cls, entries: Iterable[SequenceStep]) -> StepLoad:
        """The load of a step that has been made."""
        num_prefill_tokens, num_attended, batch, context = 0, 0.0, 0, 0
        for entry in entries:
            count = entry.num_scheduled_tokens
            if entry.is_decoding:
                batch += 1
                context += entry.num_computed_tokens
            elif count:
                num_prefill_tokens += count
                num_attended += count * (entry.num_computed_tokens - count / 2)
        return cls(num_prefill_tokens, num_attended, batch, context)

    @classmethod
    def alike(cls, step: RehearsedStep) -> StepLoad:
        """The load of a step of equal sequences."""
        computed = step.num_before + step.num_tokens
        if step.num_tokens == 1:
            return cls(batch=step.num_sequences, context=step.num_sequences * computed)
        num_tokens = step.num_sequences * step.num_tokens
        return cls(num_tokens, num_tokens * (computed - step.num_tokens / 2))


class _Fit:
    """A line through the origin of `1, x, y`, with no negative slope, from decayed sums.

    A step's error counts relative to its expected time, so that short ones count as much as long.
    """

    def __init__(self, scales: tuple[float, float, float]) -> None:
        self.num_steps = 0
        self._scales = scales
        self._weights = [0.0, 0.0, 0.0]
        self._products = [[0.0] * 3 for _ in range(3)]
        self._targets = [0.0] * 3

    def value_ms(self, x: float, y: float) -> float:
        """The time at a point."""
        return sum(w * f for w, f in zip(self._weights, self._scaled(x, y), strict=True))

    def observe(self, x: float, y: float, elapsed_ms: float) -> None:
        """Learn from one step: its load, and what it took."""
        scale_ms = max(elapsed_ms, _MIN_MS)
        if self.num_steps >= MIN_STEPS:
            scale_ms = max(self.value_ms(x, y), _MIN_MS)
            elapsed_ms = min(elapsed_ms, scale_ms * _OUTLIER_RATIO)
        self.num_steps += 1
        features = self._scaled(x, y)
        weight = scale_ms**-2
        keep = 1.0 - 1.0 / MEMORY_STEPS
        for i, feature in enumerate(features):
            for j, other in enumerate(features):
                self._products[i][j] = keep * self._products[i][j] + weight * feature * other
            self._targets[i] = keep * self._targets[i] + weight * feature * elapsed_ms
        for _ in range(4):  # few are enough: it starts from where the last step left it
            self._descend()

    def _descend(self) -> None:
        """Coordinate descent, each weight to its best that is not negative."""
        for i, row in enumerate(self._products):
            rest = sum(row[j] * self._weights[j] for j in range(3) if j != i)
            self._weights[i] = max(0.0, (self._targets[i] - rest) / (row[i] + _TINY))

    def _scaled(self, x: float, y: float) -> tuple[float, float, float]:
        one, x_scale, y_scale = self._scales
        return one, x / x_scale, y / y_scale


class _MeasuredRange:
    """What has been measured of a kind: how large steps were, and how far they were mispredicted.

    A size is a class: tokens to within a quarter of a doubling for the extent, to within a doubling
    for the error, so that both hold a few dozen numbers however many steps there are.
    """

    def __init__(self) -> None:
        self._deepest: dict[int, float] = {}
        """By extent, the largest sum of attended positions."""
        self._errors: dict[int, float] = {}
        self._num_errors: Counter[int] = Counter()
        self.num_steps: Counter[int] = Counter()
        """By class of size, since the start."""

    def observe(self, size: int, depth: float, error: float | None) -> None:
        """Learn from one step, and the log of the ratio by which it was mispredicted, if known."""
        extent, cls = _extent(size), size_class(size)
        if error is not None and self.covers(size, depth):
            self._num_errors[cls] += 1
            share = max(_ERROR_SHARE, 1 / self._num_errors[cls])
            error = max(-2 * MAX_ERROR, min(error, 2 * MAX_ERROR))  # a stall is one step
            self._errors[cls] = share * error + (1 - share) * self._errors.get(cls, 0.0)
        self._deepest[extent] = max(depth, self._deepest.get(extent, 0.0))
        self.num_steps[cls] += 1

    def covers(self, size: int, depth: float) -> bool:
        """True if a step at least as large in both respects has been measured."""
        extent = _extent(size)
        return any(
            extent <= seen and depth <= deepest * _SLACK for seen, deepest in self._deepest.items()
        )

    def is_reliable(self, size: int) -> bool:
        """True if steps of this size have gone about as predicted."""
        return abs(self._errors.get(size_class(size), 0.0)) <= MAX_ERROR


def size_class(size: int) -> int:
    """Sizes to within a doubling."""
    return size.bit_length()


def _extent(size: int) -> int:
    return round(4 * math.log2(max(size, 1)))


class StepTimes:
    """One worker on one number of cores."""

    def __init__(self) -> None:
        self._decode = _Fit((1.0, 8.0, 4096.0))
        self._prefill = _Fit((1.0, 256.0, 65536.0))
        self._decode_ground, self._prefill_ground = _MeasuredRange(), _MeasuredRange()

    def observe(self, load: StepLoad, elapsed_ms: float) -> None:
        """Learn from one step: its load, and what it took."""
        expected_ms = self.guess_ms(load)
        error = None
        if expected_ms is not None:
            error = math.log(max(elapsed_ms, _MIN_MS) / expected_ms)
        if load.num_prefill_tokens:
            own_ms = max(elapsed_ms - self._decode_extra_ms(load), elapsed_ms / 4)
            self._prefill.observe(load.num_prefill_tokens, load.num_attended, own_ms)
            self._prefill_ground.observe(load.num_prefill_tokens, load.num_attended, error)
        elif load.batch:
            self._decode.observe(load.batch, load.context, elapsed_ms)
            self._decode_ground.observe(load.batch, load.context, error)

    def predict_ms(self, load: StepLoad) -> float | None:
        """The time of such a step; None where that would be a guess."""
        for ground, size, depth in (
            (self._prefill_ground, load.num_prefill_tokens, load.num_attended),
            (self._decode_ground, load.batch, load.context),
        ):
            if size and not (ground.covers(size, depth) and ground.is_reliable(size)):
                return None
        return self.guess_ms(load)

    def num_prompt_steps(self, size: int) -> int:
        """Steps that it has made with prompt tokens of a class of sizes."""
        return self._prefill_ground.num_steps[size]

    def guess_ms(self, load: StepLoad) -> float | None:
        """By the fit, wherever it may lie; None while too few steps of its kind have been seen."""
        if load.num_prefill_tokens:
            if self._prefill.num_steps < MIN_STEPS:
                return None
            own_ms = self._prefill.value_ms(load.num_prefill_tokens, load.num_attended)
            return max(own_ms + self._decode_extra_ms(load), _MIN_MS)
        if self._decode.num_steps < MIN_STEPS:
            return None
        return max(self._decode.value_ms(load.batch, load.context), _MIN_MS)

    def _decode_extra_ms(self, load: StepLoad) -> float:
        """What single tokens add to a step that reads the weights anyway."""
        return self._decode.value_ms(load.batch, load.context) - self._decode.value_ms(0, 0)
