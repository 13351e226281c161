"""Tell whether something else held up the steps of the last second.

Owns: the counters of the last look: time that the hypervisor took, periods in which the quota was
used up, pages that had to come from a disk.
Invariant: what the kernel does not report held nothing up.
Never: says what a step took.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from appliance.fleet.cgroup_limits import num_throttled

MAX_STEAL_SHARE = 0.02
"""Of the processors' time between two looks; less is the hypervisor's usual work."""
MAX_FAULTS = 8
"""Pages from a disk between two looks; a step that waits for more is no sample of its time."""
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_STEAL, _MAJOR_FAULTS = 7, 9


class _Counters(NamedTuple):
    at_s: float
    steal_s: float
    num_throttled: int
    num_faults: int


class Disturbances:
    """Looks at the counters again and again.

    Args:
        proc: where the kernel reports.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._last: _Counters | None = None

    def look(self, pids: Iterable[int | None], now_s: float) -> bool:
        """True if the workers were held up since the last look; False at the first.

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
        """Seconds that the hypervisor took from all processors, and how many there are."""
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
