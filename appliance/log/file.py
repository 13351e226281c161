"""The request log's file: made, brought up to date, opened, and told from another at its path.

Owns: the file's mode, its pragmas and its migration.
Invariant: a connection from open_log() is at the newest schema and waits for other writers.
Never: opens what a newer Penstock wrote; changes an older file before it is copied.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from contextlib import closing
from pathlib import Path

from sqlite_utils import Database

from appliance.log.reader import BUSY_TIMEOUT_MS
from engine.errors import ConfigError
from migrations.request_log import migration

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
