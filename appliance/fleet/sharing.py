"""Two workers on one GPU: who is told where the other's memory is.

One worker exports its weights and its pool, and another maps them. What is exported lives as long
as its worker: when that one ends, so does the other, before either starts again.
Owns: what has been exported in this life of the exporter, and who waits for it.
Invariant: a worker is told once in each of its lives, and never of memory that is gone.
Never: looks into what it passes on; ends a process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from appliance.fleet.placement import WorkerPlan
from engine.wire.messages import Command, MapShared, SharedMemory


class Sharing:
    """What passes between workers by way of the daemon.

    Args:
        plans: of all workers; most share nothing.
        send: passes a command to a worker.
    """

    def __init__(self, plans: Iterable[WorkerPlan], send: Callable[[str, Command], None]) -> None:
        self._roles = {plan.name: plan.shares for plan in plans}
        self._send = send
        self._memory: SharedMemory | None = None
        self._waiting: set[str] = set()
        """Mappers that have been let on, and have no memory yet."""

    def let_on(self, worker: str) -> None:
        """A worker has been sent Go."""
        if self._roles[worker] == "maps":
            self._waiting.add(worker)
            self._tell()

    def exported(self, memory: SharedMemory | None) -> None:
        """The exporter has made its pool."""
        self._memory = memory
        self._tell()

    def ended(self, worker: str) -> list[str]:
        """A worker is dead; the workers that have to end with it."""
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
