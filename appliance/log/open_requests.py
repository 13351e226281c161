"""Requests that have no row yet, in a file: what a daemon that is killed cannot say any more.

Owns: the file beside the request log, a JSON line for each request from its acceptance to its row,
and another when it has been answered.
Invariant: a request is in the file before anything of its reply is sent, and until the log has its
row; that it was answered is there as soon as its reply's last bytes are on their way, while its row
waits for others to be committed with. The file survives the daemon, not the machine: it is as
durable as the last rows of the log.
Never: holds a prompt's text, or waits for a disk to sync; ends the daemon because a disk is full.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterable
from pathlib import Path

import msgspec

from appliance.log.row import LogRow

_LOG = logging.getLogger("penstock.request_log")

MIN_REWRITE_BYTES = 1 << 20
"""From here on the file is written anew once half of it speaks of requests that have their row."""
CUT = "the daemon ended before the reply did"


class OpenRequests:
    """The open file of one daemon; any thread."""

    def __init__(self, log_path: Path) -> None:
        """Read what the daemon before has left; begin() starts anew."""
        self.path = log_path.with_suffix(".open")
        self.answered, self.cut = _read(self.path)
        """Rows of requests that had none yet, as their clients have seen them end."""
        self._lines: dict[str, bytes] = {}
        """Of requests without a row, by id."""
        self._fd = -1
        self._num_bytes = self._rewrite_at = 0
        self._is_failing = False
        self._lock = threading.Lock()

    def begin(self) -> None:
        """What was left is in the log: forget it, and write from now on."""
        with self._lock:
            self._rewrite()

    def add(self, row: LogRow) -> None:
        """A request is accepted; the write goes to the page cache, some microseconds away."""
        self._note(row)

    def end(self, row: LogRow) -> None:
        """It has been answered, and this will be its row."""
        self._note(msgspec.structs.replace(row, prompt=None))

    def _note(self, row: LogRow) -> None:
        line = msgspec.json.encode(row) + b"\n"
        with self._lock:
            self._lines[row.rid] = line
            if self._num_bytes > self._rewrite_at:
                self._rewrite()
            else:
                self._write(line)

    def settle(self, rids: Iterable[str]) -> None:
        """These have their rows."""
        with self._lock:
            had_some = bool(self._lines)
            for rid in rids:
                self._lines.pop(rid, None)
            if had_some and not self._lines and self._fd >= 0:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, 0)
                    self._num_bytes = 0

    def close(self) -> None:
        """The file goes, unless it speaks of requests that could not be logged."""
        with self._lock:
            if self._fd < 0:
                return
            os.close(self._fd)
            self._fd = -1
            if not self._lines:
                self.path.unlink(missing_ok=True)

    def _rewrite(self) -> None:
        """Begin a file with those that have no row; the old one stays until that is there."""
        fresh = self.path.with_name(f"{self.path.name}.new")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        try:
            fd = os.open(fresh, flags, 0o600)
        except OSError as error:
            self._say_failing(error)
            return
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._num_bytes = fd, 0
        self._write(b"".join(self._lines.values()))
        self._rewrite_at = max(MIN_REWRITE_BYTES, 2 * self._num_bytes)
        os.replace(fresh, self.path)

    def _write(self, lines: bytes) -> None:
        if self._fd < 0:
            return
        try:
            num_written = os.write(self._fd, lines)
            if num_written < len(lines):  # the disk is full: the next line must not follow half one
                os.write(self._fd, b"\n")
        except OSError as error:
            self._say_failing(error)
        else:
            self._num_bytes += num_written
            self._is_failing = False

    def _say_failing(self, error: OSError) -> None:
        if not self._is_failing:
            what = "requests that are cut short by a crash will have no row"
            _LOG.error("%s: cannot write, so that %s: %s", self.path, what, error.strerror)
        self._is_failing = True


def _read(path: Path) -> tuple[list[LogRow], list[LogRow]]:
    """Rows of the requests that were answered, and of those that were cut."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return [], []
    answered: dict[str, LogRow] = {}
    cut: dict[str, LogRow] = {}
    for number, line in enumerate(lines, 1):
        try:
            row = msgspec.json.decode(line, type=LogRow)
        except msgspec.DecodeError as error:  # torn by a full disk, or another version's
            _LOG.warning("%s:%d: a request that was cut short is not read: %s", path, number, error)
            continue
        if row.finish_reason is not None:
            answered[row.rid] = row
            cut.pop(row.rid, None)
            continue
        # A stream's head has gone out with its acceptance; of the others nobody has seen a status.
        status = row.http_status if row.stream else 500
        cut[row.rid] = msgspec.structs.replace(
            row, http_status=status, finish_reason="error", error=CUT
        )
    return [*answered.values()], [*cut.values()]
