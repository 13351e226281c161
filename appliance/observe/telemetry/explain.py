"""Explain in one sentence why a request was slow or what limits the appliance.

Invariant: waiting is compared with zero, computing with its usual time. An empty answer means that
nothing stands out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from appliance.observe.frame.figures import bytes_per_s, duration, short_id, things
from appliance.observe.frame.protocol import LatencyFrame, RequestFrame, WorkerFrame
from appliance.observe.frame.request_facts import TTFT_STAGES
from appliance.observe.telemetry.windows import UsualTimes
from engine.scheduler.prompt_waits import PromptWait, WaitsFor

MIN_EXCESS_MS = 100.0
MIN_EXCESS_SHARE = 0.2
"""Minimum share of the total time for a stage to have made the request slow."""
MIN_STARVED_MS = 1000.0
MIN_RATIO = 2.0
"""Minimum ratio to the usual computing time; less is normal variation."""
ENOUGH_IN_TIME = 0.99
BUSY_RATIO = 0.95
MIN_DISK_WAIT = 0.5
"""Share of time that a worker waits for weights, above which the disk limits."""
MIN_BUSY_PERCENT = 20.0
"""Use of a core below which a worker in a step is not what limits."""


class QueueWaits(NamedTuple):
    """The numbers of queued sequences by what they wait for."""

    for_blocks: int = 0
    for_prefill: int = 0
    for_workers: int = 0
    """Sequences waiting while no worker is ready."""
    for_swap: int = 0
    """Sequences waiting for another model."""


class _Cause(NamedTuple):
    excess_ms: float
    text: str
    usual_ms: float | None


def slow_because(
    frame: RequestFrame,
    usual: UsualTimes,
    swap_wait_ms: float = 0.0,
    starved_ms: float = 0.0,
) -> str | None:
    """Explain which stage exceeded its usual time most; None: none did by much.

    Args:
        swap_wait_ms: the part of its queue time until its model was loaded.
        starved_ms: the part of its time in which other programs held the workers' cores.
    """
    least_ms = max(MIN_EXCESS_MS, MIN_EXCESS_SHARE * (frame.e2e_ms or frame.age_ms))
    causes = [*_waits(frame, usual, swap_wait_ms), *_computing(frame, usual)]
    worst = max(causes, key=lambda cause: cause.excess_ms, default=None)
    starved = f"cores taken {duration(starved_ms)} by other programs"
    is_starved = starved_ms >= max(least_ms, MIN_STARVED_MS)
    if worst is None or worst.excess_ms < least_ms:
        return starved if is_starved else None
    text = worst.text + ("" if worst.usual_ms is None else f", usually {duration(worst.usual_ms)}")
    return f"{text}, {starved}" if is_starved else text


def _waits(frame: RequestFrame, usual: UsualTimes, swap_wait_ms: float) -> Iterator[_Cause]:
    if swap_wait_ms:
        text = f"swap: {duration(swap_wait_ms)} for its model"
        yield _Cause(swap_wait_ms, text, None)
    is_early = frame.recoveries and frame.paused_ms is None
    over = " over the death of a worker or the daemon" if is_early else ""
    for stage, phase, usual_ms, text in (
        ("queue", "queued", usual.queue_ms, f"queue: {{}}{over}"),
        ("restore", "", None, "restore: {} for cached KV"),
        ("handoff", "handing_off", usual.handoff_ms, "handoff: {}"),
        ("paused", "", None, f"paused: {{}} {_pause_cause(frame)}"),
        ("decode_wait", "", usual.decode_wait_ms, "decode wait: {}"),
    ):
        actual_ms = _so_far(frame, stage, phase)
        if actual_ms is not None and stage == "queue":
            actual_ms = max(actual_ms - swap_wait_ms, 0.0)
        if actual_ms is not None:
            # a wait that is no longer than is usual is not put beside it: that would deny itself
            told_ms = usual_ms if usual_ms is not None and actual_ms > usual_ms else None
            yield _Cause(actual_ms, text.format(duration(actual_ms)), told_ms)


def _pause_cause(frame: RequestFrame) -> str:
    """Say what a request was paused by, as far as its counts tell."""
    causes = ["by a preemption"] * bool(frame.preemptions)
    causes += ["by the death of a worker or the daemon"] * bool(frame.recoveries)
    return " and ".join(causes) or "without blocks"


def _computing(frame: RequestFrame, usual: UsualTimes) -> Iterator[_Cause]:
    prefill_ms, tpot_ms = _so_far(frame, "prefill", "prefilling"), frame.tpot_ms
    usual_ms = (usual.prefill_ms_per_token or 0.0) * frame.prompt_tokens
    if prefill_ms is not None and usual_ms and prefill_ms > MIN_RATIO * usual_ms:
        yield _Cause(prefill_ms - usual_ms, f"prefill: {duration(prefill_ms)}", usual_ms)
    if tpot_ms is not None and usual.tpot_ms and tpot_ms > MIN_RATIO * usual.tpot_ms:
        excess_ms = (tpot_ms - usual.tpot_ms) * (frame.output_tokens or 0) / frame.num_sequences
        yield _Cause(excess_ms, f"decode: {duration(tpot_ms)}/token", usual.tpot_ms)


def _so_far(frame: RequestFrame, stage: str, phase: str) -> float | None:
    """Return the stage's time, for the current stage until now."""
    value_ms: float | None = getattr(frame, f"{stage}_ms")
    if value_ms is not None or frame.phase != phase:
        return value_ms
    before = sum(getattr(frame, f"{each}_ms") or 0.0 for each in TTFT_STAGES)
    return max(0.0, frame.age_ms - before)


