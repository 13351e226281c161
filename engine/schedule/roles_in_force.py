"""What the workers are for at this moment, who computes on which cores, and the rehearsal at start.

Owns: the roles in force and their targets; what each worker may compute on now, and the UseCores
commands that it has not answered; what is known of step times, and the rehearsal that measures the
first of them.
Invariant: roles change what is placed from now on, never what runs already. A worker with nothing
to do lends its cores to one that has, unless roles are static; it has them back before it steps.
Never: touches a sequence, or any block but those of the rehearsal; reads a clock.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import combinations, zip_longest

from engine.cache.blocks import Ledger
from engine.cache.places import Places
from engine.errors import InvariantViolated
from engine.schedule.copies import Copies
from engine.schedule.elastic import (
    Outcome,
    Outcomes,
    PairChoice,
    PredictionKind,
    Situation,
    Slo,
    WorkerLoad,
    choose,
)
from engine.schedule.journeys import Pair
from engine.schedule.sequence import Phase, Sequence
from engine.schedule.step_times import StepLoad, StepTimes
from engine.wire.messages import (
    Command,
    CoresUsed,
    RehearsalStep,
    Rehearse,
    Rehearsed,
    RehearsedStep,
    Stepped,
    UseCores,
)

# Who computes on which cores: lending between workers, with an answer to every change.
# Invariant: a core is lent only after its owner has let go of it, or died; and no core is in what
# two workers may use, but for one that its owner has taken back from a borrower who was told to let
# go. A worker may use what it has last answered and whatever it has been told since.
# Never: decides who needs them; waits; moves a thread.


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
        """As last answered; empty where the worker is down."""
        self._told: dict[str, deque[Cpus]] = {name: deque() for name in own}
        self._wanted = dict(self.own)
        self._busy: Collection[str] = self.own
        self._up: set[str] = set()

    def used(self, worker: str) -> Cpus:
        """What its steps run on, as it has last answered; empty: parked, or down."""
        return self._used[worker]

    def awaits(self, worker: str) -> bool:
        """True if it was told something that it has not answered."""
        return bool(self._told[worker])

    def is_parked(self, worker: str) -> bool:
        """True if another still computes on its cores: then it waits, and that one is to blame."""
        others = (self._used[name] for name in self.own if name != worker)
        return self.can_lend and any(self.own[worker] & used for used in others)

    def worker_ready(self, worker: str) -> None:
        """It takes commands, starts on its own cores, and computes nothing before the first.

        So where others still use them it is parked first, ahead of whatever is admitted to it.
        """
        self._up.add(worker)
        self._used[worker] = self.own[worker]
        if self.can_lend and not self.own[worker].isdisjoint(self._others_may_use(worker)):
            self._used[worker] = _NONE
            self._tell(worker, _NONE)
        self._settle()

    def worker_died(self, worker: str) -> None:
        """It computes nothing any more, and will answer nothing."""
        self._up.discard(worker)
        self._used[worker] = _NONE
        self._told[worker].clear()
        self._settle()

    def answered(self, worker: str, report: CoresUsed) -> None:
        """The worker has come to a step's border and done as it was told."""
        told = self._told[worker]
        if not told or told[0] != frozenset(report.cpus):
            raise InvariantViolated(f"cores {report.cpus} were not given", where=worker)
        self._used[worker] = told.popleft()
        self._settle()

    def want(self, wanted: Mapping[str, Cpus], busy: Collection[str]) -> None:
        """Bring every worker to these cores, as soon as those who have them let go.

        Args:
            wanted: by worker.
            busy: who may be in a step; the others answer at once.
        """
        if self.can_lend and (wanted != self._wanted or busy != self._busy):
            self._wanted, self._busy = dict(wanted), busy
            self._settle()

    def may_use(self, worker: str) -> Cpus:
        """All that it could be computing on at this moment."""
        return self._used[worker].union(*self._told[worker])

    def _keeps(self, worker: str) -> Cpus:
        """What it will use once it has done all that it was told."""
        told = self._told[worker]
        return told[-1] if told else self._used[worker]

    def _settle(self) -> None:
        """Tell whoever can be told now; a borrower who has to wait is told on the owner's answer.

        An owner does not wait for a busy one: sharing its core until the step ends costs it
        less than standing still, for as long as a chunk of a prompt takes. An idle one lets go at
        once, and whoever began without waiting would have a whole step with fewer cores.
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
        """True if idle workers have some of these, and no busy one has."""
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


# --------------------------------------------------------------------------------------------------


ROLES = ("elastic", "static", "colocated")

RECENT_HALF_LIFE_S = 1.0
"""Of the number of sequences that decoded a moment ago."""


class Roles:
    """Roles and targets in force, each worker's step times, and where cores go.

    Args:
        places: which worker is which.
        cores: each worker's own.
        roles: one of ROLES; one worker is always colocated.
        copies: knows what copying takes.
        max_step_tokens: of prompts, in a worker's step.
        send: passes a command to a worker.
        lends_for_prompts: a second core makes a prompt faster.
    """

    def __init__(
        self,
        places: Places,
        cores: Mapping[str, tuple[int, ...]],
        roles: str,
        copies: Copies,
        max_step_tokens: int,
        send: Callable[[str, Command], None],
        *,
        lends_for_prompts: bool = True,
    ) -> None:
        self.places = places
        self._copies = copies
        self._recent = {name: _RecentBatch() for name in places.names}
        self.cores = Cores(cores, send)
        self.slo = Slo()
        self.counts: Counter[str] = Counter()
        """Sequences placed, by route and reason."""
        self.ready_workers: set[str] = set()
        self.stalled: frozenset[str] = frozenset()
        """Ready, but without progress: they get nothing new until they are heard of again."""
        self._roles = "colocated" if places.is_colocated else roles
        self._max_step_tokens = max_step_tokens
        self._lends_for_prompts = lends_for_prompts
        self._times: dict[tuple[str, int], StepTimes] = {}
        self.outcomes = Outcomes(self._num_measured)
        self._last: str | None = None

    @property
    def roles(self) -> str:
        """The roles in force: elastic, static or colocated."""
        return self._roles

    @property
    def open_workers(self) -> set[str]:
        """Those that may be given something new."""
        return self.ready_workers - self.stalled

    @property
    def acts_static(self) -> bool:
        """True if elastic roles have nothing to choose: with all workers on one core, or GPU."""
        is_single_core = self.places.shares_memory_bus and not self.cores.are_apart
        return self._roles == "elastic" and is_single_core

    def switch(self, roles: str) -> None:
        """Place what comes by other roles; the caller settles."""
        self._roles = roles
        self._last = None

    # What happens to workers

    def worker_ready(self, worker: str) -> None:
        """It takes commands from now on."""
        self.ready_workers.add(worker)
        self.cores.worker_ready(worker)

    def worker_died(self, worker: str) -> None:
        """It is gone; when it comes back it will need its cores to load."""
        self.ready_workers -= {worker, *self.places.mappers_of(worker)}  # those end with it
        self.cores.worker_died(worker)

    def answered(self, worker: str, report: CoresUsed) -> None:
        """A worker has changed its cores."""
        self.cores.answered(worker, report)

    def rehearsed(self, worker: str, report: Rehearsed) -> None:
        """Learn from steps that were made to be timed."""
        times = self._times.setdefault((worker, self._num_cores(worker)), StepTimes())
        for step in report.steps:
            times.observe(StepLoad.alike(step), step.elapsed_ms)

    def stepped(self, worker: str, step: Stepped) -> list[Outcome]:
        """Learn from a step; what has become of prompts with it."""
        load = StepLoad.of(step.entries)
        if not (load.num_prefill_tokens or load.batch):
            return []
        num_cores = step.num_cores or self._num_cores(worker)
        times = self._times.setdefault((worker, num_cores), StepTimes())
        times.observe(load, (step.ended_ns - step.started_ns) / 1e6)
        if load.batch:
            self._recent[worker].observe(load, step.ended_ns)
        return self.outcomes.stepped(worker, step, num_cores)

    # What the router asks

    def route(
        self,
        sequence: Sequence,
        candidates: list[Pair],
        running: Iterable[Sequence],
        now_ns: int,
        hits: Mapping[str, int],
    ) -> PairChoice:
        """How a sequence should be run that is about to be placed.

        Args:
            sequence: it has no legs yet.
            candidates: as Ways gives them, the one of static roles first.
            running: all that is on workers, or between two.
            now_ns: CLOCK_MONOTONIC.
            hits: positions of it by pool that are computed there.
        """
        static = candidates[0]
        if self._roles == "colocated":
            return PairChoice(Pair(static.decode, static.decode), "colocated")
        if self._roles == "static" or self.acts_static:
            if not static.moves:
                return PairChoice(static, "only", "no worker of the other role is there")
            about = "both workers share one device" if self._roles == "elastic" else ""
            return PairChoice(static, "static", about)
        loads = {
            name: self._recent[name].added_to(load, now_ns)
            for name, load in self._loads(running).items()
        }
        situation = Situation(
            num_prompt_tokens=sequence.num_tokens,
            max_tokens=sequence.sampling.max_tokens,
            candidates=tuple(candidates),
            loads=loads,
            num_cores={name: len(own) or 1 for name, own in self.cores.own.items()},
            max_step_tokens=self._max_step_tokens,
            slo=self.slo,
            shares_memory_bus=self.places.shares_memory_bus,
            lends_cores=self.cores.can_lend,
            lends_for_prompts=self._lends_for_prompts,
            copy_ms=self._copy_ms(sequence.num_tokens, hits, candidates),
            last=self._last,
            closed=self.outcomes.closed(),
            num_cached={w.name: hits[w.pool] for w in self.places.workers if w.pool in hits},
        )
        return choose(situation, self._predict_ms)

    def placed(self, sequence: Sequence, choice: PairChoice, now_ns: int) -> None:
        """The choice has been acted on."""
        self._last = choice.pair.route
        self.counts[f"{choice.pair.route} {choice.reason}"] += 1
        if choice.forecast is not None:
            num_tokens = sequence.num_uncached_tokens
            self.outcomes.begin(
                sequence.seq_id, choice.forecast, num_tokens=num_tokens, at_ns=now_ns
            )

    def settle(self, running: Iterable[Sequence]) -> None:
        """Bring the cores to where the work is."""
        cores = self.cores
        if not cores.can_lend:
            return
        there = [sequence for sequence in running if sequence.worker is not None]
        busy = {sequence.worker for sequence in there if sequence.worker is not None}
        gains = self._lends_for_prompts or any(s.phase is not Phase.PREFILLING for s in there)
        idle = [name for name in cores.own if name not in busy]
        busy |= self.stalled  # nobody waits for cores that these will not let go of
        is_whole = self.ready_workers == set(cores.own)
        if self._roles == "colocated" and is_whole:
            idle = [name for name in self.places.parked_when_colocated if name in idle] or idle
        if self._roles == "static" or not is_whole or not idle or not gains:
            cores.want(cores.own, busy)
        elif len(idle) < len(cores.own):
            cores.want(_shares(cores.own, idle), busy)
        # with nobody busy they stay where they are: nobody knows who will be first

    def _loads(self, running: Iterable[Sequence]) -> dict[str, WorkerLoad]:
        """What each worker has to do; a sequence on its way to decode counts where it goes."""
        tokens = dict.fromkeys(self.places.names, 0)
        batches, contexts = dict(tokens), dict(tokens)
        for sequence in running:
            worker = sequence.legs[-1].worker
            if sequence.phase is Phase.PREFILLING and sequence.worker is not None:
                left = sequence.num_prompt_tokens - sequence.num_computed_tokens
                tokens[sequence.worker] += left
                if len(sequence.legs) == 1:
                    continue
            batches[worker] += 1
            contexts[worker] += sequence.num_computed_tokens
        return {
            name: WorkerLoad(tokens[name], batches[name], contexts[name])
            for name in self.places.names
        }

    def _predict_ms(self, worker: str, num_cores: int, load: StepLoad) -> float | None:
        """By this worker's own steps; on one bus all workers are alike, so also by another's."""
        for times in self._times_like(worker, num_cores):
            if (known_ms := times.predict_ms(load)) is not None:
                return known_ms
        return None

    def _times_like(self, worker: str, num_cores: int) -> list[StepTimes]:
        """What is known of a worker on so many cores; its own steps first."""
        known = (self._times.get((name, num_cores)) for name in self._like(worker))
        return [times for times in known if times is not None]

    def _like(self, worker: str) -> list[str]:
        """Workers whose steps take as long as this one's, which is the first."""
        others = [name for name in self.places.names if name != worker]
        return [worker, *others] if self.places.shares_memory_bus else [worker]

    def _num_measured(self, way: PredictionKind) -> int:
        """Steps made of its size on the cores that it uses."""
        likes = self._times_like(way.worker, way.num_cores)
        return sum(times.num_prompt_steps(way.size) for times in likes)

    def slowest_ms(self, worker: str, load: StepLoad) -> float | None:
        """A step on the worker, by the cores with which it takes longest; None: unknown."""
        return max(self._known_ms(worker, lambda times: times.predict_ms(load)), default=None)

    def prompt_ms(self, worker: str, num_tokens: int, num_before: int) -> float | None:
        """The least that so many tokens of a prompt might take after so many; None: unknown.

        A guess, where steps of such a size have not been measured.
        """
        size = min(num_tokens, self._max_step_tokens)
        load = StepLoad(size, size * (num_before + num_tokens / 2))
        known = self._known_ms(worker, lambda times: times.guess_ms(load))
        return min((step_ms * num_tokens / size for step_ms in known), default=None)

    def _known_ms(self, worker: str, of: Callable[[StepTimes], float | None]) -> list[float]:
        """By numbers of cores: of its own steps, or of another's who is like it."""
        for like in self._like(worker):
            every = [of(times) for (name, _), times in self._times.items() if name == like]
            if known := [step_ms for step_ms in every if step_ms is not None]:
                return known
        return []

    def _num_cores(self, worker: str) -> int:
        """On which it computes now."""
        cores = self.cores
        return len(cores.used(worker) if cores.can_lend else cores.own[worker]) or 1

    def _copy_ms(
        self, num_tokens: int, hits: Mapping[str, int], pairs: list[Pair]
    ) -> dict[Pair, float]:
        """What copying a prompt's blocks takes, where that is known; nothing within one pool."""
        links = {pair: self._copies.links.between(*pair) for pair in pairs if pair.moves}
        known = {
            pair: self._copies.expected_ms(link, num_tokens - hits.get(link.to_pool, 0))
            for pair, link in links.items()
        }
        return {pair: copy_ms for pair, copy_ms in known.items() if copy_ms is not None}


