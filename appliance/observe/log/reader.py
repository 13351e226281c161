"""Query the request log through read-only connections that last for one query.

Invariant: every connection is read-only and closed before the call returns, so that no reader keeps
the write-ahead log from being checkpointed; no query runs longer than MAX_QUERY_S.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import stat
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

from appliance.observe.log.query import SEVERITIES, EventQuery, RowQuery, SlowFilter, UsageQuery
from engine.errors import FileError, PenstockError

BUSY_TIMEOUT_MS = 5_000
MAX_QUERY_S = 10.0
_STEPS_BETWEEN_LOOKS_AT_THE_CLOCK = 100_000
RECOVER = "`sqlite3 FILE .dump` saves the readable rows; move the file away for a new one"

# The first line has the words of the index ix_requests_failed, without which SQLite would not use
# it; the second leaves out clients that disconnected (499) or cancelled on purpose.
_INDEXED = "(http_status >= 400 OR finish_reason IN ('error', 'abort'))"
_OURS = "(http_status >= 400 AND http_status <> 499)"
_FAILED = f"{_INDEXED} AND ({_OURS} OR finish_reason IS 'error' OR cancelled_by IS 'drain')"

_MOST_TOKENS_FIRST = "prompt_tokens + coalesce(completion_tokens, 0) DESC, 1"
# The + keeps SQLite from following the index by user, which takes twice as long as to sort.
# Days are UTC's, as all times in the log.
_USAGE = {
    "user": ("+user", _MOST_TOKENS_FIRST),
    "model": ("model", _MOST_TOKENS_FIRST),
    "day": ("substr(received_at, 1, 10)", "1"),
}

_REFUSED_BY = {"user": "user", "day": "substr(at, 1, 10)"}
"""Where refused requests are summed up: no model has refused them."""

_SUMS_MS = ("prefill_ms", "decode_ms")
_SUMS_J = ("prefill_j", "decode_j", "energy_j", "j_per_token")
_Json = dict[str, object]
_Condition = tuple[str, object]
"""SQL with at most one ?, and its value; None: no condition."""


def read_rows(path: Path, query: RowQuery) -> list[_Json]:
    """Read rows of v_requests, the newest first, or the oldest first after a cursor.

    Each has its `cursor`: the largest one seen, sent as `after`, asks for later rows.

    Raises:
        PenstockError: the file is missing, unreadable or not a request log, or it took too long.
    """
    where, values = _where(
        ("received_at >= ?", query.since),
        ("received_at < ?", query.until),
        ("user = ?", query.user),
        (_FAILED, query.failed_only or None),
        _is_slow(query.slow),
        ("id > ?", query.after),
    )
    order = "received_at DESC, id DESC" if query.after is None else "id"
    sql = f"SELECT * FROM v_requests{where} ORDER BY {order} LIMIT ?"
    with _reading(path) as db:
        return [_as_json(row) for row in db.execute(sql, (*values, query.limit))]


def read_row(path: Path, rid: str) -> _Json | None:
    """Read the row of one request; None: no such row. Raises as read_rows()."""
    with _reading(path) as db:
        row = db.execute("SELECT * FROM v_requests WHERE rid = ?", (rid,)).fetchone()
        return None if row is None else _as_json(row)


def read_events(path: Path, query: EventQuery) -> list[_Json]:
    """Read events, ordered and with a `cursor` as in read_rows(); raises as read_rows()."""
    wanted = SEVERITIES[SEVERITIES.index(query.severity) :]
    where, values = _where(
        ("at >= ?", query.since),
        ("at < ?", query.until),
        ("instr(?, severity)", None if wanted == SEVERITIES else " ".join(wanted)),
        ("id > ?", query.after),
    )
    order = "at DESC, id DESC" if query.after is None else "id"
    sql = (
        "SELECT id AS cursor, run_id, at, severity, code, message, actor"
        f" FROM events{where} ORDER BY {order} LIMIT ?"
    )
    with _reading(path) as db:
        return [dict(row) for row in db.execute(sql, (*values, query.limit))]


def read_usage(path: Path, query: UsageQuery) -> list[_Json]:
    """Add up the log's requests, and by user or day the refused ones; raises as read_rows().

    Users and models with the most tokens come first, days in order. Sums of milliseconds are None
    if no request reached the stage, joules if no power was reported; `j_per_token` is both phases'
    joules by output tokens, of the requests that have them.
    """
    group, order = _USAGE[query.by]
    where, values = _where(("received_at >= ?", query.since), ("received_at < ?", query.until))
    sql = (
        f"SELECT {group} AS {query.by}, count(*) AS requests,"
        f" count(*) FILTER (WHERE {_FAILED}) AS errors,"
        " sum(prompt_tokens) AS prompt_tokens, sum(completion_tokens) AS completion_tokens,"
        " round(sum(prefill_ms), 3) AS prefill_ms, round(sum(decode_ms), 3) AS decode_ms,"
        " round(sum(prefill_j), 3) AS prefill_j, round(sum(decode_j), 3) AS decode_j,"
        " round(sum(prefill_j + decode_j), 3) AS energy_j,"
        " round(sum(prefill_j + decode_j) / nullif(sum(completion_tokens)"
        " FILTER (WHERE prefill_j IS NOT NULL), 0), 6) AS j_per_token"
        f" FROM v_requests{where} GROUP BY 1"
    )
    with _reading(path) as db:
        found = db.execute(f"SELECT * FROM ({sql}) ORDER BY {order}", values).fetchall()
        usage = [dict(row) for row in found]
        return usage if query.by == "model" else _with_refused(usage, _refused(db, query), query.by)


class _Refused(NamedTuple):
    """Refused requests of a user or day."""

    number: int = 0
    most_by: str | None = None
    """The caller refused most often, with the status; None: unknown."""


def _refused(db: sqlite3.Connection, query: UsageQuery) -> dict[str, _Refused]:
    """Count refused requests by user or day; a log of an earlier release has none."""
    if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'refusals'").fetchone():
        return {}
    where, values = _where(("at >= ?", query.since), ("at < ?", query.until))
    sql = (
        f"SELECT {_REFUSED_BY[query.by]}, client, status, sum(number) FROM refusals{where}"
        " GROUP BY 1, 2, 3 ORDER BY 1, 4 DESC, 2, 3"
    )
    refused: dict[str, _Refused] = {}
    for name, client, status, number in db.execute(sql, values):
        before = refused.get(name) or _Refused(0, f"{client} ({status})" if client else None)
        refused[name] = before._replace(number=before.number + number)
    return refused


def _with_refused(usage: list[_Json], refused: dict[str, _Refused], by: str) -> list[_Json]:
    """Add the refused requests; a user or day without others gets a row at the end."""
    counts = dict.fromkeys(("requests", "errors", "prompt_tokens", "completion_tokens"), 0)
    sums = dict.fromkeys((*_SUMS_MS, *_SUMS_J))
    named = {row[by] for row in usage}
    usage += [{by: name, **counts, **sums} for name in refused if name not in named]
    for row in usage:
        row["refused"], row["refused_most"] = refused.get(str(row[by]), _Refused())
    return sorted(usage, key=lambda row: str(row[by])) if by == "day" else usage


SQLITE_ERRORS = (sqlite3.Error, UnicodeDecodeError, MemoryError)
"""What sqlite3 raises: of a damaged file also that a text, or its own message, is no UTF-8."""


class DiskRefuses(PenstockError):
    """The log's disk is full or fails; a retry may help."""


