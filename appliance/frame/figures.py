"""Format figures for the CLI and the console: numbers, units, stages.

Owns: every number format, and the order of a request's stages.
Invariant: pure; None (not reported) is `-`, never 0.
Never: layout or colour, or what may reach a terminal; imports anything slow: the CLI asks, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple

from engine.units import part_text, size_text

ABSENT = "-"
TTFT_STAGES = ("tokenize", "queue", "restore", "prefill")
STAGES = (*TTFT_STAGES, "handoff", "decode_wait", "decode", "paused")
"""Stages in the order in which they happen; the first four add up to ttft, all to e2e."""
_ENDS = {"abort": "cancelled", "error": "failed", "tool_calls": "done (tools)"}
"""How requests end, besides `stop` and `length`."""
_THOUSANDS = ("", "k", "M", "B", "T")
_LOADED = re.compile(r"\b[1-9]\d* of \d+ blocks from (?:the )?(\w+)")


def count(value: float | None) -> str:
    """Format a number in full: `12,345`, `0.5`."""
    if value is None:
        return ABSENT
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def short_count(value: float | None) -> str:
    """Format a number in short: `0.412`, `12.4`, `9,999`; from ten thousand on `281k`, `2.41M`."""
    if value is None:
        return ABSENT
    if abs(value) < 9_999.5:
        is_fraction = isinstance(value, float) and abs(value) < 99.95
        return f"{value:#.3g}" if is_fraction else f"{value:,.0f}"
    value, unit = _in_thousands(value)
    return f"{value:.3g}{unit}" if abs(value) < 999.5 else f"{value:.0f}T"


def brief_count(value: float) -> str:
    """Format a number in at most four cells: `412`, `4.0k`, `98k`."""
    value, unit = _in_thousands(value)
    return f"{value:.{1 if unit and value < 9.95 else 0}f}{unit}"


def _in_thousands(value: float) -> tuple[float, str]:
    """Scale a number below 999.5, as long as there is a unit for that."""
    unit = 0
    while abs(value) >= 999.5 and unit < len(_THOUSANDS) - 1:
        value /= 1000
        unit += 1
    return value, _THOUSANDS[unit]


def of_most(value: int, most: int, width: int) -> str:
    """Format `9,800/1.05M`, or in `width` cells `9.8k/1.05M`, `9.8k/1.0M` or `9.8k`."""
    brief = brief_count(value)
    texts = (
        f"{short_count(value)}/{short_count(most)}",
        f"{brief}/{short_count(most)}",
        f"{brief}/{brief_count(most)}",
    )
    return next((text for text in texts if len(text) <= width), brief)


def plain(value: int | None) -> str:
    """Format a number that is a name (a pid, a status, a seed): `12345`."""
    return ABSENT if value is None else str(value)


def things(number: int | None, noun: str) -> str:
    """Format a number with its noun: `1 request`, `2 requests`."""
    return f"{count(number)} {noun}{'' if number == 1 else 's'}"


def times(number: int) -> str:
    """Format how often: `once`, `3 times`."""
    return "once" if number == 1 else f"{count(number)} times"


def rate(value: float | None) -> str:
    """Format a number of things per second: `12.1`, `4,812`."""
    if value is None:
        return ABSENT
    return f"{value:.1f}" if 0 < abs(value) < 99.95 else f"{value:,.0f}"


def tokens_per_s(value: float | None) -> str:
    """Format a rate of tokens with its unit: `48.3 tok/s`."""
    return ABSENT if value is None else f"{rate(value)} tok/s"


def millis(value_ms: float | None) -> str:
    """Format milliseconds for a column headed `ms`: `9.1`, `12345`.

    Six cells hold a quarter of an hour; longer times have their unit: `16m40s`.
    """
    if value_ms is None:
        return ABSENT
    if abs(value_ms) < 99.95:
        return f"{value_ms:.1f}"
    return f"{value_ms:.0f}" if abs(value_ms) < 999_999.5 else seconds(value_ms / 1000)


def duration(value_ms: float | None) -> str:
    """Format milliseconds with a unit: `0.412ms`, `9.1ms`, `231ms`, `4.2s`, `3m05s`, `2h04m`."""
    if value_ms is None:
        return ABSENT
    if abs(value_ms) < 99.95:
        return f"{value_ms:.3g}ms"
    return f"{value_ms:.0f}ms" if abs(value_ms) < 999.5 else seconds(value_ms / 1000)


def seconds(value_s: float | None) -> str:
    """Format seconds in at most six cells: `0.4s`, `41.0s`, `3m05s`, `2h04m`, `3d04h`, `120d`."""
    if value_s is None:
        return ABSENT
    if value_s < 59.95:
        return f"{value_s:.1f}s"
    whole = round(value_s)
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86_400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    if whole < 100 * 86_400:
        return f"{whole // 86_400}d{whole % 86_400 // 3600:02d}h"
    return f"{whole // 86_400}d"


def whole_seconds(value_s: float | None) -> str:
    """Format seconds without a fraction: `3s`."""
    return seconds(value_s) if value_s is None or value_s >= 99.5 else f"{value_s:.0f}s"


def age(value_ms: float | None) -> str:
    """Format an age as `seconds` does."""
    return seconds(None if value_ms is None else value_ms / 1000)


def size(value_bytes: float | None) -> str:
    """Format bytes: `0 B`, `980 KiB`, `1.2 GiB`."""
    return ABSENT if value_bytes is None else size_text(value_bytes)


def bytes_per_s(value: float | None) -> str:
    """Format a rate of bytes with its unit: `12.3 GiB/s`."""
    return ABSENT if value is None else f"{size_text(value)}/s"


def flops(value_per_s: float | None) -> str:
    """Format operations per second: `412 GFLOP/s`, `1.2 TFLOP/s`."""
    if value_per_s is None:
        return ABSENT
    is_large = value_per_s >= 999.5e9
    scaled = value_per_s / (1e12 if is_large else 1e9)
    return f"{scaled:.3g} {'T' if is_large else 'G'}FLOP/s"


def part(used_bytes: float | None, total_bytes: float | None) -> str:
    """Format `9.0/23.0 GiB`, both in the unit of the total."""
    if used_bytes is None or not total_bytes:
        return size(used_bytes)
    return part_text(used_bytes, total_bytes, "/")


def percent(value: float | None) -> str:
    """Format a number from 0 to 100 as `98%`."""
    return ABSENT if value is None else f"{value:.0f}%"


def ratio(value: float | None) -> str:
    """Format a number from 0 to 1 as `98%`."""
    return ABSENT if value is None else percent(100 * value)


def fine_ratio(value: float | None) -> str:
    """Format a ratio as `97.1%`; only 1 is `100%`, and more may be `256%`."""
    if value is None or value >= 1:
        return ratio(value)
    return f"{min(99.9, 100 * value):.1f}%"


def joules(value_j: float | None) -> str:
    """Format an energy with three digits: `0.412 J`, `161 J`, `1.24 kJ`."""
    if value_j is None:
        return ABSENT
    for unit in ("J", "kJ", "MJ"):
        if abs(value_j) < 999.5:
            return f"{value_j:.3g} {unit}"
        value_j /= 1000
    return f"{value_j:.3g} GJ"


def watts(value_w: float | None, limit_w: float | None = None) -> str:
    if value_w is None:
        return ABSENT
    shown = f"{value_w:.1f}" if abs(value_w) < 9.95 else f"{value_w:,.0f}"
    return f"{shown} W" if limit_w is None else f"{shown}/{limit_w:,.0f} W"


def factor(value: float | None) -> str:
    """Format a multiple of another figure: `1.024x`, `12.3x`, `1,204x`."""
    if value is None:
        return ABSENT
    return f"{value:.3f}x" if value < 9.9995 else f"{rate(value)}x"


def measured_ms(value_ms: float | None) -> str:
    """Format a duration with three digits, so that rows compare: `9.00ms`, `412ms`, `4.20s`."""
    if value_ms is None or 99.95 <= value_ms < 999.5 or value_ms >= 59_950:
        return duration(value_ms)
    return f"{value_ms:#.3g}ms" if value_ms < 999.5 else f"{value_ms / 1000:#.3g}s"


def named(name: str, value: float | None) -> str:
    """Format a figure by its name's unit: `412ms` for ttft_ms_p50, `97.1%` for goodput_ratio."""
    if "_ms" in name:
        return measured_ms(value)
    if name.endswith("_ratio"):
        return fine_ratio(value)
    if name.endswith("_over_p50_quiet"):
        return factor(value)
    if name.endswith("tokens_per_s"):
        return tokens_per_s(value)
    if name.endswith("_per_s"):
        return ABSENT if value is None else f"{rate(value)}/s"
    if name.startswith("joules"):
        return joules(value)
    if value is None:
        return ABSENT
    return count(value) if isinstance(value, int) else f"{value:,.1f}"


