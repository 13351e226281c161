"""Run the model that is served: start its workers and router, load it, park or end it.

Invariant: reports of a parked model's workers never reach the service.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from functools import partial

from appliance.configuration.settings import ServeConfig
from appliance.daemon.models.residents import LoadedModel, Residents
from appliance.daemon.process.disk_reads import SILENT_S, read_in_thread
from appliance.daemon.serving.service import Service
from appliance.fleet.boot import BootPlan
from appliance.fleet.kept_proofs import keep_proofs
from appliance.fleet.kv_caches import KvCaches
from appliance.fleet.measuring import LOOK_S, Measuring
from appliance.fleet.own_cpus import OWN_CPUS
from appliance.fleet.placement import Placement, decode_cpus
from appliance.fleet.roles_change import RolesChange, change_roles
from appliance.fleet.supervisor import Supervisor
from appliance.observe.telemetry.disturbances import Disturbances
from engine.errors import PenstockError
from engine.scheduler.cache.ledger import Ledger
from engine.scheduler.cache.prefix_misses import PrefixMisses
from engine.scheduler.cache.topology import DECODE, PREFILL
from engine.scheduler.queue.queue import FairQueue
from engine.scheduler.router import Router
from engine.text.reading import READER
from engine.wire.messages import CoresUsed, Report

log = logging.getLogger("penstock")

PARK_S = 2.0
"""Maximum wait for the workers of a model that is to stay loaded."""
PARK_POLL_S = 0.01


class ModelInService:
    """The served model; a swap puts another in its place."""

    plan: BootPlan
    router: Router
    supervisor: Supervisor
    measuring: Measuring
    service: Service
    """It outlives each model; the daemon sets it after the first start."""

    def __init__(self, config: Callable[[], ServeConfig], stacks_fd: int) -> None:
        """Serve nothing yet.

        Args:
            config: returns the settings, of which a reload changes some.
            stacks_fd: the file that workers write their stacks to on request.
        """
        self._config, self._stacks_fd = config, stacks_fd
        self.caches = KvCaches(config(), lambda *event: self.service.event(*event))
        self.residents: Residents | None = None
        """Other models that are loaded; None: only one is served."""
        self._misses = PrefixMisses()
        self._has_workers = False
        self._kept_off: Placement | None = None
        """The workers whose cores are left to decode."""
        self._kept_proofs: set[str] = set()
        """Keys of the proofs that this daemon has written down."""

    def start(self, plan: BootPlan) -> None:
        """Spawn the workers of a plan, and make their router."""
        self.plan, topology = plan, plan.placement.topology
        self.supervisor = Supervisor(
            plan.workers,
            plan.inherited_fds,
            on_report=partial(self._on_report, plan),
            on_ready=partial(self._on_ready, plan),
            on_died=partial(self._on_died, plan),
            on_lost=partial(self._on_lost, plan),
            stacks_fd=self._stacks_fd,
            behind={*topology.playing(PREFILL)} - {*topology.playing(DECODE)},
        )
        self.supervisor.spawn_all()
        self._has_workers = True
        self.router = self._make_router()
        self.measuring = Measuring(
            plan, self.router, self.supervisor.send, _core_watch(plan, self.supervisor)
        )

    def _make_router(self) -> Router:
        plan, config, supervisor = self.plan, self._config(), self.supervisor
        placement = plan.placement
        router = Router(
            placement.topology,
            Ledger(placement.pools()),
            FairQueue(config.max_queued, config.max_queued_tokens),
            send=supervisor.send,
            emit=lambda *tokens: self.service.emit(*tokens),
            max_num_batched_tokens=placement.max_num_batched_tokens,
            roles=plan.roles,
            # on a GPU they only launch steps, and nothing is gained by lending them;
            # a group's processes have each their own
            cores={
                w.name: () if w.gpu is not None or w.ranks else w.cpus for w in placement.workers
            },
            profile=None if plan.known is None else plan.known.profile,
            misses=self._misses,
        )
        router.set_weights(dict(config.priorities))
        change_roles(router, self.targets(), time.monotonic_ns())
        return router

    def targets(self) -> RolesChange:
        """Return the latency targets of the settings; the roles stay as they are."""
        config = self._config()
        return RolesChange(None, config.slo_ttft_ms, config.slo_itl_ms)

    async def load(self) -> None:
        """Wait until all workers are ready and the caches are open."""
        self.service.availability.is_preparing = True
        keying = asyncio.create_task(self.service.rekey(self._config(), self.plan))
        telling = asyncio.create_task(self._tell_what_is_awaited(keying))
        try:
            await asyncio.gather(self.supervisor.run(), keying)
            await self._keep_weights()
            hasher = self.service.hasher
            if self.plan.kept_pools is not None and hasher is not None:
                pools = self.router.tier_host.ledger.pools
                self.plan.kept_pools.adopt(pools, hasher.fingerprint, self.service.event)
            await self.caches.open(self.plan, hasher, self.router, self.supervisor)
        finally:
            keying.cancel()  # the next model has a key of its own
            telling.cancel()
        self.service.begin(self.measuring)

    async def _keep_weights(self) -> None:
        """Finish the file of packed weights for later starts; without it this one serves."""
        file = self.plan.weights_file
        if file is None or file.is_whole:
            return
        try:
            await read_in_thread(f"the disk of {file.path}", file.finish, log.warning)
        except (OSError, PenstockError) as error:
            about = f"weights are packed again at the next start: {error}"
            self.service.event("warning", "weights.not_kept", about)

    async def _tell_what_is_awaited(self, keying: asyncio.Task[None]) -> None:
        """Log the state of a long start after silence, less and less often."""
        silence_s = SILENT_S
        while True:
            await asyncio.sleep(silence_s)
            awaited = self.supervisor.awaited(silence_s)
            if not keying.done():
                awaited.append("hashes of the weights (kept for the next start)")
            elif self.supervisor.is_started:
                awaited.append("the caches")
            if awaited:
                log.info("Waiting for %s...", ", ".join(awaited))
                silence_s *= 2

    def loaded(self) -> LoadedModel:
        """Return the served model with all its parts that a swap replaces."""
        return LoadedModel(
            self.plan,
            self.router,
            self.supervisor,
            self.measuring,
            self.service.tokenizer,
            self.service.hasher,
        )

    async def park(self) -> LoadedModel | None:
        """Leave the served model loaded, and return it; None: its workers are not idle in time."""
        self.measuring.stop()
        self.caches.drop_waiting()
        end_s = time.monotonic() + PARK_S
        while not self.router.is_idle:
            if time.monotonic() >= end_s:
                return None
            await asyncio.sleep(PARK_POLL_S)
        if any(worker.state != "ready" for worker in self.supervisor.workers.values()):
            return None
        await self.caches.close()
        self.router.detach_tiers()
        self._has_workers = False
        return self.loaded()

    def resume(self, model: LoadedModel) -> None:
        """Serve a parked model again; its caches open while it serves."""
        self.plan, self.router = model.plan, model.router
        self.supervisor, self.measuring = model.supervisor, model.measuring
        self._has_workers = True
        config, roles = self._config(), self.service.frame.roles
        self.service.change_model(model.plan, model.router, model.supervisor, model.tokenizer)
        self.service.hasher = model.hasher
        model.router.set_queue(config.max_queued, config.max_queued_tokens)
        model.router.set_weights(dict(config.priorities))
        if not model.plan.placement.topology.is_colocated:
            change_roles(model.router, RolesChange(roles), time.monotonic_ns())
        self.caches.open_meanwhile(model.plan, model.hasher, model.router, model.supervisor)
        self.service.begin(model.measuring)

    async def make_way(self) -> None:
        """End the served model for another; the caches keep its recently used blocks."""
        await self.caches.flush(is_end=False)
        await self._end_workers()

    async def close(self) -> None:
        """End all models, and give back the memory of the caches."""
        if self.residents is not None:
            await self.residents.close()
        await self._end_workers()
        self.caches.memory.close()

    async def _end_workers(self) -> None:
        if not self._has_workers:
            return
        await self.caches.close()
        await end_model(self)
        self._has_workers = False

    async def measure(self) -> None:
        """Measure step times while no request is live, where nothing of ours disturbs decode."""
        while True:
            await asyncio.sleep(LOOK_S)
            self._keep_off_decode()
            self.measuring.look(is_idle=self.service.is_quiet)
            await self.measuring.save_when_due()
            await self._keep_proofs()

    def _keep_off_decode(self) -> None:
        """Keep the daemon off the cores that only decode uses, while roles are static.

        Else it would run there whenever prefill's cores are busy, and decode's steps would wait.
        """
        is_static = self.router.roles_now().roles == "static"
        is_wanted = is_static and not self.service.availability.is_loading
        placement = self.plan.placement if is_wanted else None
        if placement is self._kept_off:
            return
        self._kept_off = placement
        cpus = decode_cpus(placement, OWN_CPUS.usable()) if placement is not None else frozenset()
        try:
            OWN_CPUS.keep_off(cpus, READER.pid)
        except OSError as error:
            log.warning("The daemon may disturb decode: %s", error)

    async def _keep_proofs(self) -> None:
        """Write down what self-tests have found, so that the next start repeats none."""
        told = [worker.ready for worker in self.supervisor.workers.values()]
        proofs = [ready.proof for ready in told if ready is not None and ready.proof is not None]
        new = [proof for proof in proofs if proof.key not in self._kept_proofs]
        if new:
            self._kept_proofs.update(proof.key for proof in new)
            await asyncio.to_thread(keep_proofs, self._config().state_dir, new)

    def _parked(self, plan: BootPlan) -> LoadedModel | None:
        return None if self.residents is None else self.residents.of_plan(plan)

    def _on_report(self, plan: BootPlan, worker: str, report: Report) -> None:
        if (parked := self._parked(plan)) is not None:
            if isinstance(report, CoresUsed):
                parked.router.cores_used(worker, report)
            return
        self.service.worker_reported(worker, report)
        self.measuring.reported(worker, report)

    def _on_ready(self, plan: BootPlan, worker: str) -> None:
        if self._parked(plan) is None:
            self.service.worker_ready(worker)

    def _on_lost(self, plan: BootPlan, worker: str, about: str) -> None:
        if self._parked(plan) is None:
            self.service.worker_lost(about)

    def _on_died(self, plan: BootPlan, worker: str, about: str) -> None:
        if (parked := self._parked(plan)) is not None:
            parked.fault = about
            return
        self.service.worker_died(worker, about)
        self.measuring.died(worker)


def _core_watch(plan: BootPlan, supervisor: Supervisor) -> Callable[[], bool]:
    """Return what reports other programs on the workers' cores since its last call."""
    on_cores = (worker for worker in plan.placement.workers if worker.gpu is None)
    seen = Disturbances(cpus={cpu for worker in on_cores for cpu in worker.cpus})

    def is_disturbed() -> bool:
        pids = [pid for worker in supervisor.workers.values() for pid in worker.pids]
        return seen.look([os.getpid(), *pids], time.monotonic())

    return is_disturbed


async def end_model(model: ModelInService | LoadedModel) -> None:
    """End a model's workers, and free its memory."""
    await model.supervisor.stop()
    await model.measuring.save()
    model.router.unloaded()
    model.plan.close()
