"""Keep every deadline of the daemon, and decide whether it can take work.

Owns: how long each worker has been silent; what is told to whom when one has passed; whether the
appliance drains, and for good.
Invariant: whatever can wait is ended some time, with a reply and a row; a worker that stands still
gets nothing more, then is killed, and its sequences go on with what they have.
Never: chooses who waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from appliance.fleet.supervisor import Supervisor
from appliance.fleet.worker_state import WorkerState
from appliance.request import Request
from appliance.telemetry.progress import Watchdog, WorkerReading
from appliance.telemetry.telemetry import owes_something
from engine.errors import RequestError, Unavailable
from engine.schedule.router import Router
from engine.schedule.sequence import FinishReason, Phase, Sequence
from engine.schedule.step_times import StepLoad

HANDOFF_S = 120.0
"""Without progress on the way from one worker to the other."""
STAGE_S = 600.0
"""Without progress in any other stage but the queue, however often a worker died meanwhile."""


Tell = Callable[[str, str, str], None]


class _StageMark(NamedTuple):
    """How far a sequence is, and since when."""

    phase: Phase
    generation: int
    num_computed_tokens: int
    since_ns: int
    reached: tuple[int, int]
    """Its output tokens and its computed positions, the most that it ever had."""
    reached_ns: int


class Deadlines:
    """Looks at workers and live requests."""

    def __init__(
        self,
        router: Router,
        supervisor: Supervisor,
        max_num_batched_tokens: int,
        live: Mapping[str, Request],
        tell: Tell,
    ) -> None:
        """Begin to look.

        Args:
            router: of the sequences.
            supervisor: of the workers.
            max_num_batched_tokens: of prompts, in a worker's step.
            live: all that has had no terminal reply, as it changes.
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
        self.max_queue_wait_s = 0.0
        """Of the setting; 0: for ever."""

    def change_model(
        self, router: Router, supervisor: Supervisor, max_num_batched_tokens: int
    ) -> None:
        """Look at other workers from now on; no request is live."""
        self._router, self._supervisor = router, supervisor
        self._max_step_tokens, self._watchdog = max_num_batched_tokens, Watchdog()
        self._marks.clear()

    @property
    def reason(self) -> str | None:
        """Which worker stands still, as /ready says it; None: none does."""
        stalled = self._watchdog.stalled
        return "; ".join(f"worker {name}: {about}" for name, about in stalled.items()) or None

    def set_queue_limits(self, max_queued: int, max_queued_tokens: int, max_wait_s: float) -> None:
        """Change what may wait from now on, and how long; what waits already stays."""
        self._router.queue.set_limits(max_queued, max_queued_tokens)
        self.max_queue_wait_s = max_wait_s

    def keep(self) -> None:
        """End what stands still, workers and requests."""
        self._router.queue.max_wait_ms = 1e3 * self.max_queue_wait_s
        self._router.queue.max_first_ms = self._router.roles.slo.ttft_ms or 0.0
        self._router.queue.step_tokens = self._max_step_tokens
        self._router.queue.assume(self._ms_per_token())
        now_ns = time.monotonic_ns()
        self.look_at_workers(now_ns)
        for request, error in self.late(list(self._live.values()), now_ns):
            about = f"{request.request_id}: {error.what}"
            self._tell("warning", f"request.{error.code}", about)
            self.end(request, error, now_ns)

    def look_at_workers(self, now_ns: int) -> None:
        """Take work from those that stand still, and end those whose time is up."""
        states = self._supervisor.workers
        readings = {name: self._reading(name, state) for name, state in states.items()}
        elapsed_s, self._looked_ns = (now_ns - self._looked_ns) / 1e9, now_ns
        self._watchdog.look(readings, elapsed_s)
        roles, stalled = self._router.roles, frozenset(self._watchdog.stalled)
        if stalled != roles.stalled:
            roles.stalled = stalled
            self._router.dispatch(now_ns)
        for name, about in self._watchdog.hung.items():
            while_what = " while it loads" * (states[name].state == "loading")
            self._supervisor.end_hung(name, f"it hangs{while_what}: {about}")

    def _ms_per_token(self) -> float:
        """Of a prompt, in the largest step of which a worker's time is known; 0: unknown."""
        roles = self._router.roles
        for size in (max(self._max_step_tokens >> shift, 1) for shift in range(4)):
            load = StepLoad(size, size * size / 2)
            steps = [roles.slowest_ms(name, load) for name in roles.ready_workers]
            if known := [each for each in steps if each is not None]:
                return min(known) / size
        return 0.0

    def _reading(self, name: str, state: WorkerState) -> WorkerReading:
        router = self._router
        # who has done its part may wait for others, which are looked at themselves
        is_loading = state.state == "loading" and not self._supervisor.waits_for_others(name)
        is_owing = state.state == "ready" and owes_something(router, name)
        has_work = is_loading or (is_owing and not router.roles.cores.is_parked(name))
        num_signs, step_ms, cpu_s = state.num_reports, None, None
        if has_work and not is_loading:
            step_ms = router.roles.slowest_ms(name, self._longest_step(name))
        if has_work and step_ms is None:
            cpu_s, num_pages = _used(state.pid)
            num_signs += num_pages if is_loading else 0
        return WorkerReading(state.pid, num_signs, has_work, step_ms, cpu_s, is_loading)

    def _longest_step(self, worker: str) -> StepLoad:
        """All that the worker could be computing at once."""
        ready = self._supervisor.workers[worker].ready
        most = (ready and ready.max_num_batched_tokens) or self._max_step_tokens
        tokens = batch = context = longest = 0
        for sequence in self._router.at.running.values():
            if sequence.worker != worker:
                continue
            if sequence.phase is Phase.PREFILLING:
                tokens += max(sequence.num_prompt_tokens - sequence.num_computed_tokens, 1)
                longest = max(longest, sequence.num_tokens)
            else:
                batch += 1
                context += sequence.num_tokens
        tokens = min(tokens, most)
        return StepLoad(tokens, tokens * longest, batch, context)

    def late(self, live: Iterable[Request], now_ns: int) -> list[tuple[Request, RequestError]]:
        """Requests of which a sequence has been too long in its stage, and what to say of it."""
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
        """End what is left of a request, which is told why."""
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


