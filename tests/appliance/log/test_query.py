"""Text parameters become checked queries, or a refusal that names the parameter."""

from __future__ import annotations

import json
import os
import sqlite3
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from appliance.frame.protocol import utc_now
from appliance.frame.recording import TABLES, open_recording
from appliance.log import reader
from appliance.log.query import (
    STAGES,
    EventQuery,
    RowQuery,
    SlowFilter,
    Span,
    UsageQuery,
    event_query,
    parse_time,
    row_query,
    usage_query,
)
from appliance.log.reader import read_events, read_row, read_rows, read_usage
from appliance.log.recording_copy import temporary_recording, write_recording
from appliance.request import Peer
from engine.errors import PenstockError, RequestError
from tests.appliance.logs import query, rids, row, start, write
from tests.recordings import at, frame_at, make_recording, request_row, write_log

NOW = datetime(2026, 3, 4, 12, 0, 0, 500_000, tzinfo=UTC)


def test_without_parameters_the_newest_rows_are_asked_for() -> None:
    assert row_query({}) == RowQuery(limit=20)
    assert event_query({}) == EventQuery(limit=20, severity="info")
    assert usage_query({}) == UsageQuery(by="user")


def test_every_parameter_is_read() -> None:
    given_ = {
        "limit": "5",
        "since": "2026-01-02",
        "until": "2026-01-03T04:05:06.789+01:00",
        "user": "key:ci",
        "errors": "1",
        "slow": "ttft > 500.5ms",
        "after": "17",
    }
    assert row_query(given_) == RowQuery(
        limit=5,
        since="2026-01-02T00:00:00.000Z",
        until="2026-01-03T03:05:06.789Z",
        user="key:ci",
        failed_only=True,
        slow=SlowFilter("ttft", is_above=True, bound_ms=500.5),
        after=17,
    )
    assert event_query({"severity": "warning", "after": "0"}).severity == "warning"
    assert usage_query({"by": "day", "until": "2026-01-02T00:00:00Z"}).by == "day"


@pytest.mark.parametrize(
    ("text", "slow"),
    [
        ("ttft>500", SlowFilter("ttft", is_above=True, bound_ms=500)),
        ("e2e > 2s", SlowFilter("e2e", is_above=True, bound_ms=2000)),
        ("queue>1.5 s", SlowFilter("queue", is_above=True, bound_ms=1500)),
        ("tpot<40ms", SlowFilter("tpot", is_above=False, bound_ms=40)),
    ],
)
def test_a_bound_is_in_milliseconds_unless_it_says_seconds(text: str, slow: SlowFilter) -> None:
    assert row_query({"slow": text}).slow == slow


@pytest.mark.parametrize(
    ("text", "time"),
    [
        ("-90s", "2026-03-04T11:58:30.500Z"),
        ("-30m", "2026-03-04T11:30:00.500Z"),
        ("-1h", "2026-03-04T11:00:00.500Z"),
        ("1h", "2026-03-04T11:00:00.500Z"),
        ("-2d", "2026-03-02T12:00:00.500Z"),
        ("-1w", "2026-02-25T12:00:00.500Z"),
        ("2026-03-04T13:00:00+02:00", "2026-03-04T11:00:00.000Z"),
        ("2026-03-04 13:00", "2026-03-04T13:00:00.000Z"),
    ],
)
def test_times_are_ages_or_iso_8601_in_utc(text: str, time: str) -> None:
    assert parse_time(text, "since", NOW) == time


def test_the_logs_own_times_are_read_as_they_are() -> None:
    now = utc_now()
    assert parse_time(now, "since", NOW) == now


