"""Measure steps that no request has run yet, while no request is live.

Owns: what is worth knowing, in order; the slice that is being measured, its blocks and its cores.
Invariant: a slice ends when a request comes; a model costs at most MAX_WORK_MS; it takes empty
blocks, and they are free again when the workers have answered.
Never: reads a clock; takes a cached block; keeps a request waiting for more than half a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import cycle, islice
from typing import NamedTuple

from engine.cache.blocks import Ledger
from engine.cache.topology import PREFILL
from engine.profile.facts import DECODE_MS, PROMPT_MS, FactKey
from engine.profile.prompt_steps import MIN_SAMPLES
from engine.schedule.core_lending import Cpus
from engine.schedule.roles_in_force import Roles
from engine.schedule.router import Router
from engine.schedule.step_times import (
    StepLoad,
    depth_class,
    place_of,
    size_class,
)
from engine.wire.messages import (
    Command,
    MeasuredStep,
    MeasureSteps,
    StepShape,
    StepsMeasured,
    StopMeasuring,
)

ALONE = "alone"
"""The place of a process that shares its GPU, while the other one is idle."""
SLICE_MS = 250.0
MAX_WORK_MS = 15_000.0
"""Maximum time to measure one model's steps, in all its starts together."""
MEASURED_MS = FactKey("measured_ms")
"""How much of that is spent."""
ENOUGH_SAMPLES = 5
MAX_BLOCKS = 32
"""Maximum blocks of a worker's steps; deeper positions reuse them."""
MAX_SEQUENCES = 16
"""Maximum sequences of a decode step: tokens are drawn one by one while requests wait."""
MAX_ASKED = 16
"""Maximum sizes that choosers asked for, beside the usual ones."""
_MAX_STEPS = 200
"""Maximum steps in one slice; its time ends before."""
_PROMPTS = ((64, 0), (16, 0), (0, 0), (0, 2048), (32, 0), (64, 2048), (0, 4096), (0, 1024))
"""Tokens of a chunk (0: as many as a step takes) and positions before it, the most telling first.
"""
_DECODES = (
    (1, 64), (2, 64), (4, 64), (1, 1024), (4, 2048), (8, 64), (16, 64), (8, 1024), (1, 4096),
)  # fmt: skip
"""Sequences, and positions before each."""


def prompt_shapes(sizes: Iterable[int], max_model_len: int) -> list[StepShape]:
    """List the prompt chunks to measure, in order."""
    usual, *others = sizes
    wanted = [(size or usual, before) for size, before in _PROMPTS]
    wanted[3:3] = [(size, 0) for size in others]
    return list(dict.fromkeys(_prompt(*each, max_model_len) for each in wanted))


def decode_shapes(max_model_len: int) -> list[StepShape]:
    """Decode steps that are worth knowing, in order."""
    shapes = [StepShape(num, 1, min(before, max_model_len - 1)) for num, before in _DECODES]
    return list(dict.fromkeys(shapes))


def _prompt(num_tokens: int, before: int, max_model_len: int) -> StepShape:
    num_tokens = max(min(num_tokens, max_model_len), 1)
    return StepShape(1, num_tokens, min(before, max_model_len - num_tokens))


def key_of(shape: StepShape, place: str) -> FactKey:
    """Return the fact of which a step of this shape is a sample."""
    load = StepLoad.alike(shape)
    if load.batch:
        return FactKey(
            DECODE_MS, size_class(load.batch), depth_class(load.context / load.batch), place
        )
    return FactKey(
        PROMPT_MS, size_class(load.num_prefill_tokens), depth_class(shape.num_before), place
    )


class Turn(NamedTuple):
    """Workers that compute at the same time: on which cores, and what each is timed at."""

    cores: Mapping[str, Cpus]
    shapes: Mapping[str, list[StepShape]]
    is_alone: bool = False
    """The other process of a GPU computes nothing meanwhile."""

    def place(self, name: str) -> str:
        """Name the place of a worker's facts."""
        return ALONE if self.is_alone else place_of(name, len(self.cores[name]) or 1)


