"""Keep every deadline of the daemon, and decide whether it accepts requests.

Invariant: everything that waits ends at some time, with a reply and a row; a worker without
progress gets no new work, then is killed, and its sequences continue from what they have.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from appliance.daemon.requests.request import Request
from appliance.fleet.supervisor import Supervisor
from appliance.fleet.worker_state import WorkerState
from appliance.observe.telemetry.progress import Watchdog, WorkerReading
from appliance.observe.telemetry.thread_times import times_of
from engine.errors import RequestError, Unavailable
from engine.scheduler.router import Router
from engine.scheduler.sequences.sequence import Phase, Sequence
from engine.scheduler.snapshot import WorkerSnapshot
from engine.wire.finish_reason import FinishReason

HANDOFF_S = 120.0
"""Maximum seconds without progress in a handoff."""
STAGE_S = 600.0
"""Maximum seconds without progress in other stages, across worker deaths; the queue is exempt."""


Tell = Callable[[str, str, str], None]


class _StageMark(NamedTuple):
    """The progress of a sequence, and its time."""

    phase: Phase
    generation: int
    num_computed_tokens: int
    since_ns: int
    reached: tuple[int, int]
    """Output tokens and computed positions, the maximum so far."""
    reached_ns: int


class Deadlines:
    """Watch the workers' and live requests' deadlines."""

    def __init__(
        self,
        router: Router,
        supervisor: Supervisor,
        max_num_batched_tokens: int,
        live: Mapping[str, Request],
        tell: Tell,
    ) -> None:
        """Begin to watch.

        Args:
            max_num_batched_tokens: maximum prompt tokens in a worker's step.
            live: the requests without a terminal reply; it changes.
            tell: takes severity, code and message of an event.
        """
        self._live = live
        self._tell = tell
        self._router = router
        self._supervisor = supervisor
        self._max_step_tokens = max_num_batched_tokens
        self._watchdog = Watchdog()
        self._marks: dict[int, _StageMark] = {}
        self._looked_ns = time.monotonic_ns()
        self.text_workers: frozenset[str] = frozenset()
        """Workers that owe vectors or scores of texts."""
        self.max_queue_wait_s = 0.0
        """The setting; 0: no limit."""

    def change_model(
        self, router: Router, supervisor: Supervisor, max_num_batched_tokens: int
    ) -> None:
        """Watch other workers from now on; no request is live."""
        self._router, self._supervisor = router, supervisor
        self._max_step_tokens, self._watchdog = max_num_batched_tokens, Watchdog()
        self._marks.clear()

    @property
    def stalled(self) -> Collection[str]:
        """Workers that make no progress."""
        return self._watchdog.stalled

    @property
    def reason(self) -> str | None:
        """Why /ready fails because of a worker without progress; None: no such worker."""
        stalled = self._watchdog.stalled
        return "; ".join(f"worker {name}: {about}" for name, about in stalled.items()) or None

    def set_queue_limits(self, max_queued: int, max_queued_tokens: int, max_wait_s: float) -> None:
        """Change the limits of the queue; requests in it stay."""
        self._router.set_queue(max_queued, max_queued_tokens)
        self.max_queue_wait_s = max_wait_s

    def enforce(self) -> None:
        """End workers and requests without progress."""
        self._router.refuse_late(1e3 * self.max_queue_wait_s)
        now_ns = time.monotonic_ns()
        self.look_at_workers(now_ns)
        for request, error in self.late(list(self._live.values()), now_ns):
            about = f"{request.request_id}: {error.what}"
            self._tell("warning", f"request.{error.code}", about)
            self.end(request, error, now_ns)

    def look_at_workers(self, now_ns: int) -> None:
        """Take work from stalled workers, and end hung ones."""
        states, now = self._supervisor.workers, self._router.workers_now()
        readings = {name: self._reading(state, now[name]) for name, state in states.items()}
        elapsed_s, self._looked_ns = (now_ns - self._looked_ns) / 1e9, now_ns
        self._watchdog.look(readings, elapsed_s)
        self._router.set_stalled(frozenset(self._watchdog.stalled), now_ns)
        for name, about in self._watchdog.hung.items():
            while_what = " while it loads" * (states[name].state == "loading")
            self._supervisor.end_hung(name, f"it hangs{while_what}: {about}")

    def _reading(self, state: WorkerState, now: WorkerSnapshot) -> WorkerReading:
        name = state.plan.name
        # a worker that has loaded its part may wait for others, which are watched themselves
        is_loading = state.state == "loading" and not self._supervisor.waits_for_others(name)
        is_owing = state.state == "ready" and (now.owes or name in self.text_workers)
        has_work = is_loading or (is_owing and not now.is_parked)
        num_signs, step_ms = state.num_reports + state.num_beats, None
        if has_work and not is_loading:
            most = (state.ready and state.ready.max_num_batched_tokens) or self._max_step_tokens
            step_ms = self._router.longest_step_ms(name, most)
        if is_loading:
            num_signs += _num_file_pages(state.pid)
        is_silent = has_work and self._watchdog.is_silent(name, state.pid, num_signs)
        threads = times_of(state.pids) if is_silent else {}
        has_beats = state.beats is not None and not is_loading
        return WorkerReading(
            state.pid, num_signs, has_work, step_ms, threads, is_loading, has_beats
        )

    def late(self, live: Iterable[Request], now_ns: int) -> list[tuple[Request, RequestError]]:
        """Find requests with a sequence too long in its stage, and explain each."""
        marks, late = {}, []
        for request in live:
            has_begun = any(sequence.generation for sequence in request.sequences)
            for sequence in request.sequences:
                if sequence.is_finished:
                    continue
                mark = self._mark(sequence, now_ns)
                marks[sequence.seq_id] = mark
                if error := self._error(sequence, mark, now_ns, has_begun):
                    late.append((request, error))
                    break
        self._marks = marks
        return late

    def end(self, request: Request, error: RequestError, now_ns: int) -> None:
        """End what is left of a request, with an error."""
        request.failure = error
        for sequence in request.sequences:
            self._router.abort(sequence, FinishReason.ERROR, now_ns, error.what)

    def _mark(self, sequence: Sequence, now_ns: int) -> _StageMark:
        stage = sequence.phase, sequence.generation, sequence.num_computed_tokens
        reached = sequence.num_output_tokens, sequence.num_computed_tokens
        last = self._marks.get(sequence.seq_id)
        if last is None:
            return _StageMark(*stage, now_ns, reached, now_ns)
        since_ns = last.since_ns if last[:3] == stage else now_ns
        if reached > last.reached or not sequence.generation:
            return _StageMark(*stage, since_ns, reached, now_ns)
        return _StageMark(*stage, since_ns, last.reached, last.reached_ns)

    def _error(
        self, sequence: Sequence, mark: _StageMark, now_ns: int, has_begun: bool
    ) -> RequestError | None:
        elapsed_s = (now_ns - mark.since_ns) / 1e9
        if sequence.phase is Phase.QUEUED and not sequence.generation:
            limit_s = self.max_queue_wait_s
            # what waits behind others of its request waits for that, and turns keep coming
            if has_begun or not limit_s or elapsed_s <= limit_s:
                return None
            return Unavailable(
                f"it waited {elapsed_s:.0f} s for its turn, longer than max_queue_wait",
                code="queue_timeout",
                retry_after_ms=int(limit_s * 1e3),
            )
        limit_s = HANDOFF_S
        if sequence.phase is not Phase.HANDING_OFF:
            limit_s, elapsed_s = STAGE_S, (now_ns - mark.reached_ns) / 1e9
        if elapsed_s <= limit_s:
            return None
        return RequestError(
            f"no progress for {elapsed_s:.0f} s while {sequence.phase.replace('_', ' ')}",
            code="stage_timeout",
            status=500,
            kind="server_error",
        )


def _num_file_pages(pid: int | None) -> int:
    """Return a process's resident pages of files; 0: it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[2])
    except OSError:
        return 0


