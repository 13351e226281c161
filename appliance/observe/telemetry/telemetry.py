"""Count events and keep recent rates for frames.

Invariant: rates are over the time since the last frame; an unreported value is None.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import psutil

from appliance.daemon.requests.request import Request
from appliance.daemon.requests.text_request import TextRequest
from appliance.fleet.worker_state import WorkerState
from appliance.observe.frame.histograms import Histograms
from appliance.observe.frame.latency import stages
from appliance.observe.frame.protocol import (
    MAX_FRAME_EVENTS,
    MAX_POOL_OWNERS,
    EventFrame,
    HandoffFrame,
    HostFrame,
    LinkFrame,
    TodayFrame,
    UserFrame,
    WorkerFrame,
    utc_now,
)
from appliance.observe.telemetry.refusals import Refusals
from appliance.observe.telemetry.windows import Windows
from engine.scheduler.sequences.sequence import Phase, Sequence
from engine.scheduler.snapshot import Snapshot
from engine.wire.messages import Stepped


def worker_now(frame: WorkerFrame, state: WorkerState | None, snapshot: Snapshot) -> WorkerFrame:
    """Refresh the fields of a worker's frame that are not over an interval."""
    if state is None:  # of the model that was served before
        return frame
    own = snapshot.workers[frame.name]
    return msgspec.structs.replace(
        frame,
        state=state.state,
        pid=state.pid,
        other_pids=state.pids[1:],
        num_sequences=own.num_sequences,
        num_prefilling=own.num_prefilling,
        num_restarts=state.num_restarts,
        cpus_used=state.cpus_used(own.cpus_used),
    )


_UNDER_WAY_NS = 50_000_000
"""A running step younger than this counts only when it has ended."""


@dataclass(slots=True)
class _Steps:
    """One worker's steps since the last frame."""

    step_ms: list[float] = field(default_factory=list)
    busy_ns: int = 0
    """Step time after that frame."""
    num_prefill_tokens: float = 0.0
    num_decode_tokens: int = 0
    num_sequences: int = 0
    """The sequences of each step, added up."""


class Today:
    """Add up the requests that end today, in UTC."""

    def __init__(self) -> None:
        self.frame = TodayFrame(utc_now(), 0, 0, 0, 0)

    def go_on_from(self, logged: Iterable[Mapping[str, Any]]) -> None:
        """Continue from the log's sums of today; no row: from zero."""
        day = self.frame.since[:10]
        sums = next((row for row in logged if row["day"] == day), {})
        names = ("requests", "errors", "prompt_tokens", "completion_tokens")
        self.frame = TodayFrame(_midnight(day), *(int(sums.get(name) or 0) for name in names))

    def add(self, request: Request | TextRequest) -> None:
        """Count a request that has ended."""
        frame = self.at(utc_now())
        frame.requests += 1
        frame.failed += request.has_failed
        frame.prompt_tokens += request.prompt_tokens
        frame.output_tokens += sum(s.num_output_tokens for s in request.sequences)

    def at(self, now: str) -> TodayFrame:
        """Return today's sums, which start over at midnight."""
        if now[:10] != self.frame.since[:10]:
            self.frame = TodayFrame(_midnight(now[:10]), 0, 0, 0, 0)
        return self.frame


def _midnight(day: str) -> str:
    return f"{day}T00:00:00.000Z"


