"""Frames in the log: written by its thread, in batches, through trouble, and forgotten in time."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest

from appliance.observe.frame.protocol import Frame
from appliance.observe.frame.recording import FramePacker
from appliance.observe.log import frame_rows, writer
from appliance.observe.log.log_file import open_log
from appliance.observe.log.query import Span
from appliance.observe.log.recording_copy import write_recording
from appliance.observe.log.retention import (
    KEEP_FRAMES,
    Pruned,
    RetentionLimits,
    estimate,
    prune_steps,
)
from appliance.observe.log.writer import RequestLog
from engine.errors import PenstockError
from tests.appliance.logs import query, row, start
from tests.recordings import BEGAN, assert_same, at, frame_at, write_log
from tests.tui import frames

NUM_FRAMES = "SELECT count(*) FROM frames"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "requests.db"


def stored(path: Path) -> list[Frame]:
    """The frames in the file, in order."""
    packers = {
        template_id: FramePacker(template)
        for template_id, template in query(path, "SELECT * FROM frame_templates")
    }
    rows = query(path, "SELECT template_id, data, at, seq, uptime_ms FROM frames ORDER BY at, seq")
    return [
        packers[template_id].unpack(data, at=when, seq=seq, uptime_ms=uptime_ms)
        for template_id, data, when, seq, uptime_ms in rows
    ]


def test_frames_are_kept_without_the_requests_and_events_that_they_show(path: Path) -> None:
    log = start(path)
    seen = [frames.busy(seq, at=at(seq), uptime_s=seq + 0.25) for seq in range(1, 9)]
    for frame in seen:
        log.frame(frame)
    assert log.close()
    found = stored(path)
    assert [one.requests + one.events for one in found] == [[]] * 8
    for shown, told in zip(found, seen, strict=True):
        assert_same(shown, told)
    assert query(path, "SELECT DISTINCT run_id, version FROM frames") == [(1, 1)]


def test_frames_wait_for_each_other_and_rows_take_them_along(path: Path) -> None:
    log = start(path)
    for second in range(writer.COMMIT_FRAMES - 1):
        log.frame(frame_at(second))
    log.record(row("cmpl-1"))
    while not query(path, "SELECT 1 FROM requests"):
        time.sleep(0.01)
    assert query(path, NUM_FRAMES) == [(4,)]
    for second in range(4, 4 + writer.COMMIT_FRAMES):
        log.frame(frame_at(second))
    while query(path, NUM_FRAMES) != [(9,)]:
        time.sleep(0.01)
    log.frame(frame_at(9))
    assert log.flush(10), "who asks is not made to wait for more"
    assert query(path, NUM_FRAMES) == [(10,)]
    assert log.close()


def test_templates_are_renewed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_rows, "TEMPLATE_FRAMES", 3)
    assert write_log(path, [frame_at(second) for second in range(8)]).close()
    assert query(path, "SELECT template_id, count(*) FROM frames GROUP BY 1") == [
        (1, 3), (2, 3), (3, 2),
    ]  # fmt: skip
    assert len(stored(path)) == 8


def test_another_state_gets_a_template_of_its_own(path: Path) -> None:
    states = ("loading", "loading", "ready", "ready", "ready", "draining")
    seen = [frame_at(second, state=state) for second, state in enumerate(states)]
    assert write_log(path, seen).close()
    assert query(path, "SELECT template_id FROM frames ORDER BY at") == [
        (1,), (1,), (2,), (2,), (2,), (3,),
    ]  # fmt: skip
    assert [one.state for one in stored(path)] == list(states)


def test_a_full_queue_drops_the_oldest_frames_and_counts_them(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "MAX_QUEUED_FRAMES", 3)
    log = RequestLog(path)  # its writer starts with the run, so the queue fills up
    for second in range(5):
        log.frame(frame_at(second))
    log.start_run(version="1", model="m", dtype="d", roles="static", transport=None)
    assert log.close()
    assert (log.frames_lost, log.rows_lost) == (2, 0)
    assert [one.at for one in stored(path)] == [at(second) for second in (2, 3, 4)]


def test_a_disk_that_refuses_a_template_gets_it_again(path: Path) -> None:
    log = write_log(path, [])
    with closing(sqlite3.connect(path)) as other:
        other.execute(
            "CREATE TRIGGER refuse BEFORE INSERT ON frames BEGIN SELECT raise(FAIL, ''); END"
        )
        log.frame(frame_at(0))
        assert not log.flush(0.2)
        other.execute("DROP TRIGGER refuse")
    assert log.flush(10)
    log.frame(frame_at(1))
    assert log.close()
    assert [one.seq for one in stored(path)] == [1, 2]
    assert log.frames_lost == 0


def test_what_cannot_be_written_in_the_end_is_counted(path: Path) -> None:
    log = write_log(path, [])
    with closing(sqlite3.connect(path)) as other:
        other.execute("BEGIN IMMEDIATE")
        log.frame(frame_at(0))
        assert not log.close(0.5)
        assert (log.frames_lost, log.rows_lost) == (1, 0)


def test_a_new_file_under_the_daemon_gets_a_template_of_its_own(path: Path) -> None:
    log = write_log(path, [frame_at(0)])
    path.unlink()
    log.frame(frame_at(1))
    assert log.flush(10)
    assert log.close()
    assert [one.seq for one in stored(path)] == [2]


def test_two_runs_and_one_moment_are_kept_apart(path: Path) -> None:
    assert write_log(path, [frame_at(0), frame_at(0, seq=2)]).close()
    assert write_log(path, [frame_at(0)]).close()
    assert query(path, "SELECT run_id, seq FROM frames") == [(1, 1), (1, 2), (2, 1)]


@pytest.fixture
def db(path: Path) -> Iterator[sqlite3.Connection]:
    """Four days of frames, one an hour, each with a template; requests and events as often."""
    log = write_log(path, [])
    hours = range(96)
    for hour in hours:
        log.record(row(f"cmpl-{hour}", received_at=at(hour * 3600)))
    assert log.close()
    with closing(open_log(path)) as db:
        with db:
            db.executemany(
                "INSERT INTO events (run_id, at, severity, code, message)"
                " VALUES (1, ?, 'info', '', '')",
                [(at(hour * 3600),) for hour in hours],
            )
            db.executemany("INSERT INTO frame_templates VALUES (?, x'')", [(h,) for h in hours])
            db.executemany(
                "INSERT INTO frames VALUES (?, 1, ?, 0, 1, ?, zeroblob(200))",
                [(at(hour * 3600), hour, hour) for hour in hours],
            )
        yield db


def left(db: sqlite3.Connection) -> tuple[int, ...]:
    tables = ("requests", "events", "frames", "frame_templates")
    return tuple(db.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in tables)


NOW = BEGAN + timedelta(hours=95)


def test_frames_go_after_three_days_and_their_templates_with_them(db: sqlite3.Connection) -> None:
    assert timedelta(hours=72) == KEEP_FRAMES
    assert sum(prune_steps(db, RetentionLimits(), NOW), Pruned()) == Pruned(frames=24)
    assert left(db) == (96, 96, 72, 72)
    assert sum(prune_steps(db, RetentionLimits(), NOW), Pruned()) == Pruned()


def test_a_log_that_forgets_sooner_forgets_frames_with_the_rest(db: sqlite3.Connection) -> None:
    limits = RetentionLimits(keep_days=1)
    assert estimate(db, limits, NOW) == Pruned(72, 72, 72)
    assert sum(prune_steps(db, limits, NOW), Pruned()) == Pruned(72, 72, 72)
    assert left(db) == (24, 24, 24, 24)


def test_too_large_a_log_loses_the_oldest_of_each(db: sqlite3.Connection) -> None:
    list(prune_steps(db, RetentionLimits(max_bytes=1), NOW))
    assert left(db) == (0, 0, 0, 0)


def test_forgotten_frames_alone_are_no_news(path: Path) -> None:
    log = write_log(path, [frames.busy(1, at="2020-01-01T00:00:00.000Z")])
    log.set_limits(RetentionLimits(keep_days=10_000))  # a round is due
    while query(path, NUM_FRAMES) != [(0,)]:
        time.sleep(0.01)
    assert log.close()
    assert query(path, "SELECT count(*) FROM events WHERE code = 'log.pruned'") == [(0,)]


def test_a_log_without_frames_says_so_until_a_new_one_is_made(path: Path) -> None:
    open_log(path).close()
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("DROP TABLE frames")
        db.execute("DELETE FROM _sqlite_migrations WHERE name > 'm004_energy'")
    target = path.with_name("recording")
    target.touch()
    with pytest.raises(PenstockError, match="no such table") as caught:
        write_recording(path, target, Span())
    assert "penstock serve" in caught.value.hint
    assert write_log(path, [frame_at(0)]).close()
    assert len(stored(path)) == 1
