"""Format figures for the CLI and the console: numbers and units.

Invariant: None (not reported) is `-`, never 0.
"""

from __future__ import annotations

# nothing slow: the command pays for these imports, too
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from engine.units import part_text, size_text

ABSENT = "-"
_TRANSPORTS = {
    "alias": "one shared KV pool (alias)",
    "peer": "KV copied from pool to pool (peer)",
    "shm": "KV copied through shared memory (shm)",
}
_THOUSANDS = ("", "k", "M", "B", "T")


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
    """Format milliseconds for a column headed `ms`: `9.1`, `231`, and longer ones as `4.2s`."""
    if value_ms is None:
        return ABSENT
    if abs(value_ms) < 99.95:
        return f"{value_ms:.1f}"
    return f"{value_ms:.0f}" if abs(value_ms) < 999.5 else seconds(value_ms / 1000)


def duration(value_ms: float | None) -> str:
    """Format milliseconds with a unit: `11us`, `0.412ms`, `9.1ms`, `231ms`, `4.2s`, `2h04m`."""
    if value_ms is None:
        return ABSENT
    if 0 < abs(value_ms) < 0.1:
        return f"{value_ms * 1000:.0f}us"
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


def transport_text(transport: str) -> str:
    """Describe a transport: `one shared KV pool (alias)`."""
    return _TRANSPORTS.get(transport, transport)


def named(name: str, value: float | None) -> str:
    """Format a figure by its name's unit: `412ms` for ttft_ms_p50, `97.1%` for goodput_ratio."""
    if "_ms" in name:
        return measured_ms(value)
    if name.endswith("_ratio"):
        return fine_ratio(value)
    if name.endswith("_quiet"):
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


STATE_WORDS = {
    "draining": "no new requests are accepted",
    "model_loading": "the model is being loaded",
}
"""Words for the daemon's codes of its state."""


def state_words(reason: object) -> str:
    """Put the reason of a state into words; what is no code stays."""
    return STATE_WORDS.get(str(reason or ""), str(reason or ""))


def short_id(request_id: str | None) -> str:
    """Shorten a request's id to eight characters after the prefix."""
    return re.split("[-_]", request_id)[-1][:8] if request_id else ABSENT
