"""Read how long each thread of a process has computed, and has waited for a core.

Invariant: what the kernel does not report is None, or missing; a time is never guessed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

_USER, _SYSTEM = 11, 12
"""Places of a thread's ticks in /proc/PID/task/TID/stat, behind its name."""
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
MIN_COMPUTED_S = 0.01
"""CPU time between two looks from which a process computes; less is housekeeping."""


class ThreadTime(NamedTuple):
    """One thread since its start."""

    is_runnable: bool
    """Whether it computes or waits for a core; it does neither while it sleeps, waits for a disk
    or is stopped."""
    cpu_s: float
    waited_s: float | None
    """Waits for a core that are over; None: this kernel reports none."""


ThreadTimes = Mapping[int, ThreadTime]
"""The times by thread; empty if they were not read, or the process has ended."""
NO_TIMES: ThreadTimes = MappingProxyType({})


def thread_times(pid: int, proc: Path = Path("/proc")) -> dict[int, ThreadTime]:
    """Read the times of all threads of a process."""
    try:
        tasks = list((proc / str(pid) / "task").iterdir())
    except OSError:
        return {}
    read = {int(task.name): _thread_time(task) for task in tasks}
    return {thread: each for thread, each in read.items() if each is not None}


def times_of(pids: Iterable[int]) -> dict[int, ThreadTime]:
    """Read the times of all threads of a worker: processes of a group wait for each other."""
    return {thread: each for pid in pids for thread, each in thread_times(pid).items()}


def _thread_time(task: Path) -> ThreadTime | None:
    try:
        state, *fields = (task / "stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended meanwhile
        return None
    cpu_s = (int(fields[_USER - 1]) + int(fields[_SYSTEM - 1])) * _TICK_S
    try:
        cpu_ns, waited_ns, _ = map(int, (task / "schedstat").read_text().split())
    except (OSError, ValueError):
        return ThreadTime(state == "R", cpu_s, None)
    return ThreadTime(state == "R", cpu_ns / 1e9, waited_ns / 1e9)


def own_s(before: ThreadTimes, after: ThreadTimes, elapsed_s: float) -> float:
    """Compute how much of the elapsed time no thread waited for a core.

    Threads wait for each other, so the one that waited longest has held up the process. Of a
    runnable thread whose wait is not over, the kernel does not tell how long it is.
    """
    waits_s = [0.0]
    for last, now in pairs(before, after):
        is_unfinished = now.waited_s is None or now.waited_s == last.waited_s
        if last.is_runnable and now.is_runnable and is_unfinished:
            waits_s.append(elapsed_s - (now.cpu_s - last.cpu_s))
        if last.waited_s is not None and now.waited_s is not None:
            waits_s.append(now.waited_s - last.waited_s)
    return min(max(elapsed_s - max(waits_s), 0.0), elapsed_s)


def has_computed(before: ThreadTimes, after: ThreadTimes) -> bool:
    """Say whether a process used CPU time between two readings."""
    used_s = sum(now.cpu_s - last.cpu_s for last, now in pairs(before, after))
    return used_s >= MIN_COMPUTED_S


def pairs(before: ThreadTimes, after: ThreadTimes) -> Iterator[tuple[ThreadTime, ThreadTime]]:
    """Match each thread's two readings; threads that are in one of them only are left out."""
    return ((before[thread], after[thread]) for thread in after if thread in before)
