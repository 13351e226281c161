"""The table of requests, live and finished: its columns and its rows.

Owns: which columns a width gets.
Invariant: a row takes exactly the width asked for.
Never: shows text of a prompt; frames carry none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from appliance.frame.protocol import RequestFrame
from tui import format as fmt
from tui.filter import energy_j
from tui.lines import Line, Run, Tone
from tui.rebuild import PastRequest
from tui.request_listing import RequestListing
from tui.view import REPLAY, View

_MARGIN = 2
_ROOMY = 100
"""From here on columns stand two cells apart, below it one."""
_WIDE = 150
"""From here on the whole request id is shown."""
_PHASE_TONES = {
    "queued": Tone.MUTED,
    "prefilling": Tone.WARN,
    "handing_off": Tone.ACCENT,
    "paused": Tone.WARN,
    "decoding": Tone.GOOD,
}


@dataclass(frozen=True, slots=True)
class RequestColumn:
    """One column; the lowest ranks are shown first when there is little room."""

    title: str
    width: int
    rank: int
    text: Callable[[RequestFrame], str]
    is_right: bool = True
    grows_to: int = 0
    gap: int = 0
    """Empty cells before it."""

    def cell(self, text: str) -> str:
        """The text in exactly this column's cells."""
        return " " * self.gap + fmt.pad(text, self.width, right=self.is_right)


def phase_text(request: RequestFrame) -> str:
    """`prefilling 62%`, `handing off`, `decoding`; of a finished one how it ended."""
    if request.phase == "finished":
        return fmt.clean(request.finish_reason or request.phase)
    text = fmt.clean(request.phase.replace("_", " "))
    if request.phase == "prefilling" and request.prompt_tokens:
        share = fmt.ratio(min(1.0, request.computed_tokens / request.prompt_tokens))
        text += f" {_estimate_sign(request)}{share}"
    return text


def _estimate_sign(request: RequestFrame) -> str:
    """`~` before what a replay can only estimate."""
    return "~" if isinstance(request, PastRequest) and request.is_estimated else ""


def _output_text(request: RequestFrame) -> str:
    sign = _estimate_sign(request) if request.output_tokens else ""
    return sign + fmt.short_count(request.output_tokens)


COLUMNS = (
    RequestColumn("ID", 8, 0, lambda r: fmt.short_id(r.id), is_right=False),
    RequestColumn("PHASE", 15, 0, phase_text, is_right=False),
    RequestColumn("USER", 8, 6, lambda r: r.user or fmt.ABSENT, is_right=False, grows_to=16),
    RequestColumn("WORKER", 9, 13, lambda r: r.worker or fmt.ABSENT, is_right=False),
    RequestColumn("ENDPOINT", 16, 17, lambda r: r.endpoint, is_right=False, grows_to=24),
    RequestColumn("IN", 6, 1, lambda r: fmt.short_count(r.prompt_tokens)),
    RequestColumn("OUT", 5, 2, _output_text),
    RequestColumn("MAX", 5, 7, lambda r: fmt.short_count(r.max_tokens)),
    RequestColumn("AGE", 6, 3, lambda r: fmt.seconds(r.age_ms / 1000)),
    RequestColumn("QUEUE", 6, 10, lambda r: fmt.millis(r.queue_ms)),
    RequestColumn("PREFILL", 7, 11, lambda r: fmt.millis(r.prefill_ms)),
    RequestColumn("TTFT", 6, 4, lambda r: fmt.millis(r.ttft_ms)),
    RequestColumn("HANDOFF", 7, 9, lambda r: fmt.millis(r.handoff_ms)),
    RequestColumn("WAIT", 6, 14, lambda r: fmt.millis(r.decode_wait_ms)),
    RequestColumn("PAUSED", 6, 20, lambda r: fmt.millis(r.paused_ms)),
    RequestColumn("GAP1", 6, 15, lambda r: fmt.millis(r.first_itl_ms)),
    RequestColumn("TPOT", 6, 5, lambda r: fmt.millis(r.tpot_ms)),
    RequestColumn("E2E", 6, 18, lambda r: fmt.millis(r.e2e_ms)),
    RequestColumn("BLOCKS", 6, 12, lambda r: _estimate_sign(r) + fmt.short_count(r.num_blocks)),
    RequestColumn("MOVED", 8, 16, lambda r: fmt.size(r.handoff_bytes)),
    RequestColumn("J", 7, 8, lambda r: _joules(r)),
    RequestColumn("ROUTE", 8, 19, lambda r: r.route or fmt.ABSENT, is_right=False),
)


