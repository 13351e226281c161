"""What the console shows at one time: a frame, what came before it, which requests in which order.

Owns: the grammar of a filter (`user:ana state:queued in>4096 !bench`), and the orders to sort by;
which readings are kept, for how long, and what counts as a stall of decode; the state of the link,
who the console acts for, and how the operator wants to see things.
Invariant: a view never changes; the same view always gives the same screen.
Never: reads a clock or a socket.
"""

from __future__ import annotations

import operator
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from appliance.frame.figures import energy_j
from appliance.frame.protocol import AlertFrame, Frame, PoolFrame, RequestFrame, WorkerFrame

# Which requests the tables show: `user:ana state:queued in>4096 !bench`, and in which order.
# Invariant: sorting is stable, what reports nothing comes last in both directions; live requests
# come before finished ones, and none is listed twice.
# Never: changes a request.


# What the request tables leave out: `user:ana state:queued in>4096 ttft>500 !bench`.
# Invariant: a request that does not report a number meets no comparison with it.
# Never: knows a widget; parsing and matching are pure.


GRAMMAR = "user:ana  state:queued  in>4096  ttft>500  !bench"
_TERM = re.compile(r"(?P<name>[a-z0-9_]+)(?P<sign>:|<=|>=|<|>|=)(?P<value>.*)", re.S)
_NUMBER = re.compile(r"(?P<number>\d+(\.\d+)?)(?P<unit>[kM]?)")
_UNITS = MappingProxyType({"": 1.0, "k": 1e3, "M": 1e6})
_SIGNS: Mapping[str, Callable[[float, float], bool]] = MappingProxyType(
    {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "=": operator.eq}
)
WORDS: Mapping[str, Callable[[RequestFrame], str | None]] = MappingProxyType(
    {
        "id": lambda r: r.id,
        "user": lambda r: r.user,
        "state": lambda r: r.phase,
        "finish": lambda r: r.finish_reason,
        "endpoint": lambda r: r.endpoint,
        "model": lambda r: r.model,
        "worker": lambda r: r.worker,
        "route": lambda r: r.route,
    }
)
"""Asked with a colon; also what a bare word is looked for in."""
NUMBERS: Mapping[str, Callable[[RequestFrame], float | None]] = MappingProxyType(
    {
        "in": lambda r: r.prompt_tokens,
        "out": lambda r: r.output_tokens,
        "max": lambda r: r.max_tokens,
        "blocks": lambda r: r.num_blocks,
        "time": lambda r: r.age_ms,
        "queue": lambda r: r.queue_ms,
        "restore": lambda r: r.restore_ms,
        "prefill": lambda r: r.prefill_ms,
        "ttft": lambda r: r.ttft_ms,
        "handoff": lambda r: r.handoff_ms,
        "wait": lambda r: r.decode_wait_ms,
        "decode": lambda r: r.decode_ms,
        "paused": lambda r: r.paused_ms,
        "tpot": lambda r: r.tpot_ms,
        "e2e": lambda r: r.e2e_ms,
        "j": lambda r: energy_j(r.prefill_j, r.decode_j),
    }
)
"""Compared with a number; times are in milliseconds."""


class FilterError(ValueError):
    """A text that is no filter, with a sentence that says why."""


@dataclass(frozen=True, slots=True)
class Term:
    """One condition of a filter, as `user:ana` or `in>4096`."""

    name: str
    """Of WORDS or NUMBERS; empty for a bare word."""
    sign: str
    value: str
    is_negated: bool

    def admits(self, request: RequestFrame) -> bool:
        """Whether the request meets it."""
        return self._holds(request) is not self.is_negated

    def _holds(self, request: RequestFrame) -> bool:
        if self.sign != ":":
            reading = NUMBERS[self.name](request)
            return reading is not None and _SIGNS[self.sign](reading, _number(self.value))
        texts = [WORDS[self.name](request)] if self.name else [t(request) for t in WORDS.values()]
        return any(self.value.lower() in text.lower() for text in texts if text is not None)


