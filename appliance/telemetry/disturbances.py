"""Detect whether the hypervisor, a CPU quota or disk reads disturbed the last second's steps.

Owns: the counters of the last look: time taken by the hypervisor, periods with a used-up CPU quota,
pages read from a disk.
Invariant: an unreported counter counts as undisturbed.
Never: says what a step took.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from appliance.fleet.cgroup_limits import num_throttled

MAX_STEAL_SHARE = 0.02
"""Maximum share of CPU time that the hypervisor takes as a matter of course."""
MAX_FAULTS = 8
"""Maximum pages read from a disk between two looks; with more, a step's time is no sample."""
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_STEAL, _MAJOR_FAULTS = 7, 9


class _Counters(NamedTuple):
    at_s: float
    steal_s: float
    num_throttled: int
    num_faults: int


class Disturbances:
    """Compare the counters between looks.

    Args:
        proc: the kernel's /proc.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._last: _Counters | None = None

    def look(self, pids: Iterable[int | None], now_s: float) -> bool:
        """Say whether the workers were disturbed since the last look; False at the first.

        Args:
            pids: of the workers.
            now_s: by any clock that does not jump.
        """
        steal_s, num_cpus = self._steal()
        faults = sum(map(self._faults, pids))
        now = _Counters(now_s, steal_s, num_throttled(self._proc / "self"), faults)
        last, self._last = self._last, now
        if last is None:
            return False
        elapsed_s = max(now.at_s - last.at_s, _TICK_S) * max(num_cpus, 1)
        return (
            now.steal_s - last.steal_s > MAX_STEAL_SHARE * elapsed_s + _TICK_S
            or now.num_throttled > last.num_throttled
            or now.num_faults - last.num_faults > MAX_FAULTS
        )

    def _steal(self) -> tuple[float, int]:
        """Return the seconds that the hypervisor took from all processors, and their number."""
        try:
            lines = (self._proc / "stat").read_text().splitlines()
        except OSError:
            return 0.0, 0
        cpus = [line.split()[1:] for line in lines if line.startswith("cpu") and line[3].isdigit()]
        return sum(int(cpu[_STEAL]) for cpu in cpus if len(cpu) > _STEAL) * _TICK_S, len(cpus)

    def _faults(self, pid: int | None) -> int:
        try:
            fields = (self._proc / f"{pid}" / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0
        return int(fields[_MAJOR_FAULTS])
