"""Run the console over a daemon or a recording: `python -m tui`.

Invariant: only plain text goes to an incapable terminal.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import os
import shutil
import sys
import termios
from collections.abc import Mapping, Sequence
from pathlib import Path

from tui import plain
from tui.feed import FeedLost
from tui.lines import clean

EXIT_UNWRITABLE = 1
EXIT_DAMAGED = 8
EXIT_INTERRUPTED = 130
EXIT_PIPE_CLOSED = 141
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of a full disk."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the console; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="penstock top",
        usage="%(prog)s [OPTIONS]",  # the command finds the socket
        description="Live console of Penstock.",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--socket", metavar="PATH", help="the daemon's Unix socket")
    source.add_argument("--replay", metavar="FILE", type=Path, help="a recording")
    parser.add_argument("--at", metavar="TIME", default="", help="start of the replay")
    parser.add_argument("--once", action="store_true", help="print one reading as text and exit")
    parser.add_argument("--json", action="store_true", help="with --once: the frame as JSON")
    parser.add_argument("--plain", action="store_true", help="print lines, as into a pipe")
    parser.add_argument(
        "--read-only", action="store_true", help="read-only: hide all keys that change anything"
    )
    parser.add_argument("--ascii", action="store_true", help="draw with ASCII characters only")
    parser.add_argument("--no-mouse", action="store_true", help="leave the mouse to the terminal")
    options = parser.parse_args(argv)
    if options.json and not options.once:
        parser.error("--json needs --once")
    is_ascii = options.ascii or not can_draw_blocks(os.environ)
    try:
        if options.replay is not None:
            return _replay(options, is_ascii=is_ascii)
        if options.json:
            asyncio.run(plain.print_json(options.socket))
        elif options.once:
            asyncio.run(plain.print_once(options.socket, _width(), is_ascii=is_ascii))
        elif options.plain or not has_terminal():
            asyncio.run(plain.print_lines(options.socket, is_ascii=is_ascii))
        else:
            return _run_console(options, is_ascii=is_ascii)
        return 0
    except FeedLost as error:
        return plain.told(error)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return EXIT_PIPE_CLOSED
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        _drop_output()
        sys.stderr.write(f"penstock: cannot write: {error.strerror}\n")
        return EXIT_UNWRITABLE


def _drop_output() -> None:
    """Discard further output: the interpreter flushes stdout once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run_console(options: argparse.Namespace, *, is_ascii: bool) -> int:
    from tui.app import Console  # 0.15 s, which plain text does not need

    console = Console(options.socket, is_ascii=is_ascii, is_read_only=options.read_only)
    _set_missing_size()
    sys.stderr.write("\r\x1b[2K")  # `penstock top` has said that it starts
    sys.stderr.flush()
    console.run(mouse=not options.no_mouse)
    return console.return_code or 0


def _replay(options: argparse.Namespace, *, is_ascii: bool) -> int:
    """Show a recording: the console, one page, or a line for each of its frames."""
    from appliance.observe.frame.recording import (
        RecordingError,  # sqlite, which a live console does not need
    )
    from tui.replay import open_at

    try:
        replay, playback = open_at(options.replay, options.at)
        if options.once and not options.at:
            playback = playback.seek(playback.moments_ms[-1])
        view = replay.view_at(playback.index)
        if options.json or options.once:
            if view.link.why:
                sys.stderr.write(f"penstock: {view.link.why}\n")
            if not options.json:
                plain.print_page(view, _width(), is_ascii=is_ascii)
            elif view.frame is not None:
                plain.print_frame(view.frame)
            return EXIT_DAMAGED if view.link.why else 0
        if options.plain or not has_terminal():
            plain.print_views(replay.views(playback.index), is_ascii=is_ascii)
            return 0
    except RecordingError as error:
        hint = f"hint: {error.hint}\n" if error.hint else ""
        sys.stderr.write(f"penstock: {clean(str(error))}\n{hint}")
        return error.exit_code
    from tui.replay_console import ReplayConsole

    playback = playback if options.at else replay.opening
    console = ReplayConsole(replay, playback, is_ascii=is_ascii)
    _set_missing_size()
    console.run(mouse=not options.no_mouse)
    return console.return_code or 0


def _set_missing_size() -> None:
    """Make a terminal that reports no rows or columns, or absurdly many, one of 80x24.

    Serial ones do. Textual and Rich assume different sizes for it, and would redraw without end.
    """
    terminal = sys.__stdout__.fileno() if sys.__stdout__ else -1
    with contextlib.suppress(OSError, termios.error):  # no terminal
        rows, columns = termios.tcgetwinsize(terminal)
        size = (rows if 0 < rows <= _WIDEST else 24, columns if 0 < columns <= _WIDEST else 80)
        if size != (rows, columns):
            termios.tcsetwinsize(terminal, size)


_WIDEST = 1000


def _width() -> int:
    """Return the columns to print in; COLUMNS may say anything, and lines are filled up to it."""
    return min(shutil.get_terminal_size((100, 24)).columns, _WIDEST)


def has_terminal() -> bool:
    """Say whether a console can be drawn; Textual draws on stderr, so it must be a tty, too."""
    is_dumb = os.environ.get("TERM", "dumb") == "dumb"
    return not is_dumb and sys.stdout.isatty() and sys.stderr.isatty()


def can_draw_blocks(environ: Mapping[str, str]) -> bool:
    """Say whether block characters can be drawn: not without UTF-8, nor on the kernel's console.

    Python itself turns an unset or C locale into LC_CTYPE=C.UTF-8 before this can look, so LANG
    decides over that value. Containers often have no locale, but terminals with UTF-8.
    """
    if environ.get("TERM") == "linux":
        return False
    names = [environ.get("LC_ALL"), environ.get("LC_CTYPE"), environ.get("LANG")]
    if not names[0] and names[1] == "C.UTF-8":
        names[1] = None
    chosen = next((name for name in names if name), "UTF-8")
    return chosen.replace("-", "").lower().endswith("utf8")


if __name__ == "__main__":
    sys.exit(main())
