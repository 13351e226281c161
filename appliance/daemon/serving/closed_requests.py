"""Keep the newest closed requests as frames, and record each in the log.

Invariant: each request is recorded once; joules that are known only later reach its row and
frame.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from appliance.daemon.requests.request import Request
from appliance.daemon.requests.row import LogRow, RowEnergy
from appliance.observe.frame.logged_requests import ended_frame
from appliance.observe.frame.protocol import RequestFrame
from appliance.observe.log.writer import RequestLog

MAX_FRAMES = 200


class ClosedRequests:
    """What is left of a request once it is closed."""

    def __init__(self, request_log: RequestLog) -> None:
        self._log = request_log
        self._frames: dict[str, dict[str, object]] = {}
        """By id, oldest first."""

    def go_on_from(self, rows: Sequence[dict[str, object]]) -> None:
        """Take over requests that an earlier daemon has recorded, given newest first."""
        for frame in map(ended_frame, reversed(rows)):
            self._frames[frame.id] = msgspec.to_builtins(frame)

    def add(self, frame: RequestFrame, row: LogRow) -> None:
        self._frames[frame.id] = msgspec.to_builtins(frame)
        if len(self._frames) > MAX_FRAMES:
            del self._frames[next(iter(self._frames))]
        self._log.record(row)

    def complete(self, requests: list[Request]) -> None:
        """Record the energy of requests whose last joules are counted."""
        for request in requests:
            if request.prefill_j is None:  # it had no step
                continue
            energy = RowEnergy(request.request_id, request.prefill_j, request.decode_j)
            self._log.record(energy)
            if (frame := self._frames.get(energy.rid)) is not None:
                frame |= {"prefill_j": energy.prefill_j, "decode_j": energy.decode_j}

    def frames(self) -> list[dict[str, object]]:
        """List at most MAX_FRAMES frames, the newest first."""
        return list(reversed(self._frames.values()))