def _used(pid: int | None) -> tuple[float | None, int]:
    """By a process: CPU time in clock ticks, None if it is gone; pages of files in its memory."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        num_pages = int(Path(f"/proc/{pid}/statm").read_text().split()[2])
    except OSError:
        return None, 0
    return float(fields[11]) + float(fields[12]), num_pages


class Availability:
    """What a client may expect at this moment."""

    def __init__(self, router: Router, supervisor: Supervisor, deadlines: Deadlines) -> None:
        self._router = router
        self._supervisor = supervisor
        self._deadlines = deadlines
        self.is_preparing = False
        """Workers may be ready, and the caches are not open yet."""
        self.violation: str | None = None
        """Of an invariant: a bug of ours."""
        self.is_draining = False
        self.is_stopping = False
        """It drains for good."""
        self._takes_stragglers = False

    def change_model(self, router: Router, supervisor: Supervisor) -> None:
        """Speak of other workers from now on."""
        self._router, self._supervisor = router, supervisor

    def check(self) -> None:
        """Raise Unavailable where a request cannot be accepted now."""
        if self.is_draining and not self._takes_stragglers:
            end = "it was told to stop" if self.is_stopping else "an operator's resume ends that"
            what = f"the appliance is draining and takes no new work; {end}"
            raise Unavailable(what, code="draining")
        if self.is_loading:
            raise Unavailable("the model is still loading", code="model_loading")
        if self._supervisor.is_lost:
            names = ", ".join(self._supervisor.workers)
            raise Unavailable(f"worker {names} cannot be restarted", code="engine_dead")

    @property
    def not_ready_reason(self) -> str | None:
        """None if /ready is 200, else why not: a request would be refused, or get no token."""
        if self.is_draining:
            return "draining"
        if self.is_loading:
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
        if self.is_stopping:
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
        self.is_stopping = self.is_draining = True
        self._takes_stragglers = takes_stragglers

    @property
    def is_loading(self) -> bool:
        """True until the workers are ready and the caches are open."""
        return not self._supervisor.is_started or self.is_preparing

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
