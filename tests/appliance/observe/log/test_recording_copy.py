"""A recording holds what was asked for out of a log, and never a prompt."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from appliance.observe.frame.recording import TABLES, open_recording
from appliance.observe.log import recording_copy
from appliance.observe.log.query import Span
from appliance.observe.log.recording_copy import temporary_recording, write_recording
from engine.errors import PenstockError, RequestError
from tests.appliance.logs import query, write_five_days
from tests.recordings import at, frame_at, make_recording, request_row, write_log


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_five_days(tmp_path)


def cut(folder: Path, since: float | None, until: float | None = None) -> Path:
    path = folder / "cut.penstock"
    path.write_bytes(b"")
    span = Span(
        since=None if since is None else at(since), until=None if until is None else at(until)
    )
    write_recording(folder / "requests.db", path, span)
    return path


def test_a_span_has_its_frames_their_templates_and_run(tmp_path: Path) -> None:
    make_recording(tmp_path)
    path = cut(tmp_path, 30, 60)
    assert query(path, "SELECT min(at), max(at), count(*) FROM frames") == [(at(30), at(59), 30)]
    assert query(path, "SELECT count(*) FROM frame_templates") == [(1,)]
    assert query(path, "SELECT run_id, model FROM runs") == [(1, "tiny")]
    assert query(path, "PRAGMA integrity_check") == [("ok",)]
    with (
        closing(open_recording(path)) as db,
        pytest.raises(sqlite3.OperationalError, match="readonly"),
    ):
        db.execute("DELETE FROM frames")


def test_requests_that_reach_into_the_span_are_there(tmp_path: Path) -> None:
    rows = [request_row(f"from-{second}", second) for second in (10, 19, 21, 35, 59, 60)]
    make_recording(tmp_path, rows=rows)
    path = cut(tmp_path, 30, 60)
    found = query(path, "SELECT rid FROM requests ORDER BY received_at")
    assert found == [("from-21",), ("from-35",), ("from-59",)]


def test_events_come_with_as_many_from_before_as_a_frame_shows(tmp_path: Path) -> None:
    events = [(at(second), "info", "test", f"event {second}") for second in range(120)]
    make_recording(tmp_path, events=events)
    path = cut(tmp_path, 100, 110)
    assert query(path, "SELECT min(at), max(at), count(*) FROM events") == [(at(50), at(109), 60)]


def test_no_text_of_a_prompt_is_in_it(tmp_path: Path) -> None:
    log = write_log(tmp_path / "requests.db", [frame_at(0)])
    log.record(request_row("cmpl-1", 0, prompt="the secret of the mill"))
    assert log.close()
    assert b"secret of the mill" in log.path.read_bytes()
    path = cut(tmp_path, None)
    assert query(path, "SELECT rid FROM requests") == [("cmpl-1",)]
    assert b"secret of the mill" not in path.read_bytes()
    names = {name for (name,) in query(path, "SELECT name FROM sqlite_master WHERE type='table'")}
    assert names == set(TABLES)


def test_a_span_without_frames_is_not_found(tmp_path: Path) -> None:
    make_recording(tmp_path)
    with pytest.raises(RequestError, match="nothing was recorded") as caught:
        cut(tmp_path, 500)
    assert (caught.value.status, caught.value.code) == (404, "nothing_recorded")


def test_a_log_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    target = tmp_path / "cut"
    target.touch()
    with pytest.raises(PenstockError, match="cannot read"):
        write_recording(tmp_path / "requests.db", target, Span())
    assert [found.name for found in tmp_path.iterdir()] == ["cut"]


def test_a_temporary_recording_leaves_no_file_behind(tmp_path: Path) -> None:
    log = write_log(tmp_path / "requests.db", [frame_at(0)])
    before = sorted(os.listdir(tmp_path))
    with log.recording(Span()) as made:
        assert made.read(15) == b"SQLite format 3"
        assert sorted(os.listdir(tmp_path)) == before
    with pytest.raises(RequestError, match="nothing was recorded"):
        temporary_recording(log.path, Span(until=at(-1)))
    assert sorted(os.listdir(tmp_path)) == before
    assert log.close()


def test_a_recording_that_a_killed_daemon_left_is_removed_by_the_next(tmp_path: Path) -> None:
    left = tmp_path / ".recording-x1y2"
    left.write_bytes(b"half")
    log = write_log(tmp_path / "requests.db", [frame_at(0)])
    assert not left.exists()
    assert log.close()


def test_a_running_daemon_is_recorded_up_to_its_newest_frame(tmp_path: Path) -> None:
    log = write_log(tmp_path / "requests.db", [frame_at(0)])
    log.frame(frame_at(1))
    with log.recording(Span()) as made:
        copy = tmp_path / "copy"
        copy.write_bytes(made.read())
    assert query(copy, "SELECT seq FROM frames") == [(1,), (2,)]
    assert log.close()


def test_a_disk_without_room_for_a_recording_is_named_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_recording(tmp_path)
    monkeypatch.setattr(recording_copy, "ROOM_BYTES", 1 << 60)
    with pytest.raises(RequestError, match="no room") as refused:
        cut(tmp_path, None)
    assert f"df -h {tmp_path}" in refused.value.hint
    assert (tmp_path / "cut.penstock").stat().st_size == 0


@pytest.mark.parametrize("limit", ["MAX_BYTES", "ROOM_BYTES"])
def test_a_recording_fills_no_disk(tmp_path: Path, monkeypatch, limit: str) -> None:
    make_recording(tmp_path)
    value = 8 << 10 if limit == "MAX_BYTES" else 1 << 60
    monkeypatch.setattr(recording_copy, limit, value)
    with pytest.raises(RequestError) as refused:
        cut(tmp_path, None)
    assert (refused.value.code, refused.value.status) == ("recording_too_large", 413)
    assert (tmp_path / "cut.penstock").stat().st_size <= 8 << 10
    with pytest.raises(RequestError):
        temporary_recording(tmp_path / "requests.db", Span())
    assert not list(tmp_path.glob(".recording-*"))
