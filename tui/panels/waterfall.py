"""One request in detail: its facts, and where its time went, stage by stage.

Owns: nothing; pure.
Invariant: stages are drawn in the order in which they happen; what they leave unexplained of the
whole is printed as the residual, never hidden.
Never: invents a stage that is not reported.
"""

from __future__ import annotations

from appliance.frame.protocol import RequestFrame
from appliance.frame.restored import restored_from
from tui import format as fmt
from tui.filter import energy_j
from tui.lines import Line, Run, Tone, pairs, wrap
from tui.panels.requests import phase_text

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
