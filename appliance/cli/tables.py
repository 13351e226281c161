"""Rows from the daemon in the five formats of -o, and its values in words.

Owns: escaping, and the forms of durations, sizes, energies and counts; what table, wide, json,
ndjson and csv mean.
Invariant: pure; table and wide are for people and may change, in the others fields are only ever
added; rows come out in the order in which they are given.
Never: cuts a value off that has no shorter form, or formats a number for a program.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from engine.units import size_text

# Values to words: what of the daemon's text may reach a terminal, and how figures read.
# Invariant: pure; text that came from elsewhere is shown with no control character in it.
# Never: shows None as 0.


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


# --------------------------------------------------------------------------------------------------


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
        """True for aligned columns."""
        return self in (Format.TABLE, Format.WIDE)


class TableColumn(NamedTuple):
    """One column: its title for people, its field for programs."""

    title: str
    key: str
    show: Callable[[Any], str] = word
    is_wide: bool = False
    """Left out of `table`."""
    instead: str | None = None
    """A field that a table shows in place of `key` once it has a value."""
    short: Callable[[Any], str] | None = None
    """What `table` shows in place of `show` where the terminal is too narrow."""
    rank: int = 0
    """Where it is still too narrow the highest ranks are left out first; 0 stays."""

    def cell(self, row: Row, *, is_short: bool = False) -> str:
        """What a table shows."""
        value = row.get(self.instead) if self.instead else None
        show = self.short if is_short and self.short else self.show
        return show(row.get(self.key) if value is None else value)


class Listing:
    """Rows in one format, in one batch or, when they are followed, in many.

    Args:
        verb: names the schema of the JSON document.
        columns: in order; csv has them all, json and ndjson every field that the daemon sends.
        form: what was asked for with -o.
        colour: whether the header may be painted.
        room: the columns of the terminal that `table` is to fit; None: as wide as it gets.
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
        """The next rows; the first call writes the header, too. Lines end with a newline."""
        rows = list(rows)
        if self._form is Format.JSON:
            return document(self._verb, {"data": rows}) + "\n"
        if self._form is Format.NDJSON:
            return "".join(json.dumps(row) + "\n" for row in rows)
        return self._csv(rows) if self._form is Format.CSV else self._table(rows)

    def _csv(self, rows: Sequence[Row]) -> str:
        import csv  # which the other formats, and so most verbs, do not need
        import io

        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        if self._needs_header():
            writer.writerow(column.key for column in self._columns)
        writer.writerows([csv_cell(row.get(c.key)) for c in self._columns] for row in rows)
        return out.getvalue()

    def _table(self, rows: Sequence[Row]) -> str:
        """Columns two spaces apart, as wide as their longest cell so far; numbers to the right."""
        if self._room is not None and not self._has_header:
            self._fit(rows, self._room)
        cells = self._cells(rows)
        self._widths = self._wide_enough(cells)
        header = [column.title for column in self._columns]
        lines = [painted(self._line(header), BOLD, self._colour)] if self._needs_header() else []
        return "".join(f"{line}\n" for line in [*lines, *map(self._line, cells)])

    def _fit(self, rows: Sequence[Row], room: int) -> None:
        """Shorten the table to the terminal; what is then in it stays when more rows come."""
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
    """One JSON document; keys are only ever added within a schema's number."""
    return json.dumps({"schema": f"penstock.{verb}/1", **content}, indent=2)


def one(verb: str, content: Row, form: Format) -> str:
    """A single thing for programs: a document, a line, or `key,value` with dotted keys."""
    if form is Format.JSON:
        return document(verb, content) + "\n"
    if form is Format.NDJSON:
        return json.dumps(content) + "\n"
    rows = [{"key": key, "value": value} for key, value in flat(content).items()]
    return Listing(verb, [TableColumn("KEY", "key"), TableColumn("VALUE", "value")], form).render(
        rows
    )


def csv_cell(value: object) -> object:
    """A value that neither a terminal nor a spreadsheet obeys.

    Control characters are escaped, and text that a spreadsheet would take for a formula begins
    with an apostrophe.
    """
    if value is None or isinstance(value, int | float):
        return value
    if not isinstance(value, str):
        return json.dumps(value)
    shown = printable(value)
    return f"'{shown}" if shown.lstrip()[:1] in ("=", "+", "-", "@") else shown


def painted(shown: str, code: str | None, colour: bool) -> str:
    """Text in a colour of the terminal, where it has any."""
    return f"\x1b[{code}m{shown}\x1b[0m" if colour and code else shown


def flat(content: Any, prefix: str = "") -> dict[str, object]:
    """Nested objects and lists as one, with dotted keys."""
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
