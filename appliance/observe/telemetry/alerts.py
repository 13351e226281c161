"""Decide which alerts are active, from one table of thresholds.

Invariant: a function of the frames alone, by their clock. An alert is raised when its signal has
been above a threshold for `for_s` without a break, and cleared when it has been below for twice as
long: it neither flaps nor sticks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from appliance.observe.frame.protocol import AlertFrame, Frame
from appliance.observe.telemetry.signals import (
    LastMinute,
    Signal,
    client_errors_per_s,
    daemon_died,
    decode_slowdown,
    device_power_ratio,
    device_temperature_c,
    device_throttled,
    device_xid,
    dram_down,
    failed_ratio,
    first_token_wait_ratio,
    kv_used_ratio,
    late_ratio,
    link_down,
    link_slowdown,
    log_not_written,
    log_rows_lost,
    next_token_wait_ratio,
    preempted,
    queue_full_ratio,
    refused,
    ssd_down,
    ssd_full,
    ssd_off,
    starved,
    state_degraded,
    ttft_over_usual,
    worker_down,
    worker_stuck,
)

SEVERITIES = ("warning", "error")
ABOUT_PACE = ("decode.stall", "decode.slow", "ttft.slow")
"""Alerts that stop learning of what is usual while they are raised."""
MIN_CLEAR_S = 5.0


class Threshold(NamedTuple):
    """One row of the table: a signal, its limits and its words."""

    code: str
    """The code of the alert and of its events."""
    read: Callable[[Frame, LastMinute], Iterator[Signal]]
    warn: float | None
    """The warning begins at this value; None: never."""
    crit: float | None
    """The error begins at this value; None: never."""
    over: str
    """The event's message when the alert clears; `{}` is the subject."""
    for_s: float = 0.0
    is_state: bool = False
    """True if the signal is a state: the alert clears with it, without delay."""
    crit_for_s: float | None = None
    """How long it must hold for the error; None: as long as for the warning."""
    action: str = ""
    """The command that says more or helps, where the signal names none."""
    is_event: bool = True
    """Whether its changes become events; False: the event `daemon.died` tells it."""

    @property
    def clear_s(self) -> float:
        """Seconds below the threshold before the alert clears."""
        return 0.0 if self.is_state else max(2 * self.for_s, MIN_CLEAR_S)


THRESHOLDS = (
    Threshold(
        "daemon.survived",
        daemon_died,
        1,
        None,
        "the daemon's death was some minutes ago",
        is_state=True,
        action="penstock events",
        is_event=False,
    ),
    Threshold("worker.down", worker_down, None, 1, "worker {} is ready again", is_state=True),
    Threshold(
        "worker.stuck",
        worker_stuck,
        1,
        None,
        "worker {} makes progress again",
        is_state=True,
    ),
    Threshold("state.degraded", state_degraded, None, 1, "no longer degraded", is_state=True),
    Threshold(
        "cpu.starved",
        starved,
        1,
        None,
        "the workers have their cores again",
        5,
        action="ps aux --sort=-%cpu",
    ),
    Threshold("kv.occupancy", kv_used_ratio, 0.90, 0.98, "KV pool {} has free blocks again", 10),
    Threshold("kv.preempted", preempted, 1, None, "no more preemptions"),
    Threshold(
        "queue.wait",
        first_token_wait_ratio,
        0.5,
        1,
        "waits for a first token are below the limit again",
        5,
        crit_for_s=0,
    ),
    Threshold("decode.stall", next_token_wait_ratio, 1, 5, "every stream gets tokens again"),
    Threshold("requests.refused", refused, 1, None, "no more refused requests"),
    Threshold("client.errors", client_errors_per_s, 2, None, "fewer errors {}", 5),
    Threshold("queue.full", queue_full_ratio, 0.5, 0.9, "the queue has room for {}", 5),
    Threshold("slo.missed", late_ratio, 0.01, 0.10, "the {} target is met again", 60),
    Threshold("ttft.slow", ttft_over_usual, 5, None, "TTFT is as usual again", 5),
    Threshold("requests.failing", failed_ratio, 0.001, 0.01, "no more failed requests"),
    Threshold("decode.slow", decode_slowdown, 0.75, None, "decode is as fast as usual again", 5),
    Threshold("link.down", link_down, 1, None, "the link from {} is up again", is_state=True),
    Threshold("link.slow", link_slowdown, 0.5, None, "the link from {} is as it was at start", 5),
    Threshold("dram.down", dram_down, 1, None, "the DRAM cache is on again", is_state=True),
    Threshold("ssd.down", ssd_down, 1, None, "the SSD cache is on again", is_state=True),
    Threshold("ssd.full", ssd_full, 1, None, "the SSD cache has free blocks again", is_state=True),
    Threshold("ssd.off", ssd_off, 1, None, "the SSD cache is available again", is_state=True),
    Threshold("log.rows_lost", log_rows_lost, None, 1, "the request log no longer loses rows"),
    Threshold(
        "log.not_written",
        log_not_written,
        None,
        1,
        "the request log is written again",
        is_state=True,
    ),
    Threshold("device.power", device_power_ratio, 0.95, None, "{} draws less power", 10),
    Threshold("device.temperature", device_temperature_c, 85, 95, "{} is cooler again", 10),
    Threshold("device.throttled", device_throttled, 1, None, "{} is no longer throttled", 10),
    Threshold("device.xid", device_xid, None, 1, "{} no longer reports an error"),
)


