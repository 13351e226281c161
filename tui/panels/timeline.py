"""Draw the timeline: what each worker computed when, request by request.

Invariant: a request has a bar for its wait, one for its prompt and one for its outputs, each where
and as long as it was; less than a cell takes one, but a wait of less than half a cell none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from rich.cells import cell_len

from appliance.observe.frame import figures as fig
from appliance.observe.frame.protocol import Frame, RequestFrame
from tui.lines import Line, Run, Tone, clean, clip, rule
from tui.panels.header import SEVERITIES
from tui.panels.lanes import where
from tui.view import View

WAITING = "waiting"
"""The lane of requests without a step yet."""
_LOOKS = {
    WAITING: ("░", Tone.MUTED),
    "prompt": ("█", Tone.WARN),
    "output": ("▒", Tone.GOOD),
}
_LABEL_FROM = 11
"""Minimum cells of a bar that has its request's id."""
_TOKENS_FROM = 22
"""Minimum cells of a bar that has the number of its tokens, too."""
_TICKS = 4
_PLAIN_ID = re.compile(r"[\w-]+", re.ASCII)
"""Ids that can stand in an action; one that can not has no click."""


class Stretch(NamedTuple):
    """A part of one request's time, on one lane."""

    lane: str
    kind: str
    """`waiting`, `prompt` or `output`."""
    begin_ms: float
    """Before now: below 0, like the end."""
    end_ms: float
    request: RequestFrame


class _Bar(NamedTuple):
    """A stretch in cells."""

    begin: int
    end: int
    stretch: Stretch


def page(view: View, width: int, height: int) -> list[Line]:
    """Draw a lane for what waits and one for each worker, then what went wrong meanwhile."""
    frame = view.frame
    if frame is None:
        return []
    window_ms = 1000.0 * view.window_s
    requests = [*frame.requests, *_ended(view, frame)]
    found = [each for request in requests for each in stretches(request, frame)]
    bars = [bar for each in found if (bar := _placed(each, window_ms, width)) is not None]
    names = [worker.name for worker in frame.workers]
    lanes = dict.fromkeys([WAITING, *names, *(bar.stretch.lane for bar in bars)])
    rows = {lane: _packed(bar for bar in bars if bar.stretch.lane == lane) for lane in lanes}
    marks = _marks(frame, window_ms, width)
    room = height - len(rows) - len(marks) - 2
    shares = _shares([len(each) for each in rows.values()], room)
    lines: list[Line] = [_axis(view.window_s, width)]
    for (lane, packed), share in zip(rows.items(), shares, strict=True):
        hidden = sum(map(len, packed[share:]))
        lines.append(rule(lane.upper(), width, _note(frame, lane, hidden)))
        lines += [_row(row, width) for row in packed[:share]]
    return [*lines, *marks, _legend()]


def _ended(view: View, frame: Frame) -> list[RequestFrame]:
    """List the ended requests that are not live still: the daemon is asked at different times."""
    live = {request.id for request in frame.requests}
    return [request for request in view.finished if request.id not in live]


def stretches(request: RequestFrame, frame: Frame) -> list[Stretch]:
    """Divide a request's time into its wait, its prompt and its outputs."""
    passed_s = fig.seconds_between(request.received_at, frame.at)
    if request.phase != "finished":
        begin_ms, end_ms = -request.age_ms, 0.0
    elif passed_s is not None:
        begin_ms = -1000 * passed_s
        end_ms = begin_ms + (request.age_ms if request.e2e_ms is None else request.e2e_ms)
    else:
        return []
    bounds = [begin_ms, end_ms, end_ms, end_ms]
    if request.queue_ms is not None:
        waits = (request.tokenize_ms, request.queue_ms, request.restore_ms)
        bounds[1] = begin_ms + sum(each or 0.0 for each in waits)
        if request.prefill_ms is not None:
            moved_ms = (request.handoff_ms or 0.0) + (request.decode_wait_ms or 0.0)
            bounds[2] = bounds[1] + request.prefill_ms
            is_moving = request.phase == "handing_off"
            bounds[3] = end_ms if is_moving else min(end_ms, bounds[2] + moved_ms)
    first, last = _workers(request, frame)
    parts = ((WAITING, WAITING), (first, "prompt"), ("", ""), (last, "output"))
    return [
        Stretch(lane, kind, begin, end, request)
        for (lane, kind), (begin, end) in zip(parts, pairwise([*bounds, end_ms]), strict=True)
        if lane and end > begin
    ]


def _workers(request: RequestFrame, frame: Frame) -> tuple[str, str]:
    """Return the workers of its prompt and of its outputs; empty: not reported."""
    names = [clean(name) for name in (request.workers or request.worker or "").split(",")]
    if len(names) > 1 or request.route != "move" or names[0].startswith("prefill"):
        return names[0], names[-1]
    prefills = (worker.name for worker in frame.workers if worker.name.startswith("prefill"))
    return next(prefills, names[0]), names[0]


