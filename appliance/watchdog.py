"""Which workers hang: they have work or owe an answer, end no step, and use no CPU time.

A step may take minutes on a slow machine, but it takes CPU time, also one that waits for a GPU. A
process that was stopped, or that waits for itself, takes none.
Owns: for how many readings each worker has been still. Called by: service, with each frame.
Invariant: a worker is never named that computes, that has nothing to do, or whose cores another
computes on.
Never: ends a process.
"""

from __future__ import annotations

from appliance.protocol import Frame, WorkerFrame
from appliance.signals import is_parked

HUNG_AFTER_FRAMES = 20
"""Readings, about a second apart: a daemon that was stopped itself has seen none meanwhile."""


class Watchdog:
    """Looks at one frame after the other."""

    def __init__(self) -> None:
        self._num_still: dict[tuple[str, int | None], int] = {}

    def hung(self, frame: Frame) -> dict[str, str]:
        """Names of workers that hang, and what there is to say about each."""
        still = {
            (worker.name, worker.pid): self._num_still.get((worker.name, worker.pid), 0) + 1
            for worker in frame.workers
            if _is_still(worker) and not is_parked(worker, frame)
        }
        self._num_still = still
        return {
            name: f"it hangs: no step and no CPU time in {count} s, with something to do"
            for (name, _), count in still.items()
            if count >= HUNG_AFTER_FRAMES
        }


def _is_still(worker: WorkerFrame) -> bool:
    has_work = worker.state == "ready" and worker.last_step_age_ms is not None
    return has_work and not worker.steps_per_s and worker.cpu_percent == 0
