"""GET /metrics, and what it says of HTTP itself.

Owns: the counts of replies by route, method and class of status.
Invariant: labels are of a fixed set, whatever clients send.
Never: counts probes, whose refusals are no errors of the api.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from starlette.requests import Request
from starlette.responses import Response

from appliance.api.wire import appliance_of
from appliance.metrics.exposition import MEDIA_TYPE, exposition
from appliance.metrics.metric import MetricFamily, counter

PROBES = ("/health", "/ready", "/metrics")
_METHODS = ("GET", "HEAD", "POST", "DELETE", "OPTIONS")


class HttpCounts:
    """Replies since the daemon started."""

    def __init__(self) -> None:
        self._replies: Counter[tuple[str, str, str]] = Counter()
        self._seconds: defaultdict[tuple[str, str], float] = defaultdict(float)

    def count(self, path: str | None, method: str, status: int, seconds: float) -> None:
        """A reply has been sent whole, or its client is gone.

        Args:
            path: of the route; None: there was none.
            method: as the client wrote it.
            status: of the reply.
            seconds: since the request came.
        """
        if path in PROBES:
            return
        handler, method = path or "none", method if method in _METHODS else "other"
        self._replies[handler, method, f"{status // 100}xx"] += 1
        self._seconds[handler, method] += seconds

    def families(self) -> Iterator[MetricFamily]:
        """As vLLM's server and most others name them."""
        yield counter(
            "http_requests_total",
            "Replies, but for those to probes.",
            [
                ({"handler": handler, "method": method, "status": status}, number)
                for (handler, method, status), number in self._replies.items()
            ],
        )
        totals: Counter[tuple[str, str]] = Counter()
        for (handler, method, _), number in self._replies.items():
            totals[handler, method] += number
        yield MetricFamily(
            "summary",
            "http_request_duration_seconds",
            "To the end of the reply.",
            summaries=[
                ({"handler": handler, "method": method}, number, self._seconds[handler, method])
                for (handler, method), number in totals.items()
            ],
        )


async def metrics(http: Request) -> Response:
    """All there is to chart, as Prometheus reads it."""
    readings = appliance_of(http).readings()
    http_counts: HttpCounts = http.app.state.http_counts
    body = exposition(readings.frame, readings.histograms, http_counts.families())
    return Response(body, media_type=MEDIA_TYPE)
