"""Delete old rows of the request log in small transactions.

Invariant: a transaction deletes about SLICE_ROWS rows or moves SLICE_PAGES pages, so that the next
writer waits only milliseconds.
Never: keeps the text of a deleted request.
"""

from __future__ import annotations

import math
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from appliance.observe.log.query import log_time
from appliance.observe.log.reader import SQLITE_ERRORS
from engine.units import size_text

SLICE_ROWS = 5_000
SLICE_PAGES = 2_000
INTERVAL_S = 3_600.0
SLICE_PAUSE_S = 0.05
SIZE_AFTER_PRUNE_RATIO = 0.9
"""Size after pruning relative to max_bytes, so that not every round has to prune."""
KEEP_FRAMES = timedelta(hours=72)

_ALL_TIMES = (
    "SELECT received_at AS at FROM requests"
    " UNION ALL SELECT at FROM events UNION ALL SELECT at FROM frames"
    " UNION ALL SELECT at FROM refusals"
)
_UNUSED_TEMPLATES = (
    "DELETE FROM frame_templates WHERE template_id NOT IN (SELECT template_id FROM frames)"
)


@dataclass(frozen=True, slots=True)
class RetentionLimits:
    """Limits of the log; None: no limit."""

    keep_days: int | None = None
    max_bytes: int | None = None
    """Maximum bytes of pages in use; free pages and the write-ahead log do not count."""

    def describe(self) -> str:
        """Describe the limits, as in `beyond 30 d and 2.0 GiB`."""
        days = None if self.keep_days is None else f"{self.keep_days} d"
        size = None if self.max_bytes is None else f"{size_text(self.max_bytes)}"
        return " and ".join(bound for bound in (days, size) if bound)


@dataclass(frozen=True, slots=True)
class Pruned:
    """The number of deleted rows of each kind; counts of refusals are among the events."""

    requests: int = 0
    events: int = 0
    frames: int = 0

    def __add__(self, other: Pruned) -> Pruned:
        return Pruned(
            self.requests + other.requests,
            self.events + other.events,
            self.frames + other.frames,
        )


def used_bytes(db: sqlite3.Connection) -> int:
    """Return the bytes of pages in use."""
    return (_pragma(db, "page_count") - _pragma(db, "freelist_count")) * _pragma(db, "page_size")


def prune_steps(db: sqlite3.Connection, limits: RetentionLimits, now: datetime) -> Iterator[Pruned]:
    """Delete rows that are too old, then the oldest beyond the size limit; give the space back.

    Frames are many and soon useless, so they expire after KEEP_FRAMES. Each step is one
    transaction, done when it is yielded; let others write before the next.
    """
    horizon = _horizon(limits, now)
    if horizon is not None:
        while any_left := _delete_oldest(db, SLICE_ROWS, horizon):
            yield any_left
    while (num_old := _delete_frames(db, log_time(now - KEEP_FRAMES))) > 0:
        yield Pruned(frames=num_old)
    while num_excess := _num_excess_rows(db, limits):
        while num_excess > 0 and (step := _delete_oldest(db, min(SLICE_ROWS, num_excess))):
            num_excess -= step.requests + step.events + step.frames
            yield step
    with db:
        db.execute(_UNUSED_TEMPLATES)
    # execute() would stop at the statement's first page; a file that was made without auto_vacuum
    # frees none, and new rows take the free pages.
    while num_free := _pragma(db, "freelist_count"):
        db.executescript(f"PRAGMA incremental_vacuum({SLICE_PAGES})")
        if _pragma(db, "freelist_count") == num_free:
            break
        yield Pruned()
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


def estimate(db: sqlite3.Connection, limits: RetentionLimits, now: datetime) -> Pruned:
    """Estimate what prune_steps() would delete: exact for age, by the mean row for size."""
    horizon, num_excess = _horizon(limits, now) or "", _num_excess_rows(db, limits)
    newest = _one(db, f"SELECT max(at) FROM ({_ALL_TIMES} ORDER BY at LIMIT ?)", num_excess)
    until = max(horizon, newest or "")
    return Pruned(
        _one(db, "SELECT count(*) FROM requests WHERE received_at <= ?", until),
        _one(db, "SELECT count(*) FROM events WHERE at <= ?", until)
        + _one(db, "SELECT count(*) FROM refusals WHERE at <= ?", until),
        _one(
            db,
            "SELECT count(*) FROM frames WHERE at <= ?",
            max(until, log_time(now - KEEP_FRAMES)),
        ),
    )


