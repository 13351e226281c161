"""Draw latencies: quantiles of the last minute, and the share of met targets.

Invariant: every quantile stands under its window; targets and their shares only where one is set.
"""

from __future__ import annotations

from typing import NamedTuple

from appliance.observe.frame import figures as fig
from appliance.observe.frame.protocol import Frame, LatencyFrame
from appliance.observe.frame.request_facts import TTFT_STAGES
from tui.history import Samples
from tui.lines import Line, Run, Tone, fold, pad, sparkline, width_of, wrap
from tui.panels.gauges import MIN_REST_SHARE
from tui.panels.header import mark_of, tone_of
from tui.view import View, alert_of

_NAME_WIDTH, _NUMBER_WIDTH = 8, 7
_NARROW = 36
"""Minimum width for whole names and the share of met targets."""
_TREND_FROM = 60
"""Minimum width for the maximum, the targets and a graph."""
_TARGET_WIDTH = 10
_ALERTS = {
    "ttft": ("ttft.", "queue.wait"),
    "itl": ("decode.",),
}
"""Alerts on late tokens; others are on targets."""


def title(view: View, width: int) -> str:
    """Return the title `LATENCY  last 60s, 34 finished`, as much of it as fits."""
    if view.frame is None:
        return "LATENCY"
    latency = view.frame.latency
    window = f"LATENCY  last {latency.window_s:.0f}s"
    return window + f", {fig.count(latency.num_requests)} finished" * (width >= _NARROW)


def latency(view: View, width: int, height: int) -> list[Line]:
    """Draw TTFT, ITL, handoff and end to end, and the stages of the TTFT."""
    frame = view.frame
    if frame is None:
        return []
    now, is_wide = frame.latency, width >= _TREND_FROM
    if now.ttft_ms_p50 is None and now.itl_ms_p50 is None and now.e2e_ms_p50 is None:
        is_young = frame.uptime_s < now.window_s
        quiet = "no tokens since the start" if is_young else f"no tokens for {now.window_s:.0f} s"
        return wrap(quiet, width, 0, Tone.MUTED)[:height]
    has_targets = width >= _NARROW and (frame.slo_ttft_ms, frame.slo_itl_ms) != (None, None)
    name_width, cell = _widths(width)
    names = ["p50", "p95", "p99", *["max"] * is_wide, *["ok"] * has_targets]
    head = pad("ms", name_width) + "".join(pad(name, cell, right=True) for name in names)
    if is_wide:
        head += f" {pad('  target', _TARGET_WIDTH) if has_targets else ''}  p95"
    rows = [
        _line(view, frame, row, width, has_targets)
        for row in _rows(view, frame, now)
        if len(row.name) < name_width
    ]
    lines: list[Line] = [[Run(head, Tone.MUTED)], *rows]
    return [*lines, *_made_of(now, width, height - len(lines))][:height]


def _widths(width: int) -> tuple[int, int]:
    """Return the cells of a name and of a number."""
    return (_NAME_WIDTH, _NUMBER_WIDTH) if width >= _NARROW else (5, 6)


def _line(view: View, frame: Frame, row: _Row, width: int, has_targets: bool) -> Line:
    """Draw one figure; what is late has the tone of its alert, or stands out by its target."""
    is_wide, (name_width, cell) = width >= _TREND_FROM, _widths(width)
    alert = alert_of(frame, "slo", row.name) or alert_of(frame, _ALERTS.get(row.name, ()))
    line = [Run(pad(row.name, name_width), Tone.MUTED)]
    for value in row.quantiles if is_wide else row.quantiles[:3]:
        is_late = value is not None and row.target_ms is not None and value > row.target_ms
        tone = Tone.WARN if is_late and alert is None else tone_of(alert)
        line.append(Run(pad(fig.millis(value), cell, right=True), tone))
    if has_targets:
        line.append(Run(pad(fig.fine_ratio(row.share), cell, right=True), tone_of(alert)))
    line.append(mark_of(alert))
    if is_wide and has_targets:
        target = fig.ABSENT if row.target_ms is None else f"<={fig.count(row.target_ms)}"
        line.append(Run(pad(f"  {target}", _TARGET_WIDTH), Tone.MUTED))
    if is_wide:
        room = width - width_of(line) - 2
        graph = sparkline(view.recent(row.samples, room), room)
        line += [Run("  "), Run(graph, Tone.ACCENT)]
    return line


class _Row(NamedTuple):
    """One figure of the last minute."""

    name: str
    quantiles: list[float | None]
    """The last is the maximum."""
    share: float | None
    """Share within the target; None: no target."""
    target_ms: int | None
    samples: Samples
    """Of the graph."""


def _rows(view: View, frame: Frame, now: LatencyFrame) -> list[_Row]:
    """List the figures, what a person feels first."""
    ttft = [now.ttft_ms_p50, now.ttft_ms_p95, now.ttft_ms_p99, now.ttft_ms_max]
    itl = [now.itl_ms_p50, now.itl_ms_p95, now.itl_ms_p99, now.itl_ms_max]
    handoff = [now.handoff_ms_p50, now.handoff_ms_p95, None, None]
    whole = [now.e2e_ms_p50, now.e2e_ms_p95, now.e2e_ms_p99, None]
    history = view.history
    return [
        _Row("ttft", ttft, now.ttft_slo_ratio, frame.slo_ttft_ms, history.ttft_ms_p95),
        _Row("itl", itl, now.itl_slo_ratio, frame.slo_itl_ms, history.itl_ms_p95),
        _Row("e2e", whole, None, None, ()),
        _Row("handoff", handoff, None, None, ()),
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
