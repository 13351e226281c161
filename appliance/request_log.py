"""The request log: one SQLite row per accepted request, one thread that writes them.

Owns: the database file. Called by: the daemon, which also reads through it.
Invariant: one connection writes, and only its thread uses it once the run has started; what could
not be kept is counted in `rows_lost`.
Never: blocks the caller of record() or event(); stores prompt text unless asked to; ends the daemon
because a disk is full.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
from collections import deque
from contextlib import closing
from pathlib import Path

from sqlite_utils import Database

from appliance.log_reader import BUSY_TIMEOUT_MS, read_row, read_tail
from appliance.log_row import LogRow
from appliance.protocol import utc_now
from engine.errors import ConfigError, PenstockError
from migrations.request_log import migration

_LOG = logging.getLogger("penstock.request_log")

MAX_QUEUED_ROWS = 10_000
COMMIT_ROWS = 50
COMMIT_INTERVAL_S = 0.25
RETRY_INTERVAL_S = 1.0
_APPLICATION_ID = 0x50454E53  # "PENS", for file(1)

_Event = tuple[str, str, str, str]
"""At, severity, code, message."""


class RequestLog:
    """The open log of one daemon. start_run() comes first, close() last; all else in any thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_write_errors = 0
        """Commits that failed; each is tried again with its rows."""
        self._rows_lost = 0
        self._rows: deque[LogRow] = deque()
        self._events: deque[_Event] = deque()
        self._wake = threading.Condition()
        self._num_accepted = 0
        self._num_settled = 0
        self._is_hurried = False
        self._is_closing = False
        self._stop_reason: str | None = None
        self._run_id = 0
        self._is_failing = False
        self._connection = _open(path)
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
        now = utc_now()
        try:
            with self._connection as db:
                db.execute(
                    "UPDATE runs SET stopped_at = ?, stop_reason = 'crash'"
                    " WHERE stopped_at IS NULL",
                    (now,),
                )
                started = db.execute(
                    "INSERT INTO runs"
                    " (boot_id, started_at, version, model, dtype, roles, transport)"
                    " VALUES (?, ?, ?, ?, ?, ?, ?)",
                    (_boot_id(), now, version, model, dtype, roles, transport),
                )
        except sqlite3.Error as error:
            raise PenstockError(f"cannot write: {error}", where=str(self.path)) from error
        self._run_id = started.lastrowid or 0
        self._writer.start()
        return self._run_id

    def record(self, row: LogRow) -> None:
        """Queue the one row of a request; returns at once."""
        with self._wake:
            self._make_room()
            self._rows.append(row)
            self._num_accepted += 1
            self._wake.notify_all()

    def event(self, severity: str, code: str, message: str) -> None:
        """Queue something an operator should know; returns at once."""
        with self._wake:
            self._make_room()
            self._events.append((utc_now(), severity, code, message))
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

    def tail(self, limit: int) -> list[dict[str, object]]:
        """The newest rows of v_requests, newest first, including those just recorded."""
        self.flush()
        return read_tail(self.path, limit)

    def find(self, rid: str) -> dict[str, object] | None:
        """The row of one request; None if there is none."""
        self.flush()
        return read_row(self.path, rid)

    def _make_room(self) -> None:
        if len(self._rows) + len(self._events) < MAX_QUEUED_ROWS:
            return
        (self._events or self._rows).popleft()
        self._rows_lost += 1
        self._num_settled += 1

    def _write(self) -> None:
        """The writer thread: batches until close(), each tried until it is in the file."""
        with closing(self._connection):
            while self._wait_for_batch():
                rows, events = self._take_batch()
                while not self._commit(rows, events):
                    if self._is_closing:
                        return
                    self._wait_to_retry()
            if self._stop_reason:
                self._commit([], [], self._stop_reason)

    def _wait_for_batch(self) -> bool:
        """Sleep until a batch is due; False when closing with nothing left to write."""
        with self._wake:
            self._wake.wait_for(lambda: self._is_closing or self._rows or self._events)
            self._wake.wait_for(
                lambda: (
                    self._is_closing
                    or self._is_hurried
                    or len(self._rows) + len(self._events) >= COMMIT_ROWS
                ),
                COMMIT_INTERVAL_S,
            )
            return bool(self._rows or self._events)

    def _take_batch(self) -> tuple[list[LogRow], list[_Event]]:
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
        self, rows: list[LogRow], events: list[_Event], stop_reason: str | None = None
    ) -> bool:
        """Write one batch in one transaction; False if the disk refused and it can be retried."""
        try:
            with self._connection as db:
                num_refused = sum(not _insert_row(db, self._run_id, row) for row in rows)
                _insert_events(db, self._run_id, events)
                if stop_reason:
                    db.execute(
                        "UPDATE runs SET stopped_at = ?, stop_reason = ? WHERE run_id = ?",
                        (utc_now(), stop_reason, self._run_id),
                    )
        except sqlite3.DatabaseError as error:
            self.num_write_errors += 1
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