class Change(NamedTuple):
    """An alert was raised, has become worse, or was cleared; each change becomes an event."""

    severity: str
    code: str
    message: str


@dataclass(slots=True)
class _Level:
    """The state of one threshold of one signal."""

    is_raised: bool = False
    since_s: float | None = None
    """When the signal crossed to the other side of `is_raised`; None: it agrees."""
    since: str = ""
    """The wall time of `since_s`."""

    def move(self, is_above: bool, frame: Frame, for_s: float, clear_s: float) -> None:
        """Update the state by whether the signal is above the threshold."""
        if is_above == self.is_raised:
            self.since_s = None
            return
        if self.since_s is None:
            self.since_s = frame.uptime_s
            if is_above:
                self.since = frame.at
        if frame.uptime_s - self.since_s >= (for_s if is_above else clear_s):
            self.is_raised, self.since_s = is_above, None


@dataclass(slots=True)
class _Watch:
    """One signal of one subject, compared with its two thresholds."""

    threshold: Threshold
    subject: str
    levels: tuple[_Level, _Level] = field(default_factory=lambda: (_Level(), _Level()))
    signal: Signal = field(default_factory=lambda: Signal(0, ""))
    """The newest one that was above a threshold."""

    @property
    def rank(self) -> int:
        """0: no alert; otherwise one more than the index in SEVERITIES."""
        return max((i for i, level in enumerate(self.levels, 1) if level.is_raised), default=0)

    @property
    def is_quiet(self) -> bool:
        """True if no alert is raised or pending."""
        return not any(level.is_raised or level.since_s is not None for level in self.levels)

    def move(self, signal: Signal | None, frame: Frame) -> Change | None:
        """Take in a reading (None: unreported); return the change, if any."""
        before = self.rank
        bounds = (self.threshold.warn, self.threshold.crit)
        is_above = [
            signal is not None and bound is not None and signal.value >= bound for bound in bounds
        ]
        is_above[0] |= is_above[1]  # whatever is an error is no less than a warning
        if signal is not None and any(is_above):
            self.signal = signal
        threshold = self.threshold
        crit_s = threshold.for_s if threshold.crit_for_s is None else threshold.crit_for_s
        for level, above, for_s in zip(
            self.levels, is_above, (threshold.for_s, crit_s), strict=True
        ):
            level.move(above, frame, for_s, threshold.clear_s)
        if not threshold.is_event:
            return None
        if self.rank > before:
            return Change(SEVERITIES[self.rank - 1], threshold.code, self.signal.message)
        if before and not self.rank:
            return Change("info", threshold.code, threshold.over.format(self.subject))
        return None

    def frame(self) -> AlertFrame:
        signal, threshold = self.signal, self.threshold
        return AlertFrame(
            threshold.code,
            SEVERITIES[self.rank - 1],
            signal.message,
            self.levels[0].since,
            self.subject,
            signal.request_id,
            signal.action or threshold.action,
        )


class Alerts:
    """The state of all alerts, updated by each frame."""

    def __init__(self, thresholds: tuple[Threshold, ...] = THRESHOLDS) -> None:
        self._thresholds = thresholds
        self._past = LastMinute()
        self._watched: dict[tuple[str, str], _Watch] = {}

    def update(self, frame: Frame) -> list[Change]:
        """Take in the next frame; return the changes."""
        self._past.add(frame, is_wrong=self.are_about_pace)
        read: dict[tuple[str, str], Signal] = {}
        for threshold in self._thresholds:
            for signal in threshold.read(frame, self._past):
                key = (threshold.code, signal.subject)
                read[key] = signal
                self._watched.setdefault(key, _Watch(threshold, signal.subject))
        moved = [watch.move(read.get(key), frame) for key, watch in self._watched.items()]
        self._watched = {key: each for key, each in self._watched.items() if not each.is_quiet}
        return [change for change in moved if change is not None]

    @property
    def are_about_pace(self) -> bool:
        """Whether a raised one says that tokens come late."""
        return any(code in ABOUT_PACE and each.rank for (code, _), each in self._watched.items())

    def frames(self) -> list[AlertFrame]:
        """List the raised alerts, the worst first, then in the table's order."""
        raised = [watch for watch in self._watched.values() if watch.rank]
        order = [threshold.code for threshold in self._thresholds]
        raised.sort(key=lambda watch: (-watch.rank, order.index(watch.threshold.code)))
        return [watch.frame() for watch in raised]
