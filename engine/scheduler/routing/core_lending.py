"""Track lent cores, and lend each only after the worker that used it has released it.

Invariant: a core is lent only after its owner has released it, or died; no core is usable by two
workers, except while its owner takes it back and the borrower has been told to release it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from itertools import combinations

from engine.errors import InvariantViolated
from engine.wire.messages import Command, CoresUsed, UseCores

Cpus = frozenset[int]
_NONE: Cpus = frozenset()


class Cores:
    """Which worker computes on which cores, and which are lent.

    Args:
        own: by worker. Where they overlap (a single core) or are empty (GPUs), nothing is lent.
        send: passes a command to a worker, in order with all others.
    """

    def __init__(
        self, own: Mapping[str, tuple[int, ...]], send: Callable[[str, Command], None]
    ) -> None:
        self.own = {name: frozenset(cpus) for name, cpus in own.items()}
        self.all: Cpus = _NONE.union(*self.own.values())
        self.can_lend = (
            len(own) > 1
            and all(self.own.values())
            and len(self.all) == sum(len(cpus) for cpus in self.own.values())
        )
        self.are_apart = any(
            a and b and a.isdisjoint(b) for a, b in combinations(self.own.values(), 2)
        )
        """Two workers can compute without being in each other's way."""
        self._send = send
        self._used = dict.fromkeys(own, _NONE)
        """Cores in each worker's last answer; empty: the worker is down."""
        self._told: dict[str, deque[Cpus]] = {name: deque() for name in own}
        self._wanted = dict(self.own)
        self._busy: Collection[str] = self.own
        self._up: set[str] = set()

    def used(self, worker: str) -> Cpus:
        """Return the cores of its steps, as last answered; empty: parked, or down."""
        return self._used[worker]

    def awaits(self, worker: str) -> bool:
        """Say whether it has not answered a command yet."""
        return bool(self._told[worker])

    def is_parked(self, worker: str) -> bool:
        """Say whether it waits because another worker still computes on its cores."""
        others = (self._used[name] for name in self.own if name != worker)
        return self.can_lend and any(self.own[worker] & used for used in others)

    def worker_ready(self, worker: str) -> None:
        """Register a started worker; it computes nothing before its first command.

        It starts on its own cores. If others still use them, it is parked first, ahead of its
        admissions.
        """
        self._up.add(worker)
        self._used[worker] = self.own[worker]
        if self.can_lend and not self.own[worker].isdisjoint(self._others_may_use(worker)):
            self._used[worker] = _NONE
            self._tell(worker, _NONE)
        self._settle()

    def worker_died(self, worker: str) -> None:
        """Note that a worker computes and answers nothing any more."""
        self._up.discard(worker)
        self._used[worker] = _NONE
        self._told[worker].clear()
        self._settle()

    def answered(self, worker: str, report: CoresUsed) -> None:
        """Note that the worker uses the cores it was told, since a step's border."""
        told = self._told[worker]
        if not told or told[0] != frozenset(report.cpus):
            raise InvariantViolated(f"cores {report.cpus} were not given", where=worker)
        self._used[worker] = told.popleft()
        self._settle()

    def want(self, wanted: Mapping[str, Cpus], busy: Collection[str]) -> None:
        """Bring every worker to these cores, as soon as the workers that have them let go.

        Args:
            busy: workers that may be in a step; the others answer at once.
        """
        if self.can_lend and (wanted != self._wanted or busy != self._busy):
            self._wanted, self._busy = dict(wanted), busy
            self._settle()

    def may_use(self, worker: str) -> Cpus:
        """Return all cores that it may be computing on now."""
        return self._used[worker].union(*self._told[worker])

    def _keeps(self, worker: str) -> Cpus:
        """Return the cores that it will use after all its commands."""
        told = self._told[worker]
        return told[-1] if told else self._used[worker]

    def _settle(self) -> None:
        """Send each worker the cores that it may use now; a borrower may wait for an owner.

        An owner does not wait for a busy borrower: sharing its core until the step ends costs it
        less than standing still for a prompt's chunk. An idle borrower releases cores at once; a
        step begun without waiting would run with fewer cores to its end.
        """
        if not self.can_lend:
            return
        for worker in sorted(self._up):
            target, own = self._wanted[worker], self.own[worker]
            free = self.all - self._others_may_use(worker)
            now = target & (own | free)
            if now != self._keeps(worker) and not self._is_soon_free(target & own - free):
                self._tell(worker, now)

    def _is_soon_free(self, cpus: Cpus) -> bool:
        """Say whether idle workers have some of these cores, and no busy one has."""
        holders = [name for name in self.own if cpus & self.may_use(name)]
        return bool(holders) and not any(name in self._busy for name in holders)

    def _others_may_use(self, worker: str) -> Cpus:
        return _NONE.union(*(self.may_use(name) for name in self.own if name != worker))

    def _tell(self, worker: str, cpus: Cpus) -> None:
        self._told[worker].append(cpus)
        self._send(worker, UseCores(sorted(cpus)))

    def check_invariants(self) -> None:
        """Raise InvariantViolated if a core has two users, and none of them is taking it back."""
        if not self.can_lend:
            return
        for worker in self.own:
            for other in self.own.keys() - {worker}:
                shared = self.may_use(worker) & self._keeps(other) & self.own[worker]
                if shared:
                    raise InvariantViolated(f"cores {sorted(shared)} have two users", where=worker)


def shares(own: Mapping[str, Cpus], idle: Collection[str]) -> dict[str, Cpus]:
    """Divide the cores of idle workers among the others."""
    active = [name for name in own if name not in idle]
    spare = sorted(cpu for name in idle for cpu in own[name])
    dealt = {name: own[name] | set(spare[i :: len(active)]) for i, name in enumerate(active)}
    return {name: dealt.get(name, frozenset()) for name in own}
