"""The lines above and below the panels: header, alerts, events and keys.

Owns: nothing; pure. Called by: app and plain.
Invariant: the state, the link and the worst alert are shown at every width.
Never: hides an alert behind a colour; each has a word and a mark.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from appliance.protocol import FRAME_VERSION, EventFrame, Frame
from tui import format as fmt
from tui.lines import Line, Span, Tone, width_of
from tui.view import REPLAY, View, pool_used_ratio

KV_WARN_RATIO, KV_CRIT_RATIO = 0.90, 0.98
QUEUE_WARN_RATIO, QUEUE_CRIT_RATIO = 0.50, 0.90

STATE_TONES = {"ready": Tone.GOOD, "loading": Tone.WARN, "draining": Tone.WARN}
_SEVERITIES = {
    "error": ("■ ERROR", Tone.BAD),
    "warning": ("▲ WARN", Tone.WARN),
    "info": ("● INFO", Tone.MUTED),
}


class Alert(NamedTuple):
    """Something that is wrong now."""

    severity: str
    """`error` or `warning`."""
    text: str


def header(view: View, width: int) -> Line:
    """Name, model, state and link; what matters least goes first when it gets narrow."""
    frame = view.frame
    link = _link_span(view)
    if frame is None:
        return _compose([(0, Span("penstock", Tone.ACCENT))], [(0, link)], width)
    note = f" ({_note_parts(frame)[0]})" if frame.model_note else ""
    roles = f"{frame.roles}/{frame.transport}" if frame.transport else frame.roles
    state = frame.state.upper() if view.link.is_live else ""  # of a lost daemon nobody knows it
    kept_width = len(state) + width_of([link]) + (19 if width >= 80 else 8)  # with a clock
    room = max(12, width - kept_width)
    left = [
        (3, Span("penstock", Tone.ACCENT)),
        (1, Span(fmt.clip(frame.model + note, room), Tone.STRONG)),
        (0, Span(state, STATE_TONES.get(frame.state, Tone.BAD))),
        (6, Span(roles)),
        (7, Span(f"{frame.dtype}, {fmt.count(frame.max_model_len)} tokens", Tone.MUTED)),
    ]
    right = [
        (8, Span(f"pid {frame.pid}", Tone.MUTED)),
        (5, Span(f"up {fmt.seconds(frame.uptime_s)}", Tone.MUTED)),
        (4, Span("" if link.text.startswith(REPLAY) else fmt.clock(frame.at), Tone.MUTED)),
        (0, link),
    ]
    return _compose(left, right, width)


def _link_span(view: View) -> Span:
    link = view.link
    if link.word == REPLAY and view.frame is not None:
        day = fmt.clean(view.frame.at.partition("T")[0])
        return Span(f"REPLAY {day} {fmt.clock(view.frame.at)}", Tone.WARN)
    if link.is_live and view.paused_s is not None:
        return Span(f"PAUSED +{fmt.whole_seconds(view.paused_s)}", Tone.WARN)
    if link.is_live:
        return Span("● LIVE", Tone.GOOD)
    text = link.word
    if link.down_s is not None:
        text += f" {fmt.whole_seconds(link.down_s)}"
    if link.retry_in_s is not None:
        text += f", retry in {fmt.whole_seconds(link.retry_in_s)}"
    return Span(text, Tone.BAD if link.down_s is not None else Tone.WARN)


def _compose(left: list[tuple[int, Span]], right: list[tuple[int, Span]], width: int) -> Line:
    """Spans two cells apart at both edges; those of the highest rank are dropped to fit."""

    def joined(ranked: list[tuple[int, Span]]) -> Line:
        line: Line = []
        for _, span in ranked:
            if span.text:
                line += [Span("  "), span] if line else [span]
        return line

    while True:
        gap = width - 2 - width_of(joined(left)) - width_of(joined(right))
        worst = max(rank for rank, _ in left + right)
        if gap >= 2 or worst == 0:
            return [Span(" "), *joined(left), Span(" " * max(1, gap)), *joined(right)]
        left = [item for item in left if item[0] != worst]
        right = [item for item in right if item[0] != worst]


def alerts(view: View) -> list[Alert]:
    """All that is wrong now, the worst first."""
    found = []
    if view.link.why:
        found.append(Alert("error", view.link.why))
    if view.frame is not None:
        found += _frame_alerts(view.frame)
    if view.history.num_dropped_frames:
        found.append(Alert("warning", f"{view.history.num_dropped_frames} frames missed"))
    return sorted(found, key=lambda alert: alert.severity != "error")


def _frame_alerts(frame: Frame) -> list[Alert]:
    found = []
    if frame.state != "ready":
        reason = f": {frame.state_reason}" if frame.state_reason else ""
        severity = "error" if frame.state == "degraded" else "warning"
        found.append(Alert(severity, f"{frame.state}{reason}"))
    found += [
        Alert("error", f"worker {worker.name} is restarting")
        for worker in frame.workers
        if worker.state == "restarting"
    ]
    for pool in frame.pools:
        used = pool_used_ratio(pool) or 0.0
        text = f"KV {pool.name} {fmt.ratio(used)} in use"
        found += _graded(used, KV_WARN_RATIO, KV_CRIT_RATIO, text)
        if pool.quarantined:
            found.append(Alert("warning", f"KV {pool.name} {pool.quarantined} blocks quarantined"))
    queue = frame.queue
    if queue.max_queued:
        text = f"queue {queue.queued} of {queue.max_queued}"
        if queue.oldest_queued_ms is not None:
            text += f", oldest {fmt.seconds(queue.oldest_queued_ms / 1000)}"
        found += _graded(queue.queued / queue.max_queued, QUEUE_WARN_RATIO, QUEUE_CRIT_RATIO, text)
    if frame.totals.log_rows_lost:
        found.append(Alert("error", f"{frame.totals.log_rows_lost} rows of the request log lost"))
    return found


def _graded(value: float, warn: float, crit: float, text: str) -> list[Alert]:
    if value < warn:
        return []
    return [Alert("error" if value >= crit else "warning", text)]


def _note_parts(frame: Frame) -> tuple[str, str]:
    """The gist of the model's note, which fits beside its name, and what follows the colon."""
    gist, _, rest = (frame.model_note or "").partition(": ")
    return gist, rest