class DamagedLog(PenstockError):
    """The file is not an SQLite database, or damaged; a retry cannot help."""

    exit_code = 8


def log_error(what: str, error: Exception, path: Path) -> PenstockError:
    """Make the error for one of SQLITE_ERRORS: DamagedLog if the file's bytes are wrong.

    DiskRefuses if the disk is at fault.

    Args:
        what: what failed, as `cannot read the request log`.
    """
    about = str(error) or "no memory is left"
    what = f"{what}: {about}"
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK) & 0xFF  # the rest says where
    is_garbled = isinstance(error, UnicodeDecodeError)
    if is_garbled or code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return DamagedLog(what, where=str(path), hint=RECOVER)
    if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
        return DiskRefuses(what, where=str(path))
    if about.startswith("no such"):
        hint = "is it a request log? `penstock serve` upgrades an older one"
        wrong = PenstockError(what, where=str(path), hint=hint)
        wrong.exit_code = DamagedLog.exit_code
        return wrong
    hint = "ask for less with `since`" if about == "interrupted" else ""
    return PenstockError(what, where=str(path), hint=hint)


@contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a read-only connection with errors that name the file.

    Raises:
        FileError: the file is missing or unreadable.
        PenstockError: instead of SQLITE_ERRORS; see log_error().
    """
    check_file(path, os.R_OK)
    try:
        with closing(_connect(path)) as db:
            db.row_factory = sqlite3.Row
            yield db
    except SQLITE_ERRORS as error:
        raise log_error("cannot read the request log", error, path) from error


def look_at(path: Path, mode: int) -> None:
    """Check that the log's file can be opened, since SQLite's own error gives no cause.

    The file is not opened: closing it would release all locks of this process on it, the daemon's
    included. The next process to close the log would then delete the write-ahead log in use.

    Raises:
        OSError: it cannot be opened.
    """
    if stat.S_ISDIR(path.stat().st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if mode & os.W_OK and os.statvfs(path).f_flag & os.ST_RDONLY:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
    if not os.access(path, mode, effective_ids=True):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def check_file(path: Path, mode: int) -> None:
    """Check that the log's file can be opened.

    Raises:
        FileError: it cannot, with a hint.
    """
    try:
        look_at(path, mode)
    except OSError as error:
        hint = "run it as the user who serves"
        if isinstance(error, FileNotFoundError):
            hint = "`penstock serve` makes one; --state-dir names the folder of another"
        elif error.errno == errno.EROFS:
            hint = "mount that file system for writing; if an error made it so, check the disk"
        what = f"cannot {'write' if mode & os.W_OK else 'read'} the request log"
        raise FileError(what, error, where=str(path), hint=hint) from error


@contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a connection that is interrupted after MAX_QUERY_S."""
    with reading(path) as db:
        end_s = time.monotonic() + MAX_QUERY_S
        db.set_progress_handler(lambda: time.monotonic() > end_s, _STEPS_BETWEEN_LOOKS_AT_THE_CLOCK)
        yield db


def _connect(path: Path) -> sqlite3.Connection:
    """Open the log read-only, also for a user who may not create its -shm file.

    After a clean stop the -wal file is gone and no process writes, so the file may be read
    unlocked.
    """
    uri = f"{path.absolute().as_uri()}?mode=ro"
    if not path.with_name(path.name + "-wal").exists():
        uri += "&immutable=1"
    return sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_MS / 1000)


def _where(*conditions: _Condition) -> tuple[str, list[object]]:
    """Join the conditions that have a value, and list the values for their ?."""
    given = [(sql, value) for sql, value in conditions if value is not None]
    where = " AND ".join(f"({sql})" for sql, _ in given)
    return where and f" WHERE {where}", [value for sql, value in given if "?" in sql]


def _is_slow(slow: SlowFilter | None) -> _Condition:
    if slow is None:
        return "", None
    return f"{slow.stage}_ms {'>' if slow.is_above else '<'} ?", slow.bound_ms


def _as_json(row: sqlite3.Row) -> _Json:
    columns = dict(zip(row.keys(), row, strict=True))
    ids = {"cursor": columns.pop("id"), "id": columns.pop("rid")}
    return {**ids, **columns, "stream": bool(row["stream"])}
