"""What the console shows at one time: a frame, what came before it, how the daemon is reached.

Owns: which readings are kept, for how long, and what counts as a stall of decode; the state of the
link, who the console acts for, and how the operator wants to see things.
Invariant: a view never changes; the same view always gives the same screen.
Never: reads a clock or a socket.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from appliance.frame.protocol import AlertFrame, Frame, PoolFrame, RequestFrame, WorkerFrame
from tui.request_listing import RequestListing

# What came before the frame on screen: samples behind sparklines, rates, stalls.
# Invariant: every run of samples has one entry for each frame, oldest first; None is not reported.
# Never: reads a clock; a frame brings its time.


HISTORY_FRAMES = 300
DROPPED_FRAMES = 10
"""Frames that never came are told for so many frames."""
STALL_RATIO = 0.25
"""Decode below this share of its running median, while a prompt is computed, is a stall."""
Samples = tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class History:
    """Samples of the last HISTORY_FRAMES frames, and rates since the last but one."""

    prefill_tokens_per_s: Samples = ()
    decode_tokens_per_s: Samples = ()
    stalls: Samples = ()
    """1 where decode stalled, else 0."""
    queued: Samples = ()
    handoffs_per_s: Samples = ()
    handoff_bytes_per_s: Samples = ()
    ttft_ms_p95: Samples = ()
    itl_ms_p95: Samples = ()
    power_w: Samples = ()
    kv_used_ratio: Mapping[str, Samples] = field(default_factory=lambda: MappingProxyType({}))
    """By pool."""
    dropped_frames: Samples = ()
    last: Frame | None = None

    def after(self, frame: Frame) -> History:
        """The history with one more frame; it starts anew when the daemon did."""
        last = self.last
        if last is not None and (last.pid != frame.pid or last.seq >= frame.seq):
            return History().after(frame)
        handoffs, handoff_bytes = _handoff_rates(last, frame)
        decode_tokens_per_s = sum(worker.decode_tokens_per_s for worker in frame.workers)
        kv_used_ratio = {
            pool.name: _push(self.kv_used_ratio.get(pool.name, ()), pool.used_ratio)
            for pool in frame.pools
        }
        return History(
            _push(self.prefill_tokens_per_s, sum(w.prefill_tokens_per_s for w in frame.workers)),
            _push(self.decode_tokens_per_s, decode_tokens_per_s),
            _push(self.stalls, float(self._is_stall(frame, decode_tokens_per_s))),
            _push(self.queued, frame.queue.queued),
            _push(self.handoffs_per_s, handoffs),
            _push(self.handoff_bytes_per_s, handoff_bytes),
            _push(self.ttft_ms_p95, frame.latency.ttft_ms_p95),
            _push(self.itl_ms_p95, frame.latency.itl_ms_p95),
            _push(self.power_w, total_power_w(frame)),
            MappingProxyType(kv_used_ratio),
            _push(self.dropped_frames, frame.seq - last.seq - 1 if last else 0),
            frame,
        )

    @property
    def num_dropped_frames(self) -> int:
        """Frames that never reached this console, among the last DROPPED_FRAMES."""
        return round(sum(num or 0 for num in self.dropped_frames[-DROPPED_FRAMES:]))

    def _is_stall(self, frame: Frame, decode_tokens_per_s: float) -> bool:
        """Outputs wait while a prompt is computed."""
        seen = [value for value in self.decode_tokens_per_s if value]
        if not seen or not frame.queue.decoding or not frame.queue.prefilling:
            return False
        return decode_tokens_per_s < STALL_RATIO * statistics.median(seen)


def total_power_w(frame: Frame) -> float | None:
    """All devices together; a MIG slice has no power of its own. None if no device reports any."""
    readings = [device.power_w for device in frame.devices if device.parent is None]
    known = [power_w for power_w in readings if power_w is not None]
    return sum(known) if known else None


def spread(samples: Sequence[float | None], num_samples: int, num_cells: int) -> Samples:
    """The newest `num_samples` over `num_cells` of equal time; a cell has the mean of its samples.

    What is older than the first sample is None, so that a cell means the same time from the
    first frame on.
    """
    recent = list(samples[-num_samples:])
    padded = [None] * (num_samples - len(recent)) + recent
    cells: list[float | None] = []
    for cell in range(num_cells):
        start = cell * num_samples // num_cells
        end = max(start + 1, (cell + 1) * num_samples // num_cells)
        known = [value for value in padded[start:end] if value is not None]
        cells.append(sum(known) / len(known) if known else None)
    return tuple(cells)


def _handoff_rates(last: Frame | None, frame: Frame) -> tuple[float | None, float | None]:
    """Handoffs and their bytes per second: as told, else from the difference of two frames."""
    if frame.handoff is not None:
        return frame.handoff.handoffs_per_s, frame.handoff.bytes_per_s
    elapsed_s = frame.uptime_s - last.uptime_s if last else 0.0
    if last is None or elapsed_s <= 0:
        return None, None
    return (
        (frame.totals.handoffs - last.totals.handoffs) / elapsed_s,
        (frame.totals.handoff_bytes - last.totals.handoff_bytes) / elapsed_s,
    )


def _push(samples: Samples, value: float | None) -> Samples:
    return (*samples, value)[-HISTORY_FRAMES:]


# --------------------------------------------------------------------------------------------------


WINDOWS_S = (60, 300)
READ_ONLY = "read-only"
"""The role of whoever asked for a console that changes nothing."""
REPLAY = "REPLAY"
"""The link of a view that comes from a recording."""


@dataclass(frozen=True, slots=True)
class DaemonLink:
    """How the console stands with the daemon."""

    word: str = "LIVE"
    """`LIVE`, `REPLAY`, `CONNECTING`, `DISCONNECTED` or `INCOMPATIBLE`."""
    why: str = ""
    down_s: float | None = None
    retry_in_s: float | None = None

    @property
    def is_live(self) -> bool:
        """True while frames arrive."""
        return self.word in ("LIVE", REPLAY)


@dataclass(frozen=True, slots=True)
class Caller:
    """Whom the daemon takes this console for."""

    name: str
    role: str
    """`viewer`, `user` or `operator`; `read-only` if the console shall change nothing."""

    @property
    def is_operator(self) -> bool:
        """Whether drain, roles and targets are theirs to change."""
        return self.role == "operator"

    def may_cancel(self, request: RequestFrame) -> bool:
        """Operators may cancel anyone's requests, users their own."""
        is_own = self.role == "user" and self.name == request.user
        return request.phase != "finished" and (self.is_operator or is_own)


