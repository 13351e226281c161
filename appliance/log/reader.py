"""Reading the request log: short queries on connections of their own.

Owns: the SQL behind a query, and the shape of its rows as JSON.
Invariant: every connection is read-only and closed before the call returns, so that no reader
keeps the write-ahead log from being checkpointed; no query runs longer than MAX_QUERY_S.
Never: writes, migrates, or needs the daemon.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from appliance.log.query import SEVERITIES, EventQuery, RowQuery, Slow, UsageQuery
from engine.errors import PenstockError

BUSY_TIMEOUT_MS = 5_000
MAX_QUERY_S = 10.0
_STEPS_BETWEEN_LOOKS_AT_THE_CLOCK = 100_000

# The first line has the words of the index ix_requests_failed, without which SQLite would not use
# it; the second leaves out who hung up (499) or cancelled: that was as it was wanted.
_FAILED = (
    "(http_status >= 400 OR finish_reason IN ('error', 'abort'))"
    " AND (finish_reason IS 'error' OR cancelled_by IS 'drain'"
    " OR (http_status >= 400 AND http_status <> 499))"
)

_MOST_TOKENS_FIRST = "prompt_tokens + completion_tokens DESC, 1"
# The + keeps SQLite from following the index by user, which takes twice as long as to sort.
# Days are UTC's, as all times in the log.
_USAGE = {
    "user": ("+user", _MOST_TOKENS_FIRST),
    "model": ("model", _MOST_TOKENS_FIRST),
    "day": ("substr(received_at, 1, 10)", "1"),
}

_Json = dict[str, object]
_Condition = tuple[str, object]
"""SQL with at most one ?, and its value; None leaves the condition out."""


def read_rows(path: Path, query: RowQuery) -> list[_Json]:
    """Rows of v_requests, the newest first, or the oldest first after a cursor.

    Each carries its `cursor`: the largest one seen, as `after`, asks for what was written since.

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
    """The row of one request; None if there is none. Raises as read_rows()."""
    with _reading(path) as db:
        row = db.execute("SELECT * FROM v_requests WHERE rid = ?", (rid,)).fetchone()
        return None if row is None else _as_json(row)


def read_events(path: Path, query: EventQuery) -> list[_Json]:
    """Events, ordered and with a `cursor` as read_rows(); raises as it does."""
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
    """Sums by user, model or day, of what the log still holds; raises as read_rows().

    Users and models with the most tokens come first, days in order. Sums of milliseconds are None
    where no request has reached the stage, joules where no power was reported; `j_per_token` is
    both phases' joules by output tokens, of the requests that have them.
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
        return [dict(row) for row in db.execute(f"SELECT * FROM ({sql}) ORDER BY {order}", values)]


@contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """A read-only connection, whose errors say which file.

    Raises:
        PenstockError: instead of every sqlite3.Error.
    """
    try:
        with closing(_connect(path)) as db:
            db.row_factory = sqlite3.Row
            yield db
    except sqlite3.Error as error:
        raise PenstockError(
            f"cannot read the request log: {error}", where=str(path), hint=_hint(str(error))
        ) from error


@contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection that is interrupted after MAX_QUERY_S."""
    with reading(path) as db:
        end_s = time.monotonic() + MAX_QUERY_S
        db.set_progress_handler(lambda: time.monotonic() > end_s, _STEPS_BETWEEN_LOOKS_AT_THE_CLOCK)
        yield db


def _connect(path: Path) -> sqlite3.Connection:
    """Open read-only; also as a user who may not create the -shm file beside it.

    After a clean stop there is no -wal file and nobody writes, so the file may be read as it is.
    """
    uri = f"{path.absolute().as_uri()}?mode=ro"
    if not path.with_name(path.name + "-wal").exists():
        uri += "&immutable=1"
    return sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_MS / 1000)


def _hint(about: str) -> str:
    if about.startswith("no such"):
        return "another version of Penstock wrote it; `penstock serve` brings an older one up"
    return "ask for less with `since`" if about == "interrupted" else ""


def _where(*conditions: _Condition) -> tuple[str, list[object]]:
    """The conditions that have a value, and the values for their ?."""
    given = [(sql, value) for sql, value in conditions if value is not None]
    where = " AND ".join(f"({sql})" for sql, _ in given)
    return where and f" WHERE {where}", [value for sql, value in given if "?" in sql]


def _is_slow(slow: Slow | None) -> _Condition:
    if slow is None:
        return "", None
    return f"{slow.stage}_ms {'>' if slow.is_above else '<'} ?", slow.bound_ms


def _as_json(row: sqlite3.Row) -> _Json:
    columns = dict(zip(row.keys(), row, strict=True))
    ids = {"cursor": columns.pop("id"), "id": columns.pop("rid")}
    return {**ids, **columns, "stream": bool(row["stream"])}