class Telemetry:
    """Keep the counts, rates and events that the daemon shows."""

    def __init__(self, max_model_len: int) -> None:
        self.events: deque[EventFrame] = deque(maxlen=MAX_FRAME_EVENTS)
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self.windows = Windows()
        self.histograms = Histograms(max_model_len)
        self.today = Today()
        self.refusals = Refusals()
        self._last_token_ns: dict[int, int] = {}
        self._num_tokens_of: Counter[str] = Counter()
        """Output tokens by user, since the last frame."""
        self._steps: dict[str, _Steps] = {}
        self._since_ns = time.monotonic_ns()
        self._prefill_tokens_per_ns: dict[str, float] = {}
        """The prefill rate of each worker's last step with a prompt."""
        self._credited: dict[str, float] = {}
        """Prompt tokens of each worker's current step that frames have counted already."""
        self._active_ns: dict[str, int] = {}
        """When each worker last ended a step, or had no work."""
        self._handoffs = (0, 0)
        """The number and bytes of handoffs at the last frame."""
        self._link_bytes: dict[tuple[str, str], int] = {}
        """The bytes copied by each link at the last frame."""
        self._processes: dict[int, psutil.Process] = {}
        self._daemon = psutil.Process()

    # What happens

    def stepped(self, worker: str, step: Stepped) -> None:
        """Count a worker's step."""
        steps = self._steps.setdefault(worker, _Steps())
        num_tokens = step.num_prefill_tokens + step.num_decode_tokens
        if num_tokens:
            elapsed_ns = max(step.ended_ns - step.started_ns, 1)
            steps.step_ms.append(elapsed_ns / 1e6)
            steps.busy_ns += max(0, step.ended_ns - max(step.started_ns, self._since_ns))
            steps.num_prefill_tokens -= self._credited.pop(worker, 0.0)
            if step.num_prefill_tokens:
                self._prefill_tokens_per_ns[worker] = step.num_prefill_tokens / elapsed_ns
            steps.num_sequences += sum(entry.num_scheduled_tokens > 0 for entry in step.entries)
            self.histograms.step_tokens.observe(num_tokens)
            self._active_ns[worker] = step.ended_ns
        steps.num_prefill_tokens += step.num_prefill_tokens
        steps.num_decode_tokens += step.num_decode_tokens

    def tokens(self, sequence: Sequence, count: int, now_ns: int, user: str) -> None:
        """Count tokens that have come together for a reply, with one gap before them."""
        self._num_tokens_of[user] += count
        last_ns = self._last_token_ns.get(sequence.seq_id)
        if last_ns is None and sequence.num_output_tokens > count:
            pass  # a dead daemon sent its first token
        elif last_ns is None:
            ttft_ms = (now_ns - sequence.stamps.arrived_ns) / 1e6
            self.windows.first_token(sequence, ttft_ms, now_ns)
            self.histograms.ttft_s.observe(ttft_ms / 1e3)
            self.num_prompt_tokens += sequence.num_prompt_tokens
            self.num_cached_tokens += sequence.num_cached_tokens
        else:
            itl_ms = (now_ns - last_ns) / 1e6
            self.windows.itl(itl_ms, now_ns)
            self.histograms.itl_s.observe(itl_ms / 1e3)
        self._last_token_ns[sequence.seq_id] = now_ns
        self.num_output_tokens += count

    def finished(self, request: Request, now_ns: int) -> None:
        """Count a request after its terminal reply."""
        self.windows.request_finished(now_ns)
        self.today.add(request)
        self.histograms.num_sequences.observe(len(request.sequences))
        for sequence in request.sequences:
            self._last_token_ns.pop(sequence.seq_id, None)
            cut = stages(sequence.stamps, sequence.num_output_tokens)
            self.windows.ended(sequence, cut, now_ns)
            self.histograms.ended(sequence, cut)

    # The parts of a frame

    def interval_s(self, now_ns: int) -> float:
        """Return the seconds since the last call, which the next frame's rates cover."""
        elapsed_s = max((now_ns - self._since_ns) / 1e9, 1e-3)
        self._since_ns = now_ns
        return elapsed_s

    def users(self, live: Iterable[Request], elapsed_s: float) -> list[UserFrame]:
        """List users with requests, or tokens since the last call; most tokens first."""
        num_tokens, self._num_tokens_of = self._num_tokens_of, Counter()
        num_requests = Counter(request.peer.name for request in live)
        for user in num_requests:
            num_tokens[user] += 0
        return [
            UserFrame(user, num_requests[user], number / elapsed_s)
            for user, number in num_tokens.most_common(MAX_POOL_OWNERS)
        ]

    def handoff(self, snapshot: Snapshot, elapsed_s: float) -> HandoffFrame:
        """Show what was handed over since the last call, and what is on its way."""
        before, counters = self._handoffs, snapshot.counters
        self._handoffs = (counters.handoffs, counters.handoff_bytes)
        probed = [link.probe_bytes_per_s for link in snapshot.links]
        return HandoffFrame(
            transport=snapshot.transport,
            num_in_flight=snapshot.phases.get(Phase.HANDING_OFF, 0),
            handoffs_per_s=(counters.handoffs - before[0]) / elapsed_s,
            bytes_per_s=(counters.handoff_bytes - before[1]) / elapsed_s,
            probe_bytes_per_s=min((rate for rate in probed if rate), default=None),  # 0: down
            num_failed=counters.failed_handoffs,
        )

    def links(self, snapshot: Snapshot, elapsed_s: float) -> list[LinkFrame]:
        """Show every link that blocks are copied over, since the last call."""
        frames = []
        for state in snapshot.links:
            pools = state.link.from_pool, state.link.to_pool
            before, self._link_bytes[pools] = self._link_bytes.get(pools, 0), state.num_bytes
            frames.append(
                LinkFrame(
                    *pools,
                    state.in_force.transport,
                    state.probe_bytes_per_s,
                    state.copy_bytes_per_s,
                    (state.num_bytes - before) / elapsed_s,
                    state.down,
                    state.link.fallback is not None,
                    state.num_bytes,
                    state.num_strikes,
                )
            )
        return frames

    def workers(
        self, states: list[WorkerState], snapshot: Snapshot, now_ns: int, elapsed_s: float
    ) -> list[WorkerFrame]:
        """Describe every worker since the last call."""
        steps, self._steps = self._steps, {}
        alive = {pid for state in states for pid in state.pids}
        self._processes = {pid: p for pid, p in self._processes.items() if pid in alive}
        return [
            self._worker(state, steps.get(state.plan.name, _Steps()), snapshot, now_ns, elapsed_s)
            for state in states
        ]

    def _worker(
        self, state: WorkerState, steps: _Steps, snapshot: Snapshot, now_ns: int, elapsed_s: float
    ) -> WorkerFrame:
        name = state.plan.name
        own = snapshot.workers[name]
        if not own.owes:
            self._active_ns[name] = now_ns
        num_steps = len(steps.step_ms)
        since_ns = now_ns - int(elapsed_s * 1e9)
        self._count_step_under_way(name, steps, snapshot, since_ns, now_ns)
        cpu_percent, rss_bytes = self._processes_of(state.pids)
        return WorkerFrame(
            name=name,
            state=state.state,
            pid=state.pid,
            other_pids=state.pids[1:],
            device=state.device,
            cpus=list(state.plan.cpus) if state.plan.gpu is None else [],
            attention=state.attention,
            num_sequences=own.num_sequences,
            num_prefilling=own.num_prefilling,
            prefill_tokens_per_s=max(0.0, steps.num_prefill_tokens) / elapsed_s,
            decode_tokens_per_s=steps.num_decode_tokens / elapsed_s,
            steps_per_s=num_steps / elapsed_s,
            step_ms_p50=statistics.median(steps.step_ms) if steps.step_ms else None,
            step_ms_max=max(steps.step_ms, default=None),
            busy_ratio=min(steps.busy_ns / 1e9 / elapsed_s, 1.0),
            cpu_percent=cpu_percent,
            rss_bytes=rss_bytes,
            num_restarts=state.num_restarts,
            num_refused=state.num_refused,
            loaded_bytes=state.loaded_bytes,
            total_bytes=state.total_bytes,
            cpus_used=state.cpus_used(own.cpus_used),
            batch_size_mean=steps.num_sequences / num_steps if num_steps else None,
            last_step_age_ms=self._step_age_ms(name, now_ns) if own.owes else None,
        )

    def _count_step_under_way(
        self, name: str, steps: _Steps, snapshot: Snapshot, since_ns: int, now_ns: int
    ) -> None:
        """Add the time and tokens of a worker's running step; its end subtracts them again.

        A chunk of a long prompt can take seconds. Its tokens are assumed to come at the last
        chunk's rate, and at most as many as the step has.
        """
        own = snapshot.workers[name]
        if own.oldest_arrived_ns is None or own.has_no_cores:
            return
        began_ns = max(self._active_ns.get(name, since_ns), own.oldest_arrived_ns)
        if now_ns - began_ns < _UNDER_WAY_NS:
            return
        steps.busy_ns += max(0, now_ns - max(began_ns, since_ns))
        most = own.num_prompt_tokens_left
        so_far = self._prefill_tokens_per_ns.get(name, 0.0) * max(0, now_ns - began_ns)
        shown = self._credited.get(name, 0.0)
        credited = max(shown, min(so_far, most, snapshot.step_tokens))
        steps.num_prefill_tokens += credited - shown
        self._credited[name] = credited

    def _step_age_ms(self, worker: str, now_ns: int) -> float:
        """Return the age of a worker's last step, at most since it got work."""
        return max(0, now_ns - self._active_ns.setdefault(worker, now_ns)) / 1e6

    def _processes_of(self, pids: list[int]) -> tuple[float | None, int | None]:
        """Return CPU percent and resident bytes of all; None: not known of each."""
        percents, sizes = (
            zip(*map(self._process, pids), strict=True) if pids else ((None,), (None,))
        )
        known = [each for each in percents if each is not None]
        resident = [each for each in sizes if each is not None]
        return (
            sum(known) if len(known) == len(percents) else None,
            sum(resident) if len(resident) == len(sizes) else None,
        )

    def _process(self, pid: int) -> tuple[float | None, int | None]:
        """Return CPU percent since the last call, and resident bytes."""
        try:
            is_known = pid in self._processes
            process = self._processes.setdefault(pid, psutil.Process(pid))
            cpu_percent = process.cpu_percent()
            return cpu_percent if is_known else None, process.memory_info().rss
        except psutil.NoSuchProcess:
            return None, None

    def host(self) -> HostFrame:
        """Describe the machine and this process since the last call."""
        memory = psutil.virtual_memory()
        return HostFrame(
            cpu_percent=psutil.cpu_percent(),
            memory_used_bytes=memory.total - memory.available,
            memory_total_bytes=memory.total,
            daemon_cpu_percent=self._daemon.cpu_percent(),
            daemon_rss_bytes=self._daemon.memory_info().rss,
            core_percents=[round(each) for each in psutil.cpu_percent(percpu=True)],
        )
