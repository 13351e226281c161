"""What has happened: events, and the page with the alerts that stand.

Owns: nothing; pure.
Invariant: the newest event comes first, the worst alert comes first.
Never: drops an event that the frame has.
"""

from __future__ import annotations

from appliance.frame import figures as fig
from appliance.frame.protocol import AlertFrame, EventFrame
from tui.lines import Line, Run, Tone, pad, rule
from tui.panels.header import SEVERITIES, own_alerts
from tui.view import View

_ROOMY = 100
_CODE_WIDTH = 22
_SUBJECT_WIDTH = 10


def events(view: View, width: int, height: int) -> list[Line]:
    """The newest events that fit."""
    return all_events(view, width)[:height]


def all_events(view: View, width: int) -> list[Line]:
    """Every event, the newest at the top."""
    recorded = view.frame.events if view.frame else []
    if not recorded:
        return [[Run("no events", Tone.MUTED)]]
    return [_event_line(event, width) for event in reversed(recorded)]


def page(view: View, width: int, height: int) -> list[Line]:
    """Alerts, what limits the appliance, then events."""
    frame = view.frame
    if frame is None:
        return []
    standing = [_alert_line(alert, frame.at, width) for alert in frame.alerts]
    standing += [[_severity(a.severity), Run(a.text, Tone.STRONG)] for a in own_alerts(view)]
    return [
        rule("ALERTS", width, "what is wrong now"),
        *(standing or [[Run("● ok  no alerts", Tone.GOOD)]]),
        rule("LIMIT", width, "what holds it up"),
        [Run(frame.limit or "nothing", Tone.STRONG if frame.limit else Tone.MUTED)],
        rule("EVENTS", width, f"the last {len(frame.events)}, newest first"),
        *all_events(view, width),
    ]


def _severity(severity: str) -> Run:
    word, tone = SEVERITIES.get(severity, SEVERITIES["info"])
    return Run(pad(word, 8), tone)


def _alert_line(alert: AlertFrame, now: str, width: int) -> Line:
    """`▲ WARN  kv.occupancy decode  41s  93% in use`."""
    code = pad(alert.code, _CODE_WIDTH) if width >= _ROOMY else alert.code
    subject = pad(alert.subject, _SUBJECT_WIDTH) if width >= _ROOMY else alert.subject
    return [
        _severity(alert.severity),
        Run(f"{code} ", Tone.MUTED),
        Run(f"{subject} " if subject else "", Tone.MUTED),
        Run(pad(fig.since(alert.since, now), 7)),
        Run(alert.message, Tone.STRONG),
    ]


def _event_line(event: EventFrame, width: int) -> Line:
    code = pad(event.code, _CODE_WIDTH) if width >= _ROOMY else event.code
    return [
        Run(f"{fig.clock(event.at)} ", Tone.MUTED),
        _severity(event.severity),
        Run(f"{code} ", Tone.MUTED),
        Run(event.message, Tone.PLAIN if event.severity == "info" else Tone.STRONG),
    ]
