"""Write runs, requests and events to the log's tables in SQL.

Invariant: a row that cannot be stored is refused alone, and does not hold up the rows after it.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from appliance.daemon.requests.row import LogRow, RefusalRow, RowEnergy

_LOG = logging.getLogger("penstock.request_log")

Event = tuple[str, str, str, str, str | None]
"""Time, severity, code, message, actor."""
_HEARD_IN = (("events", "at"), ("frames", "at"), ("requests", "received_at"))
"""Tables that show when a daemon was last alive, and their time columns."""


def insert_run(connection: sqlite3.Connection, run: dict[str, str | None]) -> int:
    """Insert and commit a run; return its run_id. The rest is committed by its caller."""
    with connection as db:
        names, marks = ", ".join(run), ", ".join(f":{name}" for name in run)
        inserted = db.execute(f"INSERT INTO runs ({names}) VALUES ({marks})", run)
    return inserted.lastrowid or 0


class Crash(NamedTuple):
    """How the previous daemon ended without saying so."""

    about: str
    """A sentence for the operator."""
    at: str
    """Its last sign of life."""


def end_crashed_run(
    db: sqlite3.Connection, answered: Iterable[LogRow], cut: Iterable[LogRow], killed_by: str = ""
) -> Crash | None:
    """Mark a run without an end as crashed, with its last sign of life, and log its requests.

    Args:
        db: in a transaction.
        answered: requests with a reply, possibly without a row.
        cut: requests that were open; rows that exist by now are skipped.
        killed_by: the signal that ended its process; empty: unknown.

    Returns:
        None: the last run has stopped.
    """
    answered, cut = ([row for row in rows if not _has_row(db, row.rid)] for rows in (answered, cut))
    found = db.execute(
        "SELECT run_id, started_at, boot_id, stopped_at IS NOT NULL FROM runs ORDER BY run_id DESC"
    ).fetchone()
    if found is None:  # the first run of this log: those rows are to be its own
        return None
    run_id, started_at, boot, has_stopped = found
    for row in answered:
        insert_row(db, run_id, row)
    num_rows = sum(insert_row(db, run_id, row) for row in cut)
    if has_stopped:
        return None
    heard_at = max(started_at, *(_newest(db, *where, run_id, started_at) for where in _HEARD_IN))
    db.execute(
        "UPDATE runs SET stopped_at = max(?, started_at), stop_reason = 'crash'"
        " WHERE stopped_at IS NULL",
        (heard_at,),
    )
    how = f"was killed by {killed_by}" if killed_by else "was killed or crashed"
    how = how if boot == boot_id() else "ended with the machine"
    about = f"the previous daemon {how}, last heard of at {heard_at}"
    if num_rows:
        about += f"; {num_rows} request{'s were' if num_rows > 1 else ' was'} cut short"
    return Crash(about, heard_at)


def _newest(db: sqlite3.Connection, table: str, time: str, run_id: int, since: str) -> str:
    """Find the time of a run's newest row in a table, from the end; empty: no row."""
    found = db.execute(
        f"SELECT {time} FROM {table} WHERE run_id = ? AND {time} >= ? ORDER BY {time} DESC LIMIT 1",
        (run_id, since),
    ).fetchone()
    return "" if found is None else str(found[0])


def _has_row(db: sqlite3.Connection, rid: str) -> bool:
    return db.execute("SELECT 1 FROM requests WHERE rid = ?", (rid,)).fetchone() is not None


def insert_row(db: sqlite3.Connection, run_id: int, row: LogRow) -> bool:
    """Insert a request and its text, if any; False: a retry would fail, too."""
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
    """Complete the energy of an existing row; ignore lost or deleted rows."""
    db.execute(
        "UPDATE requests SET prefill_j = ?, decode_j = ? WHERE rid = ?",
        (energy.prefill_j, energy.decode_j, energy.rid),
    )


def insert_refusals(db: sqlite3.Connection, run_id: int, refusals: RefusalRow) -> None:
    """Insert a count of refused requests."""
    db.execute(
        "INSERT INTO refusals (run_id, at, user, client, status, code, number)"
        " VALUES (?, ?, ?, ?, ?, ?, ?)",
        (run_id, *map(_storable, refusals)),
    )


def insert_events(db: sqlite3.Connection, run_id: int, events: Iterable[Event]) -> None:
    """Insert events in their order."""
    db.executemany(
        "INSERT INTO events (run_id, at, severity, code, message, actor) VALUES (?, ?, ?, ?, ?, ?)",
        [(run_id, *map(_storable, event)) for event in events],
    )


def boot_id() -> str | None:
    """Return the kernel's id of this boot; runs with an equal id share their uptime."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def _storable(value: object) -> object:
    """Replace halves of surrogate pairs, which UTF-8 cannot store, by question marks."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
