"""One reading of everything, once a second and whenever somebody asks.

Owns: the newest frame, its number, those who wait for the next one, and the energy account.
Invariant: a frame's numbers only grow; what is read over an interval (rates, devices, the host) is
read when a frame is made, and never for a single reader.
Never: changes anything that it reads.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import msgspec

from appliance.devices.machine import Devices
from appliance.fleet.boot import BootPlan
from appliance.fleet.kv_caches import KvCaches
from appliance.fleet.placement import Placement, num_machine_cores
from appliance.fleet.roles_change import roles_frame
from appliance.fleet.supervisor import Supervisor
from appliance.fleet.swaps import Swaps
from appliance.fleet.weights_plan import kv_text, weights_text
from appliance.frame.latency import stages
from appliance.frame.protocol import (
    FRAME_VERSION,
    MAX_FRAME_REQUESTS,
    MAX_POOL_OWNERS,
    Frame,
    HolderFrame,
    OwnerFrame,
    PoolFrame,
    QueueFrame,
    RequestFrame,
    TotalsFrame,
    WayFrame,
    WorkerFrame,
    utc_now,
)
from appliance.measuring import Measuring
from appliance.request import ModelInfo, Request
from appliance.watch.alerts import Alerts, Change
from appliance.watch.energy import Energy
from appliance.watch.explain import QueueWaits, limit, slow_because, waits
from appliance.watch.telemetry import Telemetry, UsualTimes, worker_now
from engine.cache.blocks import BlockPool
from engine.schedule.roles_in_force import Roles
from engine.schedule.router import Router
from engine.schedule.sequence import Phase

# Readings of the router for a frame: pools, workers, queue, links.
# Invariant: counts of one part are of one moment; what is not reported is None.
# Never: changes anything that it reads.


_PHASE_ORDER = (
    *(Phase.QUEUED, Phase.PREFILLING, Phase.HANDING_OFF),
    *(Phase.PAUSED, Phase.DECODING),
)


def way_frames(roles: Roles) -> list[WayFrame]:
    """Each way that elastic roles have predicted, with what came of it."""
    closed = roles.outcomes.closed()
    return [
        WayFrame(
            route=way.pair.route,
            worker=way.worker,
            is_beside=way.is_beside,
            has_all=way.num_cores == len(roles.cores.all),
            step_tokens=way.size,
            num_judged=record.num_judged,
            num_missed=record.num_missed,
            num_gave_way=record.num_gave_way,
            error_ratio=math.exp(record.error) if record.num_judged else None,
            is_closed=way in closed,
        )
        for way, record in sorted(roles.outcomes.records.items())
    ]


def pool_frames(router: Router, live: Iterable[Request], block_bytes: int) -> list[PoolFrame]:
    """What each KV pool holds, and for whom."""
    live = list(live)
    return [
        _pool_frame(pool, _owners(router, live, name), block_bytes)
        for name, pool in router.ledger.pools.items()
    ]


def _owners(router: Router, live: list[Request], pool: str) -> list[OwnerFrame]:
    """Whose requests hold its blocks; those that only drain have no owner any more."""
    blocks: Counter[str] = Counter()
    requests: Counter[str] = Counter()
    for request in live:
        held = sum(len(router.ledger.table(s.seq_id, pool)) for s in request.sequences)
        if held:
            blocks[request.peer.name] += held
            requests[request.peer.name] += 1
    most = blocks.most_common(MAX_POOL_OWNERS)
    return [OwnerFrame(user, num_blocks, requests[user]) for user, num_blocks in most]


def _pool_frame(pool: BlockPool, owners: list[OwnerFrame], block_bytes: int) -> PoolFrame:
    """One pool's books; padding block 0 is left out."""
    counts = {str(state): count for state, count in pool.counts.items()}
    return PoolFrame(
        name=pool.name,
        num_blocks=pool.capacity,
        block_size=pool.block_size,
        block_bytes=block_bytes,
        owners=owners,
        holders=[HolderFrame(*each) for each in pool.index.held.most_common(MAX_POOL_OWNERS)],
        evicted=pool.index.num_evicted,
        **counts,
    )


