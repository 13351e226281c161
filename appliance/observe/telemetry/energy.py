"""Divide each device's energy among the requests that used it.

Between two readings a device has used some joules and offers some time: a GPU offers the seconds of
the interval, the CPU packages offer the seconds of every physical core of the machine. A step takes
joules in proportion to its time on the device (on a CPU, times its cores). If the steps of several
workers need more time than the interval has, they share it. A step's joules are divided by its
tokens: prompt tokens count as the request's prefill, all others as its decode. The rest (idle
power, the daemon, other programs) is unattributed. So prefill + decode + unattributed = total.

A reading comes after the steps that it covers, so steps are kept until then. A step that began
before an earlier reading also takes its part of what is left of the earlier intervals.

Invariant: no joule is attributed twice; without a reading every figure is None, and steps are not
examined.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from appliance.daemon.requests.request import Request
from appliance.observe.frame.protocol import DeviceFrame, EnergyFrame
from engine.wire.messages import SequenceStep, Stepped

WINDOW_S = 60.0
CPU = "cpu"
"""The device of workers without a GPU: all CPU packages together; also a package's kind."""
MAX_INTERVALS = 64
"""Maximum intervals per device that late steps may still take from."""
NOT_REPORTED = "not reported"


@dataclass(slots=True)
class _Interval:
    """The unattributed energy and time of one device between two readings."""

    started_ns: int
    ended_ns: int
    left_j: float
    left_ns: float
    """Device time that no step has taken."""


class _Share(NamedTuple):
    """A request's tokens in a step, for one of its sequences."""

    request: Request
    num_prompt_tokens: int
    num_later_tokens: int
    has_output: bool
    """Whether its next token was sampled."""


@dataclass(slots=True)
class _Step:
    """A step waiting for the reading that covers it."""

    started_ns: int
    ended_ns: int
    num_cores: int
    num_tokens: int
    """All tokens, including closed requests' tokens, which are charged to no request."""
    shares: list[_Share]


@dataclass(slots=True)
class _Device:
    """A device that reports its energy."""

    read_ns: int
    energy_j: float
    intervals: deque[_Interval] = field(default_factory=lambda: deque(maxlen=MAX_INTERVALS))


class _Sums(NamedTuple):
    """The sums at one reading, since the daemon started."""

    read_ns: int = 0
    total_j: float = 0.0
    prefill_j: float = 0.0
    decode_j: float = 0.0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0


