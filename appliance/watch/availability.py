"""Whether new work is taken, and if not why: loading, draining, or no worker is there.

Owns: whether the appliance drains, and for good.
Invariant: while one worker takes work the appliance does; what is wrong with the others is said.
Never: ends or starts anything.
"""

from __future__ import annotations

from appliance.fleet.supervisor import Supervisor
from appliance.watch.deadlines import Deadlines
from engine.errors import RequestError, Unavailable
from engine.schedule.router import Router


class Availability:
    """What a client may expect at this moment."""

    def __init__(self, router: Router, supervisor: Supervisor, deadlines: Deadlines) -> None:
        self._router = router
        self._supervisor = supervisor
        self._deadlines = deadlines
        self.is_rehearsing = False
        """All workers are ready but for what they still measure."""
        self.violation: str | None = None
        """Of an invariant: a bug of ours."""
        self.is_draining = False
        self._is_stopping = self._takes_stragglers = False

    def change_model(self, router: Router, supervisor: Supervisor) -> None:
        """Speak of other workers from now on."""
        self._router, self._supervisor = router, supervisor

    def check(self) -> None:
        """Raise Unavailable where a request cannot be accepted now."""
        if self.is_draining and not self._takes_stragglers:
            end = "it was told to stop" if self._is_stopping else "an operator's resume ends that"
            what = f"the appliance is draining and takes no new work; {end}"
            raise Unavailable(what, code="draining")
        if self._is_loading:
            raise Unavailable("the model is still loading", code="model_loading")
        if self._supervisor.is_lost:
            names = ", ".join(self._supervisor.workers)
            raise Unavailable(f"worker {names} cannot be restarted", code="engine_dead")

    @property
    def not_ready_reason(self) -> str | None:
        """None if /ready is 200, else why not: a request would be refused, or get no token."""
        if self.is_draining:
            return "draining"
        if self._is_loading:
            return "model_loading"
        is_alone = self._supervisor.workers and not self._serving
        return self.violation or (self._wrong_with_workers if is_alone else None)

    @property
    def degraded_reason(self) -> str | None:
        """What is wrong while others serve on; None: nothing."""
        wrong = None if self.not_ready_reason is not None else self._wrong_with_workers
        return None if wrong is None else f"{wrong}; what comes is served by {self._serving}"

    def drain(self) -> bool:
        """Take no new work; False if it is so already."""
        was_draining, self.is_draining = self.is_draining, True
        return not was_draining

    def resume(self) -> bool:
        """Take work again; False if it is so already.

        Raises:
            RequestError: the daemon was told to end.
        """
        if self._is_stopping:
            raise RequestError(
                "the daemon was told to stop, which no resume can undo",
                code="stopping",
                status=409,
                hint="start it again when it has ended",
            )
        was_draining, self.is_draining = self.is_draining, False
        return was_draining

    def stop(self, *, takes_stragglers: bool) -> None:
        """Drain for good; see Service.stop_accepting."""
        self._is_stopping = self.is_draining = True
        self._takes_stragglers = takes_stragglers

    @property
    def _is_loading(self) -> bool:
        return not self._supervisor.is_started or self.is_rehearsing

    @property
    def _serving(self) -> str:
        """Workers that are there and make progress."""
        workers, stalled = self._supervisor.workers, self._router.roles.stalled
        names = [n for n, w in workers.items() if w.state == "ready" and n not in stalled]
        return ", ".join(names)

    @property
    def _wrong_with_workers(self) -> str | None:
        troubles = [each.trouble for each in self._supervisor.workers.values()]
        return "; ".join(filter(None, [*troubles, self._deadlines.reason])) or None
