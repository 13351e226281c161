"""Compute each alert's signal as one number.

Invariant: an unreported or meaningless signal is not yielded.
"""

from __future__ import annotations

import shlex
from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from appliance.observe.frame.figures import (
    count,
    duration,
    seconds_between,
    short_id,
    things,
    whole_seconds,
)
from appliance.observe.frame.late_frames import LateFrame, RefusalFrame
from appliance.observe.frame.protocol import Frame, PoolFrame, WorkerFrame
from appliance.observe.frame.tier_frames import TierFrame
from appliance.observe.telemetry.baseline import Baseline
from appliance.observe.telemetry.refusals import is_client_error
from engine.units import size_text

PAST_S = 60.0
"""Seconds of past readings for signals that are rates or comparisons."""
MAX_SHOWN_TIMES = 100
"""A larger multiple says no more than this one."""
ANNOUNCED_CODES = ("model_loading", "draining")
"""Refusals that the daemon's state explains."""
SURVIVED_S = 600.0
"""How long a daemon's death is told."""
STAGING = "ring"
"""A pool whose slots are all granted ahead, so that its occupancy says nothing."""


class Signal(NamedTuple):
    """One signal's value and words in one frame."""

    value: float
    message: str
    subject: str = ""
    request_id: str = ""
    """The request that it names; empty: none."""
    action: str = ""
    """The command that says more or helps; empty: the threshold's."""


class _PastReading(NamedTuple):
    """An earlier reading to compare with."""

    uptime_s: float
    failed: int
    ended: int
    rows_lost: int
    preemptions: int


class LastMinute:
    """Earlier readings that signals compare with: the last minute, and what is usual."""

    def __init__(self) -> None:
        self._points: deque[_PastReading] = deque()
        self._decode_rates = Baseline(1)
        """Tokens a second of each decoding sequence, by how many decode: the bits of it."""
        self.down_workers: set[str] = set()
        """Workers that died and are not ready again; a swap replaces the names."""

    def add(self, frame: Frame, *, is_wrong: bool = False) -> None:
        """Add a new frame, and forget old ones.

        Args:
            is_wrong: an alert is about the pace, so that nothing is learnt of it.
        """
        totals = frame.totals
        point = _PastReading(
            frame.uptime_s,
            totals.failed,
            totals.finished + totals.failed,
            totals.log_rows_lost,
            totals.preemptions,
        )
        if (rate := _decode_rate(frame)) is not None:
            self._decode_rates.add(frame.queue.decoding.bit_length(), rate, frame.uptime_s)
        if is_wrong:
            self._decode_rates.leave_out(frame.uptime_s)
        self._points.append(point)
        while self._points[0].uptime_s < frame.uptime_s - PAST_S:
            self._points.popleft()
        states = {worker.name: worker for worker in frame.workers}
        self.down_workers &= {name for name, each in states.items() if each.state != "ready"}
        self.down_workers |= {name for name, each in states.items() if _has_died(each)}

    @property
    def num_failed(self) -> int:
        return self._points[-1].failed - self._points[0].failed

    @property
    def num_ended(self) -> int:
        """Failed and finished requests."""
        return self._points[-1].ended - self._points[0].ended

    @property
    def num_rows_lost(self) -> int:
        return self._points[-1].rows_lost - self._points[0].rows_lost

    @property
    def num_preemptions(self) -> int:
        """Preempted sequences."""
        return self._points[-1].preemptions - self._points[0].preemptions

    def usual_decode_rate(self, num_decoding: int) -> float | None:
        """Return the usual tokens a second of each sequence; None: unknown.

        A number without a usual rate takes the rate of the next smaller one, which more of them
        share, else of the next larger one.
        """
        kind = num_decoding.bit_length()
        known = self._decode_rates.kinds
        nearest = max((each for each in known if each <= kind), default=min(known, default=None))
        rate = None if nearest is None else self._decode_rates.of(nearest)
        return None if rate is None or nearest is None else rate / 2 ** max(kind - nearest, 0)


def _has_died(worker: WorkerFrame) -> bool:
    is_loading_again = worker.state == "loading" and worker.num_restarts > 0
    return worker.state == "restarting" or is_loading_again


def _decode_rate(frame: Frame) -> float | None:
    if not frame.queue.decoding:
        return None
    return sum(each.decode_tokens_per_s for each in frame.workers) / frame.queue.decoding


