"""Draw latencies: quantiles of the last minute, and the share of met targets.

Invariant: every quantile stands under its window; a share stands beside its target.
Never: computes a quantile; the daemon's are exact.
"""

from __future__ import annotations

from appliance.observe.frame import figures as fig
from appliance.observe.frame.protocol import Frame, LatencyFrame
from appliance.observe.frame.request_facts import TTFT_STAGES
from tui.history import Samples
from tui.lines import Line, Run, Tone, fold, pad, sparkline, wrap
from tui.panels.gauges import MIN_REST_SHARE, NAME_WIDTH
from tui.panels.header import mark_of
from tui.view import View, alert_of

_NUMBER_WIDTH = 7
_TREND_FROM = 60
"""Minimum width for the maximum, the targets and a graph."""
_TARGET_WIDTH = 10


def title(view: View) -> str:
    """Return the title `LATENCY last 60s, 34 requests`."""
    if view.frame is None:
        return "LATENCY"
    latency = view.frame.latency
    return f"LATENCY  last {latency.window_s:.0f}s, {fig.count(latency.num_requests)} finished"


def latency(view: View, width: int, height: int) -> list[Line]:
    """Draw TTFT, ITL, handoff and end to end, and the stages of the TTFT."""
    frame = view.frame
    if frame is None:
        return []
    now, is_wide = frame.latency, width >= _TREND_FROM
    if now.ttft_ms_p50 is None and now.itl_ms_p50 is None and now.e2e_ms_p50 is None:
        quiet = f"no tokens in the last {now.window_s:.0f} s"
        return wrap(quiet, width, 0, Tone.MUTED)[:height]
    names = ["p50", "p95", "p99", *(["max"] if is_wide else []), "ok"]
    head = pad("ms", NAME_WIDTH)
    head += "".join(pad(name, _NUMBER_WIDTH, right=True) for name in names)
    lines: list[Line] = [[Run(head + ("   target    p95" if is_wide else ""), Tone.MUTED)]]
    for name, quantiles, share, target_ms, samples in _rows(view, frame, now):
        line = [Run(pad(name, NAME_WIDTH), Tone.MUTED)]
        shown = quantiles if is_wide else quantiles[:3]
        line += [
            Run(pad(fig.millis(value), _NUMBER_WIDTH, right=True), Tone.STRONG) for value in shown
        ]
        mark = mark_of(alert_of(frame, "slo", name))
        tone = Tone.STRONG if mark.tone == Tone.PLAIN else mark.tone
        line += [Run(pad(fig.fine_ratio(share), _NUMBER_WIDTH, right=True), tone), mark]
        if is_wide:
            target = fig.ABSENT if target_ms is None else f"<={fig.count(target_ms)}"
            line.append(Run("  " + pad(target, _TARGET_WIDTH), Tone.MUTED))
            room = width - NAME_WIDTH - 5 * _NUMBER_WIDTH - _TARGET_WIDTH - 3
            line.append(Run(sparkline(view.recent(samples, room), room), Tone.ACCENT))
        lines.append(line)
    return [*lines, *_made_of(now, width, height - len(lines))][:height]


_Row = tuple[str, list[float | None], float | None, int | None, Samples]


def _rows(view: View, frame: Frame, now: LatencyFrame) -> list[_Row]:
    """List name, quantiles with the maximum, share in time, target, and the graph's samples."""
    ttft = [now.ttft_ms_p50, now.ttft_ms_p95, now.ttft_ms_p99, now.ttft_ms_max]
    itl = [now.itl_ms_p50, now.itl_ms_p95, now.itl_ms_p99, now.itl_ms_max]
    handoff = [now.handoff_ms_p50, now.handoff_ms_p95, None, None]
    whole = [now.e2e_ms_p50, now.e2e_ms_p95, now.e2e_ms_p99, None]
    history = view.history
    return [
        ("ttft", ttft, now.ttft_slo_ratio, frame.slo_ttft_ms, history.ttft_ms_p95),
        ("itl", itl, now.itl_slo_ratio, frame.slo_itl_ms, history.itl_ms_p95),
        ("handoff", handoff, None, None, ()),
        ("e2e", whole, None, None, ()),
    ]


def _made_of(now: LatencyFrame, width: int, height: int) -> list[Line]:
    """Write `ttft mean queue 61.0 + prefill 142`, the stages in which requests spent time.

    If they do not fit into one line, the largest come first, as many as `height` lines hold, with
    the sum of the others unless it is small.
    """
    label = Run("ttft mean ", Tone.MUTED)
    means = [(stage, getattr(now, f"{stage}_ms_mean")) for stage in TTFT_STAGES]
    known = [(stage, mean_ms) for stage, mean_ms in means if mean_ms is not None]
    ranked = sorted(known, key=lambda mean: -mean[1])
    total_ms = sum(mean_ms for _, mean_ms in known)
    shorter = ((ranked[:num], height) for num in range(len(ranked), 0, -1))
    for stages, most_lines in ((known, 1), *shorter, ([], height)):
        text = " + ".join(f"{stage} {fig.millis(mean_ms)}" for stage, mean_ms in stages)
        rest_ms = total_ms - sum(mean_ms for _, mean_ms in stages)
        if stages and rest_ms > MIN_REST_SHARE * total_ms:
            text += f" + rest {fig.millis(rest_ms)}"
        if not stages and ranked:
            text = f"{ranked[0][0]} {fig.millis(ranked[0][1])}"
        lines = fold([label, Run(text or fig.ABSENT)], width, len(label.text))
        if len(lines) <= most_lines:
            break
    return lines
