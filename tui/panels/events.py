"""Draw events, and the page of current alerts.

Invariant: the newest event comes first, the worst alert comes first.
"""

from __future__ import annotations

from statistics import fmean

from appliance.observe.frame import figures as fig
from appliance.observe.frame.protocol import AlertFrame, EventFrame, Frame
from tui.lines import Line, Run, Tone, pad, rule
from tui.panels.header import SEVERITIES, alert_action, note_parts, own_alerts
from tui.view import View

_NEWS_S = 600
_ROOMY = 100
_CODE_WIDTH = 22
_SUBJECT_WIDTH = 10


def events(view: View, width: int, height: int) -> list[Line]:
    """Draw the newest events that fit; informational ones disappear after a while.

    Until then what is wrong stands above them, lest what follows a failure hides it.
    """
    frame = view.frame
    if frame is None:
        return []
    newest = list(reversed(frame.events))
    is_new = [(fig.seconds_between(event.at, frame.at) or 0.0) < _NEWS_S for event in newest]
    wrong = [event.severity != "info" for event in newest]
    order = [
        [event for event, *known in zip(newest, is_new, wrong, strict=True) if known == wanted]
        for wanted in ([True, True], [True, False], [False, True])
    ]
    return [_event_line(event, width) for each in order for event in each][:height]


def all_events(view: View, width: int) -> list[Line]:
    """Draw every event, the newest at the top."""
    recorded = view.frame.events if view.frame else []
    if not recorded:
        return [[Run("no events", Tone.MUTED)]]
    return [_event_line(event, width) for event in reversed(recorded)]


def page(view: View, width: int, height: int) -> list[Line]:
    """Draw alerts, the bottleneck, then events."""
    frame = view.frame
    if frame is None:
        return []
    standing = [_alert_line(alert, frame, width) for alert in frame.alerts]
    standing += [[_severity(a.severity), Run(a.text, Tone.STRONG)] for a in own_alerts(view)]
    return [
        rule("ALERTS", width, "what is wrong now"),
        *(standing or [[Run("● ok  no alerts", Tone.GOOD)]]),
        *_past_alerts(frame, width),
        rule("BOTTLENECK", width),
        [Run(frame.limit or "none", Tone.STRONG if frame.limit else Tone.MUTED)],
        *_refused(frame, width),
        *_model(frame, width),
        rule("EVENTS", width, f"the last {len(frame.events)}, newest first"),
        *all_events(view, width),
    ]


def _past_alerts(frame: Frame, width: int) -> list[Line]:
    """Count the alerts that were raised and cleared among the events, with their mean length."""
    raised: dict[str, str] = {}
    lasted: dict[str, list[float]] = {}
    cleared: dict[str, str] = {}
    for event in frame.events:
        if event.severity != "info":
            raised.setdefault(event.code, event.at)
        elif event.code in raised:
            length_s = fig.seconds_between(raised.pop(event.code), event.at)
            lasted.setdefault(event.code, []).append(length_s or 0.0)
            cleared[event.code] = event.at
    rows: list[Line] = [
        [
            Run(f"{pad(code, _CODE_WIDTH)} ", Tone.MUTED),
            Run(pad(fig.times(len(lasted[code])), 9), Tone.STRONG),
            Run(f"{fig.seconds(fmean(lasted[code])):>6} each, last until {fig.clock(at)}"),
        ]
        for code, at in sorted(cleared.items(), key=lambda item: item[1], reverse=True)
    ]
    return [rule("CLEARED ALERTS", width, "among these events"), *rows] if rows else []


def _refused(frame: Frame, width: int) -> list[Line]:
    """Draw refusals by caller and reason, the most frequent of the last minute first."""
    if not frame.refusals:
        return []
    num_errors = fig.count(frame.totals.client_errors)
    return [
        rule("REFUSED", width, f"by caller; {num_errors} for errors of their own since the start"),
        *(
            [
                Run(f"{fig.clock(each.last_at)} "),
                Run(pad(f"{each.status}", 4), Tone.WARN),
                Run(pad(f"{fig.rate(each.per_s)}/s", 9)),
                Run(pad(f"{fig.count(each.last_minute)} in 60 s", 14), Tone.MUTED),
                Run(pad(fig.count(each.number), 9)),
                Run(f"{each.client} ({each.user})  " if each.client else f"{each.user}  "),
                Run(f"{each.code}: {each.message}", Tone.STRONG),
            ]
            for each in frame.refusals
        ),
    ]


def _model(frame: Frame, width: int) -> list[Line]:
    """Draw the model's whole note, which the header and its next line cut."""
    gist, rest = note_parts(frame)
    if not gist:
        return []
    about = f"{gist}: {rest}" if rest else gist
    return [rule("MODEL", width, frame.model), [Run(about)]]


def _severity(severity: str) -> Run:
    word, tone = SEVERITIES.get(severity, SEVERITIES["info"])
    return Run(pad(word, 8), tone)


def _alert_line(alert: AlertFrame, frame: Frame, width: int) -> Line:
    """Draw `▲ WARN kv.occupancy decode 41s 93% in use`, and what to press or type."""
    action = alert_action(alert, frame)
    code = pad(alert.code, _CODE_WIDTH) if width >= _ROOMY else alert.code
    subject = pad(alert.subject, _SUBJECT_WIDTH) if width >= _ROOMY else alert.subject
    return [
        _severity(alert.severity),
        Run(f"{code} ", Tone.MUTED),
        Run(f"{subject} " if subject else "", Tone.MUTED),
        Run(pad(fig.since(alert.since, frame.at), 7)),
        Run(alert.message, Tone.STRONG),
        Run(f": {action}" if action else "", Tone.MUTED),
    ]


def _event_line(event: EventFrame, width: int) -> Line:
    code = pad(event.code, _CODE_WIDTH) if width >= _ROOMY else event.code
    return [
        Run(f"{fig.clock(event.at)} ", Tone.MUTED),
        _severity(event.severity),
        Run(f"{code} ", Tone.MUTED),
        Run(event.message, Tone.PLAIN if event.severity == "info" else Tone.STRONG),
    ]
