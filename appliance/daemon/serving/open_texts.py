"""Keep the requests for vectors and scores that have no reply yet, and record each at its end.

Invariant: each accepted request gets one row.
"""

from __future__ import annotations

import asyncio
import time

from appliance.daemon.requests.row import LogRow
from appliance.daemon.requests.text_request import TextRequest
from appliance.daemon.serving.closed_requests import ClosedRequests
from appliance.observe.frame.protocol import RequestFrame, TotalsFrame
from appliance.observe.log.writer import RequestLog
from appliance.observe.telemetry.telemetry import Today


class OpenTexts:
    """Open requests by id, the oldest first."""

    def __init__(
        self, request_log: RequestLog, closed: ClosedRequests, totals: TotalsFrame, today: Today
    ) -> None:
        self._log, self._closed, self._totals, self._today = request_log, closed, totals, today
        self._open: dict[str, TextRequest] = {}
        self.idle = asyncio.Event()
        """Set while there are none."""
        self.idle.set()

    def __len__(self) -> int:
        return len(self._open)

    def open(self, request: TextRequest) -> None:
        """Take in an accepted request."""
        now_ns = time.monotonic_ns()
        self._log.opened(LogRow.from_texts(request, now_ns, http_status=200))
        self._open[request.request_id] = request
        self._totals.accepted += 1
        self.idle.clear()

    def close(self, request: TextRequest, http_status: int) -> None:
        """Record a request after its reply, or after its client has disconnected."""
        now_ns = request.finished_ns = time.monotonic_ns()
        del self._open[request.request_id]
        self._totals.failed += request.has_failed
        is_aborted = request.cancelled_by is not None or request.error is not None
        self._totals.aborted += is_aborted and not request.has_failed
        self._totals.finished += not is_aborted and not request.has_failed
        self._today.add(request)
        row = LogRow.from_texts(request, now_ns, http_status=http_status)
        self._closed.add(request.frame(now_ns), row)
        if not self._open:
            self.idle.set()

    def owner_of(self, request_id: str) -> str | None:
        """Name the peer of an open request; None if the id is not open."""
        request = self._open.get(request_id)
        return None if request is None else request.peer.name

    def cancel(self, request_id: str, by: str) -> bool:
        """Drop what an open request waits for; False if the id is not open."""
        request = self._open.get(request_id)
        if request is None:
            return False
        request.cancelled_by = request.cancelled_by or by
        request.stop()
        return True

    def frames(self, now_ns: int) -> list[RequestFrame]:
        """Show all open requests."""
        return [request.frame(now_ns) for request in self._open.values()]
