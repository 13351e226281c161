"""Export, check and prune the request log's file for `penstock db`.

Invariant: it works without the daemon, and does not disturb a running one.
"""

from __future__ import annotations

import os
import sqlite3
import time
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

from appliance.observe.log.reader import (
    BUSY_TIMEOUT_MS,
    SQLITE_ERRORS,
    check_file,
    log_error,
    reading,
)
from appliance.observe.log.retention import (
    Pruned,
    RetentionLimits,
    _one,
    estimate,
    prune_steps,
    used_bytes,
)
from engine.errors import FileError

_TABLES = ("requests", "events", "request_text", "runs", "frames", "refusals")
"""The tables, the newest last: an older log has no frames."""
PAUSE_S = 0.02
"""Seconds between two slices, so that a running daemon can write."""


def stats(path: Path) -> dict[str, object]:
    """Return sizes, rows by table, and the span of time that the log covers.

    `used_bytes` is what max_bytes limits: pages without the free ones. New pages lie in the write-
    ahead log, so `used_bytes` may exceed the file, but never `disk_bytes`, which is both together.

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
    """Let SQLite check the file; None: it is sound.

    Raises:
        PenstockError: it cannot be read at all.
    """
    with reading(path) as db:
        found = str(_one(db, "PRAGMA quick_check(1)"))
    return None if found == "ok" else found


def export(path: Path, target: Path) -> None:
    """Write a complete, compact copy of the log that any SQLite tool can open.

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
            hint="name a new file in a folder that you can write to",
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
    """Delete rows older than `keep_days`, then the oldest until `max_bytes` suffice.

    None: no such limit. With a running daemon both write alternately, a slice at a time. A dry run
    changes nothing; it counts expired rows and estimates the others from the mean row.

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
    except SQLITE_ERRORS as error:
        raise log_error("cannot prune the request log", error, path) from error
    return total


def _size_bytes(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
