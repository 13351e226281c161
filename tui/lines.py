"""Build lines of coloured text, bars and sparklines.

A line is a list of spans, a span is text and a tone. Panels are pure functions that return lines,
so the terminal console, the plain text mode and the tests share them.
Owns: the tones, the block characters, and what of a text may be shown.
Invariant: `fit` returns exactly the width asked for, printable, and ASCII where that is wanted.
Never: knows a colour; the stylesheet gives each tone its look.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import groupby
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size

SPARK_LEVELS = "▁▂▃▄▅▆▇█"
STATE_CELLS = {
    "active": "█",
    "reserved": "▓",
    "draining": "▚",
    "cached": "▒",
    "free": "░",
}
"""Block states in the order in which a bar shows them."""
_ASCII = str.maketrans("▁▂▃▄▅▆▇█▓▒░▚…│●▲■─▼", ".:-=+*%#+=.~~|*!X-v")
STALL_MARK = "!"


class Tone(StrEnum):
    """What a span means; `console.tcss` says how that looks."""

    PLAIN = "plain"
    MUTED = "muted"
    STRONG = "strong"
    ACCENT = "accent"
    GOOD = "good"
    WARN = "warn"
    BAD = "bad"
    CURRENT = "current"


class Run(NamedTuple):
    """A run of text in one tone."""

    text: str
    tone: Tone = Tone.PLAIN


Line = list[Run]


def clean(text: str) -> str:
    """The text with every unprintable character (escapes, newlines, bidi marks) made a `?`."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else "?" for char in text)


def clip(text: str, width: int) -> str:
    """At most `width` cells of cleaned text; a cut is marked with an ellipsis.

    It is made between words where that leaves half of the room filled.
    """
    text = clean(text)
    if cell_len(text) <= width:
        return text
    if width <= 0:
        return ""
    kept = set_cell_size(text, width - 1)
    words = kept if text[len(kept)] == " " else kept.rpartition(" ")[0]
    return (words if 2 * cell_len(words) >= width else kept).rstrip() + "…"


def pad(text: str, width: int, *, right: bool = False) -> str:
    """Exactly `width` cells of cleaned text, clipped or filled; `right` aligns to the right."""
    text = clip(text, width)
    fill = " " * (width - cell_len(text))
    return fill + text if right else text + fill


def width_of(line: Iterable[Run]) -> int:
    return sum(cell_len(span.text) for span in line)


def text_of(line: Iterable[Run]) -> str:
    """The line without its tones."""
    return "".join(span.text for span in line)


def fit(line: Iterable[Run], width: int, *, is_ascii: bool = False) -> Line:
    """The line in exactly `width` cells, cut once or filled; nothing in it is unprintable."""
    fitted: Line = []
    room = width
    for span in line:
        whole = to_ascii(span.text) if is_ascii else clean(span.text)
        text = clip(whole, room)
        is_cut = text != whole
        if is_ascii:
            text = to_ascii(text)  # the mark of a cut
        room -= cell_len(text)
        fitted.append(Run(text, span.tone))
        if is_cut or room <= 0:
            break
    if room > 0:
        fitted.append(Run(" " * room))
    return fitted


def to_ascii(text: str) -> str:
    """Each block character as the ASCII that stands for it, anything else outside ASCII as `?`."""
    return text.translate(_ASCII).encode("ascii", "replace").decode("ascii")


def pairs(width: int, *items: tuple[str, str]) -> Line:
    """Labels with their values in columns of equal width; a long one moves the next."""
    line: Line = []
    for index, (label, value) in enumerate(items):
        start = index * width // len(items)
        line.append(Run(" " * max(1 if line else 0, start - width_of(line))))
        line += [Run(f"{label} " if label else "", Tone.MUTED), Run(value, Tone.STRONG)]
    return line


def two_a_row(width: int, items: Sequence[tuple[str, str]]) -> list[Line]:
    """Labels with their values in two columns."""
    even = [*items, ("", "")] if len(items) % 2 else items
    return [pairs(width, *even[index : index + 2]) for index in range(0, len(even), 2)]


def nonzero(*items: tuple[str, int | None]) -> list[tuple[str, str]]:
    """Labels with their numbers, of things that are worth a word only when they happen."""
    return [(label, f"{number:,}") for label, number in items if number]


def facts(width: int, items: Iterable[tuple[str, str]], *, indent: int = 0) -> list[Line]:
    """Labels with their values one after the other, on as many lines as it takes."""
    lines: list[Line] = []
    for label, value in items:
        item = [Run(f"{label} " if label else "", Tone.MUTED), Run(value, Tone.STRONG)]
        if not lines or width_of(lines[-1]) + 3 + width_of(item) > width:
            lines.append([Run(" " * indent), *item])
        else:
            lines[-1] += [Run("   "), *item]
    return lines


def rule(title: str, width: int, note: str = "") -> Line:
    """A line that a section begins with: `─ POOLS ───────── 64 tokens a block ─`."""
    head = [Run("─ ", Tone.MUTED), Run(clip(title, width - 4), Tone.ACCENT), Run(" ")]
    room = width - width_of(head) - 3
    tail = [Run(f" {clip(note, room)} ─", Tone.MUTED)] if note and room > 0 else []
    dashes = max(0, width - width_of(head) - width_of(tail))
    return [*head, Run("─" * dashes, Tone.MUTED), *tail]


def wrap(text: str, width: int, indent: int = 0, tone: Tone = Tone.PLAIN) -> list[Line]:
    """A sentence on as many lines as it takes."""
    rows = textwrap.wrap(clean(text), max(1, width - indent))
    return [[Run(" " * indent), Run(row, tone)] for row in rows]


