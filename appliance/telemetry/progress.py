"""Watch each worker's steps, and find workers without progress.

Invariant: time in which the daemon's own loop was blocked counts as one look at most; a worker
without work, or with its cores lent, is never reported.
Never: ends a worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

LOOK_INTERVAL_S = 0.5
MIN_PATIENCE_S = 10.0
STEP_PATIENCE = 5.0
"""Maximum time without progress, in predicted step times."""
STALLED_SHARE = 0.5
"""Share of its patience after which a worker gets no more sequences and /ready fails."""
UNKNOWN_PATIENCE_S = 300.0
"""Maximum seconds of an unpredictable step or load, while the worker uses CPU time."""
LOADING_PATIENCE_S = 30.0
"""Maximum seconds of a load without messages and without CPU time."""
MAX_ELAPSED_S = 2 * LOOK_INTERVAL_S


class WorkerReading(NamedTuple):
    """The watchdog's facts about one worker at one moment."""

    pid: int | None
    num_signs: int
    """Messages from all its processes so far; while it loads, also its pages of files."""
    has_work: bool
    """Whether it must compute, load, unmap or finish its start."""
    step_ms: float | None
    """The longest predicted step that it may be in; None: unpredictable."""
    cpu_s: float | None = None
    """CPU time of its process so far; read only where `step_ms` is None."""
    is_loading: bool = False


class WorkerSilence:
    """How long one worker has made no progress, and its maximum."""

    def __init__(self, reading: WorkerReading) -> None:
        self.last = reading
        self.silent_s = self.unknown_s = 0.0
        self.patience_s = MIN_PATIENCE_S

    def look(self, reading: WorkerReading, elapsed_s: float) -> None:
        """Take in the next reading."""
        last, self.last = self.last, reading
        is_same = (last.pid, last.num_signs) == (reading.pid, reading.num_signs)
        if not is_same or not reading.has_work:
            self.silent_s = self.unknown_s = 0.0
            self.patience_s = MIN_PATIENCE_S
            return
        # the longest step among the work since its last message: the daemon cannot
        # know which step it is in
        self.patience_s = max(self.patience_s, _patience_s(reading))
        elapsed_s = min(elapsed_s, MAX_ELAPSED_S)
        self.unknown_s += elapsed_s
        known = (reading.cpu_s, last.cpu_s)
        has_computed = None not in known and reading.cpu_s != last.cpu_s
        if (
            reading.step_ms is None
            and has_computed
            and self.unknown_s < UNKNOWN_PATIENCE_S - self.patience_s
        ):
            self.silent_s = 0.0
        else:
            self.silent_s += elapsed_s


class Watchdog:
    """Compare all workers' readings with their deadlines."""

    def __init__(self) -> None:
        self._silences: dict[str, WorkerSilence] = {}

    def look(self, readings: Mapping[str, WorkerReading], elapsed_s: float) -> None:
        """Take in a reading of every worker, `elapsed_s` after the last ones."""
        for name, reading in readings.items():
            self._silences.setdefault(name, WorkerSilence(reading)).look(reading, elapsed_s)

    @property
    def stalled(self) -> dict[str, str]:
        """The workers that should get no new work, and why."""
        return self._silent_for(STALLED_SHARE)

    @property
    def hung(self) -> dict[str, str]:
        """List the workers past their deadline, with an explanation."""
        return self._silent_for(1.0)

    def _silent_for(self, share: float) -> dict[str, str]:
        return {
            name: f"no progress for {each.silent_s:.0f} s of at most {each.patience_s:.0f} s"
            for name, each in self._silences.items()
            if each.silent_s >= share * each.patience_s
        }


def _patience_s(reading: WorkerReading) -> float:
    if reading.is_loading:
        return LOADING_PATIENCE_S
    if reading.step_ms is None:
        return MIN_PATIENCE_S
    return max(MIN_PATIENCE_S, STEP_PATIENCE * reading.step_ms / 1e3)
