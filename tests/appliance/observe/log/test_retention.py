"""The log forgets by age and by size, and keeps recording meanwhile."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from appliance.observe.log import retention
from appliance.observe.log.query import EventQuery, RowQuery, log_time
from appliance.observe.log.reader import read_rows
from appliance.observe.log.retention import (
    Pruned,
    RetentionLimits,
    Upkeep,
    estimate,
    prune_steps,
    used_bytes,
)
from appliance.observe.log.writer import RequestLog
from tests.appliance.logs import query, rids, row, start, write

NOW = datetime(2026, 3, 31, tzinfo=UTC)


def days_ago(number: float) -> str:
    return log_time(NOW - timedelta(days=number))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "requests.db"


@pytest.fixture
def db(path: Path) -> Iterator[sqlite3.Connection]:
    """Three hundred requests with text, one a day, and an event with each."""
    write(
        path,
        *(
            row(f"cmpl-{age}", received_at=days_ago(age), prompt="x" * 2_000)
            for age in range(300, 0, -1)
        ),
    )
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA foreign_keys = ON")
        with db:
            db.execute(
                "INSERT INTO events (run_id, at, severity, code, message)"
                " SELECT 1, received_at, 'info', 'test', '' FROM requests"
            )
        yield db


def left(db: sqlite3.Connection) -> tuple[int, ...]:
    tables = ("requests", "request_text", "events")
    return tuple(db.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in tables)


def prune(db: sqlite3.Connection, limits: RetentionLimits) -> Pruned:
    return sum(prune_steps(db, limits, NOW), Pruned())


def test_what_is_too_old_goes_with_its_text(db: sqlite3.Connection, path: Path) -> None:
    assert prune(db, RetentionLimits(keep_days=30)) == Pruned(requests=271, events=271)
    assert left(db) == (29, 29, 29)
    assert rids(read_rows(path, RowQuery(limit=1))) == ["cmpl-1"]
    assert prune(db, RetentionLimits(keep_days=30)) == Pruned()


def test_beyond_its_size_the_oldest_go_and_the_file_shrinks(
    db: sqlite3.Connection, path: Path
) -> None:
    before_bytes = path.stat().st_size
    max_bytes = used_bytes(db) // 2
    assert prune(db, RetentionLimits(max_bytes=max_bytes)).requests > 100
    assert used_bytes(db) <= max_bytes
    assert path.stat().st_size <= max_bytes < before_bytes
    assert path.with_name(path.name + "-wal").stat().st_size == 0
    rows = read_rows(path, RowQuery(limit=300))
    assert rids(rows) == [f"cmpl-{age}" for age in range(1, len(rows) + 1)]
    assert len(rows) > 100


def test_a_little_too_much_costs_few_rows(db: sqlite3.Connection) -> None:
    pruned = prune(db, RetentionLimits(max_bytes=used_bytes(db) - 1))
    assert 0 < pruned.requests <= 40


def test_without_limits_nothing_goes(db: sqlite3.Connection) -> None:
    assert prune(db, RetentionLimits()) == Pruned()
    assert prune(db, RetentionLimits(keep_days=10**9, max_bytes=2**40)) == Pruned()
    assert left(db) == (300, 300, 300)


def test_a_limit_that_nothing_fits_ends_with_an_empty_log(db: sqlite3.Connection) -> None:
    assert prune(db, RetentionLimits(max_bytes=1)) == Pruned(300, 300)
    assert left(db) == (0, 0, 0)


def test_work_is_cut_into_short_transactions(
    db: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "SLICE_ROWS", 50)
    monkeypatch.setattr(retention, "SLICE_PAGES", 20)
    steps = list(prune_steps(db, RetentionLimits(keep_days=30), NOW))
    assert sum(steps, Pruned()) == Pruned(271, 271)
    assert max(step.requests + step.events for step in steps) <= 50
    assert steps.count(Pruned()) > 5  # pages given back
    assert not db.in_transaction


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@given(st.integers(1, 400), st.floats(0.3, 1.2))
def test_an_estimate_is_exact_for_age_and_close_for_size(
    db: sqlite3.Connection, keep_days: int, size_ratio: float
) -> None:
    by_age = RetentionLimits(keep_days=keep_days)
    assert estimate(db, by_age, NOW).requests == max(0, 301 - keep_days)
    by_size = RetentionLimits(max_bytes=int(used_bytes(db) * size_ratio))
    expected = 0 if size_ratio >= 1 else 300 * (1 - 0.9 * size_ratio)
    assert estimate(db, by_size, NOW).requests == pytest.approx(expected, abs=2)
    assert left(db) == (300, 300, 300)


def test_a_round_is_due_at_once_and_then_after_an_hour(db: sqlite3.Connection) -> None:
    upkeep = Upkeep(RetentionLimits(max_bytes=1))
    rounds = [upkeep.step(db)]
    while rounds[-1] is None:
        rounds.append(upkeep.step(db))
    assert rounds[-1] == Pruned(300, 300)
    assert upkeep.due_in_s > 3_500
    assert upkeep.step(db) is None
    upkeep.set_limits(RetentionLimits(max_bytes=2))
    assert upkeep.due_in_s == 0


def test_a_round_that_fails_is_over_until_the_next(db: sqlite3.Connection) -> None:
    upkeep = Upkeep(RetentionLimits(keep_days=1))
    db.close()
    with pytest.raises(sqlite3.Error):
        upkeep.step(db)
    assert upkeep.due_in_s > 3_500


def follow(log: RequestLog, code: str) -> dict[str, object]:
    """The first event of that code; pytest's time limit ends a wait in vain."""
    found: list[dict[str, object]] = []
    pause = threading.Event()
    while not found:
        found = [one for one in log.events(EventQuery()) if one["code"] == code]
        pause.wait(0.01)
    return found[0]


@pytest.mark.usefixtures("db")
def test_a_daemon_forgets_at_its_start_and_says_so(path: Path) -> None:
    backup = path.with_name("requests.db.before-m002_users")
    backup.write_bytes(b"")
    log = start(path, RetentionLimits(keep_days=1))
    log.record(row("cmpl-new", received_at=log_time(datetime.now(UTC))))
    assert "300 requests and 300 events" in str(follow(log, "log.pruned")["message"])
    assert rids(log.rows(RowQuery())) == ["cmpl-new"]
    assert log.close()
    assert backup.exists()  # younger than a day


@pytest.mark.usefixtures("db")
def test_limits_that_change_under_way_hold_at_once(path: Path) -> None:
    log = start(path)
    assert len(log.rows(RowQuery(limit=500))) == 300
    log.set_limits(RetentionLimits(max_bytes=1))
    follow(log, "log.pruned")
    assert log.rows(RowQuery()) == []
    assert log.close()


@pytest.mark.usefixtures("db")
def test_rows_are_written_while_it_forgets(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "SLICE_ROWS", 5)
    log = start(path, RetentionLimits(keep_days=1))
    assert log.flush(10)
    log.record(row("cmpl-new", received_at=log_time(datetime.now(UTC))))
    assert log.flush(10)
    assert query(path, "SELECT count(*) FROM requests")[0][0] > 1  # far from done
    assert log.close()
    assert log.rows_lost == 0
