"""One sentence each: what held a request up, and what limits the appliance now.

Owns: when something stands out, and the words for it.
Called by: frames, for every request that it shows and for itself.
Invariant: pure; an empty answer means that nothing stands out, not that nothing was looked at.
Never: compares with a time that nobody has measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from appliance.protocol import LatencyFrame, RequestFrame, WorkerFrame
from appliance.windows import Usual

MIN_EXCESS_MS = 100.0
MIN_EXCESS_RATIO = 1.0
"""Of the usual time: less than twice as long is within what varies."""
MIN_EXCESS_SHARE = 0.2
"""Of all the time so far: what is less has not made the request slow."""
ENOUGH_IN_TIME = 0.99
BUSY_RATIO = 0.95


class Waiting(NamedTuple):
    """What the sequences in the queue wait for."""

    for_blocks: int = 0
    for_prefill: int = 0
    for_workers: int = 0
    """No worker is ready."""


class _Cause(NamedTuple):
    excess_ms: float
    actual_ms: float
    usual_ms: float
    text: str


def slow_because(frame: RequestFrame, usual: Usual) -> str | None:
    """The stage that took most beyond what is usual; None if none did by much."""
    found = [cause for cause in _causes(frame, usual) if _stands_out(cause, frame)]
    if not found:
        return None
    worst = max(found, key=lambda cause: cause.excess_ms)
    rule = f", usually {_time(worst.usual_ms)}" if worst.usual_ms else ""
    return f"{worst.text}{rule}"


def _stands_out(cause: _Cause, frame: RequestFrame) -> bool:
    is_longer = cause.actual_ms >= (1 + MIN_EXCESS_RATIO) * cause.usual_ms
    least_ms = max(MIN_EXCESS_MS, MIN_EXCESS_SHARE * (frame.e2e_ms or frame.age_ms))
    return is_longer and cause.excess_ms >= least_ms


def _causes(frame: RequestFrame, usual: Usual) -> Iterable[_Cause]:
    """Waiting is usually nothing where nobody knows better; computing is not."""
    waits: tuple[tuple[str, str, float | None, Callable[[str], str]], ...] = (
        ("queue", "queued", usual.queue_ms, "queue: it waited {} for its turn".format),
        ("handoff", "handing_off", usual.handoff_ms, "handoff: its KV took {} to move".format),
        (
            "decode_wait",
            "",
            usual.decode_wait_ms,
            "wait: {} passed between its handoff and its first decode step".format,
        ),
    )
    for stage, phase, usual_ms, text in waits:
        actual_ms = _so_far(frame, stage, phase)
        if actual_ms is not None:
            least_ms = usual_ms or 0.0
            yield _Cause(actual_ms - least_ms, actual_ms, least_ms, text(_time(actual_ms)))
    prefill_ms = _so_far(frame, "prefill", "prefilling")
    if prefill_ms is not None and usual.prefill_ms is not None:
        text_of = f"prefill: {_time(prefill_ms)} for {frame.prompt_tokens} prompt tokens"
        yield _Cause(prefill_ms - usual.prefill_ms, prefill_ms, usual.prefill_ms, text_of)
    if frame.tpot_ms is not None and usual.tpot_ms is not None:
        excess_ms = (frame.tpot_ms - usual.tpot_ms) * frame.output_tokens
        text_of = f"decode: {_time(frame.tpot_ms)} a token"
        yield _Cause(excess_ms, frame.tpot_ms, usual.tpot_ms, text_of)


def _so_far(frame: RequestFrame, stage: str, phase: str) -> float | None:
    """The stage's time; of the stage that it is in, the time until now."""
    value_ms: float | None = getattr(frame, f"{stage}_ms")
    if value_ms is not None or frame.phase != phase:
        return value_ms
    before = (frame.tokenize_ms, frame.queue_ms, frame.prefill_ms)
    return max(0.0, frame.age_ms - sum(value or 0.0 for value in before))


def limit(
    state: str,
    reason: str,
    waiting: Waiting,
    workers: Iterable[WorkerFrame],
    latency: LatencyFrame,
) -> str:
    """What keeps the appliance from doing more; empty while it has nothing to do, or does it."""
    if state in ("degraded", "draining"):
        return f"{state}: {reason}" if reason != state else "draining: it takes no new requests"
    if any(waiting):
        return _queue_limit(waiting)
    for stage, what, ratio in (
        ("prefill", "first tokens", latency.ttft_slo_ratio),
        ("decode", "gaps between tokens", latency.itl_slo_ratio),
    ):
        if ratio is not None and ratio < ENOUGH_IN_TIME:
            return f"{stage}: {1 - ratio:.0%} of the {what} come later than their target"
    for worker in workers:
        if worker.busy_ratio >= BUSY_RATIO and worker.num_sequences:
            is_prefill = worker.prefill_tokens_per_s > worker.decode_tokens_per_s
            stage = "prefill" if is_prefill else "decode"
            return (
                f"{stage}: worker {worker.name} computes all the time,"
                f" for {_sequences(worker.num_sequences)}"
            )
    return ""


def _queue_limit(waiting: Waiting) -> str:
    """`queue: 12 sequences wait for KV blocks, 3 for prefill`."""
    named = (
        (waiting.for_workers, "a worker to be ready"),
        (waiting.for_blocks, "KV blocks"),
        (waiting.for_prefill, "prefill"),
    )
    (number, what), *others = [each for each in named if each[0]]
    verb = "waits" if number == 1 else "wait"
    rest = "".join(f", {number} for {what}" for number, what in others)
    return f"queue: {_sequences(number)} {verb} for {what}{rest}"


def _sequences(number: int) -> str:
    return f"{number} sequence{'' if number == 1 else 's'}"


def _time(value_ms: float) -> str:
    if value_ms < 10:
        return f"{value_ms:.1f} ms"
    return f"{value_ms:.0f} ms" if value_ms < 1000 else f"{value_ms / 1000:.1f} s"
