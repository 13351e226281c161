"""The timeline: a request's bars are where and as long as its stages were."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tui import frames
from tui.lines import text_of, width_of
from tui.panels import timeline
from tui.view import View

WIDTH = 120
"""Two cells a second in a window of a minute."""


def ended(**changes):
    """A request that came 30 s ago: 2 s of waiting, 10 s of prefill, 13 s of decode."""
    told = {
        "received_at": "2026-11-21T14:01:41.004Z",
        "tokenize_ms": 500.0,
        "queue_ms": 1500.0,
        "prefill_ms": 10_000.0,
        "handoff_ms": 0.0,
        "decode_wait_ms": 0.0,
        "decode_ms": 13_000.0,
        "e2e_ms": 25_000.0,
        "workers": "prefill,decode",
    }
    return frames.finished(7, **{**told, **changes})


def lanes(*finished, frame=None, height=30):
    """The rows of each lane, by its name."""
    view = replace(View().after(frame or frames.idle()), finished=finished)
    found: dict[str, list[str]] = {}
    for line in map(text_of, timeline.page(view, WIDTH, height)[:-1]):
        if line.startswith("─ "):
            name = line.split()[1]
            found[name] = []
        elif found:
            found[name].append(line)
    return found


def bar(row):
    """The first and the last cell of what is in a row."""
    text = row.rstrip()
    return len(text) - len(text.lstrip()), len(text)


def test_each_part_of_a_request_is_on_its_workers_lane_at_its_time():
    shown = lanes(ended())
    assert [bar(shown[name][0]) for name in ("WAITING", "PREFILL", "DECODE")] == [
        (60, 64), (64, 84), (84, 110),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({"phase": "queued"}, ["waiting"]),
        ({"phase": "prefilling", "queue_ms": 40.0}, ["waiting", "prompt"]),
        ({"phase": "prefilling", "queue_ms": None}, ["waiting"]),
        ({"phase": "decoding"}, ["waiting", "prompt", "output"]),
    ],
)
def test_a_live_request_lasts_until_now(changes, kinds):
    request = frames.request(30, workers="prefill,decode", **changes)
    found = timeline.stretches(request, frames.idle())
    assert [each.kind for each in found] == kinds
    assert (found[0].begin_ms, found[-1].end_ms) == (-request.age_ms, 0.0)


def test_a_request_that_is_handed_over_has_no_output_yet():
    request = frames.request(30, "handing_off", workers="prefill,decode")
    kinds = [each.kind for each in timeline.stretches(request, frames.idle())]
    assert kinds == ["waiting", "prompt"]


def test_a_worker_that_is_gone_keeps_its_lane_and_an_unknown_one_has_none():
    assert bar(lanes(ended(workers="old,decode"))["OLD"][0]) == (64, 84)
    unknown = lanes(ended(workers=None, worker=None, route=None))
    assert set(unknown) == {"PREFILL", "DECODE", "WAITING"}
    assert unknown["PREFILL"] == unknown["DECODE"] == []


def test_a_moved_request_of_which_only_the_present_worker_is_known_began_on_prefill():
    shown = lanes(ended(workers=None, worker="decode", route="move"))
    assert bar(shown["PREFILL"][0]) == (64, 84)


def test_what_was_before_the_window_is_left_out_and_what_reaches_into_it_is_cut():
    old = ended(received_at="2026-11-21T14:00:41.004Z")
    assert not any(lanes(old)[name] for name in ("PREFILL", "DECODE"))
    reaching = ended(received_at="2026-11-21T14:00:56.004Z")
    assert bar(lanes(reaching)["DECODE"][0]) == (0, 20)


def test_requests_at_the_same_time_have_rows_and_those_without_room_are_counted():
    many = tuple(ended(id=f"cmpl-{number}") for number in range(40))
    shown = lanes(*many, height=20)
    assert {len(rows) for rows in shown.values()} == {5}
    view = replace(View().after(frames.idle()), finished=many)
    titles = [line for line in map(text_of, timeline.page(view, WIDTH, 20)) if "35 more" in line]
    assert len(titles) == 3


def test_one_after_the_other_share_a_row():
    later = ended(id="cmpl-2", received_at="2026-11-21T14:01:58.004Z", decode_ms=100.0)
    assert len(lanes(ended(), later)["PREFILL"]) == 1


def test_what_went_wrong_is_marked_at_its_time():
    shown = lanes(frame=frames.busy())
    (row,) = [line for line in shown["EVENTS"] if "▲" in line][:1]
    assert row.index("▲") == 37, "41 s ago"
    assert "queue.high" in row
    assert "EVENTS" not in lanes(frame=frames.idle())


def test_a_request_that_ended_between_two_questions_is_drawn_once():
    live = frames.busy().requests[0]
    one = replace(View().after(frames.busy()), finished=(frames.finished(30, id=live.id),))
    none = View().after(frames.busy())
    assert timeline.page(one, WIDTH, 40) == timeline.page(none, WIDTH, 40)


MAKERS = (frames.idle, frames.busy, frames.loading, frames.two_by_three, frames.eight_gpus)


@given(st.integers(40, 220), st.integers(16, 60), st.sampled_from(MAKERS))
def test_it_fits(width, height, make):
    view = replace(View().after(make()), finished=frames.minute())
    lines = timeline.page(view, width, height)
    assert len(lines) <= height
    assert all(width_of(line) <= width for line in lines)
