"""Create, migrate and open the request log's file.

Invariant: a connection from open_log() is at the newest schema and waits for other writers.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import logging
import os
import sqlite3
from contextlib import closing
from pathlib import Path

from sqlite_utils import Database

from appliance.observe.log.reader import (
    BUSY_TIMEOUT_MS,
    RECOVER,
    SQLITE_ERRORS,
    DamagedLog,
    DiskRefuses,
    log_error,
    look_at,
)
from engine.errors import ConfigError, PenstockError
from engine.system.own_files import check_own_file, open_own
from migrations.request_log import FIRST, migration
from migrations.sqlite_files import is_foreign

_APPLICATION_ID = 0x50454E53  # "PENS", for file(1)
_ELSEWHERE = "if another program made it, choose another folder with --state-dir"
_BACKUP = ".before-"
_LOG = logging.getLogger("penstock.request_log")
_DAMAGED = ".damaged-"
_OLDER = "-before-0.2"

_FileId = tuple[int, int]
"""Device and inode."""


def open_log(path: Path) -> sqlite3.Connection:
    """Open the log for writing at the newest schema; a new file and its -wal have mode 0640.

    A log from before the first schema that this version knows is renamed, and a new one is made.

    Raises:
        ConfigError: the file cannot be opened, or another program or a newer Penstock made it.
        DamagedLog: it is not a database, or damaged.
        DiskRefuses: its disk is full, or fails.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(path):
            check_own_file(path, path.lstat())
            look_at(path, os.R_OK | os.W_OK)
        else:
            os.close(open_own(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o640))
        connection = sqlite3.connect(path, check_same_thread=False)
    except (OSError, sqlite3.Error) as error:
        why = getattr(error, "strerror", None) or error  # without the path, which `where` names
        is_refused = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EIO)
        if is_refused or isinstance(log_error("", error, path), DiskRefuses):
            raise DiskRefuses(f"cannot make the request log: {why}", where=str(path)) from error
        raise ConfigError(
            f"cannot open the request log: {why}",
            where=str(path),
            hint="choose a folder you may write to with --state-dir",
        ) from error
    is_ours = False
    try:
        is_ours = connection.execute("PRAGMA application_id").fetchone() == (_APPLICATION_ID,)
        if is_foreign(path, migration, _APPLICATION_ID):
            raise ConfigError("another program made this file", where=str(path), hint=_ELSEWHERE)
        # auto_vacuum must come before all that writes: it cannot change once the file has a page.
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA journal_size_limit = 67108864")
        connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
        if _is_older(Database(connection, execute_plugins=False)):
            connection.close()
            _LOG.info("%s is of a version before 0.2: kept as %s", path, _keep_older(path).name)
            return open_log(path)
        _migrate(Database(connection, execute_plugins=False), path)
        _check_columns(connection, path)
    except SQLITE_ERRORS as error:
        connection.close()
        describe = write_error if is_ours else log_error
        wrong = describe("cannot use the request log", error, path)
        if isinstance(wrong, (DamagedLog, DiskRefuses)):
            raise wrong from error
        raise ConfigError(wrong.what, where=wrong.where, hint=_ELSEWHERE) from error
    except PenstockError:
        connection.close()
        raise
    return connection


def write_error(what: str, error: Exception, path: Path) -> PenstockError:
    """Make the error as log_error() for a log of ours: where SQL fails, its schema is damaged."""
    wrong = log_error(what, error, path)
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK) & 0xFF  # the rest says where
    if code == sqlite3.SQLITE_ERROR:
        return DamagedLog(wrong.what, where=str(path), hint=RECOVER)
    return wrong


def abandon(connection: sqlite3.Connection) -> None:
    """Close a log whose file is no longer at its path.

    The write-ahead log is first merged into the old file: the -wal stays at the path, and SQLite
    would use its pages for the new file there.
    """
    with contextlib.suppress(*SQLITE_ERRORS):
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    connection.close()


def set_aside(path: Path) -> Path:
    """Rename a damaged log that this process has not open; return the new path.

    Raises:
        OSError: the folder does not allow it.
    """
    number = 1
    while (kept := path.with_name(f"{path.name}{_DAMAGED}{number}")).exists():
        number += 1
    return _rename(path, kept)


