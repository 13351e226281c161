"""Keep each fact about this machine: its newest samples, their median and spread.

Invariant: a fact has at most 32 samples; 16 in a row that are 1.5 times off replace all others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from statistics import median
from typing import NamedTuple

PROMPT_MS, DECODE_MS = "prompt_ms", "decode_ms"
"""Steps of a worker, by their tokens or sequences and the positions before these."""
DISK_BYTES_PER_S, LINK_BYTES_PER_S = "disk_read_bytes_per_s", "link_bytes_per_s"
MAX_SAMPLES = 32
MAX_RATIO = 1.5
"""A sample further than this from the median, either way, is beyond it."""
MANY = 16
"""Samples of which the median is what is usual here."""
REOPEN_AFTER = 16
"""Samples in a row that are beyond the median: what was known before them is forgotten."""


class Scope(NamedTuple):
    """What a set of facts holds for; empty parts do not matter to it."""

    machine: str
    build: str
    """Of the kernels."""
    model: str = ""
    dtype: str = ""
    placement: str = ""
    """The devices that it is served on."""


class FactKey(NamedTuple):
    """What a fact is about."""

    what: str
    """With its unit, as `prompt_ms`."""
    size: int = 0
    """In powers of two."""
    depth: int = 0
    """A second size, as positions before a step's tokens."""
    place: str = ""
    """Cores, device, link or disk."""


class Fact:
    """The newest samples of one thing."""

    __slots__ = ("_num_beyond", "_value", "at", "samples")

    def __init__(self, samples: Iterable[float] = (), at: str = "") -> None:
        self.samples = deque(samples, MAX_SAMPLES)
        self.at = at
        """When it was last stored, ISO 8601 in UTC; empty: never."""
        self._num_beyond = 0
        self._value: float | None = None

    @property
    def value(self) -> float:
        """The median of the samples."""
        if self._value is None:
            self._value = median(self.samples)
        return self._value

    @property
    def typical(self) -> float:
        """The median; of few samples the lower quartile: what else runs makes steps longer."""
        return self.value if len(self.samples) >= MANY else _quantile(self.samples, 0.25)

    @property
    def low(self) -> float:
        return _quantile(self.samples, 0.1)

    @property
    def high(self) -> float:
        return _quantile(self.samples, 0.9)

    def observe(self, sample: float) -> None:
        is_near = not self.samples or 1 / MAX_RATIO <= sample / self.value <= MAX_RATIO
        self._num_beyond = 0 if is_near else self._num_beyond + 1
        self.samples.append(sample)
        if self._num_beyond >= REOPEN_AFTER:
            self.samples = deque(list(self.samples)[-REOPEN_AFTER:], MAX_SAMPLES)
            self._num_beyond = 0
        self._value = None


def _quantile(samples: Iterable[float], share: float) -> float:
    ordered = sorted(samples)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


class Profile:
    """The facts of one scope: a machine, and perhaps a model on it."""

    def __init__(self, facts: Mapping[FactKey, Fact] | None = None) -> None:
        self.facts = dict(facts or {})
        self._changed: set[FactKey] = set()

    def value(self, what: str, size: int = 0, depth: int = 0, place: str = "") -> float | None:
        """Return the median of a fact; None: it is not known."""
        fact = self.facts.get(FactKey(what, size, depth, place))
        return None if fact is None else fact.value

    def about(self, what: str, place: str | None = None) -> Iterator[tuple[FactKey, Fact]]:
        """Yield every fact of a kind, at one place or at all."""
        for key, fact in self.facts.items():
            if key.what == what and place in {None, key.place}:
                yield key, fact

    def observe(self, key: FactKey, sample: float) -> float:
        """Take in one sample, and return the median with it."""
        fact = self.facts.setdefault(key, Fact())
        fact.observe(sample)
        self._changed.add(key)
        return fact.value

    def put(self, key: FactKey, samples: Iterable[float]) -> None:
        """Replace what is known of a fact."""
        self.facts[key] = Fact(samples)
        self._changed.add(key)

    def take_changed(self) -> dict[FactKey, list[float]]:
        """Return the samples of each fact that changed since the last call."""
        changed, self._changed = self._changed, set()
        return {key: list(self.facts[key].samples) for key in changed}
