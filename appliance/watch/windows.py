"""What has been seen lately: first tokens, gaps and finished requests, and what is usual.

Owns: the windows that latency figures come from.
Invariant: quantiles are of values that were seen; what was not seen is None.
Never: counts for ever (histograms do).
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import asdict, dataclass, fields
from statistics import fmean, median

from appliance.frame.latency import Stages, Window, quantile_of, stages
from appliance.frame.protocol import LatencyFrame
from engine.schedule.elastic import Slo
from engine.schedule.sequence import FinishReason, Sequence

WINDOW_S = 60.0
MAX_WINDOW_GAPS = 20_000
USUAL_WINDOW_S = 900.0
MIN_USUAL, MAX_USUAL = 3, 200
"""What is usual is the median of so many sequences, the newest of the last quarter of an hour."""
STALL_GAPS = 4.0
MIN_STALL_MS = 100.0
"""A gap is a stall if it is longer than so many usual ones, and than this."""


@dataclass(frozen=True, slots=True)
class UsualTimes:
    """Median stage times of finished requests; None: none reached that stage."""

    queue_ms: float | None = None
    prefill_ms_per_token: float | None = None
    """Of the prompt."""
    handoff_ms: float | None = None
    decode_wait_ms: float | None = None
    tpot_ms: float | None = None


class Windows:
    """The newest of everything that has a latency."""

    def __init__(self) -> None:
        self._ttft_ms = Window(WINDOW_S)
        self._queue_ms = Window(WINDOW_S)
        self._prefill_ms = Window(WINDOW_S)
        self._itl_ms = Window(WINDOW_S, MAX_WINDOW_GAPS)
        self._handoff_ms = Window(WINDOW_S)
        self._e2e_ms = Window(WINDOW_S)
        self._requests = Window(WINDOW_S)
        self._usual = {each.name: Window(USUAL_WINDOW_S, MAX_USUAL) for each in fields(UsualTimes)}

    def first_token(self, sequence: Sequence, ttft_ms: float, now_ns: int) -> None:
        """A sequence has its first token."""
        cut = stages(sequence.stamps, 1)
        self._ttft_ms.add(now_ns, ttft_ms)
        if cut.queue_ms is not None:
            self._queue_ms.add(now_ns, cut.queue_ms)
        if cut.prefill_ms is not None:
            self._prefill_ms.add(now_ns, cut.prefill_ms)

    def gap(self, gap_ms: float, now_ns: int) -> None:
        """A further token has come."""
        self._itl_ms.add(now_ns, gap_ms)

    def request_finished(self, now_ns: int) -> None:
        """A request has had its terminal reply."""
        self._requests.add(now_ns, 0.0)

    def ended(self, sequence: Sequence, cut: Stages, now_ns: int) -> None:
        """A sequence has ended; one that was cut short says nothing of the time to the end."""
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
        """What a stage takes as a rule."""
        seen = {name: window.values(now_ns) for name, window in self._usual.items()}
        enough = {name: each for name, each in seen.items() if len(each) >= MIN_USUAL}
        return UsualTimes(**{name: median(values) for name, values in enough.items()})

    def latency(self, slo: Slo, now_ns: int) -> LatencyFrame:
        """The window in figures, against the targets of this moment."""
        ttft_ms = sorted(self._ttft_ms.values(now_ns))
        itl_ms = sorted(self._itl_ms.values(now_ns))
        e2e_ms = sorted(self._e2e_ms.values(now_ns))
        handoff_ms = sorted(self._handoff_ms.values(now_ns))
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
            queue_ms_mean=_mean(self._queue_ms.values(now_ns)),
            prefill_ms_mean=_mean(self._prefill_ms.values(now_ns)),
            ttft_slo_ratio=_share_up_to(ttft_ms, slo.ttft_ms),
            itl_slo_ratio=_share_up_to(itl_ms, slo.itl_ms),
            num_stalls=_num_stalls(itl_ms),
        )


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
