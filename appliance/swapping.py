"""Another model in place of the one that is served, and the old one back if that fails.

Owns: the order in which workers end, start and are told of.
Invariant: when a swap returns, a model is served.
Never: decides which model is next or when: that is swaps.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

from appliance.configuration.config import ServeConfig
from appliance.fetching import Fetching
from appliance.fleet.boot import BootPlan, check_files, is_to_be_fetched, make_plan
from appliance.fleet.supervisor import Supervisor
from appliance.fleet.swaps import SwapLimits, Swaps
from appliance.log.request_log import RequestLog
from appliance.models.names import HubName
from appliance.service import Service
from engine.errors import PenstockError
from engine.schedule.router import Router
from engine.text.tokenizer import Tokenizer

BYTES_PER_TOKEN = 4
"""Of a body: what waits for another model has not been tokenized yet."""
BACK_AFTER_S = (1, 2, 4, 8)
"""Between attempts to bring the last model back; after them the daemon ends with the error."""


class Swapping:
    """Swaps, done with the daemon's workers."""

    def __init__(
        self,
        config: Callable[[], ServeConfig],
        service: Service,
        request_log: RequestLog,
        *,
        start: Callable[[BootPlan], tuple[Router, Supervisor]],
        stop: Callable[[], Awaitable[None]],
        load: Callable[[], Awaitable[object]],
    ) -> None:
        """Serve what is served.

        Args:
            config: the settings as they are; a reload changes some.
            service: is told which model it serves.
            request_log: of downloads.
            start: spawns the workers of a plan.
            stop: ends the workers that there are.
            load: waits until the workers are ready and have rehearsed.
        """
        self._service, self._request_log = service, request_log
        self._start, self._stop, self._load = start, stop, load
        self._config = config
        first = service.model.model_id
        self._configs = {first: config(), **config().models}
        self.swaps = Swaps(
            first,
            list(self._configs),
            prepare=self._prepare,
            swap=self._swap,
            idle=service.idle,
            limits=self._limits,
            refused=service.refused_before_queue,
        )

    def _limits(self) -> SwapLimits:
        config = self._config()
        num_bytes = BYTES_PER_TOKEN * config.max_queued_tokens
        return SwapLimits(config.min_stay_s, config.max_queued, num_bytes, config.max_queue_wait_s)

    async def _prepare(self, name: str) -> None:
        config = self._configs[name]
        if isinstance(config.model, HubName) and is_to_be_fetched(config.model):
            await Fetching(config.model, self._request_log).run()
        await asyncio.to_thread(check_files, config)

    async def _swap(self, name: str) -> str | None:
        """Serve another model; None, or why it is still the old one.

        Raises:
            PenstockError: the old one could not be started again either.
        """
        before, began_s = self.swaps.current, time.monotonic()
        self._service.event("info", "model.swapping", f"{name} takes the place of {before}")
        self._service.availability.is_rehearsing = True  # until it has
        try:
            await self._serve(name)
        except (PenstockError, OSError) as error:
            about = str(error)
            self._service.event("error", "model.swap_failed", f"{name} cannot be served: {about}")
            await self._return_to(before)
            took_s = time.monotonic() - began_s
            self._service.event("info", "model.back", f"serving {before} again, {took_s:.1f} s on")
            return about
        took_s = time.monotonic() - began_s
        done = f"serving {name} in place of {before}, swapped in {took_s:.1f} s"
        self._service.event("info", "model.swapped", done)
        return None

    async def _return_to(self, name: str) -> None:
        """Serve the model that was there before: it did, so what ended it now may be over soon."""
        for wait_s in BACK_AFTER_S:
            try:
                await self._serve(name)
                return
            except (PenstockError, OSError) as error:
                about = f"{name} did not come back, and is tried again in {wait_s} s: {error}"
                self._service.event("error", "model.back_failed", about)
                await asyncio.sleep(wait_s)
        await self._serve(name)

    async def _serve(self, name: str) -> None:
        """End the workers that there are, and start those of a model."""
        await self._stop()
        plan = await asyncio.to_thread(self._plan, name)
        router, supervisor = self._start(plan)
        tokenizer = await asyncio.to_thread(Tokenizer.from_folder, plan.checkpoint.folder)
        self._service.change_model(plan, router, supervisor, tokenizer)
        await self._load()
        self._service.make_frame()

    def _plan(self, name: str) -> BootPlan:
        """With the roles that an operator may have changed."""
        plan = make_plan(self._configs[name])
        roles = plan.roles if plan.placement.places.is_colocated else self._service.frame.roles
        others = tuple(other for other in self._configs if other != name)
        return replace(plan, model_id=name, roles=roles, others=others)
