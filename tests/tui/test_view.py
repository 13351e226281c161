from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.tui import frames
from tui.view import HISTORY_FRAMES, History, View, pool_used_ratio, worker_for


def test_the_history_keeps_the_newest_frames_only():
    history = History()
    for seq in range(200):
        history = history.after(frames.idle(seq))
    assert len(history.queued) == HISTORY_FRAMES


def test_rates_come_from_the_difference_of_two_frames():
    history = History().after(frames.busy(10)).after(frames.busy(11))
    assert history.handoffs_per_s == (None, 2.0)


def test_a_restarted_daemon_starts_a_new_history():
    history = History().after(frames.busy(10)).after(frames.busy(11))
    assert len(history.after(frames.busy(12, pid=7)).queued) == 1
    assert len(history.after(frames.busy(3)).queued) == 1


@given(st.lists(st.integers(1, 5), min_size=1, max_size=HISTORY_FRAMES - 1))
def test_frames_that_never_came_are_counted(steps):
    history, seq = History().after(frames.idle(0)), 0
    for step in steps:
        seq += step
        history = history.after(frames.idle(seq))
    assert history.num_dropped_frames == seq - len(steps)


def test_a_frame_makes_the_view_live():
    assert View().link.word == "CONNECTING"
    assert View().after(frames.idle()).link.is_live


def test_a_colocated_worker_plays_both_roles():
    frame = frames.colocated()
    assert worker_for(frame, "prefill") is worker_for(frame, "decode") is frame.workers[0]
    assert worker_for(frames.idle(workers=[]), "prefill") is None


def test_cached_blocks_count_as_available():
    assert pool_used_ratio(frames.pool(cached=1024)) == 0
    assert pool_used_ratio(frames.pool(active=256, reserved=256)) == 0.5