def _joules(request: RequestFrame) -> str:
    """Its energy without the unit."""
    value_j = energy_j(request)
    return fmt.short_count(value_j) if value_j is None or value_j >= 100 else f"{value_j:.1f}"


def columns_for(width: int) -> list[RequestColumn]:
    """The most important columns that fit, in display order; room left over widens the texts."""
    chosen: list[RequestColumn] = []
    gap = 2 if width >= _ROOMY else 1
    room = width - _MARGIN + gap
    for column in sorted(COLUMNS, key=lambda column: column.rank):
        if column.width + gap <= room:
            chosen.append(column)
            room -= column.width + gap
    if width >= _WIDE:
        chosen = [_with_whole_id(column) for column in chosen]
    chosen.sort(key=lambda column: [known.title for known in COLUMNS].index(column.title))
    grown: list[RequestColumn] = []
    for column in chosen:
        more = max(0, min(column.grows_to - column.width, room))
        room -= more
        grown.append(replace(column, width=column.width + more, gap=gap if grown else 0))
    return grown


def _with_whole_id(column: RequestColumn) -> RequestColumn:
    if column.title != "ID":
        return column
    return replace(column, text=lambda request: request.id, grows_to=44)


def heading(columns: Sequence[RequestColumn], listing: RequestListing) -> Line:
    """The line above the rows; the sorted column stands out."""
    line: Line = [Run("  ")]
    for column in columns:
        tone = Tone.ACCENT if column.title.lower() == listing.sort else Tone.MUTED
        line.append(Run(column.cell(column.title), tone))
    return line


def row(request: RequestFrame, columns: Sequence[RequestColumn], *, is_selected: bool) -> Line:
    """One request as a line of the table."""
    line: Line = [Run("> " if is_selected else "  ", Tone.ACCENT)]
    phase_tone = _PHASE_TONES.get(request.phase, Tone.MUTED)
    tones = {"ID": Tone.STRONG, "PHASE": Tone.BAD if request.error else phase_tone}
    for column in columns:
        text = column.cell(column.text(request))
        line.append(Run(text, tones.get(column.title, Tone.PLAIN)))
    return line


def title(view: View, num_shown: int, first: int, last: int, room: int = 1000) -> str:
    """`REQUESTS  30 live, 1-8 by age v`, the filter, and what became of the others.

    What does not fit whole is left out whole: counts that are 0, the order of those that have
    ended, then the other counts from the last on.
    """
    frame, listing = view.frame, view.listing
    if frame is None:
        return "REQUESTS"
    arrow = "^" if listing.is_reversed else "v"
    num_finished = num_shown - listing.num_admitted(frame.requests)
    order = [f", {first}-{last} by {listing.sort} {arrow}"] if num_shown else []
    live = f"REQUESTS  {fmt.count(frame.num_requests)} live"
    finished = [f", {fmt.count(num_finished)} finished"] if num_finished > 0 else []
    # age is what those have that are there
    is_by_end = num_finished > 0 and listing.sort == "age"
    end_order = [f", finished by end {arrow}"] if is_by_end else []
    filtered = [f" │ filter {listing.filter.text}"] if listing.filter.text else []
    totals = frame.totals
    counts = [
        (totals.finished, "done"),
        (totals.aborted, "aborted"),
        (totals.failed, "failed"),
        (totals.refused, "refused"),
    ]
    not_none = [(num, word) for num, word in counts if num]
    choices = [(counts, end_order), (not_none, end_order)]
    choices += [(not_none[:num], []) for num in range(len(not_none), -1, -1)]
    for shown, ends in choices:
        texts = [f"{fmt.short_count(num)} {word}" for num, word in shown]
        others = [" │ " + ", ".join(texts)] if texts else []
        text = "".join([live, *finished, *order, *ends, *filtered, *others])
        if len(text) <= room:
            break
    return text


def placeholder(view: View) -> Line:
    """What stands in an empty table."""
    if view.frame is None and view.link.why:
        return [Run("  no daemon; start one with: penstock serve", Tone.MUTED)]
    if view.frame is None:
        return [Run("  waiting for the first frame", Tone.MUTED)]
    if view.listing.filter.text:
        return [Run("  no request passes the filter; / changes it", Tone.MUTED)]
    if view.link.word == REPLAY:
        return [Run("  no live requests that the log knows of", Tone.MUTED)]
    return [Run('  no live requests; send one with: penstock run --chat "Hello"', Tone.MUTED)]
