"""Compute figures from measured requests, and ratios with their spread.

Owns: the meaning of TTFT, gap, TPOT, late, merged; goodput, throughput, quantiles, and what counts
as a difference; distributions as SVG.
Invariant: pure. Goodput's denominator is every request that was offered; throughput counts the
tokens that arrived within the window; a figure without observations is None.
Never: averages quantiles: a figure over rounds is the median of the rounds' figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import NamedTuple

from appliance.bench.sample import Sample
from appliance.frame.latency import quantile

Figures = dict[str, float | None]

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
TIMES = ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms")


class GoodputTargets(NamedTuple):
    """Targets that a completed request must meet to count for goodput; None asks nothing."""

    ttft_ms: float | None = None
    itl_ms: float | None = None
    """For the 99th percentile of the request's own gaps."""

    @property
    def is_set(self) -> bool:
        """There is a bound to meet."""
        return self != GoodputTargets()

    def is_met(self, sample: Sample) -> bool:
        """Whether a request completed within both targets."""
        if not sample.is_completed or sample.ttft_ms is None:
            return False
        worst_itl_ms = quantile(sample.itl_ms, 0.99)
        is_prompt = self.ttft_ms is None or sample.ttft_ms <= self.ttft_ms
        is_steady = self.itl_ms is None or worst_itl_ms is None or worst_itl_ms <= self.itl_ms
        return is_prompt and is_steady


def times(samples: Iterable[Sample]) -> dict[str, list[float]]:
    """Every observed TTFT, ITL, TPOT and end-to-end time, by kind."""
    seen: dict[str, list[float]] = {name: [] for name in TIMES}
    for sample in samples:
        seen["itl_ms"] += sample.itl_ms
        for name in ("ttft_ms", "tpot_ms"):
            if (value := getattr(sample, name)) is not None:
                seen[name].append(value)
        if sample.is_completed and sample.e2e_ms is not None:
            seen["e2e_ms"].append(sample.e2e_ms)
    return seen


def summarize(
    samples: Sequence[Sample], window_ms: float, slo: GoodputTargets, energy_j: float | None = None
) -> Figures:
    """One round of one arm in figures."""
    num_tokens = sum(at_ms <= window_ms for sample in samples for at_ms in sample.token_times_ms())
    completed = [sample for sample in samples if sample.is_completed]
    figures: Figures = {
        "offered": len(samples),
        "completed": len(completed),
        "refused": sum(sample.is_refused for sample in samples),
        "failed": sum(not s.is_completed and not s.is_refused for s in samples),
        "requests_per_s": sum(_ends_by(s, window_ms) for s in completed) / window_ms * 1000,
        "output_tokens_per_s": num_tokens / window_ms * 1000,
        "goodput_ratio": _share(sum(map(slo.is_met, samples)), len(samples))
        if slo.is_set
        else None,
        "joules_per_token": None if energy_j is None else _share(energy_j, num_tokens),
        "input_tokens": _mean(s.prompt_tokens for s in samples),
        "output_tokens": _mean(s.output_tokens for s in samples),
        "hit_ratio": _hits([(s.cached_tokens, s.prompt_tokens) for s in samples]),
        "infinite_hit_ratio": _hits([(s.reusable_tokens, s.prompt_tokens) for s in samples]),
        "merged_tokens": sum(sample.merged_tokens for sample in samples),
        "late_ms_max": max((sample.late_ms for sample in samples), default=None),
    }
    for name, values in times(samples).items():
        for label, q in QUANTILES.items():
            figures[f"{name}_{label}"] = quantile(values, q)
    return figures


def by_turn(samples: Sequence[Sample]) -> Figures:
    """The median TTFT of each turn of conversations, and what of its prompts was cached."""
    figures: Figures = {}
    for turn in sorted({sample.turn for sample in samples if sample.turn is not None}):
        own = [sample for sample in samples if sample.turn == turn]
        ttft_ms = [sample.ttft_ms for sample in own if sample.ttft_ms is not None]
        figures[f"turn_{turn:02}_ttft_ms"] = quantile(ttft_ms, 0.5)
        figures[f"turn_{turn:02}_hit_ratio"] = _hits(
            [(sample.cached_tokens, sample.prompt_tokens) for sample in own]
        )
    return figures


