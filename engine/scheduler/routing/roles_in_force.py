"""Hold the current roles, route sequences by them, learn step times, choose cores to lend.

Invariant: roles change what is placed from now on, never what runs already. A worker with nothing
to do lends its cores to one that has, unless roles are static; it has them back before it steps.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Several
from typing import NamedTuple

from engine.profile.facts import DECODE_MS, PROMPT_MS, Fact, FactKey, Profile
from engine.profile.prompt_steps import may_gain
from engine.scheduler.cache.topology import PREFILL, Topology
from engine.scheduler.routing.copies import Copies
from engine.scheduler.routing.core_lending import Cores, Cpus, shares
from engine.scheduler.routing.elastic import (
    PairChoice,
    PredictionKind,
    Situation,
    Slo,
    WorkerLoad,
    choose,
    only,
)
from engine.scheduler.routing.outcomes import Outcome, Outcomes
from engine.scheduler.routing.step_times import StepLoad, StepTimes, place_of, worker_of
from engine.scheduler.routing.worker_routes import Pair
from engine.scheduler.sequences.sequence import Phase, Sequence
from engine.wire.messages import Command, CoresUsed, MeasuredStep, Stepped

ROLES = ("elastic", "static", "colocated")

RECENT_HALF_LIFE_S = 1.0
"""Half-life of the number of sequences that decoded recently."""
TRY_LENDING_EVERY_S = 32
"""Interval after which cores are lent for a second, whatever the profile says."""
LEAST_CHUNK_BESIDE = 8
"""Prompt tokens that a step may have in any case beside sequences that decode."""
MAX_GAP_RATIO = 2.0
"""Maximum ratio of its time to a step's without prompts, for more of them."""
_BESIDE = "tokens a step beside sequences that decode"
MAX_WAITING_STEPS = 256
"""Maximum steps learnt from together, once a second; the newest are kept."""


class _TimedStep(NamedTuple):
    worker: str
    num_cores: int
    load: StepLoad
    elapsed_ms: float


