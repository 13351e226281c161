"""Watch each worker's steps, and find workers that make no progress of their own.

A worker makes progress when it sends a message or beats within a step. Without either, time counts
against it unless it waited for a core: other programs that hold the cores make it slow, not stuck.
Invariant: time in which the daemon's own loop was blocked counts as one look at most; a worker
without work, or with its cores lent, is never reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from appliance.observe.telemetry.thread_times import NO_TIMES, ThreadTimes, has_computed, own_s

LOOK_INTERVAL_S = 0.5
MIN_PATIENCE_S = 10.0
STEP_PATIENCE = 5.0
"""Maximum time without progress, in predicted step times."""
STALLED_SHARE = 0.5
"""Share of its patience after which a worker gets no more sequences and /ready fails."""
UNKNOWN_PATIENCE_S = 300.0
"""Maximum seconds of an unpredictable step or load, while the worker uses CPU time."""
BEAT_PATIENCE_S = 30.0
"""The same of an unpredictable step with beats: it hangs if no half of a layer ends in that time.

Beside other programs steps stay unpredictable, since disturbed steps are not learnt from."""
LOADING_PATIENCE_S = 30.0
"""Maximum seconds of a load without messages and without CPU time."""
MAX_ELAPSED_S = 2 * LOOK_INTERVAL_S


class WorkerReading(NamedTuple):
    """The watchdog's facts about one worker at one moment."""

    pid: int | None
    num_signs: int
    """Its messages and beats so far; while it loads, also its pages of files."""
    has_work: bool
    """Whether it must compute, load, unmap or finish its start."""
    step_ms: float | None
    """The longest predicted step that it may be in; None: unpredictable."""
    threads: ThreadTimes = NO_TIMES
    """Read only while it has work and shows no sign of progress."""
    is_loading: bool = False
    has_beats: bool = False
    """Whether its steps beat; a load does not."""


class WorkerSilence:
    """How long one worker has made no progress in its own time, and its maximum."""

    def __init__(self, reading: WorkerReading) -> None:
        self.last = reading
        self.silent_s = self.unknown_s = 0.0
        self.patience_s = MIN_PATIENCE_S

    def has_moved(self, pid: int | None, num_signs: int) -> bool:
        """Say whether these differ from the last reading."""
        return (self.last.pid, self.last.num_signs) != (pid, num_signs)

    def look(self, reading: WorkerReading, elapsed_s: float) -> None:
        """Take in the next reading."""
        is_same = not self.has_moved(reading.pid, reading.num_signs)
        last, self.last = self.last, reading
        if not is_same or not reading.has_work:
            self.silent_s = self.unknown_s = 0.0
            self.patience_s = MIN_PATIENCE_S
            return
        # the longest step among the work since its last message: the daemon cannot
        # know which step it is in
        self.patience_s = max(self.patience_s, _patience_s(reading))
        elapsed_s = own_s(last.threads, reading.threads, min(elapsed_s, MAX_ELAPSED_S))
        self.unknown_s += elapsed_s
        trusted_s = BEAT_PATIENCE_S if reading.has_beats else UNKNOWN_PATIENCE_S
        if (
            reading.step_ms is None
            and has_computed(last.threads, reading.threads)
            and self.unknown_s < trusted_s - self.patience_s
        ):
            self.silent_s = 0.0
        else:
            self.silent_s += elapsed_s

    @property
    def about(self) -> str:
        """How long it has been silent, for people."""
        said = f"no progress for {self.silent_s:.0f} s, killed at {self.patience_s:.0f} s"
        times = self.last.threads.values()
        if times and all(each.waited_s is None for each in times):
            said += "; this kernel does not report waits for a core"
        return said


class Watchdog:
    """Compare all workers' readings with their deadlines."""

    def __init__(self) -> None:
        self._silences: dict[str, WorkerSilence] = {}

    def is_silent(self, name: str, pid: int | None, num_signs: int) -> bool:
        """Say whether a worker has shown no sign of progress since the last look."""
        silence = self._silences.get(name)
        return silence is not None and not silence.has_moved(pid, num_signs)

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
            name: each.about
            for name, each in self._silences.items()
            if each.silent_s >= share * each.patience_s
        }


def _patience_s(reading: WorkerReading) -> float:
    if reading.is_loading:
        return LOADING_PATIENCE_S
    if reading.step_ms is None:
        return MIN_PATIENCE_S
    return max(MIN_PATIENCE_S, STEP_PATIENCE * reading.step_ms / 1e3)
