"""Read how much of the weights on disk is in memory, and how workers read and wait for them.

Invariant: the pages that are looked at are few, whatever the model's size.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Sequence
from pathlib import Path

from appliance.fleet.boot import BootPlan
from appliance.fleet.worker_state import WorkerState
from appliance.observe.frame.offload_frame import OffloadFrame
from appliance.observe.frame.protocol import WorkerFrame
from engine.checkpoint.model_file import open_model_fd
from engine.system.mapped_files import map_unchanged, resident_bytes


class OffloadReadings:
    """Readings of one plan's weights and workers."""

    def __init__(self, plan: BootPlan) -> None:
        self._offload = plan.offload
        self._maps = [] if plan.offload is None else list(_maps(plan))
        self._before: dict[int, tuple[int, int]] = {}
        """What each process had waited, in nanoseconds, and read, in bytes."""

    def look(
        self, states: Sequence[WorkerState], workers: Sequence[WorkerFrame], elapsed_s: float
    ) -> OffloadFrame | None:
        """Fill the workers' figures since the last look; None: all weights are in memory."""
        if self._offload is None:
            return None
        for state, worker in zip(states, workers, strict=True):
            if state.pid is not None and state.beats is not None:
                self._fill(worker, state.pid, state.beats.waited_ns, elapsed_s)
        found = [resident_bytes(memory) for memory in self._maps]
        known = [each for each in found if each is not None]
        resident = sum(known) if len(known) == len(found) else None
        return OffloadFrame(self._offload.disk_bytes, self._offload.weights_bytes, resident)

    def _fill(self, worker: WorkerFrame, pid: int, waited_ns: int, elapsed_s: float) -> None:
        read_bytes = _read_bytes(pid)
        before_ns, before_bytes = self._before.get(pid, (waited_ns, read_bytes or 0))
        self._before[pid] = waited_ns, read_bytes or 0
        worker.disk_wait_ratio = min((waited_ns - before_ns) / 1e9 / elapsed_s, 1.0)
        worker.disk_read_bytes = read_bytes
        if read_bytes is not None:
            worker.disk_bytes_per_s = (read_bytes - before_bytes) / elapsed_s


def _maps(plan: BootPlan) -> list[mmap.mmap]:
    if plan.weights_file is not None:
        return [map_unchanged(plan.weights_file.fd, plan.weights_file.num_bytes)]
    found = []
    for path in plan.checkpoint.files:
        fd = open_model_fd(path)
        found.append(map_unchanged(fd, os.fstat(fd).st_size))
        os.close(fd)
    return found


def _read_bytes(pid: int) -> int | None:
    """Return the bytes that a process had read from disk; None: the kernel does not tell."""
    try:
        found = re.search(r"^read_bytes: (\d+)$", Path(f"/proc/{pid}/io").read_text(), re.M)
    except OSError:
        return None
    return None if found is None else int(found[1])
