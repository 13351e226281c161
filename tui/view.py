"""Hold what the console shows: a frame, its history, the request order.

Owns: the grammar of a filter (`user:ana state:queued in>4096 !bench`), and the orders to sort by;
which readings are kept, for how long, and what counts as a stall of decode; the state of the link,
who the console acts for, and how the operator wants to see things.
Invariant: a view never changes; the same view always gives the same screen.
Never: reads a clock or a socket.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from appliance.frame.protocol import AlertFrame, Frame, PoolFrame, RequestFrame, WorkerFrame
from tui.history import History, Samples, spread
from tui.request_order import RequestListing

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
    is_absent: bool = False
    """Nothing listens where the daemon is looked for."""

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
    """The newest finished requests, as many as the page has asked for."""
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
