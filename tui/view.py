"""What the console shows at one time: a frame, what came before it, and how the daemon is reached.

Owns: the samples behind sparklines and rates, and the state of the link.
Called by: app and plain (make views), panels (read them).
Invariant: a view never changes; the same view always gives the same screen.
Never: reads a clock or a socket.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from appliance.protocol import Frame, PoolFrame, WorkerFrame

HISTORY_FRAMES = 60
REPLAY = "REPLAY"
"""The link of a view that comes from a recording."""
Samples = tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class History:
    """Samples of the last HISTORY_FRAMES frames, oldest first, and rates since the last but one."""

    prefill_tokens_per_s: Samples = ()
    decode_tokens_per_s: Samples = ()
    queued: Samples = ()
    handoffs_per_s: Samples = ()
    handoff_bytes_per_s: Samples = ()
    ttft_ms_p95: Samples = ()
    itl_ms_p95: Samples = ()
    dropped_frames: Samples = ()
    last: Frame | None = None

    def after(self, frame: Frame) -> History:
        """The history with one more frame; it starts anew when the daemon did."""
        last = self.last
        if last is not None and (last.pid != frame.pid or last.seq >= frame.seq):
            return History().after(frame)
        elapsed_s = frame.uptime_s - last.uptime_s if last else 0.0
        handoffs = handoff_bytes = None
        if last and elapsed_s > 0:
            handoffs = (frame.totals.handoffs - last.totals.handoffs) / elapsed_s
            handoff_bytes = (frame.totals.handoff_bytes - last.totals.handoff_bytes) / elapsed_s
        return History(
            _push(self.prefill_tokens_per_s, sum(w.prefill_tokens_per_s for w in frame.workers)),
            _push(self.decode_tokens_per_s, sum(w.decode_tokens_per_s for w in frame.workers)),
            _push(self.queued, frame.queue.queued),
            _push(self.handoffs_per_s, handoffs),
            _push(self.handoff_bytes_per_s, handoff_bytes),
            _push(self.ttft_ms_p95, frame.latency.ttft_ms_p95),
            _push(self.itl_ms_p95, frame.latency.itl_ms_p95),
            _push(self.dropped_frames, frame.seq - last.seq - 1 if last else 0),
            frame,
        )

    @property
    def num_dropped_frames(self) -> int:
        """Frames that never reached this console, among the last HISTORY_FRAMES."""
        return round(sum(num or 0 for num in self.dropped_frames))


@dataclass(frozen=True, slots=True)
class Link:
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
class View:
    """All that the panels may look at."""

    frame: Frame | None = None
    history: History = field(default_factory=History)
    link: Link = Link("CONNECTING")
    paused_s: float | None = None
    """Age of the frame shown, by the daemon's clock; None unless paused."""

    def after(self, frame: Frame) -> View:
        """The live view of one more frame."""
        return View(frame, self.history.after(frame), Link())

    def over(self, link: Link) -> View:
        """The same reading over another state of the link."""
        return replace(self, link=link)


def worker_for(frame: Frame, role: str) -> WorkerFrame | None:
    """The worker that plays a role: the one named after it, else the one that plays all."""
    by_name = {worker.name: worker for worker in frame.workers}
    return by_name.get(role) or by_name.get("colocated")


def pool_counts(pool: PoolFrame) -> dict[str, int]:
    """Blocks of the pool by state."""
    return {
        "active": pool.active,
        "reserved": pool.reserved,
        "cached": pool.cached,
        "draining": pool.draining,
        "quarantined": pool.quarantined,
        "free": pool.free,
    }


def pool_used_ratio(pool: PoolFrame) -> float | None:
    """Share of blocks that new work cannot take; cached ones count as available."""
    if pool.num_blocks <= 0:
        return None
    return 1 - (pool.free + pool.cached) / pool.num_blocks


def _push(samples: Samples, value: float | None) -> Samples:
    return (*samples, value)[-HISTORY_FRAMES:]
