"""From what happens to what is shown: windows, rates, and the parts of a frame.

Owns: the windows of gaps and latencies, the step counts of the last second, the newest events.
Called by: service, for every step, token, finished request and event, and once a second.
Invariant: rates are over the time since the last frame; what is not reported is None.
Never: changes anything that it reads.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import dataclass, field

import psutil

from appliance.latency import Window, quantile, stages
from appliance.placement import Placement
from appliance.protocol import (
    MAX_FRAME_EVENTS,
    EventFrame,
    HostFrame,
    LatencyFrame,
    PoolFrame,
    QueueFrame,
    RequestFrame,
    WorkerFrame,
)
from appliance.request import Request
from appliance.supervisor import WorkerState
from engine.blocks import BlockPool
from engine.messages import Stepped
from engine.router import Router
from engine.sequence import Phase, Sequence

WINDOW_S = 60.0
MAX_WINDOW_GAPS = 20_000
_PHASE_ORDER = (Phase.QUEUED, Phase.PREFILLING, Phase.HANDING_OFF, Phase.DECODING)


@dataclass(slots=True)
class _Steps:
    """One worker's steps since the last frame."""

    step_ms: list[float] = field(default_factory=list)
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0


class Telemetry:
    """What the daemon remembers in order to show it."""

    def __init__(self) -> None:
        self.events: deque[EventFrame] = deque(maxlen=MAX_FRAME_EVENTS)
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self._itl_ms = Window(WINDOW_S, MAX_WINDOW_GAPS)
        self._ttft_ms = Window(WINDOW_S)
        self._handoff_ms = Window(WINDOW_S)
        self._finished = Window(WINDOW_S)
        self._last_token_ns: dict[int, int] = {}
        self._steps: dict[str, _Steps] = {}
        self._since_ns = time.monotonic_ns()
        self._processes: dict[int, psutil.Process] = {}
        self._daemon = psutil.Process()

    # What happens

    def stepped(self, worker: str, step: Stepped) -> None:
        """A worker has made a step."""
        steps = self._steps.setdefault(worker, _Steps())
        if step.num_prefill_tokens or step.num_decode_tokens:
            steps.step_ms.append((step.ended_ns - step.started_ns) / 1e6)
        steps.num_prefill_tokens += step.num_prefill_tokens
        steps.num_decode_tokens += step.num_decode_tokens

    def token(self, sequence: Sequence, now_ns: int) -> None:
        """A token has come for a reply."""
        last_ns = self._last_token_ns.get(sequence.seq_id)
        if last_ns is None:
            self._ttft_ms.add(now_ns, (now_ns - sequence.stamps.arrived_ns) / 1e6)
            self.num_prompt_tokens += sequence.num_prompt_tokens
        else:
            self._itl_ms.add(now_ns, (now_ns - last_ns) / 1e6)
        self._last_token_ns[sequence.seq_id] = now_ns
        self.num_output_tokens += 1

    def finished(self, request: Request, now_ns: int) -> None:
        """A request has had its terminal reply."""
        self._finished.add(now_ns, 0.0)
        for sequence in request.sequences:
            self._last_token_ns.pop(sequence.seq_id, None)
            handoff_ms = stages(sequence.stamps, sequence.num_output_tokens).handoff_ms
            if handoff_ms is not None:
                self._handoff_ms.add(now_ns, handoff_ms)

    # The parts of a frame

    def latency(self, now_ns: int) -> LatencyFrame:
        """Exact quantiles over the window."""
        ttft_ms = sorted(self._ttft_ms.values(now_ns))
        itl_ms = sorted(self._itl_ms.values(now_ns))
        handoff_ms = sorted(self._handoff_ms.values(now_ns))
        return LatencyFrame(
            window_s=WINDOW_S,
            num_requests=len(self._finished.values(now_ns)),
            ttft_ms_p50=quantile(ttft_ms, 0.5),
            ttft_ms_p95=quantile(ttft_ms, 0.95),
            ttft_ms_max=quantile(ttft_ms, 1.0),
            itl_ms_p50=quantile(itl_ms, 0.5),
            itl_ms_p95=quantile(itl_ms, 0.95),
            itl_ms_max=quantile(itl_ms, 1.0),
            handoff_ms_p50=quantile(handoff_ms, 0.5),
            handoff_ms_p95=quantile(handoff_ms, 0.95),
        )

    def workers(self, states: list[WorkerState], router: Router, now_ns: int) -> list[WorkerFrame]:
        """Every worker since the last call, which starts the next interval."""
        elapsed_s = max((now_ns - self._since_ns) / 1e9, 1e-3)
        self._since_ns = now_ns
        steps, self._steps = self._steps, {}
        alive = {state.pid for state in states}
        self._processes = {pid: p for pid, p in self._processes.items() if pid in alive}
        return [
            self._worker(state, steps.get(state.plan.name, _Steps()), router, elapsed_s)
            for state in states
        ]

    def _worker(
        self, state: WorkerState, steps: _Steps, router: Router, elapsed_s: float
    ) -> WorkerFrame:
        name = state.plan.name
        cpu_percent, rss_bytes = self._process(state.pid)
        return WorkerFrame(
            name=name,
            state=state.state,
            pid=state.pid,
            device=state.plan.device,
            cpus=list(state.plan.cpus) if state.plan.gpu is None else [],
            attention=state.attention,
            num_sequences=sum(s.worker == name for s in router.running.values()),
            prefill_tokens_per_s=steps.num_prefill_tokens / elapsed_s,
            decode_tokens_per_s=steps.num_decode_tokens / elapsed_s,
            steps_per_s=len(steps.step_ms) / elapsed_s,
            step_ms_p50=statistics.median(steps.step_ms) if steps.step_ms else None,
            step_ms_max=max(steps.step_ms, default=None),
            busy_ratio=min(sum(steps.step_ms) / 1e3 / elapsed_s, 1.0),
            cpu_percent=cpu_percent,
            rss_bytes=rss_bytes,
            num_restarts=state.num_restarts,
            loaded_bytes=state.loaded_bytes,
            total_bytes=state.total_bytes,
            cpus_used=sorted(router.roles.cores.used(name)),
        )

    def _process(self, pid: int | None) -> tuple[float | None, int | None]:
        """Cpu percent since the last call, and resident bytes."""
        if pid is None:
            return None, None
        try:
            is_known = pid in self._processes
            process = self._processes.setdefault(pid, psutil.Process(pid))
            cpu_percent = process.cpu_percent()
            return cpu_percent if is_known else None, process.memory_info().rss
        except psutil.NoSuchProcess:
            return None, None

    def host(self) -> HostFrame:
        """The machine and this process, since the last call."""
        memory = psutil.virtual_memory()
        return HostFrame(
            cpu_percent=psutil.cpu_percent(),
            memory_used_bytes=memory.total - memory.available,
            memory_total_bytes=memory.total,
            daemon_cpu_percent=self._daemon.cpu_percent(),
            daemon_rss_bytes=self._daemon.memory_info().rss,
        )


