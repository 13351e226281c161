"""Draw one request in detail: its facts, and where its time went, stage by stage.

Invariant: stages are drawn in the order in which they happen; the rest is printed as unattributed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from appliance.observe.frame import figures as fig
from appliance.observe.frame import request_facts
from appliance.observe.frame.protocol import RequestFrame
from appliance.observe.frame.tier_frames import fields
from tui.lines import Line, Run, Tone, clean, clip, fold, pad, pairs, width_of, wrap
from tui.panels.requests import phase_text

_LABEL_WIDTH = 13
_NUMBER_WIDTH = 10


def detail(request: RequestFrame, width: int) -> list[Line]:
    """Draw the lines of one request's dialog."""
    known = fields(request)
    told = request_facts.request_facts(known) | {
        "state": phase_text(request),
        "received": fig.clock(request.received_at),
        "blocks": fig.count(request.num_blocks),
        "stream": "yes" if request.stream else "no",
    }
    lines: list[Line] = [[Run(clip(request.id, width), Tone.STRONG)]]
    for row in _PAIRS:
        facts = [(label, told.pop(label)) for label in row]
        side_by_side = pairs(width, *facts)
        has_room = width_of(side_by_side) <= width
        rows = [side_by_side] if has_room else [pairs(width, fact) for fact in facts]
        lines += [each for row in rows for each in fold(row, width, 0)]
    error = told.pop("error", "")
    for label, text in told.items():
        tone = _FACT_TONES.get(label, Tone.PLAIN)
        first, *others = wrap(f"{label} {text}", width, 0, tone)
        if len(others) == 0:
            first = [Run(f"{label} ", Tone.MUTED), Run(text, tone)]
        lines += [first, *others]
    lines += [[], *waterfall(known, width)]
    if error:
        lines += [[], *fold([Run("error ", Tone.BAD), Run(clean(error))], width, 0)]
    return lines


_PAIRS = (
    ("state", "user"),
    ("endpoint", "received"),
    ("in", "out"),
    ("ttft", "tpot"),
    ("first itl", "moved"),
    ("model", "blocks"),
    ("client", "stream"),
)
"""Facts shown side by side; others have lines of their own."""
_FACT_TONES = {"waits": Tone.WARN, "slow because": Tone.STRONG}


def waterfall(known: Mapping[str, Any], width: int) -> list[Line]:
    """Draw a bar for each stage at its place in the whole, then the sums."""
    room = width - _LABEL_WIDTH - _NUMBER_WIDTH - 2
    bars, sums = request_facts.waterfall(known, room)
    lines = [_row("stage", "ms", "", Tone.MUTED)]
    for bar in bars:
        label, tone = (f"{bar.stage}…", Tone.WARN) if bar.is_open else (bar.stage, Tone.PLAIN)
        lines.append(_row(label, fig.millis(bar.ms), " " * bar.start + "█" * bar.cells, tone))
    return lines + [_row(label, fig.millis(value_ms), "", Tone.STRONG) for label, value_ms in sums]


def _row(label: str, number: str, bar: str, tone: Tone) -> Line:
    return [
        Run(pad(label, _LABEL_WIDTH), Tone.MUTED),
        Run(pad(number, _NUMBER_WIDTH, right=True) + "  ", tone),
        Run(bar, Tone.ACCENT),
    ]