class Spread(NamedTuple):
    """A figure over several rounds: median, least and most."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """Median, smallest and largest; None where there are no values."""
        if not values:
            return None
        ranked, middle = sorted(values), len(values) // 2
        return cls((ranked[middle] + ranked[~middle]) / 2, ranked[0], ranked[-1])


def spread(rounds: Iterable[Figures], key: str) -> Spread | None:
    """One figure of one arm over its rounds."""
    return Spread.of([value for each in rounds if (value := each.get(key)) is not None])


def ratio(arm: Sequence[Figures], base: Sequence[Figures], key: str) -> Spread | None:
    """An arm over the base, round by round, since what disturbs a round disturbs both."""
    pairs = ((one.get(key), other.get(key)) for one, other in zip(arm, base, strict=True))
    return Spread.of([value / of for value, of in pairs if value is not None and of])


def band(again: Spread | None) -> tuple[float, float] | None:
    """What the same arm, measured twice, differs by; neither of the two is the better one."""
    if again is None or again.low <= 0:
        return None
    reach = max(again.high, 1 / again.low, 1.0)
    return 1 / reach, reach


def verdict(of: Spread | None, noise: tuple[float, float] | None, *, is_more_better: bool) -> str:
    """`better`, `worse`, or `same` where the A/A band has the median ratio in it; or nothing."""
    if of is None or noise is None:
        return ""
    if noise[0] <= of.median <= noise[1]:
        return "same"
    return "better" if (of.median > 1) == is_more_better else "worse"


def _ends_by(sample: Sample, window_ms: float) -> bool:
    return sample.e2e_ms is not None and sample.offered_ms + sample.e2e_ms <= window_ms


def _hits(pairs: Sequence[tuple[int | None, int | None]]) -> float | None:
    """Tokens that were there over all tokens of prompts, where both are told."""
    told = [(part, of) for part, of in pairs if part is not None and of is not None]
    return _share(sum(part for part, _ in told), sum(of for _, of in told))


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _mean(values: Iterable[int | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


_COLOURS = ("#0b6e99", "#d1495b", "#66a182", "#8d6a9f", "#edae49", "#30343f")
_WIDTH, _PANEL_HEIGHT = 720, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 20, 40, 40
_MAX_POINTS = 400
_SHARES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.99)

Series = Mapping[str, Sequence[float]]
"""Values in ms by arm."""


def cumulative(panels: Mapping[str, Series]) -> str:
    """A document with the panels below each other, by title; an empty one says so."""
    height = _PANEL_HEIGHT * len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}"'
        f' width="{_WIDTH}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
    ]
    for index, (title, series) in enumerate(panels.items()):
        parts.append(f'<g transform="translate(0 {index * _PANEL_HEIGHT})">')
        parts += _panel(title, series)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


def _panel(title: str, series: Series) -> list[str]:
    positive = [value for values in series.values() for value in values if value > 0]
    if not positive:
        return [_text(_LEFT, _TOP - 16, f"{title}: nothing observed")]
    low, high = math.log10(min(positive)), math.log10(max(positive))
    span = max(high - low, 0.01)

    def x(value: float) -> float:
        share = (math.log10(value) - low) / span
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    parts = [_text(_LEFT, _TOP - 16, f"{title}, ms, logarithmic; share of all that is not above")]
    parts += _grid(x, min(positive), max(positive))
    for index, (label, values) in enumerate(series.items()):
        colour = _COLOURS[index % len(_COLOURS)]
        ranked = sorted(value for value in values if value > 0)
        points = " ".join(f"{x(value):.1f},{_y(share):.1f}" for value, share in _steps(ranked))
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        parts.append(_text(_WIDTH - 200, _y(0) - 12 * (len(series) - index), label, colour))
    return parts


def _grid(x: Callable[[float], float], low: float, high: float) -> list[str]:
    """Lines at shares, and at 1, 2 and 5 of every decade between the extremes."""
    parts = []
    for share in _SHARES:
        parts.append(_line(_LEFT, _y(share), _WIDTH - _RIGHT, _y(share)))
        parts.append(_text(_LEFT - 6, _y(share) + 4, f"{share:g}", anchor="end"))
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    marks = (step * 10.0**decade for decade in decades for step in (1, 2, 5))
    for mark in (low, *(mark for mark in marks if low * 1.1 < mark <= high)):
        parts.append(_line(x(mark), _y(0), x(mark), _y(1)))
        parts.append(_text(x(mark), _y(0) + 16, f"{mark:.3g}", anchor="middle"))
    return parts


def _steps(ranked: Sequence[float]) -> list[tuple[float, float]]:
    """Values with the share of all that is not above them; thinned out, with both ends kept."""
    last = len(ranked) - 1
    stride = max(1, last // _MAX_POINTS)
    chosen = sorted({*range(0, last + 1, stride), last})
    return [(ranked[index], (index + 1) / (last + 1)) for index in chosen if index >= 0]


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="#ddd"/>'


def _y(share: float) -> float:
    return _PANEL_HEIGHT - _BOTTOM - share * (_PANEL_HEIGHT - _TOP - _BOTTOM)


def _text(x: float, y: float, text: str, colour: str = "black", anchor: str = "start") -> str:
    place = f'x="{x:.0f}" y="{y:.0f}" fill="{colour}" text-anchor="{anchor}"'
    return f"<text {place}>{escape(text)}</text>"