def _shares(own: Mapping[str, Cpus], idle: Collection[str]) -> dict[str, Cpus]:
    """Cores by worker, with those of idle ones dealt out to the others."""
    active = [name for name in own if name not in idle]
    spare = sorted(cpu for name in idle for cpu in own[name])
    dealt = {name: own[name] | set(spare[i :: len(active)]) for i, name in enumerate(active)}
    return {name: dealt.get(name, frozenset()) for name in own}


class _RecentBatch:
    """How many decoded lately: who has just had an answer is likely to ask again."""

    def __init__(self) -> None:
        self._load = StepLoad()
        self._at_ns = 0

    def observe(self, load: StepLoad, at_ns: int) -> None:
        """Take in a step of the decode worker."""
        if load.batch >= self._batch(at_ns):
            self._load, self._at_ns = load, at_ns

    def added_to(self, now: WorkerLoad, at_ns: int) -> WorkerLoad:
        """The load there is, with those who are expected back."""
        num_more = self._batch(at_ns) - now.batch
        if num_more <= 0:
            return now
        context = now.context + num_more * self._load.context // self._load.batch
        return now._replace(batch=now.batch + num_more, context=context, num_expected=num_more)

    def _batch(self, at_ns: int) -> int:
        elapsed_s = max(0, at_ns - self._at_ns) / 1e9
        return round(self._load.batch * math.exp2(-elapsed_s / RECENT_HALF_LIFE_S))


# Steps made at start to be timed, so that elastic roles know what they choose between.
# Invariants: workers first rehearse together, each on its own cores, as they will compute side by
# side, but no two at once on one core; then one at a time on all cores, while nobody else computes;
# the blocks are the ledger's, and free again when it is over.
# Never: waits; outlives a worker's death, which ends it with what is known by then.


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
        programme: Collection[Mapping[str, Collection[RehearsalStep]]] = (),
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