def _keep_older(path: Path) -> Path:
    """Rename the log of an older version; nothing deletes it. Return the new path."""
    kept, number = path.with_name(f"{path.stem}{_OLDER}{path.suffix}"), 1
    while kept.exists():
        number += 1
        kept = path.with_name(f"{path.stem}{_OLDER}-{number}{path.suffix}")
    return _rename(path, kept)


def _rename(path: Path, kept: Path) -> Path:
    # The write-ahead log first: beside a new file SQLite would take its pages for that one's.
    for suffix in ("-wal", "-shm", ""):
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + suffix).rename(kept.with_name(kept.name + suffix))
    return kept


def damaged_logs(path: Path) -> list[Path]:
    """List the damaged logs set aside here, the oldest first."""
    found = path.parent.glob(f"{glob.escape(path.name)}{_DAMAGED}*")
    numbers = {each: each.name.rpartition("-")[2] for each in found}
    kept = (each for each, number in numbers.items() if number.isdecimal())
    return sorted(kept, key=lambda each: int(numbers[each]))


def file_id(path: Path) -> _FileId | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def remove_backups(path: Path, older_than_s: float) -> None:
    """Remove old backups and damaged logs once everything in them has expired."""
    for kind in (_BACKUP, _DAMAGED):
        for backup in path.parent.glob(f"{glob.escape(path.name)}{kind}*"):
            with contextlib.suppress(OSError):
                if backup.stat().st_mtime < older_than_s:
                    backup.unlink()


def _applied(db: Database) -> set[str]:
    return {step.name for step in migration.applied(db)}


def _newer(db: Database) -> set[str]:
    """List the applied steps that come after every step of this version."""
    # Pending on an empty database is every step that this version knows.
    with closing(sqlite3.connect(":memory:")) as empty:
        known = [step.name for step in migration.pending(Database(empty, execute_plugins=False))]
    return {name for name in _applied(db) if name > max(known)}


def _is_older(db: Database) -> bool:
    """Tell whether it is the log of a version before this one's first step."""
    return bool(_applied(db)) and FIRST not in _applied(db) and not _newer(db)


def _migrate(db: Database, path: Path) -> None:
    """Apply the missing migrations; copy an older file beside itself first."""
    pending = [step.name for step in migration.pending(db)]
    applied, newer = _applied(db), _newer(db)
    if newer and pending:  # a newer one has every step that this version knows
        what = f"the request log names a step that no version has: {max(newer)}"
        raise DamagedLog(what, where=str(path), hint=RECOVER)
    if newer:
        raise ConfigError(
            f"written by a newer Penstock (schema {max(newer)})",
            where=str(path),
            hint="upgrade Penstock, or choose another folder with --state-dir",
        )
    if applied and pending:
        backup = path.with_name(f"{path.name}{_BACKUP}{pending[0]}")
        _LOG.info("%s is of an older version: it is copied to %s, then changed", path, backup.name)
        backup.unlink(missing_ok=True)
        os.close(open_own(backup, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o640))
        db.conn.execute("VACUUM INTO CAST(? AS TEXT)", (os.fsencode(backup),))
    migration.apply(db)


def _check_columns(log: sqlite3.Connection, path: Path) -> None:
    """Look for every column that the migrations make: a flipped bit renames one.

    Raises:
        DamagedLog: one is missing.
    """
    with closing(sqlite3.connect(":memory:")) as new:
        migration.apply(Database(new, execute_plugins=False))
        made = "SELECT name FROM sqlite_master WHERE type IN ('table', 'view')"
        for (table,) in new.execute(made).fetchall():
            if missing := _columns(new, table) - _columns(log, table):
                what = f"the request log has no column {table}.{min(missing)[0]}"
                raise DamagedLog(what, where=str(path), hint=RECOVER)


def _columns(db: sqlite3.Connection, table: str) -> set[tuple[str, str]]:
    """Return name and type of each column."""
    return set(db.execute("SELECT name, type FROM pragma_table_xinfo(?)", (table,)))