def queue_frame(router: Router, now_ns: int) -> QueueFrame:
    """How many sequences are in each phase, and how full the queue is."""
    counts = dict.fromkeys(Phase, 0)
    at = router.at
    for sequence in chain(router.queue, at.paused.values(), at.holders()):
        counts[sequence.phase] += 1
    oldest_ns = min((s.stamps.arrived_ns for s in router.queue), default=None)
    return QueueFrame(
        queued=counts[Phase.QUEUED],
        prefilling=counts[Phase.PREFILLING],
        handing_off=counts[Phase.HANDING_OFF],
        paused=counts[Phase.PAUSED],
        decoding=counts[Phase.DECODING],
        max_queued=router.queue.max_sequences,
        oldest_queued_ms=None if oldest_ns is None else (now_ns - oldest_ns) / 1e6,
        num_owners=router.queue.num_owners,
        queued_tokens=router.queue.num_tokens,
        max_queued_tokens=router.queue.max_tokens,
    )


def waiting(router: Router, num_before_swap: int) -> QueueWaits:
    """What each sequence waits for, as it would be placed now, and who waits for another model."""
    if not router.roles.ready_workers:
        return QueueWaits(for_workers=len(router.queue), for_swap=num_before_swap)
    spare = router.growth.spare()
    num_fitting = sum(router.ways.fits(sequence, spare) for sequence in router.queue)
    num_others = len(router.queue) - num_fitting
    return QueueWaits(for_blocks=num_others, for_prefill=num_fitting, for_swap=num_before_swap)


def request_frame(
    request: Request, router: Router, placement: Placement, now_ns: int
) -> RequestFrame:
    """A request as it stands; its stages are those of its least advanced sequence."""
    open_sequences = [s for s in request.sequences if not s.is_finished]
    if open_sequences:
        shown = min(open_sequences, key=lambda s: _PHASE_ORDER.index(s.phase))
    else:
        shown = max(request.sequences, key=lambda s: s.stamps.finished_ns or 0)
    cut = stages(shown.stamps, shown.num_output_tokens)
    moved = [s.handoff_bytes for s in request.sequences if s.transport]
    end_ns = shown.stamps.finished_ns if request.is_finished else now_ns
    return RequestFrame(
        id=request.request_id,
        endpoint=request.endpoint,
        phase=str(shown.phase),
        model=request.model,
        user=request.peer.name,
        stream=request.is_stream,
        num_sequences=len(request.sequences),
        prompt_tokens=request.prompt_tokens,
        cached_tokens=request.cached_tokens,
        computed_tokens=request.computed_tokens,
        output_tokens=sum(s.num_output_tokens for s in request.sequences),
        max_tokens=sum(s.sampling.max_tokens for s in request.sequences),
        num_blocks=sum(
            len(router.ledger.table(s.seq_id, pool))
            for s in request.sequences
            for pool in router.ledger.pools
        ),
        worker=shown.last_worker,
        transport=next((s.transport for s in request.sequences if s.transport), None),
        received_at=request.received_at,
        age_ms=((end_ns or now_ns) - shown.stamps.arrived_ns) / 1e6,
        finish_reason=None if shown.finish_reason is None else str(shown.finish_reason),
        error=next((s.error for s in request.sequences if s.error), None),
        **asdict(cut),
        handoff_bytes=sum(moved) if moved else None,
        preemptions=sum(s.num_preemptions for s in request.sequences),
        restored_tokens=sum(s.num_restored_tokens for s in request.sequences),
        cancelled_by=request.cancelled_by,
        changes=request.changes,
        route=shown.route,
        route_reason=shown.route_reason,
        workers=",".join(shown.workers) or None,
        links=",".join(shown.links) or None,
        restore_reason=shown.restore_reason,
        prefill_j=request.prefill_j,
        decode_j=request.decode_j,
    )


# --------------------------------------------------------------------------------------------------


_STATES = {None: "ready", "draining": "draining", "model_loading": "loading"}


@dataclass(frozen=True, slots=True)
class ServiceState:
    """What a frame shows and only the service knows, at one moment."""

    reason: str | None
    """Why it is not ready; None if it is."""
    live: list[Request]
    """Oldest first."""
    totals: TotalsFrame
    """As far as the service counts."""
    log_rows_lost: int
    swaps: Swaps | None = None


