"""Draw the request table.

Invariant: a row takes exactly the width asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from appliance.observe.frame import figures as fig
from appliance.observe.frame import request_facts
from appliance.observe.frame.protocol import RequestFrame
from appliance.observe.frame.tier_frames import fields
from tui.lines import Line, Run, Tone, clean, clip, pad, width_of
from tui.past_requests import PastRequest
from tui.request_order import SORTS, RequestListing
from tui.view import REPLAY, View

_MARGIN = 2
_ROOMY = 100
"""Minimum width for two cells between columns."""
_WIDE = 150
"""Minimum width for the whole request id."""
_PHASE_TONES = {
    "queued": Tone.MUTED,
    "prefilling": Tone.WARN,
    "handing_off": Tone.ACCENT,
    "paused": Tone.WARN,
    "decoding": Tone.GOOD,
}

_WHOLE_CLIENT = 13
"""Width of a program and its process number, which wide tables show."""


@dataclass(frozen=True, slots=True)
class RequestColumn:
    """One column; the lowest ranks are shown first on a narrow screen."""

    title: str
    width: int
    rank: int
    text: Callable[[RequestFrame], str]
    is_right: bool = True
    grows_to: int = 0
    gap: int = 0
    """Empty cells before it."""

    def cell(self, text: str) -> str:
        return " " * self.gap + pad(text, self.width, right=self.is_right)


def phase_text(request: RequestFrame) -> str:
    """Describe the phase: `prefilling 62%`, `handing off`, `decoding`, or the end."""
    text = clean(request_facts.phase_text(fields(request)))
    sign = _estimate_sign(request)
    return text.replace("prefilling ", f"prefilling {sign}") if sign else text


def _estimate_sign(request: RequestFrame) -> str:
    """Return `~` before a replay's estimates."""
    return "~" if isinstance(request, PastRequest) and request.is_estimated else ""


def _output_text(request: RequestFrame) -> str:
    sign = _estimate_sign(request) if request.output_tokens else ""
    return sign + fig.short_count(request.output_tokens)


def _note(request: RequestFrame) -> str:
    """Return the error, the wait reason, or the cause of delay; empty: none of them."""
    if request.error:
        return request.error
    if request.behind:
        left = fig.short_count(request.behind_tokens)
        return f"behind {fig.short_id(request.behind)}, {left} left"
    if request.waits_for:
        return f"waits for {request.waits_for.partition(';')[0]}"
    return request.slow_because or ""


COLUMNS = (
    RequestColumn("ID", 8, 0, lambda r: fig.short_id(r.id), is_right=False),
    RequestColumn("PHASE", 15, 0, phase_text, is_right=False),
    RequestColumn("USER", 8, 6, lambda r: r.user or fig.ABSENT, is_right=False, grows_to=12),
    RequestColumn("CLIENT", 9, 7, lambda r: r.client or fig.ABSENT, is_right=False, grows_to=22),
    RequestColumn("WORKER", 9, 15, lambda r: r.worker or fig.ABSENT, is_right=False),
    RequestColumn("ENDPOINT", 16, 17, lambda r: r.endpoint, is_right=False, grows_to=24),
    RequestColumn("IN", 6, 1, lambda r: fig.short_count(r.prompt_tokens)),
    RequestColumn("OUT", 5, 2, _output_text),
    RequestColumn("MAX", 5, 9, lambda r: fig.short_count(r.max_tokens)),
    RequestColumn("TIME", 6, 3, lambda r: fig.seconds(r.age_ms / 1000)),
    RequestColumn("QUEUE", 6, 11, lambda r: fig.millis(r.queue_ms)),
    RequestColumn("PREFILL", 7, 12, lambda r: fig.millis(r.prefill_ms)),
    RequestColumn("TTFT", 6, 4, lambda r: fig.millis(r.ttft_ms)),
    RequestColumn("HANDOFF", 7, 13, lambda r: fig.millis(r.handoff_ms)),
    RequestColumn("TPOT", 6, 5, lambda r: fig.millis(r.tpot_ms)),
    RequestColumn("BLOCKS", 6, 14, lambda r: _estimate_sign(r) + fig.short_count(r.num_blocks)),
    RequestColumn("MOVED", 8, 16, lambda r: fig.size(r.handoff_bytes)),
    RequestColumn("J", 7, 10, lambda r: _joules(r)),
    RequestColumn("ROUTE", 8, 18, lambda r: r.route or fig.ABSENT, is_right=False),
    RequestColumn("NOTE", 27, 8, _note, is_right=False, grows_to=120),
)