def used_ratio(pool: PoolFrame) -> float | None:
    """Blocks that new work cannot have; None of the staging buffer, which has none for it."""
    return None if pool.name == STAGING else pool.used_ratio


def kv_used_ratio(frame: Frame, past: LastMinute) -> Iterator[Signal]:
    """Yield how full each pool is."""
    for pool in frame.pools:
        used = used_ratio(pool)
        if used is not None:
            yield Signal(used, f"{used:.0%} of KV pool {pool.name} is in use", pool.name)


def preempted(frame: Frame, past: LastMinute) -> Iterator[Signal]:
    """Yield the preemptions of the last minute."""
    number = past.num_preemptions
    about = f"KV blocks are short: {number} preemption{'s' * (number != 1)} in {PAST_S:.0f} s"
    yield Signal(number, f"{about}; lower max_tokens or raise kv_memory")


def starved(frame: Frame, past: LastMinute) -> Iterator[Signal]:
    """Report that other programs keep the workers from their cores."""
    if frame.starved:
        yield Signal(1, frame.starved)


def daemon_died(frame: Frame, past: LastMinute) -> Iterator[Signal]:
    """Yield 1 for some minutes after the death of the previous daemon."""
    if (end := frame.survived) is None or end.how == "restart":
        return
    age_s = seconds_between(end.at, frame.at)
    if age_s is None or age_s >= SURVIVED_S:
        return
    how = f" ({end.how})" if end.how.startswith("SIG") else ""
    about = f"the daemon was killed {whole_seconds(max(age_s, 0.0))} ago{how}"
    whose = things(end.num_kept, "request")
    if end.num_waiting:
        about += f"; {whose} continue{'s' * (end.num_kept == 1)}"
        about += " once the model is loaded" * (frame.state == "loading")
    elif end.num_kept:
        about += f"; {whose} continued"
    yield Signal(1, about)


def first_token_wait_ratio(frame: Frame, past: LastMinute) -> Iterator[Signal]:
    """Yield the longest wait for a first token by its limit, in whatever phase."""
    if (late := frame.queue.first_token) is not None:
        yield _late(late, "waiting {} for a first token")


def next_token_wait_ratio(frame: Frame, past: LastMinute) -> Iterator[Signal]:
    """Yield the longest wait of a stream for its next token by its limit."""
    if (late := frame.queue.next_token) is not None:
        yield _late(late, "decode stands still: no token for {}")


def _late(late: LateFrame, about: str) -> Signal:
    """Describe a wait: how long, the limit, whose, and how many wait as long."""
    waited, limit = duration(late.waited_ms), duration(late.limit_ms)
    others = f" and {late.number - 1} more" * (late.number > 1)
    who = f"{short_id(late.id)} ({count(late.prompt_tokens)} tok, {late.client}){others}"
    text = f"{about.format(waited)} (limit {limit}): {who}"
    action = f"penstock show {short_id(late.id)}"
    return Signal(late.waited_ms / late.limit_ms, text, request_id=late.id, action=action)


def refused(frame: Frame, past: LastMinute) -> Iterator[Signal]:
    """Yield the requests refused in the last minute for want of room, and whose."""
    found = [
        each
        for each in frame.refusals
        if not is_client_error(each.status) and each.code not in ANNOUNCED_CODES
    ]
    number = sum(each.last_minute for each in found)
    if number:
        most = max(found, key=lambda each: each.last_minute)
        plural = "s" * (number != 1)
        about = f"{count(number)} request{plural} refused in {PAST_S:.0f} s: {_gist(most)}"
        yield Signal(number, f"{about} ({_caller(most)})", action=_look_at(most))


def client_errors_per_s(frame: Frame, past: LastMinute) -> Iterator[Signal]:
    """Yield how often each caller's own errors are refused a second."""
    for each in frame.refusals:
        if is_client_error(each.status):
            caller = _caller(each)
            about = f"{each.status} {each.per_s:.3g}/s: {_gist(each)} ({caller})"
            yield Signal(each.per_s, about, f"{each.status} of {caller}", action=_look_at(each))


def _gist(refusal: RefusalFrame) -> str:
    return refusal.message.partition("; ")[0]


def _caller(refusal: RefusalFrame) -> str:
    return refusal.client or refusal.user