class Frames:
    """Makes frames, records them, and hands them to those who wait."""

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
        """As it is served; a pool that turns out small shortens its requests."""
        self.measuring: Measuring | None = None
        """What is measured while idle; None: the model is loading."""
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
        self._started_ns = time.monotonic_ns()
        self._frame: Frame | None = None
        self._is_made = asyncio.Event()

    def change_model(
        self, plan: BootPlan, model: ModelInfo, router: Router, supervisor: Supervisor
    ) -> None:
        """Show another model from now on; numbers and counts go on."""
        self._plan, self.model, self._router, self._supervisor = plan, model, router, supervisor
        self.measuring = None
        self._telemetry.windows.forget_usual_ttft()

    def make(self, standing: ServiceState) -> list[Change]:
        """Take one reading and wake those who wait for it; which alerts it has changed."""
        now_ns = time.monotonic_ns()
        plan, telemetry, router = self._plan, self._telemetry, self._router
        states = list(self._supervisor.workers.values())
        elapsed_s = telemetry.interval_s(now_ns)
        workers = telemetry.workers(states, router, now_ns, elapsed_s)
        self._usual = telemetry.windows.usual(now_ns)
        devices = self._devices.read(now_ns)
        self.energy.settle(devices, self._devices.read_ns)
        frame = Frame(
            version=FRAME_VERSION,
            seq=1 if self._frame is None else self._frame.seq + 1,
            model=self.model.model_id,
            model_note=self.model.note,
            dtype=plan.dtype,
            max_model_len=self.model.max_model_len,
            transport=plan.placement.places.transport,
            pid=os.getpid(),
            workers=workers,
            devices=devices,
            energy=self.energy.frame(),
            host=telemetry.host(),
            handoff=telemetry.handoff(router, elapsed_s),
            links=telemetry.links(router, elapsed_s),
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
            **self._parts(standing, workers, now_ns),
        )
        changes = self._alerts.update(frame)
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
        """The frame that was made last."""
        assert self._frame is not None, "the service makes one before it is asked"
        return self._frame

    def now(self, standing: ServiceState) -> Frame:
        """Everything as it is now; rates, readings and alerts are those of the newest frame."""
        states = self._supervisor.workers
        workers = [
            worker_now(worker, states.get(worker.name), self._router)
            for worker in self.newest.workers
        ]
        parts = self._parts(standing, workers, time.monotonic_ns())
        return msgspec.structs.replace(self.newest, workers=workers, **parts)

    async def next_json(self, after_seq: int) -> tuple[int, bytes]:
        """Wait for a frame newer than `after_seq`."""
        while self._frame is None or self._frame.seq <= after_seq:
            await self._is_made.wait()
        return self._frame.seq, msgspec.json.encode(self._frame)

    def of_requests(self, requests: Iterable[Request], now_ns: int) -> list[RequestFrame]:
        """Requests as they stand."""
        told, frames = waits(self._router, now_ns), []
        for request in requests:
            frame = request_frame(request, self._router, self._plan.placement, now_ns)
            frame.slow_because = slow_because(frame, self._usual, request.swap_wait_ms)
            found = (told.get(sequence.seq_id) for sequence in request.sequences)
            if wait := next(filter(None, found), None):
                frame.waits_for, frame.behind, frame.behind_tokens = wait
            frames.append(frame)
        return frames

    def live(
        self, standing: ServiceState, now_ns: int, most: int | None = None
    ) -> list[RequestFrame]:
        """So many of the requests that have no reply yet, those last that wait for their model."""
        waiting = [] if standing.swaps is None else standing.swaps.requests(now_ns)
        return [*self.of_requests(standing.live[:most], now_ns), *waiting][:most]

    def _parts(
        self, standing: ServiceState, workers: list[WorkerFrame], now_ns: int
    ) -> dict[str, Any]:
        """The fields of a frame that are true at any time, not over an interval."""
        router, block_bytes = self._router, self._plan.placement.block_bytes
        swaps = None if standing.swaps is None else standing.swaps.frame()
        num_before_swap = 0 if swaps is None else swaps.num_waiting
        state, reason = _STATES.get(standing.reason, "degraded"), standing.reason or ""
        latency = self._telemetry.windows.latency(router.roles.slo, now_ns)
        return {
            "at": utc_now(),
            "uptime_s": (now_ns - self._started_ns) / 1e9,
            "state": state,
            "state_reason": reason,
            "queue": queue_frame(router, now_ns),
            "pools": pool_frames(router, standing.live, block_bytes),
            "latency": latency,
            "limit": limit(state, reason, waiting(router, num_before_swap), workers, latency),
            "totals": self._totals(standing),
            "requests": self.live(standing, now_ns, MAX_FRAME_REQUESTS),
            "num_requests": len(standing.live) + num_before_swap,
            "events": list(self._telemetry.events),
            "swaps": swaps,
            **({} if self._caches is None else self._caches.frames()),
            **roles_frame(router),
        }

    def _totals(self, standing: ServiceState) -> TotalsFrame:
        """The service's counts, and those that others keep."""
        counters = self._router.counters
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
            log_rows_lost=standing.log_rows_lost,
            routes=dict(self._router.roles.counts),
            ways=way_frames(self._router.roles),
        )