class Energy:
    """Keep the energy account.

    Args:
        num_cores: physical cores of the machine, usable or not.
        gpus: the GPU of each worker; for a MIG instance, its parent.
    """

    def __init__(self, num_cores: int, gpus: Mapping[str, str] | None = None) -> None:
        self._num_cores = num_cores
        self._gpus = gpus or {}
        self._devices: dict[str, _Device] = {}
        self._sources: set[str] = set()
        self._steps: dict[str, list[_Step]] = {}
        """Steps by device, for devices that report energy."""
        self._sums = _Sums()
        self._history: deque[_Sums] = deque()
        self._charged: dict[int, tuple[Request, int]] = {}
        """The request and prompt length by seq_id."""
        self._closed: list[Request] = []
        self._complete: list[Request] = []

    def opened(self, request: Request) -> None:
        """Register a request whose sequences may now be in steps."""
        for sequence in request.sequences:
            self._charged[sequence.seq_id] = (request, sequence.num_prompt_tokens)

    def stepped(self, worker: str, step: Stepped, num_cores: int) -> None:
        """Record a worker's step, with its number of CPU cores."""
        runs_on = self._gpus.get(worker, CPU)
        steps = self._steps.get(runs_on)
        if steps is None:
            return
        num_tokens, shares = 0, []
        for entry in step.entries:
            num_tokens += entry.num_scheduled_tokens
            charged = self._charged.get(entry.seq_id)
            if charged is not None and entry.num_scheduled_tokens:
                shares.append(_share(*charged, entry))
        if shares:
            width = num_cores if runs_on == CPU else 1
            steps.append(_Step(step.started_ns, step.ended_ns, width, num_tokens, shares))

    def closed(self, request: Request) -> None:
        """Note that a request's row is written; joules of its last steps may follow."""
        if self._steps:
            self._closed.append(request)
        else:
            self._forget(request)

    def divide(self, devices: list[DeviceFrame], read_ns: int) -> None:
        """Divide the energy used until `read_ns`; called once for each reading."""
        if read_ns <= self._sums.read_ns:
            return
        names: dict[str, list[str]] = {}
        for device in devices:
            if device.energy_j is not None:
                names.setdefault(CPU if device.kind == CPU else device.name, []).append(device.name)
                self._read(device, device.energy_j, read_ns)
        for runs_on, steps in self._steps.items():
            self._divide(steps, names.get(runs_on, []))
        self._steps = {runs_on: [] for runs_on in names}
        self._sums = self._sums._replace(
            read_ns=read_ns, total_j=sum(device.energy_j for device in self._devices.values())
        )
        self._remember()
        for request in self._closed:
            self._forget(request)
        self._complete += self._closed
        self._closed = []

    def take_complete(self) -> list[Request]:
        """Return the closed requests that get no more joules."""
        complete, self._complete = self._complete, []
        return complete

    def frame(self) -> EnergyFrame:
        """Return the sums, and the rates over the window."""
        if not self._devices:
            return EnergyFrame(None, None, None, None, WINDOW_S, None, None, None, NOT_REPORTED)
        now, first = self._sums, self._history[0]
        seconds = (now.read_ns - first.read_ns) / 1e9
        return EnergyFrame(
            total_j=now.total_j,
            prefill_j=now.prefill_j,
            decode_j=now.decode_j,
            unattributed_j=max(0.0, now.total_j - now.prefill_j - now.decode_j),
            window_s=WINDOW_S,
            power_w=_ratio(now.total_j - first.total_j, seconds),
            prefill_j_per_token=_ratio(
                now.prefill_j - first.prefill_j, now.num_prompt_tokens - first.num_prompt_tokens
            ),
            decode_j_per_token=_ratio(
                now.decode_j - first.decode_j, now.num_output_tokens - first.num_output_tokens
            ),
            method=f"{' and '.join(sorted(self._sources))}, by time in steps, then by tokens",
        )

    def _forget(self, request: Request) -> None:
        for sequence in request.sequences:
            self._charged.pop(sequence.seq_id, None)

    def _read(self, frame: DeviceFrame, energy_j: float, read_ns: int) -> None:
        """End a device's interval."""
        self._sources.add(frame.power_source or frame.kind)
        device = self._devices.setdefault(frame.name, _Device(read_ns, energy_j))
        if read_ns > device.read_ns:
            width = self._num_cores if frame.kind == CPU else 1
            offered_ns = width * (read_ns - device.read_ns)
            used_j = energy_j - device.energy_j
            device.intervals.append(_Interval(device.read_ns, read_ns, used_j, offered_ns))
            device.read_ns, device.energy_j = read_ns, energy_j

    def _divide(self, steps: list[_Step], names: list[str]) -> None:
        """Charge steps for their time on devices, and requests for their tokens in them."""
        if not steps or not names:
            return
        since_ns = min(step.started_ns for step in steps)
        used_j = [0.0] * len(steps)
        for name in names:
            for interval in self._devices[name].intervals:
                if interval.ended_ns > since_ns:
                    _take(interval, steps, used_j)
        prefill_j = decode_j = 0.0
        for step, step_j in zip(steps, used_j, strict=True):
            token_j = step_j / step.num_tokens
            for share in step.shares:
                request = share.request
                share_prefill_j = token_j * share.num_prompt_tokens
                share_decode_j = token_j * share.num_later_tokens
                request.prefill_j = (request.prefill_j or 0.0) + share_prefill_j
                request.decode_j = (request.decode_j or 0.0) + share_decode_j
                prefill_j += share_prefill_j
                decode_j += share_decode_j
        shares = [share for step in steps for share in step.shares]
        sums = self._sums
        self._sums = sums._replace(
            prefill_j=sums.prefill_j + prefill_j,
            decode_j=sums.decode_j + decode_j,
            num_prompt_tokens=sums.num_prompt_tokens + sum(s.num_prompt_tokens for s in shares),
            num_output_tokens=sums.num_output_tokens + sum(s.has_output for s in shares),
        )

    def _remember(self) -> None:
        """Keep the sums from the window's beginning on."""
        self._history.append(self._sums)
        begin_ns = self._sums.read_ns - int(WINDOW_S * 1e9)
        while len(self._history) > 2 and self._history[1].read_ns <= begin_ns:
            self._history.popleft()


def _share(request: Request, num_prompt_tokens: int, entry: SequenceStep) -> _Share:
    """Split a sequence's tokens in a step into prompt and decode; recomputed ones are decode."""
    num_tokens = entry.num_scheduled_tokens
    num_left = max(0, num_prompt_tokens - (entry.num_computed_tokens - num_tokens))
    num_of_prompt = min(num_left, num_tokens)
    return _Share(request, num_of_prompt, num_tokens - num_of_prompt, bool(entry.token_ids))


def _take(interval: _Interval, steps: Iterable[_Step], used_j: list[float]) -> None:
    """Give the steps their part of an interval, in proportion to their time in it."""
    claims_ns = [
        step.num_cores
        * max(0, min(step.ended_ns, interval.ended_ns) - max(step.started_ns, interval.started_ns))
        for step in steps
    ]
    claimed_ns = sum(claims_ns)
    if not claimed_ns:
        return
    j_per_ns = interval.left_j / max(interval.left_ns, claimed_ns)
    for place, claim_ns in enumerate(claims_ns):
        used_j[place] += claim_ns * j_per_ns
    interval.left_j = max(0.0, interval.left_j - claimed_ns * j_per_ns)
    interval.left_ns = max(0.0, interval.left_ns - claimed_ns)


def _ratio(amount: float, count: float) -> float | None:
    return amount / count if count else None
