"""Build lines of coloured text, bars and sparklines.

A line is a list of runs; a run is text with a tone. Panels are pure functions that return lines, so
the terminal console, the plain text mode and the tests share them.
Invariant: `fit` returns exactly the wanted width, printable, and ASCII where wanted.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
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
_ASCII = str.maketrans("▁▂▃▄▅▆▇█▓▒░▚…│●▲■─▼↑↓", ".:-=+*%#+=.~~|*!X-v^v")
STALL_MARK = "!"


class Tone(StrEnum):
    """The meaning of a run; `console.tcss` sets its look."""

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
    action: str = ""
    """What a click on it does, as an action of Textual; empty: nothing."""


Line = list[Run]


def clean(text: str) -> str:
    """Replace every unprintable character (escapes, newlines, bidi marks) by `?`."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else "?" for char in text)


def clip(text: str, width: int) -> str:
    """Cut a text to `width` cells, marking the cut with an ellipsis.

    The cut is between words if half of the width stays filled.
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
    """Clip or fill a text to exactly `width` cells; `right` aligns to the right."""
    text = clip(text, width)
    fill = " " * (width - cell_len(text))
    return fill + text if right else text + fill


def width_of(line: Iterable[Run]) -> int:
    return sum(cell_len(span.text) for span in line)


def text_of(line: Iterable[Run]) -> str:
    """Return the line's text without its tones."""
    return "".join(span.text for span in line)


def fit(line: Iterable[Run], width: int, *, is_ascii: bool = False) -> Line:
    """Cut or fill a line to exactly `width` cells, all printable."""
    fitted: Line = []
    room = width
    for span in line:
        whole = to_ascii(span.text) if is_ascii else clean(span.text)
        text = clip(whole, room)
        is_cut = text != whole
        if is_ascii:
            text = to_ascii(text)  # the mark of a cut
        room -= cell_len(text)
        fitted.append(span._replace(text=text))
        if is_cut or room <= 0:
            break
    if room > 0:
        fitted.append(Run(" " * room))
    return fitted


def to_ascii(text: str) -> str:
    """Replace block characters by their ASCII forms, and other non-ASCII by `?`."""
    return text.translate(_ASCII).encode("ascii", "replace").decode("ascii")


def pairs(width: int, *items: tuple[str, str] | tuple[str, str, Tone]) -> Line:
    """Place labels and values in columns of equal width; a long one moves the next.

    A value is strong, unless its item has a tone.
    """
    line: Line = []
    for index, (label, value, *tone) in enumerate(items):
        start = index * width // len(items)
        line.append(Run(" " * max(1 if line else 0, start - width_of(line))))
        line += [
            Run(f"{label} " if label else "", Tone.MUTED),
            Run(value, *(tone or [Tone.STRONG])),
        ]
    return line


def two_a_row(width: int, items: Sequence[tuple[str, str]]) -> list[Line]:
    """Place labels and values in two columns."""
    even = [*items, ("", "")] if len(items) % 2 else items
    return [pairs(width, *even[index : index + 2]) for index in range(0, len(even), 2)]


def nonzero(*items: tuple[str, int | None]) -> list[tuple[str, str]]:
    """List labels and numbers that are not zero."""
    return [(label, f"{number:,}") for label, number in items if number]


def facts(width: int, items: Iterable[tuple[str, str]], *, indent: int = 0) -> list[Line]:
    """Join labels and values, on as many lines as needed."""
    lines: list[Line] = []
    for label, value in items:
        item = [Run(f"{label} " if label else "", Tone.MUTED), Run(value, Tone.STRONG)]
        if not lines or width_of(lines[-1]) + 3 + width_of(item) > width:
            lines.append([Run(" " * indent), *item])
        else:
            lines[-1] += [Run("   "), *item]
    return lines


def rule(title: str, width: int, note: str = "") -> Line:
    """Draw the first line of a section: `─ POOLS ───────── 64 tokens a block ─`."""
    head = [Run("─ ", Tone.MUTED), Run(clip(title, width - 4), Tone.ACCENT), Run(" ")]
    room = width - width_of(head) - 3
    tail = [Run(f" {clip(note, room)} ─", Tone.MUTED)] if note and room > 0 else []
    dashes = max(0, width - width_of(head) - width_of(tail))
    return [*head, Run("─" * dashes, Tone.MUTED), *tail]


def wrap(text: str, width: int, indent: int = 0, tone: Tone = Tone.PLAIN) -> list[Line]:
    """Wrap a sentence into lines."""
    rows = textwrap.wrap(clean(text), max(1, width - indent))
    return [[Run(" " * indent), Run(row, tone)] for row in rows]


FOLDED_TO = 10


