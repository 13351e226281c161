"""Measure steps that no request has run yet, while no request is live.

A request waits for half a layer of it at most.

Invariant: a slice ends when a request comes; a model costs at most MAX_WORK_MS; it takes empty
blocks, and they are free again when the workers have answered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import NamedTuple

from engine.profile.facts import PROMPT_MS, FactKey
from engine.profile.prompt_steps import MIN_SAMPLES
from engine.scheduler.cache.topology import PREFILL
from engine.scheduler.router import Router
from engine.scheduler.routing.core_lending import Cpus
from engine.scheduler.routing.step_times import StepLoad, place_of
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
    return list(dict.fromkeys(_decode(*each, max_model_len) for each in _DECODES))


def _prompt(num_tokens: int, before: int, max_model_len: int) -> StepShape:
    num_tokens = max(min(num_tokens, max_model_len), 1)
    return StepShape(1, num_tokens, min(before, max_model_len - num_tokens))


def _decode(num_sequences: int, before: int, max_model_len: int) -> StepShape:
    return StepShape(min(num_sequences, MAX_SEQUENCES), 1, min(before, max_model_len - 1))


def key_of(shape: StepShape, place: str) -> FactKey:
    """Return the fact of which a step of this shape is a sample."""
    return StepLoad.alike(shape).key(place)


class Turn(NamedTuple):
    """Workers that compute at the same time: on which cores, and what each is timed at."""

    cores: Mapping[str, Cpus]
    shapes: Mapping[str, list[StepShape]]
    is_alone: bool = False
    """The other process of a GPU computes nothing meanwhile."""

    def place(self, name: str) -> str:
        """Name the place of a worker's facts."""
        return ALONE if self.is_alone else place_of(name, len(self.cores[name]) or 1)


@dataclass(slots=True)
class _Slice:
    """A turn that is being measured."""

    turn: Turn
    began_ns: int
    pending: set[str]
    """Workers that have not answered."""
    told: set[str] = field(default_factory=set)
    taken: list[tuple[str, list[MeasuredStep]]] = field(default_factory=list)
    """Steps, by place."""
    is_kept: bool = True
    is_stopped: bool = False


