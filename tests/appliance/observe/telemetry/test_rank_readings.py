"""What each process of a group holds and waits, and what bounds a worker's steps."""

import os
from types import SimpleNamespace

import pytest

from appliance.observe.telemetry.rank_readings import (
    COMPUTING,
    READING,
    WAITING,
    RankReadings,
)
from engine.wire.beats import Beats, new_fd
from tests.tui import frames


@pytest.fixture
def beats():
    fd = new_fd()
    yield Beats(fd)
    os.close(fd)


def worker(busy_ratio, disk_wait_ratio=None):
    made = frames.busy().workers[0]
    made.busy_ratio, made.disk_wait_ratio = busy_ratio, disk_wait_ratio
    return made


def state(beats, *ranks):
    pids = [os.getpid()] * len(ranks)
    return SimpleNamespace(beats=beats, plan=SimpleNamespace(ranks=ranks), pids=pids)


@pytest.mark.parametrize(
    ("waits_ms", "bound"), [((100, 700), COMPUTING), ((500, 700), WAITING), ((0, 0), COMPUTING)]
)
def test_a_group_is_bound_by_waiting_only_where_all_of_it_wait(beats, waits_ms, bound):
    readings, group = RankReadings(), state(beats, (0,), (1,))
    group.pids = [os.getpid(), os.getppid()]
    first = worker(0.8)
    readings.look([group], [first], 1.0)
    assert [rank.wait_ratio for rank in first.ranks] == [None, None]
    assert first.bound_by is None
    for rank, wait_ms in enumerate(waits_ms):
        beats.rank_waited(rank, wait_ms * 1_000_000)
    second = worker(0.8)
    readings.look([group], [second], 1.0)
    assert [rank.wait_ratio for rank in second.ranks] == [ms / 1000 for ms in waits_ms]
    assert [rank.cpus for rank in second.ranks] == [[0], [1]]
    assert second.ranks[0].rss_bytes > 1 << 20
    assert second.bound_by == bound


@pytest.mark.parametrize(
    ("busy_ratio", "disk_wait_ratio", "bound"),
    [(0.9, 0.8, READING), (0.9, 0.1, COMPUTING), (0.0, 0.0, None), (0.9, None, None)],
)
def test_a_worker_of_one_process_reads_or_computes(busy_ratio, disk_wait_ratio, bound):
    alone = worker(busy_ratio, disk_wait_ratio)
    RankReadings().look([state(None)], [alone], 1.0)
    assert (alone.ranks, alone.bound_by) == ([], bound)


def test_a_process_that_has_ended_has_no_memory(beats):
    group = state(beats, (0,))
    group.pids = [1 << 30]
    gone = worker(0.5)
    RankReadings().look([group], [gone], 1.0)
    assert gone.ranks[0].rss_bytes is None
