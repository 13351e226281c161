"""Steps made at start to be timed, so that elastic roles know what they choose between.

Owns: who rehearses what, on which cores and blocks, and when that is over.
Invariants: workers first rehearse together, each on its own cores, as they will compute side by
side, but no two at once on one core; then one at a time on all cores, while nobody else computes;
the blocks are the ledger's, and free again when it is over.
Never: waits; outlives a worker's death, which ends it with what is known by then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest

from engine.cache.blocks import Ledger
from engine.schedule.roles_in_force import Cpus, Roles
from engine.wire.messages import Command, RehearsalStep, Rehearse, Rehearsed, RehearsedStep

BUDGET_MS = 500.0
"""Of all turns together."""
MAX_BLOCKS = 32
"""That a worker's steps read and write; deeper positions lie in the same blocks again."""
_PROMPTS = (
    (16, 0), (64, 0), (0, 0), (0, 2048), (128, 0), (32, 0), (16, 4096), (0, 4096), (256, 0),
    (64, 2048), (0, 1024), (0, 8192),
)  # fmt: skip
"""Tokens of a chunk, 0 for as many as a step has, and positions before it: what says most first."""
_DECODES = ((1, 64), (4, 2048), (2, 64), (4, 512), (16, 64), (8, 1024), (1, 8192), (16, 2048))
"""Sequences, and positions before each."""
_NUM_FIRST = 3
"""Of those, so many come before all prompts but one: what they say of several who decode on a
worker's own cores is seldom seen later, for it mostly has those of an idle one, too."""


def steps(max_step_tokens: int, max_model_len: int) -> list[RehearsalStep]:
    """What to rehearse: what says most first, prompts and decodes in turn.

    A worker leaves out what it has no time for, and goes on with what it has.

    Args:
        max_step_tokens: of prompts, in a worker's step.
        max_model_len: positions that the model has.
    """
    chunk = min(max_step_tokens, max_model_len)
    prompts = [_prompt(size or chunk, before, chunk, max_model_len) for size, before in _PROMPTS]
    decodes = [RehearsalStep(num, 1, min(before, max_model_len - 1)) for num, before in _DECODES]
    both = prompts[:1] + decodes[:_NUM_FIRST]
    for pair in zip_longest(prompts[1:], decodes[_NUM_FIRST:]):
        both += [step for step in pair if step is not None]
    return list(dict.fromkeys(both))


def _prompt(size: int, before: int, chunk: int, max_model_len: int) -> RehearsalStep:
    num_tokens = min(size, chunk)
    return RehearsalStep(1, num_tokens, min(before, max_model_len - num_tokens))


class Rehearsal:
    """One rehearsal: steps made at start to be timed, from begin() until it is over.

    Args:
        roles: learn from it; their cores change hands for it.
        ledger: has the blocks.
        send: passes a command to a worker.
        plan: as steps() gives it.
        programme: turns of other steps instead, each by worker; who is not in one computes nothing.
    """

    def __init__(
        self,
        roles: Roles,
        ledger: Ledger,
        send: Callable[[str, Command], None],
        plan: list[RehearsalStep],
        programme: Sequence[Mapping[str, Sequence[RehearsalStep]]] = (),
    ) -> None:
        self._roles = roles
        self._ledger = ledger
        self._send = send
        self._plan = plan
        workers = roles.places.names
        cores = roles.cores
        self._turns = _apart(cores.own, are_alike=roles.places.shares_memory_bus)
        self._programme = list(programme)
        if programme:
            self._turns = [{name: cores.own[name] for name in turn} for turn in programme]
        elif cores.can_lend:
            # on one memory bus all workers are alike on the same cores
            alone = workers[-1:] if roles.places.shares_memory_bus else workers
            self._turns += [{name: cores.all} for name in alone]
        self._budget_ms = BUDGET_MS / len(self._turns)
        self._pending: dict[str, Cpus] = {}
        """Workers that have not answered in this turn, and the cores that they need for it."""
        self._told: set[str] = set()
        self._owners = {name: -1 - index for index, name in enumerate(workers)}
        """Of the blocks, by worker; no sequence has such an id."""
        self._last_id = 0
        self.made: list[RehearsedStep] = []
        self.by_turn: list[dict[str, list[RehearsedStep]]] = []
        """The same, by worker."""
        self.is_over = False

    def begin(self) -> None:
        """Take blocks and start the first turn."""
        places, pools = self._roles.places, self._ledger.pools
        for worker, owner in self._owners.items():
            pool = places.pool_of(worker)
            count = min(MAX_BLOCKS, pools[pool].num_free // len(self._owners))
            if not count:  # a pool of one block has nothing to choose
                self._turns = []
            self._ledger.reserve(owner, {pool: count})
        self._next_turn()

    def go_on(self) -> None:
        """Cores may have changed hands: tell those who have what they need."""
        cores = self._roles.cores
        for worker in [name for name in self._pending if name not in self._told]:
            if not cores.can_lend or cores.used(worker) == self._pending[worker]:
                self._told.add(worker)
                self._tell(worker)

    def rehearsed(self, worker: str, report: Rehearsed) -> None:
        """A worker has made its steps."""
        self._ledger.close_command(("rehearse", report.rehearsal_id, 0))
        if self.is_over:
            return
        self._roles.rehearsed(worker, report)
        self.made += report.steps
        self.by_turn[-1][worker] = report.steps
        self._pending.pop(worker, None)
        if not self._pending:
            self._next_turn()

    def give_up(self) -> None:
        """A worker has died: what is known by now has to do."""
        if not self.is_over:
            self._end()

    def _next_turn(self) -> None:
        if not self._turns:
            self._end()
            return
        self._pending, self._told = self._turns.pop(0), set()
        self.by_turn.append({})
        cores = self._roles.cores
        cores.want({name: self._pending.get(name, frozenset()) for name in cores.own}, ())
        self.go_on()

    def _end(self) -> None:
        self.is_over = True
        self._pending = {}
        cores = self._roles.cores
        cores.want(cores.own, ())
        for owner in self._owners.values():
            self._ledger.release_all(owner)

    def _tell(self, worker: str) -> None:
        pool = self._roles.places.pool_of(worker)
        block_ids = list(self._ledger.table(self._owners[worker], pool))
        self._last_id += 1
        self._ledger.open_command(("rehearse", self._last_id, 0), worker, {pool: block_ids})
        steps = self._plan
        if self._programme:
            steps = list(self._programme[len(self.by_turn) - 1][worker])
        self._send(worker, Rehearse(self._last_id, steps, block_ids, self._budget_ms))


def _apart(own: Mapping[str, Cpus], *, are_alike: bool) -> list[dict[str, Cpus]]:
    """Turns in which no two share a core: what a prompt takes that is alone there.

    Where workers are alike, who has to wait for another of as many cores need not rehearse.
    """
    turns: list[dict[str, Cpus]] = []
    for name, cpus in own.items():
        fitting = [turn for turn in turns if all(cpus.isdisjoint(used) for used in turn.values())]
        known = {len(used) for turn in turns for used in turn.values()}
        if fitting:
            fitting[0][name] = cpus
        elif not (are_alike and len(cpus) in known):
            turns.append({name: cpus})
    return turns
