"""Draw the header, the alerts and the key bar.

Invariant: the state, the link and the worst alert are shown at every width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rich.cells import cell_len

from appliance.observe.frame import figures as fig
from appliance.observe.frame.protocol import FRAME_VERSION, AlertFrame, Frame
from appliance.observe.frame.tier_frames import fields
from tui.lines import Line, Run, Tone, clean, clip, width_of
from tui.view import REPLAY, View

STATE_TONES = {"ready": Tone.GOOD, "loading": Tone.WARN, "draining": Tone.WARN}
SEVERITIES = {
    "error": ("■ ERROR", Tone.BAD),
    "warning": ("▲ WARN", Tone.WARN),
    "info": ("● INFO", Tone.MUTED),
}
_LEAST_KEYS = 12
"""Minimum cells for the keys beside the pages' names."""


class Alert(NamedTuple):
    """A raised alert."""

    severity: str
    """`error` or `warning`."""
    text: str
    action: str = ""
    """What to press or type; empty: nothing is known that helps."""
    request_id: str = ""
    """The listed request that it names; empty: none."""


def header(view: View, width: int) -> Line:
    """Draw name, model, state and link; the least important goes first on a narrow screen."""
    frame = view.frame
    link = _link_span(view)
    who = f"{clip(view.caller.name, 16)} {view.caller.role}" if view.caller else ""
    if frame is None:
        return _compose([(0, Run("penstock", Tone.ACCENT))], [(0, link)], width)
    note = f"({note_parts(frame)[0]})" if frame.model_note else ""
    roles = f"{frame.roles}/{frame.transport}" if frame.transport else frame.roles
    state = frame.state.upper() if view.link.is_live else ""  # unknown after the link is lost
    kept_width = len(state) + width_of([link]) + (len(roles) + 10 if width >= 80 else 8)
    room = max(12, width - kept_width)
    left = [
        (3, Run("penstock", Tone.ACCENT)),
        (1, Run(clip(frame.model, room), Tone.STRONG)),
        (5, Run(clip(note, width), Tone.STRONG)),
        (0, Run(state, STATE_TONES.get(frame.state, Tone.BAD))),
        (2, Run(roles)),
        (8, Run(f"{frame.dtype}, {fig.count(frame.max_model_len)} tokens", Tone.MUTED)),
    ]
    right = [
        (9, Run(f"pid {frame.pid}", Tone.MUTED)),
        (7, Run(who, Tone.MUTED)),
        (6, Run(f"up {fig.seconds(frame.uptime_s)}", Tone.MUTED)),
        (4, Run("" if link.text.startswith(REPLAY) else fig.clock(frame.at), Tone.MUTED)),
        (1, Run(_missed_text(view), Tone.MUTED)),
        (0, link),
    ]
    return _compose(left, right, width)


def _missed_text(view: View) -> str:
    """Count the frames that this console missed."""
    num_missed = view.history.num_dropped_frames
    return f"missed {num_missed} frame{'' if num_missed == 1 else 's'}" if num_missed else ""


def _link_span(view: View) -> Run:
    link = view.link
    if link.word == REPLAY and view.frame is not None:
        day = clean(view.frame.at.partition("T")[0])
        return Run(f"REPLAY {day} {fig.clock(view.frame.at)}", Tone.WARN)
    if link.is_live and view.paused_s is not None:
        return Run(f"PAUSED +{fig.whole_seconds(view.paused_s)}", Tone.WARN)
    if link.word == REPLAY:
        return Run(REPLAY, Tone.WARN)
    if link.is_live:
        return Run("● LIVE", Tone.GOOD)
    text = link.word
    if link.down_s is not None:
        text += f" {fig.whole_seconds(link.down_s)}"
    if link.retry_in_s is not None:
        text += f", retry in {fig.whole_seconds(link.retry_in_s)}"
    return Run(text, Tone.BAD if link.down_s is not None else Tone.WARN)