class Measurer:
    """Measures in slices; begin() starts one, and it is over when all workers have answered.

    Args:
        roles: learn from it; their cores change hands for it.
        ledger: has the blocks.
        send: passes a command to a worker.
        sizes: of prompts' steps that may be chosen, the usual one first.
        max_model_len: positions that the model has.
        shares_gpu: two workers are processes on one GPU.
    """

    def __init__(
        self,
        roles: Roles,
        ledger: Ledger,
        send: Callable[[str, Command], None],
        sizes: Iterable[int],
        max_model_len: int,
        *,
        shares_gpu: bool = False,
    ) -> None:
        self._shares_gpu = shares_gpu
        self._roles = roles
        self._ledger = ledger
        self._send = send
        self._max_model_len = max_model_len
        sizes = tuple(sizes)
        self._sizes = frozenset(sizes)
        self._prompts = prompt_shapes(sizes, max_model_len)
        self._decodes = decode_shapes(max_model_len)
        names = roles.topology.names
        self._owners = {name: -1 - index for index, name in enumerate(names)}
        """Owners of the blocks by worker; no sequence has such an id."""
        self._turn: Turn | None = None
        self._pending: set[str] = set()
        """Workers that have not answered in this slice."""
        self._told: set[str] = set()
        self._is_stopped = False
        self._taken: list[tuple[str, list[MeasuredStep]]] = []
        """Steps of this slice, by place."""
        self._is_kept = True
        self._began_ns = 0
        self._last_id = 0
        self._left_out: set[FactKey] = set()
        """Steps that would keep a request waiting."""
        self.num_done = 0
        """Steps that were timed since the start."""
        self.work_ms = roles.profile.value(*MEASURED_MS) or 0.0
        """What this model has cost so far."""

    @classmethod
    def of(
        cls,
        router: Router,
        send: Callable[[str, Command], None],
        sizes: Iterable[int],
        max_model_len: int,
        *,
        shares_gpu: bool,
    ) -> Measurer:
        """Measure for a router, with blocks of its pools."""
        return cls(router.roles, router.ledger, send, sizes, max_model_len, shares_gpu=shares_gpu)

    @property
    def num_facts(self) -> int:
        """Facts that are known of this machine and model."""
        return len(self._roles.profile.facts)

    @property
    def is_measuring(self) -> bool:
        """True from begin() until all workers have answered."""
        return self._turn is not None

    @property
    def num_unknown(self) -> int:
        """Facts that have too few samples."""
        return sum(len(self._unknown(name, turn)) for turn in self._turns() for name in turn.cores)

    def begin(self, now_ns: int) -> bool:
        """Start the next slice; False: all is known, or the time for it has been spent."""
        if self.is_measuring or self.work_ms >= MAX_WORK_MS:
            return False
        turn = self._next()
        if turn is None or not self._take_blocks(turn):
            return False
        self._turn, self._pending, self._told = turn, set(turn.cores), set()
        self._is_stopped, self._began_ns = False, now_ns
        self._taken, self._is_kept = [], True
        self._roles.hold_cores(turn.cores)
        self.go_on()
        return True

    def go_on(self) -> None:
        """Tell workers that now have their cores to begin."""
        if self._turn is None or self._is_stopped:
            return
        cores = self._roles.cores
        for name in sorted(self._pending - self._told):
            if not cores.can_lend or cores.used(name) == self._turn.cores[name]:
                self._told.add(name)
                self._tell(name, self._turn)

    def stop(self, now_ns: int) -> None:
        """End the slice at the next layer because a request arrived."""
        if self._turn is None or self._is_stopped:
            return
        self._is_stopped = True
        self._roles.hold_cores(None)
        for name in self._pending & self._told:
            self._send(name, StopMeasuring())
        self._pending &= self._told
        self._end_if_answered(now_ns)

    def measured(
        self, worker: str, report: StepsMeasured, now_ns: int, *, is_kept: bool = True
    ) -> None:
        """Record a worker's part of the slice.

        Args:
            worker: which.
            report: what it took.
            now_ns: CLOCK_MONOTONIC.
            is_kept: False: something else ran meanwhile, and nothing of the slice is learnt.
        """
        self._ledger.close_command(("measure", report.measurement_id, 0))
        if self._turn is None or worker not in self._pending:
            return
        place = self._turn.place(worker)
        self._taken.append((place, report.steps))
        self._is_kept &= is_kept
        self._left_out |= {key_of(shape, place) for shape in report.too_long}
        self._pending.discard(worker)
        self._end_if_answered(now_ns)

    def worker_died(self, worker: str, now_ns: int) -> None:
        """Note that a dead worker answers no more; the ledger has its blocks back."""
        self.stop(now_ns)
        self._pending.discard(worker)
        self._end_if_answered(now_ns)

    def _end_if_answered(self, now_ns: int) -> None:
        if self._turn is None or self._pending:
            return
        for place, steps in self._taken if self._is_kept else ():
            self._roles.measured(place, steps)
            self.num_done += len(steps)
        self.work_ms += (now_ns - self._began_ns) / 1e6
        self._roles.profile.put(MEASURED_MS, [self.work_ms])
        for name in self._turn.cores:
            self._ledger.release_all(self._owners[name])
        self._turn = None
        self._roles.hold_cores(None)

    def _tell(self, name: str, turn: Turn) -> None:
        pool = self._roles.topology.pool_of(name)
        block_ids = list(self._ledger.table(self._owners[name], pool))
        self._last_id += 1
        self._ledger.open_command(("measure", self._last_id, 0), name, {pool: block_ids})
        counts = self._unknown(name, turn)
        wanted = sorted(counts, key=counts.__getitem__) or turn.shapes[name]
        steps = list(islice(cycle(wanted), _MAX_STEPS))
        self._send(name, MeasureSteps(self._last_id, steps, block_ids, SLICE_MS))

    def _take_blocks(self, turn: Turn) -> bool:
        """Reserve some that hold nothing for every worker; False: there are too few of them."""
        pools, topology = self._ledger.pools, self._roles.topology
        names = [topology.pool_of(name) for name in turn.cores]
        counts = [
            min(MAX_BLOCKS, len(pools[pool].free_block_ids) // (2 * names.count(pool)))
            for pool in names
        ]
        if not all(counts):
            return False
        for name, pool, count in zip(turn.cores, names, counts, strict=True):
            self._ledger.reserve(self._owners[name], {pool: count})
        return True

    def _next(self) -> Turn | None:
        """Choose the turn with the fewest samples; None: all is known."""
        turns = self._turns()
        found = [
            (count, index)
            for index, turn in enumerate(turns)
            for name in turn.cores
            for count in self._unknown(name, turn).values()
        ]
        return turns[min(found)[1]] if found else None

    def _turns(self) -> list[Turn]:
        """First workers side by side, each on its own cores, then one at a time on all cores.

        Where they share a memory bus or a GPU some compute prompts while others decode, as they
        will when they serve.
        """
        roles = self._roles
        topology, cores, names = roles.topology, roles.cores, roles.topology.names
        asked_prompts, asked_decodes = self._asked()
        prompts, decodes = self._prompts + asked_prompts, self._decodes + asked_decodes
        is_shared = topology.shares_memory_bus or self._shares_gpu
        turns = []
        for own in apart(cores.own, are_alike=topology.shares_memory_bus):
            first = [name for name in own if name in topology.playing(PREFILL)]
            if not (is_shared and 0 < len(first) < len(own)):
                turns.append(Turn(own, dict.fromkeys(own, prompts + decodes)))
                continue
            turns.append(Turn(own, {n: prompts if n in first else decodes for n in own}))
            if self._shares_gpu:
                turns.append(Turn(own, {n: decodes if n in first else prompts for n in own}))
        # on one memory bus all workers are alike on the same cores
        if cores.can_lend:
            lone = names[-1:] if topology.shares_memory_bus else names
            turns += [Turn({name: cores.all}, {name: prompts + decodes}) for name in lone]
        if self._shares_gpu:
            end = names[-1]
            turns.append(Turn({end: cores.own[end]}, {end: prompts + decodes}, is_alone=True))
        return turns

    def _asked(self) -> tuple[list[StepShape], list[StepShape]]:
        """List steps that a chooser could not predict, the most frequent first."""
        prompts, decodes = [], []
        for load, _ in self._roles.asked.most_common(MAX_ASKED):
            if load.num_prefill_tokens:
                size = load.num_prefill_tokens
                prompts.append(_prompt(size, int(load.num_attended / size), self._max_model_len))
            if load.batch:
                before = min(load.context // load.batch, self._max_model_len - 1)
                decodes.append(StepShape(min(load.batch, MAX_SEQUENCES), 1, before))
        return prompts, decodes

    def _unknown(self, name: str, turn: Turn) -> dict[StepShape, int]:
        """Find a worker's shapes with too few samples in a turn, and how many each has."""
        counts = {}
        for shape in turn.shapes[name]:
            key = key_of(shape, turn.place(name))
            fact = self._roles.profile.facts.get(key)
            count = 0 if fact is None else len(fact.samples)
            is_choice = shape.num_tokens in self._sizes and not shape.num_before
            enough = MIN_SAMPLES if is_choice else ENOUGH_SAMPLES
            if key not in self._left_out and count < enough:
                counts[shape] = count
        return counts


def apart(own: Mapping[str, Cpus], *, are_alike: bool) -> list[dict[str, Cpus]]:
    """Turns in which no two share a core: what a prompt takes that is alone there.

    Where workers are alike, one that would wait for another of as many cores need not be measured.
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
