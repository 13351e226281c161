"""A view keeps frames, their history and who is connected."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.tui import frames
from tui.history import DROPPED_FRAMES, HISTORY_FRAMES, History, spread
from tui.view import Caller, DaemonLink, View, alert_of, workers_for


def test_the_history_keeps_the_newest_frames_only():
    history = History()
    for seq in range(HISTORY_FRAMES + 20):
        history = history.after(frames.idle(seq))
    assert len(history.queued) == HISTORY_FRAMES


def test_rates_come_from_the_difference_of_two_frames():
    untold = {"handoff": None}
    history = History().after(frames.busy(10, **untold)).after(frames.busy(11, **untold))
    assert history.handoffs_per_s == (None, 2.0)


def test_the_history_goes_on_after_a_restart_with_a_gap_for_the_time_between():
    history = History().after(frames.busy(10)).after(frames.busy(11))
    back = frames.busy(1, pid=7, at="2026-11-21T14:02:15.004Z")  # 4 s after the last
    after = history.after(back)
    assert [value is None for value in after.queued] == [False, False, True, True, True, False]
    assert [len(samples) for samples in after.kv_used_ratio.values()] == [6]
    assert (after.last, after.num_dropped_frames, after.handoffs_per_s[-1]) == (back, 0, 2.0)


def test_pools_that_are_not_there_while_a_model_loads_keep_their_history():
    history = History().after(frames.busy(10)).after(frames.idle(11, pools=[]))
    assert history.after(frames.busy(12)).kv_used_ratio["kv"][1] is None


def test_a_replay_that_is_moved_back_starts_a_new_history():
    history = History().after(frames.busy(10)).after(frames.busy(11))
    assert len(history.after(frames.busy(3)).queued) == 1


def test_frames_from_before_the_first_one_come_before_its_history():
    past = [
        frames.busy(seq, at=f"2026-11-21T14:02:{second:02}.004Z")
        for seq, second in ((151, 2), (152, 3), (153, 11), (154, 12))
    ]
    first = frames.busy(160)
    view = View().after(first).preceded(past, first.at)
    known = [value is not None for value in view.history.queued]
    assert known == [True, True, *[False] * 7, True], "what the console has seen itself stays"
    assert view.frame is first
    assert View().after(first).preceded([], first.at).history == View().after(first).history


@given(st.lists(st.integers(1, 5), min_size=1, max_size=DROPPED_FRAMES - 1))
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
    assert workers_for(frame, "prefill") == workers_for(frame, "decode") == frame.workers
    assert workers_for(frames.idle(workers=[]), "prefill") == workers_for(None, "decode") == []
    names = [worker.name for worker in workers_for(frames.two_by_three(), "decode")]
    assert names == ["decode", "decode1", "decode2"]


def test_reserved_blocks_are_in_use():
    assert frames.pool(active=256, reserved=256).used_ratio == 0.5


def test_rates_that_the_daemon_tells_come_before_the_difference():
    told = frames.HandoffFrame("shm", 0, 7.0, 9.0)
    history = History().after(frames.busy(10)).after(frames.busy(11, handoff=told))
    assert (history.handoffs_per_s[-1], history.handoff_bytes_per_s[-1]) == (7.0, 9.0)


def test_decode_that_stands_still_behind_a_prompt_is_a_stall():
    view = frames.view_of(frames.busy(160))
    seqs = [161 - index for index, is_stall in enumerate(view.history.stalls[::-1], 1) if is_stall]
    assert sorted(seqs) == list(frames.STALLED_SEQS)


def test_without_a_prompt_or_without_outputs_nothing_stalls():
    quiet = frames.worker("decode")
    for queue in (frames.QueueFrame(0, 0, 0, 9, 64, None), frames.QueueFrame(0, 3, 0, 0, 64, None)):
        history = (
            History().after(frames.busy(10)).after(frames.busy(11, workers=[quiet], queue=queue))
        )
        assert history.stalls == (0.0, 0.0)


@given(st.lists(st.none() | st.floats(0, 1e6), max_size=80), st.integers(1, 70), st.integers(0, 90))
def test_spread_samples_fill_every_cell_and_stay_between_their_extremes(samples, num, cells):
    shown = spread(samples, num, cells)
    assert len(shown) == cells
    known = [value for value in samples[-num:] if value is not None]
    for value in shown:
        assert value is None or min(known) * 0.999 <= value <= max(known) * 1.001


def test_the_newest_sample_stands_in_the_last_cell():
    assert spread([5.0, 1.0, 9.0], 4, 4) == (None, 5.0, 1.0, 9.0)
    assert spread([4.0, 8.0, 9.0, 1.0], 4, 2) == (6.0, 5.0)


def test_what_a_dead_daemon_had_finished_is_forgotten():
    view = View(finished=(frames.finished(1),)).after(frames.busy(10))
    assert view.finished == ()
    view = View(finished=(frames.finished(1),), frame=frames.busy(9)).after(frames.busy(10))
    assert len(view.finished) == 1
    assert view.after(frames.busy(1, pid=77)).finished == ()


def test_settings_change_while_the_reading_is_held():
    held = View().after(frames.busy(10))
    latest = View(window_s=300, link=DaemonLink()).after(frames.busy(22))
    shown = latest.held(held)
    assert (shown.frame.seq, shown.window_s, shown.paused_s) == (10, 300, 12.0)


def test_operators_cancel_anything_live_users_their_own_and_viewers_nothing():
    mine, other = frames.request(1, user="ana"), frames.request(2, user="bo")
    assert all(Caller("x", "operator").may_cancel(request) for request in (mine, other))
    assert [Caller("ana", "user").may_cancel(request) for request in (mine, other)] == [True, False]
    assert not any(Caller("ana", role).may_cancel(mine) for role in ("viewer", "read-only"))
    assert not Caller("x", "operator").may_cancel(frames.finished(1))


def test_an_alert_is_found_by_the_beginning_of_its_code_and_its_subject():
    frame = frames.kv_critical()
    assert alert_of(frame, "kv", "decode") is frame.alerts[0]
    assert alert_of(frame, "kv", "prefill") is None
    assert alert_of(frame, "slo", "ttft") is frame.alerts[1]


def test_a_slice_has_no_power_of_its_own():
    view = View().after(frames.mig())
    assert view.history.power_w == (1200.0,)