def pool_frame(pool: BlockPool, block_bytes: int) -> PoolFrame:
    """One pool's books; padding block 0 is left out."""
    counts = {state.name.lower(): count for state, count in pool.counts.items()}
    return PoolFrame(
        name=pool.name,
        num_blocks=pool.capacity,
        block_size=pool.block_size,
        block_bytes=block_bytes,
        **counts,
    )


def queue_frame(router: Router, now_ns: int) -> QueueFrame:
    """Sequences by phase."""
    counts = dict.fromkeys(Phase, 0)
    for sequence in (*router.queue, *router.resuming, *router.running.values()):
        counts[sequence.phase] += 1
    oldest_ns = min((s.stamps.arrived_ns for s in router.queue), default=None)
    return QueueFrame(
        queued=counts[Phase.QUEUED],
        prefilling=counts[Phase.PREFILLING],
        handing_off=counts[Phase.HANDING_OFF],
        decoding=counts[Phase.DECODING],
        max_queued=router.queue.max_sequences,
        oldest_queued_ms=None if oldest_ns is None else (now_ns - oldest_ns) / 1e6,
        num_owners=router.queue.num_owners,
        queued_tokens=router.queue.num_tokens,
        max_queued_tokens=router.queue.max_tokens,
    )


def request_frame(
    request: Request, router: Router, placement: Placement, now_ns: int
) -> RequestFrame:
    """A request as it stands; its stages are those of its least advanced sequence."""
    open_sequences = [s for s in request.sequences if not s.is_finished]
    if open_sequences:
        shown = min(open_sequences, key=lambda s: _PHASE_ORDER.index(s.phase))
    else:
        shown = max(request.sequences, key=lambda s: s.stamps.finished_ns or 0)
    cut = stages(shown.stamps, shown.num_output_tokens)
    end_ns = shown.stamps.finished_ns if request.is_finished else now_ns
    return RequestFrame(
        id=request.request_id,
        endpoint=request.endpoint,
        phase=str(shown.phase),
        model=request.model,
        user=request.peer.name,
        stream=request.is_stream,
        num_sequences=len(request.sequences),
        prompt_tokens=sum(s.num_prompt_tokens for s in request.sequences),
        computed_tokens=sum(s.num_computed_tokens for s in request.sequences),
        output_tokens=sum(s.num_output_tokens for s in request.sequences),
        max_tokens=sum(s.sampling.max_tokens for s in request.sequences),
        num_blocks=sum(
            len(router.ledger.table(s.seq_id, pool))
            for s in request.sequences
            for pool in placement.num_blocks_by_pool
        ),
        worker=shown.worker,
        transport=next((s.transport for s in request.sequences if s.transport), None),
        received_at=request.received_at,
        age_ms=((end_ns or now_ns) - shown.stamps.arrived_ns) / 1e6,
        finish_reason=None if shown.finish_reason is None else str(shown.finish_reason),
        error=next((s.error for s in request.sequences if s.error), None),
        tokenize_ms=cut.tokenize_ms,
        queue_ms=cut.queue_ms,
        prefill_ms=cut.prefill_ms,
        ttft_ms=cut.ttft_ms,
        handoff_ms=cut.handoff_ms,
        decode_wait_ms=cut.decode_wait_ms,
        decode_ms=cut.decode_ms,
        first_itl_ms=cut.first_itl_ms,
        tpot_ms=cut.tpot_ms,
        e2e_ms=cut.e2e_ms,
        handoff_bytes=(
            sum(s.handoff_bytes for s in request.sequences)
            if any(s.transport for s in request.sequences)
            else None
        ),
        route=shown.route,
        route_reason=shown.route_reason,
    )