def limit(
    state: str,
    reason: str,
    waiting: QueueWaits,
    workers: Iterable[WorkerFrame],
    latency: LatencyFrame,
    starved: str = "",
) -> str:
    """Say what limits the throughput; empty: nothing does.

    Args:
        starved: what keeps the workers from their cores; empty: nothing does.
    """
    if state == "degraded":
        return f"degraded: {reason}"
    if state == "draining":
        return "draining: no new requests are accepted"
    if starved:
        return starved
    if any(waiting):
        return _queue_limit(waiting)
    busy = [worker for worker in workers if worker.num_sequences]
    for worker in busy:
        if (share := worker.disk_wait_ratio or 0.0) >= MIN_DISK_WAIT:
            rate = bytes_per_s(worker.disk_bytes_per_s)
            return f"{worker.name} waits for weights from disk {share:.0%} of its time, at {rate}"
    for stage, what, ratio in (
        ("prefill", "first tokens", latency.ttft_slo_ratio),
        ("decode", "gaps between tokens", latency.itl_slo_ratio),
    ):
        if busy and ratio is not None and ratio < ENOUGH_IN_TIME:
            return f"{stage}: {1 - ratio:.0%} of the {what} miss their target"
    for worker in busy:
        if worker.busy_ratio >= BUSY_RATIO and _has_no_cpu(worker):
            return f"worker {worker.name} has work and uses {worker.cpu_percent:.0f}% of a core"
        if worker.busy_ratio >= BUSY_RATIO:
            is_prefill = worker.prefill_tokens_per_s >= worker.decode_tokens_per_s
            is_prefill = is_prefill and bool(worker.prefill_tokens_per_s or worker.num_prefilling)
            load = things(worker.num_sequences, "sequence")
            stage = "prefill" if is_prefill else "decode"
            by = "" if worker.name.startswith(stage) else f" by {stage}"
            return f"{worker.name} worker saturated{by}, {load}"
    return ""


def _has_no_cpu(worker: WorkerFrame) -> bool:
    """Say whether a worker on CPU cores hardly computed in the last second."""
    used = worker.cpu_percent
    return bool(worker.cpus) and used is not None and used < MIN_BUSY_PERCENT


def _queue_limit(waiting: QueueWaits) -> str:
    """Describe the queue: `queue: 12 sequences wait for KV blocks, 3 for prefill`."""
    (number, what), *others = [
        (number, what)
        for number, what in (
            (waiting.for_workers, "a worker to be ready"),
            (waiting.for_blocks, "KV blocks"),
            (waiting.for_prefill, "prefill"),
            (waiting.for_swap, "a swap of models"),
        )
        if number
    ]
    verb = "waits" if number == 1 else "wait"
    rest = "".join(f", {number} for {what}" for number, what in others)
    return f"queue: {things(number, 'sequence')} {verb} for {what}{rest}"


class Wait(NamedTuple):
    """What a prompt waits for, in words."""

    text: str
    behind: str | None = None
    """The request with most prompt tokens among those computed before it."""
    behind_tokens: int | None = None
    """Prompt tokens left of all requests computed before it."""


def wait_text(wait: PromptWait, waited_ns: int) -> Wait:
    """Put a prompt's wait into words."""
    name = wait.subject
    match wait.reason:
        case WaitsFor.RESTART:
            text = "its worker to come back"
        case WaitsFor.PREEMPTED:
            text = "KV blocks, after preemption"
        case WaitsFor.TIER:
            text = f"blocks of its prompt from {name}"
        case WaitsFor.FETCH:
            text = "blocks of its prompt from another pool"
        case WaitsFor.NO_WORKER:
            text = "a worker to be ready"
        case WaitsFor.BLOCKS:
            text = "KV blocks that others hold"
        case WaitsFor.PREFIX:
            text = f"its prompt's prefix, being computed by {name or 'another request'}"
        case WaitsFor.TURN if wait.behind is None:
            text = f"its turn on worker {name}: it is next"
        case WaitsFor.TURN:
            first = f"{short_id(wait.behind)} ({wait.behind_tokens:,} prompt tokens left)"
            text = f"its turn on worker {name}, behind {first}"
    return Wait(f"{text}; {waited_ns / 1e9:.1f} s so far", wait.behind, wait.behind_tokens)
