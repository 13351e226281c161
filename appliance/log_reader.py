"""Reading the request log: short queries on connections of their own.

Owns: the shape of a row as JSON, which is the columns of v_requests.
Called by: request_log (for the api, in a thread), the CLI when no daemon answers.
Invariant: every connection is read-only and closed before the call returns, so that no reader
keeps the write-ahead log from being checkpointed.
Never: writes, migrates, or needs the daemon.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import quote

from engine.errors import PenstockError

BUSY_TIMEOUT_MS = 5_000


def read_tail(path: Path, limit: int) -> list[dict[str, object]]:
    """The newest rows of v_requests, newest first.

    Raises:
        PenstockError: the file is missing, unreadable or not a request log.
    """
    with _reading(path) as db:
        rows = db.execute("SELECT * FROM v_requests ORDER BY id DESC LIMIT ?", (limit,))
        return [_as_json(row) for row in rows]


def read_row(path: Path, rid: str) -> dict[str, object] | None:
    """The row of one request; None if there is none.

    Raises:
        PenstockError: as read_tail().
    """
    with _reading(path) as db:
        row = db.execute("SELECT * FROM v_requests WHERE rid = ?", (rid,)).fetchone()
        return None if row is None else _as_json(row)


@contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    try:
        with closing(_connect(path)) as db:
            db.row_factory = sqlite3.Row
            yield db
    except sqlite3.Error as error:
        raise PenstockError(f"cannot read the request log: {error}", where=str(path)) from error


def _connect(path: Path) -> sqlite3.Connection:
    """Open read-only; also as a user who may not create the -shm file beside it.

    After a clean stop there is no -wal file and nobody writes, so the file may be read as it is.
    """
    uri = f"file:{quote(str(path))}?mode=ro"
    if not path.with_name(path.name + "-wal").exists():
        uri += "&immutable=1"
    return sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_MS / 1000)


def _as_json(row: sqlite3.Row) -> dict[str, object]:
    columns = dict(zip(row.keys(), row, strict=True))
    del columns["id"]
    return {**columns, "stream": bool(row["stream"])}