def unitless(name: str) -> str:
    """Return the name without its unit: `ttft_p50` for ttft_ms_p50."""
    return re.sub("(_tokens)?_per_s$|_ms(?=_|$)", "", name).replace("joules", "energy")


def quantiles(latency: Mapping[str, Any], name: str, *which: str) -> str:
    """Format `ttft p50 204ms p95 1.2s` from a LatencyFrame's fields."""
    shown = (f"{each} {duration(latency.get(f'{name}_ms_{each}'))}" for each in which)
    return " ".join([name, *shown])


def since(iso: str, now_iso: str) -> str:
    """Format the time from one stamp to another: `41s`; `-` if either cannot be read."""
    passed_s = seconds_between(iso, now_iso)
    return whole_seconds(None if passed_s is None else max(0.0, passed_s))


def seconds_between(iso: str, later_iso: str) -> float | None:
    """Return the time from one stamp to another; None: one cannot be read."""
    try:
        return (datetime.fromisoformat(later_iso) - datetime.fromisoformat(iso)).total_seconds()
    except (ValueError, TypeError):  # the latter: one has a zone, the other has none
        return None


def clock(iso: str | None) -> str:
    """Return the time of day in an ISO 8601 stamp in UTC: `14:02:11Z`."""
    match = re.search(r"T(\d\d:\d\d:\d\d)", iso or "")
    return f"{match[1]}Z" if match else ABSENT