def _look_at(refusal: RefusalFrame) -> str:
    """Return the command that shows the process, if it is on this machine."""
    pid = refusal.client.rpartition(" ")[2]
    return f"ps -fp {pid}" if pid.isdigit() else ""


def queue_full_ratio(frame: Frame, past: LastMinute) -> Iterator[Signal]:
    """Yield how full the queue is."""
    queue = frame.queue
    for unit, number, most in (
        ("sequences", queue.queued, queue.max_queued),
        ("prompt tokens", queue.queued_tokens, queue.max_queued_tokens),
    ):
        if most:
            yield Signal(number / most, f"queue: {number} of at most {most} {unit}", unit)


def late_ratio(frame: Frame, past: LastMinute) -> Iterator[Signal]:
    """Yield the share that misses each latency target."""
    latency = frame.latency
    for subject, what, ratio, target_ms in (
        ("ttft", "first tokens", latency.ttft_slo_ratio, frame.slo_ttft_ms),
        ("itl", "inter-token latencies", latency.itl_slo_ratio, frame.slo_itl_ms),
    ):
        if ratio is not None:
            about = f"{1 - ratio:.1%} of the {what} miss the target of {target_ms} ms"
            yield Signal(1 - ratio, about, subject)


def ttft_over_usual(frame: Frame, past: LastMinute) -> Iterator[Signal]:
    """Compare the last minute's TTFT with what is usual for prompts of the same length."""
    latency = frame.latency
    if (times := latency.ttft_over_usual) is not None:
        shown = f"over {MAX_SHOWN_TIMES}x" if times > MAX_SHOWN_TIMES else f"{times:.0f}x"
        about = f"TTFT is {shown} its usual for such prompts"
        p95_ms = latency.ttft_ms_p95  # None: no late request has a first token yet
        figure = "" if p95_ms is None else f" (p95 {duration(p95_ms)} in {PAST_S:.0f} s)"
        yield Signal(times, f"{about}{figure}")


def failed_ratio(frame: Frame, past: LastMinute) -> Iterator[Signal]:
    """Yield the share of failed requests in the last minute."""
    number = past.num_ended
    if number:
        about = f"{past.num_failed} of {number} requests failed in {PAST_S:.0f} s"
        yield Signal(past.num_failed / number, about)


def decode_slowdown(frame: Frame, past: LastMinute) -> Iterator[Signal]:
    """Yield how far decode is below its usual rate for as many sequences."""
    rate, usual = _decode_rate(frame), past.usual_decode_rate(frame.queue.decoding)
    if rate is not None and usual:
        about = f"decode is slow: {rate:.1f} tok/s per sequence, usually {usual:.1f}"
        yield Signal(1 - rate / usual, about)


def link_down(frame: Frame, past: LastMinute) -> Iterator[Signal]:
    """Yield the links that were taken down."""
    for link in frame.links:
        if link.down is not None:
            name = f"{link.from_pool} to {link.to_pool}"
            about = f"the link from {name} is down, its blocks go by {link.transport}: {link.down}"
            yield Signal(1, about, name)


def ssd_off(frame: Frame, past: LastMinute) -> Iterator[Signal]:
    """Report a configured SSD cache that is unavailable."""
    yield from _tier_in(frame.ssd, "failed", "the SSD cache is unavailable")


def ssd_down(frame: Frame, past: LastMinute) -> Iterator[Signal]:
    """Report an SSD cache with a failing disk; it stays off until a probe succeeds."""
    yield from _tier_in(frame.ssd, "down", "the SSD cache is off until a probe succeeds")


def ssd_full(frame: Frame, past: LastMinute) -> Iterator[Signal]:
    """Report an SSD cache that cannot reach its size, or a disk that rejects writes."""
    if (ssd := frame.ssd) is not None and ssd.state == "on" and ssd.limit:
        held, most = size_text(ssd.num_bytes), size_text(ssd.max_bytes)
        yield Signal(1, f"the SSD cache holds {held} of at most {most}: {ssd.limit}")


def dram_down(frame: Frame, past: LastMinute) -> Iterator[Signal]:
    """Report a DRAM cache with failing copies, now or in the trial at start."""
    yield from _tier_in(frame.dram, "down", "the DRAM cache is off for a while")
    yield from _tier_in(frame.dram, "failed", "the DRAM cache is unavailable")


