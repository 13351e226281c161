"""Describe one request: its facts, and where its time went, stage by stage.

A request is a RequestFrame's fields by name, as JSON has them.
Invariant: None (not reported) is `-`, never 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from appliance.observe.frame.figures import (
    ABSENT,
    count,
    duration,
    joules,
    ratio,
    size,
    things,
    times,
)

TTFT_STAGES = ("tokenize", "queue", "restore", "prefill")
STAGES = (*TTFT_STAGES, "handoff", "decode_wait", "decode", "paused")
"""Stages in the order in which they happen; the first four add up to ttft, all to e2e."""
_ENDS = {
    "abort": "cancelled",
    "computed": "done",
    "error": "failed",
    "tool_calls": "done (tools)",
}
"""How requests end, besides `stop` and `length`."""
_LOADED = re.compile(r"\b[1-9]\d* of \d+ blocks from (?:the )?(\w+)")


def energy_j(prefill_j: float | None, decode_j: float | None) -> float | None:
    """Add up the known energy of both phases."""
    known = [value_j for value_j in (prefill_j, decode_j) if value_j is not None]
    return sum(known) if known else None


def restored_from(reason: object) -> str:
    """Name the source of a prompt's restored part: `SSD`, `DRAM`, or `DRAM and SSD`.

    Args:
        reason: a request's `restore_reason`; logs of earlier releases know only the SSD.
    """
    return " and ".join(dict.fromkeys(_LOADED.findall(str(reason or "")))) or "SSD"


def phase_text(request: Mapping[str, Any]) -> str:
    """Describe a request's phase, as `prefilling 62%`, or its end, as `done (stop)`.

    The share appears after the first step, since a step may take seconds and 0% would look hung.
    `waiting` means that the prompt has its blocks and its worker computes other prompts first.
    """
    if reason := request.get("finish_reason"):
        return _ENDS.get(reason, f"done ({reason})")
    has_turn = request.get("queue_ms") is not None or not request.get("waits_for")
    if request.get("phase") == "prefilling" and not has_turn:
        return "waiting"
    text = str(request.get("phase") or ABSENT).replace("_", " ")
    computed, num_tokens = request.get("computed_tokens"), request.get("prompt_tokens")
    found = request.get("cached_tokens") or 0
    if text == "prefilling" and num_tokens and computed is not None and computed > found:
        text += f" {ratio(min(1.0, computed / num_tokens))}"
    return text


def request_facts(request: Mapping[str, Any]) -> dict[str, str]:
    """List the facts of one request for `penstock show` and the console, by label, in order."""
    return {
        "state": phase_text(request),
        "user": request.get("user") or ABSENT,
        "client": request.get("client") or ABSENT,
        "endpoint": request.get("endpoint") or ABSENT,
        "model": request.get("model") or ABSENT,
        "received": request.get("received_at") or ABSENT,
        "in": f"{count(request.get('prompt_tokens'))} tok{_found(request)}",
        "out": _output(request),
        "ttft": duration(request.get("ttft_ms")),
        "tpot": duration(request.get("tpot_ms")),
        "first itl": duration(request.get("first_itl_ms")),
        "moved": _moved(request),
        **{label: text for label, text in _explanations(request) if text},
    }


def guesses(totals: Mapping[str, Any]) -> list[str]:
    """Describe speculation: `1.9 tokens per step`, then a text for each drafter."""
    per_step = totals["decode_step_tokens"] / max(totals["decode_steps"], 1)
    texts = [f"{per_step:.1f} tokens per step"]
    for each in totals["drafts"]:
        num_guessed = sum(each["guessed"])
        share = 100 * sum(each["right"]) / num_guessed
        name = each["drafter"].replace("_", " ")
        texts.append(f"{name}: {share:.0f} % of {count(num_guessed)} guesses right")
    return texts


def _explanations(request: Mapping[str, Any]) -> list[tuple[str, str]]:
    """List the route of a request and its delays, with labels; empty texts are left out later."""
    preemptions, waits_for = request.get("preemptions"), request.get("waits_for")
    waited_for = request.get("waited_for")
    by, recoveries = request.get("cancelled_by"), request.get("recoveries")
    return [
        ("energy", _energy(request)),
        ("worker", _workers(request)),
        ("route", _route(request)),
        ("restored", request.get("restore_reason") or ""),
        ("cached to", request.get("cache_miss") or ""),
        ("speculation", request.get("speculation") or ""),
        ("waits", f"for {waits_for}" if waits_for else ""),
        ("waited", f"for {waited_for}" if waited_for and not waits_for else ""),
        (
            "continued",
            f"{times(recoveries)}, after a worker or the daemon died" if recoveries else "",
        ),
        ("preempted", f"{times(preemptions)}: others needed its KV blocks" if preemptions else ""),
        ("cancelled", f"by {by}" if by else ""),
        ("changed", request.get("changes") or ""),
        ("slow because", request.get("slow_because") or ""),
        ("error", request.get("error") or ""),
    ]


def _found(request: Mapping[str, Any]) -> str:
    """Name the sources of a prompt's KV: ` (512 from the pool, 64 from SSD, 692 computed)`."""
    found, restored = request.get("cached_tokens") or 0, request.get("restored_tokens") or 0
    tier = restored_from(request.get("restore_reason"))
    parts = [(found - restored, "from the pool"), (restored, f"from {tier}")]
    said = [f"{count(number)} {where}" for number, where in parts if number > 0]
    if not said:
        return ""
    left = (request.get("prompt_tokens") or 0) - found
    return f" ({', '.join([*said, f'{count(left)} computed'])})"


