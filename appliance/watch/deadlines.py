"""Every deadline that the daemon keeps: of workers without progress, of sequences in each stage.

Owns: what is told to whom when one has passed.
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
from appliance.watch.telemetry import owes_something
from appliance.watch.watchdog import Watchdog, WorkerReading
from engine.errors import RequestError, Unavailable
from engine.schedule.router import Router
from engine.schedule.sequence import FinishReason, Phase, Sequence
from engine.schedule.step_times import StepLoad

HANDOFF_S = 120.0
"""Without progress on the way from one worker to the other."""
STAGE_S = 600.0
"""Without progress in any other stage but the queue: a bug of ours, since its worker has steps."""


Tell = Callable[[str, str, str], None]


class _StageMark(NamedTuple):
    """How far a sequence was, and when it came there."""

    phase: Phase
    generation: int
    num_computed_tokens: int
    since_ns: int


class Deadlines:
    """Looks at workers and live requests."""

    def __init__(
        self,
        router: Router,
        supervisor: Supervisor,
        max_step_tokens: int,
        live: Mapping[str, Request],
        tell: Tell,
    ) -> None:
        """Begin to look.

        Args:
            router: of the sequences.
            supervisor: of the workers.
            max_step_tokens: of prompts, in a worker's step.
            live: all that has had no terminal reply, as it changes.
            tell: takes severity, code and message of an event.
        """
        self._live = live
        self._tell = tell
        self._router = router
        self._supervisor = supervisor
        self._max_step_tokens = max_step_tokens
        self._watchdog = Watchdog()
        self._marks: dict[int, _StageMark] = {}
        self._looked_ns = time.monotonic_ns()
        self.max_queue_wait_s = 0.0
        """Of the setting; 0: for ever."""

    def change_model(self, router: Router, supervisor: Supervisor, max_step_tokens: int) -> None:
        """Look at other workers from now on; no request is live."""
        self._router, self._supervisor = router, supervisor
        self._max_step_tokens, self._watchdog = max_step_tokens, Watchdog()
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
            self._supervisor.end_hung(name, f"it hangs: {about}")

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
        is_loading = state.state == "loading" and self._supervisor.is_started
        is_owing = state.state == "ready" and owes_something(router, name)
        has_work = is_loading or (is_owing and not router.roles.cores.is_parked(name))
        step_ms = cpu_s = None
        if has_work and not is_loading:
            step_ms = router.roles.slowest_ms(name, self._longest_step(name))
            cpu_s = None if step_ms is not None else _cpu_s(state.pid)
        return WorkerReading(state.pid, state.num_reports, has_work, step_ms, cpu_s, is_loading)

    def _longest_step(self, worker: str) -> StepLoad:
        """All that the worker could be computing at once."""
        ready = self._supervisor.workers[worker].ready
        most = (ready and ready.max_step_tokens) or self._max_step_tokens
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
            for sequence in request.sequences:
                if sequence.is_finished:
                    continue
                mark = self._mark(sequence, now_ns)
                marks[sequence.seq_id] = mark
                if error := self._error(sequence, (now_ns - mark.since_ns) / 1e9):
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
        phase, generation = sequence.phase, sequence.generation
        mark = _StageMark(phase, generation, sequence.num_computed_tokens, now_ns)
        last = self._marks.get(sequence.seq_id)
        return last if last is not None and last[:3] == mark[:3] else mark

    def _error(self, sequence: Sequence, elapsed_s: float) -> RequestError | None:
        if sequence.phase is Phase.QUEUED and not sequence.generation:
            limit_s = self.max_queue_wait_s
            if not limit_s or elapsed_s <= limit_s:
                return None
            return Unavailable(
                f"it waited {elapsed_s:.0f} s for its turn, longer than max_queue_wait",
                code="queue_timeout",
                retry_after_ms=int(limit_s * 1e3),
            )
        limit_s = HANDOFF_S if sequence.phase is Phase.HANDING_OFF else STAGE_S
        if elapsed_s <= limit_s:
            return None
        return RequestError(
            f"no progress for {elapsed_s:.0f} s while {sequence.phase.replace('_', ' ')}",
            code="stage_timeout",
            status=500,
            kind="server_error",
        )


def _cpu_s(pid: int | None) -> float | None:
    """CPU time of a process so far, in clock ticks; None if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return float(fields[11]) + float(fields[12])
