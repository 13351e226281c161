"""The request log: one SQLite row per accepted request, one thread that writes them.

Owns: the queue of what is to be written, and the daemon's one connection that writes.
Called by: the daemon, which opens it; service, which also reads through it.
Invariant: only the writer thread uses the connection once the run has started; what could not be
kept is counted in `rows_lost`; a file deleted under the daemon is made again with the next row.
Never: blocks the caller of record() or event(); stores prompt text unless asked to; ends the daemon
because a disk is full.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from appliance.log.file import abandon, file_id, open_log, remove_backups
from appliance.log.insert import (
    Event,
    boot_id,
    insert_events,
    insert_row,
    insert_run,
    update_energy,
)
from appliance.log.query import EventQuery, RowQuery, UsageQuery
from appliance.log.reader import read_events, read_row, read_rows, read_usage
from appliance.log.retention import Limits, Pruned, Upkeep
from appliance.log.row import LogRow, RowEnergy
from appliance.protocol import utc_now
from engine.errors import ConfigError, PenstockError, Unavailable

_LOG = logging.getLogger("penstock.request_log")

MAX_QUEUED_ROWS = 10_000
COMMIT_ROWS = 50
COMMIT_INTERVAL_S = 0.25
RETRY_INTERVAL_S = 1.0

_Query = TypeVar("_Query")
_Found = TypeVar("_Found")


class RequestLog:
    """The open log of one daemon. start_run() comes first, close() last; all else in any thread."""

    def __init__(self, path: Path, limits: Limits | None = None) -> None:
        self.path = path
        self._rows_lost = 0
        self._rows: deque[LogRow | RowEnergy] = deque()
        self._events: deque[Event] = deque()
        self._wake = threading.Condition()
        self._num_accepted = 0
        self._num_settled = 0
        self._is_hurried = False
        self._is_closing = False
        self._stop_reason: str | None = None
        self._run: dict[str, str | None] = {}
        self._run_id = 0
        self._is_failing = False
        self._limits = limits or Limits()
        self._upkeep = Upkeep(self._limits)
        self._connection = open_log(path)
        self._file_id = file_id(path)
        # A daemon thread: a disk that hangs may delay close(), but not the end of the process.
        self._writer = threading.Thread(target=self._write, name="request-log", daemon=True)

    @property
    def rows_lost(self) -> int:
        """Rows and events that will never be in the file."""
        return self._rows_lost

    def start_run(
        self, *, version: str, model: str, dtype: str, roles: str, transport: str | None
    ) -> int:
        """Record this start, and the crash of a run that never stopped; starts the writer.

        Raises:
            PenstockError: the file cannot be written.
        """
        self._run = {
            "boot_id": boot_id(),
            "started_at": utc_now(),
            "version": version,
            "model": model,
            "dtype": dtype,
            "roles": roles,
            "transport": transport,
        }
        try:
            self._run_id = insert_run(self._connection, self._run)
        except sqlite3.Error as error:
            raise PenstockError(f"cannot write: {error}", where=str(self.path)) from error
        self._writer.start()
        return self._run_id

    def set_limits(self, limits: Limits) -> None:
        """Keep to other limits from now on; what is beyond them goes at once."""
        with self._wake:
            self._limits = limits
            self._upkeep.set_limits(limits)
            self._wake.notify_all()

    def record(self, row: LogRow | RowEnergy) -> None:
        """Queue the one row of a request, or what completes it later; returns at once."""
        with self._wake:
            self._make_room()
            self._rows.append(row)
            self._num_accepted += 1
            self._wake.notify_all()

    def event(self, severity: str, code: str, message: str, actor: str | None = None) -> None:
        """Queue something an operator should know, and which peer caused it; returns at once."""
        with self._wake:
            self._make_room()
            self._events.append((utc_now(), severity, code, message, actor))
            self._num_accepted += 1
            self._wake.notify_all()

    def end_run(self, reason: str) -> None:
        """Say why the daemon stops (`clean`, `error`); close() writes it."""
        self._stop_reason = reason

    def flush(self, timeout_s: float = 1.0) -> bool:
        """Wait until what was queued before the call is in the file; False if it is not in time."""
        with self._wake:
            goal = self._num_accepted
            self._is_hurried = self._num_settled < goal
            self._wake.notify_all()
            return self._wake.wait_for(lambda: self._num_settled >= goal, timeout_s)

    def close(self, timeout_s: float = 5.0) -> bool:
        """Write what is left and stop the writer; False, and a log line, if rows are lost."""
        with self._wake:
            if self._is_closing:
                return True
            self._is_closing = True
            self._wake.notify_all()
        if self._writer.ident is None:
            self._connection.close()
            return True
        self._writer.join(timeout_s)
        num_left = self._num_accepted - self._num_settled
        if num_left:
            self._rows_lost += num_left
            _LOG.error("%s: %d rows were not written", self.path, num_left)
        return not (num_left or self._is_failing or self._writer.is_alive())

    def rows(self, query: RowQuery) -> list[dict[str, object]]:
        """Requests, also those just recorded; blocking, as all that reads. See log.reader.

        Raises:
            Unavailable: the file is gone or unreadable, or the query took too long.
        """
        return self._read(read_rows, query)

    def row(self, rid: str) -> dict[str, object] | None:
        """The row of one request; None if there is none. Raises as rows()."""
        return self._read(read_row, rid)

    def events(self, query: EventQuery) -> list[dict[str, object]]:
        """Events, also those just recorded; raises as rows()."""
        return self._read(read_events, query)

    def usage(self, query: UsageQuery) -> list[dict[str, object]]:
        """Sums by user, model or day; raises as rows()."""
        return self._read(read_usage, query)

    def _read(self, read: Callable[[Path, _Query], _Found], query: _Query) -> _Found:
        self.flush()
        try:
            return read(self.path, query)
        except PenstockError as error:
            advice = f"; {error.hint}" if error.hint else ""
            raise Unavailable(f"{error.what}{advice}", code="log_unreadable") from error

    def _make_room(self) -> None:
        if len(self._rows) + len(self._events) < MAX_QUEUED_ROWS:
            return
        (self._events or self._rows).popleft()
        self._rows_lost += 1
        self._num_settled += 1

    def _write(self) -> None:
        """The writer thread: batches until close(), each tried until it is in the file."""
        while self._wait_for_work():
            rows, events = self._take_batch()
            while (rows or events) and not self._commit(rows, events):
                if self._is_closing:
                    break
                self._wait_to_retry()
            if not self._is_closing:
                self._keep_up()
        if self._stop_reason and not self._is_failing:
            self._commit([], [], self._stop_reason)
        self._connection.close()

    def _wait_for_work(self) -> bool:
        """Sleep until a batch or a step of pruning is due; False when closing with nothing left."""
        with self._wake:
            self._wake.wait_for(
                lambda: self._is_closing or self._rows or self._events or not self._upkeep.due_in_s,
                self._upkeep.due_in_s,
            )
            if self._rows or self._events:
                self._wake.wait_for(
                    lambda: (
                        self._is_closing
                        or self._is_hurried
                        or len(self._rows) + len(self._events) >= COMMIT_ROWS
                    ),
                    COMMIT_INTERVAL_S,
                )
            return bool(self._rows or self._events) or not self._is_closing

    def _take_batch(self) -> tuple[list[LogRow | RowEnergy], list[Event]]:
        with self._wake:
            batch = list(self._rows), list(self._events)
            self._rows.clear()
            self._events.clear()
            self._is_hurried = False
            return batch

    def _wait_to_retry(self) -> None:
        with self._wake:
            self._wake.wait_for(lambda: self._is_closing, RETRY_INTERVAL_S)

    def _commit(
        self, rows: list[LogRow | RowEnergy], events: list[Event], stop_reason: str | None = None
    ) -> bool:
        """Write one batch in one transaction; False if the disk refused and it can be retried."""
        try:
            self._follow_file()
            with self._connection as db:
                num_refused = sum(not self._store(db, row) for row in rows)
                insert_events(db, self._run_id, events)
                if stop_reason:
                    db.execute(
                        "UPDATE runs SET stopped_at = ?, stop_reason = ? WHERE run_id = ?",
                        (utc_now(), stop_reason, self._run_id),
                    )
        except (sqlite3.Error, ConfigError) as error:
            if not self._is_failing:
                _LOG.error("%s: cannot write, will keep trying: %s", self.path, error)
            self._is_failing = True
            return False
        if self._is_failing:
            _LOG.warning("%s: writing again", self.path)
        self._is_failing = False
        with self._wake:
            self._rows_lost += num_refused
            self._num_settled += len(rows) + len(events)
            self._wake.notify_all()
        return True

    def _store(self, db: sqlite3.Connection, row: LogRow | RowEnergy) -> bool:
        """Insert a row or complete one; False if no retry would store it."""
        if isinstance(row, LogRow):
            return insert_row(db, self._run_id, row)
        update_energy(db, row)
        return True

    def _follow_file(self) -> None:
        """Write where readers look: to the file that is at the path now, or to a new one."""
        if file_id(self.path) == self._file_id:
            return
        self._upkeep.reset()
        abandon(self._connection)
        self._connection = open_log(self.path)
        self._run_id = insert_run(self._connection, self._run)
        self._file_id = file_id(self.path)
        self._say(
            "warning", "log.replaced", "the log file was deleted or replaced under the daemon"
        )

    def _keep_up(self) -> None:
        """One step of pruning, if it is due."""
        try:
            pruned = self._upkeep.step(self._connection)
        except sqlite3.Error as error:
            _LOG.warning("%s: not pruned, will try again in an hour: %s", self.path, error)
            return
        if pruned is None:
            return
        if self._limits.keep_days is not None:
            remove_backups(self.path, time.time() - self._limits.keep_days * 86_400)
        if pruned != Pruned():
            about = f"forgot {pruned.requests} requests and {pruned.events} events"
            self._say("info", "log.pruned", f"{about} beyond {self._limits.describe()}")

    def _say(self, severity: str, code: str, message: str) -> None:
        """An event of the log's own, also in the journal."""
        _LOG.log(logging.getLevelNamesMapping()[severity.upper()], "%s: %s", self.path, message)
        self.event(severity, code, message)
