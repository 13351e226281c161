"""Rows, events and sums are read from a file that a daemon has written."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from appliance.daemon.requests.request import Peer
from appliance.daemon.requests.row import RefusalRow
from appliance.observe.log import reader
from appliance.observe.log.query import STAGES, EventQuery, RowQuery, SlowFilter, UsageQuery
from appliance.observe.log.reader import read_events, read_row, read_rows, read_usage
from engine.errors import PenstockError
from tests.appliance.logs import DAYS, rids, row, start, write, write_five_days


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_five_days(tmp_path)


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
            "refused": 0,
            "refused_most": None,
        }
        for user, requests, errors, prefill_ms, decode_ms in [
            ("ann", 2, 0, 14.0, 18.0),
            ("key:bob", 2, 1, 14.0, 36.0),
            ("uid:1000", 1, 0, 597.0, 18.0),
        ]
    ]


def test_refused_requests_are_summed_by_user_and_by_day_and_have_rows_of_their_own(
    path: Path,
) -> None:
    write(
        path,
        RefusalRow(DAYS[0], "ann", "python 9495", 404, "model_not_found", 135_000),
        RefusalRow(DAYS[1], "ann", "python 9495", 429, "queue_full", 17),
        RefusalRow(DAYS[1], "eve", "10.0.0.7:1", 401, "invalid_api_key", 3),
    )
    refused = {row["user"]: row["refused"] for row in read_usage(path, UsageQuery())}
    assert refused == {"ann": 135_017, "key:bob": 0, "uid:1000": 0, "eve": 3}
    most = {row["user"]: row["refused_most"] for row in read_usage(path, UsageQuery())}
    assert (most["ann"], most["eve"]) == ("python 9495 (404)", "10.0.0.7:1 (401)")
    eve = read_usage(path, UsageQuery())[-1]
    assert (eve["user"], eve["requests"], eve["prefill_ms"]) == ("eve", 0, None)
    days = read_usage(path, UsageQuery(by="day", until=DAYS[1]))
    assert [(row["day"], row["refused"]) for row in days] == [(DAYS[0][:10], 135_000)]
    assert "refused" not in read_usage(path, UsageQuery(by="model"))[0]


def test_a_log_of_an_earlier_release_has_no_refusals(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("DROP TABLE refusals")
    assert {row["refused"] for row in read_usage(path, UsageQuery())} == {0}


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
