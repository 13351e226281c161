"""Read how long the processes of each group wait for each other, and what bounds workers' steps."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path

from appliance.fleet.worker_state import WorkerState
from appliance.observe.frame.protocol import RankFrame, WorkerFrame

COMPUTING, READING, WAITING = "computing", "reading", "waiting"
_MOST = 0.5
"""The share of its steps' time that bounds a worker."""


class RankReadings:
    """Readings of one plan's workers."""

    def __init__(self) -> None:
        self._before_ns: dict[int, int] = {}
        """What each process had waited."""

    def look(
        self, states: Sequence[WorkerState], workers: Sequence[WorkerFrame], elapsed_s: float
    ) -> None:
        """Fill the figures of groups, and of workers that read weights, since the last look."""
        before_ns, self._before_ns = self._before_ns, {}
        for state, worker in zip(states, workers, strict=True):
            for rank, pid in enumerate(state.pids if state.plan.ranks else ()):
                waited = self._wait(state, rank, before_ns.get(pid), elapsed_s)
                cpus = list(state.plan.ranks[rank])
                worker.ranks.append(RankFrame(pid, cpus, _resident(pid), waited))
            worker.bound_by = _bound(worker)

    def _wait(
        self, state: WorkerState, rank: int, before_ns: int | None, elapsed_s: float
    ) -> float | None:
        """Return the share of the time that a process waited; None: it was not read before."""
        if state.beats is None:
            return None
        self._before_ns[state.pids[rank]] = now_ns = state.beats.rank_waited_ns(rank)
        return None if before_ns is None else min((now_ns - before_ns) / 1e9 / elapsed_s, 1.0)


def _bound(worker: WorkerFrame) -> str | None:
    """Say what most of a worker's steps went into; None: it has one way to spend them, or none."""
    waits = [rank.wait_ratio for rank in worker.ranks if rank.wait_ratio is not None]
    if worker.busy_ratio <= 0 or not (waits or worker.disk_wait_ratio is not None):
        return None
    if (worker.disk_wait_ratio or 0.0) >= _MOST * worker.busy_ratio:
        return READING
    # the process that waits least is the one that the others wait for
    return WAITING if waits and min(waits) >= _MOST * worker.busy_ratio else COMPUTING


def _resident(pid: int) -> int | None:
    """Return a process's resident bytes; None: it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * mmap.PAGESIZE
    except OSError:
        return None