def _placed(stretch: Stretch, window_ms: float, width: int) -> _Bar | None:
    """Place a stretch in the window's cells; None: it was before, or a wait that is too short."""
    is_brief = stretch.end_ms - stretch.begin_ms < window_ms / width / 2
    if stretch.end_ms <= -window_ms or (is_brief and stretch.kind == WAITING):
        return None
    begin = max(0, min(width - 1, int(width * (1 + stretch.begin_ms / window_ms))))
    end = round(width * (1 + stretch.end_ms / window_ms))
    return _Bar(begin, max(begin + 1, min(width, end)), stretch)


def _packed(bars: Iterable[_Bar]) -> list[list[_Bar]]:
    """Put bars into as few rows as possible, a cell apart."""
    rows: list[list[_Bar]] = []
    for bar in sorted(bars, key=lambda bar: (bar.begin, -bar.end)):
        row = next((row for row in rows if row[-1].end < bar.begin), None)
        if row is None:
            rows.append([bar])
        else:
            row.append(bar)
    return rows


def _shares(wanted: Sequence[int], room: int) -> list[int]:
    """Divide rows among lanes: each gets what it wants, or an equal share of what is left."""
    shares = [0] * len(wanted)
    for num_given, index in enumerate(sorted(range(len(wanted)), key=wanted.__getitem__)):
        shares[index] = max(0, min(wanted[index], room // (len(wanted) - num_given)))
        room -= shares[index]
    return shares


def _note(frame: Frame, lane: str, hidden: int) -> str:
    more = f", {hidden} more" if hidden else ""
    if lane == WAITING:
        return f"{fig.count(frame.queue.queued)} queued{more}"
    worker = next((each for each in frame.workers if each.name == lane), None)
    if worker is None:
        return f"not here any more{more}"
    state = "" if worker.state == "ready" else f", {worker.state}"
    return f"{where(worker, frame)}{state}, busy {fig.ratio(worker.busy_ratio)}{more}"


def _row(bars: Sequence[_Bar], width: int) -> Line:
    line: Line = []
    end = 0
    for bar in bars:
        request, (cell, tone) = bar.stretch.request, _LOOKS[bar.stretch.kind]
        num_cells = bar.end - bar.begin
        line.append(Run(" " * (bar.begin - end)))
        label = ""
        if num_cells >= _LABEL_FROM:
            label = f" {clip(fig.short_id(request.id), 8)} "
        if num_cells >= _TOKENS_FROM and bar.stretch.kind != WAITING:
            is_prompt = bar.stretch.kind == "prompt"
            number = request.prompt_tokens if is_prompt else request.output_tokens
            label += f"{fig.short_count(number)} tok "
        bar_cells = num_cells - 1 - cell_len(label)
        click = f"app.look('{request.id}')" if _PLAIN_ID.fullmatch(request.id) else ""
        line += [Run(cell, tone, click), Run(label, Tone.STRONG, click)]
        line.append(Run(cell * bar_cells, tone, click))
        end = bar.end
    return line


def _axis(window_s: int, width: int) -> Line:
    """Write `-60s  -45s  -30s  -15s  now` at their cells."""
    text = ""
    for tick in range(_TICKS):
        label = f"-{fig.whole_seconds(window_s - tick * window_s / _TICKS)}"
        text = text.ljust(tick * width // _TICKS) + label
    return [Run(f"{text.ljust(width - 3)}now", Tone.MUTED)]


def _marks(frame: Frame, window_ms: float, width: int) -> list[Line]:
    """Mark warnings and errors at their times, with their words where there is room."""
    marks: dict[int, tuple[str, Tone, str]] = {}
    for event in frame.events:
        passed_s = fig.seconds_between(event.at, frame.at)
        if event.severity == "info" or passed_s is None or not 0 <= 1000 * passed_s < window_ms:
            continue
        word, tone = SEVERITIES.get(event.severity, SEVERITIES["info"])
        place = min(width - 1, int(width * (1 - 1000 * passed_s / window_ms)))
        marks[place] = word[0], tone, f" {clean(event.code)} "
    line: Line = []
    for place, end in pairwise([*sorted(marks), width]):
        mark, tone, code = marks[place]
        line.append(Run(" " * (place if not line else 0)))
        room = end - place - 1
        line += [Run(mark, tone), Run(clip(code, room).ljust(room), Tone.MUTED)]
    return [rule("EVENTS", width, "warnings and errors"), line] if line else []


def _legend() -> Line:
    line: Line = []
    for kind, (cell, tone) in _LOOKS.items():
        line += [Run(f"{cell * 2} ", tone), Run(f"{kind}   ", Tone.MUTED)]
    return line