def fold(line: Line, width: int, indent: int) -> list[Line]:
    """Wrap a line between words at `width`, with an indent."""
    text = clean(text_of(line))
    if cell_len(text.rstrip()) <= width:
        return [line]
    looks = [span._replace(text="") for span in line for _ in span.text]
    lines: list[Line] = []
    end = 0
    for row in textwrap.wrap(
        text, max(1, width), subsequent_indent=" " * indent, break_on_hyphens=False
    ):
        shown = row[indent:] if lines else row
        start = text.index(shown, end)
        end = start + len(shown)
        lines.append([Run(" " * indent)] if lines else [])
        for look, chars in groupby(range(start, end), looks.__getitem__):
            places = list(chars)
            lines[-1].append(look._replace(text=text[places[0] : places[-1] + 1]))
    return lines


def folded(lines: Iterable[Line], width: int) -> list[Line]:
    """Wrap the lines of a page; long ones continue in column FOLDED_TO."""
    return [row for line in lines for row in fold(line, width, FOLDED_TO)]


def beside(left: Sequence[Line], right: Sequence[Line], left_width: int) -> list[Line]:
    """Join two columns, two cells apart; the left one has exactly `left_width` cells."""
    return [
        [*fit(left[y] if y < len(left) else [], left_width), Run("  ")]
        + (right[y] if y < len(right) else [])
        for y in range(max(len(left), len(right)))
    ]


def marked(graph: str, marks: Sequence[float | None]) -> Line:
    """Draw ticks in a graph's cells where `marks` is above 0; one mark per cell."""
    line: Line = []
    for char, mark in zip(graph, marks, strict=True):
        span = Run(STALL_MARK, Tone.BAD) if mark else Run(char, Tone.ACCENT)
        if line and line[-1].tone == span.tone:
            line[-1] = Run(line[-1].text + span.text, span.tone)
        else:
            line.append(span)
    return line


def sparkline(samples: Sequence[float | None], width: int, top: float | None = None) -> str:
    """Draw the newest `width` samples, newest at the right, scaled from 0 to `top`.

    None draws nothing; zero gets the lowest level and any other value a higher one. A single sample
    is not drawn.

    Args:
        top: the value of a full cell; None: the highest sample.
    """
    if len(samples) < 2:
        return " " * width
    top = peak(samples) if top is None else top
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


def peak(samples: Sequence[float | None]) -> float:
    """Return the highest known sample, or 0."""
    return max((value for value in samples if value is not None), default=0.0)


def chart(
    samples: Sequence[float | None], width: int, height: int, top: float | None = None
) -> list[str]:
    """Draw the newest samples as a graph of `height` rows, as `sparkline` does."""
    top = (peak(samples[-width:]) if top is None else top) or 1.0
    columns = []
    for value in samples[-width:] if width > 0 else ():
        eighths = 0 if value is None else max(1, round(8 * height * min(value, top) / top))
        full, rest = divmod(eighths, 8)
        column = "█" * full + (SPARK_LEVELS[rest - 1] if rest else "")
        columns.append(column.ljust(height))
    rows = ["".join(column[row] for column in columns) for row in reversed(range(height))]
    return [row.rjust(width) for row in rows]


_AXIS_WIDTH = 11


def beside_chart(
    head: Line,
    samples: Callable[[int], Sequence[float | None]],
    width: int,
    height: int,
    figure: Callable[[float], str],
    top: float | None = None,
) -> list[Line]:
    """Place a graph of `height` rows with its axis right of `head`, which is in the first row.

    Args:
        samples: takes a number of cells.
        figure: writes a value at the axis.
        top: the end of the axis; None: the highest sample.
    """
    indent = width_of(head)
    room = max(0, width - indent - _AXIS_WIDTH)
    shown = samples(room)
    top = peak(shown) if top is None else top
    if height < 2:
        axis = Run(pad(f"0-{figure(top)}", _AXIS_WIDTH - 1, right=True) + " ", Tone.MUTED)
        return [[*head, axis, Run(sparkline(shown, room, top), Tone.ACCENT)]]
    lines: list[Line] = []
    for index, row in enumerate(chart(shown, room, height, top)):
        at = figure(top) if index == 0 else "0" if index == height - 1 else ""
        axis = Run(pad(at, _AXIS_WIDTH - 1, right=True) + " ", Tone.MUTED)
        lines.append([*([Run(" " * indent)] if lines else head), axis, Run(row, Tone.ACCENT)])
    return lines


def gauge(ratio: float | None, width: int) -> str:
    """Draw a bar that is full at 1; empty cells only if the ratio is not reported."""
    if width <= 0:
        return ""
    filled = 0 if ratio is None else round(width * min(1.0, max(0.0, ratio)))
    return "█" * filled + "░" * (width - filled)


def state_bar(num_by_state: Mapping[str, int], width: int) -> str:
    """Draw a bar with the share of each state, in the order of STATE_CELLS.

    Every nonempty state gets at least one cell while there are enough cells.
    """
    return "".join(
        STATE_CELLS[state] * num_cells
        for state, num_cells in _apportion(
            {state: num_by_state.get(state, 0) for state in STATE_CELLS}, width
        ).items()
    )


def _apportion(num_by_state: Mapping[str, int], num_cells: int) -> dict[str, int]:
    """Divide cells by largest remainder, after one cell for each nonempty state."""
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
