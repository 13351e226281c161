"""Describe one metric: its name, kind and samples.

Invariant: no label names a user or a request; what is not reported has no sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from appliance.observe.frame.histograms import Edges, Histogram

Labels = Mapping[str, str]
Samples = Iterable[tuple[Labels, float | None]]
_NONE: Labels = {}


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """A metric: its name, its kind, and its samples by labels."""

    kind: str
    """`gauge`, `counter` (its name ends in _total), `histogram` or `summary`."""
    name: str
    about: str
    samples: list[tuple[Labels, float]] = field(default_factory=list)
    """Values of a gauge or counter."""
    histograms: list[tuple[Labels, Histogram, Edges]] = field(default_factory=list)
    """Histograms with the edges to show, which they must have."""
    summaries: list[tuple[Labels, int, float]] = field(default_factory=list)
    """Counts and sums."""


def gauge(name: str, about: str, samples: Samples | float | None) -> MetricFamily:
    """Make a metric that goes up and down; `samples` is a number, or numbers by labels."""
    return MetricFamily("gauge", name, about, _reported(samples))


def counter(name: str, about: str, samples: Samples | float | None) -> MetricFamily:
    """Make a metric that only grows; `samples` is a number, or numbers by labels."""
    return MetricFamily("counter", name, about, _reported(samples))


def histogram(
    name: str, about: str, shown: Iterable[tuple[Labels, Histogram, Edges]]
) -> MetricFamily:
    """Make a metric that counts values in buckets."""
    return MetricFamily("histogram", name, about, histograms=list(shown))


def _reported(samples: Samples | float | None) -> list[tuple[Labels, float]]:
    if samples is None or isinstance(samples, int | float):
        samples = [(_NONE, samples)]
    return [(labels, float(value)) for labels, value in samples if value is not None]
