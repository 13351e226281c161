"""Requests on screen: the table's columns and rows, and one in detail, stage by stage.

Owns: which columns a width gets.
Invariant: a row takes exactly the width asked for.
Never: shows text of a prompt; frames carry none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from appliance.frame.protocol import RequestFrame, restored_from
from tui import format as fmt
from tui.lines import Line, Run, Tone, pairs, wrap
from tui.rebuild import PastRequest
from tui.request_listing import RequestListing, energy_j
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


# One request in detail: its facts, and where its time went, stage by stage.
# Invariant: stages are drawn in the order in which they happen; what they leave unexplained of the
# whole is printed as the residual, never hidden.
# Never: invents a stage that is not reported.


_STAGES = (
    *("tokenize", "queue", "restore", "prefill"),
    *("handoff", "decode_wait", "decode", "paused"),
)
_LABEL_WIDTH = 13
_NUMBER_WIDTH = 10


def stages(request: RequestFrame) -> list[tuple[str, float]]:
    """The stages reached, in order, with their milliseconds."""
    reached = [(stage, getattr(request, f"{stage}_ms")) for stage in _STAGES]
    return [(stage, value_ms) for stage, value_ms in reached if value_ms is not None]


def residual_ms(request: RequestFrame) -> float | None:
    """What the stages leave of the end-to-end time; None until that is known."""
    if request.e2e_ms is None:
        return None
    return request.e2e_ms - sum(value_ms for _, value_ms in stages(request))


def detail(request: RequestFrame, width: int) -> list[Line]:
    """The lines of the dialog that shows one request."""
    outcome = request.finish_reason or phase_text(request)
    lines: list[Line] = [
        [Run(fmt.clip(request.id, width), Tone.STRONG)],
        pairs(width, ("state", outcome), ("user", request.user or fmt.ABSENT)),
        pairs(width, ("endpoint", request.endpoint), ("received", fmt.clock(request.received_at))),
        pairs(width, ("in", _input(request)), ("out", _output(request))),
        pairs(
            width,
            ("worker", request.worker or fmt.ABSENT),
            ("blocks", fmt.count(request.num_blocks)),
        ),
        pairs(
            width,
            ("ttft", fmt.millis_unit(request.ttft_ms)),
            ("tpot", fmt.millis_unit(request.tpot_ms)),
        ),
        pairs(
            width, ("first gap", fmt.millis_unit(request.first_itl_ms)), ("moved", _moved(request))
        ),
        pairs(width, ("model", request.model), ("stream", "yes" if request.stream else "no")),
        [Run("energy ", Tone.MUTED), Run(_energy(request))],
        *_because(request, width),
        [],
        *waterfall(request, width),
    ]
    if request.error:
        lines += [[], [Run("error ", Tone.BAD), Run(fmt.clip(request.error, width - 6))]]
    return lines


def _energy(request: RequestFrame) -> str:
    """`161 J = prefill 78 + decode 83`, as far as it is known."""
    prefill_j, decode_j = request.prefill_j, request.decode_j
    if prefill_j is None and decode_j is None:
        return "not reported"
    parts = f"prefill {fmt.joules(prefill_j)} + decode {fmt.joules(decode_j)}"
    return f"{fmt.joules(energy_j(request))} = {parts}"


def _because(request: RequestFrame, width: int) -> list[Line]:
    """Which way it went and why, and what held it up."""
    lines: list[Line] = []
    if request.route:
        reason = f": {request.route_reason}" if request.route_reason else ""
        lines += wrap(f"route {request.route}{reason}", width)
    if request.workers and request.links:
        lines += wrap(f"ran at {_legs(request.workers, request.links)}", width)
    if request.restore_reason:
        lines += wrap(f"restored {request.restore_reason}", width)
    if request.waits_for:
        lines += wrap(f"waits for {request.waits_for}", width, 0, Tone.WARN)
    if request.preemptions:
        times = "once" if request.preemptions == 1 else f"{request.preemptions} times"
        lines += wrap(f"preempted {times}: others needed its KV blocks", width)
    if request.cancelled_by:
        lines += wrap(f"cancelled by {request.cancelled_by}", width)
    if request.slow_because:
        lines += wrap(f"slow because {request.slow_because}", width, 0, Tone.STRONG)
    return lines


def _legs(workers: str, links: str) -> str:
    """Each worker, and how blocks came there: `prefill0, by peer at decode1`."""
    first, *others = workers.split(",")
    ways = ("again" if way == "none" else f"by {way}" for way in links.split(","))
    legs = (f"{way} at {name}" for name, way in zip(others, ways, strict=False))
    return ", ".join([first, *legs])


def _input(request: RequestFrame) -> str:
    text = f"{fmt.count(request.prompt_tokens)} tok"
    if request.cached_tokens:
        text += f", {fmt.count(request.cached_tokens)} cached"
    if request.restored_tokens:
        tier = restored_from(request.restore_reason)
        text += f" ({fmt.count(request.restored_tokens)} {tier})"
    return text


def _output(request: RequestFrame) -> str:
    text = f"{fmt.count(request.output_tokens)} of {fmt.count(request.max_tokens)} tok"
    return text if request.num_sequences == 1 else f"{text}, {request.num_sequences} sequences"


def _moved(request: RequestFrame) -> str:
    if request.transport is None:
        return fmt.ABSENT
    return f"{fmt.size(request.handoff_bytes)} by {request.transport}"


def waterfall(request: RequestFrame, width: int) -> list[Line]:
    """A bar for each stage at its place in the whole, then the sum against the whole."""
    reached = stages(request)
    sum_ms = sum(value_ms for _, value_ms in reached)
    whole_ms = max(request.e2e_ms or request.age_ms, sum_ms)
    room = max(1, width - _LABEL_WIDTH - _NUMBER_WIDTH - 2)
    lines, offset_ms = [_row("stage", "ms", "", Tone.MUTED)], 0.0
    for stage, value_ms in reached:
        bar = _placed(offset_ms, value_ms, whole_ms, room)
        lines.append(_row(stage.replace("_", " "), fmt.millis(value_ms), bar, Tone.PLAIN))
        offset_ms += value_ms
    if request.e2e_ms is None:
        now_ms = max(0.0, request.age_ms - sum_ms)
        bar = _placed(offset_ms, now_ms, whole_ms, room)
        lines.append(
            _row(f"{request.phase.replace('_', ' ')}…", fmt.millis(now_ms), bar, Tone.WARN)
        )
        lines.append(_row("age", fmt.millis(request.age_ms), "", Tone.STRONG))
    else:
        lines.append(_row("sum", fmt.millis(sum_ms), "", Tone.STRONG))
        lines.append(_row("end to end", fmt.millis(request.e2e_ms), "", Tone.STRONG))
        lines.append(_row("residual", fmt.millis(residual_ms(request)), "", Tone.STRONG))
    return lines


def _row(label: str, number: str, bar: str, tone: Tone) -> Line:
    return [
        Run(fmt.pad(label, _LABEL_WIDTH), Tone.MUTED),
        Run(fmt.pad(number, _NUMBER_WIDTH, right=True) + "  ", tone),
        Run(bar, Tone.ACCENT),
    ]


def _placed(offset_ms: float, value_ms: float, whole_ms: float, room: int) -> str:
    """A bar at its offset, at least one cell long, inside `room` cells."""
    if whole_ms <= 0:
        return ""
    start = min(room - 1, int(room * offset_ms / whole_ms))
    length = max(1, min(room - start, round(room * value_ms / whole_ms)))
    return " " * start + "█" * length