class Upkeep:
    """Prune once an hour, a step at a time, between other work on the connection."""

    def __init__(self, limits: RetentionLimits) -> None:
        self._limits = limits
        self._due_s = 0.0
        self._round: Iterator[Pruned] | None = None
        self._total = Pruned()

    def set_limits(self, limits: RetentionLimits) -> None:
        """Use other limits from the next round on, which is due now."""
        self._limits = limits
        self._due_s = 0.0

    def reset(self) -> None:
        """Drop the current round after a change of connection; the next is due now."""
        self._round = None
        self._due_s = 0.0

    @property
    def due_in_s(self) -> float:
        """Return the seconds until step() is due."""
        return SLICE_PAUSE_S if self._round else max(0.0, self._due_s - time.monotonic())

    def step(self, db: sqlite3.Connection) -> Pruned | None:
        """Do one step if it is due; return the deleted rows at the end of a round.

        Raises:
            SQLITE_ERRORS: the round is over, and the next is due in an hour.
        """
        if self._round is None:
            if self.due_in_s > 0:
                return None
            self._due_s = time.monotonic() + INTERVAL_S
            self._total = Pruned()
            self._round = prune_steps(db, self._limits, datetime.now(UTC))
        try:
            step = next(self._round, None)
        except SQLITE_ERRORS:
            self._round = None
            raise
        if step is not None:
            self._total += step
            return None
        self._round = None
        return self._total


def _horizon(limits: RetentionLimits, now: datetime) -> str | None:
    """Return the last expired moment."""
    if limits.keep_days is None:
        return None
    try:
        return log_time(now - timedelta(days=limits.keep_days))
    except OverflowError:  # older than the calendar: keep everything
        return None


def _num_excess_rows(db: sqlite3.Connection, limits: RetentionLimits) -> int:
    """Estimate the rows beyond the size limit, by the mean row."""
    used = used_bytes(db)
    if limits.max_bytes is None or used <= limits.max_bytes:
        return 0
    num_rows: int = _one(db, f"SELECT count(*) FROM ({_ALL_TIMES})")
    share_kept = limits.max_bytes * SIZE_AFTER_PRUNE_RATIO / used
    return math.ceil(num_rows * (1 - share_kept))


def _delete_oldest(db: sqlite3.Connection, num_rows: int, until: str = "9") -> Pruned | None:
    """Delete this number of the oldest rows, and all rows of the last one's millisecond.

    None: nothing is left to delete. `until` is by default after every time.
    """
    end = _one(
        db,
        f"SELECT max(at) FROM (SELECT at FROM ({_ALL_TIMES}) WHERE at <= ? ORDER BY at LIMIT ?)",
        until,
        num_rows,
    )
    if end is None:
        return None
    with db:
        requests = db.execute("DELETE FROM requests WHERE received_at <= ?", (end,))
        events = db.execute("DELETE FROM events WHERE at <= ?", (end,))
        frames = db.execute("DELETE FROM frames WHERE at <= ?", (end,))
        refusals = db.execute("DELETE FROM refusals WHERE at <= ?", (end,))
    num_events = events.rowcount + refusals.rowcount
    return Pruned(requests.rowcount, num_events, frames.rowcount)


def _delete_frames(db: sqlite3.Connection, until: str) -> int:
    """Delete a slice of the frames up to `until`; return how many."""
    end = _one(
        db,
        "SELECT max(at) FROM (SELECT at FROM frames WHERE at <= ? ORDER BY at LIMIT ?)",
        until,
        SLICE_ROWS,
    )
    with db:
        return db.execute("DELETE FROM frames WHERE at <= ?", (end,)).rowcount


def _pragma(db: sqlite3.Connection, name: str) -> int:
    return int(_one(db, f"PRAGMA {name}"))


def _one(db: sqlite3.Connection, sql: str, *values: object) -> Any:
    return db.execute(sql, values).fetchone()[0]
