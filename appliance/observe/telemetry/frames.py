"""Assemble a frame of everything, once a second and on demand.

Invariant: frame numbers only grow; rates, devices and the host are read over an interval when a
frame is made, and never for a single reader.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from appliance.daemon.requests.request import ModelInfo, Request
from appliance.devices.machine import Devices
from appliance.fleet.boot import BootPlan
from appliance.fleet.kv_caches import KvCaches
from appliance.fleet.measuring import Measuring
from appliance.fleet.placement import num_machine_cores
from appliance.fleet.roles_change import roles_frame
from appliance.fleet.supervisor import Supervisor
from appliance.fleet.swaps import Swaps
from appliance.fleet.weights_plan import kv_text, weights_text
from appliance.json.lines import encode_line
from appliance.observe.frame.late_frames import SurvivedFrame, UnwrittenFrame
from appliance.observe.frame.protocol import (
    FRAME_VERSION,
    MAX_FRAME_REQUESTS,
    Frame,
    RequestFrame,
    TotalsFrame,
    WorkerFrame,
    iso_time,
    utc_now,
)
from appliance.observe.telemetry.alerts import Alerts, Change
from appliance.observe.telemetry.energy import Energy
from appliance.observe.telemetry.explain import limit, slow_because, wait_text
from appliance.observe.telemetry.frame_parts import (
    draft_frames,
    pool_frames,
    queue_frame,
    request_frame,
    waiting,
    way_frames,
)
from appliance.observe.telemetry.late import late_first, late_next, waiting_prompts
from appliance.observe.telemetry.offload_readings import OffloadReadings
from appliance.observe.telemetry.rank_readings import RankReadings
from appliance.observe.telemetry.starvation import Starvation
from appliance.observe.telemetry.telemetry import Telemetry, worker_now
from appliance.observe.telemetry.windows import UsualTimes
from engine.scheduler.router import Router
from engine.scheduler.snapshot import Snapshot

_STATES = {None: "ready", "draining": "draining", "model_loading": "loading"}


@dataclass(frozen=True, slots=True)
class ServiceState:
    """The service's own part of a frame, at one moment."""

    reason: str | None
    """Why it is not ready; None: it is."""
    live: list[Request]
    """Live requests, the oldest first."""
    totals: TotalsFrame
    """The totals that the service counts."""
    log_rows_lost: int
    swaps: Swaps | None = None
    kept: list[RequestFrame] = field(default_factory=list)
    """Requests of the previous daemon that wait for the model to be loaded."""
    survived: SurvivedFrame | None = None
    texts: list[RequestFrame] = field(default_factory=list)
    """Open requests for vectors and scores, the oldest first."""
    unwritten: UnwrittenFrame | None = None


