"""One reading of everything, once a second and whenever somebody asks.

Owns: the newest frame, its number, and those who wait for the next one.
Called by: service.
Invariant: a frame's numbers only grow; what is read over an interval (rates, devices, the host) is
read when a frame is made, and never for a single reader.
Never: changes anything that it reads.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from appliance.boot import Plan
from appliance.devices import Devices
from appliance.protocol import (
    FRAME_VERSION,
    MAX_FRAME_REQUESTS,
    Frame,
    RequestFrame,
    TotalsFrame,
    utc_now,
)
from appliance.request import ModelInfo, Request
from appliance.roles import roles_frame
from appliance.supervisor import Supervisor
from appliance.telemetry import Telemetry, pool_frame, queue_frame, request_frame
from engine.router import Router

_STATES = {None: "ready", "draining": "draining", "model_loading": "loading"}


@dataclass(frozen=True, slots=True)
class Standing:
    """What the service knows of the moment that a frame shows."""

    reason: str | None
    """Why it is not ready; None if it is."""
    live: list[Request]
    """Oldest first."""
    totals: TotalsFrame
    """As far as the service counts."""
    log_rows_lost: int


class Frames:
    """Makes frames, and hands them to those who wait."""

    def __init__(
        self,
        plan: Plan,
        model: ModelInfo,
        router: Router,
        supervisor: Supervisor,
        telemetry: Telemetry,
    ) -> None:
        self._plan = plan
        self.model = model
        """As it is served; a pool that turns out small shortens its requests."""
        self._router = router
        self._supervisor = supervisor
        self._telemetry = telemetry
        self._devices = Devices()
        self._started_ns = time.monotonic_ns()
        self._frame: Frame | None = None
        self._is_made = asyncio.Event()

    def make(self, standing: Standing) -> None:
        """Take one reading and wake those who wait for it."""
        now_ns = time.monotonic_ns()
        plan, telemetry = self._plan, self._telemetry
        workers = list(self._supervisor.workers.values())
        self._frame = Frame(
            version=FRAME_VERSION,
            seq=1 if self._frame is None else self._frame.seq + 1,
            model=self.model.model_id,
            model_note=self.model.note,
            dtype=plan.dtype,
            max_model_len=self.model.max_model_len,
            transport=plan.placement.topology.transport,
            pid=os.getpid(),
            workers=telemetry.workers(workers, self._router, now_ns),
            devices=self._devices.read(),
            host=telemetry.host(),
            **self._parts(standing, now_ns),
        )
        self._is_made.set()
        self._is_made = asyncio.Event()

    def json_now(self, standing: Standing) -> bytes:
        """Everything as it is now; rates and readings are those of the newest frame."""
        assert self._frame is not None, "the service makes one before it is asked"
        parts = self._parts(standing, time.monotonic_ns())
        return msgspec.json.encode(msgspec.structs.replace(self._frame, **parts))

    async def next_json(self, after_seq: int) -> tuple[int, bytes]:
        """Wait for a frame newer than `after_seq`."""
        while self._frame is None or self._frame.seq <= after_seq:
            await self._is_made.wait()
        return self._frame.seq, msgspec.json.encode(self._frame)

    def of_request(self, request: Request, now_ns: int) -> RequestFrame:
        """One request as it stands."""
        return request_frame(request, self._router, self._plan.placement, now_ns)

    def _parts(self, standing: Standing, now_ns: int) -> dict[str, Any]:
        """The fields of a frame that are true at any time, not over an interval."""
        router, block_bytes = self._router, self._plan.placement.block_bytes
        shown = standing.live[:MAX_FRAME_REQUESTS]
        return {
            "at": utc_now(),
            "uptime_s": (now_ns - self._started_ns) / 1e9,
            "state": _STATES.get(standing.reason, "degraded"),
            "state_reason": standing.reason or "",
            "queue": queue_frame(router, now_ns),
            "pools": [pool_frame(pool, block_bytes) for pool in router.ledger.pools.values()],
            "latency": self._telemetry.latency(now_ns),
            "totals": self._totals(standing),
            "requests": [self.of_request(request, now_ns) for request in shown],
            "num_requests": len(standing.live),
            "events": list(self._telemetry.events),
            **roles_frame(router),
        }

    def _totals(self, standing: Standing) -> TotalsFrame:
        """The service's counts, and those that others keep."""
        counters = self._router.counters
        return msgspec.structs.replace(
            standing.totals,
            prompt_tokens=self._telemetry.num_prompt_tokens,
            output_tokens=self._telemetry.num_output_tokens,
            handoffs=counters.handoffs,
            handoff_bytes=counters.handoff_bytes,
            stale_messages=counters.stale_messages,
            recovered_sequences=counters.recovered_sequences,
            log_rows_lost=standing.log_rows_lost,
            routes=dict(self._router.roles.counts),
        )
