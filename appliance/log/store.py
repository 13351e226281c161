"""The request log's file: made, migrated, opened, copied, and made smaller as retention asks.

Owns: the file's mode, its pragmas and its migration; which rows go first, how many at a time, and
when the next round is due; what `penstock db` does.
Invariant: nothing here needs the daemon, and nothing disturbs one that is running.
Never: changes the schema; overwrites a file.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import math
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from sqlite_utils import Database

from appliance.log.query import (
    BUSY_TIMEOUT_MS,
    DamagedLog,
    check_file,
    log_error,
    log_time,
    look_at,
    reading,
)
from engine.errors import ConfigError, FileError
from engine.units import size_text
from migrations.request_log import migration

# How the request log forgets: what is too old, and the oldest of what is too much.
# Invariant: a transaction deletes about SLICE_ROWS rows or moves SLICE_PAGES pages, so that whoever
# writes next waits for milliseconds.
# Never: keeps the text of a request that it forgets; sleeps.


SLICE_ROWS = 5_000
SLICE_PAGES = 2_000
INTERVAL_S = 3_600.0
SLICE_PAUSE_S = 0.05
SIZE_AFTER_PRUNE_RATIO = 0.9
"""Of max_bytes: room for a while, so that not every round has to prune."""
KEEP_FRAMES = timedelta(hours=72)

_ALL_TIMES = (
    "SELECT received_at AS at FROM requests"
    " UNION ALL SELECT at FROM events UNION ALL SELECT at FROM frames"
)
_UNUSED_TEMPLATES = (
    "DELETE FROM frame_templates WHERE template_id NOT IN (SELECT template_id FROM frames)"
)


@dataclass(frozen=True, slots=True)
class RetentionLimits:
    """What the log may hold; None is no limit."""

    keep_days: int | None = None
    max_bytes: int | None = None
    """Of pages in use; pages that are free for new rows and the write-ahead log do not count."""

    def describe(self) -> str:
        """As in `beyond 30 d and 2.0 GiB`."""
        days = None if self.keep_days is None else f"{self.keep_days} d"
        size = None if self.max_bytes is None else f"{size_text(self.max_bytes)}"
        return " and ".join(bound for bound in (days, size) if bound)


@dataclass(frozen=True, slots=True)
class Pruned:
    """How many rows of each kind were deleted."""

    requests: int = 0
    events: int = 0
    frames: int = 0

    def __add__(self, other: Pruned) -> Pruned:
        return Pruned(
            self.requests + other.requests,
            self.events + other.events,
            self.frames + other.frames,
        )


def used_bytes(db: sqlite3.Connection) -> int:
    """Size of the pages that hold something."""
    return (_pragma(db, "page_count") - _pragma(db, "freelist_count")) * _pragma(db, "page_size")


def prune_steps(db: sqlite3.Connection, limits: RetentionLimits, now: datetime) -> Iterator[Pruned]:
    """Delete what is too old, then the oldest of what is too much; give the space back.

    Frames, which are many and only of use for a while, are too old after KEEP_FRAMES.

    Each step is one transaction, done when it is yielded; let others write before the next.
    """
    horizon = _horizon(limits, now)
    if horizon is not None:
        while any_left := _delete_oldest(db, SLICE_ROWS, horizon):
            yield any_left
    while (num_old := _delete_frames(db, log_time(now - KEEP_FRAMES))) > 0:
        yield Pruned(frames=num_old)
    while num_excess := _num_excess_rows(db, limits):
        while num_excess > 0 and (step := _delete_oldest(db, min(SLICE_ROWS, num_excess))):
            num_excess -= step.requests + step.events + step.frames
            yield step
    with db:
        db.execute(_UNUSED_TEMPLATES)
    # execute() would stop at the statement's first page; a file that was made without auto_vacuum
    # frees none, and new rows take the free pages.
    while num_free := _pragma(db, "freelist_count"):
        db.executescript(f"PRAGMA incremental_vacuum({SLICE_PAGES})")
        if _pragma(db, "freelist_count") == num_free:
            break
        yield Pruned()
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


def estimate(db: sqlite3.Connection, limits: RetentionLimits, now: datetime) -> Pruned:
    """About what prune_steps() would delete: exact for age, by the mean row for size."""
    horizon, num_excess = _horizon(limits, now) or "", _num_excess_rows(db, limits)
    newest = _one(db, f"SELECT max(at) FROM ({_ALL_TIMES} ORDER BY at LIMIT ?)", num_excess)
    until = max(horizon, newest or "")
    return Pruned(
        _one(db, "SELECT count(*) FROM requests WHERE received_at <= ?", until),
        _one(db, "SELECT count(*) FROM events WHERE at <= ?", until),
        _one(
            db,
            "SELECT count(*) FROM frames WHERE at <= ?",
            max(until, log_time(now - KEEP_FRAMES)),
        ),
    )


class Upkeep:
    """One round of pruning an hour, a step at a time, between other work on the connection."""

    def __init__(self, limits: RetentionLimits) -> None:
        self._limits = limits
        self._due_s = 0.0
        self._round: Iterator[Pruned] | None = None
        self._total = Pruned()

    def set_limits(self, limits: RetentionLimits) -> None:
        """Use other limits from the next round on, which is due now."""
        self._limits = limits
        self._due_s = 0.0

    def reset(self) -> None:
        """The connection is another: what was under way is dropped, and due again."""
        self._round = None
        self._due_s = 0.0

    @property
    def due_in_s(self) -> float:
        """Seconds until step() has something to do."""
        return SLICE_PAUSE_S if self._round else max(0.0, self._due_s - time.monotonic())

    def step(self, db: sqlite3.Connection) -> Pruned | None:
        """Do one step if it is time; at the end of a round, what it has forgotten.

        Raises:
            sqlite3.Error: the round is over, and the next is due in an hour.
        """
        if self._round is None:
            if self.due_in_s > 0:
                return None
            self._due_s = time.monotonic() + INTERVAL_S
            self._total = Pruned()
            self._round = prune_steps(db, self._limits, datetime.now(UTC))
        try:
            step = next(self._round, None)
        except sqlite3.Error:
            self._round = None
            raise
        if step is not None:
            self._total += step
            return None
        self._round = None
        return self._total


def _horizon(limits: RetentionLimits, now: datetime) -> str | None:
    """The last moment that is too old."""
    if limits.keep_days is None:
        return None
    try:
        return log_time(now - timedelta(days=limits.keep_days))
    except OverflowError:  # older than the calendar: keep everything
        return None


def _num_excess_rows(db: sqlite3.Connection, limits: RetentionLimits) -> int:
    """How many rows are too many, if all take the mean space."""
    used = used_bytes(db)
    if limits.max_bytes is None or used <= limits.max_bytes:
        return 0
    num_rows: int = _one(db, f"SELECT count(*) FROM ({_ALL_TIMES})")
    share_kept = limits.max_bytes * SIZE_AFTER_PRUNE_RATIO / used
    return math.ceil(num_rows * (1 - share_kept))


def _delete_oldest(db: sqlite3.Connection, num_rows: int, until: str = "9") -> Pruned | None:
    """Delete that many of the oldest rows, and those of the same millisecond.

    None if there is nothing left to delete. `until` is by default after every time.
    """
    end = _one(
        db,
        f"SELECT max(at) FROM (SELECT at FROM ({_ALL_TIMES}) WHERE at <= ? ORDER BY at LIMIT ?)",
        until,
        num_rows,
    )
    if end is None:
        return None
    with db:
        requests = db.execute("DELETE FROM requests WHERE received_at <= ?", (end,))
        events = db.execute("DELETE FROM events WHERE at <= ?", (end,))
        frames = db.execute("DELETE FROM frames WHERE at <= ?", (end,))
    return Pruned(requests.rowcount, events.rowcount, frames.rowcount)


def _delete_frames(db: sqlite3.Connection, until: str) -> int:
    """Delete a slice of the frames that are not after `until`; how many."""
    end = _one(
        db,
        "SELECT max(at) FROM (SELECT at FROM frames WHERE at <= ? ORDER BY at LIMIT ?)",
        until,
        SLICE_ROWS,
    )
    with db:
        return db.execute("DELETE FROM frames WHERE at <= ?", (end,)).rowcount


def _pragma(db: sqlite3.Connection, name: str) -> int:
    return int(_one(db, f"PRAGMA {name}"))


def _one(db: sqlite3.Connection, sql: str, *values: object) -> Any:
    return db.execute(sql, values).fetchone()[0]


# --------------------------------------------------------------------------------------------------


# The request log's file: made, brought up to date, opened, and told from another at its path.
# Invariant: a connection from open_log() is at the newest schema and waits for other writers.
# Never: opens what a newer Penstock wrote; changes an older file before it is copied.


_APPLICATION_ID = 0x50454E53  # "PENS", for file(1)
_BACKUP = ".before-"
_LOG = logging.getLogger("penstock.request_log")
_DAMAGED = ".damaged-"

_FileId = tuple[int, int]
"""Device and inode."""


def open_log(path: Path) -> sqlite3.Connection:
    """Open for writing, at the newest schema; a new file is 0640, as SQLite makes its -wal too.

    Raises:
        ConfigError: the file cannot be opened, is another program's, or is a newer Penstock's.
        DamagedLog: it is no database, or a damaged one.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            look_at(path, os.R_OK | os.W_OK)
        else:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640))
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
        wrong = log_error("cannot use the request log", error, path)
        if isinstance(wrong, DamagedLog):
            raise wrong from error
        hint = "is it another program's? Move it away, or choose another folder with --state-dir"
        raise ConfigError(wrong.what, where=wrong.where, hint=hint) from error
    except ConfigError:
        connection.close()
        raise
    return connection


