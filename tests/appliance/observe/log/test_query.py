"""Text parameters become checked queries, or a refusal that names the parameter."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.observe.frame.protocol import utc_now
from appliance.observe.log.query import (
    EventQuery,
    RowQuery,
    SlowFilter,
    UsageQuery,
    event_query,
    parse_time,
    row_query,
    usage_query,
)
from engine.errors import RequestError

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
        ({"limit": "-1"}, "invalid_value"),
        ({"after": "-1"}, "invalid_value"),
        ({"limit": "--1"}, "invalid_type"),
        ({"limit": "-"}, "invalid_type"),
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