class Availability:
    """Decide what a client may expect at this moment."""

    def __init__(self, supervisor: Supervisor, deadlines: Deadlines) -> None:
        self._supervisor = supervisor
        self._deadlines = deadlines
        self.is_preparing = False
        """True while workers may be ready but the caches are not open."""
        self.violation: str | None = None
        """A violated invariant, which is a bug."""
        self.is_draining = False
        self.is_stopping = False
        """True if it drains for a shutdown."""
        self._takes_stragglers = False

    def change_model(self, supervisor: Supervisor) -> None:
        """Follow another model's workers from now on."""
        self._supervisor = supervisor

    def check(self) -> None:
        """Raise Unavailable if no request can be accepted now."""
        if self.is_draining and not self._takes_stragglers:
            stopping = "the daemon is stopping and takes no new requests"
            draining = "the daemon is draining: it takes no new requests until `penstock resume`"
            raise Unavailable(stopping if self.is_stopping else draining, code="draining")
        if self.is_loading:
            raise Unavailable("the model is still loading", code="model_loading")
        if self._supervisor.is_lost:
            names = ", ".join(self._supervisor.workers)
            raise Unavailable(f"worker {names} cannot be restarted", code="engine_dead")

    @property
    def not_ready_reason(self) -> str | None:
        """Why /ready is not 200: requests would be refused or get no token; None: it is."""
        if self.is_draining:
            return "draining"
        if self.is_loading:
            return "model_loading"
        is_alone = self._supervisor.workers and not self._serving
        return self.violation or (self._wrong_with_workers if is_alone else None)

    @property
    def degraded_reason(self) -> str | None:
        """What is wrong while other workers still serve; None: nothing."""
        wrong = None if self.not_ready_reason is not None else self._wrong_with_workers
        return None if wrong is None else f"{wrong}; new requests go to {self._serving}"

    def drain(self) -> bool:
        """Stop accepting requests; False if it drains already."""
        was_draining, self.is_draining = self.is_draining, True
        return not was_draining

    def resume(self) -> bool:
        """Accept requests again; False if it accepts them already.

        Raises:
            RequestError: the daemon is shutting down.
        """
        if self.is_stopping:
            raise RequestError(
                "the daemon is shutting down, which resume cannot undo",
                code="stopping",
                status=409,
                hint="restart it after it has ended",
            )
        was_draining, self.is_draining = self.is_draining, False
        return was_draining

    def stop(self, *, takes_stragglers: bool) -> None:
        """Drain for a shutdown; see Service.stop_accepting."""
        self.is_stopping = self.is_draining = True
        self._takes_stragglers = takes_stragglers

    @property
    def is_loading(self) -> bool:
        """True until the workers are ready and the caches are open."""
        return not self._supervisor.is_started or self.is_preparing

    @property
    def _serving(self) -> str:
        """The ready workers that make progress."""
        workers, stalled = self._supervisor.workers, self._deadlines.stalled
        names = [n for n, w in workers.items() if w.state == "ready" and n not in stalled]
        return ", ".join(names)

    @property
    def _wrong_with_workers(self) -> str | None:
        troubles = [each.trouble for each in self._supervisor.workers.values()]
        return "; ".join(filter(None, [*troubles, self._deadlines.reason])) or None