class Frames:
    """Make frames, record them, and hand them to waiting readers."""

    def __init__(
        self,
        plan: BootPlan,
        model: ModelInfo,
        router: Router,
        supervisor: Supervisor,
        telemetry: Telemetry,
        devices: Devices | None,
        record: Callable[[Frame], None],
        caches: KvCaches | None = None,
    ) -> None:
        self._plan = plan
        self.model = model
        """The served model; a pool that turns out small shortens its maximum length."""
        self.measuring: Measuring | None = None
        """The measuring while idle; None: the model is loading."""
        self._router = router
        self._supervisor = supervisor
        self._telemetry = telemetry
        gpus = {w.name: w.gpu.board for w in plan.placement.workers if w.gpu is not None}
        self.energy = Energy(num_machine_cores(), gpus)
        self._devices = devices or Devices.of_machine()
        self._record = record
        self._caches = caches
        self._alerts = Alerts()
        self._usual = UsualTimes()
        self._starvation = Starvation()
        self._offload, self._ranks = OffloadReadings(plan), RankReadings()
        self._started_ns = time.monotonic_ns()
        self._frame: Frame | None = None
        self._is_made = asyncio.Event()

    def change_model(
        self, plan: BootPlan, model: ModelInfo, router: Router, supervisor: Supervisor
    ) -> None:
        """Show another model from now on; numbers and counts continue."""
        self._plan, self.model, self._router, self._supervisor = plan, model, router, supervisor
        self.measuring = None
        self._offload, self._ranks = OffloadReadings(plan), RankReadings()

    def make(self, standing: ServiceState) -> list[Change]:
        """Take a reading and wake the readers; return the changed alerts."""
        now_ns = time.monotonic_ns()
        plan, telemetry, snapshot = self._plan, self._telemetry, self._router.snapshot(now_ns)
        states = list(self._supervisor.workers.values())
        elapsed_s = telemetry.interval_s(now_ns)
        workers = telemetry.workers(states, snapshot, now_ns, elapsed_s)
        self._usual = telemetry.windows.usual(now_ns)
        host = telemetry.host()
        self._starvation.look(workers, host, now_ns / 1e9)
        offload = self._offload.look(states, workers, elapsed_s)
        self._ranks.look(states, workers, elapsed_s)
        devices = self._devices.read(now_ns)
        self.energy.divide(devices, self._devices.read_ns)
        frame = Frame(
            version=FRAME_VERSION,
            seq=1 if self._frame is None else self._frame.seq + 1,
            model=self.model.model_id,
            model_note=self.model.note,
            dtype=plan.dtype,
            max_model_len=self.model.max_model_len,
            transport=plan.placement.topology.transport,
            pid=os.getpid(),
            workers=workers,
            devices=devices,
            energy=self.energy.frame(),
            host=host,
            starved=self._starvation.text,
            handoff=telemetry.handoff(snapshot, elapsed_s),
            links=telemetry.links(snapshot, elapsed_s),
            users=telemetry.users(standing.live, elapsed_s),
            today=msgspec.structs.replace(telemetry.today.at(utc_now())),
            weights=weights_text(
                plan.weights_words,
                next((w.weights_loss for w in states if w.weights_loss is not None), None),
            ),
            kv=kv_text(
                plan.dtype,
                plan.kv_dtype,
                next((w.kv_loss for w in states if w.kv_loss is not None), None),
            ),
            trials=[*plan.choices, *self._measured()],
            offload=offload,
            **self._parts(standing, snapshot, workers, now_ns),
        )
        changes = self._alerts.update(frame)
        itl_ms, is_wrong = frame.latency.itl_ms_p50, self._alerts.are_about_pace
        telemetry.windows.learn(itl_ms, now_ns, is_wrong=is_wrong)
        frame.alerts = self._alerts.frames()
        self._frame = frame
        self._record(frame)
        self._is_made.set()
        self._is_made = asyncio.Event()
        return changes

    def _measured(self) -> list[str]:
        words = None if self.measuring is None else self.measuring.words
        return [] if words is None else [words]

    @property
    def newest(self) -> Frame:
        """The newest frame."""
        assert self._frame is not None, "the service makes one before it is asked"
        return self._frame

    def now(self, standing: ServiceState) -> Frame:
        """Return a frame of this moment; rates, readings and alerts are the newest frame's."""
        states, now_ns = self._supervisor.workers, time.monotonic_ns()
        snapshot = self._router.snapshot(now_ns)
        workers = [
            worker_now(worker, states.get(worker.name), snapshot) for worker in self.newest.workers
        ]
        parts = self._parts(standing, snapshot, workers, now_ns)
        return msgspec.structs.replace(self.newest, workers=workers, **parts)

    async def next_json(self, after_seq: int) -> tuple[int, bytes]:
        """Wait for a frame newer than `after_seq`."""
        while self._frame is None or self._frame.seq <= after_seq:
            await self._is_made.wait()
        return self._frame.seq, encode_line(self._frame)

    def closed(self, request: Request, now_ns: int) -> RequestFrame:
        """Describe a request that has had its reply."""
        return self._request(request, None, now_ns)

    def live(self, standing: ServiceState, now_ns: int) -> list[RequestFrame]:
        """List requests without a reply; requests waiting for a model come last."""
        return self._live(standing, self._router.snapshot(now_ns), now_ns)

    def _live(
        self,
        standing: ServiceState,
        snapshot: Snapshot,
        now_ns: int,
        most: int | None = None,
    ) -> list[RequestFrame]:
        waiting = [] if standing.swaps is None else standing.swaps.requests(now_ns)
        live = [self._request(request, snapshot, now_ns) for request in standing.live[:most]]
        return [*standing.kept, *live, *standing.texts, *waiting][:most]

    def _request(self, request: Request, snapshot: Snapshot | None, now_ns: int) -> RequestFrame:
        frame = request_frame(request, snapshot, now_ns)
        starved_ms = self._starvation.starved_ms((now_ns / 1e9) - frame.age_ms / 1e3, now_ns / 1e9)
        swap_ms = request.swap_wait_ms
        frame.slow_because = slow_because(frame, self._usual, swap_ms, starved_ms)
        waits = snapshot.waits if snapshot else {}
        waiting = next((one for one in request.sequences if one.seq_id in waits), None)
        if waiting is not None:
            waited_ns = now_ns - waiting.stamps.arrived_ns
            wait = wait_text(waits[waiting.seq_id], waited_ns)
            frame.waits_for, frame.behind, frame.behind_tokens = wait
            request.waited_for = frame.waited_for = wait.text.partition(";")[0]
        return frame

    def _parts(
        self,
        standing: ServiceState,
        snapshot: Snapshot,
        workers: list[WorkerFrame],
        now_ns: int,
    ) -> dict[str, Any]:
        """Fill the fields of a frame that are true at any time, not over an interval."""
        block_bytes = self._plan.placement.block_bytes
        swaps = None if standing.swaps is None else standing.swaps.frame()
        num_before_swap = 0 if swaps is None else swaps.num_waiting
        state, reason = _STATES.get(standing.reason, "degraded"), standing.reason or ""
        slo, live = snapshot.roles.slo, standing.live
        latency = self._telemetry.windows.latency(slo, now_ns, waiting_prompts(live))
        before_swap = [] if standing.swaps is None else standing.swaps.requests(now_ns)
        pace = self._telemetry.windows.usual_pace()
        first_token = late_first(live, before_swap, slo.ttft_ms, pace, now_ns)
        next_token = late_next(live, pace, now_ns)
        return {
            "at": iso_time(time.time() - (time.monotonic_ns() - now_ns) / 1e9),
            "uptime_s": (now_ns - self._started_ns) / 1e9,
            "state": state,
            "state_reason": reason,
            "queue": queue_frame(snapshot, standing.kept, first_token, next_token, now_ns),
            "pools": pool_frames(snapshot, standing.live, block_bytes),
            "latency": latency,
            "limit": limit(
                state,
                reason,
                waiting(snapshot, num_before_swap),
                workers,
                latency,
                self._starvation.text,
            ),
            "totals": self._totals(standing, snapshot),
            "requests": self._live(standing, snapshot, now_ns, MAX_FRAME_REQUESTS),
            "num_requests": len(standing.kept) + len(standing.live) + num_before_swap,
            "events": list(self._telemetry.events),
            "swaps": swaps,
            "survived": standing.survived,
            "unwritten": standing.unwritten,
            "refusals": self._telemetry.refusals.frames(now_ns / 1e9),
            **({} if self._caches is None else self._caches.frames()),
            **roles_frame(snapshot.roles),
        }

    def _totals(self, standing: ServiceState, snapshot: Snapshot) -> TotalsFrame:
        """Add the counts that others keep to the service's own."""
        counters = snapshot.counters
        return msgspec.structs.replace(
            standing.totals,
            prompt_tokens=self._telemetry.num_prompt_tokens,
            output_tokens=self._telemetry.num_output_tokens,
            cached_tokens=self._telemetry.num_cached_tokens,
            prefix_cache_queries=counters.prefix_cache_queries,
            prefix_cache_hits=counters.prefix_cache_hits,
            prefix_cache_fetches=counters.prefix_cache_fetches,
            prefix_cache_s=counters.prefix_cache_ns / 1e9,
            handoffs=counters.handoffs,
            handoff_bytes=counters.handoff_bytes,
            stale_messages=counters.stale_messages,
            recovered_sequences=counters.recovered_sequences,
            preemptions=counters.preemptions,
            client_errors=self._telemetry.refusals.num_client_errors,
            decode_steps=counters.drafts.num_steps,
            decode_step_tokens=counters.drafts.num_tokens,
            drafts=draft_frames(counters.drafts),
            log_rows_lost=standing.log_rows_lost,
            routes=dict(snapshot.roles.counts),
            ways=way_frames(snapshot.roles),
        )