@dataclass(frozen=True, slots=True)
class Filter:
    """All conditions of a text; none admits everything."""

    text: str = ""
    terms: tuple[Term, ...] = ()

    def admits(self, request: RequestFrame) -> bool:
        """Whether the request meets them all."""
        return all(term.admits(request) for term in self.terms)


def parse(text: str) -> Filter:
    """Read a filter.

    Raises:
        FilterError: a condition cannot be read.
    """
    return Filter(" ".join(text.split()), tuple(_term(word) for word in text.split()))


def _term(word: str) -> Term:
    is_negated = word.startswith("!")
    condition = word.removeprefix("!")
    if not condition:
        raise FilterError("! needs a condition after it")
    parts = _TERM.fullmatch(condition)
    if parts is None:
        return Term("", ":", condition, is_negated)
    name, sign, value = parts["name"], parts["sign"], parts["value"]
    if sign == ":" and name in NUMBERS:
        raise FilterError(f"{name} is a number: {name}>500, {name}<=4k, {name}=1")
    if sign != ":" and name in WORDS:
        raise FilterError(f"{name} is a text: {name}:part")
    if sign == ":" and name not in WORDS:
        raise FilterError(f"no {name}: to look in; there are {', '.join(WORDS)}")
    if sign != ":" and name not in NUMBERS:
        raise FilterError(f"{name} is no number here; there are {', '.join(NUMBERS)}")
    if sign != ":" and not _NUMBER.fullmatch(value):
        raise FilterError(f"{name}{sign} needs a number, as 500 or 4k")
    if not value:
        raise FilterError(f"{name}: needs a text after it")
    return Term(name, sign, value, is_negated)


def _number(text: str) -> float:
    parts = _NUMBER.fullmatch(text)
    assert parts is not None, "checked when it was parsed"
    return float(parts["number"]) * _UNITS[parts["unit"]]


# --------------------------------------------------------------------------------------------------


SORTS: Mapping[str, Callable[[RequestFrame], float | None]] = MappingProxyType(
    {name: NUMBERS[name] for name in ("time", "in", "out", "ttft", "tpot", "blocks", "j")}
)


@dataclass(frozen=True, slots=True)
class RequestListing:
    """Order and filter of both tables."""

    sort: str = "time"
    is_reversed: bool = False
    """The least first."""
    filter: Filter = field(default_factory=Filter)

    def sorted_by_next(self, is_metered: bool = True) -> RequestListing:
        """The same by the next of SORTS, of which energy needs a meter."""
        names = [name for name in SORTS if is_metered or name != "j"]
        return replace(self, sort=names[(names.index(self.sort) + 1) % len(names)])

    def of(self, requests: Iterable[RequestFrame]) -> list[RequestFrame]:
        """The requests that the filter admits, in order."""
        read = SORTS[self.sort]
        admitted = [request for request in requests if self.filter.admits(request)]
        known = [request for request in admitted if read(request) is not None]
        unknown = [request for request in admitted if read(request) is None]
        return [
            *sorted(known, key=lambda r: read(r) or 0.0, reverse=not self.is_reversed),
            *unknown,
        ]

    def num_admitted(self, requests: Iterable[RequestFrame]) -> int:
        """How many of them the filter admits."""
        return sum(map(self.filter.admits, requests))

    def arranged(
        self, live: Sequence[RequestFrame], finished: Iterable[RequestFrame]
    ) -> list[RequestFrame]:
        """Live requests in order, then finished ones, by age the newest first.

        One that is in both is still live: the two are not asked for at the same time.
        """
        ordered = self.of(live)
        ids = {request.id for request in live}
        ended = [request for request in finished if request.id not in ids]
        if self.sort != "time":
            return ordered + self.of(ended)
        admitted = [request for request in ended if self.filter.admits(request)]
        return ordered + (admitted[::-1] if self.is_reversed else admitted)


# --------------------------------------------------------------------------------------------------


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


def has_meter(frame: Frame | None) -> bool:
    """Whether any device reports power, energy or utilisation."""
    if frame is None:
        return False
    return bool(frame.devices) or (frame.energy is not None and frame.energy.total_j is not None)


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
