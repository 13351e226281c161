"""Learn from each second's steps, and time unmeasured steps while no request is live.

Owns: when a slice of measuring may begin, when facts are written, and what is said about it.
Invariant: nothing is measured within QUIET_S of a request, or of other programs' work on the
workers' cores; a start waits for no measurement.
Never: decides what is measured, or what follows from it.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

from appliance import profile_store
from appliance.fleet.boot import BootPlan
from appliance.fleet.worker_counts import STARTED_TWO
from appliance.frame.figures import things
from appliance.profile_store import ProfileUnusable
from engine.profile.facts import FactKey
from engine.schedule.measurer import MAX_WORK_MS, Measurer
from engine.schedule.router import Router
from engine.wire.messages import Command, CoresUsed, Report, StepsMeasured

QUIET_S = 1.0
"""Without a request, before something is measured."""
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
        self._measurer = Measurer.of(
            router,
            send,
            plan.step_sizes or (plan.placement.max_num_batched_tokens,),
            plan.placement.max_model_len,
            shares_gpu=len(gpus) > len(set(gpus)),
        )
        self._is_on = os.environ.get(OFF_VARIABLE) != "0"
        self._is_asked_for = False
        """Measuring was requested, and other programs do not stop it."""
        self._quiet_since_s: float | None = None
        self._saved_s = time.monotonic()

    def announce(self) -> str | None:
        """Announce what will be measured while idle, once per model; None: nothing to say."""
        if not self._is_on or self._measurer.work_ms or not self._measurer.num_unknown:
            return None
        if self._known is not None and not self._known.store.is_readable:
            return None
        if self._known is not None:
            if self._known.profile.value(*_ANNOUNCED):
                return None
            self._known.profile.put(_ANNOUNCED, [1.0])
        about = f"measuring for up to {MAX_WORK_MS / 1e3:.0f} s while idle"
        return f"Step times of this model unknown: {about}"

    @property
    def words(self) -> str | None:
        """What has been measured since the start; None: nothing."""
        measurer = self._measurer
        if not measurer.num_done:
            return None
        unknown = f", {measurer.num_unknown} sizes to go" if measurer.num_unknown else ""
        return f"timed {things(measurer.num_done, 'step')} while idle{unknown}"

    def frame(self) -> dict[str, object]:
        """Return the progress, for the API."""
        measurer = self._measurer
        return {
            "num_facts": measurer.num_facts,
            "num_unknown": (left := measurer.num_unknown),
            "work_ms": measurer.work_ms,
            "is_going_on": self._is_on and left > 0 and measurer.work_ms < MAX_WORK_MS,
        }

    def allow_again(self) -> None:
        """Measure for as long once more, also on a busy machine or where it is switched off."""
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
        elif self._measurer.is_measuring or not self._is_quiet(now_s):
            return
        elif self._is_disturbed():
            self._quiet_since_s = now_s
        elif self._is_on:
            self._measurer.begin(time.monotonic_ns())

    def _is_quiet(self, now_s: float) -> bool:
        return self._quiet_since_s is not None and now_s - self._quiet_since_s >= QUIET_S

    def _is_disturbed(self) -> bool:
        return self._was_disturbed() and not self._is_asked_for

    def serves(self) -> None:
        """Note that all workers are ready, so two processes on one GPU work."""
        if self._known is not None and self._known.profile.value(*STARTED_TWO):
            self._known.profile.put(STARTED_TWO, [0.0])

    async def save_when_due(self) -> None:
        """Write the profile now and then."""
        if time.monotonic() - self._saved_s >= SAVE_INTERVAL_S:
            await self.save()

    async def save(self) -> None:
        """Write what is new in the profile, in a thread."""
        self._saved_s = time.monotonic()
        if self._known is None or not (changed := self._known.profile.take_changed()):
            return
        try:
            await asyncio.to_thread(self._known.store.save, self._known.scope, changed)
        except ProfileUnusable as error:
            profile_store.warn(error)

    def stop(self) -> None:
        """Stop measuring because a request arrived."""
        self._quiet_since_s = None
        self._measurer.stop(time.monotonic_ns())

    def reported(self, worker: str, report: Report) -> None:
        """Handle a worker's report, after the router has."""
        if isinstance(report, CoresUsed):
            self._measurer.go_on()
        elif isinstance(report, StepsMeasured):
            now_s, now_ns = time.monotonic(), time.monotonic_ns()
            is_kept = not self._is_disturbed()
            self._measurer.measured(worker, report, now_ns, is_kept=is_kept)
            if not is_kept and self._quiet_since_s is not None:
                self._quiet_since_s = now_s
            if not self._measurer.is_measuring and not (
                self._is_quiet(now_s) and self._measurer.begin(now_ns)
            ):
                self._router.dispatch(now_ns)  # blocks and cores are there again

    def died(self, worker: str) -> None:
        self._quiet_since_s = None
        self._measurer.worker_died(worker, time.monotonic_ns())
