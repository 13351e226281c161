"""Stdout, stderr and the process around a verb, and how far something is.

Owns: everything that is printed, colour, signals, and the options that most verbs share; the line.
Invariant: stdout carries the answer alone; progress, notes and errors go to
stderr as `penstock: ...` and `hint: ...`.
Never: decides what an answer says.
"""

from __future__ import annotations

import io
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Annotated, NoReturn

import typer

from appliance.cli import tables
from appliance.cli.tables import Format, Listing, Row, TableColumn, printable
from appliance.client import Client
from appliance.configuration.address import Address, find
from appliance.frame.figures import duration, size
from engine.errors import PenstockError, SeveralWrong

BROKEN_PIPE = 141
WIDTH_WITHOUT_TERMINAL = 100

_told = set[str]()

Host = Annotated[
    str | None,
    typer.Option("--host", "-H", "--socket", help="Socket's path, http://... or ssh://..."),
]
Output = Annotated[Format, typer.Option("--output", "-o", help="How to print.")]


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
    return Client(address(host), timeout_s=timeout_s)


def address(host: str | None) -> Address:
    """Where the daemon is that the options and the environment name."""
    return find(host, warn=passed_over)


def passed_over(error: PenstockError) -> None:
    """Say once what is wrong in the config file, which concerns no client."""
    if str(error) not in _told:
        _told.add(str(error))
        note(f"penstock: warning: {printable(error)}")
        if error.hint:
            note(f"hint: {printable(error.hint)}")


def listing(verb: str, columns: tuple[TableColumn, ...], form: Format) -> Listing:
    """An empty list in a format, with colour where the terminal has it, fitted to its width."""
    return Listing(verb, columns, form, colour=has_colour(), room=room())


def show(verb: str, content: Row, form: Format, page: Callable[[], str]) -> None:
    """Print one thing: as its page for people, else in the format asked for."""
    write(page() + "\n" if form.is_for_people else tables.one(verb, content, form))


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
    return shutil.get_terminal_size((WIDTH_WITHOUT_TERMINAL, 24)).columns


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
        # What is still buffered would raise again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(BROKEN_PIPE)


def note(text: str) -> None:
    """A line on stderr; on a terminal it is cut between words."""
    if sys.stderr.isatty():
        columns = shutil.get_terminal_size((WIDTH_WITHOUT_TERMINAL, 24)).columns
        text = "\n".join(tables.folded(line, columns) for line in text.split("\n"))
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def report(error: PenstockError) -> int:
    """Print an error and its hint, or each of several; returns the exit code."""
    import logging  # most verbs have nothing to report

    from appliance import journal

    to_journal = journal.is_journal()
    for each in error.errors if isinstance(error, SeveralWrong) else (error,):
        note(journal.lines(printable(each), logging.ERROR, to_journal=to_journal))
        if each.hint:
            hint = f"hint: {printable(each.hint)}"
            note(journal.lines(hint, logging.ERROR, to_journal=True) if to_journal else hint)
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
    """Bytes done of a total, and their rate."""

    def __init__(self, verb: str) -> None:
        self._verb = verb
        self._is_terminal = sys.stderr.isatty()
        self._said_s = time.monotonic()

    def show(self, done_bytes: int, total_bytes: int, bytes_per_s: float) -> None:
        """Say it, if it is long enough since it was said."""
        now_s = time.monotonic()
        if now_s - self._said_s < (PAUSE_S if self._is_terminal else PAUSE_WITHOUT_TERMINAL_S):
            return
        self._said_s = now_s
        line = f"{self._verb} {size(done_bytes)} of {size(total_bytes)} at {size(bytes_per_s)}/s"
        if bytes_per_s > 0 and done_bytes < total_bytes:
            line += f", {duration((total_bytes - done_bytes) / bytes_per_s * 1000)} left"
        sys.stderr.write(f"\r\x1b[K{line}" if self._is_terminal else f"{line}\n")
        sys.stderr.flush()

    def end(self) -> None:
        """Clear the line for what comes next."""
        if self._is_terminal:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
