"""Compute figures from measured requests, and ratios with their spread.

A figure over rounds is the median of the rounds' figures: quantiles are not averaged.

Invariant: goodput's denominator is every request that was offered; throughput counts the tokens
that arrived within the window; a figure without observations is None.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from appliance.bench.sample import Sample
from appliance.observe.frame.latency import quantile

Figures = dict[str, float | None]

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
TIMES = ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms")


class GoodputTargets(NamedTuple):
    """Targets that a completed request must meet to count for goodput; None asks nothing."""

    ttft_ms: float | None = None
    itl_ms: float | None = None
    """Limit of the 99th percentile of the request's own gaps."""

    @property
    def is_set(self) -> bool:
        """There is a bound to meet."""
        return self != GoodputTargets()

    def is_met(self, sample: Sample) -> bool:
        """Say whether a request completed within both targets."""
        if not sample.is_completed or sample.ttft_ms is None:
            return False
        worst_itl_ms = quantile(sample.itl_ms, 0.99)
        is_prompt = self.ttft_ms is None or sample.ttft_ms <= self.ttft_ms
        is_steady = self.itl_ms is None or worst_itl_ms is None or worst_itl_ms <= self.itl_ms
        return is_prompt and is_steady


def times(samples: Iterable[Sample]) -> dict[str, list[float]]:
    """Collect every observed TTFT, ITL, TPOT and end-to-end time, by kind."""
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
    samples: Sequence[Sample],
    window_ms: float,
    slo: GoodputTargets,
    energy_j: float | None = None,
    starved_ratio: float | None = None,
) -> Figures:
    """Summarise one round of one arm in figures."""
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
        "burst_ratio": _share(
            sum(sample.burst_tokens for sample in completed),
            sum(max((sample.output_tokens or 0) - 1, 0) for sample in completed),
        ),
        "starved_ratio": starved_ratio,
        "late_ms_max": max((sample.late_ms for sample in samples), default=None),
    }
    for name, values in times(samples).items():
        for label, q in QUANTILES.items():
            figures[f"{name}_{label}"] = quantile(values, q)
    return figures


class Spread(NamedTuple):
    """A figure over several rounds: median, least and most."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """Compute median, smallest and largest; None: no values."""
        if not values:
            return None
        ranked, middle = sorted(values), len(values) // 2
        return cls((ranked[middle] + ranked[~middle]) / 2, ranked[0], ranked[-1])


def spread(rounds: Iterable[Figures], key: str) -> Spread | None:
    return Spread.of([value for each in rounds if (value := each.get(key)) is not None])


def ratio(arm: Sequence[Figures], base: Sequence[Figures], key: str) -> Spread | None:
    """Compare an arm with the base round by round, since disturbances hit both in a round."""
    pairs = ((one.get(key), other.get(key)) for one, other in zip(arm, base, strict=True))
    return Spread.of([value / of for value, of in pairs if value is not None and of])


def band(again: Spread | None) -> tuple[float, float] | None:
    """Compute the ratio between two measurements of one arm, in both directions."""
    if again is None or again.low <= 0:
        return None
    reach = max(again.high, 1 / again.low, 1.0)
    return 1 / reach, reach


def verdict(of: Spread | None, noise: tuple[float, float] | None, *, is_more_better: bool) -> str:
    """Say `better`, `worse`, or `same` inside the A/A band; empty: not known."""
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
