"""What clients wait for: quantiles of the last minute, and how often the targets are met (ok).

Owns: nothing; pure.
Invariant: every quantile stands under its window; a share stands beside its target.
Never: computes a quantile; the daemon's are exact.
"""

from __future__ import annotations

from appliance.frame.protocol import Frame, LatencyFrame
from tui import format as fmt
from tui.history import Samples
from tui.lines import Line, Run, Tone, sparkline, wrap
from tui.panels.header import mark_of
from tui.view import View, alert_of

_NAME_WIDTH = 8
_NUMBER_WIDTH = 7
_TREND_FROM = 60
"""From this width on the maximum, the targets and a graph have room, too."""
_TARGET_WIDTH = 10


def title(view: View) -> str:
    """`LATENCY  last 60s, 34 requests`."""
    if view.frame is None:
        return "LATENCY"
    latency = view.frame.latency
    return f"LATENCY  last {latency.window_s:.0f}s, {fmt.count(latency.num_requests)} finished"


def latency(view: View, width: int, height: int) -> list[Line]:
    """First token, gaps, handoff and the whole; what the first token's time was made of."""
    frame = view.frame
    if frame is None:
        return []
    now, is_wide = frame.latency, width >= _TREND_FROM
    if now.ttft_ms_p50 is None and now.itl_ms_p50 is None and now.e2e_ms_p50 is None:
        quiet = f"nothing to measure: no token came in the last {now.window_s:.0f} s"
        return wrap(quiet, width, 0, Tone.MUTED)[:height]
    names = ["p50", "p95", "p99", *(["max"] if is_wide else []), "ok"]
    head = fmt.pad("ms", _NAME_WIDTH)
    head += "".join(fmt.pad(name, _NUMBER_WIDTH, right=True) for name in names)
    lines: list[Line] = [[Run(head + ("   target    p95" if is_wide else ""), Tone.MUTED)]]
    for name, quantiles, share, target_ms, samples in _rows(view, frame, now):
        line = [Run(fmt.pad(name, _NAME_WIDTH), Tone.MUTED)]
        shown = quantiles if is_wide else quantiles[:3]
        line += [
            Run(fmt.pad(fmt.millis(value), _NUMBER_WIDTH, right=True), Tone.STRONG)
            for value in shown
        ]
        mark = mark_of(alert_of(frame, "slo", _SUBJECTS.get(name, name)))
        tone = Tone.STRONG if mark.tone == Tone.PLAIN else mark.tone
        line += [Run(fmt.pad(fmt.fine_ratio(share), _NUMBER_WIDTH, right=True), tone), mark]
        if is_wide:
            target = fmt.ABSENT if target_ms is None else f"<={fmt.count(target_ms)}"
            line.append(Run("  " + fmt.pad(target, _TARGET_WIDTH), Tone.MUTED))
            room = width - _NAME_WIDTH - 5 * _NUMBER_WIDTH - _TARGET_WIDTH - 3
            line.append(Run(sparkline(view.recent(samples, room), room), Tone.ACCENT))
        lines.append(line)
    return [*lines, _made_of(now)][:height]


_SUBJECTS = {"gap": "itl"}
"""What alerts call a row, where that is another word."""
_Row = tuple[str, list[float | None], float | None, int | None, Samples]


def _rows(view: View, frame: Frame, now: LatencyFrame) -> list[_Row]:
    """Name, quantiles with the maximum, share in time, target, and what the graph shows."""
    ttft = [now.ttft_ms_p50, now.ttft_ms_p95, now.ttft_ms_p99, now.ttft_ms_max]
    gap = [now.itl_ms_p50, now.itl_ms_p95, now.itl_ms_p99, now.itl_ms_max]
    handoff = [now.handoff_ms_p50, now.handoff_ms_p95, None, None]
    whole = [now.e2e_ms_p50, now.e2e_ms_p95, now.e2e_ms_p99, None]
    history = view.history
    return [
        ("ttft", ttft, now.ttft_slo_ratio, frame.slo_ttft_ms, history.ttft_ms_p95),
        ("gap", gap, now.itl_slo_ratio, frame.slo_itl_ms, history.itl_ms_p95),
        ("handoff", handoff, None, None, ()),
        ("e2e", whole, None, None, ()),
    ]


def _made_of(now: LatencyFrame) -> Line:
    """`ttft mean: queue 61 + prefill 156`."""
    return [
        Run("ttft mean ", Tone.MUTED),
        Run(f"queue {fmt.millis(now.queue_ms_mean)} + prefill {fmt.millis(now.prefill_ms_mean)}"),
    ]
