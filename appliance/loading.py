"""Download a missing model while serving placeholders, and swap one model for another.

Owns: the process that pulls, and how far that is, in the words of /ready, console and journal; the
order in which workers end and start in a swap, and the way back if that fails.
Invariant: each of them ends: done, failed with its reason, or out of time.
Never: takes work before the model is there; decides where requests go.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec

from appliance.api.appliance import Readings
from appliance.configuration.config import ServeConfig
from appliance.fleet.boot import (
    BootPlan,
    check_files,
    facts_by_name,
    is_to_be_fetched,
    make_plan,
)
from appliance.fleet.supervisor import Supervisor
from appliance.fleet.swaps import Swap, SwapLimits, Swaps
from appliance.frame.histograms import Histograms
from appliance.frame.protocol import (
    FRAME_VERSION,
    EventFrame,
    Frame,
    HostFrame,
    LatencyFrame,
    QueueFrame,
    TotalsFrame,
    utc_now,
)
from appliance.keeper_channel import notify
from appliance.log.row import frame_of_row
from appliance.log.writer import RequestLog
from appliance.models.cache import download_text, hub_cache
from appliance.models.names import HubName
from appliance.process import read_in_thread
from appliance.residents import LOOK_S, LoadedModel, MemoryNeed, Residents, need_of
from appliance.service import Service
from engine.cache.hashes import PrefixHasher
from engine.errors import CheckpointError, PenstockError, Unavailable
from engine.offload.cache_memory import CacheMemory
from engine.schedule.router import Router
from engine.text.tokenizer import Tokenizer
from engine.units import part_text, size_text

# While its model is downloaded, the appliance answers but takes no work.
# Invariant: the download ends with the daemon, and when nothing waits for it.
# Never: imports huggingface_hub.


log = logging.getLogger("penstock")

PROGRAM = (sys.executable, "-P", "-m", "appliance.models.hub")
FRAME_S = 1.0
LOG_S = 5.0
EXTEND_US = 60_000_000
"""More time that systemd is asked for, again and again, while bytes come."""


class Fetching:
    """One download, and what clients see of it."""

    def __init__(self, name: HubName, request_log: RequestLog) -> None:
        self._name = name
        self._log = request_log
        self.event = request_log.event
        self.log_rows, self.log_events = request_log.rows, request_log.events
        self.log_usage, self.log_recording = request_log.usage, request_log.recording
        self._about = f"looking for {name} on the hub"
        self._total_bytes: int | None = None
        self._started_s = self._logged_s = time.monotonic()
        self._events = [EventFrame(utc_now(), "info", "model.fetching", self._about)]

    async def run(self) -> Path:
        """Download it; returns its folder. Cancelled, it ends the process.

        Raises:
            PenstockError: it cannot be had, as models.pull says.
        """
        log.info("%s", self._about)
        process = await asyncio.create_subprocess_exec(
            *PROGRAM, str(self._name), stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE, start_new_session=True,  # Ctrl-C is the daemon's
        )  # fmt: skip
        said: dict[str, Any] = {}
        try:
            assert process.stdout is not None
            async for line in process.stdout:
                said = json.loads(line)
                if "done_bytes" in said:
                    self._progressed(**said)
            await process.wait()
        finally:
            if process.returncode is None:
                process.terminate()
                await process.wait()
        if "folder" not in said:
            raise _error(said, process.returncode)
        log.info("downloaded %s in %.1f s", self._name, time.monotonic() - self._started_s)
        return Path(said["folder"])

    async def has_fetched(self, *, unless: asyncio.Event) -> bool:
        """Download it; False if something else came first.

        Raises:
            PenstockError: as run().
        """
        coming = asyncio.create_task(self.run())
        stopping = asyncio.create_task(unless.wait())
        try:
            await asyncio.wait({coming, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            coming.cancel()
        if not coming.done():
            with contextlib.suppress(asyncio.CancelledError):
                await coming
            return False
        coming.result()
        return True

    def _progressed(self, done_bytes: int, total_bytes: int, bytes_per_s: float) -> None:
        if self._total_bytes != total_bytes:
            self._total_bytes = total_bytes
            about = download_text(self._name, total_bytes, hub_cache(os.environ), os.environ)
            log.info("%s", about)
        self._about = (
            f"downloading {self._name}: {part_text(done_bytes, total_bytes)} "
            f"at {size_text(bytes_per_s)}/s"
        )
        now_s = time.monotonic()
        if now_s - self._logged_s >= LOG_S or done_bytes == total_bytes:
            self._logged_s = now_s
            log.info("%s", self._about)
            notify(STATUS=self._about, EXTEND_TIMEOUT_USEC=str(EXTEND_US))

    # What the api asks

    swaps = None
    hasher: PrefixHasher | None = None
    cache_contents = None
    max_per_request = max_tokens_per_request = 0

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise Unavailable(self._about, code="model_loading")

    def _nothing(self, *_: object, **__: object) -> None:
        return None

    model = tokenizer = property(_refuse)
    check_available = next_seq_id = submit = stop_sequence = close = cancel = _refuse
    drain = resume = set_roles = measurement = measure = _refuse
    check_room = queue_place = owner_of = request_frame = degraded_reason = _nothing

    def not_ready_reason(self) -> str:
        return self._about

    def request_frames(self) -> list[dict[str, object]]:
        return []

    def logged_frame(self, request_id: str) -> dict[str, object] | None:
        """Read a finished request of an earlier run from the log; blocks."""
        row = self._log.row(request_id)
        return None if row is None else msgspec.to_builtins(frame_of_row(row))

    def frame_json(self) -> bytes:
        """Encode a frame with the download's progress."""
        return msgspec.json.encode(self._frame())

    def readings(self) -> Readings:
        """Return the frame with empty histograms."""
        return Readings(self._frame(), Histograms(1))

    async def next_frame_json(self, after_seq: int) -> tuple[int, bytes]:
        """Wait for the next frame, which comes once a second."""
        if self._seq <= after_seq:
            await asyncio.sleep(FRAME_S)
        return self._seq, self.frame_json()

    @property
    def _seq(self) -> int:
        return 1 + int((time.monotonic() - self._started_s) / FRAME_S)

    def _frame(self) -> Frame:
        return Frame(
            version=FRAME_VERSION,
            at=utc_now(),
            seq=self._seq,
            uptime_s=time.monotonic() - self._started_s,
            state="loading",
            state_reason=self._about,
            model=str(self._name),
            model_note=None,
            dtype="",
            max_model_len=None,
            roles="",
            transport=None,
            pid=os.getpid(),
            queue=QueueFrame(0, 0, 0, 0, 0, None),
            workers=[],
            pools=[],
            latency=LatencyFrame(0.0, 0, None, None, None, None, None, None, None, None),
            totals=TotalsFrame(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
            devices=[],
            host=HostFrame(None, None, None, None, None),
            requests=[],
            num_requests=0,
            events=self._events,
            limit=self._about,
        )


def _error(said: dict[str, Any], code: int | None) -> PenstockError:
    """Turn the download process's last output into an error."""
    words = said.get("error")
    if words is None:
        hint = "see its output above"
        return PenstockError(f"the download ended with exit code {code}", hint=hint)
    if said.get("exit_code") == CheckpointError.exit_code:
        return CheckpointError(words["what"], where=words["where"], hint=words["hint"])
    error = PenstockError(words["what"], where=words["where"], hint=words["hint"])
    error.exit_code = said.get("exit_code", error.exit_code)  # as `models pull` ends
    return error


# Another model in place of the one that is served, and the old one back if that fails.
# Invariant: when a swap returns, a model is served.
# Never: decides which model is next or when: that is swaps.


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
        service: Service,
        request_log: RequestLog,
        *,
        memory: CacheMemory,
        residents: Residents,
        served: Callable[[], LoadedModel],
        park: Callable[[], Awaitable[LoadedModel | None]],
        resume: Callable[[LoadedModel], None],
        start: Callable[[BootPlan], tuple[Router, Supervisor]],
        stop: Callable[[], Awaitable[None]],
        load: Callable[[], Awaitable[object]],
    ) -> None:
        """Serve what is served.

        Args:
            config: the settings as they are; a reload changes some.
            service: is told which model it serves.
            request_log: of downloads.
            memory: of the DRAM cache, which outlives each model.
            residents: models that are loaded and not served.
            served: returns the served model.
            park: leaves the served model loaded and returns it; None: its workers are not idle.
            resume: serves a loaded model again.
            start: spawns the workers of a plan.
            stop: ends the workers that there are.
            load: waits until the workers are ready and the caches are open.
        """
        self._service, self._request_log = service, request_log
        self._start, self._stop, self._load = start, stop, load
        self._config, self._memory = config, memory
        self._residents, self._served, self._park, self._resume = residents, served, park, resume
        self._needs: dict[str, MemoryNeed] = {}
        first = service.model.model_id
        self._configs = {first: config(), **config().models}
        self._being_read: list[str] = []
        """Models whose folders a thread is reading."""
        self.swaps = Swaps(
            first,
            list(self._configs),
            prepare=self._prepare,
            idle=service.idle,
            limits=self._limits,
            refused=service.refused_before_queue,
            aliases=config().model_aliases,
            residents=residents,
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
                await Fetching(config.model, self._request_log).run()
            if name in self._being_read:
                raise PenstockError("its folder does not answer; an earlier reader still hangs")
            tokenizer = await self._read(name, partial(check_files, config))
            if (served := self._served()).is_on_cores:
                freed_bytes = self._residents.held_bytes(served)
                look = partial(need_of, config, self._memory, freed_bytes)
                need = await self._read(name, look)
                self._residents.check(served, name, need)
                self._needs[name] = need
        except (PenstockError, OSError) as error:
            self._tell_failed(name, str(error))
            raise
        return partial(self._swap, name, tokenizer)

    async def _read(
        self, name: str, read: Callable[[], T], late: Callable[[T], None] = lambda _: None
    ) -> T:
        """Read a model's folder; it stays in _being_read while the disk hangs."""

        def read_noted() -> T:
            self._being_read.append(name)
            try:
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
        """Serve the model that was there before: it did, so what ended it now may be over soon."""
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
        if keeps_served and await self._is_room_for(name) and (model := await self._park()):
            self._residents.park(model)
        else:
            await self._stop()
        self._residents.served_used_s = time.monotonic()
        if (resident := self._residents.take(name)) is not None:
            self._resume(resident)
        else:
            await self._start_again(name, tokenizer)
        self._service.make_frame()

    async def _is_room_for(self, name: str) -> bool:
        """Say whether another model can be loaded beside the served one; unload others for it."""
        if name in self._residents.parked:
            return True
        need = self._needs.get(name)
        return need is not None and await self._residents.make_room(self._served(), name, need)

    async def _start_again(self, name: str, tokenizer: Tokenizer) -> None:
        plan = await self._read(name, partial(self._plan, name), BootPlan.close)
        router, supervisor = self._start(plan)
        self._service.change_model(plan, router, supervisor, tokenizer)
        await self._load()

    def _plan(self, name: str) -> BootPlan:
        """Plan a model with the roles that an operator set."""
        plan = make_plan(self._configs[name], memory=self._memory)
        roles = plan.roles if plan.placement.topology.is_colocated else self._service.frame.roles
        others = {other: each for other, each in self._configs.items() if other != name}
        return replace(plan, model_id=name, roles=roles, others=facts_by_name(others))
