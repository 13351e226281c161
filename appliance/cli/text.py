"""Values to words: what of the daemon's text may reach a terminal, and how figures read.

Owns: escaping, and the forms of durations, sizes, energies and counts.
Invariant: pure; text that came from elsewhere is shown with no control character in it.
Never: shows None as 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from engine.units import size_text

DASH = "-"


def printable(value: object) -> str:
    """Text with everything escaped that could move a cursor or reorder a line."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode()
        for char in str(value)
    )


def for_terminal(text: str) -> str:
    """Completion text without what a terminal would obey: only newlines and tabs are kept."""
    return "".join(
        char for char in text if char in "\n\t" or not (char < " " or "\x7f" <= char <= "\x9f")
    )


def word(value: object) -> str:
    """A name, or whatever else is text; a truth as a file of settings has it."""
    if isinstance(value, bool):
        return str(value).lower()
    return DASH if value is None or value == "" else printable(value)


def short_id(value: object) -> str:
    """Eight characters of an id after its prefix, which every verb takes for the whole."""
    return DASH if not value else printable(value).rpartition("-")[2].rpartition("_")[2][:8]


def short_time(value: object) -> str:
    """Day and second of a stamp, as the log has it: `11-22 14:02:11`."""
    match = re.match(r"\d{4}-(\d\d-\d\d)T(\d\d:\d\d:\d\d)", str(value))
    return f"{match[1]} {match[2]}" if match else word(value)


def yes_or_no(value: bool | None) -> str:
    """A truth as an answer."""
    return DASH if value is None else "yes" if value else "no"


def count(value: Any) -> str:
    """A number as it is."""
    return DASH if value is None else f"{value:g}" if isinstance(value, float) else printable(value)


def things(number: int | None, noun: str) -> str:
    """So many of something: 1 request, 2 requests."""
    return f"{count(number)} {noun}{'' if number == 1 else 's'}"


def tokens_per_s(value: float | None) -> str:
    """A rate of tokens."""
    return DASH if value is None else f"{value:.0f} tok/s"


def in_unit(unit: str, scale: float = 1.0) -> Callable[[Any], str]:
    """How a column shows whole numbers of a unit."""
    return lambda value: DASH if value is None else f"{value * scale:.0f} {unit}"


def ms(value: float | None) -> str:
    """A duration to three digits: 1.24ms, 231ms, 4.2s, 3m12s, 2h05m."""
    if value is None:
        return DASH
    if value < 999.5:
        return f"{value:.0f}ms" if value >= 99.95 else f"{value:.3g}ms"
    seconds = value / 1000
    if seconds < 59.95:
        return f"{seconds:.1f}s"
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes}m{seconds:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


def size(value: float | None) -> str:
    """Bytes: 512 B, 1.5 GiB."""
    return DASH if value is None else size_text(value)


def joules(value: float | None) -> str:
    """An energy to three digits: 0.412 J, 161 J, 1.24 kJ."""
    if value is None:
        return DASH
    for unit in ("J", "kJ", "MJ"):
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} GJ"


def large(value: float | None) -> str:
    """A large number to three digits: 950, 1.24k, 7.62B."""
    if value is None:
        return DASH
    for unit in ("", "k", "M", "B"):
        if value < 999.5:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g}T"
