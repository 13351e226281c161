"""Check and answer queries of the request log.

Owns: the parameters, their meaning and their errors; the SQL of a query, and the JSON of its rows.
Invariant: every field of a query is safe to run: times are in the log's own form, stages are known
names.
Never: lets a client write SQL; ignores a parameter that it cannot read.
"""

from __future__ import annotations

import errno
import os
import re
import sqlite3
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal, cast

from appliance.json_fields import invalid_type, invalid_value
from engine.errors import FileError, PenstockError

MAX_ROWS = 10_000
DEFAULT_ROWS = 20
SEVERITIES = ("info", "warning", "error")
"""The severities in ascending order; a query names the lowest one that it wants."""
STAGES = ("ttft", "queue", "prefill", "handoff", "decode", "tpot", "e2e")
"""Stages that a query can filter by."""

UsageBy = Literal["user", "model", "day"]
USAGE_BY: tuple[UsageBy, ...] = ("user", "model", "day")

MAX_DIGITS = 18
"""Maximum digits of a whole number in a query, so that it fits 64 bits."""
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_AGO = re.compile(r"-?(\d{1,9})([smhdw])", re.ASCII)
_SLOW = re.compile(r"(\w+)\s*([<>])\s*(\d{1,12}(?:\.\d{1,6})?)\s*(ms|s)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class SlowFilter:
    """A bound on one stage: `ttft>500`."""

    stage: str
    """One of STAGES."""
    is_above: bool
    """True for >, false for <."""
    bound_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RowQuery:
    """Which requests to list; None: no condition."""

    limit: int = DEFAULT_ROWS
    since: str | None = None
    until: str | None = None
    """The first moment after the span."""
    user: str | None = None
    """Peer.name: a user's name, `key:NAME` or `uid:N`."""
    failed_only: bool = False
    slow: SlowFilter | None = None
    after: int | None = None
    """Only rows written after the one with this `cursor`, the oldest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventQuery:
    """Which events to list; like RowQuery."""

    limit: int = DEFAULT_ROWS
    since: str | None = None
    until: str | None = None
    severity: str = "info"
    """The lowest severity to list; one of SEVERITIES."""
    after: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageQuery:
    """Which sums to compute, over requests received in [since, until)."""

    by: UsageBy = "user"
    since: str | None = None
    until: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A span of time, [since, until); None: unbounded."""

    since: str | None = None
    until: str | None = None


def row_query(params: Mapping[str, str]) -> RowQuery:
    """Read a query from `limit`, `since`, `until`, `user`, `errors`, `slow`, `after`.

    Raises:
        RequestError: 400, with the parameter's name.
    """
    return RowQuery(
        limit=_limit(params),
        since=_time(params, "since"),
        until=_time(params, "until"),
        user=params.get("user") or None,
        failed_only=_flag(params, "errors"),
        slow=_slow(params),
        after=_integer(params, "after"),
    )


def most_rows(params: Mapping[str, str]) -> int:
    """Read `limit`; without it return the maximum."""
    return _limit(params) if "limit" in params else MAX_ROWS


def event_query(params: Mapping[str, str]) -> EventQuery:
    """Read a query from `limit`, `since`, `until`, `severity`, `after`; raises as row_query()."""
    return EventQuery(
        limit=_limit(params),
        since=_time(params, "since"),
        until=_time(params, "until"),
        severity=_one_of(params, "severity", SEVERITIES),
        after=_integer(params, "after"),
    )


def usage_query(params: Mapping[str, str]) -> UsageQuery:
    """Read a query from `by`, `since`, `until`; raises as row_query()."""
    return UsageQuery(
        by=cast(UsageBy, _one_of(params, "by", USAGE_BY)),
        since=_time(params, "since"),
        until=_time(params, "until"),
    )


def span_query(params: Mapping[str, str]) -> Span:
    """Read a span from `since`, `until`; raises as row_query()."""
    return Span(since=_time(params, "since"), until=_time(params, "until"))


def parse_time(text: str, param: str, now: datetime) -> str:
    """Parse `1h` or `-1h` (before now) or ISO 8601, by default in UTC, into the log's form.

    Raises:
        RequestError: 400, naming `param`.
    """
    try:
        if ago := _AGO.fullmatch(text):
            at = now - timedelta(**{_UNITS[ago[2]]: int(ago[1])})
        else:
            at = datetime.fromisoformat(text)
            at = at.replace(tzinfo=UTC) if at.tzinfo is None else at
        return log_time(at)
    except (ValueError, OverflowError) as error:
        raise invalid_value(
            param, "must be a time such as 2026-01-31T12:00:00Z, or an age such as 30m, 1h, 2d"
        ) from error


def log_time(at: datetime) -> str:
    """Format a time as protocol.utc_now() does; such times sort as text."""
    return at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _time(params: Mapping[str, str], name: str) -> str | None:
    text = params.get(name)
    return None if text is None else parse_time(text, name, datetime.now(UTC))


def _slow(params: Mapping[str, str]) -> SlowFilter | None:
    text = params.get("slow")
    if text is None:
        return None
    match = _SLOW.fullmatch(text.strip())
    if match is None or match[1] not in STAGES:
        raise invalid_value(
            "slow", f"must be a stage and a time such as ttft>500 (ms) or e2e>2s; {_listed(STAGES)}"
        )
    scale = 1000 if match[4] == "s" else 1
    return SlowFilter(match[1], match[2] == ">", float(match[3]) * scale)


def _limit(params: Mapping[str, str]) -> int:
    limit = _integer(params, "limit")
    if limit is None:
        return DEFAULT_ROWS
    if not 1 <= limit <= MAX_ROWS:
        raise invalid_value("limit", f"must be between 1 and {MAX_ROWS}")
    return limit


def _integer(params: Mapping[str, str], name: str) -> int | None:
    text = params.get(name)
    if text is None:
        return None
    # isdecimal alone lets other scripts' digits through, and int() long ones.
    if not (text.isascii() and text.isdecimal()):
        raise invalid_type(name, "a whole number", text)
    if len(text) > MAX_DIGITS:
        raise invalid_value(name, "is too large")
    return int(text)


def _flag(params: Mapping[str, str], name: str) -> bool:
    return _one_of(params, name, ("false", "true", "0", "1")) in ("true", "1")


def _one_of(params: Mapping[str, str], name: str, allowed: tuple[str, ...]) -> str:
    """Return the parameter's value; the first allowed one by default."""
    value = params.get(name, allowed[0])
    if value not in allowed:
        raise invalid_value(name, f"must be {_listed(allowed)}")
    return value


def _listed(words: tuple[str, ...]) -> str:
    return f"one of {', '.join(words)}"


# Reading the request log: short queries on connections of their own.
# Invariant: every connection is read-only and closed before the call returns, so that no reader
# keeps the write-ahead log from being checkpointed; no query runs longer than MAX_QUERY_S.
# Never: writes, migrates, or needs the daemon.


BUSY_TIMEOUT_MS = 5_000
MAX_QUERY_S = 10.0
_STEPS_BETWEEN_LOOKS_AT_THE_CLOCK = 100_000
RECOVER = "`sqlite3 FILE .dump` saves the readable rows; move the file away for a new one"

# The first line has the words of the index ix_requests_failed, without which SQLite would not use
# it; the second leaves out clients that disconnected (499) or cancelled on purpose.
_FAILED = (
    "(http_status >= 400 OR finish_reason IN ('error', 'abort'))"
    " AND (finish_reason IS 'error' OR cancelled_by IS 'drain'"
    " OR (http_status >= 400 AND http_status <> 499))"
)

_MOST_TOKENS_FIRST = "prompt_tokens + coalesce(completion_tokens, 0) DESC, 1"
# The + keeps SQLite from following the index by user, which takes twice as long as to sort.
# Days are UTC's, as all times in the log.
_USAGE = {
    "user": ("+user", _MOST_TOKENS_FIRST),
    "model": ("model", _MOST_TOKENS_FIRST),
    "day": ("substr(received_at, 1, 10)", "1"),
}

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
    """Add up the log's requests by user, model or day; raises as read_rows().

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
        return [dict(row) for row in db.execute(f"SELECT * FROM ({sql}) ORDER BY {order}", values)]


SQLITE_ERRORS = (sqlite3.Error, UnicodeDecodeError)
"""What sqlite3 raises: of a damaged file also that a text, or its own message, is no UTF-8."""


class DamagedLog(PenstockError):
    """The file is not an SQLite database, or damaged; a retry cannot help."""

    exit_code = 8


def log_error(what: str, error: Exception, path: Path) -> PenstockError:
    """Make the error for one of SQLITE_ERRORS; DamagedLog if the file's bytes are wrong.

    Args:
        what: what failed, as `cannot read the request log`.
        error: why.
        path: of the file.
    """
    what, about = f"{what}: {error}", str(error)
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK) & 0xFF  # the rest says where
    is_garbled = isinstance(error, UnicodeDecodeError)
    if is_garbled or code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return DamagedLog(what, where=str(path), hint=RECOVER)
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

    Args:
        path: of the file.
        mode: for os.access().

    Raises:
        OSError: it cannot be opened.
    """
    if stat.S_ISDIR(path.stat().st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
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
        raise FileError("cannot read the request log", error, where=str(path), hint=hint) from error


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