def _tier_in(tier: TierFrame | None, state: str, about: str) -> Iterator[Signal]:
    if tier is not None and tier.state == state:
        yield Signal(1, f"{about}: {tier.reason}")


def link_slowdown(frame: Frame, past: LastMinute) -> Iterator[Signal]:
    """Yield how far each link is below its rate at start."""
    for link in frame.links:
        probe, rate = link.probe_bytes_per_s, link.copy_bytes_per_s
        if link.has_detour and link.down is None and probe and rate is not None:
            name = f"{link.from_pool} to {link.to_pool}"
            rates = f"{size_text(rate)}/s, at start {size_text(probe)}/s"
            about = f"the link from {name} copies {rates}"
            yield Signal(1 - rate / probe, about, name)


def worker_stuck(frame: Frame, past: LastMinute) -> Iterator[Signal]:
    """Yield 1 for a worker silent for half of its longest possible step, by the watchdog."""
    for worker in frame.workers:
        reason = _reason(frame, f"worker {worker.name}: ")
        yield Signal(reason is not None, f"{reason}; it gets no new work", worker.name)


def worker_down(frame: Frame, past: LastMinute) -> Iterator[Signal]:
    """Yield 1 for a worker that has died and not restarted."""
    for worker in frame.workers:
        subject = f"worker {worker.name} "
        # one that dies again and again has more to say
        about = _reason(frame, subject) or f"{subject}is restarting"
        yield Signal(worker.name in past.down_workers, about, worker.name)


def state_degraded(frame: Frame, past: LastMinute) -> Iterator[Signal]:
    """Yield 1 if the daemon is degraded for a reason other than a worker."""
    of_workers = chain(worker_down(frame, past), worker_stuck(frame, past))
    is_told = any(signal.value for signal in of_workers)
    yield Signal(frame.state == "degraded" and not is_told, frame.state_reason)


def _reason(frame: Frame, beginning: str) -> str | None:
    """Find the reason of the degraded state with this beginning."""
    reasons = frame.state_reason.split("; ")
    return next((each for each in reasons if each.startswith(beginning)), None)


def log_rows_lost(frame: Frame, past: LastMinute) -> Iterator[Signal]:
    """Yield the rows that the request log lost in the last minute."""
    number = past.num_rows_lost
    yield Signal(number, f"the request log lost {number} rows in {PAST_S:.0f} s")


def log_not_written(frame: Frame, past: LastMinute) -> Iterator[Signal]:
    """Report a request log that cannot be written."""
    if (lacks := frame.unwritten) is not None:
        about = f"{lacks.reason}; it lacks {things(lacks.num_requests, 'request')} so far"
        about += "; a crash would lose what it lacks" * lacks.would_crash_lose
        yield Signal(1, about, action=f"df -h {shlex.quote(lacks.folder)}")


def device_power_ratio(frame: Frame, past: LastMinute) -> Iterator[Signal]:
    """Yield each device's power relative to its limit."""
    for device in frame.devices:
        power_w, limit_w = device.power_w, device.power_limit_w
        if power_w is not None and limit_w:
            about = f"{device.name} draws {power_w:.0f} of {limit_w:.0f} W"
            yield Signal(power_w / limit_w, about, device.name)


def device_temperature_c(frame: Frame, past: LastMinute) -> Iterator[Signal]:
    """Yield each device's temperature in degrees Celsius."""
    for device in frame.devices:
        if device.temperature_c is not None:
            about = f"{device.name} is at {device.temperature_c:.0f} degrees C"
            yield Signal(device.temperature_c, about, device.name)


def device_throttled(frame: Frame, past: LastMinute) -> Iterator[Signal]:
    """Yield why each device is throttled."""
    for device in frame.devices:
        if device.throttle_reasons is not None:
            reasons = device.throttle_reasons
            about = f"{device.name} is throttled: {', '.join(reasons)}"
            yield Signal(len(reasons), about, device.name)


def device_xid(frame: Frame, past: LastMinute) -> Iterator[Signal]:
    """Yield 1 for a device with a critical driver error since the daemon started."""
    for device in frame.devices:
        has_failed = device.last_xid is not None
        yield Signal(has_failed, f"{device.name} has had error XID {device.last_xid}", device.name)