def alert_line(view: View, width: int) -> Line:
    """The worst alerts that fit, and how many more there are."""
    found = alerts(view)
    if not found:
        rest = _note_parts(view.frame)[1] if view.frame else ""
        text = f"  no alerts   the model: {rest}" if rest else "  no alerts"
        return [Span(" "), Span("● ok", Tone.GOOD), Span(text, Tone.MUTED)]
    line: Line = []
    for index, alert in enumerate(found):
        mark, tone = _SEVERITIES[alert.severity]
        item = [Span("   " if line else " "), Span(mark, tone), Span(f" {alert.text}")]
        num_left = len(found) - index
        room = width - (0 if num_left == 1 else len(f"  (+{num_left - 1} more)"))
        if line and width_of(line) + width_of(item) > room:
            line.append(Span(f"  (+{num_left} more)", Tone.MUTED))
            break
        line += item
    return line


def events(view: View, width: int, height: int) -> list[Line]:
    """The newest events, the newest at the top."""
    recorded = view.frame.events if view.frame else []
    if not recorded:
        return [[Span("no events", Tone.MUTED)]]
    return [_event_line(event, width) for event in recorded[: -height - 1 : -1]]


def _event_line(event: EventFrame, width: int) -> Line:
    mark, tone = _SEVERITIES.get(event.severity, _SEVERITIES["info"])
    code_width = 22 if width >= 100 else len(event.code)
    return [
        Span(f"{fmt.clock(event.at)} ", Tone.MUTED),
        Span(fmt.pad(mark, 8), tone),
        Span(fmt.pad(event.code, code_width) + " ", Tone.MUTED),
        Span(event.message, Tone.PLAIN if event.severity == "info" else Tone.STRONG),
    ]


def key_hints(hints: Sequence[tuple[str, str]], width: int) -> Line:
    """Keys and what they do, as many as fit."""
    line: Line = []
    for key, label in hints:
        item = [Span(f" {key} ", Tone.ACCENT), Span(f"{label} ", Tone.MUTED)]
        if width_of(line) + width_of(item) > width:
            break
        line += item
    return line


def summary(view: View) -> str:
    """The reading in one line, for terminals too small for panels and for plain text."""
    frame = view.frame
    if frame is None:
        return f"{view.link.word} {view.link.why}".rstrip()
    replay = [REPLAY] if view.link.word == REPLAY else []
    parts = [
        *replay,
        fmt.clock(frame.at),
        frame.state if view.link.is_live else view.link.word,
        f"live {frame.num_requests}",
        f"queued {frame.queue.queued}",
        f"prefill {fmt.rate(view.history.prefill_tokens_per_s[-1])} tok/s",
        f"decode {fmt.rate(view.history.decode_tokens_per_s[-1])} tok/s",
        *(f"kv {pool.name} {fmt.ratio(pool_used_ratio(pool))}" for pool in frame.pools),
        f"ttft p50 {fmt.millis_unit(frame.latency.ttft_ms_p50)}",
        f"gap p50 {fmt.millis_unit(frame.latency.itl_ms_p50)}",
    ]
    return fmt.clean("  ".join(parts))


def version_problem(version: int) -> str | None:
    """Why frames of this version cannot be shown; None if they can."""
    if version == FRAME_VERSION:
        return None
    return (
        f"the daemon sends frames of version {version}, this console reads version "
        f"{FRAME_VERSION}: use the penstock of the same release for both"
    )
