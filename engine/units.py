"""Format byte counts in binary units.

Invariant: the unit is never left out.
"""

from __future__ import annotations

SIZE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
"""Each 1,024 of the one before it."""


def size_text(num_bytes: float) -> str:
    """Format a size: `0 B`, `980 KiB`, `1.2 GiB`; callers add `/s` for a rate."""
    unit = 0
    while abs(num_bytes) >= 999.5 and unit < len(SIZE_UNITS) - 1:
        num_bytes /= 1024
        unit += 1
    digits = 1 if unit and abs(num_bytes) < 99.95 else 0
    return f"{num_bytes:.{digits}f} {SIZE_UNITS[unit]}"


def part_text(num_bytes: float, total_bytes: float, between: str = " of ") -> str:
    """Format a part of a total in the total's unit: `9.0 of 23.0 GiB`, `270 of 270 MiB`."""
    number, unit = size_text(total_bytes).split()
    part = num_bytes / 1024 ** SIZE_UNITS.index(unit)
    digits = 1 if abs(part) < 99.95 else 0
    return f"{part:.{digits}f}{between}{number} {unit}"
