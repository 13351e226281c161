"""From measured requests to figures, and from several rounds to ratios with their spread.

Owns: the meaning of TTFT, gap, TPOT, late, merged; goodput, throughput, quantiles, and what counts
as a difference.
Invariant: pure. Goodput's denominator is every request that was offered; throughput counts the
tokens that arrived within the window; a figure without observations is None.
Never: averages quantiles: a figure over rounds is the median of the rounds' figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import msgspec

from appliance.bench.reply_events import ReceivedReply
from appliance.frame.latency import quantile

# What is known of one measured request, and how it reads from a reply.
# Invariant: a figure that was not observed is None, or missing from the gaps; never 0.
# Never: opens a connection.


REFUSALS = (429, 503)


class Sample(msgspec.Struct):
    """One request. Times count from the moment at which it was due, so a late client shows."""

    offered_ms: float
    """When it was due, from the beginning of the measurement."""
    late_ms: float
    """How much later it was sent: the load generator's own lag."""
    status: int | None = None
    error: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    """Of the prompt, that were not computed again, as the server counts them."""
    reusable_tokens: int | None = None
    """Of the prompt, that earlier requests had in front, too: what an infinite cache would have;
    None: not known."""
    turn: int | None = None
    """Of its conversation, from 1; None: it is of none."""
    output_tokens: int | None = None
    """As the server counts them."""
    ttft_ms: float | None = None
    itl_ms: list[float] = []
    """Every gap that was seen: between two events with tokens, however many tokens each has."""
    e2e_ms: float | None = None
    merged_tokens: int = 0
    """Tokens whose own gap was not seen: they came in one event with another, or, where the server
    does not say which tokens an event has, had no text and so no event, as half a character."""
    event_tokens: list[int] = []
    """Tokens of each event; 1 where the server does not say which an event has."""

    @property
    def is_refused(self) -> bool:
        """The server said that it has no room."""
        return self.status in REFUSALS

    @property
    def is_completed(self) -> bool:
        """Whether the reply came to its end, with all its tokens."""
        return self.error is None and self.e2e_ms is not None

    @property
    def tpot_ms(self) -> float | None:
        """Mean time per token after those of the first event, by the server's count of them all."""
        if not self.is_completed or self.ttft_ms is None or not self.itl_ms:
            return None
        num_first = self.event_tokens[0] if self.event_tokens else 1
        if self.output_tokens is None or self.output_tokens <= num_first:
            return None
        return sum(self.itl_ms) / (self.output_tokens - num_first)

    def token_times_ms(self) -> list[float]:
        """When each token came, from the beginning of the measurement; together, if they did."""
        times_ms = self.event_times_ms()
        tokens = self.event_tokens or [1] * len(times_ms)
        pairs = zip(times_ms, tokens, strict=True)
        return [at_ms for at_ms, num_tokens in pairs for _ in range(num_tokens)]

    def event_times_ms(self) -> list[float]:
        """When each event with tokens came, from the beginning of the measurement."""
        if self.ttft_ms is None:
            return []
        return list(accumulate(self.itl_ms, initial=self.offered_ms + self.ttft_ms))


def sample_of(reply: ReceivedReply, *, origin_ns: int, due_ns: int) -> Sample:
    """A reply as a sample.

    Args:
        reply: ended, or cut off by its deadline, which is an error unless the caller clears it.
        origin_ns: the beginning of the measurement.
        due_ns: when the request was to be sent.
    """
    sample = Sample(
        offered_ms=(due_ns - origin_ns) / 1e6,
        late_ms=(reply.sent_ns - due_ns) / 1e6,
        status=reply.status,
        error=reply.problem,
        prompt_tokens=reply.prompt_tokens,
        cached_tokens=reply.cached_tokens,
        output_tokens=reply.output_tokens,
    )
    if reply.events:
        sample.ttft_ms = (reply.events[0].at_ns - due_ns) / 1e6
        sample.event_tokens = [event.num_tokens for event in reply.events]
        sample.itl_ms = [
            (event.at_ns - before.at_ns) / 1e6 for before, event in pairwise(reply.events)
        ]
        counted = sum(sample.event_tokens)
        # a server that does not say which tokens an event has may still say how many there were
        sample.merged_tokens = max(counted, reply.output_tokens or 0) - len(reply.events)
    if reply.ended_ns is not None and reply.problem is None:
        sample.e2e_ms = (reply.ended_ns - due_ns) / 1e6
    return sample


# --------------------------------------------------------------------------------------------------


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
