"""Write the daemon's lines on stderr, for people or for the journal.

Invariant: a line has systemd's `<N>` in front only where the journal itself reads stderr, and then
each line of a message of several has it.
"""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from engine.printable import printable

_ERROR, _WARNING, _INFO, _DEBUG = 3, 4, 6, 7
"""Priorities of syslog(3)."""
PREFIX = "penstock: "
"""Begins a line where there is no journal, which names the unit by itself."""


def own_command() -> str:
    """Return what starts this program in a shell: its path, where it is not on PATH."""
    program = Path(sys.argv[0])
    is_hidden = program.name == "penstock" and not shutil.which("penstock")
    return shlex.quote(str(program)) if is_hidden else "penstock"


def is_journal(fd: int = 2, environ: Mapping[str, str] = os.environ) -> bool:
    """Say whether the journal reads this descriptor.

    systemd names its stream by device and inode; a redirected stderr is another file.
    """
    try:
        found = os.fstat(fd)
    except OSError:
        return False
    return environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


def lines(text: str, level: int, *, to_journal: bool) -> str:
    """Format a message for stderr; whatever it quotes, it moves no cursor and forges no line."""
    each = [printable(line) for line in text.replace("\t", "    ").split("\n")]
    if not to_journal:
        return PREFIX + "\n    ".join(each)
    mark = f"<{_priority(level)}>"
    return "\n".join(mark + line for line in each)


class Formatter(logging.Formatter):
    """Records of logging as lines on stderr."""

    def __init__(self) -> None:
        super().__init__("%(message)s")
        self._to_journal = is_journal()

    def format(self, record: logging.LogRecord) -> str:
        return lines(super().format(record), record.levelno, to_journal=self._to_journal)


def _priority(level: int) -> int:
    if level >= logging.ERROR:
        return _ERROR
    if level >= logging.WARNING:
        return _WARNING
    return _INFO if level >= logging.INFO else _DEBUG


def has_terminal() -> bool:
    """Say whether the process has a controlling terminal that still exists."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True
