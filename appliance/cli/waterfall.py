"""One request in detail: its facts, and its stages as bars on the time that it took.

Owns: the order of the stages.
Invariant: the stages are drawn one after the other, each where the one before it ends; what they
leave of the whole is printed as the residual, never hidden.
Never: invents a stage that is not reported.
"""

from __future__ import annotations

from appliance.cli.tables import Row, count, joules, ms, size, word
from appliance.frame.protocol import restored_from

STAGES = (
    *("tokenize", "queue", "restore", "prefill"),
    *("handoff", "decode_wait", "decode", "paused"),
)
_LABEL_WIDTH = 12
_NUMBER_WIDTH = 8


def page(frame: Row, *, width: int, bar: str) -> str:
    """`penstock show`, from a request as the daemon has it.

    Args:
        frame: a RequestFrame.
        width: columns that the bars may fill, labels included.
        bar: one cell of a bar.
    """
    out = f"{count(frame.get('output_tokens'))} of {count(frame.get('max_tokens'))} tok"
    facts = [
        ("request", word(frame.get("id"))),
        ("state", word(frame.get("finish_reason") or frame.get("phase"))),
        ("user", word(frame.get("user"))),
        ("endpoint", word(frame.get("endpoint"))),
        ("received", word(frame.get("received_at"))),
        ("tokens", f"{count(frame.get('prompt_tokens'))} in{_cached(frame)}, {out}"),
        ("worker", _workers(frame)),
        ("moved", _moved(frame)),
        ("ttft", ms(frame.get("ttft_ms"))),
        ("tpot", f"{ms(frame.get('tpot_ms'))}, first gap {ms(frame.get('first_itl_ms'))}"),
    ]
    facts.append(("energy", _energy(frame)))
    if frame.get("preemptions"):
        facts.append(("preempted", _times(frame["preemptions"])))
    if frame.get("route"):
        facts.append(("route", _route(frame)))
    if frame.get("restore_reason"):
        facts.append(("restored", word(frame["restore_reason"])))
    if frame.get("waits_for"):
        facts.append(("waits", f"for {word(frame['waits_for'])}"))
    if frame.get("cancelled_by"):
        facts.append(("cancelled", f"by {word(frame['cancelled_by'])}"))
    if frame.get("slow_because"):
        facts.append(("slow", word(frame["slow_because"])))
    if frame.get("error"):
        facts.append(("error", word(frame["error"])))
    lines = [f"{label:<{_LABEL_WIDTH}} {value}" for label, value in facts]
    return "\n".join([*lines, "", *waterfall(frame, width=width, bar=bar)])


def waterfall(frame: Row, *, width: int, bar: str) -> list[str]:
    """A line for each stage reached, then the sum, the whole and what is between them."""
    reached = [(stage, frame.get(f"{stage}_ms")) for stage in STAGES]
    stages = [(stage, value_ms) for stage, value_ms in reached if value_ms is not None]
    sum_ms = sum(value_ms for _, value_ms in stages)
    e2e_ms = frame.get("e2e_ms")
    age_ms = frame.get("age_ms") or 0.0
    if e2e_ms is None:  # it is still in its last stage, which nobody has measured yet
        stages.append((f"{frame.get('phase')}...", max(0.0, age_ms - sum_ms)))
    whole_ms = max(age_ms if e2e_ms is None else e2e_ms, sum_ms)
    room = max(1, width - _LABEL_WIDTH - _NUMBER_WIDTH - 3)
    lines, offset_ms = [], 0.0
    for stage, value_ms in stages:
        cells = _placed(offset_ms, value_ms, whole_ms, room, bar)
        lines.append(_line(word(stage).replace("_", " "), value_ms, cells))
        offset_ms += value_ms
    if e2e_ms is None:
        return [*lines, _line("age", age_ms)]
    rest = [("sum", sum_ms), ("end to end", e2e_ms), ("residual", e2e_ms - sum_ms)]
    return [*lines, *(_line(label, value_ms) for label, value_ms in rest)]


def _line(label: str, value_ms: float, cells: str = "") -> str:
    shown = ms(round(value_ms, 3) + 0.0)  # no -0ms
    return f"{label:<{_LABEL_WIDTH}} {shown:>{_NUMBER_WIDTH}}  {cells}".rstrip()


def _placed(offset_ms: float, value_ms: float, whole_ms: float, room: int, bar: str) -> str:
    """A bar where its stage lies in the whole: at least one cell long, within `room` cells."""
    if whole_ms <= 0:
        return ""
    start = min(room - 1, int(room * offset_ms / whole_ms))
    length = max(1, min(room - start, round(room * value_ms / whole_ms)))
    return " " * start + bar * length


def _workers(frame: Row) -> str:
    """Of each leg the worker, and how blocks came there: `prefill0, by peer at decode1`."""
    names = (frame.get("workers") or frame.get("worker") or "").split(",")
    ways = (frame.get("links") or "").split(",")
    first, *others = names
    return ", ".join(
        [word(first or None)]
        + [
            f"{'again' if way == 'none' else 'by ' + word(way)} at {word(name)}"
            for name, way in zip(others, ways, strict=False)
        ]
    )


def _moved(frame: Row) -> str:
    transport = frame.get("transport")
    return word(None) if transport is None else f"{size(frame.get('handoff_bytes'))} by {transport}"


def _energy(frame: Row) -> str:
    prefill_j, decode_j = frame.get("prefill_j"), frame.get("decode_j")
    if prefill_j is None or decode_j is None:
        return "not reported"
    return (
        f"{joules(prefill_j + decode_j)} = prefill {joules(prefill_j)} + decode {joules(decode_j)}"
    )


def _cached(frame: Row) -> str:
    """From where the prompt came: the pool, DRAM, the SSD, or computed."""
    found, restored = frame.get("cached_tokens") or 0, frame.get("restored_tokens") or 0
    tier = restored_from(frame.get("restore_reason"))
    parts = [(found - restored, "from the pool"), (restored, f"from {tier}")]
    said = [f"{count(number)} {where}" for number, where in parts if number]
    if not said:
        return ""
    left = (frame.get("prompt_tokens") or 0) - found
    return f" ({', '.join([*said, f'{count(left)} computed'])})"


def _times(number: int) -> str:
    times = "once" if number == 1 else f"{number} times"
    return f"{times}, for KV blocks that others needed"


def _route(frame: Row) -> str:
    route = frame.get("route")
    moved = "prefilled by one worker, decoded by the other"
    where = moved if route == "move" else f"all of it on {word(route)}"
    return f"{where} ({word(frame.get('route_reason'))})"
