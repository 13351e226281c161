"""A recording as the source of frames, whole, damaged and hostile."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.frame.latency import stages
from appliance.frame.protocol import MAX_FRAME_REQUESTS
from appliance.frame.recording import RecordingError
from appliance.log.row import LogRow, frame_of_row
from engine.schedule.sequence import Stamps
from tests.appliance.logs import US, request, sequence
from tests.recordings import assert_same, at, frame_at, make_recording, request_row, write_log
from tests.tui import frames
from tui import replay
from tui.history import HISTORY_FRAMES
from tui.past_requests import ended, request_at
from tui.playback import MAX_PAUSE_MS, SPEEDS, Playback, iso, parse_moment, unix_ms
from tui.replay import Replay, open_at
from tui.view import View

# Requests of a past second, from their rows.


STAMPS = (
    "t_tokenized_us", "t_started_us", "t_first_token_us", "t_attached_us", "t_decode_started_us",
    "t_second_token_us", "t_last_token_us",
)  # fmt: skip
MEASURED = (
    "tokenize_ms", "queue_ms", "prefill_ms", "ttft_ms", "handoff_ms", "decode_wait_ms",
    "decode_ms", "paused_ms", "restore_ms", "first_itl_ms", "tpot_ms", "e2e_ms", "output_tokens",
    "computed_tokens", "preemptions", "restored_tokens",
)  # fmt: skip
STAGES = (
    "tokenize_ms", "queue_ms", "restore_ms", "prefill_ms", "handoff_ms", "decode_wait_ms",
    "ttft_ms",
)  # fmt: skip


def row(**columns: Any) -> dict[str, Any]:
    made = msgspec.to_builtins(request_row("cmpl-1", 0, **columns))
    return {**made, "user": "ann"}


@pytest.mark.parametrize(
    ("age_ms", "phase", "worker", "computed", "output"),
    [
        (0, "queued", None, 0, 0),
        (999, "queued", None, 0, 0),
        (1_000, "prefilling", "prefill", 0, 0),
        (2_000, "prefilling", "prefill", 200, 0),
        (3_000, "handing_off", "prefill", 400, 1),
        (3_500, "decoding", "decode", 400, 1),
        (3_700, "decoding", "decode", 401, 2),
        (6_800, "decoding", "decode", 450, 51),
        (9_950, "decoding", "decode", 500, 101),
    ],
)
def test_a_request_goes_through_its_phases(
    age_ms: float, phase: str, worker: str | None, computed: int, output: int
) -> None:
    past = request_at(row(), age_ms, frames.busy())
    assert (past.phase, past.worker) == (phase, worker)
    assert (past.computed_tokens, past.output_tokens) == (computed, output)
    assert (past.age_ms, past.is_estimated) == (age_ms, phase != "queued")
    assert past.finish_reason is past.e2e_ms is past.decode_ms is None


def test_what_comes_later_is_not_shown_before() -> None:
    early = request_at(row(), 2_000, frames.busy())
    assert (early.queue_ms, early.prefill_ms, early.ttft_ms) == (999.0, None, None)
    assert (early.transport, early.handoff_bytes) == (None, None)
    late = request_at(row(), 5_000, frames.busy())
    assert (late.prefill_ms, late.ttft_ms, late.handoff_ms) == (2_000.0, 3_000.0, 500.0)
    assert (late.decode_wait_ms, late.first_itl_ms, late.transport) == (100.0, 700.0, "alias")
    assert request_at(row(), 500, frames.busy()).route is None
    assert late.route == "move"


def test_a_request_that_one_worker_runs_is_never_handed_off() -> None:
    stays = {"route": "decode", "t_attached_us": None, "transport": None}
    past = request_at(row(**stays), 3_200, frames.busy())
    assert (past.phase, past.worker) == ("decoding", "decode")
    assert request_at(row(**stays), 3_200, frames.colocated()).worker == "colocated"


def test_blocks_are_those_of_its_tokens_at_that_moment() -> None:
    assert request_at(row(), 500, frames.busy()).num_blocks == 0
    # of 64 tokens, for 400 of the prompt and those of the output by then
    assert request_at(row(), 5_000, frames.busy()).num_blocks == 7
    assert request_at(row(num_sequences=2), 5_000, frames.busy()).num_blocks == 8
    assert request_at(row(), 5_000, frames.loading()).num_blocks == 0


OFFSETS_US = st.none() | st.integers(0, 5_000_000)


@given(
    st.tuples(*[OFFSETS_US] * 7),
    st.integers(0, 5_000_000),
    OFFSETS_US,
    st.floats(0, 1),
    st.integers(0, 40),
    st.integers(1, 4),
)
def test_any_stamps_make_a_request_that_adds_up(
    offsets_us: tuple[int | None, ...],
    finished_us: int,
    paused_us: int | None,
    share: float,
    num_tokens: int,
    num_sequences: int,
) -> None:
    one = sequence()
    at_ns = [None if offset is None else 7_000 + offset * US for offset in offsets_us]
    one.stamps = Stamps(7_000, *at_ns, finished_ns=7_000 + finished_us * US)
    one.stamps.restored_ns = None if paused_us is None else paused_us // 2 * US
    one.stamps.paused_ns = None if paused_us is None else paused_us * US
    one.output_token_ids = [4] * num_tokens
    logged = msgspec.to_builtins(LogRow.from_request(request("cmpl-1", *[one] * num_sequences)))
    age_ms = share * finished_us / 1000
    past = request_at({**logged, "user": None, "route": "move"}, age_ms, frames.busy())
    assert 0 <= past.output_tokens <= num_tokens * num_sequences
    assert 0 <= past.computed_tokens <= past.prompt_tokens + past.output_tokens
    assert (past.phase == "queued") == (past.worker is None)
    final = stages(one.stamps, num_tokens)
    for name in STAGES:
        if getattr(past, name) is not None:
            assert getattr(past, name) == pytest.approx(getattr(final, name)), name
    shown = [getattr(past, name) for name in STAGES[:-1]]
    assert sum(value or 0 for value in shown) <= age_ms + 1e-6


def test_a_request_that_is_over_has_the_stages_that_the_log_gives_it(tmp_path: Path) -> None:
    cuts = (
        {},
        {"t_attached_us": None},
        dict.fromkeys(("t_attached_us", "t_decode_started_us", "t_second_token_us")),
        dict.fromkeys(STAMPS[2:]),
        dict.fromkeys(STAMPS[1:]),
        dict.fromkeys(STAMPS),
    )
    rows = [request_row(f"cmpl-{n}", 0, num_timed_tokens=1, **cut) for n, cut in enumerate(cuts)]
    rows.append(request_row("cmpl-all", 0))
    rows.append(request_row("cmpl-paused", 0, paused_us=3_000, preemptions=2))
    restored = {"restored_us": 40_000, "restored_tokens": 64, "cached_tokens": 128}
    rows.append(request_row("cmpl-restored", 0, **restored))
    rows.append(request_row("cmpl-given-up", 0, **restored, **dict.fromkeys(STAMPS[1:])))
    unknown = dict.fromkeys((*STAMPS, "t_finished_us", "completion_tokens"))
    rows.append(request_row("cmpl-killed", 0, **unknown))
    assert request_at(row(**unknown), 500, frames.busy()).output_tokens == 0
    log = write_log(tmp_path / "requests.db", [], rows)
    with closing(sqlite3.connect(log.path)) as db:
        db.row_factory = sqlite3.Row
        for one in rows:
            told = dict(db.execute("SELECT * FROM v_requests WHERE rid = ?", (one.rid,)).fetchone())
            told["id"] = told.pop("rid")
            stored = db.execute("SELECT * FROM requests WHERE rid = ?", (one.rid,)).fetchone()
            shown = msgspec.to_builtins(ended(stored))
            wanted = msgspec.to_builtins(frame_of_row(told))
            assert {name: shown[name] for name in MEASURED} == pytest.approx(
                {name: wanted[name] for name in MEASURED}
            )
            assert (shown["phase"], shown["finish_reason"]) == ("finished", wanted["finish_reason"])
    log.close()


# --------------------------------------------------------------------------------------------------


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


def test_a_daemon_that_started_again_starts_its_history_again(tmp_path: Path) -> None:
    seen = [frame_at(second) for second in range(10)]
    again = [frame_at(20 + second, seq=second + 1, pid=7, uptime_s=second) for second in range(5)]
    replay = Replay(make_recording(tmp_path, seen + again))
    assert len(replay.view_at(12).history.queued) == 3
    replay.close()


def test_a_damaged_frame_is_passed_over_and_said(tmp_path: Path) -> None:
    path = make_recording(tmp_path, [frame_at(second) for second in range(20)])
    change(path, "UPDATE frames SET data = x'00' WHERE seq = 11")
    change(path, "UPDATE frames SET data = substr(data, 1, 20) WHERE seq = 1")
    replay = Replay(path)
    first = replay.view_at(0)
    assert (first.frame, first.link.why) == (None, "this frame of the recording is damaged")
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


# --------------------------------------------------------------------------------------------------
# Seeking, stepping and playing: a model of time without a screen.

TIMES_MS = st.integers(0, 200_000)
MOMENTS = st.lists(TIMES_MS, min_size=1, max_size=60).map(sorted)


@st.composite
def playbacks(draw, moments=MOMENTS) -> Playback:
    """Anywhere in a recording, at any speed."""
    moments_ms = draw(moments)
    marks_ms = sorted(
        draw(st.lists(st.integers(moments_ms[0], moments_ms[-1]), max_size=5, unique=True))
    )
    start = Playback(moments_ms, marks_ms, speed=draw(st.sampled_from(SPEEDS)))
    return start.step(draw(st.integers(0, len(moments_ms) - 1)))


@given(playbacks(), st.integers(-1_000, 300_000))
def test_a_seek_finds_the_newest_frame_that_is_not_later(here: Playback, time_ms: int) -> None:
    found = here.seek(time_ms)
    earlier = [at_ms for at_ms in here.moments_ms if at_ms <= time_ms]
    assert found.at_ms == (earlier[-1] if earlier else here.moments_ms[0])
    assert not earlier or found.index == len(earlier) - 1
    assert found.now_ms == found.at_ms


@given(MOMENTS)
def test_stepping_visits_every_frame_once_both_ways(moments_ms: list[int]) -> None:
    here, visited = Playback(moments_ms), [0]
    while not here.is_at_end:
        here = here.step(1)
        visited.append(here.index)
    assert visited == list(range(len(moments_ms)))
    assert here.step(1).index == here.index
    for index in reversed(visited):
        assert here.index == index
        here = here.step(-1)
    assert here.index == 0


@given(playbacks(), st.sampled_from([-60_000, 60_000]))
def test_a_skip_always_gets_on_and_never_too_far(here: Playback, offset_ms: int) -> None:
    there = here.skip(offset_ms)
    if offset_ms > 0:
        assert there.index > here.index or here.is_at_end
        assert there.at_ms <= here.at_ms + offset_ms or there.index == here.index + 1
    else:
        assert there.index < here.index or here.index == 0
        assert (
            there.index == 0
            or there.index == here.index - 1
            or (here.moments_ms[there.index + 1] > here.at_ms + offset_ms)
        )


@given(playbacks())
def test_marks_are_all_visited_going_on_and_going_back(here: Playback) -> None:
    expected = {next(i for i, at in enumerate(here.moments_ms) if at >= m) for m in here.marks_ms}
    start = here.seek(here.moments_ms[0])
    seen, one = {start.index} & expected, start.step(0)
    while (there := one.next_mark()).index != one.index:
        assert there.index > one.index
        one = there
        seen.add(one.index)
    ties = {i for i in expected if here.moments_ms[i] == start.at_ms}
    assert seen | ties == expected | (seen & ties)
    back, seen_back = here.seek(here.moments_ms[-1]), set()
    if back.index in expected:
        seen_back.add(back.index)
    while (there := back.previous_mark()).index != back.index:
        assert there.index < back.index
        back = there
        seen_back.add(back.index)
    assert seen_back == expected


@given(playbacks(), st.lists(st.floats(0.01, 2), min_size=1, max_size=40))
def test_playing_goes_through_time_in_order_and_stops_at_the_end(
    here: Playback, elapsed_s: list[float]
) -> None:
    here = here.toggled()
    for one_s in elapsed_s:
        there = here.after(one_s)
        assert there.index >= here.index
        assert there.at_ms <= there.now_ms or there.index == 0
        assert there.is_playing is not there.is_at_end
        if not there.is_playing:
            assert there.after(one_s) == there
            return
        here = there


def test_time_passes_at_the_speed_asked_for() -> None:
    moments_ms = range(0, 120_000, 1000)
    slow = Playback(moments_ms, speed=0.25, is_playing=True)
    assert slow.after(3.9).index == 0
    assert slow.after(2).after(2).index == 1
    assert Playback(moments_ms, speed=60.0, is_playing=True).after(0.25).index == 15
    assert Playback(moments_ms).after(10).index == 0, "paused"


def test_stretches_without_frames_are_skipped_after_a_second() -> None:
    moments_ms = [0, 1000, 1000 + MAX_PAUSE_MS + 1, 1000 + MAX_PAUSE_MS + 1001]
    here = Playback(moments_ms, is_playing=True).after(1.0).after(0.9)
    assert here.index == 1
    assert here.after(0.2).index == 2
    short = Playback([0, MAX_PAUSE_MS, MAX_PAUSE_MS + 1], is_playing=True)
    assert short.after(9.9).index == 0


@given(playbacks(), st.lists(st.sampled_from([-1, 1]), max_size=20))
def test_speeds_have_ends(here: Playback, steps: list[int]) -> None:
    for step in steps:
        there = here.faster(step)
        assert abs(SPEEDS.index(there.speed) - SPEEDS.index(here.speed)) <= 1
        here = there
    assert here.faster(100).speed == 60.0
    assert here.faster(-100).speed == 0.25


def test_playing_from_the_end_begins_again() -> None:
    end = Playback([0, 1000, 2000]).seek(9000)
    assert (end.toggled().index, end.toggled().is_playing) == (0, True)
    assert Playback([0, 1000]).toggled().toggled() == Playback([0, 1000])


NOON = unix_ms(datetime(2026, 11, 21, 12, 0, 0, tzinfo=UTC))


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("14:02", "2026-11-21T14:02:00.000Z"),
        (" 14:02:11Z ", "2026-11-21T14:02:11.000Z"),
        ("-5m", "2026-11-21T11:55:00.000Z"),
        ("+30s", "2026-11-21T12:00:30.000Z"),
        ("-2h", "2026-11-21T10:00:00.000Z"),
        ("2026-11-20T08:00", "2026-11-20T08:00:00.000Z"),
        ("2026-11-20T08:00:00.250+01:00", "2026-11-20T07:00:00.250Z"),
    ],
)
def test_times_are_read_as_people_write_them(text: str, moment: str) -> None:
    found = parse_moment(text, NOON)
    assert found is not None
    assert iso(found) == moment


@pytest.mark.parametrize(
    "text", ["", "soon", "25:00", "14:99", "5m", "-5w", "1e9", "\x1b[A", "²:00"]
)
def test_what_is_no_time_is_none(text: str) -> None:
    assert parse_moment(text, NOON) is None


@given(st.datetimes(datetime(1970, 1, 1), datetime(3000, 1, 1)))
def test_milliseconds_and_text_are_the_same_time(naive: datetime) -> None:
    at = naive.replace(microsecond=naive.microsecond // 1000 * 1000, tzinfo=UTC)
    assert datetime.fromisoformat(iso(unix_ms(at))) == at