class Roles:
    """Roles and targets in force, each worker's step times, and where cores go.

    Args:
        topology: which worker is which.
        cores: each worker's own.
        roles: one of ROLES; one worker is always colocated.
        copies: predicts the time of copies.
        max_num_batched_tokens: of prompts, in a worker's step.
        send: passes a command to a worker.
        profile: the known step times of this machine.
    """

    def __init__(
        self,
        topology: Topology,
        cores: Mapping[str, tuple[int, ...]],
        roles: str,
        copies: Copies,
        max_num_batched_tokens: int,
        send: Callable[[str, Command], None],
        *,
        profile: Profile | None = None,
    ) -> None:
        self.topology = topology
        self.profile = Profile() if profile is None else profile
        self.asked: Counter[FactKey] = Counter()
        """Facts that a prediction lacked, at no place, and how often they were asked for."""
        self._copies = copies
        self._recent = {name: _RecentBatch() for name in topology.names}
        self.cores = Cores(cores, send)
        self.slo = Slo()
        self.counts: Counter[str] = Counter()
        """Sequences placed, by route and reason."""
        self.ready_workers: set[str] = set()
        self.stalled: frozenset[str] = frozenset()
        """Ready, but without progress: they get nothing new until they are heard of again."""
        self.text_workers: frozenset[str] = frozenset()
        """Workers with batches of whole texts, which are no sequences."""
        self._roles = "colocated" if topology.is_colocated else roles
        self._max_step_tokens = max_num_batched_tokens
        self._times: dict[str, StepTimes] = {}
        self._waiting: deque[_TimedStep] = deque(maxlen=MAX_WAITING_STEPS)
        self._held: Mapping[str, Cpus] | None = None
        self.outcomes = Outcomes(self._num_measured)
        self._last: str | None = None
        for key in self.profile.facts:
            if key.what in {PROMPT_MS, DECODE_MS}:
                self._times_at(key.place)
        self._num_learnt = 0
        self._decoded = StepLoad()
        """The newest decode step."""
        self._borrowers = self._find_borrowers()

    @property
    def roles(self) -> str:
        """The roles in force: elastic, static or colocated."""
        return self._roles

    @property
    def open_workers(self) -> set[str]:
        """Return the workers that may get new work."""
        return self.ready_workers - self.stalled

    @property
    def acts_static(self) -> bool:
        """True if elastic roles have nothing to choose: with all workers on one core, or GPU."""
        is_single_core = self.topology.shares_memory_bus and not self.cores.are_apart
        return self._roles == "elastic" and is_single_core

    def switch(self, roles: str) -> None:
        """Place what comes by other roles; the caller settles."""
        self._roles = roles
        self._last = None

    # What happens to workers

    def worker_ready(self, worker: str) -> None:
        """Note that a worker takes commands."""
        self.ready_workers.add(worker)
        self.cores.worker_ready(worker)

    def worker_died(self, worker: str) -> None:
        """Note that a worker is gone; it will need its cores to load again."""
        self.ready_workers -= {worker, *self.topology.mappers_of(worker)}  # those end with it
        self.cores.worker_died(worker)

    def answered(self, worker: str, report: CoresUsed) -> None:
        self.cores.answered(worker, report)

    def measured(self, place: str, steps: Several[MeasuredStep]) -> None:
        self._times_at(place).learn((StepLoad.alike(step), step.elapsed_ms) for step in steps)

    def stepped(self, worker: str, step: Stepped) -> list[Outcome]:
        """Take in a step, to be learnt from later; what has become of prompts with it."""
        load = StepLoad.of(step.entries)
        if not (load.num_prefill_tokens or load.batch):
            return []
        num_cores = step.num_cores or self._num_cores(worker)
        elapsed_ms = (step.ended_ns - step.started_ns) / 1e6
        self._waiting.append(_TimedStep(worker, num_cores, load, elapsed_ms))
        if load.batch:
            self._recent[worker].observe(load, step.ended_ns)
        return self.outcomes.stepped(worker, step, num_cores)

    def learn(self, *, is_disturbed: bool = False) -> None:
        """Learn from the steps since the last call, unless something else held them up."""
        by_place: dict[str, list[tuple[StepLoad, float]]] = {}
        for step in self._waiting:
            place = place_of(step.worker, step.num_cores)
            by_place.setdefault(place, []).append((step.load, step.elapsed_ms))
            if step.load.batch and not step.load.num_prefill_tokens:
                self._decoded = step.load
        self._waiting.clear()
        if not is_disturbed:
            for place, steps in by_place.items():
                self._times_at(place).learn(steps)
        self._num_learnt += 1
        self._borrowers = self._find_borrowers()

    def _find_borrowers(self) -> set[str]:
        """Find the kinds of steps that may gain from borrowed cores, as the profile knows them.

        Now and then all may, lest a fact from a busy minute holds for ever.
        """
        if self._num_learnt % TRY_LENDING_EVERY_S == 0 and self._num_learnt:
            return {PROMPT_MS, DECODE_MS}
        end = self.topology.names[-1]
        counts = len(self.cores.own[end]), len(self.cores.all)
        return {
            load.key().what
            for load in (StepLoad(self._max_step_tokens), self._decoded)
            if may_gain(*(self._fact(end, load, count) for count in counts))
        }

    def _fact(self, worker: str, load: StepLoad, num_cores: int) -> Fact | None:
        keys = [load.key(place_of(name, num_cores)) for name in self._like(worker)]
        return next(filter(None, map(self.profile.facts.get, keys)), None)

    # What the router asks

    def route(
        self,
        sequence: Sequence,
        candidates: list[Pair],
        running: Iterable[Sequence],
        now_ns: int,
        hits: Mapping[str, int],
    ) -> PairChoice:
        """Choose the pair of workers for a sequence that is about to be placed.

        Args:
            sequence: it has no stages yet.
            candidates: of Routes.candidates, static roles' choice first.
            running: all sequences on workers, or between two.
            now_ns: CLOCK_MONOTONIC.
            hits: positions of it by pool that are computed there.
        """
        static = candidates[0]
        if self._roles == "colocated":
            return PairChoice(Pair(static.decode, static.decode), "colocated")
        if self._roles == "static" or self.acts_static:
            if not static.moves:
                return only(static)
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
            max_num_batched_tokens=self._max_step_tokens,
            slo=self.slo,
            shares_memory_bus=self.topology.shares_memory_bus,
            lends_cores=self.cores.can_lend,
            lends_for_prompts=PROMPT_MS in self._borrowers,
            lends_for_decodes=DECODE_MS in self._borrowers,
            copy_ms=self._copy_ms(sequence.num_tokens, hits, candidates),
            last=self._last,
            closed=self.outcomes.closed(),
            num_cached={w.name: hits[w.pool] for w in self.topology.workers if w.pool in hits},
            waited_ms=_waited_ms(sequence, now_ns),
        )
        return choose(situation, self._predict_ms)

    def placed(self, sequence: Sequence, choice: PairChoice, now_ns: int) -> None:
        """Record that a choice was acted on."""
        self._last = choice.pair.route
        self.counts[f"{choice.pair.route} {choice.reason}"] += 1
        if choice.forecast is not None:
            self.outcomes.begin(
                sequence.seq_id,
                choice.forecast,
                num_tokens=sequence.num_uncached_tokens,
                waited_ms=_waited_ms(sequence, now_ns),
                at_ns=now_ns,
            )

    def chunk_beside(
        self, sequence: Sequence, worker: str, held: Callable[[], Iterable[Sequence]]
    ) -> int | None:
        """Choose how many of its tokens a worker's steps may have while others decode there.

        Its route's reason says so where the worker is there for decode.

        Args:
            sequence: is about to be admitted to the worker.
            worker: computes what is left of it.
            held: lists all sequences on workers, or between two.

        Returns:
            None: its choice took account of them, or roles put both phases there on purpose.
        """
        num_left = sequence.num_tokens - sequence.num_computed_tokens
        is_chosen = sequence.spares_streams_at == worker or self._roles == "colocated"
        if num_left <= 1 or is_chosen:
            return None
        _, batch, context, *_ = self._loads(held())[worker]
        is_prefills = worker in self.topology.playing(PREFILL)
        if is_prefills and not batch:
            return LEAST_CHUNK_BESIDE  # only a death brings them there
        chunk = self._chunk_within(worker, StepLoad(0, 0.0, max(batch, 1), context), sequence)
        if not is_prefills and num_left > chunk and _BESIDE not in (sequence.route_reason or ""):
            sequence.route_reason = f"{sequence.route_reason}; {chunk} {_BESIDE}"
        return chunk

    def _chunk_within(self, worker: str, decode: StepLoad, sequence: Sequence) -> int:
        """Find the largest chunk for which a decode step may take MAX_GAP_RATIO times as long.

        It is LEAST_CHUNK_BESIDE where such steps are unknown, or take longer with more.
        """
        gap_ms, chunk = self.slowest_ms(worker, decode), self._max_step_tokens
        while gap_ms is not None and chunk > LEAST_CHUNK_BESIDE:
            step = StepLoad(chunk, chunk * sequence.num_tokens, *decode[2:])
            step_ms = self.slowest_ms(worker, step)
            if step_ms is not None and step_ms <= MAX_GAP_RATIO * gap_ms:
                return chunk
            chunk //= 2
        return LEAST_CHUNK_BESIDE

    def longest_step_ms(
        self, worker: str, running: Iterable[Sequence], most_tokens: int
    ) -> float | None:
        """Predict the longest step that a worker could be in; None: unknown."""
        tokens = batch = context = longest = 0
        for sequence in running:
            if sequence.worker != worker:
                continue
            if sequence.phase is Phase.PREFILLING:
                tokens += sequence.num_prefill_tokens_left
                longest = max(longest, sequence.num_tokens)
            else:
                batch += 1
                context += sequence.num_tokens
        tokens = min(tokens, most_tokens)
        return self.slowest_ms(worker, StepLoad(tokens, tokens * longest, batch, context))

    def move_cores(self, running: Iterable[Sequence]) -> None:
        """Bring the cores to where the work is."""
        cores = self.cores
        if not cores.can_lend:
            return
        there = [sequence for sequence in running if sequence.worker is not None]
        busy = {sequence.worker for sequence in there if sequence.worker is not None}
        kinds = {PROMPT_MS if s.phase is Phase.PREFILLING else DECODE_MS for s in there}
        if self.text_workers:
            busy |= self.text_workers
            kinds.add(PROMPT_MS)
        gains = not self._borrowers.isdisjoint(kinds or {PROMPT_MS})
        idle = [name for name in cores.own if name not in busy]
        is_quiet = len(idle) == len(cores.own)
        busy |= self.stalled  # no other waits for cores that these will not release
        is_whole = self.ready_workers == set(cores.own)
        if is_whole and (is_quiet or self._roles == "colocated"):  # the next prompt goes there
            idle = [name for name in self.topology.parked_when_colocated if name in idle] or idle
        if self._held is not None and is_quiet and is_whole:
            cores.want({name: self._held.get(name, frozenset()) for name in cores.own}, busy)
        elif self._roles == "static" or not is_whole or not idle or not gains:
            cores.want(cores.own, busy)
        elif len(idle) < len(cores.own):
            cores.want(shares(cores.own, idle), busy)

    def hold_cores(self, held: Mapping[str, Cpus] | None) -> None:
        """Give cores to workers that are timed, while nothing runs; None: as roles want them."""
        self._held = held
        if held is not None:
            self.move_cores(())

    def _loads(self, running: Iterable[Sequence]) -> dict[str, WorkerLoad]:
        """Compute each worker's load; a moving sequence counts at its decode worker."""
        tokens = dict.fromkeys(self.topology.names, 0)
        batches, contexts = dict(tokens), dict(tokens)
        for sequence in running:
            worker = sequence.stages[-1].worker
            if sequence.phase is Phase.PREFILLING and sequence.worker is not None:
                tokens[sequence.worker] += sequence.num_prefill_tokens_left
                if len(sequence.stages) == 1:
                    continue
            batches[worker] += 1
            contexts[worker] += sequence.num_computed_tokens
        return {
            name: WorkerLoad(tokens[name], batches[name], contexts[name])
            for name in self.topology.names
        }

    def _predict_ms(self, worker: str, num_cores: int, load: StepLoad) -> float | None:
        """Predict by this worker's own steps; on one bus also by another's, as all are alike."""
        for times in self._times_like(worker, num_cores):
            if (known_ms := times.predict_ms(load)) is not None:
                return known_ms
        parts = StepLoad(*load[:2]), StepLoad(batch=load.batch, context=load.context)
        self.asked.update(part.key() for part in parts if any(part))
        return None

    def _times_like(self, worker: str, num_cores: int) -> list[StepTimes]:
        return [self._times_at(place_of(name, num_cores)) for name in self._like(worker)]

    def _times_at(self, place: str) -> StepTimes:
        times = self._times.get(place)
        if times is None:
            times = self._times[place] = StepTimes(self.profile, place)
        return times

    def _like(self, worker: str) -> list[str]:
        """List workers whose steps take as long as this one's, itself first."""
        others = [name for name in self.topology.names if name != worker]
        return [worker, *others] if self.topology.shares_memory_bus else [worker]

    def _num_measured(self, kind: PredictionKind) -> int:
        """Count the measured steps of its size on the cores that it uses."""
        likes = self._times_like(kind.worker, kind.num_cores)
        return sum(times.num_prompt_steps(kind.size) for times in likes)

    def slowest_ms(self, worker: str, load: StepLoad) -> float | None:
        """Predict a step on the worker's slowest cores; None: unknown."""
        return max(self._known_ms(worker, lambda times: times.predict_ms(load)), default=None)

    def prompt_ms(self, worker: str, num_tokens: int, num_before: int) -> float | None:
        """Estimate the least time of `num_tokens` prompt tokens after `num_before`; None: unknown.

        It is a guess if steps of this size have not been measured.
        """
        size = min(num_tokens, self._max_step_tokens)
        num_attended = size * (num_before + num_tokens / 2)
        known = self._known_ms(worker, lambda times: times.guess_prompt_ms(size, num_attended))
        return min((step_ms * num_tokens / size for step_ms in known), default=None)

    def _known_ms(self, worker: str, of: Callable[[StepTimes], float | None]) -> list[float]:
        """List the times for each number of cores, by its own steps or a like worker's."""
        for like in self._like(worker):
            every = [of(t) for place, t in self._times.items() if worker_of(place) == like]
            if known := [step_ms for step_ms in every if step_ms is not None]:
                return known
        return []

    def _num_cores(self, worker: str) -> int:
        """Count the cores on which it computes now."""
        cores = self.cores
        return len(cores.used(worker) if cores.can_lend else cores.own[worker]) or 1

    def _copy_ms(
        self, num_tokens: int, hits: Mapping[str, int], pairs: list[Pair]
    ) -> dict[Pair, float]:
        """Predict the time of copying a prompt's blocks by pair; unknown pairs are left out."""
        links = {pair: self._copies.links.between(*pair) for pair in pairs if pair.moves}
        known = {
            pair: self._copies.expected_ms(link, num_tokens - hits.get(link.to_pool, 0))
            for pair, link in links.items()
        }
        return {pair: copy_ms for pair, copy_ms in known.items() if copy_ms is not None}


