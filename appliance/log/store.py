"""The request log's file: made, migrated, opened, copied, made smaller, and told from another.

Owns: the file's mode, its pragmas and its migration; what `penstock db` does.
Invariant: nothing here needs the daemon, and nothing disturbs one that is running.
Never: changes the schema; overwrites a file.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

from sqlite_utils import Database

from appliance.log.query import BUSY_TIMEOUT_MS, reading
from appliance.log.retention import Pruned, RetentionLimits, estimate, prune_steps, used_bytes
from engine.errors import ConfigError, FileError, PenstockError
from migrations.request_log import migration

# The request log's file: made, brought up to date, opened, and told from another at its path.
# Invariant: a connection from open_log() is at the newest schema and waits for other writers.
# Never: opens what a newer Penstock wrote; changes an older file before it is copied.


_APPLICATION_ID = 0x50454E53  # "PENS", for file(1)
_BACKUP = ".before-"

_FileId = tuple[int, int]
"""Device and inode."""


def open_log(path: Path) -> sqlite3.Connection:
    """Open for writing, at the newest schema; a new file is 0640, as SQLite makes its -wal too.

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


def abandon(connection: sqlite3.Connection) -> None:
    """Close a log whose file is no longer at its path.

    What is in the write-ahead log goes into the old file first: the -wal stays at the path, and
    SQLite would take its pages for those of the file that comes after.
    """
    with contextlib.suppress(sqlite3.Error):
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    connection.close()


def file_id(path: Path) -> _FileId | None:
    """Which file is at the path; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def remove_backups(path: Path, older_than_s: float) -> None:
    """Remove copies that were made before a migration, when what they hold is to be forgotten."""
    for backup in path.parent.glob(f"{path.name}{_BACKUP}*"):
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
        PenstockError: the file is missing or may not be written, or another program holds it.
    """
    limits = RetentionLimits(keep_days=keep_days, max_bytes=max_bytes)
    now = datetime.now(UTC)
    if dry_run:
        with reading(path) as db:
            return estimate(db, limits, now)
    total = Pruned(0, 0)
    try:
        uri = f"{path.absolute().as_uri()}?mode=rw"
        with closing(sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_MS / 1000)) as db:
            db.execute("PRAGMA foreign_keys = ON")
            for step in prune_steps(db, limits, now):
                total += step
                time.sleep(PAUSE_S)
    except sqlite3.Error as error:
        raise PenstockError(f"cannot prune the request log: {error}", where=str(path)) from error
    return total


def _one(db: sqlite3.Connection, sql: str) -> object:
    return db.execute(sql).fetchone()[0]


def _size_bytes(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