FOLDED_TO = 10


def fold(line: Line, width: int, indent: int) -> list[Line]:
    """The line, cut between words where it is longer than `width`; what follows is indented."""
    text = clean(text_of(line))
    if cell_len(text.rstrip()) <= width:
        return [line]
    tones = [span.tone for span in line for _ in span.text]
    lines: list[Line] = []
    end = 0
    for row in textwrap.wrap(
        text, max(1, width), subsequent_indent=" " * indent, break_on_hyphens=False
    ):
        shown = row[indent:] if lines else row
        start = text.index(shown, end)
        end = start + len(shown)
        lines.append([Run(" " * indent)] if lines else [])
        for tone, chars in groupby(range(start, end), tones.__getitem__):
            places = list(chars)
            lines[-1].append(Run(text[places[0] : places[-1] + 1], tone))
    return lines


def folded(lines: Iterable[Line], width: int) -> list[Line]:
    """All of a page, of which what is too long for its line goes on below, in column FOLDED_TO."""
    return [row for line in lines for row in fold(line, width, FOLDED_TO)]


def beside(left: Sequence[Line], right: Sequence[Line], left_width: int) -> list[Line]:
    """Two columns, two cells apart; the left one in exactly `left_width` cells."""
    return [
        [*fit(left[y] if y < len(left) else [], left_width), Run("  ")]
        + (right[y] if y < len(right) else [])
        for y in range(max(len(left), len(right)))
    ]


def marked(graph: str, marks: Sequence[float | None]) -> Line:
    """A graph in which the cells above 0 in `marks` are ticks; there are as many marks as cells."""
    line: Line = []
    for char, mark in zip(graph, marks, strict=True):
        span = Run(STALL_MARK, Tone.BAD) if mark else Run(char, Tone.ACCENT)
        if line and line[-1].tone == span.tone:
            line[-1] = Run(line[-1].text + span.text, span.tone)
        else:
            line.append(span)
    return line


def sparkline(samples: Sequence[float | None], width: int) -> str:
    """The newest `width` samples, newest at the right, scaled from 0 to the highest of all samples.

    Nothing is drawn for None; zero gets the lowest level and any other value a higher one. One
    sample alone is no trend and is not drawn.
    """
    if len(samples) < 2:
        return " " * width
    top = max((value for value in samples if value is not None), default=0.0)
    steps = len(SPARK_LEVELS) - 1
    cells = [
        " "
        if value is None
        else SPARK_LEVELS[0]
        if value <= 0
        else SPARK_LEVELS[max(1, min(steps, round(steps * value / top)))]
        for value in samples[-width:]
    ]
    return "".join(cells).rjust(width) if width > 0 else ""


def chart(samples: Sequence[float | None], width: int, height: int) -> list[str]:
    """Draw the newest samples as a graph of `height` rows, from 0 to the highest."""
    known = [value for value in samples[-width:] if value is not None]
    top = max(known, default=0.0) or 1.0
    columns = []
    for value in samples[-width:]:
        eighths = 0 if value is None else round(8 * height * value / top)
        eighths = max(eighths, 1) if value else eighths
        full, rest = divmod(eighths, 8)
        column = "█" * full + (SPARK_LEVELS[rest - 1] if rest else "")
        columns.append(column.ljust(height))
    rows = ["".join(column[row] for column in columns) for row in reversed(range(height))]
    return [row.rjust(width) for row in rows]


def beside_chart(
    head: Line, samples: Sequence[float | None], width: int, height: int
) -> list[Line]:
    """Put a graph of `height` rows right of `head`, which stands in the first of them."""
    room = width - width_of(head)
    rows = chart(samples, room, height) if height > 1 else [sparkline(samples, room)]
    first, *others = ([Run(row, Tone.ACCENT)] for row in rows)
    return [[*head, *first], *([Run(" " * width_of(head)), *row] for row in others)]


def gauge(ratio: float | None, width: int) -> str:
    """A bar that is full at 1; empty cells only if the ratio is not reported."""
    if width <= 0:
        return ""
    filled = 0 if ratio is None else round(width * min(1.0, max(0.0, ratio)))
    return "█" * filled + "░" * (width - filled)


def state_bar(num_by_state: Mapping[str, int], width: int) -> str:
    """A bar whose cells show the share of each state, in the order of STATE_CELLS.

    Every state that has anything gets at least one cell while there are cells for all of them.
    """
    return "".join(
        STATE_CELLS[state] * num_cells
        for state, num_cells in _apportion(
            {state: num_by_state.get(state, 0) for state in STATE_CELLS}, width
        ).items()
    )


def _apportion(num_by_state: Mapping[str, int], num_cells: int) -> dict[str, int]:
    """Divide cells by largest remainder, after one cell for each state that has anything."""
    present = {state: num for state, num in num_by_state.items() if num > 0}
    total = sum(present.values())
    if num_cells <= 0 or not total:
        return {"free": max(0, num_cells)}
    least = 1 if len(present) <= num_cells else 0
    exact = {state: num_cells * num / total for state, num in present.items()}
    cells = {state: max(least, int(share)) for state, share in exact.items()}
    while sum(cells.values()) < num_cells:
        cells[max(cells, key=lambda state: exact[state] - cells[state])] += 1
    while sum(cells.values()) > num_cells:
        cells[
            min(cells, key=lambda state: (cells[state] <= least, exact[state] - cells[state]))
        ] -= 1
    return {state: cells[state] for state in num_by_state if state in cells}
