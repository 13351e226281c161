"""Hold what the console shows: a frame, its history, the request order.

Invariant: a view never changes; equal views give equal screens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from appliance.observe.frame.protocol import AlertFrame, Frame, PoolFrame, RequestFrame, WorkerFrame
from tui.history import History, Samples, spread
from tui.request_order import RequestListing

WINDOWS_S = (60, 300)
READ_ONLY = "read-only"
"""The role in a console started read-only."""
REPLAY = "REPLAY"
"""The link's word in a replay."""


@dataclass(frozen=True, slots=True)
class DaemonLink:
    """The console's link to the daemon."""

    word: str = "LIVE"
    """`LIVE`, `REPLAY`, `CONNECTING`, `DISCONNECTED` or `INCOMPATIBLE`."""
    why: str = ""
    down_s: float | None = None
    retry_in_s: float | None = None
    is_absent: bool = False
    """Whether nothing listens on the daemon's socket."""

    @property
    def is_live(self) -> bool:
        """True while frames arrive."""
        return self.word in ("LIVE", REPLAY)


@dataclass(frozen=True, slots=True)
class Caller:
    """The user and role that the daemon sees behind this console."""

    name: str
    role: str
    """`viewer`, `user` or `operator`; `read-only` in a read-only console."""

    @property
    def is_operator(self) -> bool:
        """Whether the caller may drain and change roles and targets."""
        return self.role == "operator"

    def may_cancel(self, request: RequestFrame) -> bool:
        """Operators may cancel anyone's requests, users their own."""
        is_own = self.role == "user" and self.name == request.user
        return request.phase != "finished" and (self.is_operator or is_own)


@dataclass(frozen=True, slots=True)
class View:
    """Everything that the panels may read."""

    frame: Frame | None = None
    history: History = field(default_factory=History)
    link: DaemonLink = DaemonLink("CONNECTING")
    paused_s: float | None = None
    """Age of the frame shown, by the daemon's clock; None unless paused."""
    finished: tuple[RequestFrame, ...] = ()
    """The newest finished requests, as many as the page needs."""
    caller: Caller | None = None
    """The caller; None until the daemon has answered."""
    listing: RequestListing = field(default_factory=RequestListing)
    window_s: int = WINDOWS_S[0]
    """Time that the graphs span; frames come once a second."""

    def after(self, frame: Frame) -> View:
        """Add one more frame; what a dead daemon had finished is forgotten."""
        is_same = self.frame is not None and self.frame.pid == frame.pid
        return replace(
            self,
            frame=frame,
            history=self.history.after(frame),
            link=DaemonLink(),
            finished=self.finished if is_same else (),
        )

    def preceded(self, past: Iterable[Frame], begin: str) -> View:
        """Put the history of earlier frames before this one's.

        Args:
            begin: the time of the first frame of this view.
        """
        older = History()
        for frame in past:
            if frame.at < begin:
                older = older.after(frame)
        return replace(self, history=older.then(self.history, begin))

    def over(self, link: DaemonLink) -> View:
        """Replace the state of the link."""
        return replace(self, link=link)

    def held(self, reading: View) -> View:
        """Put this view's settings on an older reading, and note its age."""
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
        return spread(samples, self.window_s, max(0, num_cells))


def workers_for(frame: Frame | None, role: str) -> list[WorkerFrame]:
    """List the workers of a role, including colocated ones."""
    workers = [] if frame is None else frame.workers
    return [worker for worker in workers if worker.name.startswith((role, "colocated"))]


def copies(frame: Frame | None) -> bool:
    """Say whether handoffs copy KV; with one pool for all workers, or one worker, nothing moves."""
    return frame is not None and frame.transport not in (None, "alias")


def alert_of(
    frame: Frame, codes: str | tuple[str, ...], subject: str | None = None
) -> AlertFrame | None:
    """Find the worst alert with one of these beginnings of its code, about this subject or any."""
    alerts: Sequence[AlertFrame] = frame.alerts
    return next(
        (a for a in alerts if a.code.startswith(codes) and subject in (None, a.subject)), None
    )


def pool_counts(pool: PoolFrame) -> dict[str, int]:
    """Count the pool's blocks by state."""
    return {
        "active": pool.active,
        "reserved": pool.reserved,
        "draining": pool.draining,
        "cached": pool.cached,
        "free": pool.free,
    }
