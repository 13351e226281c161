"""Check and answer queries of the request log.

Owns: which parameters there are, what they mean and what is refused; the SQL behind a query, and
the shape of its rows as JSON.
Invariant: every field of a query is safe to run: times are in the log's own form, stages are names
of stages.
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
"""In order; a query names the least that it wants to see."""
STAGES = ("ttft", "queue", "prefill", "handoff", "decode", "tpot", "e2e")
"""What a row can be slow in."""

UsageBy = Literal["user", "model", "day"]
USAGE_BY: tuple[UsageBy, ...] = ("user", "model", "day")

MAX_DIGITS = 18
"""Of a whole number in a query: 64 bits hold all such."""
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
    """Which requests; None asks for nothing in particular."""

    limit: int = DEFAULT_ROWS
    since: str | None = None
    until: str | None = None
    """The first moment that is too late."""
    user: str | None = None
    """Peer.name: a user's name, `key:NAME` or `uid:N`."""
    failed_only: bool = False
    slow: SlowFilter | None = None
    after: int | None = None
    """Only rows written after the one with this `cursor`, and the oldest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventQuery:
    """Which events; as RowQuery."""

    limit: int = DEFAULT_ROWS
    since: str | None = None
    until: str | None = None
    severity: str = "info"
    """The least; one of SEVERITIES."""
    after: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageQuery:
    """Sums over requests that came in [since, until)."""

    by: UsageBy = "user"
    since: str | None = None
    until: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A stretch of time, [since, until); None is as far as there is anything."""

    since: str | None = None
    until: str | None = None


def row_query(params: Mapping[str, str]) -> RowQuery:
    """From `limit`, `since`, `until`, `user`, `errors`, `slow`, `after`.

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
    """From `limit`, of a list that has an end: without one it is as long as it may be."""
    return _limit(params) if "limit" in params else MAX_ROWS


def event_query(params: Mapping[str, str]) -> EventQuery:
    """From `limit`, `since`, `until`, `severity`, `after`; raises as row_query()."""
    return EventQuery(
        limit=_limit(params),
        since=_time(params, "since"),
        until=_time(params, "until"),
        severity=_one_of(params, "severity", SEVERITIES),
        after=_integer(params, "after"),
    )


def usage_query(params: Mapping[str, str]) -> UsageQuery:
    """From `by`, `since`, `until`; raises as row_query()."""
    return UsageQuery(
        by=cast(UsageBy, _one_of(params, "by", USAGE_BY)),
        since=_time(params, "since"),
        until=_time(params, "until"),
    )


def span_query(params: Mapping[str, str]) -> Span:
    """From `since`, `until`; raises as row_query()."""
    return Span(since=_time(params, "since"), until=_time(params, "until"))


def parse_time(text: str, param: str, now: datetime) -> str:
    """`1h` or `-1h` (before now) or ISO 8601, UTC if it names no zone, as the log writes times.

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
    """The form of protocol.utc_now(); such times sort as text."""
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
    """The parameter's value; the first that is allowed if it is not there."""
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
RECOVER = "`sqlite3 FILE .dump` writes out what can be read; move it away, serve makes a new one"

# The first line has the words of the index ix_requests_failed, without which SQLite would not use
# it; the second leaves out who hung up (499) or cancelled: that was as it was wanted.
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


class DamagedLog(PenstockError):
    """The file is no SQLite database, or a damaged one: no retry mends that."""

    exit_code = 8


def log_error(what: str, error: sqlite3.Error, path: Path) -> PenstockError:
    """The error to raise for one of SQLite's; DamagedLog where the file's bytes are wrong.

    Args:
        what: what could not be done, as `cannot read the request log`.
        error: why.
        path: of the file.
    """
    what, about = f"{what}: {error}", str(error)
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK) & 0xFF  # the rest says where
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return DamagedLog(what, where=str(path), hint=RECOVER)
    if about.startswith("no such"):
        hint = "is it a request log? `penstock serve` brings one of an older Penstock up to date"
        wrong = PenstockError(what, where=str(path), hint=hint)
        wrong.exit_code = DamagedLog.exit_code
        return wrong
    hint = "ask for less with `since`" if about == "interrupted" else ""
    return PenstockError(what, where=str(path), hint=hint)


@contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """A read-only connection, whose errors say which file.

    Raises:
        FileError: there is none, or it may not be read.
        PenstockError: instead of every sqlite3.Error; see log_error().
    """
    check_file(path, os.R_OK)
    try:
        with closing(_connect(path)) as db:
            db.row_factory = sqlite3.Row
            yield db
    except sqlite3.Error as error:
        raise log_error("cannot read the request log", error, path) from error


def look_at(path: Path, mode: int) -> None:
    """Look whether the log's file can be opened, of which SQLite says no more than that it cannot.

    It is not opened for that. To close it would take from it all locks that this process has: the
    daemon's, without which who closes the file next takes its write-ahead log away from under it.

    Args:
        path: of the file.
        mode: what os.access() is asked for.

    Raises:
        OSError: it cannot be.
    """
    if stat.S_ISDIR(path.stat().st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not os.access(path, mode, effective_ids=True):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def check_file(path: Path, mode: int) -> None:
    """Look at it.

    Raises:
        FileError: it cannot be opened, and what to do.
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


def _where(*conditions: _Condition) -> tuple[str, list[object]]:
    """The conditions that have a value, and the values for their ?."""
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
