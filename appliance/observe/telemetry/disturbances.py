"""Detect whether the hypervisor, a CPU quota, disk reads or other programs disturbed steps.

Invariant: an unreported counter counts as undisturbed.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

from appliance.fleet.cgroup_limits import num_throttled

MAX_STEAL_SHARE = 0.02
"""Maximum share of CPU time that the hypervisor takes as a matter of course."""
MAX_FAULTS = 8
"""Maximum pages read from a disk between two looks; with more, a step's time is no sample."""
MAX_OTHERS_SHARE = 0.05
"""Maximum share of the watched cores' time that other programs use on a quiet machine."""
_NUM_UNCERTAIN_TICKS = 3
"""The kernel counts a core's time by ticks, and a process's time exactly."""
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_USED = (0, 1, 2, 5, 6)
"""Fields of a core's line: user, nice, system, and both kinds of interrupts."""
_STEAL, _MAJOR_FAULTS, _USER, _SYSTEM = 7, 9, 11, 12


class _Counters(NamedTuple):
    at_s: float
    steal_s: float
    num_throttled: int
    num_faults: int
    others_s: float


class Disturbances:
    """Compare the counters between looks.

    Args:
        cpus: cores on which other programs count as a disturbance.
    """

    def __init__(self, proc: Path = Path("/proc"), cpus: Collection[int] = ()) -> None:
        self._proc = proc
        self._cpus = cpus
        self._last: _Counters | None = None

    def look(self, pids: Iterable[int | None], now_s: float) -> bool:
        """Say whether the workers were disturbed since the last look; False at the first.

        Args:
            pids: of the workers, and of the daemon where cores are watched.
            now_s: by any clock that does not jump.
        """
        cpus, processes = self._cpu_fields(), [self._process_fields(pid) for pid in pids]
        steal_s = sum(fields[_STEAL] for fields in cpus.values()) * _TICK_S
        faults = sum(fields[_MAJOR_FAULTS] for fields in processes)
        used = sum(fields[at] for cpu, fields in cpus.items() if cpu in self._cpus for at in _USED)
        own = sum(fields[_USER] + fields[_SYSTEM] for fields in processes)
        others_s = (used - own) * _TICK_S if self._cpus else 0.0
        now = _Counters(now_s, steal_s, num_throttled(self._proc / "self"), faults, others_s)
        last, self._last = self._last, now
        if last is None:
            return False
        elapsed_s = max(now.at_s - last.at_s, _TICK_S)
        most_stolen_s = MAX_STEAL_SHARE * elapsed_s * max(len(cpus), 1) + _TICK_S
        most_used_s = MAX_OTHERS_SHARE * elapsed_s * len(self._cpus)
        return (
            now.steal_s - last.steal_s > most_stolen_s
            or now.others_s - last.others_s > most_used_s + _NUM_UNCERTAIN_TICKS * _TICK_S
            or now.num_throttled > last.num_throttled
            or now.num_faults - last.num_faults > MAX_FAULTS
        )

    def _cpu_fields(self) -> dict[int, list[int]]:
        """Read what each core's time was used for, in ticks, by the core's number."""
        try:
            lines = (self._proc / "stat").read_text().splitlines()
        except OSError:
            return {}
        named = (line.split() for line in lines if line.startswith("cpu") and line[3].isdigit())
        padded = {int(name[3:]): [*map(int, fields), *[0] * _STEAL] for name, *fields in named}
        return {cpu: fields[: _STEAL + 1] for cpu, fields in padded.items()}

    def _process_fields(self, pid: int | None) -> list[int]:
        """Read a process's numbers after its name and state; zeros where it is gone."""
        try:
            fields = (self._proc / f"{pid}" / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            return [0] * (_SYSTEM + 1)
        return [0, *map(int, fields[1 : _SYSTEM + 1])]