@dataclass(frozen=True, slots=True)
class View:
    """All that the panels may look at."""

    frame: Frame | None = None
    history: History = field(default_factory=History)
    link: DaemonLink = DaemonLink("CONNECTING")
    paused_s: float | None = None
    """Age of the frame shown, by the daemon's clock; None unless paused."""
    finished: tuple[RequestFrame, ...] = ()
    """The newest finished requests, as far as somebody has asked for them."""
    caller: Caller | None = None
    """None until the daemon has said."""
    listing: RequestListing = field(default_factory=RequestListing)
    window_s: int = WINDOWS_S[0]
    """Time that the graphs span; frames come once a second."""

    def after(self, frame: Frame) -> View:
        """The live view of one more frame; of a daemon that died nothing is kept."""
        is_same = self.frame is not None and self.frame.pid == frame.pid
        return replace(
            self,
            frame=frame,
            history=self.history.after(frame),
            link=DaemonLink(),
            finished=self.finished if is_same else (),
        )

    def over(self, link: DaemonLink) -> View:
        """The same reading over another state of the link."""
        return replace(self, link=link)

    def held(self, reading: View) -> View:
        """The settings of this view over an older reading, which says how old it is."""
        if self.frame is None or reading.frame is None:
            return self
        return replace(
            self,
            frame=reading.frame,
            history=reading.history,
            finished=reading.finished,
            paused_s=max(0.0, self.frame.uptime_s - reading.frame.uptime_s),
        )

    def recent(self, samples: Samples, num_cells: int) -> Samples:
        """Samples of the graphs' window, spread over so many cells."""
        return spread(samples, self.window_s, max(0, num_cells))


def workers_for(frame: Frame | None, role: str) -> list[WorkerFrame]:
    """The workers that play a role: those named after it, or the one that plays all."""
    workers = [] if frame is None else frame.workers
    return [worker for worker in workers if worker.name.startswith((role, "colocated"))]


def alert_of(frame: Frame, code: str, subject: str | None = None) -> AlertFrame | None:
    """The alert whose code begins so, about that subject, or about any."""
    alerts: Sequence[AlertFrame] = frame.alerts
    return next(
        (a for a in alerts if a.code.startswith(code) and subject in (None, a.subject)), None
    )


def pool_counts(pool: PoolFrame) -> dict[str, int]:
    """Blocks of the pool by state."""
    return {
        "active": pool.active,
        "reserved": pool.reserved,
        "draining": pool.draining,
        "cached": pool.cached,
        "free": pool.free,
    }
