"""Print rows in the formats of -o, and text that is safe for a terminal.

Invariant: table and wide are for people and may change, in the others fields are only ever added;
rows come out in the order in which they are given.
"""

from __future__ import annotations

import io
import json
import math
import re
import textwrap
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import typer

from appliance.observe.frame.figures import ABSENT
from engine.printable import printable

# Text that came from elsewhere is shown with no control character in it.

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def for_terminal(text: str) -> str:
    """Remove control characters from completion text, except newlines and tabs.

    Overrides, embeddings and isolates of direction go, too: they show text in another order than
    it has. Arabic and Hebrew can be read without them; their joiners and direction marks stay.
    """
    return _CONTROLS.sub("", text)


def folded(line: str, room: int | None, column: int = 0) -> str:
    """Wrap the line between words at `room`; it continues at `column`."""
    if room is None or len(line) <= room or len(line) <= column:
        return line
    head, text = line[:column], line[column:]
    parts = textwrap.wrap(
        text, max(room - column, 20), break_long_words=False, break_on_hyphens=False
    )
    return head + f"\n{' ' * column}".join(parts)


def word(value: object) -> str:
    """Write a value as text; booleans as true and false."""
    if isinstance(value, bool):
        return str(value).lower()
    return ABSENT if value is None or value == "" else printable(value)


def yes_or_no(value: bool | None) -> str:
    """Format a boolean as yes or no."""
    return ABSENT if value is None else "yes" if value else "no"


def in_unit(unit: str, scale: float = 1.0) -> Callable[[Any], str]:
    """Return a formatter of whole numbers of a unit."""
    return lambda value: ABSENT if value is None else f"{value * scale:.0f} {unit}"


class Range(NamedTuple):
    """The allowed range of a number."""

    least: float = -math.inf
    most: float = math.inf
    is_open: bool = False
    """Whether `least` itself is excluded."""

    def __str__(self) -> str:
        low = f"{'above' if self.is_open else 'at least'} {_bound(self.least)}"
        if self.most == math.inf:
            return low
        between = f"{low} and at most" if self.is_open else f"from {_bound(self.least)} to"
        return f"{between} {_bound(self.most)}"

    def refusal(self, value: float) -> str:
        """Explain why a value is out of range; empty: it is inside. NaN never is."""
        is_in = self.least <= value <= self.most and not (self.is_open and value == self.least)
        return "" if is_in else f"{value:,} is out of range: it must be {self}"


