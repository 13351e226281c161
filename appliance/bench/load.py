"""Send requests at a set pace, timestamp replies, and measure what long prompts do to others.

Invariant: every request that was due is a sample, also one that was refused, failed or never
ended; a schedule does not wait for replies.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import NoReturn

import msgspec

from appliance.bench.exchange import SERVERS_LOG, MachineReading, Target
from appliance.bench.reply_events import ReceivedReply, ReplyReader
from appliance.bench.sample import Sample, sample_of
from appliance.bench.statistics import Figures
from appliance.bench.workloads import Lengths, PlannedArrival, drawn, regular, reusable_tokens
from appliance.client.address import Address, TcpAddress, UnixAddress
from appliance.observe.frame.latency import quantile
from engine.errors import ConfigError, PenstockError


async def exchange(
    address: Address, request: bytes, reply: ReceivedReply, deadline_s: float
) -> None:
    """Send a request and fill its reply until it ends, or until the deadline.

    A reply that the deadline cut off has neither an end nor a problem. Hanging up, as by
    cancelling this, makes a server cancel what it still computes.

    Raises:
        ConfigError: the address is behind ssh.
    """
    loop = asyncio.get_running_loop()
    line = _Line(request, reply, loop.create_future())
    try:
        async with asyncio.timeout(deadline_s):
            match address:
                case UnixAddress(path):
                    await loop.create_unix_connection(lambda: line, str(path))
                case TcpAddress(host, port, is_tls):
                    await loop.create_connection(lambda: line, host, port, ssl=is_tls or None)
                case _:
                    raise ConfigError(
                        "a benchmark cannot run over ssh",
                        where=str(address),
                        hint="run it on that machine",
                    )
            await line.ended
    except TimeoutError:
        pass  # the caller knows whether that was meant
    except OSError as error:
        reply.problem = f"cannot connect: {error.strerror or error}"
    finally:
        line.hang_up()


class _Line(asyncio.Protocol):
    """Both directions of one exchange."""

    def __init__(self, request: bytes, reply: ReceivedReply, ended: asyncio.Future[None]) -> None:
        self.ended = ended
        self._request = request
        self._reader = ReplyReader(reply)
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now_ns = time.perf_counter_ns()
        if not self.ended.done():
            self._reader.feed(data, now_ns)
            if self._reader.is_over:
                self.ended.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self._reader.close()
            self.ended.set_result(None)

    def hang_up(self) -> None:
        """Close the connection at once, whatever is under way."""
        if self._transport is not None:
            self._transport.abort()


PATIENCE_S = 120.0
"""After the last request was due; what has not ended by then has failed."""
REFUSED_PAUSE_S = 0.1
"""A closed loop that is refused would otherwise only measure refusals."""
READING_INTERVAL_S = 1.0
"""The daemon's own: a frame has the mean since the one before."""

Tick = Callable[[float], None]
"""Called several times a second with the elapsed share of the time, 0 to 1."""


@dataclass(frozen=True, slots=True)
class Load:
    """What is offered to a server. One of concurrency, rate_per_s and trace says how.

    A closed loop keeps `concurrency` requests open and waits for each; the other two are open
    loops, whose requests come when they come.
    """

    seconds: float
    inputs: Lengths
    outputs: Lengths
    concurrency: int | None = None
    rate_per_s: float | None = None
    burstiness: float = 1.0
    trace: tuple[PlannedArrival, ...] | None = None
    seed: int = 0

    def schedule(self, round_index: int) -> list[PlannedArrival]:
        """Return the arrivals of an open loop in one round, equal for all arms."""
        if self.trace is not None:
            return [each for each in self.trace if each.at_s <= self.seconds]
        assert self.rate_per_s is not None
        return drawn(
            self.rate_per_s,
            self.burstiness,
            self.seconds,
            self.inputs,
            self.outputs,
            random.Random(f"{self.seed}/{round_index}"),
        )


class Measured(msgspec.Struct):
    """What one server did in one round."""

    arm: str
    round_index: int
    window_ms: float
    """Requests were due from 0 until then."""
    samples: list[Sample]
    energy_j: float | None = None
    """The machine's energy within the window."""
    starved_ratio: float | None = None
    """The share of the window in which other programs starved the workers; None: not reported."""


async def measure(target: Target, load: Load, label: str, round_index: int, tick: Tick) -> Measured:
    """Offer the load and wait for what came of it."""
    watch = asyncio.create_task(_watch(target, load.seconds, tick))
    if load.concurrency is not None:
        samples = await _keep_open(target, load, load.concurrency, round_index)
    else:
        samples = await offer(target, load.schedule(round_index), PATIENCE_S)
    readings = await watch
    power_w = [each.power_w for each in readings if each.power_w is not None]
    energy_j = load.seconds * sum(power_w) / len(power_w) if power_w else None
    num_starved = sum(each.is_starved for each in readings)
    starved_ratio = num_starved / len(readings) if readings else None
    return Measured(label, round_index, load.seconds * 1000, samples, energy_j, starved_ratio)


