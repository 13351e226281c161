import gc
import time
import weakref

import pytest

from appliance.daemon.process.garbage import BUSY_S, IDLE_S, GarbageSearch


class Node:
    """A cycle of one."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def now_s(monkeypatch):
    before, now_s = gc.get_threshold(), [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    yield now_s
    gc.set_threshold(*before)
    gc.unfreeze()


@pytest.mark.parametrize(("is_idle", "pause_s"), [(True, IDLE_S), (False, BUSY_S)])
def test_old_garbage_is_freed_after_a_pause(now_s, is_idle, pause_s):
    search = GarbageSearch()
    node = weakref.ref(Node())
    gc.collect(1)  # it is not new any more
    kept = weakref.ref(old := Node())
    gc.collect(1)
    del old
    now_s[0] = pause_s - 1
    search.look(is_idle=is_idle)
    gc.collect(1)
    assert kept() is not None
    now_s[0] = pause_s
    search.look(is_idle=is_idle)
    assert kept() is None
    assert node() is None


def test_python_searches_what_is_new_alone(now_s):
    GarbageSearch()
    num_full = gc.get_stats()[2]["collections"]
    for _ in range(300):
        kept = [[each] for each in range(1000)]
    assert kept
    assert gc.get_stats()[2]["collections"] == num_full


def test_the_next_search_waits_for_a_pause_of_its_own(now_s):
    search = GarbageSearch()
    now_s[0] = IDLE_S
    search.look(is_idle=True)
    num_full = gc.get_stats()[2]["collections"]
    now_s[0] += IDLE_S - 1
    search.look(is_idle=True)
    assert gc.get_stats()[2]["collections"] == num_full


def test_what_exists_at_the_start_is_left_out(now_s):
    kept = weakref.ref(old := Node())
    GarbageSearch()
    del old
    gc.collect()
    assert kept() is not None
