"""Workers without progress are avoided, then ended; those that are slow, idle or gone are not."""

import pytest

from appliance.watch.deadlines import (
    LOADING_PATIENCE_S,
    MIN_PATIENCE_S,
    STEP_PATIENCE,
    UNKNOWN_PATIENCE_S,
    Watchdog,
    WorkerReading,
)

STILL = WorkerReading(pid=1, num_reports=7, has_work=True, step_ms=40.0)


IDLE = STILL._replace(has_work=False)


def silent_for(reading, seconds, watchdog=None):
    """A watchdog that has read the same of one worker, twice a second, for so long."""
    watchdog = watchdog or Watchdog()
    for _ in range(int(2 * seconds) + 1):
        watchdog.look({"a": reading, "b": IDLE}, 0.5)
    return watchdog


def test_a_silent_worker_is_first_stalled_then_hung_with_what_is_wrong():
    assert not silent_for(STILL, MIN_PATIENCE_S / 2 - 1).stalled
    stalled = silent_for(STILL, MIN_PATIENCE_S / 2)
    assert list(stalled.stalled) == ["a"]
    assert not stalled.hung
    assert silent_for(STILL, MIN_PATIENCE_S).hung == {"a": "no progress for 10 s of at most 10 s"}


def test_a_long_step_has_its_time_also_when_it_is_read_about_once():
    slow = STILL._replace(step_ms=9_000.0)
    patience_s = STEP_PATIENCE * 9.0
    assert not silent_for(slow, patience_s - 1).hung
    assert silent_for(slow, patience_s).hung
    # what it was given shrinks (requests are aborted) while it is in a step with all of it
    assert not silent_for(STILL, patience_s - 3, silent_for(slow, 1)).hung


@pytest.mark.parametrize(
    "sign_of_life", [{"num_reports": 8}, {"has_work": False}, {"pid": 2}, {"pid": None}]
)
def test_any_sign_of_life_begins_the_wait_again(sign_of_life):
    watchdog = silent_for(STILL, MIN_PATIENCE_S - 1)
    watchdog.look({"a": STILL._replace(**sign_of_life)}, 0.5)
    watchdog.look({"a": STILL}, 0.5)
    assert not silent_for(STILL, MIN_PATIENCE_S - 2, watchdog).hung


def test_a_busy_process_is_trusted_for_a_while_only_where_no_step_was_ever_seen():
    def computing(step_ms, seconds):
        watchdog = Watchdog()
        for tick in range(int(2 * seconds) + 1):
            watchdog.look({"a": STILL._replace(step_ms=step_ms, cpu_s=float(tick))}, 0.5)
        return watchdog

    assert computing(40.0, MIN_PATIENCE_S).hung  # a device hangs while its process spins
    assert not computing(None, UNKNOWN_PATIENCE_S - 2).hung
    assert computing(None, UNKNOWN_PATIENCE_S).hung
    # it computed at first, and stands still since: CPU time of before proves nothing
    stopped = silent_for(
        STILL._replace(step_ms=None, cpu_s=9e9), MIN_PATIENCE_S, computing(None, 9)
    )
    assert stopped.hung
    assert silent_for(STILL._replace(step_ms=None, cpu_s=3.0), MIN_PATIENCE_S).hung


def test_a_daemon_that_was_stopped_itself_accuses_nobody():
    watchdog = silent_for(STILL, 1)
    watchdog.look({"a": STILL}, 3600.0)
    assert not watchdog.stalled


def test_a_worker_that_comes_back_has_minutes_for_its_weights_and_not_for_ever():
    loading = STILL._replace(is_loading=True, step_ms=None)
    assert not silent_for(loading, LOADING_PATIENCE_S - 1).hung
    assert silent_for(loading, LOADING_PATIENCE_S).hung
