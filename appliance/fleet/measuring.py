"""Learn from each second's steps, and time unmeasured steps while no request is live.

Invariant: nothing is measured within QUIET_S of a request, or of other programs' work on the
workers' cores; a start waits for no measurement.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

from appliance.fleet.boot import BootPlan
from appliance.fleet.worker_counts import STARTED_TWO
from appliance.observe.frame.figures import things
from engine.profile.facts import FactKey
from engine.scheduler.measurer import MAX_WORK_MS, Measurer
from engine.scheduler.router import Router
from engine.wire.messages import Command, CoresUsed, Report, StepsMeasured

QUIET_S = 1.0
"""Seconds without a request before something is measured."""
LOOK_S = 0.25
SAVE_INTERVAL_S = 10.0
_ANNOUNCED = FactKey("measuring_announced")
OFF_VARIABLE = "PENSTOCK_MEASURE"
"""Set to 0, nothing is measured while idle: for tests, whose machine has other things to do."""


class Measuring:
    """Measure one model while the daemon is idle.

    Args:
        plan: the served model and its profile.
        router: learns the measured times, and lends blocks.
        send: passes a command to a worker.
        is_disturbed: reports whether other programs used the workers' cores since its last call.
    """

    def __init__(
        self,
        plan: BootPlan,
        router: Router,
        send: Callable[[str, Command], None],
        is_disturbed: Callable[[], bool],
    ) -> None:
        self._router = router
        self._was_disturbed = is_disturbed
        self._known = plan.known
        gpus = [worker.gpu for worker in plan.placement.workers if worker.gpu is not None]
        self._measurer = Measurer(
            router,
            send,
            plan.step_sizes or (plan.placement.max_num_batched_tokens,),
            plan.placement.max_model_len,
            shares_gpu=len(gpus) > len(set(gpus)),
        )
        self._profile = self._measurer.profile
        self._is_on = os.environ.get(OFF_VARIABLE) != "0"
        self._is_asked_for = False
        """Measuring was requested, and other programs do not stop it."""
        self._is_waiting = False
        """Other programs use the workers' cores."""
        self._quiet_since_s: float | None = None
        self._save_at_s = time.monotonic() + SAVE_INTERVAL_S

    def announce(self) -> str | None:
        """Announce what will be measured while idle, once per model; None: nothing to say."""
        if not self._is_on or self._measurer.work_ms or not self._measurer.num_unknown:
            return None
        is_kept = self._known is None or self._known.store.is_readable
        if not is_kept or self._profile.value(*_ANNOUNCED):
            return None
        self._profile.put(_ANNOUNCED, [1.0])
        self._save_at_s = time.monotonic()  # lest a start after a kill says it again
        about = f"measuring for up to {MAX_WORK_MS / 1e3:.0f} s while idle"
        return f"Step times of this model unknown: {about}"

    @property
    def words(self) -> str | None:
        """What has been measured since the start, and what it waits for; None: nothing."""
        measurer, parts = self._measurer, []
        if measurer.num_done:
            parts.append(f"timed {things(measurer.num_done, 'step')} while idle")
        left = f"{things(measurer.num_unknown, 'size')} left"
        if measurer.num_unknown and self._is_waiting:
            parts.append(f"timing paused: other programs use these cores ({left})")
        elif measurer.num_unknown and measurer.num_done:
            parts.append(left)
        return ", ".join(parts) or None

    def frame(self) -> dict[str, object]:
        """Return the progress, for the API."""
        left, work_ms = self._measurer.num_unknown, self._measurer.work_ms
        return {
            "num_facts": len(self._profile.facts),
            "num_unknown": left,
            "work_ms": work_ms,
            "is_going_on": self._is_on and left > 0 and work_ms < MAX_WORK_MS,
        }

    def allow_again(self) -> None:
        """Allow as much measuring again, also on a busy machine or where it is switched off."""
        self._is_on = self._is_asked_for = True
        self._measurer.work_ms = 0.0

    def look(self, *, is_idle: bool) -> None:
        """Begin a slice if it has been quiet for long enough.

        Args:
            is_idle: all workers are ready, and no request is live.
        """
        now_s = time.monotonic()
        if not is_idle:
            self._quiet_since_s = None
        elif self._quiet_since_s is None:
            self._quiet_since_s = now_s
            self._is_disturbed()  # the next look compares with this one
        elif self._measurer.is_measuring or not self._is_quiet:
            return
        elif self._is_disturbed():
            self._quiet_since_s = now_s
            self._is_waiting = self._is_on
        elif self._is_on:
            self._is_waiting = False
            self._measurer.begin(time.monotonic_ns())

    @property
    def _is_quiet(self) -> bool:
        since_s = self._quiet_since_s
        return since_s is not None and time.monotonic() - since_s >= QUIET_S

    def _is_disturbed(self) -> bool:
        return self._was_disturbed() and not self._is_asked_for

    def serves(self) -> None:
        """Note that all workers are ready, so two processes on one GPU work."""
        if self._profile.value(*STARTED_TWO):
            self._profile.put(STARTED_TWO, [0.0])

    async def save_when_due(self) -> None:
        """Write the profile now and then."""
        if time.monotonic() >= self._save_at_s:
            await self.save()

    async def save(self) -> None:
        """Write what is new in the profile, in a thread."""
        self._save_at_s = time.monotonic() + SAVE_INTERVAL_S
        if self._known is not None:
            await asyncio.to_thread(self._known.write, self._profile.take_changed())

    def stop(self) -> None:
        """Stop measuring because a request arrived."""
        self._quiet_since_s = None
        self._measurer.stop(time.monotonic_ns())

    def reported(self, worker: str, report: Report) -> None:
        """Handle a worker's report, after the router has."""
        if isinstance(report, CoresUsed):
            self._measurer.go_on()
        elif isinstance(report, StepsMeasured):
            now_ns, is_kept = time.monotonic_ns(), not self._is_disturbed()
            self._measurer.measured(worker, report, now_ns, is_kept=is_kept)
            if not is_kept and self._quiet_since_s is not None:
                self._quiet_since_s = time.monotonic()
            if self._measurer.is_measuring or (self._is_quiet and self._measurer.begin(now_ns)):
                return
            self._router.dispatch(now_ns)  # blocks and cores are there again

    def died(self, worker: str) -> None:
        self._quiet_since_s = None
        self._measurer.worker_died(worker, time.monotonic_ns())