def abandon(connection: sqlite3.Connection) -> None:
    """Close a log whose file is no longer at its path.

    What is in the write-ahead log goes into the old file first: the -wal stays at the path, and
    SQLite would take its pages for those of the file that comes after.
    """
    with contextlib.suppress(sqlite3.Error):
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    connection.close()


def set_aside(path: Path) -> Path:
    """Give a damaged log, which nobody here has open, another name; returns that.

    Raises:
        OSError: the folder does not allow it.
    """
    number = 1
    while (kept := path.with_name(f"{path.name}{_DAMAGED}{number}")).exists():
        number += 1
    # The write-ahead log first: beside a new file SQLite would take its pages for that one's.
    for suffix in ("-wal", "-shm", ""):
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + suffix).rename(kept.with_name(kept.name + suffix))
    return kept


def damaged_logs(path: Path) -> list[Path]:
    """Logs that were set aside here, the oldest first."""
    found = path.parent.glob(f"{glob.escape(path.name)}{_DAMAGED}*")
    numbers = {each: each.name.rpartition("-")[2] for each in found}
    kept = (each for each, number in numbers.items() if number.isdecimal())
    return sorted(kept, key=lambda each: int(numbers[each]))


def file_id(path: Path) -> _FileId | None:
    """Which file is at the path; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def remove_backups(path: Path, older_than_s: float) -> None:
    """Remove logs of before a migration, and damaged ones, once all in them is to be forgotten."""
    for kind in (_BACKUP, _DAMAGED):
        for backup in path.parent.glob(f"{glob.escape(path.name)}{kind}*"):
            with contextlib.suppress(OSError):
                if backup.stat().st_mtime < older_than_s:
                    backup.unlink()


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
        backup = path.with_name(f"{path.name}{_BACKUP}{pending[0]}")
        _LOG.info("%s is of an older version: it is copied to %s, then changed", path, backup.name)
        backup.unlink(missing_ok=True)
        os.close(os.open(backup, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o640))
        db.conn.execute("VACUUM INTO CAST(? AS TEXT)", (os.fsencode(backup),))
    migration.apply(db)


# --------------------------------------------------------------------------------------------------


_TABLES = ("requests", "events", "request_text", "runs", "frames")
"""The newest last: an older log has no frames."""
PAUSE_S = 0.02
"""Between two slices, in which a running daemon gets its turn to write."""


def stats(path: Path) -> dict[str, object]:
    """Sizes, rows by table, and the span of time that the log covers.

    `used_bytes` is what max_bytes bounds: pages less those that are free for new rows. Such pages
    lie in the file or, when they are new, in the write-ahead log, so that they may be more than
    the file has, and are never more than `disk_bytes`, which is both.

    Raises:
        PenstockError: the file is missing, unreadable or not a request log.
    """
    with reading(path) as db:
        made = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
        tables = [name for name in _TABLES if name in made]
        used = used_bytes(db)
        file, wal = path.stat().st_size, _size_bytes(path.with_name(path.name + "-wal"))
        return {
            "path": str(path),
            "schema": _one(db, "SELECT max(name) FROM _sqlite_migrations"),
            "disk_bytes": file + wal,
            "used_bytes": used,
            "file_bytes": file,
            "wal_bytes": wal,
            "rows": {name: _one(db, f"SELECT count(*) FROM {name}") for name in tables},
            "oldest": _one(db, "SELECT min(received_at) FROM requests"),
            "newest": _one(db, "SELECT max(received_at) FROM requests"),
        }


def problem(path: Path) -> str | None:
    """What SQLite finds wrong with the file; None if it is sound.

    Raises:
        PenstockError: it cannot be read at all.
    """
    with reading(path) as db:
        found = str(_one(db, "PRAGMA quick_check(1)"))
    return None if found == "ok" else found


def export(path: Path, target: Path) -> None:
    """Write a complete, compact copy of the log, as of now, that any SQLite tool can open.

    It works while the daemon runs, and for a user who may only read the log.

    Raises:
        FileError: `target` exists or cannot be written.
        PenstockError: the log cannot be read.
    """
    try:
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640))
    except OSError as error:
        raise FileError(
            "cannot write the copy",
            error,
            where=str(target),
            hint="name a file that does not exist yet, in a folder that you may write to",
        ) from error
    try:
        with reading(path) as db:
            db.execute("VACUUM INTO CAST(? AS TEXT)", (os.fsencode(target),))
    except BaseException:
        target.unlink(missing_ok=True)
        raise


def prune(
    path: Path,
    *,
    keep_days: int | None = None,
    max_bytes: int | None = None,
    dry_run: bool = False,
) -> Pruned:
    """Forget what is older than `keep_days`, then the oldest until `max_bytes` hold.

    None sets no such limit. With a daemon running both write in turns, a slice at a time. A dry
    run changes nothing; it counts what is too old and estimates the rest from the mean row.

    Raises:
        FileError: the file is missing or may not be written.
        PenstockError: another program holds it, or it is no request log.
    """
    limits = RetentionLimits(keep_days=keep_days, max_bytes=max_bytes)
    now = datetime.now(UTC)
    if dry_run:
        with reading(path) as db:
            return estimate(db, limits, now)
    check_file(path, os.R_OK | os.W_OK)
    total = Pruned(0, 0)
    try:
        uri = f"{path.absolute().as_uri()}?mode=rw"
        with closing(sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_MS / 1000)) as db:
            db.execute("PRAGMA foreign_keys = ON")
            for step in prune_steps(db, limits, now):
                total += step
                time.sleep(PAUSE_S)
    except sqlite3.Error as error:
        raise log_error("cannot prune the request log", error, path) from error
    return total


def _size_bytes(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