def _output(request: Mapping[str, Any]) -> str:
    number = request.get("num_sequences") or 1
    if request.get("max_tokens", 0) is None:
        return f"results for {things(number, 'text')}"
    text = f"{count(request.get('output_tokens'))} of {count(request.get('max_tokens'))} tok"
    return text if number == 1 else f"{text}, {things(number, 'sequence')}"


def _workers(request: Mapping[str, Any]) -> str:
    """List the workers, and how blocks came to each: `prefill0, then decode1 (by peer)`."""
    names = (request.get("workers") or request.get("worker") or "").split(",")
    links = (request.get("links") or "").split(",")
    first, *others = names
    ways = {"none": "again", _ALIAS: ""}
    stages = (
        f"then {name}" + (f" ({way})" if (way := ways.get(link, f"by {link}")) else "")
        for name, link in zip(others, links, strict=False)
    )
    return ", ".join([first, *stages])


def _moved(request: Mapping[str, Any]) -> str:
    """Say how much KV was copied: `1.2 MiB by peer`."""
    transport = request.get("transport")
    if transport == _ALIAS:
        return "nothing: KV is shared"
    return f"{size(request.get('handoff_bytes'))} by {transport}" if transport else ABSENT


def _route(request: Mapping[str, Any]) -> str:
    route, reason = request.get("route"), request.get("route_reason")
    if not route:
        return ""
    where = "one worker, then the other" if route == "move" else f"{route} alone"
    return f"{where}; {reason}" if reason else where


def _energy(request: Mapping[str, Any]) -> str:
    total_j = energy_j(request.get("prefill_j"), request.get("decode_j"))
    if total_j is None:
        return ""
    parts = (f"{phase} {joules(request.get(f'{phase}_j'))}" for phase in ("prefill", "decode"))
    return f"{joules(total_j)} = {' + '.join(parts)}"


_ALIAS = "alias"


class StageBar(NamedTuple):
    """One stage as a bar on its request's time line."""

    stage: str
    ms: float
    start: int
    """Cells before its bar."""
    cells: int
    """The bar's length: at least one, unless the request took no time."""
    is_open: bool = False
    """Whether the request is still in this stage."""


class Waterfall(NamedTuple):
    """The stages of one request as bars."""

    bars: list[StageBar]
    """The bars, each beginning where the one before ends."""
    sums: list[tuple[str, float]]
    """The sums below the bars, in ms, including the unattributed time."""


def waterfall(request: Mapping[str, Any], num_cells: int) -> Waterfall:
    """Draw each reached stage as a bar in `num_cells` cells, with sums below."""
    reached = [(stage, request.get(f"{stage}_ms")) for stage in STAGES]
    stages = [(stage, value_ms, False) for stage, value_ms in reached if value_ms is not None]
    sum_ms = sum(value_ms for _, value_ms, _ in stages)
    e2e_ms, age_ms = request.get("e2e_ms"), request.get("age_ms") or 0.0
    if e2e_ms is None:
        stages.append((str(request.get("phase")), max(0.0, age_ms - sum_ms), True))
        sums = [("age", age_ms)]
    else:
        sums = [("sum", sum_ms), ("end to end", e2e_ms)]
        sums.append(("unattributed", round(e2e_ms - sum_ms, 3) + 0.0))  # never -0
    whole_ms = max(age_ms if e2e_ms is None else e2e_ms, sum_ms)
    bars, offset_ms = [], 0.0
    for stage, value_ms, is_open in stages:
        start, cells = _placed(offset_ms, value_ms, whole_ms, max(1, num_cells))
        bars.append(StageBar(stage.replace("_", " "), value_ms, start, cells, is_open))
        offset_ms += value_ms
    return Waterfall(bars, sums)


def _placed(offset_ms: float, value_ms: float, whole_ms: float, room: int) -> tuple[int, int]:
    """Place a bar: its start, and its length of at least one cell, within `room` cells."""
    if whole_ms <= 0:
        return 0, 0
    start = min(room - 1, int(room * offset_ms / whole_ms))
    return start, max(1, min(room - start, round(room * value_ms / whole_ms)))