def day_and_time(iso: str | None) -> str:
    """Return day and second of a stamp: `11-22 14:02:11`; other texts unchanged."""
    match = re.match(r"\d{4}-(\d\d-\d\d)T(\d\d:\d\d:\d\d)", iso or "")
    return f"{match[1]} {match[2]}" if match else iso or ABSENT


def short_id(request_id: str | None) -> str:
    """Shorten a request's id to eight characters after the prefix."""
    return re.split("[-_]", request_id)[-1][:8] if request_id else ABSENT


# One request: what is told of it, and where its time went. A request is a RequestFrame's fields by
# name, as JSON has them.


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
    transport = request.get("transport")
    return {
        "state": phase_text(request),
        "user": request.get("user") or ABSENT,
        "endpoint": request.get("endpoint") or ABSENT,
        "model": request.get("model") or ABSENT,
        "received": request.get("received_at") or ABSENT,
        "in": f"{count(request.get('prompt_tokens'))} tok{_found(request)}",
        "out": _output(request),
        "ttft": duration(request.get("ttft_ms")),
        "tpot": duration(request.get("tpot_ms")),
        "first itl": duration(request.get("first_itl_ms")),
        "moved": f"{size(request.get('handoff_bytes'))} by {transport}" if transport else ABSENT,
        **{label: text for label, text in _explanations(request) if text},
    }


def guesses(totals: Mapping[str, Any]) -> list[str]:
    """Describe speculation: `1.9 tokens per step`, then a text for each drafter."""
    per_step = totals["decode_step_tokens"] / max(totals["decode_steps"], 1)
    texts = [f"{per_step:.1f} tokens per step"]
    for each in totals["drafts"]:
        places = zip(each["right"], each["guessed"], strict=True)
        by_place = " ".join(f"{100 * right / guessed:.0f}" for right, guessed in places)
        share = 100 * sum(each["right"]) / sum(each["guessed"])
        name = each["drafter"].replace("_", " ")
        texts.append(f"{name} {share:.0f} % right, by place {by_place}")
    return texts


def _explanations(request: Mapping[str, Any]) -> list[tuple[str, str]]:
    """List the route of a request and its delays, with labels; empty texts are left out later."""
    preemptions, waits_for = request.get("preemptions"), request.get("waits_for")
    by = request.get("cancelled_by")
    return [
        ("energy", _energy(request)),
        ("worker", _workers(request)),
        ("route", _route(request)),
        ("restored", request.get("restore_reason") or ""),
        ("cache missed", request.get("cache_miss") or ""),
        ("speculation", request.get("speculation") or ""),
        ("waits", f"for {waits_for}" if waits_for else ""),
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
    text = f"{count(request.get('output_tokens'))} of {count(request.get('max_tokens'))} tok"
    number = request.get("num_sequences") or 1
    return text if number == 1 else f"{text}, {things(number, 'sequence')}"


def _workers(request: Mapping[str, Any]) -> str:
    """List the workers, and how blocks came to each: `prefill0, by peer at decode1`."""
    names = (request.get("workers") or request.get("worker") or "").split(",")
    links = (request.get("links") or "").split(",")
    first, *others = names
    stages = (
        f"{'again' if link == 'none' else f'by {link}'} at {name}"
        for name, link in zip(others, links, strict=False)
    )
    return ", ".join([first, *stages])


def _route(request: Mapping[str, Any]) -> str:
    route, reason = request.get("route"), request.get("route_reason")
    if not route:
        return ""
    moved = "prefilled by one worker, decoded by the other"
    where = moved if route == "move" else f"all of it on {route}"
    return f"{where} ({reason})" if reason else where


def _energy(request: Mapping[str, Any]) -> str:
    total_j = energy_j(request.get("prefill_j"), request.get("decode_j"))
    if total_j is None:
        return ""
    parts = (f"{phase} {joules(request.get(f'{phase}_j'))}" for phase in ("prefill", "decode"))
    return f"{joules(total_j)} = {' + '.join(parts)}"


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
