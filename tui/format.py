"""Values to short text for people; the only place that decides how a number looks.

Owns: nothing; every function is pure.
Invariant: None becomes `-`, never 0; no control character passes `clean`.
Never: colour, layout, or anything of Textual.
"""

from __future__ import annotations

import re
from datetime import datetime

from rich.cells import cell_len, set_cell_size

from engine.units import part_text, size_text

ABSENT = "-"
_COUNT_UNITS = ("", "k", "M", "G", "T")


def clean(text: str) -> str:
    """The text with every unprintable character (escapes, newlines, bidi marks) made a `?`."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else "?" for char in text)


def clip(text: str, width: int) -> str:
    """At most `width` cells of cleaned text; a cut is marked with an ellipsis."""
    text = clean(text)
    if cell_len(text) <= width:
        return text
    return set_cell_size(text, width - 1).rstrip() + "…" if width > 0 else ""


def pad(text: str, width: int, *, right: bool = False) -> str:
    """Exactly `width` cells of cleaned text, clipped or filled; `right` aligns to the right."""
    text = clip(text, width)
    fill = " " * (width - cell_len(text))
    return fill + text if right else text + fill


def count(value: int | None) -> str:
    """A whole number, as `12,345`."""
    return ABSENT if value is None else f"{value:,}"


def short_count(value: float | None) -> str:
    """`281k`, `2.4M`; below ten thousand the number itself."""
    if value is None:
        return ABSENT
    unit = 0
    while abs(value) >= (999.5 if unit else 9_999.5) and unit < len(_COUNT_UNITS) - 1:
        value /= 1000
        unit += 1
    digits = 1 if unit and abs(value) < 99.95 else 0
    return f"{value:.{digits}f}{_COUNT_UNITS[unit]}"


def rate(value: float | None) -> str:
    """A number of things per second: `12.1`, `4,812`."""
    if value is None:
        return ABSENT
    return f"{value:.1f}" if 0 < abs(value) < 99.95 else f"{value:,.0f}"


def millis(value_ms: float | None) -> str:
    """Milliseconds without a unit, `9.1` or `204`; from ten seconds on in seconds, `12.3s`."""
    if value_ms is None:
        return ABSENT
    if abs(value_ms) < 99.95:
        return f"{value_ms:.1f}"
    return f"{value_ms:.0f}" if abs(value_ms) < 9_999.5 else seconds(value_ms / 1000)


def millis_unit(value_ms: float | None) -> str:
    """Milliseconds with their unit: `9.1 ms`, `12.3s`."""
    text = millis(value_ms)
    return text if text == ABSENT or text[-1] in "smhd" else f"{text} ms"


def seconds(value_s: float | None) -> str:
    """A duration in at most six cells: `0.4s`, `41s`, `3m05s`, `2h04m`, `3d04h`, `120d`."""
    if value_s is None:
        return ABSENT
    if value_s < 99.95:
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
    """As `seconds`, without a fraction: `3s`."""
    return ABSENT if value_s is None else seconds(value_s) if value_s >= 100 else f"{value_s:.0f}s"


def size(value_bytes: float | None) -> str:
    """`0 B`, `980 KiB`, `1.2 GiB`."""
    return ABSENT if value_bytes is None else size_text(value_bytes)


def part(used_bytes: float | None, total_bytes: float | None) -> str:
    """`9.0/23.0 GiB`, both in the unit of the total."""
    if used_bytes is None or not total_bytes:
        return size(used_bytes)
    return part_text(used_bytes, total_bytes, "/")


def percent(value: float | None) -> str:
    """`98%`, of a number from 0 to 100."""
    return ABSENT if value is None else f"{value:.0f}%"


def ratio(value: float | None) -> str:
    """`98%`, of a number from 0 to 1."""
    return ABSENT if value is None else percent(100 * value)


def fine_ratio(value: float | None) -> str:
    """`97.1%`, of a number from 0 to 1; `100%` is all of it, never almost."""
    if value is None:
        return ABSENT
    return "100%" if value >= 1 else f"{min(99.9, 100 * value):.1f}%"


def joules(value_j: float | None) -> str:
    """`0.11 J`, `161 J`, `1.2 MJ`."""
    if value_j is None:
        return ABSENT
    if abs(value_j) < 9.995:
        return f"{value_j:.2f} J"
    text = short_count(value_j)
    return f"{text} J" if text[-1].isdigit() else f"{text[:-1]} {text[-1]}J"


def watts(value_w: float | None, limit_w: float | None = None) -> str:
    """`96 W`, or `96/125 W` under a limit."""
    if value_w is None:
        return ABSENT
    return f"{value_w:.0f} W" if limit_w is None else f"{value_w:.0f}/{limit_w:.0f} W"


def since(iso: str, now_iso: str) -> str:
    """How long ago a stamp was, by another stamp: `41s`; `-` if either cannot be read."""
    try:
        passed = datetime.fromisoformat(now_iso) - datetime.fromisoformat(iso)
    except (ValueError, TypeError):  # the latter: one has a zone, the other has none
        return ABSENT
    return whole_seconds(max(0.0, passed.total_seconds()))


def clock(iso: str) -> str:
    """The time of day in an ISO 8601 stamp in UTC: `14:02:11Z`."""
    _, separator, time = clean(iso).partition("T")
    return f"{time[:8]}Z" if separator else ABSENT


def short_id(request_id: str) -> str:
    """What tells requests apart in a narrow column: eight characters after the prefix."""
    return re.split("[-_]", clean(request_id))[-1][:8]
