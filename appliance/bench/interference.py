"""What long prompts do to everybody else's tokens.

Three measurements on one server: the prompts alone, the streams alone (quiet), and the streams
while the prompts arrive (loaded). The result is how much wider the streams' worst gaps become, and
how much longer the prompts wait for their first token.
Owns: these three phases.
Invariant: a gap counts only between the moment when all streams have begun and the end of the
phase; streams run until the last prompt has its answer.
Never: compares servers.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import NoReturn

import msgspec

from appliance.bench.load import PATIENCE_S, Load, Target, Tick, exchange, measure, offer
from appliance.bench.reply_events import ReceivedReply
from appliance.bench.statistics import Figures, Sample, sample_of
from appliance.bench.workloads import Lengths, regular
from appliance.frame.latency import quantile
from engine.errors import PenstockError

STREAM_TOKENS = (32, 512)
"""In and out; then a stream begins anew, and its first token is no gap."""
PROMPT_OUTPUT_TOKENS = 8


@dataclass(frozen=True, slots=True)
class InterferencePlan:
    """Two phases of `seconds` each, and a quarter of that for the prompts alone."""

    num_streams: int
    prompt_tokens: int
    every_s: float
    seconds: float


class InterferenceResult(msgspec.Struct):
    """What long prompts did to the streams of one server in one round."""

    arm: str
    round_index: int
    quiet_itl_ms: list[float]
    loaded_itl_ms: list[float]
    alone: list[Sample]
    """The prompts without the streams, one at a time."""
    loaded: list[Sample]
    """The prompts among the streams."""

    def figures(self) -> Figures:
        """The round's figures by name."""
        quiet_p50 = quantile(self.quiet_itl_ms, 0.5)
        loaded_p99 = quantile(self.loaded_itl_ms, 0.99)
        alone_ms = [s.ttft_ms for s in self.alone if s.ttft_ms is not None]
        loaded_ms = [s.ttft_ms for s in self.loaded if s.ttft_ms is not None]
        return {
            "p99_loaded_over_p50_quiet": loaded_p99 / quiet_p50
            if loaded_p99 is not None and quiet_p50
            else None,
            "quiet_itl_ms_p50": quiet_p50,
            "quiet_itl_ms_p99": quantile(self.quiet_itl_ms, 0.99),
            "loaded_itl_ms_p50": quantile(self.loaded_itl_ms, 0.5),
            "loaded_itl_ms_p99": loaded_p99,
            "loaded_itl_ms_max": quantile(self.loaded_itl_ms, 1.0),
            "alone_ttft_ms_p50": quantile(alone_ms, 0.5),
            "loaded_ttft_ms_p50": quantile(loaded_ms, 0.5),
            "loaded_ttft_ms_max": quantile(loaded_ms, 1.0),
            "unanswered": sum(not s.is_completed for s in (*self.alone, *self.loaded)),
        }


async def disturb(
    target: Target, plan: InterferencePlan, label: str, round_index: int, tick: Tick
) -> InterferenceResult:
    """Measure one round: quiet streams, the prompts alone, and both together.

    Raises:
        PenstockError: a stream failed; its gaps would say nothing.
    """
    size, output = plan.prompt_tokens, PROMPT_OUTPUT_TOKENS
    alone = Load(plan.seconds / 4, Lengths(size, size), Lengths(output, output), concurrency=1)
    prompts = await measure(target, alone, label, round_index, lambda share: tick(share / 9))
    quiet, _ = await _phase(target, plan, has_prompts=False)
    tick(5 / 9)
    loaded, disturbing = await _phase(target, plan, has_prompts=True)
    tick(1.0)
    return InterferenceResult(label, round_index, quiet, loaded, prompts.samples, disturbing)


async def _phase(
    target: Target, plan: InterferencePlan, *, has_prompts: bool
) -> tuple[list[float], list[Sample]]:
    """The streams' gaps and the prompts."""
    origin_ns = time.perf_counter_ns()
    replies: list[list[ReceivedReply]] = [[] for _ in range(plan.num_streams)]
    streams = [asyncio.create_task(_stream(target, into)) for into in replies]
    prompts: list[Sample] = []
    if has_prompts:
        schedule = regular(plan.every_s, plan.seconds, plan.prompt_tokens, PROMPT_OUTPUT_TOKENS)
        prompts = await offer(target, schedule, PATIENCE_S)
    else:
        await asyncio.sleep(plan.seconds)
    end_ms = (time.perf_counter_ns() - origin_ns) / 1e6
    for stream in streams:
        stream.cancel()
    for ended in await asyncio.gather(*streams, return_exceptions=True):
        if not isinstance(ended, asyncio.CancelledError):
            raise ended
    samples = [
        [sample_of(reply, origin_ns=origin_ns, due_ns=reply.sent_ns) for reply in stream]
        for stream in replies
    ]
    return gaps_between(samples, end_ms), prompts


async def _stream(target: Target, replies: list[ReceivedReply]) -> NoReturn:
    """One request after another until it is cancelled."""
    while True:
        request, reply = target.request(*STREAM_TOKENS), ReceivedReply(time.perf_counter_ns())
        replies.append(reply)
        await exchange(target.address, request, reply, PATIENCE_S)
        if reply.ended_ns is None or reply.problem is not None:
            problem = reply.problem or f"no end within {PATIENCE_S:.0f} s"
            raise PenstockError(f"a stream failed: {problem}", where=target.label)


def gaps_between(streams: list[list[Sample]], end_ms: float) -> list[float]:
    """Gaps from the moment when every stream has its first token until the end."""
    times = [[sample.event_times_ms() for sample in stream] for stream in streams]
    if not all(stream and stream[0] for stream in times):
        return []  # one never began
    begun_ms = max(stream[0][0] for stream in times)
    return [
        after_ms - before_ms
        for stream in times
        for request in stream
        for before_ms, after_ms in pairwise(request)
        if before_ms >= begun_ms and after_ms <= end_ms
    ]
