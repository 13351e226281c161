"""Write metrics for Prometheus, under our names and vLLM's.

Invariant: a scrape is a function of its arguments and of /proc; there is no registry.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from appliance.observe.frame.histograms import Histograms
from appliance.observe.frame.protocol import Frame
from appliance.observe.metrics.metric_family import MetricFamily
from appliance.observe.metrics.own import families
from appliance.observe.metrics.vllm_names import vllm_families

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FAMILIES_AT_ONCE = 8


def exposition(
    frame: Frame, histograms: Histograms, more: Iterable[MetricFamily] = ()
) -> Iterator[bytes]:
    """Write our metrics and the caller's as text, in parts of less than a millisecond each."""
    every = [*families(frame, histograms), *vllm_families(frame, histograms), *more]
    for start in range(0, len(every), FAMILIES_AT_ONCE):
        yield generate_latest(_Scrape(every[start : start + FAMILIES_AT_ONCE]))
    yield generate_latest(ProcessCollector(registry=None))


class _Scrape(Collector):
    """What the client library takes text from."""

    def __init__(self, families: Iterable[MetricFamily]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        return map(_metric, self._families)


def _metric(family: MetricFamily) -> Metric:
    bucket = f"{family.name}_bucket"
    metric = Metric(family.name.removesuffix("_total"), family.about, family.kind)
    if family.kind == "histogram":
        metric.name = family.name  # one of vLLM's ends in _total
    for labels, value in family.samples:
        metric.add_sample(family.name, dict(labels), value)
    for labels, number, total in family.summaries:
        metric.add_sample(f"{family.name}_count", dict(labels), number)
        metric.add_sample(f"{family.name}_sum", dict(labels), total)
    for labels, shown, edges in family.histograms:
        for edge, number in zip(edges, shown.up_to(edges), strict=True):
            le = floatToGoString(edge)  # type: ignore[no-untyped-call]
            metric.add_sample(bucket, {**labels, "le": le}, number)
        metric.add_sample(bucket, {**labels, "le": "+Inf"}, shown.total)
        metric.add_sample(f"{family.name}_count", dict(labels), shown.total)
        metric.add_sample(f"{family.name}_sum", dict(labels), shown.sum)
    return metric