def _bound(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def within(
    least: float = -math.inf, most: float = math.inf, is_open: bool = False
) -> Callable[[Any], Any]:
    """Return an option's callback that refuses a number out of range."""
    allowed = Range(least, most, is_open)

    def checked(value: Any) -> Any:
        if value is not None and (why := allowed.refusal(value)):
            raise typer.BadParameter(why)
        return value

    return checked


class WordWrap:
    """Wrap streamed text for a terminal between words.

    Every character is written when it comes; a word that turns out too long for its line is erased
    and written on the next one. Code (between fences, or indented) and words longer than a line are
    left to the terminal.
    """

    def __init__(self) -> None:
        self._begin = ""
        """The beginning of the model's line, enough to recognise code."""
        self._is_fenced = False
        self._column = 0
        self._word = ""
        self._word_cells = 0

    def of(self, text: str, width: int) -> str:
        """Return what to write for the next text; the last column stays free."""
        return "".join(self._written(char, width - 1) for char in text)

    def _written(self, char: str, room: int) -> str:
        if char == "\n":
            self._is_fenced ^= self._begin.lstrip().startswith(_FENCE)
            self._begin, self._column = "", 0
            self._end_word()
            return char
        if len(self._begin) < _TELLING:
            self._begin += char
        is_fence = self._begin.lstrip().startswith(_FENCE)
        if self._is_fenced or is_fence or self._begin.startswith(("    ", "\t")):
            return char
        is_wide = unicodedata.east_asian_width(char) in "WF"
        cells = 0 if unicodedata.combining(char) else 2 if is_wide else 1
        if char == "\t":
            cells = _TAB_CELLS - self._column % _TAB_CELLS
        written, is_over = char, self._column + cells > room
        if char in " \t":
            self._end_word()
            written = "\n" if is_over else char
            self._column = 0 if is_over else self._column + cells
            return written
        if is_over and self._word_cells < self._column:
            back = f"\x1b[{self._word_cells}D\x1b[K" if self._word else ""
            written = f"{back}\n{self._word}{char}"
            self._column = self._word_cells
        self._word += char
        self._word_cells += cells
        self._column += cells
        if is_wide:  # a line may end after it
            self._end_word()
        return written

    def _end_word(self) -> None:
        self._word, self._word_cells = "", 0


_FENCE = "```"
_TAB_CELLS = 8
_TELLING = 12
"""Characters of a line that show whether it is code."""


Row = Mapping[str, Any]
BOLD = "1"


class Format(StrEnum):
    """How a list is printed: what the option -o takes."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    NDJSON = "ndjson"
    CSV = "csv"

    @property
    def is_for_people(self) -> bool:
        """Whether columns are aligned."""
        return self in (Format.TABLE, Format.WIDE)


class TableColumn(NamedTuple):
    """One column: its title for people, its field for programs."""

    title: str
    key: str
    show: Callable[[Any], str] = word
    is_wide: bool = False
    """Whether `table` leaves it out."""
    instead: str | None = None
    """A field shown in place of `key` once it has a value."""
    short: Callable[[Any], str] | None = None
    """The formatter of `table` on a narrow terminal."""
    rank: int = 0
    """On a still narrower terminal the highest ranks are left out first; 0 stays."""

    def cell(self, row: Row, *, is_short: bool = False) -> str:
        """Format this column's cell of a row."""
        value = row.get(self.instead) if self.instead else None
        show = self.short if is_short and self.short else self.show
        return printable(show(row.get(self.key) if value is None else value))


class Listing:
    """Print rows in one format, in one batch or, when they are followed, in many.

    Args:
        verb: names the schema of the JSON document.
        columns: in order; csv has them all, json and ndjson every field that the daemon sends.
        colour: whether the header may be painted.
        room: the terminal's columns for `table`; None: no limit.
    """

    def __init__(
        self,
        verb: str,
        columns: Sequence[TableColumn],
        form: Format,
        *,
        colour: bool = False,
        room: int | None = None,
    ) -> None:
        self._verb = verb
        self._columns = [c for c in columns if form is not Format.TABLE or not c.is_wide]
        self._form = form
        self._colour = colour
        self._room = room if form is Format.TABLE else None
        self._is_short = False
        self._widths = [len(column.title) for column in self._columns]
        self._has_header = False

    def render(self, rows: Iterable[Row]) -> str:
        """Format the next rows; the first call writes the header, too."""
        rows = list(rows)
        if self._form is Format.JSON:
            return document(self._verb, {"data": rows}) + "\n"
        if self._form is Format.NDJSON:
            return "".join(json.dumps(row) + "\n" for row in rows)
        return self._csv(rows) if self._form is Format.CSV else self._table(rows)

    def _csv(self, rows: Sequence[Row]) -> str:
        import csv  # which the other formats, and so most verbs, do not need

        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        if self._needs_header():
            writer.writerow(column.key for column in self._columns)
        writer.writerows([csv_cell(row.get(c.key)) for c in self._columns] for row in rows)
        return out.getvalue()

    def _table(self, rows: Sequence[Row]) -> str:
        """Align columns two spaces apart, as wide as their longest cell so far."""
        if self._room is not None and not self._has_header:
            self._fit(rows, self._room)
        cells = self._cells(rows)
        self._widths = self._wide_enough(cells)
        header = [column.title for column in self._columns]
        lines = [painted(self._line(header), BOLD, self._colour)] if self._needs_header() else []
        last = sum(self._widths[:-1]) + 2 * (len(self._widths) - 1)
        rows_of_text = (folded(self._line(row), self._room, last) for row in cells)
        return "".join(f"{line}\n" for line in [*lines, *rows_of_text])

    def _fit(self, rows: Sequence[Row], room: int) -> None:
        """Shorten the table to the terminal; the chosen columns stay for later rows."""
        while sum(self._wide_enough(self._cells(rows))) + 2 * (len(self._columns) - 1) > room:
            if not self._is_short:
                self._is_short = True
                continue
            least = max(self._columns, key=lambda column: column.rank)
            if not least.rank:
                return
            self._columns.remove(least)
            self._widths = [len(column.title) for column in self._columns]

    def _cells(self, rows: Sequence[Row]) -> list[list[str]]:
        return [[c.cell(row, is_short=self._is_short) for c in self._columns] for row in rows]

    def _wide_enough(self, cells: Sequence[Sequence[str]]) -> list[int]:
        columns = zip(self._widths, *cells, strict=True)
        return [max([width, *map(len, column)]) for width, *column in columns]

    def _line(self, cells: Sequence[str]) -> str:
        padded = (
            cell.ljust(width) if column.show is word else cell.rjust(width)
            for column, cell, width in zip(self._columns, cells, self._widths, strict=True)
        )
        return "  ".join(padded).rstrip()

    def _needs_header(self) -> bool:
        had_header, self._has_header = self._has_header, True
        return not had_header


def document(verb: str, content: Row) -> str:
    """Write one JSON document; keys are only added within a schema's number."""
    return json.dumps({"schema": f"penstock.{verb}/1", **content}, indent=2)


def one(verb: str, content: Row, form: Format) -> str:
    """Write a single thing for programs: a document, a line, or `key,value` with dotted keys."""
    if form is Format.JSON:
        return document(verb, content) + "\n"
    if form is Format.NDJSON:
        return json.dumps(content) + "\n"
    rows = [{"key": key, "value": value} for key, value in flat(content).items()]
    return Listing(verb, [TableColumn("KEY", "key"), TableColumn("VALUE", "value")], form).render(
        rows
    )


def csv_cell(value: object) -> object:
    """Make a value safe for terminals and spreadsheets.

    Control characters are escaped, and text that looks like a formula begins with an apostrophe.
    """
    if value is None or isinstance(value, int | float):
        return value
    if not isinstance(value, str):
        return json.dumps(value)
    shown = printable(value)
    return f"'{shown}" if shown.lstrip()[:1] in ("=", "+", "-", "@") else shown


def painted(shown: str, code: str | None, colour: bool) -> str:
    """Colour a text, if the terminal has colours."""
    return f"\x1b[{code}m{shown}\x1b[0m" if colour and code else shown


def flat(content: Any, prefix: str = "") -> dict[str, object]:
    """Flatten nested objects and lists into dotted keys."""
    if isinstance(content, Mapping):
        items: Iterable[tuple[object, Any]] = content.items()
    elif isinstance(content, list):
        items = enumerate(content)
    else:
        return {prefix: content}
    found: dict[str, object] = {}
    for key, value in items:
        found |= flat(value, f"{prefix}.{key}" if prefix else str(key))
    return found
