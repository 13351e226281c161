"""Keep models loaded that are not served, within their number, their memory and their time.

A parked model's workers wait for commands: they use no core, and keep weights and KV as they are.

Invariant: a parked model has no open command; the first model and one that a request asked to keep
stay until their room is needed; what makes room is unloaded before another model is loaded.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple

from appliance.configuration.settings import ServeConfig
from appliance.fleet.boot import BootPlan
from appliance.fleet.measuring import Measuring
from appliance.fleet.placed_model import predict_place
from appliance.fleet.placement import available_memory_bytes
from appliance.fleet.supervisor import Supervisor
from appliance.fleet.weights_offload import WORKER_BYTES
from appliance.observe.frame.protocol import ResidentFrame, iso_time
from engine.errors import ConfigError
from engine.scheduler.cache.hashes import PrefixHasher
from engine.scheduler.offload.cache_memory import CacheMemory
from engine.scheduler.router import Router
from engine.text.tokenizer import Tokenizer
from engine.units import size_text

LOOK_S = 0.5
LONGEST_S = 100 * 366 * 86_400.0
"""A time farther away is never: the calendar ends in the year 9999."""


class MemoryNeed(NamedTuple):
    """The memory that a model takes."""

    own_bytes: int
    """Pools, converted weights and processes."""
    mapped_bytes: int
    """Weights that are mapped from their files, which the kernel may drop and read again."""


def need_of(config: ServeConfig, memory: CacheMemory, freed_bytes: int) -> MemoryNeed:
    """Predict the memory of a model that is to be loaded.

    Args:
        freed_bytes: memory that the end of all loaded models would free.

    Raises:
        ConfigError: it cannot be served here.
    """
    placed = predict_place(config, memory, freed_bytes)
    pools = placed.placement.topology.pools
    own_bytes = sum(pool.num_blocks for pool in pools) * placed.placement.block_bytes
    own_bytes += len(placed.placement.workers) * WORKER_BYTES
    layout = placed.weights.layout
    if placed.offload is not None:
        return MemoryNeed(own_bytes, placed.offload.held_bytes)
    if layout is None:
        return MemoryNeed(own_bytes, placed.checkpoint.num_bytes)
    return MemoryNeed(own_bytes + layout.num_bytes, 0)


@dataclass(slots=True, eq=False)
class LoadedModel:
    """A model with its workers, served or parked."""

    plan: BootPlan
    router: Router
    supervisor: Supervisor
    measuring: Measuring
    tokenizer: Tokenizer
    hasher: PrefixHasher | None
    used_s: float = 0.0
    """When it was last used, on the monotonic clock, if it is parked."""
    fault: str = ""
    """Why it cannot be served any more; empty: it can."""

    @property
    def is_on_cores(self) -> bool:
        """Whether none of its workers is on a GPU, whose memory is not counted here."""
        return all(worker.gpu is None for worker in self.plan.placement.workers)

    @property
    def size_bytes(self) -> int:
        """Return the bytes of its weights and pools."""
        pools = self.plan.placement.topology.pools
        pool_bytes = sum(pool.num_blocks for pool in pools) * self.plan.placement.block_bytes
        return pool_bytes + self.plan.checkpoint.num_bytes

    @property
    def held_bytes(self) -> int:
        """Return the memory that its end would free."""
        held = sum(os.fstat(fd).st_blocks * 512 for fd in self._own_fds)
        return held + len(self.plan.workers) * WORKER_BYTES

    @property
    def unclaimed_bytes(self) -> int:
        """Return the memory that it may still take: KV, and weights mapped from files."""
        stats = [os.fstat(fd) for fd in self._own_fds]
        left = sum(max(stat.st_size - stat.st_blocks * 512, 0) for stat in stats)
        if self.plan.offload is not None:
            return left + self.plan.offload.held_bytes
        is_mapped = all(setup.weights is None for _, setup in self.plan.workers)
        return left + (self.plan.checkpoint.num_bytes if is_mapped else 0)

    @property
    def _own_fds(self) -> list[int]:
        arena, file = self.plan.arena, self.plan.weights_file
        others = {None if arena is None else arena.fd, None if file is None else file.fd}
        return [fd for fd in self.plan.inherited_fds if fd not in others]


class Residents:
    """The parked models of a daemon.

    Args:
        first: the model that was served first.
        config: returns the settings, of which a reload changes some.
        end: ends a model's workers, and frees its memory.
        tell: takes severity, code and message of an event.
    """

    def __init__(
        self,
        first: str,
        config: Callable[[], ServeConfig],
        memory: CacheMemory,
        end: Callable[[LoadedModel], Awaitable[None]],
        tell: Callable[[str, str, str], None],
    ) -> None:
        self.parked: dict[str, LoadedModel] = {}
        """Parked models by name, the one unused longest first."""
        self._first, self._config, self._memory = first, config, memory
        self._end, self._tell = end, tell
        self.served_used_s = time.monotonic()
        """When the served model was last in use, on the monotonic clock."""
        self._asked_s: dict[str, float] = {}
        """How long requests asked models to stay."""

    def keep_loaded(self, name: str, keep_s: float) -> None:
        """Let a model stay for so long after its last use, as a request asked."""
        self._asked_s[name] = keep_s

    def keep_s(self, name: str) -> float:
        """Return how long a model stays unused."""
        default_s = math.inf if name == self._first else self._config().keep_alive_s
        return self._asked_s.get(name, default_s)

    def has_expired(self, name: str) -> bool:
        """Say whether the served model was unused for as long as a request asked it to stay."""
        return time.monotonic() - self.served_used_s >= self._asked_s.get(name, math.inf)

    def served_expires_at(self, name: str) -> str | None:
        return _time_in(self.served_used_s + self._asked_s.get(name, math.inf))

    def park(self, model: LoadedModel) -> None:
        """Keep the model that was served."""
        model.used_s = self.served_used_s
        self.parked[model.plan.model_id] = model

    def give_away(self, name: str) -> LoadedModel | None:
        """Give a parked model away to be served; None: it is not parked."""
        return self.parked.pop(name, None)

    def of_plan(self, plan: BootPlan) -> LoadedModel | None:
        """Return the parked model that was loaded by a plan."""
        model = self.parked.get(plan.model_id)
        return model if model is not None and model.plan is plan else None

    def held_bytes(self, served: LoadedModel) -> int:
        """Return the memory that the end of all loaded models would free."""
        return sum(model.held_bytes for model in (served, *self.parked.values()))

    def check(self, served: LoadedModel, name: str, need: MemoryNeed) -> None:
        """Refuse a model that would not fit even if all others were unloaded.

        Raises:
            ConfigError: naming what it takes and what there would be.
        """
        room = available_memory_bytes() + self.held_bytes(served)
        if need.own_bytes > room:
            taken, there = size_text(need.own_bytes), size_text(room)
            what = f"it takes {taken} of memory; {there} would be free without other models"
            raise ConfigError(what, where=f"models.{name}", hint="set a smaller kv_memory for it")

    async def make_room(self, served: LoadedModel, name: str, need: MemoryNeed) -> bool:
        """Unload parked models until another fits beside the served one; False: it does not."""
        most = self._config().keep_resident
        if most < 2 or not served.is_on_cores:
            return False
        while (short := self._is_short(served, need)) or len(self.parked) + 2 > most:
            if not self.parked:
                about = f"{served.plan.model_id} is unloaded: {name} does not fit beside it"
                self._tell("info", "model.unloaded", about)
                return False
            why = f"{name} needs its memory" if short else f"{most} models are kept at most"
            await self.unload(next(iter(self.parked)), why)
        return True

    def _is_short(self, served: LoadedModel, need: MemoryNeed) -> bool:
        claimed = sum(model.unclaimed_bytes for model in (served, *self.parked.values()))
        claimed += self._memory.cap_bytes - self._memory.num_bytes
        return sum(need) > available_memory_bytes() - claimed

    async def unload(self, name: str, why: str) -> bool:
        """End a parked model; False: it is not parked."""
        model = self.parked.pop(name, None)
        if model is None:
            return False
        try:
            await self._end(model)
        except asyncio.CancelledError:
            self.parked[name] = model  # the daemon stops, and ends it
            raise
        self._asked_s.pop(name, None)
        self._tell("info", "model.unloaded", f"{name} is unloaded: {why}")
        return True

    async def unload_faulty(self) -> None:
        """Unload models whose workers died."""
        for name, model in list(self.parked.items()):
            if model.fault:
                await self.unload(name, model.fault)

    async def expire(self) -> None:
        """Unload models that were unused for long enough, or are faulty."""
        await self.unload_faulty()
        for name, model in list(self.parked.items()):
            if time.monotonic() - model.used_s >= (keep_s := self.keep_s(name)):
                await self.unload(name, f"unused for {keep_s:g} s (keep_alive)")

    async def close(self) -> None:
        """End all parked models: the daemon ends."""
        while self.parked:
            await self._end(self.parked.popitem()[1])

    def frames(self) -> list[ResidentFrame]:
        """List the parked models for a frame."""
        return [self._frame(name, model) for name, model in self.parked.items()]

    def _frame(self, name: str, model: LoadedModel) -> ResidentFrame:
        return ResidentFrame(name, model.size_bytes, _time_in(model.used_s + self.keep_s(name)))


def _time_in(at_s: float) -> str | None:
    """Format a time of the monotonic clock; None: never, or in more than LONGEST_S."""
    left_s = at_s - time.monotonic()
    return None if left_s > LONGEST_S else iso_time(time.time() + left_s)
