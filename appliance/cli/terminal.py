"""What a verb prints, and how: stdout, stderr, the formats of -o, progress, signals.

Owns: what table, wide, json, ndjson and csv mean; which characters from elsewhere may reach a
terminal; colour, and the options that most verbs share.
Invariant: stdout carries the answer alone; progress, notes and errors go to
stderr as `penstock: ...` and `hint: ...`.
Never: decides what an answer says.
"""

from __future__ import annotations

import inspect
import io
import json
import math
import os
import shutil
import signal
import sys
import textwrap
import time
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NamedTuple, NoReturn

import typer

from appliance.client import Client
from appliance.configuration.address import Address, find, is_of_this_machine
from appliance.frame.figures import ABSENT, duration, size
from engine.errors import FileError, PenstockError, SeveralWrong, UsageError

# Rows from the daemon in the five formats of -o, and what of its text may reach a terminal.
# Invariant: pure; table and wide are for people and may change, in the others fields are only ever
# added; rows come out in the order in which they are given.
# Never: cuts a value off that has no shorter form, or formats a number for a program.


# Text that came from elsewhere is shown with no control character in it.


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


def folded(line: str, room: int | None, column: int = 0) -> str:
    """The line cut between words where it is longer than `room`; it goes on at `column`."""
    if room is None or len(line) <= room or len(line) <= column:
        return line
    head, text = line[:column], line[column:]
    parts = textwrap.wrap(
        text, max(room - column, 20), break_long_words=False, break_on_hyphens=False
    )
    return head + f"\n{' ' * column}".join(parts)


def word(value: object) -> str:
    """A name, or whatever else is text; a truth as a file of settings has it."""
    if isinstance(value, bool):
        return str(value).lower()
    return ABSENT if value is None or value == "" else printable(value)


def yes_or_no(value: bool | None) -> str:
    """A truth as an answer."""
    return ABSENT if value is None else "yes" if value else "no"


def in_unit(unit: str, scale: float = 1.0) -> Callable[[Any], str]:
    """How a column shows whole numbers of a unit."""
    return lambda value: ABSENT if value is None else f"{value * scale:.0f} {unit}"


class Range(NamedTuple):
    """What a number may be."""

    least: float = -math.inf
    most: float = math.inf
    is_open: bool = False
    """`least` itself is not taken."""

    def __str__(self) -> str:
        low = f"{'above' if self.is_open else 'at least'} {_bound(self.least)}"
        if self.most == math.inf:
            return low
        between = f"{low} and at most" if self.is_open else f"from {_bound(self.least)} to"
        return f"{between} {_bound(self.most)}"

    def refusal(self, value: float) -> str:
        """What is wrong with a value; empty if nothing is. NaN is in no range."""
        is_in = self.least <= value <= self.most and not (self.is_open and value == self.least)
        return "" if is_in else f"{value:,} is out of range: it must be {self}"


