"""Tell GPU workers where other workers' memory is, and when to unmap it.

Invariant: a worker is told of a pool once in each life of the pool and of its own, and never of
memory that no longer exists.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from appliance.fleet.placement import WorkerPlan
from engine.wire.messages import (
    Command,
    MapPool,
    MapShared,
    Setup,
    SharedMemory,
)


class MemorySharing:
    """Pass handles of shared GPU memory from the exporting worker to the mapping ones.

    Args:
        plans: of all workers; most share nothing.
        send: passes a command to a worker.
    """

    def __init__(self, plans: Iterable[WorkerPlan], send: Callable[[str, Command], None]) -> None:
        self._roles = {plan.name: plan.shares for plan in plans}
        self._send = send
        self._memory: SharedMemory | None = None
        self._waiting: set[str] = set()
        """Mapping workers whose weights are complete, but that have no memory yet."""

    def waits(self, worker: str) -> bool:
        """Say whether the worker waits for the exporter's pool."""
        return worker in self._waiting

    def on_weights_complete(self, worker: str) -> None:
        """Note that a worker was sent WeightsComplete."""
        if self._roles[worker] == "maps":
            self._waiting.add(worker)
            self._tell()

    def exported(self, memory: SharedMemory | None) -> None:
        """Pass on the pool that the exporter has made."""
        self._memory = memory
        self._tell()

    def ended(self, worker: str) -> list[str]:
        """Forget a dead worker; return the workers that must end with it."""
        self._waiting.discard(worker)
        if self._roles[worker] != "exports":
            return []
        self._memory = None
        return [name for name, shares in self._roles.items() if shares == "maps"]

    def _tell(self) -> None:
        if self._memory is not None:
            for worker in sorted(self._waiting):
                self._send(worker, MapShared(self._memory))
            self._waiting.clear()


log = logging.getLogger("penstock")

COUNTERS = Path("/dev/shm")
"""Where torch counts the users of exported memory, in files."""
LET_GO_S = 10.0
"""Seconds to wait for a worker to unmap; a slower one hangs or runs a long step."""


class PeerPools:
    """Pass handles of pools between workers of different GPUs.

    Args:
        setups: of all workers; workers on cores map pools by their memfds.
        send: passes a command to a worker.
    """

    def __init__(self, setups: Iterable[Setup], send: Callable[[str, Command], None]) -> None:
        setups = list(setups)
        self._pool_of = {setup.worker: setup.pool.name for setup in setups}
        self._writers: dict[str, list[str]] = {}
        """The workers that write to each pool."""
        for setup in setups:
            for spec in setup.other_pools:
                if spec.fd is None:
                    self._writers.setdefault(spec.name, []).append(setup.worker)
        self._send = send
        self._memory: dict[str, SharedMemory] = {}
        self._up: set[str] = set()
        self._told: dict[str, set[str]] = {pool: set() for pool in self._writers}
        """The workers that may have mapped each pool."""
        self._let_go = asyncio.Event()

    def waits(self, worker: str) -> bool:
        """Say whether a starting worker waits for the pools of others."""
        mine = (pool for pool, writers in self._writers.items() if worker in writers)
        return worker in self._up and any(worker not in self._told[pool] for pool in mine)

    def on_weights_complete(self, worker: str) -> None:
        """Note that a worker was sent WeightsComplete, and tell it of the pools."""
        self._up.add(worker)
        for pool, memory in self._memory.items():
            if worker in self._writers[pool]:
                self._tell(worker, pool, memory)

    def made(self, worker: str, memory: SharedMemory | None) -> None:
        pool = self._pool_of[worker]
        if memory is None or pool not in self._writers:
            return
        self._memory[pool] = memory
        for writer in self._writers[pool]:
            if writer in self._up:
                self._tell(writer, pool, memory)

    def unmapped(self, worker: str, pool: str) -> None:
        """Note that a worker has unmapped a pool."""
        self._told[pool].discard(worker)
        self._let_go.set()

    async def ended(self, worker: str) -> list[str]:
        """Unmap a dead worker's pool everywhere, and forget what it had mapped.

        Returns:
            The workers that did not unmap its pool in time.
        """
        self._up.discard(worker)
        for pool in self._told:
            self.unmapped(worker, pool)
        own = self._pool_of[worker]
        if self._memory.pop(own, None) is None:
            return []
        for writer in self._told[own]:
            self._send(writer, MapPool(own, None))
        try:
            async with asyncio.timeout(LET_GO_S):
                while self._told[own]:
                    self._let_go.clear()
                    await self._let_go.wait()
        except TimeoutError:
            log.error("%s still hold memory of worker %s", sorted(self._told[own]), worker)
        return sorted(self._told[own])

    def _tell(self, worker: str, pool: str, memory: SharedMemory) -> None:
        self._told[pool].add(worker)
        self._send(worker, MapPool(pool, memory))


def remove_counters(pid: int) -> None:
    """Remove the counters of memory that a process exported, which its end leaves behind."""
    for path in COUNTERS.glob(f"torch_{pid}_*"):
        with suppress(OSError):  # a process of another user may have had this number
            path.unlink()