def _joules(request: RequestFrame) -> str:
    """Return its energy without the unit."""
    return fig.short_count(request_facts.energy_j(request.prefill_j, request.decode_j))


def columns_for(width: int, is_metered: bool = True) -> list[RequestColumn]:
    """Choose the most important columns that fit, in display order; spare cells widen the texts.

    Args:
        is_metered: a device reports energy, so that it gets a column.
    """
    chosen: list[RequestColumn] = []
    gap = 2 if width >= _ROOMY else 1
    room = width - _MARGIN + gap
    known = [
        replace(column, width=_WHOLE_CLIENT)
        if column.title == "CLIENT" and width >= _WIDE
        else column
        for column in COLUMNS
        if is_metered or column.title != "J"
    ]
    for column in sorted(known, key=lambda column: column.rank):
        if column.width + gap <= room:
            chosen.append(column)
            room -= column.width + gap
    if width >= _WIDE:
        chosen = [_with_whole_id(column) for column in chosen]
    chosen.sort(key=lambda column: [each.title for each in COLUMNS].index(column.title))
    more = {}
    for column in sorted(chosen, key=lambda column: column.title != "CLIENT"):
        more[column.title] = max(0, min(column.grows_to - column.width, room))
        room -= more[column.title]
    return [
        replace(each, width=each.width + more[each.title], gap=gap if index else 0)
        for index, each in enumerate(chosen)
    ]


def _with_whole_id(column: RequestColumn) -> RequestColumn:
    if column.title != "ID":
        return column
    return replace(column, text=lambda request: request.id, grows_to=44)


def heading(columns: Sequence[RequestColumn], listing: RequestListing) -> Line:
    """Draw the line above the rows; the sorted column stands out."""
    line: Line = [Run("  ")]
    for column in columns:
        name = column.title.lower()
        tone = Tone.ACCENT if name == listing.sort else Tone.MUTED
        click = f"app.sort_by('{name}')" if name in SORTS else ""
        line.append(Run(column.cell(column.title), tone, click))
    return line


_LATE_COLUMNS = {
    "TTFT": ("queue", "prefill", "restore", "swap"),
    "QUEUE": ("queue",),
    "PREFILL": ("prefill",),
    "HANDOFF": ("handoff",),
    "TPOT": ("decode", "paused"),
}
"""The stages that a column stands out for, where the daemon found them slow."""


def _tone(column: str, request: RequestFrame) -> Tone:
    if column == "ID":
        return Tone.STRONG
    if column == "PHASE":
        return Tone.BAD if request.error else _PHASE_TONES.get(request.phase, Tone.MUTED)
    if column == "NOTE" and request.error:
        return Tone.BAD
    slow = (request.slow_because or "").partition(":")[0]
    return Tone.WARN if slow in _LATE_COLUMNS.get(column, ()) else Tone.PLAIN


def row(request: RequestFrame, columns: Sequence[RequestColumn], *, is_selected: bool) -> Line:
    """Draw one request as a line of the table."""
    line: Line = [Run("> " if is_selected else "  ", Tone.ACCENT)]
    for column in columns:
        text = _shortened(column, column.text(request))
        line.append(Run(column.cell(text), _tone(column.title, request)))
    return line