def _waited_ms(sequence: Sequence, now_ns: int) -> float:
    """Compute the part of a sequence's TTFT that is over; 0 once it has a token."""
    stamps = sequence.stamps
    return 0.0 if stamps.first_token_ns is not None else (now_ns - stamps.arrived_ns) / 1e6


class _RecentBatch:
    """The recent number of decoding sequences: a user with a new answer often asks again."""

    def __init__(self) -> None:
        self._load = StepLoad()
        self._at_ns = 0

    def observe(self, load: StepLoad, at_ns: int) -> None:
        """Take in a step of the decode worker."""
        if load.batch >= self._batch(at_ns):
            self._load, self._at_ns = load, at_ns

    def added_to(self, now: WorkerLoad, at_ns: int) -> WorkerLoad:
        """Add the expected sequences to the present load."""
        num_more = self._batch(at_ns) - now.batch
        if num_more <= 0:
            return now
        context = now.context + num_more * self._load.context // self._load.batch
        return now._replace(batch=now.batch + num_more, context=context, num_expected=num_more)

    def _batch(self, at_ns: int) -> int:
        elapsed_s = max(0, at_ns - self._at_ns) / 1e9
        return round(self._load.batch * math.exp2(-elapsed_s / RECENT_HALF_LIFE_S))