def _bound(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def within(
    least: float = -math.inf, most: float = math.inf, is_open: bool = False
) -> Callable[[Any], Any]:
    """Of an option: refuses a number that is not in the range, by its words."""
    allowed = Range(least, most, is_open)

    def checked(value: Any) -> Any:
        if value is not None and (why := allowed.refusal(value)):
            raise typer.BadParameter(why)
        return value

    return checked


class WordWrap:
    """Streamed text for a terminal: a word that does not fit goes to the next line, whole.

    Every character is written when it comes; a word that turns out too long for its line is taken
    back and written on the next one. Code (between fences, or indented) and words longer than a
    line are left to the terminal.
    """

    def __init__(self) -> None:
        self._begin = ""
        """Of the line as the model wrote it, as much as tells what it is."""
        self._is_fenced = False
        self._column = 0
        self._word = ""
        self._word_cells = 0

    def of(self, text: str, width: int) -> str:
        """What to write for the next text; the last column stays free."""
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
"""Characters that tell of a line whether it is code."""


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
        """The text of this column in a table's row."""
        value = row.get(self.instead) if self.instead else None
        show = self.short if is_short and self.short else self.show
        return printable(show(row.get(self.key) if value is None else value))


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
        last = sum(self._widths[:-1]) + 2 * (len(self._widths) - 1)
        rows_of_text = (folded(self._line(row), self._room, last) for row in cells)
        return "".join(f"{line}\n" for line in [*lines, *rows_of_text])

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


# --------------------------------------------------------------------------------------------------


BROKEN_PIPE = 141
WIDTH_WITHOUT_TERMINAL = 100
WIDEST = 1000
"""Columns that are believed; COLUMNS may say anything."""

_told = set[str]()

Host = Annotated[
    str | None,
    typer.Option(
        "--host", "-H", "--socket", help="Daemon to ask: socket path, http://... or ssh://..."
    ),
]
Output = Annotated[Format, typer.Option("--output", "-o", help="Output format.")]


def with_options(verb: Callable[..., None], options: Mapping[str, Any]) -> Callable[..., None]:
    """Give a verb options, each of which may be left out, in place of its `**given`.

    Args:
        verb: takes them by their names.
        options: the annotation of each, as typer has it.
    """
    signature = inspect.signature(verb, eval_str=True)
    own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    added = [
        inspect.Parameter(name, kind, default=None, annotation=annotation)
        for name, annotation in options.items()
    ]
    verb.__signature__ = signature.replace(parameters=[*added, *own])  # type: ignore[attr-defined]
    return verb


def prepare() -> None:
    """Make the process fit for every verb: open streams, no encoding errors, signals that exit."""
    _open_missing_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # no locale may end a run
    signal.signal(signal.SIGINT, _exit_on_signal)
    signal.signal(signal.SIGTERM, _exit_on_signal)


def client(host: str | None, *, timeout_s: float = 10.0) -> Client:
    """A client of the daemon that the options and the environment name."""
    where = address(host)
    said = f"penstock: no answer from {printable(where)} yet; waiting on, Ctrl-C ends it"
    return Client(where, timeout_s=timeout_s, on_silence=lambda: note(said))


def address(host: str | None) -> Address:
    """Where the daemon is that the options and the environment name."""
    return find(host, warn=passed_over)


def of_this_machine() -> None:
    """Say that a verb tells of this machine's files where the user has named a daemon elsewhere."""
    host = os.environ.get("PENSTOCK_HOST")
    if host and not is_of_this_machine(address(None)):
        note(f"penstock: this is of this machine's files, not of {printable(host)} (PENSTOCK_HOST)")
        note("hint: run it on that machine")


def needs_this_machine(what: str, hint: str, host: str | None = None) -> None:
    """Refuse what is about this machine's files where the user has named a daemon elsewhere.

    Raises:
        UsageError: the daemon that options or PENSTOCK_HOST name is another machine's.
    """
    named = address(host)
    if not is_of_this_machine(named):
        problem = f"{what} is of this machine, and the daemon is on another"
        raise UsageError(problem, where=str(named), hint=hint)


def passed_over(error: PenstockError) -> None:
    """Say once what is wrong in the config file, which concerns no client."""
    if str(error) not in _told:
        _told.add(str(error))
        note(f"penstock: warning: {printable(error)}")
        if error.hint:
            note(f"hint: {printable(error.hint)}")


def named_folder(path: str | Path) -> Path:
    """A folder that somebody has named, made absolute.

    Raises:
        FileError: it is not there, no folder, or not ours to look into.
    """
    try:
        os.scandir(found := Path(path).expanduser().absolute()).close()
    except OSError as error:
        hint = "name a folder that is there, and that you may read"
        raise FileError("cannot look there", error, where=str(path), hint=hint) from error
    return found


def listing(verb: str, columns: tuple[TableColumn, ...], form: Format) -> Listing:
    """An empty list in a format, with colour where the terminal has it, fitted to its width."""
    return Listing(verb, columns, form, colour=has_colour(), room=room())


def show(verb: str, content: Row, form: Format, page: Callable[[], str]) -> None:
    """Print one thing: as its page for people, else in the format asked for."""
    write(page() + "\n" if form.is_for_people else one(verb, content, form))


def has_colour() -> bool:
    """True where stdout is a terminal that takes colour from us."""
    return has_screen() and not os.environ.get("NO_COLOR")


def has_screen() -> bool:
    """True where stdout is a terminal whose cursor can be moved."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def width() -> int:
    """Columns of the terminal, or a fixed number where there is none."""
    if not sys.stdout.isatty():
        return WIDTH_WITHOUT_TERMINAL
    return min(shutil.get_terminal_size((WIDTH_WITHOUT_TERMINAL, 24)).columns, WIDEST)


def room() -> int | None:
    """Columns of the terminal; None: what is written goes where lines may have any length."""
    return width() if sys.stdout.isatty() else None


def bar() -> str:
    """One cell of a bar that stdout's encoding has."""
    is_utf8 = sys.stdout.encoding.lower().replace("-", "") == "utf8"
    return "█" if is_utf8 else "#"


def write(text: str) -> None:
    """Write to stdout and flush: a reader sees each token. Ends quietly if there is none left."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        drop_output()
        sys.exit(BROKEN_PIPE)


def drop_output() -> None:
    """Let stdout lead nowhere: what is still buffered would raise again at the process's end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def note(text: str) -> None:
    """A line on stderr; on a terminal it is cut between words."""
    if sys.stderr.isatty():
        columns = shutil.get_terminal_size((WIDTH_WITHOUT_TERMINAL, 24)).columns
        text = "\n".join(folded(line, columns) for line in text.split("\n"))
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def report(error: PenstockError) -> int:
    """Print an error and its hint, or each of several; returns the exit code."""
    import logging  # most verbs have nothing to report

    from appliance import process

    to_journal = process.is_journal()
    for each in error.errors if isinstance(error, SeveralWrong) else (error,):
        note(process.lines(printable(each), logging.ERROR, to_journal=to_journal))
        if each.hint:
            hint = f"hint: {printable(each.hint)}"
            note(process.lines(hint, logging.ERROR, to_journal=True) if to_journal else hint)
    return error.exit_code


def _open_missing_streams() -> None:
    """Give the process the three streams that its starter may have closed.

    Without this the next file that is opened, a socket or the log, would be descriptor 1 or 2, and
    take what anyone prints.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            lowest_free = os.open(os.devnull, os.O_RDWR)  # which is `number`
            os.set_inheritable(lowest_free, True)  # the workers need theirs, too
    sys.stdin = sys.stdin or os.fdopen(0)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")


def _exit_on_signal(signum: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + signum)


# How far something is, on stderr: one line that changes, or a line now and then.
# Invariant: nothing of it is left on a terminal when it has ended.
# Never: writes to stdout.


PAUSE_S = 0.2
PAUSE_WITHOUT_TERMINAL_S = 10.0


class ProgressLine:
    """How far something is: text, or bytes done of a total and their rate.

    Args:
        verb: stands before bytes.
    """

    def __init__(self, verb: str = "") -> None:
        self._verb = verb
        self._is_terminal = sys.stderr.isatty()
        self._since_s = self._said_s = time.monotonic()
        self._is_shown = False

    def show(self, done_bytes: int, total_bytes: int, bytes_per_s: float) -> None:
        """Say how many bytes are done."""
        line = f"{self._verb} {size(done_bytes)} of {size(total_bytes)} at {size(bytes_per_s)}/s"
        if bytes_per_s > 0 and done_bytes < total_bytes:
            line += f", {duration((total_bytes - done_bytes) / bytes_per_s * 1000)} left"
        self.say(line)

    def say(self, text: str) -> None:
        """Say it, if it is long enough since something was said."""
        now_s = time.monotonic()
        if now_s - self._said_s < (PAUSE_S if self._is_terminal else PAUSE_WITHOUT_TERMINAL_S):
            return
        self._said_s = now_s
        self._is_shown = True
        sys.stderr.write(f"\r\x1b[K{text}" if self._is_terminal else f"{text}\n")
        sys.stderr.flush()

    def wait(self, text: str) -> None:
        """Say what is waited for, and since when."""
        self.say(f"{text}, {time.monotonic() - self._since_s:.0f} s")

    def end(self) -> None:
        """Clear the line for what comes next."""
        if self._is_terminal and self._is_shown:
            self._is_shown = False
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
