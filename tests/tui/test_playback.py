"""Seeking, stepping and playing: a model of time without a screen."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tui.playback import MAX_PAUSE_MS, SPEEDS, Playback, iso, parse_moment, unix_ms

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