def _shortened(column: RequestColumn, text: str) -> str:
    """Leave out the parts of a long text that say least; half a number says nothing."""
    if len(text) <= column.width:
        return text
    if column.title == "NOTE":
        while len(text) > column.width and ", " in text:
            text = text.rpartition(", ")[0]
    if column.title == "CLIENT":
        program = text.partition(" ")[0]
        return program if len(program) <= column.width else program.rpartition(":")[0] or program
    return text.removeprefix("key:") if column.title == "USER" else text


def title(view: View, num_shown: int, first: int, last: int, room: int = 1000) -> str:
    """Return `REQUESTS 30 live, rows 1-8 by TIME ↓`, then filter and numbers of ends.

    Parts that do not fit are left out, from the last on.
    """
    frame, listing = view.frame, view.listing
    if frame is None:
        return "REQUESTS"
    arrow = "↑" if listing.is_reversed else "↓"
    text = f"REQUESTS  {fig.count(frame.num_requests)} live"
    text += f", rows {first}-{last} by {listing.sort.upper()} {arrow}" if num_shown else ""
    text += f" │ filter {listing.filter.text}" if listing.filter.text else ""
    totals, sign = frame.totals, " │ "
    for number, word in (
        (totals.finished, "done"),
        (totals.failed, "failed"),
        (totals.refused, "refused"),
        (totals.aborted, "cancelled"),
        (totals.client_errors, "client errors"),
    ):
        count = f"{sign}{fig.short_count(number)} {word}"
        if number and len(text) + len(count) <= room:
            text, sign = text + count, ", "
    return text


def summary(view: View, width: int) -> Line:
    """Write `today 148 requests, 281k in, 41k out │ ana 3 live`, with the users that fit."""
    frame = view.frame
    if frame is None:
        return []
    line: Line = []
    if (today := frame.today) is not None:
        is_whole = "T00:00:00" in today.since
        line += [
            Run(" today " if is_whole else f" since {fig.clock(today.since)} ", Tone.MUTED),
            Run(fig.things(today.requests, "request"), Tone.STRONG),
            Run(f", {fig.short_count(today.prompt_tokens)} in"),
            Run(f", {fig.short_count(today.output_tokens)} out"),
            Run(f", {fig.count(today.failed)} failed" if today.failed else "", Tone.BAD),
        ]
    for index, user in enumerate(frame.users):
        item = [
            Run(" │ " if line else " ", Tone.MUTED),
            Run(clip(user.user, 16), Tone.STRONG),
            Run(f" {fig.count(user.num_requests)} live"),
            Run(f", {fig.tokens_per_s(user.output_tokens_per_s)}"),
        ]
        more = f" +{fig.things(len(frame.users) - index, 'user')}"
        if width_of(line) + width_of(item) + len(more) > width:
            return [*line, Run(more, Tone.MUTED)]
        line += item
    return line


def placeholder(view: View) -> Line:
    """Return the text of an empty table."""
    if view.frame is None and view.link.is_absent:
        return [Run("  no daemon; start one with: penstock serve", Tone.MUTED)]
    if view.frame is None and view.link.why:
        return [Run(f"  {view.link.why}", Tone.MUTED)]
    if view.frame is None:
        return [Run("  waiting for the first frame", Tone.MUTED)]
    if view.listing.filter.text:
        return [Run("  no request matches the filter", Tone.MUTED)]
    if view.link.word == REPLAY:
        return [Run("  no live requests in the log", Tone.MUTED)]
    end = view.frame.survived
    if end is not None and end.num_waiting:
        kept = f"  {fig.things(end.num_waiting, 'request')} kept: each continues"
        when = " once the model is loaded" * (view.frame.state == "loading")
        return [Run(f"{kept}{when}", Tone.WARN)]
    today = view.frame.today
    if view.frame.totals.accepted or (today is not None and today.requests):
        return [Run("  no live requests", Tone.MUTED)]
    return [Run('  no requests yet; send one with: penstock run "Hello"', Tone.MUTED)]
