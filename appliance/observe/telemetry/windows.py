"""Keep values of the last minutes, for rates and quantiles, and say which requests count.

Invariant: quantiles cover observed values only; without values they are None.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, fields
from statistics import fmean, median
from typing import NamedTuple

from appliance.observe.frame.latency import Stages, Window, quantile_of, stages
from appliance.observe.frame.protocol import LatencyFrame
from appliance.observe.frame.request_facts import TTFT_STAGES
from appliance.observe.telemetry.baseline import Baseline
from engine.scheduler.routing.elastic import Slo
from engine.scheduler.sequences.sequence import Sequence
from engine.wire.finish_reason import FinishReason

WINDOW_S = 60.0
MAX_WINDOW_GAPS = 20_000
USUAL_WINDOW_S = 900.0
MIN_USUAL, MAX_USUAL = 3, 200
"""Numbers of sequences for a usual time: a median over the last 15 minutes."""
MIN_LATE_MS = 1000.0
"""Minimum excess over the usual TTFT for a late first token."""
STALL_GAPS = 4.0
MIN_STALL_MS = 100.0
"""Minimum length of a stall, besides a multiple of the usual ITL."""


@dataclass(frozen=True, slots=True)
class UsualTimes:
    """Median stage times of finished requests; None: none reached that stage."""

    queue_ms: float | None = None
    prefill_ms_per_token: float | None = None
    """Milliseconds per prompt token."""
    handoff_ms: float | None = None
    decode_wait_ms: float | None = None
    tpot_ms: float | None = None


class UsualPace(NamedTuple):
    """How fast tokens usually come, without the time that alerts were about; None: unknown."""

    prefill_ms_per_token: float | None = None
    itl_ms: float | None = None


class WaitingPrompt(NamedTuple):
    """A prompt without its first token."""

    arrived_ns: int
    num_computed: int
    """Its tokens that are not in the prefix cache, as far as that is known."""


class Windows:
    """The recent values of everything that has a latency."""

    def __init__(self) -> None:
        self._usual_ttft, self._serves_since_ns = Baseline(MIN_USUAL), 0
        """The usual TTFT by the length of the prompt: its bits, of tokens to compute."""
        self._usual_prefill, self._usual_itl = Baseline(1), Baseline(1)
        """The usual milliseconds of a prompt's token, and between two output tokens."""
        self._ttft_over_usual = Window(WINDOW_S)
        self._ttft_ms = Window(WINDOW_S)
        self._ttft_stages_ms = {stage: Window(WINDOW_S) for stage in TTFT_STAGES}
        self._itl_ms = Window(WINDOW_S, MAX_WINDOW_GAPS)
        self._handoff_ms = Window(WINDOW_S)
        self._e2e_ms = Window(WINDOW_S)
        self._requests = Window(WINDOW_S)
        self._usual = {each.name: Window(USUAL_WINDOW_S, MAX_USUAL) for each in fields(UsualTimes)}

    def begin_model(self, now_ns: int) -> None:
        """Learn the usual TTFT anew; requests that waited for the model's load do not count."""
        self._usual_ttft, self._serves_since_ns = Baseline(MIN_USUAL), now_ns
        self._usual_prefill, self._usual_itl = Baseline(1), Baseline(1)

    def first_token(self, sequence: Sequence, ttft_ms: float, now_ns: int) -> None:
        cut = stages(sequence.stamps, 1)
        self._ttft_ms.add(now_ns, ttft_ms)
        for stage, window in self._ttft_stages_ms.items():
            window.add(now_ns, getattr(cut, f"{stage}_ms") or 0.0)
        if sequence.stamps.arrived_ns < self._serves_since_ns:
            return
        num_computed = max(sequence.num_prompt_tokens - sequence.num_cached_tokens, 1)
        # its own prefill time replaces the usual TTFT until that is known
        due_ms = self._usual_ttft.of(num_computed.bit_length()) or cut.prefill_ms
        if due_ms:
            self._ttft_over_usual.add(now_ns, _over_usual(ttft_ms, due_ms))
        self._usual_ttft.add(num_computed.bit_length(), ttft_ms, now_ns / 1e9)
        if cut.prefill_ms is not None:
            self._usual_prefill.add(0, cut.prefill_ms / num_computed, now_ns / 1e9)

    def learn(self, itl_ms: float | None, now_ns: int, *, is_wrong: bool) -> None:
        """Learn what is usual from the last second, unless an alert is about it.

        Args:
            itl_ms: the median of the window; None: no token came.
            is_wrong: leave this minute out of all that is usual.
        """
        if itl_ms is not None:
            self._usual_itl.add(0, itl_ms, now_ns / 1e9)
        if is_wrong:
            for each in (self._usual_ttft, self._usual_prefill, self._usual_itl):
                each.leave_out(now_ns / 1e9)

    def usual_pace(self) -> UsualPace:
        """Return how fast tokens usually come."""
        return UsualPace(self._usual_prefill.of(0), self._usual_itl.of(0))

    def itl(self, itl_ms: float, now_ns: int) -> None:
        """Add the time to a further token."""
        self._itl_ms.add(now_ns, itl_ms)

    def request_finished(self, now_ns: int) -> None:
        """Count a request after its terminal reply."""
        self._requests.add(now_ns, 0.0)

    def ended(self, sequence: Sequence, cut: Stages, now_ns: int) -> None:
        """Add an ended sequence; e2e counts only if it completed."""
        if cut.handoff_ms is not None:
            self._handoff_ms.add(now_ns, cut.handoff_ms)
        if sequence.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return
        if cut.e2e_ms is not None:
            self._e2e_ms.add(now_ns, cut.e2e_ms)
        per_token = None if cut.prefill_ms is None else cut.prefill_ms / sequence.num_prompt_tokens
        seen = {**asdict(cut), "prefill_ms_per_token": per_token}
        for name, window in self._usual.items():
            if (value_ms := seen[name]) is not None:
                window.add(now_ns, value_ms)

    def usual(self, now_ns: int) -> UsualTimes:
        """Return the usual time of each stage."""
        seen = {name: window.values(now_ns) for name, window in self._usual.items()}
        enough = {name: each for name, each in seen.items() if len(each) >= MIN_USUAL}
        return UsualTimes(**{name: median(values) for name, values in enough.items()})

    def latency(
        self, slo: Slo, now_ns: int, waiting: Collection[WaitingPrompt] = ()
    ) -> LatencyFrame:
        """Compute the window's figures, and compare them with the targets.

        Args:
            waiting: prompts without a first token; a late prompt counts as a late first token.
        """
        ttft_ms = sorted(self._ttft_ms.values(now_ns))
        itl_ms = sorted(self._itl_ms.values(now_ns))
        e2e_ms = sorted(self._e2e_ms.values(now_ns))
        handoff_ms = sorted(self._handoff_ms.values(now_ns))
        waited_ms = [(now_ns - each.arrived_ns) / 1e6 for each in waiting]
        overdue_ms = [ms for ms in waited_ms if slo.ttft_ms is not None and ms > slo.ttft_ms]
        means = {
            stage: _mean(window.values(now_ns)) or None
            for stage, window in self._ttft_stages_ms.items()
        }
        return LatencyFrame(
            window_s=WINDOW_S,
            num_requests=len(self._requests.values(now_ns)),
            ttft_ms_p50=quantile_of(ttft_ms, 0.5),
            ttft_ms_p95=quantile_of(ttft_ms, 0.95),
            ttft_ms_p99=quantile_of(ttft_ms, 0.99),
            ttft_ms_max=quantile_of(ttft_ms, 1.0),
            itl_ms_p50=quantile_of(itl_ms, 0.5),
            itl_ms_p95=quantile_of(itl_ms, 0.95),
            itl_ms_p99=quantile_of(itl_ms, 0.99),
            itl_ms_max=quantile_of(itl_ms, 1.0),
            e2e_ms_p50=quantile_of(e2e_ms, 0.5),
            e2e_ms_p95=quantile_of(e2e_ms, 0.95),
            e2e_ms_p99=quantile_of(e2e_ms, 0.99),
            handoff_ms_p50=quantile_of(handoff_ms, 0.5),
            handoff_ms_p95=quantile_of(handoff_ms, 0.95),
            queue_ms_mean=means["queue"],
            prefill_ms_mean=means["prefill"],
            ttft_slo_ratio=_share_up_to(sorted([*ttft_ms, *overdue_ms]), slo.ttft_ms),
            itl_slo_ratio=_share_up_to(itl_ms, slo.itl_ms),
            num_stalls=_num_stalls(itl_ms),
            tokenize_ms_mean=means["tokenize"],
            restore_ms_mean=means["restore"],
            ttft_over_usual=_exceeded_by_several(
                [*self._ttft_over_usual.values(now_ns), *self._already_over_usual(waiting, now_ns)]
            ),
        )

    def _already_over_usual(
        self, waiting: Collection[WaitingPrompt], now_ns: int
    ) -> Iterator[float]:
        """Yield the ratio to the usual TTFT of prompts that are late without a first token."""
        for prompt in waiting:
            due_ms = self._usual_ttft.of(prompt.num_computed.bit_length())
            if due_ms and prompt.arrived_ns >= self._serves_since_ns:
                times = _over_usual((now_ns - prompt.arrived_ns) / 1e6, due_ms)
                if times > 1:
                    yield times


def _over_usual(ttft_ms: float, due_ms: float) -> float:
    """Return the ratio to the usual TTFT; 1: less than MIN_LATE_MS late."""
    return ttft_ms / due_ms if ttft_ms - due_ms >= MIN_LATE_MS else 1.0


def _exceeded_by_several(values: list[float]) -> float | None:
    """Return the value reached by a tenth of all values, and at least MIN_USUAL of them."""
    num_least = max(MIN_USUAL, len(values) // 10)
    return sorted(values)[-num_least] if len(values) >= num_least else None


def _mean(values: list[float]) -> float | None:
    return fmean(values) if values else None


def _share_up_to(ranked: list[float], target_ms: float | None) -> float | None:
    if target_ms is None or not ranked:
        return None
    return bisect_right(ranked, target_ms) / len(ranked)


def _num_stalls(ranked_ms: list[float]) -> int:
    if not ranked_ms:
        return 0
    bound_ms = max(STALL_GAPS * ranked_ms[len(ranked_ms) // 2], MIN_STALL_MS)
    return len(ranked_ms) - bisect_right(ranked_ms, bound_ms)