def _compose(left: list[tuple[int, Run]], right: list[tuple[int, Run]], width: int) -> Line:
    """Join runs two cells apart at both edges; the highest ranks are dropped to fit."""

    def joined(ranked: list[tuple[int, Run]]) -> Line:
        line: Line = []
        for _, span in ranked:
            if span.text:
                line += [Run("  "), span] if line else [span]
        return line

    while True:
        gap = width - 2 - width_of(joined(left)) - width_of(joined(right))
        worst = max(rank for rank, _ in left + right)
        if gap >= 2 or worst == 0:
            return [Run(" "), *joined(left), Run(" " * max(1, gap)), *joined(right)]
        left = [item for item in left if item[0] != worst]
        right = [item for item in right if item[0] != worst]


def alerts(view: View) -> list[Alert]:
    """List all alerts, the worst first."""
    frame = view.frame
    theirs = []
    if frame is not None:
        theirs = [
            Alert(
                a.severity,
                alert_text(a, frame.at),
                alert_action(a, frame),
                named_request(a, frame),
            )
            for a in frame.alerts
        ]
    own = own_alerts(view)
    # the header says that it loads, too: a death before that comes first where there is little room
    is_loading = frame is not None and frame.state == "loading"
    found = [*theirs, *own] if is_loading else [*own, *theirs]
    return sorted(found, key=lambda alert: alert.severity != "error")


def own_alerts(view: View) -> list[Alert]:
    """List the console's own alerts: the link, and a state other than `ready`."""
    frame, found = view.frame, []
    if view.link.why:
        since = None if frame is None or view.link.is_live else fig.clock(frame.at)
        stale = "" if since is None else f"figures stale since {since}: "
        found.append(Alert("error", f"{stale}{view.link.why}"))
    is_told = frame is not None and any(alert.severity == "error" for alert in frame.alerts)
    if frame is not None and frame.state != "ready" and not (frame.state == "degraded" and is_told):
        reason = fig.state_words(frame.state_reason)
        reason = f": {reason}" if reason else ""
        severity = "error" if frame.state == "degraded" else "warning"
        found.append(Alert(severity, f"{frame.state}{reason}"))
    return found


def alert_text(alert: AlertFrame, now: str) -> str:
    """Return the daemon's message, and since when it holds."""
    if alert.message.count(" ago"):  # it says so itself
        return alert.message
    return f"{alert.message}, since {fig.since(alert.since, now)} ago"


def alert_action(alert: AlertFrame, frame: Frame) -> str:
    """Return the key for the request that an alert names, if it is listed, else its command.

    The key shows the request of the worst such alert.
    """
    if named_request(alert, frame):
        worst = next(each for each in frame.alerts if named_request(each, frame))
        return "a shows it" if worst is alert else ""
    return f"run `{alert.action}`" if alert.action else ""


def named_request(alert: AlertFrame, frame: Frame) -> str:
    """Return the id of the request that an alert names; empty: none that the frame lists."""
    ids = (request.id for request in frame.requests)
    return next((each for each in ids if each == alert.request_id), "")


def tone_of(alert: AlertFrame | None) -> Tone:
    """Return the tone of a reading by its alert; a strong one without."""
    return Tone.STRONG if alert is None else mark_of(alert).tone


def mark_of(alert: AlertFrame | None) -> Run:
    """Return the mark for a reading's alert; a blank without one."""
    if alert is None:
        return Run(" ")
    word, tone = SEVERITIES.get(alert.severity, SEVERITIES["info"])
    return Run(word[0], tone)


def note_parts(frame: Frame) -> tuple[str, str]:
    """Split the model's note into a part beside its name, and the text after the colon."""
    gist, _, rest = (frame.model_note or "").partition(": ")
    return gist, rest


def alert_line(view: View, width: int) -> Line:
    """Draw the worst alerts that fit, the number of others, then the bottleneck."""
    found = alerts(view)
    limit = view.frame.limit if view.frame else ""
    if not found:
        state = [Run(" "), Run("● ok", Tone.GOOD)]
        told = [Run("bottleneck: " if limit else "", Tone.MUTED), Run(limit)]
        calm = Run("  no alerts   ", Tone.MUTED)
        if width_of([*state, calm, *told]) > width:  # it says no more than `ok`
            calm = Run("  ")
        return [*state, calm, *told]
    line: Line = []
    for index, alert in enumerate(found):
        num_left = len(found) - index
        more = f"  (+{num_left - 1} more)" if num_left > 1 else ""
        item = _alert_item(alert, index, width - width_of(line) - len(more))
        if not item:
            line.append(Run(f"  (+{num_left} more)", Tone.MUTED))
            break
        line += item
    is_told = any(limit in alert.text for alert in found)
    if limit and not is_told and width_of(line) + len(limit) + 4 <= width:
        line += [Run(" │ ", Tone.MUTED), Run(limit)]
    return line