async def offer(target: Target, schedule: list[PlannedArrival], patience_s: float) -> list[Sample]:
    """Send each request when it is due, whatever has become of the others."""
    requests = target.requests(schedule)
    origin_ns = time.perf_counter_ns()
    last_s = max((each.at_s for each in schedule), default=0.0)

    async def send_at(at_s: float, request: bytes) -> Sample:
        due_ns = origin_ns + int(at_s * 1e9)
        await asyncio.sleep((due_ns - time.perf_counter_ns()) / 1e9)
        sample, _ = await send(target, request, origin_ns, due_ns, last_s + patience_s)
        return sample

    pairs = zip(schedule, requests, strict=True)
    samples = await asyncio.gather(*(send_at(each.at_s, request) for each, request in pairs))
    for sample, num_tokens in zip(samples, reusable_tokens(schedule), strict=True):
        sample.reusable_tokens = num_tokens
    return samples


async def _keep_open(
    target: Target, load: Load, concurrency: int, round_index: int
) -> list[Sample]:
    """Run `concurrency` clients at once; each asks again when it has its answer."""
    origin_ns = time.perf_counter_ns()
    samples: list[Sample] = []

    async def client(number: int) -> None:
        rng = random.Random(f"{load.seed}/{round_index}/{number}")
        while time.perf_counter_ns() - origin_ns < load.seconds * 1e9:
            request = target.request(load.inputs.draw(rng), load.outputs.draw(rng))
            now_ns = time.perf_counter_ns()
            until_s = load.seconds + PATIENCE_S
            sample, _ = await send(target, request, origin_ns, now_ns, until_s)
            samples.append(sample)
            if sample.error is not None:
                await asyncio.sleep(REFUSED_PAUSE_S)

    await asyncio.gather(*map(client, range(concurrency)))
    return samples


async def send(
    target: Target, request: bytes, origin_ns: int, due_ns: int, until_s: float
) -> tuple[Sample, ReceivedReply]:
    """Send a request, and wait for its reply, but not beyond `until_s` after the origin."""
    left_s = until_s - (time.perf_counter_ns() - origin_ns) / 1e9
    reply = ReceivedReply(time.perf_counter_ns())
    await exchange(target.address, request, reply, left_s)
    if reply.ended_ns is None and reply.problem is None:
        reply.problem = f"no end {PATIENCE_S:.0f} s after the last request was due"
    return sample_of(reply, origin_ns=origin_ns, due_ns=due_ns), reply


async def _watch(target: Target, seconds: float, tick: Tick) -> list[MachineReading]:
    """Tell how far it is, and return what the daemon said of its machine meanwhile."""
    start_s, readings = time.perf_counter(), list[MachineReading | None]()
    next_reading_s = READING_INTERVAL_S
    while (elapsed_s := time.perf_counter() - start_s) < seconds:
        tick(elapsed_s / seconds)
        if elapsed_s >= next_reading_s:
            readings.append(await asyncio.to_thread(target.reading))
            next_reading_s += READING_INTERVAL_S
        await asyncio.sleep(min(0.25, seconds - elapsed_s))
    tick(1.0)
    return [each for each in readings if each is not None]


STREAM_TOKENS = (32, 512)
"""Prompt and output tokens of a stream; a new stream's first token is no gap."""
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
        """Compute the round's figures by name."""
        quiet_p50 = quantile(self.quiet_itl_ms, 0.5)
        quiet_p99 = quantile(self.quiet_itl_ms, 0.99)
        loaded_p99 = quantile(self.loaded_itl_ms, 0.99)
        alone_ms = [s.ttft_ms for s in self.alone if s.ttft_ms is not None]
        loaded_ms = [s.ttft_ms for s in self.loaded if s.ttft_ms is not None]
        return {
            "p99_loaded_over_p99_quiet": _over(loaded_p99, quiet_p99),
            "p99_over_p50_quiet": _over(quiet_p99, quiet_p50),
            "quiet_itl_ms_p50": quiet_p50,
            "quiet_itl_ms_p99": quiet_p99,
            "loaded_itl_ms_p50": quantile(self.loaded_itl_ms, 0.5),
            "loaded_itl_ms_p99": loaded_p99,
            "loaded_itl_ms_max": quantile(self.loaded_itl_ms, 1.0),
            "alone_ttft_ms_p50": quantile(alone_ms, 0.5),
            "loaded_ttft_ms_p50": quantile(loaded_ms, 0.5),
            "loaded_ttft_ms_max": quantile(loaded_ms, 1.0),
            "unanswered": sum(not s.is_completed for s in (*self.alone, *self.loaded)),
        }


def _over(value: float | None, by: float | None) -> float | None:
    return value / by if value is not None and by else None


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
    """Collect the streams' gaps and the prompts of a phase."""
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
    """Send one request after another until cancelled."""
    while True:
        request, reply = target.request(*STREAM_TOKENS), ReceivedReply(time.perf_counter_ns())
        replies.append(reply)
        await exchange(target.address, request, reply, PATIENCE_S)
        if reply.ended_ns is None or reply.problem is not None:
            problem = reply.problem or f"no end within {PATIENCE_S:.0f} s"
            raise PenstockError(f"a stream failed: {problem}", where=target.label, hint=SERVERS_LOG)


def gaps_between(streams: list[list[Sample]], end_ms: float) -> list[float]:
    """List the gaps from the time when every stream has its first token until the end."""
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
