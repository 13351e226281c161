"""Print a verb's output: formats, progress, errors, signals.

Invariant: stdout carries the answer alone; progress, notes and errors go to stderr as `penstock:
...` and `hint: ...`.
"""

from __future__ import annotations

import inspect
import io
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer

from appliance.cli.tables import Format, Listing, Row, TableColumn, folded, one
from appliance.client.address import Address, find, is_of_this_machine
from appliance.client.calls import Client
from appliance.observe.frame.figures import duration, size
from engine.errors import FileError, PenstockError, SeveralWrong, UsageError
from engine.printable import printable

BROKEN_PIPE = 141
WIDTH_WITHOUT_TERMINAL = 100
WIDEST = 1000
"""Maximum columns to believe; COLUMNS may say anything."""

_told = set[str]()

Host = Annotated[
    str | None,
    typer.Option(
        "--host",
        "-H",
        "--socket",
        metavar="ADDRESS",
        help="Daemon to ask: socket path, http://... or ssh://...",
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
    """Make a client of the daemon named by the options and the environment."""
    where = address(host)
    said = f"penstock: no answer from {printable(where)} yet; still waiting, Ctrl-C stops"
    return Client(where, timeout_s=timeout_s, on_silence=lambda: note(said))


def address(host: str | None) -> Address:
    """Return the address of the daemon named by the options and the environment."""
    return find(host, warn=passed_over)


def of_this_machine() -> None:
    """Note that a verb shows this machine's files although another machine's daemon is named."""
    if os.environ.get("PENSTOCK_HOST") and not is_of_this_machine(named := address(None)):
        note(
            f"penstock: reading this machine's files, not the ones at {printable(named)} "
            "(PENSTOCK_HOST)"
        )
        note("hint: run it on that machine")


def needs_this_machine(what: str, hint: str, host: str | None = None) -> None:
    """Refuse a verb on this machine's files if another machine's daemon is named.

    Raises:
        UsageError: the options or PENSTOCK_HOST name another machine's daemon.
    """
    named = address(host)
    if not is_of_this_machine(named):
        problem = f"{what} is on this machine, the daemon on another"
        raise UsageError(problem, where=str(named), hint=hint)


def passed_over(error: PenstockError) -> None:
    """Report once a fault of the config file that concerns no client."""
    if str(error) not in _told:
        _told.add(str(error))
        note(f"penstock: warning: {printable(error)}")
        if error.hint:
            note(f"hint: {printable(error.hint)}")


def named_folder(path: str | Path) -> Path:
    """Return a folder named by the user, made absolute.

    Raises:
        FileError: it is missing, no folder, or not readable.
    """
    try:
        os.scandir(found := Path(path).expanduser().absolute()).close()
    except OSError as error:
        hint = "name an existing folder that you can read"
        raise FileError("cannot look there", error, where=str(path), hint=hint) from error
    return found


def listing(verb: str, columns: tuple[TableColumn, ...], form: Format) -> Listing:
    """Make an empty list in a format, coloured and fitted to the terminal."""
    return Listing(verb, columns, form, colour=has_colour(), room=room())


def show(verb: str, content: Row, form: Format, page: Callable[[], str]) -> None:
    """Print one thing: as its page for people, otherwise in the wanted format."""
    write(page() + "\n" if form.is_for_people else one(verb, content, form))


def has_colour() -> bool:
    """Say whether stdout is a terminal with colours."""
    return has_screen() and not os.environ.get("NO_COLOR")


def has_screen() -> bool:
    """Say whether stdout is a terminal with a movable cursor."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def width() -> int:
    """Return the terminal's columns, or a fixed number without one."""
    if not sys.stdout.isatty():
        return WIDTH_WITHOUT_TERMINAL
    return min(shutil.get_terminal_size((WIDTH_WITHOUT_TERMINAL, 24)).columns, WIDEST)


def room() -> int | None:
    """Return the terminal's columns; None: lines may have any length."""
    return width() if sys.stdout.isatty() else None


def bar() -> str:
    """Return one cell of a bar that stdout's encoding has."""
    is_utf8 = sys.stdout.encoding.lower().replace("-", "") == "utf8"
    return "█" if is_utf8 else "#"


def write(text: str) -> None:
    """Write to stdout and flush, so that a reader sees each token; exit quietly if it is closed."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        drop_output()
        sys.exit(BROKEN_PIPE)


def drop_output() -> None:
    """Discard further output: buffered data would raise again at the process's end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def note(text: str) -> None:
    """Print a line on stderr; on a terminal it is wrapped between words."""
    if sys.stderr.isatty():
        columns = shutil.get_terminal_size((WIDTH_WITHOUT_TERMINAL, 24)).columns
        text = "\n".join(folded(line, columns) for line in text.split("\n"))
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


_COMMAND = re.compile(r"(?<=[ `'])penstock(?= [a-z])")
"""The program's name before a verb."""


def report(error: PenstockError) -> int:
    """Print an error and its hint, or several; return the exit code."""
    import logging  # most verbs have nothing to report

    from appliance.daemon.process import log_lines

    to_journal, command = log_lines.is_journal(), log_lines.own_command()
    for each in error.errors if isinstance(error, SeveralWrong) else (error,):
        note(log_lines.lines(printable(each), logging.ERROR, to_journal=to_journal))
        if each.hint:
            # where penstock is not on PATH, a command is shown as it must be typed
            hint = _COMMAND.sub(lambda _: command, f"hint: {printable(each.hint)}")
            note(log_lines.lines(hint, logging.ERROR, to_journal=True) if to_journal else hint)
    return error.exit_code


def _open_missing_streams() -> None:
    """Open the three standard streams that the parent process may have closed.

    Otherwise the next opened file, a socket or the log, would become descriptor 1 or 2, and receive
    all printed text.
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


_BAR_CELLS = 24
PAUSE_S = 0.2
PAUSE_WITHOUT_TERMINAL_S = 10.0


class ProgressLine:
    """Show progress: text, or bytes done of a total and their rate."""

    def __init__(self, verb: str = "") -> None:
        self._verb = verb
        self._is_terminal = sys.stderr.isatty()
        self._since_s = self._said_s = time.monotonic()
        self._is_shown = False

    def show(self, done_bytes: int, total_bytes: int, bytes_per_s: float) -> None:
        """Show how many bytes are done."""
        line = f"{self._verb} {size(done_bytes)} of {size(total_bytes)} at {size(bytes_per_s)}/s"
        if bytes_per_s > 0 and done_bytes < total_bytes:
            line += f", {duration((total_bytes - done_bytes) / bytes_per_s * 1000)} left"
        self.say(line)

    def share(self, num_done: int, num_all: int, noun: str, elapsed_s: float) -> None:
        """Show how many things are done, as a bar where there is a terminal."""
        line = f"{num_done:,} of {num_all:,} {noun}"
        if self._is_terminal:
            cells = _BAR_CELLS * num_done // num_all
            line = f"[{'#' * cells}{'.' * (_BAR_CELLS - cells)}] {line}"
        if num_done:
            left_ms = (num_all - num_done) / num_done * elapsed_s * 1000
            line += f", {num_done / elapsed_s:,.0f}/s, {duration(left_ms)} left"
        self.say(line)

    def say(self, text: str) -> None:
        """Show a text, if the last one is old enough."""
        now_s = time.monotonic()
        if now_s - self._said_s < (PAUSE_S if self._is_terminal else PAUSE_WITHOUT_TERMINAL_S):
            return
        self._said_s = now_s
        self._is_shown = True
        sys.stderr.write(f"\r\x1b[K{text}" if self._is_terminal else f"{text}\n")
        sys.stderr.flush()

    def wait(self, text: str) -> None:
        """Show what is waited for, and since when."""
        self.say(f"penstock: {text}, {time.monotonic() - self._since_s:.0f} s")

    def end(self) -> None:
        """Clear the line for what comes next."""
        if self._is_terminal and self._is_shown:
            self._is_shown = False
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
