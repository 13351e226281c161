"""A recording as the source of frames, whole, damaged and hostile."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from appliance.daemon.requests.row import LogRow
from appliance.observe.frame.protocol import MAX_FRAME_REQUESTS
from appliance.observe.frame.recording import RecordingError
from appliance.observe.log.query import Span
from appliance.observe.log.recording_copy import write_recording
from tests.recordings import (
    assert_same,
    at,
    frame_at,
    make_recording,
    request_row,
    write_log,
)
from tests.tui import frames
from tui import replay
from tui.history import HISTORY_FRAMES
from tui.replay import Replay, open_at, past_frames
from tui.view import View


def view_at(replay: Replay, second: float) -> View:
    return replay.view_at(index_at(replay, second))


def index_at(replay: Replay, second: float) -> int:
    start = replay.start
    return start.seek(start.at_ms + second * 1000).index


def change(path: Path, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(statement, values)


def test_every_second_shows_the_frame_that_was_made_then(tmp_path: Path) -> None:
    seen = [frame_at(second) for second in range(90)]
    replay = Replay(make_recording(tmp_path, seen))
    for second in (0, 45, 89, 3):
        shown = view_at(replay, second + 0.5).frame
        assert_same(shown, seen[second])
        assert (shown.at, shown.seq) == (seen[second].at, seen[second].seq)
    replay.close()


def test_history_after_a_seek_is_that_of_having_watched(tmp_path: Path) -> None:
    replay = Replay(make_recording(tmp_path))
    watched = list(replay.views())
    assert len(watched) == 120
    for index in (0, 5, 59, 60, 119):
        sought = replay.view_at(index)
        assert sought.history == watched[index].history
        assert len(sought.history.queued) == min(index + 1, HISTORY_FRAMES)
    went_on = replay.view_at(80, (50, watched[50]))
    assert went_on.history == watched[80].history
    assert replay.view_at(50, (80, watched[80])).history == watched[50].history
    replay.close()


def test_requests_are_listed_while_they_lived_oldest_first(tmp_path: Path) -> None:
    rows = [request_row(f"cmpl-{second}", second) for second in (20, 14, 15, 9)]
    replay = Replay(make_recording(tmp_path, rows=rows))

    def shown(second: float) -> list[tuple[str, str]]:
        return [(one.id, one.phase) for one in view_at(replay, second).frame.requests]

    assert shown(8) == []
    assert shown(17) == [
        ("cmpl-9", "decoding"), ("cmpl-14", "handing_off"), ("cmpl-15", "prefilling"),
    ]  # fmt: skip
    assert shown(20) == [("cmpl-14", "decoding"), ("cmpl-15", "decoding"), ("cmpl-20", "queued")]
    assert shown(30) == []
    replay.close()


def test_what_had_not_ended_is_missed_and_said(tmp_path: Path) -> None:
    seen = [frame_at(second, num_requests=3) for second in range(20)]
    rows = [request_row("cmpl-1", 0)]
    replay = Replay(make_recording(tmp_path, seen, rows))
    assert replay.num_unlogged(view_at(replay, 5)) == 2
    assert replay.num_unlogged(view_at(replay, 15)) == 3
    replay.close()


def test_no_more_requests_are_listed_than_a_frame_has(tmp_path: Path) -> None:
    seen = [frame_at(second, num_requests=250) for second in range(3)]
    rows = [request_row(f"cmpl-{number:03}", number / 1000) for number in range(250)]
    view = view_at(replay := Replay(make_recording(tmp_path, seen, rows)), 2)
    assert len(view.frame.requests) == MAX_FRAME_REQUESTS
    assert view.frame.requests[0].id == "cmpl-000"
    assert replay.num_unlogged(view) == 0
    replay.close()


def test_events_are_those_of_the_run_until_then(tmp_path: Path) -> None:
    events = [
        (at(second), "warning", "kv.occupancy", f"event {second}") for second in range(0, 100, 10)
    ]
    path = make_recording(tmp_path, events=events)
    change(path, "INSERT INTO events SELECT 99, 7, ?, 'error', 'x', 'y', NULL", at(1))
    replay = Replay(path)
    shown = view_at(replay, 35).frame.events
    assert [(event.at, event.message) for event in shown] == [
        (at(second), f"event {second}") for second in (0, 10, 20, 30)
    ]
    replay.close()


def test_marks_are_warnings_and_errors(tmp_path: Path) -> None:
    events = [(at(5.5), "error", "a", ""), (at(7), "info", "b", ""), (at(9), "warning", "c", "")]
    replay = Replay(make_recording(tmp_path, events=events))
    first = replay.start.next_mark()
    assert (first.index, first.next_mark().index, first.next_mark().next_mark().index) == (6, 9, 9)
    assert first.next_mark().previous_mark() == first
    replay.close()


def test_the_history_goes_on_over_a_restart(tmp_path: Path) -> None:
    seen = [frame_at(second) for second in range(10)]
    again = [frame_at(20 + second, seq=second + 1, pid=7, uptime_s=second) for second in range(5)]
    replay = Replay(make_recording(tmp_path, seen + again))
    queued = replay.view_at(12).history.queued
    assert (len(queued), queued.count(None)) == (23, 10)
    replay.close()


def test_requests_of_the_run_before_are_listed_and_one_that_outlived_it_is_in_both(
    tmp_path: Path,
) -> None:
    runs = (
        ([frame_at(second) for second in range(10)], [request_row("cmpl-0", -3)]),
        ([frame_at(second, pid=7) for second in range(12, 20)], [request_row("cmpl-5", 5)]),
    )
    for seen, rows in runs:
        log = write_log(tmp_path / "requests.db", seen, rows)
        assert log.close()
    path = tmp_path / "incident.penstock"
    path.touch()
    write_recording(log.path, path, Span())
    replay = Replay(path)
    for second, place in ((9, 9), (14, 12)):
        assert [one.id for one in view_at(replay, second).frame.requests] == ["cmpl-5"]
        assert [one.id for one in replay.finished_at(place)] == ["cmpl-0"]
        assert replay.request_at("cmpl-5", place).phase == "decoding"
    replay.close()


def test_a_recording_in_memory_has_the_frames_that_are_whole(tmp_path: Path) -> None:
    path = make_recording(tmp_path, [frame_at(second) for second in range(20)])
    change(path, "UPDATE frames SET data = x'00' WHERE seq = 11")
    seqs = [frame.seq for frame in past_frames(path.read_bytes())]
    assert seqs == [*range(1, 11), *range(12, 21)]
    with pytest.raises(RecordingError):
        past_frames(b"{}")


def test_a_damaged_frame_is_passed_over_and_said(tmp_path: Path) -> None:
    path = make_recording(tmp_path, [frame_at(second) for second in range(20)])
    change(path, "UPDATE frames SET data = x'00' WHERE seq = 11")
    change(path, "UPDATE frames SET data = substr(data, 1, 20) WHERE seq = 1")
    replay = Replay(path)
    first = replay.view_at(0)
    assert (first.frame, "is damaged" in first.link.why) == (None, True)
    damaged = replay.view_at(10)
    assert (damaged.frame.seq, damaged.link.why != "") == (10, True)
    whole = replay.view_at(11)
    assert (whole.frame.seq, whole.link.why) == (12, "")
    assert replay.num_damaged == 2
    assert len(list(replay.views())) == 20
    replay.close()


def test_a_damaged_template_spares_the_rest(tmp_path: Path) -> None:
    path = make_recording(tmp_path, [frame_at(second) for second in range(4)])
    change(path, "INSERT INTO frame_templates VALUES (99, x'7b')")
    change(path, "UPDATE frames SET template_id = 99 WHERE seq = 2")
    change(path, "UPDATE frames SET template_id = 100 WHERE seq = 3")
    replay = Replay(path)
    assert [view.link.why == "" for view in replay.views()] == [True, False, False, True]
    replay.close()


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE frames SET at = 'noon'",
        "UPDATE frames SET seq = 'x'",
        "UPDATE events SET at = 7",
        "UPDATE requests SET t_finished_us = 'late'",
    ],
)
def test_what_has_no_time_is_damaged_from_the_start(tmp_path: Path, statement: str) -> None:
    events = [(at(1), "error", "a", "")]
    path = make_recording(tmp_path, rows=[request_row("cmpl-1", 0)], events=events)
    change(path, statement)
    with pytest.raises(RecordingError, match="damaged recording"):
        Replay(path)


def test_frames_that_a_damaged_index_hides_are_damaged(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(replay, "_FRAMES", f"{replay._FRAMES} LIMIT 0")
    with pytest.raises(RecordingError, match="damaged recording"):
        Replay(make_recording(tmp_path))


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE requests SET received_at = '2999-11-21T14:00:00.x'",
        "UPDATE requests SET num_sequences = 0",
        "UPDATE requests SET prompt_tokens = 'many'",
        "ALTER TABLE requests DROP COLUMN rid",
    ],
)
def test_rows_of_nonsense_are_damaged_when_they_are_met(tmp_path: Path, statement: str) -> None:
    path = make_recording(tmp_path, rows=[request_row("cmpl-1", 0)])
    change(path, statement)
    replay = Replay(path)
    with pytest.raises(RecordingError, match="damaged recording"):
        view_at(replay, 5)
    replay.close()


def test_it_begins_where_it_is_told(tmp_path: Path) -> None:
    path = make_recording(tmp_path)
    for text, index in (("", 0), ("+30s", 30), ("14:01", 60), ("2999-11-21T14:00:07Z", 7)):
        replay, playback = open_at(path, text)
        assert playback.index == index
        replay.close()
    with pytest.raises(RecordingError, match="'soon' is no time"):
        open_at(path, "soon")


def test_a_recording_that_may_only_be_read_is_enough(tmp_path: Path) -> None:
    path = make_recording(tmp_path)
    path.chmod(0o400)
    replay = Replay(path)
    assert view_at(replay, 1).frame.model == frames.busy().model
    replay.close()
    assert sorted(found.name for found in tmp_path.iterdir()) == [
        "incident.penstock", "requests.db",
    ]  # fmt: skip


def test_requests_that_had_ended_are_there_the_newest_end_first(tmp_path: Path) -> None:
    rows = [request_row(f"cmpl-{second}", second) for second in (20, 5, 9, 60)]
    replay = Replay(make_recording(tmp_path, rows=rows))
    assert replay.finished_at(index_at(replay, 14)) == ()
    (first,) = replay.finished_at(index_at(replay, 15))
    assert (first.id, first.phase, first.finish_reason) == ("cmpl-5", "finished", "length")
    assert (first.ttft_ms, first.e2e_ms, first.output_tokens) == (3000.0, 10000.0, 101)
    late = replay.finished_at(index_at(replay, 40))
    assert [request.id for request in late] == ["cmpl-20", "cmpl-9", "cmpl-5"]
    replay.close()


def test_one_request_is_found_before_during_and_after(tmp_path: Path) -> None:
    replay = Replay(make_recording(tmp_path, rows=[request_row("cmpl-1", 20)]))
    phases = [replay.request_at("cmpl-1", index_at(replay, second)) for second in (19, 22, 31)]
    assert [one and one.phase for one in phases] == [None, "prefilling", "finished"]
    assert replay.request_at("cmpl-2", index_at(replay, 22)) is None
    replay.close()


@pytest.mark.parametrize(
    ("rows", "events", "second"),
    [
        ([], [], 0),
        ([request_row("cmpl-1", 20.4)], [], 21),
        ([request_row("cmpl-1", 20)], [], 20),
        ([request_row("cmpl-1", 20)], [(at(7), "warning", "kv.occupancy", "high")], 7),
        ([request_row("cmpl-1", -4)], [], 0),
        ([], [(at(-9), "error", "worker.died", "before"), (at(3), "info", "worker.ready", "")], 0),
    ],
)
def test_it_opens_where_there_is_something_to_see(
    tmp_path: Path, rows: list[LogRow], events: list[tuple], second: int
) -> None:
    replay = Replay(make_recording(tmp_path, rows=rows, events=events))
    assert replay.opening.at_ms == replay.start.at_ms + second * 1000
    replay.close()


def test_the_incident_of_the_documentation_has_three_callers_and_a_killed_daemon() -> None:
    replay = Replay(Path(__file__).parents[2] / "docs/incident.penstock")
    seen = [view.frame for view in replay.views() if view.frame is not None]
    assert replay.num_damaged == 0
    assert len({frame.pid for frame in seen}) == 2
    assert "daemon.survived" in {alert.code for frame in seen for alert in frame.alerts}
    callers = {request.user for frame in seen for request in frame.requests}
    assert callers == {"key:ana", "key:bo", "key:reports"}
    replay.close()
