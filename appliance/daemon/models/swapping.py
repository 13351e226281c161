"""Replace the served model by another, and bring the old one back if that fails.

Invariant: when a swap returns, a model is served.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from appliance.configuration.settings import ServeConfig
from appliance.daemon.models.loading import Fetching
from appliance.daemon.models.model_in_service import ModelInService
from appliance.daemon.models.residents import LOOK_S, MemoryNeed, Residents, need_of
from appliance.daemon.process.disk_reads import read_in_thread
from appliance.fleet.boot import BootPlan, make_plan
from appliance.fleet.boot_check import check_files
from appliance.fleet.failed_models import FailedModels
from appliance.fleet.model_files import (
    FilesStamp,
    facts_by_name,
    files_stamp,
    is_to_be_fetched,
)
from appliance.fleet.swaps import Swap, SwapLimits, Swaps
from appliance.hub.names import HubName
from appliance.observe.log.writer import RequestLog
from engine.errors import PenstockError, reading_model
from engine.text.tokenizer import Tokenizer
from engine.text.tokenizer_fit import MISFIT_CODE

T = TypeVar("T")

BYTES_PER_TOKEN = 4
"""Estimated bytes of a body per token; a request that waits for a swap is not tokenized."""
BACK_AFTER_S = (1, 2, 4, 8)
"""Between attempts to bring the last model back; after them the daemon ends with the error."""


class Swapping:
    """Swaps, done with the daemon's workers."""

    def __init__(
        self,
        config: Callable[[], ServeConfig],
        request_log: RequestLog,
        served: ModelInService,
        residents: Residents,
    ) -> None:
        """Begin with the model that is served.

        Args:
            config: the settings as they are; a reload changes some.
            served: the served model, with its service.
            residents: models that are loaded and not served.
        """
        self._config, self._request_log = config, request_log
        self._served, self._service, self._residents = served, served.service, residents
        self._needs: dict[str, MemoryNeed] = {}
        self._stamps: dict[str, FilesStamp] = {}
        """Stamps of the files of each model that was checked, from before the check."""
        first = self._service.model.model_id
        self._configs = {first: config(), **config().models}
        self._being_read: list[str] = []
        """Models whose folders a thread is reading."""
        self._being_compared: list[str] = []
        """Models whose files a thread compares with their stamps."""
        self.swaps = Swaps(
            first,
            list(self._configs),
            prepare=self._prepare,
            idle=self._service.idle,
            limits=self._limits,
            refused=self._service.refused_before_queue,
            aliases=config().model_aliases,
            residents=residents,
            failed=FailedModels(self._has_changed),
        )

    def _limits(self) -> SwapLimits:
        config = self._config()
        num_bytes = BYTES_PER_TOKEN * config.max_queued_tokens
        return SwapLimits(config.min_stay_s, config.max_queued, num_bytes, config.max_queue_wait_s)

    async def run_until(self, stopping: asyncio.Task[bool]) -> None:
        """Swap models and unload unused ones until `stopping` is done.

        Raises:
            PenstockError: neither the next model nor the last one could be started.
        """
        keeping = asyncio.create_task(self._keep())
        try:
            await self.swaps.run_until(stopping)
        finally:
            keeping.cancel()

    async def _keep(self) -> None:
        """Unload what was unused for long enough, and serve the first model instead if need be."""
        while True:
            if self.swaps.next is None:
                await self._residents.expire()
            if self.swaps.is_busy:
                self._residents.served_used_s = time.monotonic()
            elif self._residents.has_expired(self.swaps.current):
                self.swaps.go_home()
            await asyncio.sleep(LOOK_S)

    async def _prepare(self, name: str) -> Swap:
        config, parked = self._configs[name], self._residents.parked
        if name in parked:
            return partial(self._swap, name, parked[name].tokenizer)
        try:
            if isinstance(config.model, HubName) and is_to_be_fetched(config.model):
                await Fetching([config.model], self._request_log).run()
            if name in self._being_read:
                raise PenstockError("its folder does not answer; an earlier reader still hangs")
            tokenizer, misfits = await self._read(name, partial(self._check_files, name))
            for about in misfits:
                self._service.event("warning", MISFIT_CODE, f"{name}: {about}")
            if (served := self._served.loaded()).is_on_cores:
                freed_bytes = self._residents.held_bytes(served)
                look = partial(need_of, config, self._served.caches.memory, freed_bytes)
                need = await self._read(name, look)
                self._residents.check(served, name, need)
                self._needs[name] = need
        except (PenstockError, OSError) as error:
            self._tell_failed(name, str(error))
            raise
        return partial(self._swap, name, tokenizer)

    def _check_files(self, name: str) -> tuple[Tokenizer, list[str]]:
        self._stamps[name] = files_stamp(self._configs[name].model)
        return check_files(self._configs[name])

    async def _has_changed(self, name: str) -> bool:
        """Say whether a model's files have changed since the last check."""
        if name in self._being_compared or name not in self._stamps:
            return False

        def look() -> bool:
            self._being_compared.append(name)
            try:
                return files_stamp(self._configs[name].model) != self._stamps[name]
            finally:
                self._being_compared.remove(name)

        try:
            return await read_in_thread(f"the model folder of {name}", look, self._waits)
        except PenstockError:  # the disk hangs
            return False

    async def _read(
        self, name: str, read: Callable[[], T], late: Callable[[T], None] = lambda _: None
    ) -> T:
        """Read a model's folder; it stays in _being_read while the disk hangs."""

        def read_noted() -> T:
            self._being_read.append(name)
            try:
                with reading_model(name):
                    return read()
            finally:
                self._being_read.remove(name)

        return await read_in_thread(f"the model folder of {name}", read_noted, self._waits, late)

    def _tell_failed(self, name: str, about: str) -> None:
        self._service.event("error", "model.swap_failed", f"{name} cannot be served: {about}")

    def _waits(self, about: str) -> None:
        self._service.event("warning", "model.slow", about)

    async def _swap(self, name: str, tokenizer: Tokenizer) -> str | None:
        """Serve another model; None, or why it is still the old one.

        Raises:
            PenstockError: the old one could not be started again either.
        """
        before, tokenizer_before = self.swaps.current, self._service.tokenizer
        began_s = time.monotonic()
        self._service.event("info", "model.swapping", f"{name} takes the place of {before}")
        self._service.availability.is_preparing = True  # until begin()
        try:
            await self._serve(name, tokenizer)
        except (PenstockError, OSError) as error:
            about = str(error)
            self._tell_failed(name, about)
            await self._return_to(before, tokenizer_before)
            took_s = time.monotonic() - began_s
            self._service.event("info", "model.back", f"serving {before} again, {took_s:.1f} s on")
            return about
        took_s = time.monotonic() - began_s
        done = f"serving {name} in place of {before}, swapped in {took_s:.1f} s"
        self._service.event("info", "model.swapped", done)
        return None

    async def _return_to(self, name: str, tokenizer: Tokenizer) -> None:
        """Serve the earlier model again; it ran before, so what hinders it may soon be over."""
        for wait_s in BACK_AFTER_S:
            try:
                await self._serve(name, tokenizer, keeps_served=False)
                return
            except (PenstockError, OSError) as error:
                about = f"{name} failed to load again; next try in {wait_s} s: {error}"
                self._service.event("error", "model.back_failed", about)
                await asyncio.sleep(wait_s)
        await self._serve(name, tokenizer, keeps_served=False)

    async def _serve(self, name: str, tokenizer: Tokenizer, *, keeps_served: bool = True) -> None:
        """Park or stop the served model, and serve another, which may be loaded already."""
        await self._residents.unload_faulty()
        if keeps_served and await self._is_room_for(name) and (model := await self._served.park()):
            self._residents.park(model)
        else:
            await self._served.make_way()
        self._residents.served_used_s = time.monotonic()
        if (resident := self._residents.give_away(name)) is not None:
            self._served.resume(resident)
        else:
            await self._start_again(name, tokenizer)
        self._service.make_frame()

    async def _is_room_for(self, name: str) -> bool:
        """Say whether another model can be loaded beside the served one; unload others for it."""
        if name in self._residents.parked:
            return True
        need = self._needs.get(name)
        if need is None:
            return False
        return await self._residents.make_room(self._served.loaded(), name, need)

    async def _start_again(self, name: str, tokenizer: Tokenizer) -> None:
        plan = await self._read(name, partial(self._plan, name), BootPlan.close)
        served = self._served
        served.start(plan)
        self._service.change_model(plan, served.router, served.supervisor, tokenizer)
        await served.load()

    def _plan(self, name: str) -> BootPlan:
        """Plan a model with the roles that an operator set."""
        plan = make_plan(self._configs[name], memory=self._served.caches.memory)
        roles = plan.roles if plan.placement.topology.is_colocated else self._service.frame.roles
        others = {other: each for other, each in self._configs.items() if other != name}
        return replace(plan, model_id=name, roles=roles, others=facts_by_name(others))
