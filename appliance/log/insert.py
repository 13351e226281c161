"""Rows of the request log to SQL.

Owns: the statements that insert runs, requests and events, and complete a request's energy.
Invariant: a row that cannot be stored is refused alone, and does not hold up those after it.
Never: commits, but for insert_run(); retries.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path

from appliance.log.row import LogRow, RowEnergy

_LOG = logging.getLogger("penstock.request_log")

Event = tuple[str, str, str, str, str | None]
"""At, severity, code, message, actor."""
_HEARD_IN = (("events", "at"), ("frames", "at"), ("requests", "received_at"))
"""Tables in which a daemon is heard of, and their times."""


def insert_run(connection: sqlite3.Connection, run: dict[str, str | None]) -> int:
    """Begin a run; returns its run_id."""
    with connection as db:
        names, marks = ", ".join(run), ", ".join(f":{name}" for name in run)
        inserted = db.execute(f"INSERT INTO runs ({names}) VALUES ({marks})", run)
    return inserted.lastrowid or 0


def end_crashed_run(db: sqlite3.Connection, cut: Sequence[LogRow]) -> str | None:
    """Say of a run that never stopped that it crashed, when it was last heard of, and of what.

    Args:
        db: in a transaction.
        cut: requests that were open in it; those that have a row by now are passed over.

    Returns:
        A sentence for the operator; None if the last run has stopped.
    """
    cut = [row for row in cut if not _has_row(db, row.rid)]
    found = db.execute(
        "SELECT run_id, started_at, boot_id, stopped_at IS NOT NULL FROM runs ORDER BY run_id DESC"
    ).fetchone()
    if found is None:  # the log was taken away meanwhile, and what was cut belongs to that one
        return None
    run_id, started_at, boot, has_stopped = found
    num_rows = sum(insert_row(db, run_id, row) for row in cut)
    if has_stopped:
        return None
    heard_at = max(started_at, *(_newest(db, *where, run_id, started_at) for where in _HEARD_IN))
    db.execute(
        "UPDATE runs SET stopped_at = max(?, started_at), stop_reason = 'crash'"
        " WHERE stopped_at IS NULL",
        (heard_at,),
    )
    how = "was killed or crashed" if boot == boot_id() else "ended with the machine"
    requests = "1 request was" if num_rows == 1 else f"{num_rows} requests were"
    return f"the daemon before {how}, last heard of at {heard_at}; {requests} cut short"


def _newest(db: sqlite3.Connection, table: str, time: str, run_id: int, since: str) -> str:
    """Time of a run's newest row in a table, found from the end; empty if there is none."""
    found = db.execute(
        f"SELECT {time} FROM {table} WHERE run_id = ? AND {time} >= ? ORDER BY {time} DESC LIMIT 1",
        (run_id, since),
    ).fetchone()
    return "" if found is None else str(found[0])


def _has_row(db: sqlite3.Connection, rid: str) -> bool:
    return db.execute("SELECT 1 FROM requests WHERE rid = ?", (rid,)).fetchone() is not None


def insert_row(db: sqlite3.Connection, run_id: int, row: LogRow) -> bool:
    """Insert a request, and its text if there is any; False if no retry would store it."""
    columns = {name: _storable(getattr(row, name)) for name in row.__struct_fields__}
    prompt = columns.pop("prompt")
    columns["run_id"] = run_id
    names, marks = ", ".join(columns), ", ".join(f":{name}" for name in columns)
    try:
        inserted = db.execute(f"INSERT INTO requests ({names}) VALUES ({marks})", columns)
    except (sqlite3.IntegrityError, sqlite3.ProgrammingError, OverflowError) as error:
        _LOG.error("request %s is not logged: %s", row.rid, error)
        return False
    if prompt is not None:
        db.execute("INSERT INTO request_text VALUES (?, ?)", (inserted.lastrowid, prompt))
    return True


def update_energy(db: sqlite3.Connection, energy: RowEnergy) -> None:
    """Complete a row that is there; one that was lost or forgotten stays so."""
    db.execute(
        "UPDATE requests SET prefill_j = ?, decode_j = ? WHERE rid = ?",
        (energy.prefill_j, energy.decode_j, energy.rid),
    )


def insert_events(db: sqlite3.Connection, run_id: int, events: Iterable[Event]) -> None:
    """Insert events in their order."""
    db.executemany(
        "INSERT INTO events (run_id, at, severity, code, message, actor) VALUES (?, ?, ?, ?, ?, ?)",
        [(run_id, *map(_storable, event)) for event in events],
    )


def boot_id() -> str | None:
    """The kernel's name for this boot: runs that share it share their uptime."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def _storable(value: object) -> object:
    """Half of a surrogate pair, which JSON can carry and UTF-8 cannot, becomes a question mark."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
