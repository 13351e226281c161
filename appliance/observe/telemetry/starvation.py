"""Find out how much of the CPU time that the workers wanted they got beside other programs.

Invariant: nothing is said where the kernel does not report how long threads waited for a core.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from appliance.observe.frame.protocol import HostFrame, WorkerFrame
from appliance.observe.telemetry.thread_times import NO_TIMES, ThreadTimes, pairs, times_of

WINDOW_S = 5.0
MIN_WANTED_RATIO = 0.2
"""Least share of the window that a worker must want for its share to count."""
MAX_STARVED_SHARE = 0.7
"""Largest share of the wanted time with which workers are starved."""
MIN_OTHERS_RATIO = 0.15
"""Share of their cores that other programs must use for that."""
MAX_STARVED_SPANS = 900


class _Wanted(NamedTuple):
    """CPU time that one worker had, and waited for, between two looks."""

    worker: str
    at_s: float
    had_s: float
    waited_s: float


class Starvation:
    """The workers' share of the CPU time that they wanted."""

    def __init__(self) -> None:
        self._threads: dict[str, tuple[int | None, ThreadTimes]] = {}
        self._wanted: deque[_Wanted] = deque()
        self._last_s: float | None = None
        self._spans: deque[tuple[float, float]] = deque(maxlen=MAX_STARVED_SPANS)
        """Spans of time in which the workers were starved."""
        self.text = ""
        """What starves the workers, in words; empty: nothing does."""

    def look(self, workers: Iterable[WorkerFrame], host: HostFrame, now_s: float) -> None:
        """Take in another reading, and note each worker's share in its frame."""
        workers = [worker for worker in workers if worker.cpus]
        for worker in workers:
            self._read(worker, now_s)
        while self._wanted and self._wanted[0].at_s <= now_s - WINDOW_S:
            self._wanted.popleft()
        had_s = waited_s = 0.0
        for worker in workers:
            own = [each for each in self._wanted if each.worker == worker.name]
            had, waited = sum(each.had_s for each in own), sum(each.waited_s for each in own)
            if had + waited >= MIN_WANTED_RATIO * WINDOW_S:
                worker.cpu_share = had / (had + waited)
                had_s, waited_s = had_s + had, waited_s + waited
        share = had_s / (had_s + waited_s) if had_s + waited_s else 1.0
        is_starved = share <= MAX_STARVED_SHARE
        is_starved = is_starved and _others_ratio(workers, host) >= MIN_OTHERS_RATIO
        self.text = _text(share) if is_starved else ""
        if is_starved and self._last_s is not None:
            self._spans.append((self._last_s, now_s))
        self._last_s = now_s

    def starved_ms(self, since_s: float, until_s: float) -> float:
        """Compute for how long of a span other programs starved the workers."""
        cut = ((max(begin, since_s), min(end, until_s)) for begin, end in self._spans)
        return 1e3 * sum(max(end - begin, 0.0) for begin, end in cut)

    def _read(self, worker: WorkerFrame, now_s: float) -> None:
        """Add what a worker's threads had and waited for since the last look."""
        last_pid, before = self._threads.get(worker.name, (None, NO_TIMES))
        after = times_of(pid for pid in (worker.pid, *worker.other_pids) if pid is not None)
        self._threads[worker.name] = worker.pid, after
        if last_pid != worker.pid:
            return
        had_s = waited_s = 0.0
        for last, now in pairs(before, after):
            if last.waited_s is None or now.waited_s is None:
                continue
            had_s += now.cpu_s - last.cpu_s
            waited_s += now.waited_s - last.waited_s
        self._wanted.append(_Wanted(worker.name, now_s, had_s, waited_s))


def _others_ratio(workers: list[WorkerFrame], host: HostFrame) -> float:
    """Compute the share of the workers' cores that others used in the last second."""
    cpus = {cpu for worker in workers for cpu in worker.cpus if cpu < len(host.core_percents)}
    if not cpus:
        return 0.0
    own = sum(worker.cpu_percent or 0.0 for worker in workers) + (host.daemon_cpu_percent or 0.0)
    used = sum(host.core_percents[cpu] for cpu in cpus)
    return max(used - own, 0.0) / (100 * len(cpus))


def _text(share: float) -> str:
    load = os.getloadavg()[0]
    return f"starved by other programs (load {load:.1f}; this daemon had {share:.0%} of its cores)"
