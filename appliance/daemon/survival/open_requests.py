"""Keep the requests that have no row yet in a file: what a killed daemon cannot log itself.

Invariant: a request is in the file before any of its reply is sent, and until the log has its row.
That it was answered is written as soon as its reply's last bytes are sent; its row is committed
later, with others. The file survives the daemon, not the machine: it is as durable as the log's
newest rows.
Never: holds a prompt's text; waits for a disk to sync; ends the daemon because a disk is full.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Iterable
from pathlib import Path

import msgspec

from appliance.daemon.requests.row import LogRow
from engine.system.own_files import open_own
from engine.wire.not_json import NOT_JSON

_LOG = logging.getLogger("penstock.request_log")
MIN_REWRITE_BYTES = 1 << 20
"""Minimum size for a rewrite, once half of its lines have a row."""
CUT = "the daemon ended before the reply did"


class OpenRequests:
    """The file of open requests of one daemon; usable from any thread."""

    def __init__(self, log_path: Path) -> None:
        """Read the file of the previous daemon; begin() starts a new one."""
        self.path = log_path.with_suffix(".open")
        self.answered, self.cut = _read(self.path)
        """Rows of requests that had none yet, as their clients have seen them end."""
        self._lines: dict[str, bytes] = {}
        """Lines of requests without a row, by id."""
        self._fd = -1
        self._num_bytes = self._rewrite_at = 0
        self.is_failing = False
        """Whether the disk refuses the newest lines."""
        self._lock = threading.Lock()

    def leave(self, rids: Iterable[str]) -> dict[str, LogRow]:
        """Keep requests open that were cut, since this daemon continues them; return their rows."""
        left = {row.rid: row for row in self.cut if row.rid in rids}
        self.cut = [row for row in self.cut if row.rid not in left]
        for rid, row in left.items():
            self._lines[rid] = _line(msgspec.structs.replace(row, finish_reason=None, error=None))
        return left

    def begin(self, *, has_rows: bool = True) -> None:
        """Start a new file.

        Args:
            has_rows: whether the previous daemon's requests are in the log, or have been noted.
        """
        with self._lock:
            if not has_rows:
                self._lines |= {row.rid: _line(row) for row in (*self.answered, *self.cut)}
            self._rewrite()

    def add(self, row: LogRow) -> None:
        """Write an accepted request; the write takes microseconds, into the page cache."""
        self._note(row)

    def end(self, row: LogRow) -> None:
        self._note(msgspec.structs.replace(row, prompt=None))

    def _note(self, row: LogRow) -> None:
        line = _line(row)
        with self._lock:
            self._lines[row.rid] = line
            is_due = self.is_failing or self._num_bytes > self._rewrite_at
            if not (is_due and self._rewrite()):
                self._write(line)

    def drop_recorded(self, rids: Iterable[str]) -> None:
        """Forget requests that have their rows; write the lines that the disk had refused."""
        with self._lock:
            had_some = bool(self._lines)
            for rid in rids:
                self._lines.pop(rid, None)
            if self.is_failing:
                self._rewrite()
            elif had_some and not self._lines and self._fd >= 0:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, 0)
                    self._num_bytes = 0

    def write_anew(self) -> None:
        """Write the file again: it may be gone, as the log beside it was."""
        with self._lock:
            self._rewrite()

    def close(self) -> None:
        """Remove the file, unless some of its requests could not be logged."""
        with self._lock:
            if self._fd < 0:
                return
            os.close(self._fd)
            self._fd, self.is_failing = -1, False
            if not self._lines:
                self.path.unlink(missing_ok=True)

    def _rewrite(self) -> bool:
        """Start a file with the requests without a row; False: the old one stays."""
        fresh = self.path.with_name(f"{self.path.name}.new")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        lines, fd = b"".join(self._lines.values()), -1
        try:
            fresh.unlink(missing_ok=True)
            fd = open_own(fresh, flags)
            _write_whole(fd, lines)
            os.replace(fresh, self.path)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            self._say_failing(error)
            return False
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._num_bytes, self.is_failing = fd, len(lines), False
        self._rewrite_at = max(MIN_REWRITE_BYTES, 2 * self._num_bytes)
        return True

    def _write(self, line: bytes) -> None:
        if self._fd < 0:
            return
        try:
            _write_whole(self._fd, line)
        except OSError as error:
            self._say_failing(error)
        else:
            self._num_bytes += len(line)

    def _say_failing(self, error: OSError) -> None:
        if not self.is_failing:
            what = "a crash now would lose the rows that the log lacks"
            _LOG.error("%s: cannot write, so that %s: %s", self.path, what, error.strerror)
        self.is_failing = True


def _write_whole(fd: int, lines: bytes) -> None:
    """Append lines; raises OSError if the disk has no room for all of them."""
    if os.write(fd, lines) < len(lines):
        os.write(fd, b"\n")  # the next line must not follow half a line
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _line(row: LogRow) -> bytes:
    return msgspec.json.encode(row) + b"\n"


def _content(path: Path) -> bytes:
    with open(open_own(path, os.O_RDONLY), "rb") as file:
        return file.read()


def _read(path: Path) -> tuple[list[LogRow], list[LogRow]]:
    """Read the rows of answered and of cut-off requests."""
    try:
        lines = _content(path).splitlines()
    except OSError:
        return [], []
    answered: dict[str, LogRow] = {}
    cut: dict[str, LogRow] = {}
    torn: list[tuple[int, Exception]] = []
    for number, line in enumerate(lines, 1):
        try:
            row = msgspec.json.decode(line, type=LogRow)
        except NOT_JSON as error:  # torn by a full disk, or another version's
            torn.append((number, error))
            continue
        if row.finish_reason is not None:
            answered[row.rid] = row
            cut.pop(row.rid, None)
            continue
        # A stream's status was sent at its acceptance; other clients saw no status.
        status = row.http_status if row.stream else 500
        cut[row.rid] = msgspec.structs.replace(
            row, http_status=status, finish_reason="error", error=CUT, completion_tokens=None
        )
    if torn:
        first, why = torn[0]
        _LOG.warning("%s:%d: the first of %d unreadable lines: %s", path, first, len(torn), why)
    return [*answered.values()], [*cut.values()]
