"""One sentence each: what held a request up, and what limits the appliance now.

Owns: when something stands out, and the words for it.
Invariant: pure; waiting counts from nothing, computing from what it usually takes. An empty answer
means that nothing stands out.
Never: compares with a time that nobody has measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from appliance.frame.protocol import LatencyFrame, RequestFrame, WorkerFrame
from appliance.watch.windows import Usual

MIN_EXCESS_MS = 100.0
MIN_EXCESS_SHARE = 0.2
"""Of all the time so far: what is less has not made the request slow."""
MIN_RATIO = 2.0
"""Less than twice the usual time of computing is within what varies."""
ENOUGH_IN_TIME = 0.99
BUSY_RATIO = 0.95


class QueueWaits(NamedTuple):
    """What the sequences in the queue wait for."""

    for_blocks: int = 0
    for_prefill: int = 0
    for_workers: int = 0
    """No worker is ready."""
    for_swap: int = 0
    """Another model is served now."""


class _Cause(NamedTuple):
    excess_ms: float
    text: str
    usual_ms: float | None


def slow_because(frame: RequestFrame, usual: Usual, swap_wait_ms: float = 0.0) -> str | None:
    """The stage that took most of what was not needed; None if none took much.

    Args:
        frame: the request.
        usual: what stages take as a rule.
        swap_wait_ms: of its time in the queue, that until its model was there.
    """
    least_ms = max(MIN_EXCESS_MS, MIN_EXCESS_SHARE * (frame.e2e_ms or frame.age_ms))
    causes = [*_waits(frame, usual, swap_wait_ms), *_computing(frame, usual)]
    worst = max(causes, key=lambda cause: cause.excess_ms, default=None)
    if worst is None or worst.excess_ms < least_ms:
        return None
    return worst.text + ("" if worst.usual_ms is None else f", usually {_time(worst.usual_ms)}")


def _waits(frame: RequestFrame, usual: Usual, swap_wait_ms: float) -> Iterator[_Cause]:
    if swap_wait_ms:
        text = f"swap: it waited {_time(swap_wait_ms)} for its model to be loaded"
        yield _Cause(swap_wait_ms, text, None)
    for stage, phase, usual_ms, text in (
        ("queue", "queued", usual.queue_ms, "queue: it waited {} for its turn"),
        ("restore", "", None, "restore: it waited {} for its prefix from the disk"),
        ("handoff", "handing_off", usual.handoff_ms, "handoff: its KV was on the way for {}"),
        ("paused", "", None, "pause: {} without KV blocks, which others needed"),
        ("decode_wait", "", usual.decode_wait_ms, "wait: {} to its first step of decoding"),
    ):
        actual_ms = _so_far(frame, stage, phase)
        if actual_ms is not None and stage == "queue":
            actual_ms = max(actual_ms - swap_wait_ms, 0.0)
        if actual_ms is not None:
            yield _Cause(actual_ms, text.format(_time(actual_ms)), usual_ms)


def _computing(frame: RequestFrame, usual: Usual) -> Iterator[_Cause]:
    prefill_ms, tpot_ms = _so_far(frame, "prefill", "prefilling"), frame.tpot_ms
    usual_ms = (usual.prefill_ms_per_token or 0.0) * frame.prompt_tokens
    if prefill_ms is not None and usual_ms and prefill_ms > MIN_RATIO * usual_ms:
        text = f"prefill: {_time(prefill_ms)} for {frame.prompt_tokens} prompt tokens"
        yield _Cause(prefill_ms - usual_ms, text, usual_ms)
    if tpot_ms is not None and usual.tpot_ms and tpot_ms > MIN_RATIO * usual.tpot_ms:
        excess_ms = (tpot_ms - usual.tpot_ms) * frame.output_tokens / frame.num_sequences
        yield _Cause(excess_ms, f"decode: {_time(tpot_ms)} a token", usual.tpot_ms)


def _so_far(frame: RequestFrame, stage: str, phase: str) -> float | None:
    """The stage's time; of the stage that it is in, the time until now."""
    value_ms: float | None = getattr(frame, f"{stage}_ms")
    if value_ms is not None or frame.phase != phase:
        return value_ms
    before = (frame.tokenize_ms, frame.queue_ms, frame.restore_ms, frame.prefill_ms)
    return max(0.0, frame.age_ms - sum(value or 0.0 for value in before))


def limit(
    state: str,
    reason: str,
    waiting: QueueWaits,
    workers: Iterable[WorkerFrame],
    latency: LatencyFrame,
) -> str:
    """What keeps the appliance from doing more; empty if it has nothing to do, or does it."""
    if state == "degraded":
        return f"degraded: {reason}"
    if state == "draining":
        return "draining: it takes no new requests"
    if any(waiting):
        return _queue_limit(waiting)
    busy = [worker for worker in workers if worker.num_sequences]
    for stage, what, ratio in (
        ("prefill", "first tokens", latency.ttft_slo_ratio),
        ("decode", "gaps between tokens", latency.itl_slo_ratio),
    ):
        if busy and ratio is not None and ratio < ENOUGH_IN_TIME:
            return f"{stage}: {1 - ratio:.0%} of the {what} are later than their target"
    for worker in busy:
        if worker.busy_ratio >= BUSY_RATIO:
            is_prefill = worker.prefill_tokens_per_s >= worker.decode_tokens_per_s
            is_prefill = is_prefill and bool(worker.prefill_tokens_per_s or worker.num_prefilling)
            load = _sequences(worker.num_sequences)
            stage = "prefill" if is_prefill else "decode"
            return f"{stage}: worker {worker.name} has no idle time, with {load}"
    return ""


def _queue_limit(waiting: QueueWaits) -> str:
    """`queue: 12 sequences wait for KV blocks, 3 for prefill`."""
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
    return f"queue: {_sequences(number)} {verb} for {what}{rest}"


def _sequences(number: int) -> str:
    return f"{number} sequence{'' if number == 1 else 's'}"


def _time(value_ms: float) -> str:
    if value_ms < 10:
        return f"{value_ms:.1f} ms"
    return f"{value_ms:.0f} ms" if value_ms < 1000 else f"{value_ms / 1000:.1f} s"
