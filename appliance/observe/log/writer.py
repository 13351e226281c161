"""Write the request log from one thread: a row per request, events, frames.

Invariant: an accepted request gets one row; only the writer thread uses the connection once the run
has started; lost rows and frames are counted in `rows_lost` and `frames_lost`; a file that was
deleted is made again with the next row; one that stays damaged is kept under another name, and a
new one made.
Never: blocks the caller of record(), event() or frame(); changes an existing row, except to
complete its energy; stores prompt text unless asked to; ends the daemon because a disk is full.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import IO, TypeVar

from appliance.daemon.requests.row import LogRow, RefusalRow, RowEnergy
from appliance.daemon.survival.open_requests import OpenRequests
from appliance.observe.frame.late_frames import UnwrittenFrame
from appliance.observe.frame.protocol import MAX_FRAME_EVENTS, EventFrame, Frame, utc_now
from appliance.observe.frame.recording import gauges
from appliance.observe.log.frame_rows import Recorder
from appliance.observe.log.log_file import (
    abandon,
    file_id,
    open_log,
    remove_backups,
    set_aside,
    write_error,
)
from appliance.observe.log.query import EventQuery, RowQuery, Span, UsageQuery
from appliance.observe.log.reader import (
    SQLITE_ERRORS,
    DamagedLog,
    DiskRefuses,
    read_events,
    read_row,
    read_rows,
    read_usage,
)
from appliance.observe.log.recording_copy import remove_unfinished, temporary_recording
from appliance.observe.log.retention import RetentionLimits, Upkeep
from appliance.observe.log.statements import (
    Crash,
    Event,
    boot_id,
    end_crashed_run,
    insert_events,
    insert_refusals,
    insert_row,
    insert_run,
    update_energy,
)
from engine.errors import FileError, PenstockError, RequestError, Unavailable
from engine.system.threads import start

_LOG = logging.getLogger("penstock.request_log")

MAX_QUEUED_ROWS = 10_000
MAX_QUEUED_FRAMES = 600
COMMIT_ROWS = 50
COMMIT_FRAMES = 5
"""Frames per transaction; a row or an event takes waiting frames along."""
COMMIT_INTERVAL_S = 0.25
RETRY_INTERVAL_S = 1.0
DAMAGED_WRITES, DAMAGED_PRUNES = 30, 2
"""How many in a row find the file damaged before it is set aside: to SQLite a disk that cannot be
read for a while looks alike."""

_Query = TypeVar("_Query")
_Found = TypeVar("_Found")


@dataclass(slots=True)
class _Batch:
    """Unwritten rows, events and frames for one transaction."""

    rows: deque[LogRow | RowEnergy | RefusalRow] = field(default_factory=deque)
    events: deque[Event] = field(default_factory=deque)
    frames: deque[Frame] = field(default_factory=deque)

    def __len__(self) -> int:
        return self.num_rows + len(self.frames)

    @property
    def num_rows(self) -> int:
        return len(self.rows) + len(self.events)


class RequestLog:
    """The open log of one daemon; call start_run() first, close() last, others in any thread."""

    def __init__(self, path: Path, limits: RetentionLimits | None = None) -> None:
        self.path = path
        self._rows_lost = 0
        self._frames_lost = 0
        self._queued = _Batch()
        self._in_hand = _Batch()
        self._recorder = Recorder()
        self._wake = threading.Condition()
        self._num_accepted = 0
        self._num_settled = 0
        self._is_hurried = False
        self._is_closing = False
        self._stop_reason: str | None = None
        self._run: dict[str, str | None] = {}
        self._run_id = 0
        self._killed_by = ""
        self._failing = ""
        """Why the file cannot be written; empty: it can."""
        self._num_unwritten = 0
        self._num_damaged_writes = self._num_damaged_prunes = 0
        self._is_doubted = False
        """Whether the file is opened anew, because what was read of it is damaged."""
        self._limits = limits or RetentionLimits()
        self._upkeep = Upkeep(self._limits)
        self.said: deque[EventFrame] = deque(maxlen=MAX_FRAME_EVENTS)
        """The log's own events, the oldest first, for frames."""
        self._open = OpenRequests(path)
        self.crash: Crash | None = None
        """The previous daemon's crash, if any; set by start_run()."""
        try:
            self._connection = open_log(path)
        except DamagedLog as error:
            self._set_aside(error)
            self._connection = open_log(path)
        except DiskRefuses as error:
            self._connection = self._without_file(error)
        remove_unfinished(path)
        self._file_id = None if self._failing else file_id(path)
        # A daemon thread: a disk that hangs may delay close(), but not the end of the process.
        self._writer = threading.Thread(target=self._write, name="request-log", daemon=True)

    @property
    def rows_lost(self) -> int:
        """Rows and events that will never be in the file."""
        return self._rows_lost

    @property
    def frames_lost(self) -> int:
        return self._frames_lost

    @property
    def unwritten(self) -> UnwrittenFrame | None:
        """What the file lacks; None: it can be written."""
        if not (reason := self._failing):
            return None
        return UnwrittenFrame(
            reason, self._num_unwritten, str(self.path.parent), self._open.is_failing
        )

    def start_run(
        self,
        *,
        version: str,
        model: str,
        dtype: str,
        roles: str,
        transport: str | None,
        killed_by: str = "",
    ) -> int:
        """Record this start, end an unended run before it, and start the writer.

        Requests that were open then get their rows. All this waits while the disk takes no writes.

        Args:
            killed_by: the signal that ended the previous daemon; empty: unknown.

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
        self._killed_by = killed_by
        try:
            if not self._failing:
                self._begin_run()
        except DamagedLog as error:
            abandon(self._connection)
            self._set_aside(error)
            self._connection = open_log(self.path)
            self._file_id, self._killed_by = file_id(self.path), ""
            self._begin_run()
        except DiskRefuses as error:
            abandon(self._connection)
            self._connection, self._file_id = self._without_file(error), None
        self._open.begin(has_rows=not self._failing)
        start(self._writer)
        return self._run_id

    def _without_file(self, error: DiskRefuses) -> sqlite3.Connection:
        """Begin without a file; rows wait until the disk takes it."""
        self._say_failing(error)
        return sqlite3.connect(":memory:", check_same_thread=False)

    def _begin_run(self) -> None:
        """Record the previous run's end if missing, and begin this one."""
        left = (self._open.answered, self._open.cut)
        try:
            with self._connection as db:
                is_first = db.execute("SELECT 1 FROM runs").fetchone() is None
                self.crash = end_crashed_run(db, *left, self._killed_by)
            self._run_id = insert_run(self._connection, self._run)
        except SQLITE_ERRORS as error:
            raise write_error("cannot write the request log", error, self.path) from error
        if is_first:  # the log of the run that these are of was damaged, or taken away
            for row in chain(*left):
                self.record(row)
        else:
            self._open.drop_recorded(row.rid for row in chain(*left))

    def set_limits(self, limits: RetentionLimits) -> None:
        """Apply other limits from now on; the excess is deleted at once."""
        with self._wake:
            self._limits = limits
            self._upkeep.set_limits(limits)
            self._wake.notify_all()

    def leave_open(self, rids: set[str]) -> tuple[set[str], dict[str, LogRow]]:
        """Leave a dead daemon's requests open that this one continues; call it before start_run().

        Returns:
            The ids of answered requests; and the rows of the others, for record() if they do not
            continue.
        """
        return {row.rid for row in self._open.answered} & rids, self._open.leave(rids)

    def opened(self, row: LogRow) -> None:
        """Note an accepted request, so that a crash leaves a row."""
        self._open.add(row)

    def record(self, row: LogRow | RowEnergy | RefusalRow) -> None:
        """Queue a request's row, its later completion, or refusals; returns at once."""
        if isinstance(row, LogRow):
            self._open.end(row)
        with self._wake:
            self._make_room()
            self._queued.rows.append(row)
            self._num_accepted += 1
            self._num_unwritten += isinstance(row, LogRow)
            self._wake.notify_all()

    def event(
        self,
        severity: str,
        code: str,
        message: str,
        actor: str | None = None,
        *,
        at: str | None = None,
    ) -> None:
        """Queue an event for operators, with the peer that caused it; returns at once.

        Args:
            severity: `info`, `warning` or `error`.
            code: stable and dotted.
            actor: the peer; None: none.
            at: the time of an event reported elsewhere; None: now.
        """
        with self._wake:
            self._make_room()
            self._queued.events.append((at or utc_now(), severity, code, message, actor))
            self._num_accepted += 1
            self._wake.notify_all()

    def frame(self, frame: Frame) -> None:
        """Queue a reading for recordings, without its requests and events; returns at once."""
        with self._wake:
            frames = self._queued.frames
            if len(frames) == MAX_QUEUED_FRAMES:
                frames.popleft()
                self._frames_lost += 1
                self._num_settled += 1
            frames.append(gauges(frame))
            self._num_accepted += 1
            if len(frames) >= COMMIT_FRAMES:
                self._wake.notify_all()

    def end_run(self, reason: str) -> None:
        """Record why the daemon stops (`clean`, `error`); close() writes it."""
        self._stop_reason = reason

    def flush(self, timeout_s: float = 1.0) -> bool:
        """Wait until everything queued so far is written; False: a timeout."""
        with self._wake:
            goal = self._num_accepted
            self._is_hurried = self._num_settled < goal
            self._wake.notify_all()
            return self._wake.wait_for(lambda: self._num_settled >= goal, timeout_s)

    def close(self, timeout_s: float = 5.0) -> bool:
        """Write the rest and stop the writer; False and a log line if rows are lost."""
        with self._wake:
            if self._is_closing:
                return True
            self._is_closing = True
            self._wake.notify_all()
        if self._writer.ident is None:
            self._connection.close()
            return True
        self._writer.join(timeout_s)
        with self._wake:
            left = (self._queued, self._in_hand)
            num_left = sum(batch.num_rows for batch in left)
            self._rows_lost += num_left
            self._frames_lost += sum(len(batch.frames) for batch in left)
        if num_left:
            _LOG.error("%s: %d rows were not written", self.path, num_left)
        return not (num_left or self._failing or self._writer.is_alive())

    def rows(self, query: RowQuery) -> list[dict[str, object]]:
        """Read requests, including the ones just recorded; blocking. See log.query.

        Raises:
            Unavailable: the file is gone or unreadable, or the query took too long.
        """
        return self._read(read_rows, query)

    def row(self, rid: str) -> dict[str, object] | None:
        """Read the row of one request; None: no such row. Raises as rows()."""
        return self._read(read_row, rid)

    def events(self, query: EventQuery) -> list[dict[str, object]]:
        """Read events, including the ones just recorded; raises as rows()."""
        return self._read(read_events, query)

    def usage(self, query: UsageQuery) -> list[dict[str, object]]:
        """Add up requests by user, model or day; raises as rows()."""
        return self._read(read_usage, query)

    def recording(self, span: Span) -> IO[bytes]:
        """Open a recording of a span as a file without a name; raises as rows().

        Raises:
            RequestError: 404: nothing was recorded then.
        """
        return self._read(temporary_recording, span)

    def _read(self, read: Callable[[Path, _Query], _Found], query: _Query) -> _Found:
        self.flush()
        try:
            return read(self.path, query)
        except RequestError:
            raise
        except PenstockError as error:
            advice = f"; {error.hint}" if error.hint else ""
            raise Unavailable(f"{error.what}{advice}", code="log_unreadable") from error

    def _make_room(self) -> None:
        if self._queued.num_rows < MAX_QUEUED_ROWS:
            return
        (self._queued.events or self._queued.rows).popleft()
        self._rows_lost += 1
        self._num_settled += 1

    def _write(self) -> None:
        """Run the writer thread: write batches until close(), retrying each."""
        while self._wait_for_work():
            try:
                self._take_batch()
                is_written = not self._in_hand or self._commit(self._in_hand)
                if is_written and not self._is_closing:
                    self._keep_up()
            except MemoryError:
                is_written = False
            if not is_written:  # the batch stays in hand
                if self._is_closing:
                    break
                self._wait_to_retry()
        if self._stop_reason and not self._failing:
            self._commit(_Batch(), self._stop_reason)
        self._connection.close()
        self._open.close()

    def _wait_for_work(self) -> bool:
        """Sleep until a batch or a step of pruning is due; False when closing with nothing left."""
        with self._wake:
            self._wake.wait_for(
                lambda: self._is_closing or self._has_batch or not self._upkeep.due_in_s,
                self._upkeep.due_in_s,
            )
            if self._queued.num_rows:
                self._wake.wait_for(
                    lambda: (
                        self._is_closing or self._is_hurried or self._queued.num_rows >= COMMIT_ROWS
                    ),
                    COMMIT_INTERVAL_S,
                )
            return bool(self._queued or self._in_hand) or not self._is_closing

    @property
    def _has_batch(self) -> bool:
        """Say whether something should be written now; frames alone may wait for more."""
        queued = self._queued
        is_due = self._in_hand or queued.num_rows or len(queued.frames) >= COMMIT_FRAMES
        return bool(is_due or (self._is_hurried and queued))

    def _take_batch(self) -> None:
        with self._wake:
            if not self._in_hand:
                self._in_hand, self._queued = self._queued, _Batch()
            self._is_hurried = False

    def _wait_to_retry(self) -> None:
        with self._wake:
            self._wake.wait_for(lambda: self._is_closing, RETRY_INTERVAL_S)

    def _commit(self, batch: _Batch, stop_reason: str | None = None) -> bool:
        """Write one batch in one transaction; False: the disk refused, retry later."""
        try:
            self._follow_file()
            with self._connection as db:
                num_refused = sum(not self._store(db, row) for row in batch.rows)
                insert_events(db, self._run_id, batch.events)
                self._recorder.insert(db, self._run_id, batch.frames)
                if stop_reason:
                    db.execute(
                        "UPDATE runs SET stopped_at = ?, stop_reason = ? WHERE run_id = ?",
                        (utc_now(), stop_reason, self._run_id),
                    )
        except (*SQLITE_ERRORS, PenstockError) as error:
            self._recorder.reset()  # its template may have gone with the transaction
            self._say_failing(error)
            so_far = self._num_damaged_writes
            self._num_damaged_writes = self._leave_damaged(error, so_far, DAMAGED_WRITES)
            return False
        self._num_damaged_writes = 0
        if self._failing:
            lost = (self._rows_lost, self._frames_lost)
            _LOG.warning("%s: writing again; lost so far: %d rows, %d frames", self.path, *lost)
        self._failing = ""
        self._open.drop_recorded(row.rid for row in batch.rows if not isinstance(row, RefusalRow))
        with self._wake:
            self._rows_lost += num_refused
            self._num_settled += len(batch)
            self._num_unwritten = sum(isinstance(row, LogRow) for row in self._queued.rows)
            if batch is self._in_hand:
                self._in_hand = _Batch()
            self._wake.notify_all()
        return True

    def _store(self, db: sqlite3.Connection, row: LogRow | RowEnergy | RefusalRow) -> bool:
        """Insert a row or complete one; False: a retry would fail, too."""
        if isinstance(row, LogRow):
            return insert_row(db, self._run_id, row)
        if isinstance(row, RefusalRow):
            insert_refusals(db, self._run_id, row)
        else:
            update_energy(db, row)
        return True

    def _follow_file(self) -> None:
        """Reopen the file at the path, where readers look, or make a new one."""
        there = file_id(self.path)
        is_same = there is not None and there == self._file_id
        if is_same and not self._is_doubted:
            return
        abandon(self._connection)
        self._connection, self._is_doubted = open_log(self.path), False
        if is_same:
            return
        self._upkeep.reset()
        self._recorder.reset()
        if self._run_id:
            self._run_id = insert_run(self._connection, self._run)
        else:
            self._begin_run()
        if self._file_id is not None:
            about = "the log file was deleted or replaced under the daemon"
            self._say("warning", "log.replaced", about)
            self._open.write_anew()
        self._file_id = file_id(self.path)

    def _leave_damaged(self, error: Exception, num_found: int, most: int) -> int:
        """Set a file aside that enough tries in a row find damaged; the next row makes a new one.

        Args:
            num_found: the tries in a row that have found it so before.
            most: the tries after which it is set aside.

        Returns:
            the tries in a row so far, with this one; 0 once the file was set aside or is sound.
        """
        if isinstance(error, SQLITE_ERRORS):
            error = write_error("cannot write", error, self.path)
        if not isinstance(error, DamagedLog):
            return 0
        if num_found + 1 < most:
            self._is_doubted = True
            return num_found + 1
        abandon(self._connection)
        is_new, self._file_id = self._file_id is not None, None
        try:
            self._set_aside(error)
        except FileError as refused:
            if is_new:  # once: it is tried with each row
                _LOG.error("%s", refused)
            return most
        return 0

    def _set_aside(self, damage: DamagedLog) -> None:
        """Rename a damaged file that is not open here, and report it.

        Raises:
            FileError: the folder does not allow it.
        """
        try:
            kept = set_aside(self.path)
        except OSError as error:
            what = f"{damage.what}; it cannot be moved away"
            raise FileError(what, error, where=str(self.path), hint=damage.hint) from error
        about = f"{damage.what}: it is kept as {kept.name}, and a new one made"
        self._say("error", "log.damaged", about)

    def _keep_up(self) -> None:
        """Do one step of pruning, if due."""
        if self._file_id is None:
            return
        try:
            pruned = self._upkeep.step(self._connection)
        except SQLITE_ERRORS as error:
            _LOG.warning("%s: not pruned, will try again in an hour: %s", self.path, error)
            if file_id(self.path) == self._file_id:
                so_far = self._num_damaged_prunes
                self._num_damaged_prunes = self._leave_damaged(error, so_far, DAMAGED_PRUNES)
            return
        if pruned is None:
            return
        self._num_damaged_prunes = 0
        if self._limits.keep_days is not None:
            remove_backups(self.path, time.time() - self._limits.keep_days * 86_400)
        if pruned.requests or pruned.events:  # frames go every hour
            about = f"forgot {pruned.requests} requests and {pruned.events} events"
            self._say("info", "log.pruned", f"{about} beyond {self._limits.describe()}")

    def _say_failing(self, error: Exception) -> None:
        if not isinstance(error, PenstockError):
            error = write_error("cannot write the request log", error, self.path)
        if not self._failing:
            _LOG.error("%s: %s; will keep trying", self.path, error.what)
        self._failing = error.what

    def _say(self, severity: str, code: str, message: str) -> None:
        """Record an event of the log's own, also in the journal and in frames."""
        _LOG.log(logging.getLevelNamesMapping()[severity.upper()], "%s: %s", self.path, message)
        self.said.append(EventFrame(utc_now(), severity, code, message))
        self.event(severity, code, message, at=self.said[-1].at)