@pytest.mark.parametrize(
    ("params", "code"),
    [
        ({"limit": "0"}, "invalid_value"),
        ({"limit": "10001"}, "invalid_value"),
        ({"limit": "x"}, "invalid_type"),
        ({"limit": "-1"}, "invalid_type"),
        ({"limit": "٣"}, "invalid_type"),
        ({"after": "9" * 5_000}, "invalid_value"),
        ({"since": "yesterday"}, "invalid_value"),
        ({"since": "-1y"}, "invalid_value"),
        ({"since": "-999999999w"}, "invalid_value"),
        ({"until": ""}, "invalid_value"),
        ({"until": "0001-01-01T00:00:00+14:00"}, "invalid_value"),
        ({"errors": "maybe"}, "invalid_value"),
        ({"slow": "ttft=500"}, "invalid_value"),
        ({"slow": "ttft>500us"}, "invalid_value"),
        ({"slow": "id>0"}, "invalid_value"),
        ({"slow": "ttft_ms>1; DROP TABLE requests"}, "invalid_value"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(params: dict[str, str], code: str) -> None:
    with pytest.raises(RequestError) as caught:
        row_query(params)
    assert (caught.value.status, caught.value.code) == (400, code)
    assert caught.value.param == next(iter(params))


def test_words_that_are_not_listed_are_refused_with_the_list() -> None:
    with pytest.raises(RequestError, match="info, warning, error"):
        event_query({"severity": "fatal"})
    with pytest.raises(RequestError, match="user, model, day"):
        usage_query({"by": "moon"})


@given(st.dictionaries(st.sampled_from(["limit", "since", "slow", "after", "errors"]), st.text()))
def test_any_text_is_a_query_or_a_refusal(params: dict[str, str]) -> None:
    refused = None
    try:
        found = row_query(params)
    except RequestError as error:
        refused = error.param
    assert refused in params or found.limit in range(1, 10_001)


# --------------------------------------------------------------------------------------------------
# Rows, events and sums, out of a file that a daemon has written.

DAYS = tuple(f"2026-01-0{day}T12:00:00.000Z" for day in range(1, 6))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Five requests, a day apart: two of bob's key, one refused, one aborted, one slow."""
    path = tmp_path / "requests.db"
    write(
        path,
        row("a", received_at=DAYS[0]),
        row("b", received_at=DAYS[1], peer_user=None, key_name="bob", model="other"),
        row("c", received_at=DAYS[2], peer_user=None, key_name="bob", http_status=500),
        row("d", received_at=DAYS[3], finish_reason="abort", t_decode_started_us=None),
        row("e", received_at=DAYS[4], t_first_token_us=600_000, peer_user=None),
    )
    return path


def test_rows_come_newest_first_and_carry_their_cursor(path: Path) -> None:
    rows = read_rows(path, RowQuery(limit=3))
    assert [(found["id"], found["cursor"]) for found in rows] == [("e", 5), ("d", 4), ("c", 3)]
    assert json.loads(json.dumps(rows)) == rows


def test_after_a_cursor_rows_come_in_the_order_in_which_they_were_written(path: Path) -> None:
    assert rids(read_rows(path, RowQuery(after=2, limit=2))) == ["c", "d"]
    assert rids(read_rows(path, RowQuery(after=5))) == []


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        (RowQuery(since=DAYS[3]), ["e", "d"]),
        (RowQuery(until=DAYS[1]), ["a"]),
        (RowQuery(since=DAYS[1], until=DAYS[3]), ["c", "b"]),
        (RowQuery(user="key:bob"), ["c", "b"]),
        (RowQuery(user="uid:1000"), ["e"]),
        (RowQuery(user="ann", since=DAYS[1]), ["d"]),
        (RowQuery(user="' OR 1=1 --"), []),
        (RowQuery(failed_only=True), ["c"]),
        (RowQuery(slow=SlowFilter("ttft", is_above=True, bound_ms=500)), ["e"]),
        (RowQuery(slow=SlowFilter("ttft", is_above=False, bound_ms=500), limit=2), ["d", "c"]),
        (RowQuery(user="key:bob", failed_only=True, after=1), ["c"]),
    ],
)
def test_conditions_narrow_the_rows(path: Path, query: RowQuery, expected: list[str]) -> None:
    assert rids(read_rows(path, query)) == expected


@pytest.mark.parametrize(
    ("status", "reason", "by", "has_failed"),
    [
        (200, "stop", None, False),
        (499, "abort", "the client", False),
        (200, "abort", "ann", False),
        (200, "abort", "drain", True),
        (200, "error", None, True),
        (499, "error", None, True),
        (429, None, None, True),
    ],
)
def test_who_hangs_up_or_cancels_has_no_error(
    tmp_path: Path, status: int, reason: str | None, by: str | None, has_failed: bool
) -> None:
    path = tmp_path / "one.db"
    write(path, row("a", http_status=status, finish_reason=reason, cancelled_by=by))
    assert bool(read_rows(path, RowQuery(failed_only=True))) is has_failed
    assert read_usage(path, UsageQuery())[0]["errors"] == has_failed


@pytest.mark.parametrize("stage", STAGES)
def test_a_row_can_be_slow_in_every_stage(path: Path, stage: str) -> None:
    rows = read_rows(path, RowQuery(slow=SlowFilter(stage, is_above=True, bound_ms=0)))
    assert "a" in rids(rows)


def test_one_row_is_found_by_its_id(path: Path) -> None:
    found = read_row(path, "b")
    assert found is not None
    assert (found["user"], found["key_name"], found["peer_uid"]) == ("key:bob", "bob", 1000)
    assert read_row(path, "none") is None


NAMES = st.none() | st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(st.none() | st.integers(0, 2**32 - 1), NAMES, NAMES)
def test_the_log_calls_a_user_as_the_daemon_does(
    path: Path, uid: int | None, user: str | None, key: str | None
) -> None:
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(
            "UPDATE requests SET peer_uid = ?, peer_user = ?, key_name = ? WHERE rid = 'a'",
            (uid, user, key),
        )
    found = read_row(path, "a")
    assert found is not None
    assert found["user"] == Peer(uid=uid, user=user, key=key).name


def test_events_are_narrowed_by_severity_and_time_and_followed_by_cursor(path: Path) -> None:
    log = start(path)
    log.event("info", "drain.started", "ann drains", "ann")
    log.event("warning", "log.replaced", "gone")
    log.event("error", "worker.died", "killed")
    every = log.events(EventQuery())
    assert [(one["code"], one["actor"]) for one in every] == [
        ("worker.died", None),
        ("log.replaced", None),
        ("drain.started", "ann"),
    ]
    codes = [one["code"] for one in log.events(EventQuery(severity="warning", after=0))]
    assert codes == ["log.replaced", "worker.died"]
    assert log.events(EventQuery(until="2020-01-01T00:00:00.000Z")) == []
    assert log.events(EventQuery(after=3)) == []
    assert log.close()
    assert read_events(path, EventQuery(limit=1)) == every[:1]


def test_usage_is_summed_by_user_with_the_most_tokens_first(path: Path) -> None:
    usage = read_usage(path, UsageQuery(by="user"))
    assert usage == [
        {
            "user": user,
            "requests": requests,
            "errors": errors,
            "prompt_tokens": 3 * requests,
            "completion_tokens": 10 * requests,
            "prefill_ms": prefill_ms,
            "decode_ms": decode_ms,
            **dict.fromkeys(("prefill_j", "decode_j", "energy_j", "j_per_token")),
        }
        for user, requests, errors, prefill_ms, decode_ms in [
            ("ann", 2, 0, 14.0, 18.0),
            ("key:bob", 2, 1, 14.0, 36.0),
            ("uid:1000", 1, 0, 597.0, 18.0),
        ]
    ]


def test_output_that_nobody_knows_is_in_no_sum(tmp_path: Path) -> None:
    path = tmp_path / "requests.db"
    unknown = row("a", completion_tokens=None), row("b", completion_tokens=None, peer_user="bob")
    write(path, *unknown, row("c"))
    usage = read_usage(path, UsageQuery())
    assert [(one["user"], one["completion_tokens"]) for one in usage] == [
        ("ann", 10),
        ("bob", None),
    ]


def test_usage_is_summed_by_model_and_by_day_within_a_span(path: Path) -> None:
    models = read_usage(path, UsageQuery(by="model", since=DAYS[1]))
    assert [(one["model"], one["requests"]) for one in models] == [("tiny", 3), ("other", 1)]
    days = read_usage(path, UsageQuery(by="day", until=DAYS[3]))
    assert [one["day"] for one in days] == ["2026-01-01", "2026-01-02", "2026-01-03"]


def test_time_that_no_request_spent_is_not_reported(path: Path) -> None:
    (aborted,) = read_usage(path, UsageQuery(since=DAYS[3], until=DAYS[4]))
    assert aborted["decode_ms"] is None


def test_joules_are_summed_over_the_requests_that_have_them(tmp_path: Path) -> None:
    path = tmp_path / "requests.db"
    write(
        path,
        row("a", prefill_j=4.0, decode_j=16.0),
        row("b", prefill_j=1.0, decode_j=9.0),
        row("c"),
        row("d", peer_user="bob", prefill_j=1.5, decode_j=0.0, completion_tokens=0),
    )
    ann, bob = read_usage(path, UsageQuery())
    assert (ann["prefill_j"], ann["decode_j"], ann["energy_j"]) == (5.0, 25.0, 30.0)
    assert ann["j_per_token"] == 1.5  # of 20 tokens: those of c took what nobody has measured
    assert (bob["energy_j"], bob["j_per_token"]) == (1.5, None)


@pytest.mark.parametrize(
    ("sql", "index"),
    [
        ("SELECT * FROM v_requests WHERE user = ? ORDER BY received_at DESC, id DESC", "user"),
        (
            f"SELECT * FROM v_requests WHERE ({reader._FAILED}) AND received_at >= ?"
            " ORDER BY received_at DESC, id DESC",
            "failed",
        ),
        (
            "SELECT * FROM v_requests WHERE received_at < ? ORDER BY received_at DESC, id DESC",
            "received",
        ),
    ],
)
def test_queries_walk_an_index_and_sort_nothing(path: Path, sql: str, index: str) -> None:
    with closing(sqlite3.connect(path)) as db:
        plan = [step[3] for step in db.execute(f"EXPLAIN QUERY PLAN {sql}", ("x",))]
    assert len(plan) == 1, plan
    assert f"ix_requests_{index}" in plan[0]


def test_a_query_that_takes_too_long_is_ended(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_QUERY_S", -1.0)
    monkeypatch.setattr(reader, "_STEPS_BETWEEN_LOOKS_AT_THE_CLOCK", 1)
    with pytest.raises(PenstockError, match="interrupted") as caught:
        read_usage(path, UsageQuery())
    assert "since" in caught.value.hint


# --------------------------------------------------------------------------------------------------
# Recordings out of a log: what is in them, and what never is.


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