class Measurer:
    """Measures in slices; begin() starts one, and it is over when all workers have answered.

    Args:
        router: its roles learn from it, their cores change hands for it; its ledger has the blocks.
        send: passes a command to a worker.
        sizes: of prompts' steps that may be chosen, the usual one first.
        max_model_len: positions that the model has.
        shares_gpu: two workers are processes on one GPU.
    """

    def __init__(
        self,
        router: Router,
        send: Callable[[str, Command], None],
        sizes: tuple[int, ...],
        max_model_len: int,
        *,
        shares_gpu: bool = False,
    ) -> None:
        self._shares_gpu = shares_gpu
        self._roles, self._ledger = router.roles, router.ledger
        self.profile = router.roles.profile
        self._send = send
        self._max_model_len = max_model_len
        self._sizes = sizes
        self._prompts = prompt_shapes(sizes, max_model_len)
        self._decodes = decode_shapes(max_model_len)
        self._owners = {name: -1 - index for index, name in enumerate(self._roles.topology.names)}
        """Owners of the blocks by worker; no sequence has such an id."""
        self._slice: _Slice | None = None
        self._last_id = 0
        self._left_out: set[FactKey] = set()
        """Steps that would keep a request waiting."""
        self.num_done = 0
        """Steps that were timed since the start."""
        self.work_ms = self.profile.value(*MEASURED_MS) or 0.0
        """What this model has cost so far."""

    @property
    def is_measuring(self) -> bool:
        """True from begin() until all workers have answered."""
        return self._slice is not None

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
        self._slice = _Slice(turn, now_ns, set(turn.cores))
        self._roles.hold_cores(turn.cores)
        self.go_on()
        return True

    def go_on(self) -> None:
        """Tell workers that now have their cores to begin."""
        now, cores = self._slice, self._roles.cores
        if now is None or now.is_stopped:
            return
        for name in sorted(now.pending - now.told):
            if not cores.can_lend or cores.used(name) == now.turn.cores[name]:
                now.told.add(name)
                self._tell(name, now.turn)

    def stop(self, now_ns: int) -> None:
        """End the slice at the next layer because a request arrived."""
        now = self._slice
        if now is None or now.is_stopped:
            return
        now.is_stopped = True
        self._roles.hold_cores(None)
        now.pending &= now.told
        for name in now.pending:
            self._send(name, StopMeasuring())
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
        now = self._slice
        if now is None or worker not in now.pending:
            return
        place = now.turn.place(worker)
        now.taken.append((place, report.steps))
        now.is_kept &= is_kept
        self._left_out |= {key_of(shape, place) for shape in report.too_long}
        now.pending.discard(worker)
        self._end_if_answered(now_ns)

    def worker_died(self, worker: str, now_ns: int) -> None:
        """Note that a dead worker answers no more; the ledger has its blocks back."""
        self.stop(now_ns)
        if self._slice is not None:
            self._slice.pending.discard(worker)
        self._end_if_answered(now_ns)

    def _end_if_answered(self, now_ns: int) -> None:
        now = self._slice
        if now is None or now.pending:
            return
        for place, steps in now.taken if now.is_kept else ():
            self._roles.measured(place, steps)
            self.num_done += len(steps)
        self.work_ms += (now_ns - now.began_ns) / 1e6
        self.profile.put(MEASURED_MS, [self.work_ms])
        for name in now.turn.cores:
            self._ledger.release_all(self._owners[name])
        self._slice = None
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
        pools = {name: self._roles.topology.pool_of(name) for name in turn.cores}
        shares = Counter(pools.values())
        counts = {
            pool: min(MAX_BLOCKS, len(self._ledger.pools[pool].free_block_ids) // (2 * share))
            for pool, share in shares.items()
        }
        if not all(counts.values()):
            return False
        for name, pool in pools.items():
            self._ledger.reserve(self._owners[name], {pool: counts[pool]})
        return True

    def _next(self) -> Turn | None:
        """Choose the turn with the fewest samples; None: all is known."""
        turns = [
            (count, turn)
            for turn in self._turns()
            for name in turn.cores
            for count in self._unknown(name, turn).values()
        ]
        return min(turns, key=lambda each: each[0])[1] if turns else None

    def _turns(self) -> list[Turn]:
        """First workers side by side, each on its own cores, then one at a time on all cores.

        Where they share a memory bus or a GPU some compute prompts while others decode, as they
        will when they serve.
        """
        topology, cores = self._roles.topology, self._roles.cores
        prompts, decodes = list(self._prompts), list(self._decodes)
        for key, _ in self._roles.asked.most_common(MAX_ASKED):
            shapes, make = (prompts, _prompt) if key.what == PROMPT_MS else (decodes, _decode)
            shapes.append(make(key.size, key.depth, self._max_model_len))
        every = prompts + decodes
        own = dict(cores.own)
        if sum(map(len, own.values())) > len(cores.all):  # on one core all are alike
            own = dict([*own.items()][:1])
        first = own.keys() & topology.playing(PREFILL)
        splits = [(every, every)]
        if 0 < len(first) < len(own) and (topology.shares_memory_bus or self._shares_gpu):
            splits = [(prompts, decodes), (decodes, prompts)][: 1 + self._shares_gpu]
        turns = [Turn(own, {n: a if n in first else b for n in own}) for a, b in splits]
        end = topology.names[-1]
        # on one memory bus all workers are alike on the same cores
        lone = [end] if topology.shares_memory_bus else topology.names
        if cores.can_lend:
            turns += [Turn({name: cores.all}, {name: every}) for name in lone]
        if self._shares_gpu:
            turns.append(Turn({end: cores.own[end]}, {end: every}, is_alone=True))
        return turns

    def _unknown(self, name: str, turn: Turn) -> dict[StepShape, int]:
        """Find a worker's shapes with too few samples in a turn, and how many each has."""
        counts, facts = {}, self.profile.facts
        for shape in turn.shapes[name]:
            key = key_of(shape, turn.place(name))
            count = len(facts[key].samples) if key in facts else 0
            is_choice = shape.num_tokens in self._sizes and not shape.num_before
            enough = MIN_SAMPLES if is_choice else ENOUGH_SAMPLES
            if key not in self._left_out and count < enough:
                counts[shape] = count
        return counts