def _alert_item(alert: Alert, index: int, room: int) -> Line:
    """Draw an alert and what to press or type; empty: it does not fit.

    The first one always fits: its command is left out, its text is cut, and its key stays.
    """
    mark, tone = SEVERITIES.get(alert.severity, SEVERITIES["info"])
    click = f"app.alert({index})"
    head = [Run("   " if index else " "), Run(mark, tone, click)]
    action = f"; {alert.action}" if alert.action else ""
    room -= width_of(head) + 1
    if cell_len(alert.text) + len(action) > room and (index or not alert.request_id):
        action = ""
    if index and cell_len(alert.text) > room:
        return []
    text = clip(alert.text, room - len(action))
    return [*head, Run(f" {text}", action=click), Run(action, Tone.MUTED, click)]


class Hint(NamedTuple):
    """A key for the last line of the screen."""

    sign: str
    """What is on the key."""
    label: str
    action: str
    """What it does, as a click does."""


def key_hints(hints: Sequence[Hint], pages: Sequence[str], page: str, width: int) -> Line:
    """Draw the pages, then keys with labels; if some do not fit, point to help."""
    line: Line = [Run(f" 1-{len(pages)} ", Tone.ACCENT), Run(page, Tone.CURRENT), Run(" ")]
    named: Line = []
    for number, name in enumerate(pages, start=1):
        click = f"app.page('{name}')"
        tone = Tone.CURRENT if name == page else Tone.MUTED
        named += [Run(f" {number} ", Tone.ACCENT, click), Run(name, tone, click)]
    if width_of(named) + _LEAST_KEYS <= width:
        line = [*named, Run(" ")]
    line.append(Run("│", Tone.MUTED))
    room = width - width_of(line)
    *others, last = (_hint(hint) for hint in hints)
    if sum(map(width_of, [*others, last])) > room:
        last = _hint(Hint("?", "for more", "app.help"))
    for hint in others:
        if width_of(hint) + width_of(last) > room:
            break
        line += hint
        room -= width_of(hint)
    return [*line, *last]


def _hint(hint: Hint) -> Line:
    return [
        Run(f" {hint.sign} ", Tone.ACCENT, hint.action),
        Run(hint.label, Tone.MUTED, hint.action),
    ]


def summary(view: View) -> str:
    """Sum up the reading in one line, for small terminals and plain text."""
    frame = view.frame
    if frame is None:
        return f"{view.link.word} {view.link.why}".rstrip()
    replay = [REPLAY] if view.link.word == REPLAY else []
    parts = [
        *replay,
        fig.clock(frame.at),
        frame.state if view.link.is_live else view.link.word,
        f"live {frame.num_requests}",
        f"queued {frame.queue.queued}",
        f"prefill {fig.rate(view.history.prefill_tokens_per_s[-1])} tok/s",
        f"decode {fig.rate(view.history.decode_tokens_per_s[-1])} tok/s",
        *(f"{_pool_words(pool.name)} {fig.ratio(pool.used_ratio)}" for pool in frame.pools),
        *(fig.quantiles(fields(frame.latency), name, "p50") for name in ("ttft", "itl")),
        *(f"{SEVERITIES[alert.severity][0]} {alert.text}" for alert in alerts(view)[:1]),
    ]
    return clean("  ".join(filter(None, parts)))


def _pool_words(name: str) -> str:
    """Name a pool: `kv` for the shared pool, `kv decode` for a worker's own."""
    return name if name == "kv" else f"kv {name}"


def version_problem(version: int) -> str | None:
    """Explain why frames of this version cannot be shown; None: they can."""
    if version == FRAME_VERSION:
        return None
    return (
        f"the daemon sends frames of version {version}, this console reads version "
        f"{FRAME_VERSION}: use the penstock of the same release for both"
    )