def _insert_row(db: sqlite3.Connection, run_id: int, row: LogRow) -> bool:
    columns = {name: _storable(getattr(row, name)) for name in row.__struct_fields__}
    prompt = columns.pop("prompt")
    columns["run_id"] = run_id
    names, marks = ", ".join(columns), ", ".join(f":{name}" for name in columns)
    try:
        inserted = db.execute(f"INSERT INTO requests ({names}) VALUES ({marks})", columns)
    except (sqlite3.IntegrityError, sqlite3.ProgrammingError, OverflowError) as error:
        # Trying this row again would hold up all that follow it.
        _LOG.error("request %s is not logged: %s", row.rid, error)
        return False
    if prompt is not None:
        db.execute("INSERT INTO request_text VALUES (?, ?)", (inserted.lastrowid, prompt))
    return True


def _insert_events(db: sqlite3.Connection, run_id: int, events: list[_Event]) -> None:
    db.executemany(
        "INSERT INTO events (run_id, at, severity, code, message) VALUES (?, ?, ?, ?, ?)",
        [(run_id, *map(_storable, event)) for event in events],
    )


def _storable(value: object) -> object:
    """Half of a surrogate pair, which JSON can carry and UTF-8 cannot, becomes a question mark."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def _open(path: Path) -> sqlite3.Connection:
    """Open for writing, at the newest schema; a new file is 0640.

    Raises:
        ConfigError: the file cannot be opened, is no request log, or is a newer Penstock's.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640))
        connection = sqlite3.connect(path, check_same_thread=False)
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(
            f"cannot open the request log: {error}",
            where=str(path),
            hint="choose a folder you may write to with --state-dir",
        ) from error
    try:
        # auto_vacuum must come first: it cannot change once the file has a page.
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA journal_size_limit = 67108864")
        connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
        _migrate(Database(connection, execute_plugins=False), path)
    except sqlite3.Error as error:
        connection.close()
        raise ConfigError(f"cannot use the request log: {error}", where=str(path)) from error
    except ConfigError:
        connection.close()
        raise
    return connection


def _migrate(db: Database, path: Path) -> None:
    """Apply what is missing; an older file is copied beside itself first."""
    pending = [step.name for step in migration.pending(db)]
    applied = {step.name for step in migration.applied(db)}
    # Pending on an empty database is every step that this version knows.
    with closing(sqlite3.connect(":memory:")) as empty:
        known = {step.name for step in migration.pending(Database(empty, execute_plugins=False))}
    if applied - known:
        raise ConfigError(
            f"written by a newer Penstock (schema {max(applied - known)})",
            where=str(path),
            hint="upgrade Penstock, or choose another folder with --state-dir",
        )
    if applied and pending:
        backup = path.with_name(f"{path.name}.before-{pending[0]}")
        backup.unlink(missing_ok=True)
        os.close(os.open(backup, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o640))
        db.conn.execute("VACUUM INTO ?", (str(backup),))
    migration.apply(db)


def _boot_id() -> str | None:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
