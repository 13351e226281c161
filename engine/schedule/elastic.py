"""Which workers should run a sequence: predicted wait, harm and cost of every pair, and a choice.

Owns: what each pair would mean for a sequence, and the words for why one was chosen. Pure.
Invariant: the choice is one of the candidates; of those that meet the targets the cheapest, of
those that miss them the one that misses least; within a tenth, the kind of way taken before.
Never: chooses on a guess: a way whose steps have not been measured, or that turned out far from
what was predicted of it, is left out; with none left it is the first candidate, as with static
roles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.schedule.journeys import MIN_CHUNK_TOKENS, Pair
from engine.schedule.step_times import StepLoad, size_class

EXPECTED_OUTPUT_TOKENS = 64
"""What a request is taken to generate, where it may generate more."""
MOVE_COST_MS = 1.0
"""Of a handoff, and of cores that change hands for it; copies of blocks come on top."""
WAIT_SHARE = 0.1
"""Of what a prompt waits for others, in the cost: of workers that are alike the freer one."""
KEEP_RATIO = 1.1
"""A way that is better by less than this does not replace the one taken before."""
DEFAULT_TTFT_RATIO = 3.0
"""Without a target: the prompt's own time, with nobody else there, this often."""
DEFAULT_ITL_RATIO = 1.25
"""Without a target: the decode worker's step on its own cores, this often."""


@dataclass(frozen=True, slots=True)
class Slo:
    """Targets; None: relative to what the machine does undisturbed."""

    ttft_ms: int | None = None
    itl_ms: int | None = None


class WorkerLoad(NamedTuple):
    """What a worker has to do."""

    num_prefill_tokens: int = 0
    """Of prompts that are there already."""
    batch: int = 0
    """Sequences that decode there, or are about to."""
    context: int = 0
    """Their positions, all together."""
    num_expected: int = 0
    """Of those sequences, some who are expected back: who is placed now may be one of them."""

    @property
    def is_idle(self) -> bool:
        """True if it has nothing to do."""
        return not (self.num_prefill_tokens or self.batch)


Predict = Callable[[str, int, StepLoad], float | None]
"""A step's ms by worker, its number of cores (0 where none are lent), and its load."""


class Way(NamedTuple):
    """What is alike enough that one outcome tells of the next."""

    pair: Pair
    is_beside: bool
    """Somebody decodes where it is prefilled, or, if it moves, where it goes."""
    num_cores: int
    """On which its prompt is computed; 0 where none are lent."""
    size: int
    """Class of the prompt tokens in one of its steps, as size_class() has it."""

    @property
    def worker(self) -> str:
        """Who computes its prompt."""
        return self.pair.prefill


@dataclass(frozen=True, slots=True)
class Situation:
    """All that a choice depends on."""

    num_prompt_tokens: int
    max_tokens: int
    candidates: tuple[Pair, ...]
    """That are there, with room for its blocks; the first is that of static roles."""
    loads: Mapping[str, WorkerLoad]
    """Of every worker."""
    num_cores: Mapping[str, int]
    """Every worker's own."""
    max_step_tokens: int
    slo: Slo
    shares_memory_bus: bool
    lends_cores: bool
    """Workers with nothing to do lend theirs to the others, equal shares to each."""
    copy_ms: Mapping[Pair, float] = field(default_factory=dict)
    """To copy its blocks from the one to the other; of pairs that are left out it is unknown."""
    last: str | None = None
    """The kind of way that was taken last, as Pair.route has it."""
    num_cached: Mapping[str, int] = field(default_factory=dict)
    """By worker, of the prompt, what it would find computed."""
    closed: frozenset[Way] = frozenset()
    """Ways that turned out far worse than predicted, and have not been measured since."""


class Forecast(NamedTuple):
    """What one way would mean."""

    way: Way
    ttft_ms: float
    own_ms: float
    """The steps of its own prompt."""
    itl_ms: float
    """The longest gap of those who decode, while this prompt is computed or beside it after."""
    cost_ms: float
    """Core-ms that it adds where a memory bus is shared, else the time until it is done."""
    miss: float
    """How often the worst target is exceeded; 1 or less: both are met."""
    promise_ms: float
    """The gap that those who decode may expect: itl_ms, or the target where that is wider."""
    max_chunk_tokens: int | None = None

    @property
    def pair(self) -> Pair:
        """The prefill and decode worker of its way."""
        return self.way.pair


class PairChoice(NamedTuple):
    """A pair of workers, or one worker twice, and why."""

    pair: Pair
    reason: str
    """One of `cheapest`, `closest`, `kept`, `only`, `unknown`, `wary`, or what roles say for
    themselves."""
    about: str = ""
    max_chunk_tokens: int | None = None
    forecast: Forecast | None = None
    """What is expected of it; None: nothing was predicted."""

    @property
    def words(self) -> str:
        """The reason and what there is to say about it."""
        return ": ".join(filter(None, (self.reason, self.about)))


_UNKNOWN = "its steps are not all of sizes that have been measured; as static roles do"
_WARY = "the other ways were far worse than predicted and are not measured anew; as static roles do"


class _Unknown(Exception):
    """A step that matters is of a kind or size that has not been measured."""


def choose(situation: Situation, predict: Predict) -> PairChoice:
    """Choose how a sequence is run."""
    first = situation.candidates[0]
    if len(situation.candidates) == 1:
        return PairChoice(first, "only", "no other worker is there, or has room")
    try:
        forecasts = _Forecaster(situation, predict).all()
    except _Unknown:
        return PairChoice(first, "unknown", _UNKNOWN)
    static = forecasts[0]
    trusted = [f for f in forecasts if f.pair.moves or f is static or f.way not in situation.closed]
    if trusted == [static]:
        reason, why = ("unknown", _UNKNOWN) if len(forecasts) == 1 else ("wary", _WARY)
        return _choice(static, reason, f"; {why}")
    best = min(trusted, key=_key)
    kept = [f for f in trusted if f.pair.route == situation.last and _is_as_good(f, best)]
    if kept and situation.last != best.pair.route:
        return _choice(min(kept, key=_key), "kept")
    return _choice(best, "cheapest" if best.miss <= 1 else "closest")


def _key(forecast: Forecast) -> tuple[float, float]:
    waits_ms = WAIT_SHARE * (forecast.ttft_ms - forecast.own_ms)
    return max(forecast.miss, 1.0), forecast.cost_ms + waits_ms


def _is_as_good(forecast: Forecast, best: Forecast) -> bool:
    (miss, cost_ms), (best_miss, best_cost_ms) = _key(forecast), _key(best)
    if miss > best_miss * KEEP_RATIO:
        return False
    return best_miss > 1 or cost_ms <= best_cost_ms * KEEP_RATIO


def _choice(forecast: Forecast, reason: str, why: str = "") -> PairChoice:
    about = f"ttft {forecast.ttft_ms:.0f} ms and gaps up to {forecast.itl_ms:.1f} ms predicted{why}"
    return PairChoice(forecast.pair, reason, about, forecast.max_chunk_tokens, forecast)


class _Forecaster:
    """The arithmetic of all candidates in one situation."""

    def __init__(self, situation: Situation, predict: Predict) -> None:
        self._s = situation
        self._predict = predict
        self._busy = {name for name, load in situation.loads.items() if not load.is_idle}
        self._context = situation.num_prompt_tokens + situation.max_tokens // 2
        self._ttft_target_ms: float | None = situation.slo.ttft_ms
        if self._ttft_target_ms is None:
            # relative to what it would take undisturbed, which may not have been measured
            with suppress(_Unknown):
                worker, chunk = situation.candidates[0].decode, situation.max_step_tokens
                alone_ms = self._prompt_ms(worker, self._cores(worker, {worker}), chunk)
                self._ttft_target_ms = DEFAULT_TTFT_RATIO * alone_ms
        self._added_ms: dict[str, float] = {}
        steps_ms = []
        for end in dict.fromkeys(pair.decode for pair in situation.candidates):
            with suppress(_Unknown):
                cores = situation.num_cores[end]
                step_ms = self._decode_ms(end, cores, 1)
                steps_ms.append(step_ms)
                if situation.loads[end].batch:
                    step_ms -= self._decode_ms(end, cores, 0)
                self._added_ms[end] = self._output_ms(step_ms * cores)
        if situation.candidates[0].decode not in self._added_ms:
            raise _Unknown
        self._itl_target_ms = situation.slo.itl_ms or min(steps_ms) * DEFAULT_ITL_RATIO

    def all(self) -> list[Forecast]:
        """Every candidate that can be predicted, with each size of chunk that makes a difference.

        The first is that of static roles. Without a target there is nothing to compare by, and it
        is all there is.

        Raises:
            _Unknown: it cannot be predicted.
        """
        static, *others = self._s.candidates
        forecasts = [self._of(static, self._s.max_step_tokens)]
        if self._ttft_target_ms is None:
            return forecasts
        for pair in others:
            if pair.decode not in self._added_ms:
                continue
            for chunk in self._chunks(pair):
                with suppress(_Unknown):
                    forecasts.append(self._of(pair, chunk))
        return forecasts

    def _chunks(self, pair: Pair) -> list[int]:
        """From the largest down; one is enough where nobody waits for a step's end."""
        chunks = [self._s.max_step_tokens]
        is_beside = self._s.loads[pair.prefill].batch and not pair.moves
        while is_beside and chunks[-1] // 2 >= MIN_CHUNK_TOKENS:
            chunks.append(chunks[-1] // 2)
        return chunks

    def _of(self, pair: Pair, chunk: int) -> Forecast:
        """One worker computes the prompt in steps of a chunk; it or another goes on."""
        (first, end), load = pair, self._s.loads[pair.prefill]
        tokens, busy = self._num_left(first), self._busy | {first}
        cores, steps = self._cores(first, busy), math.ceil(tokens / chunk)
        own_ms = self._prompt_ms(first, cores, chunk, load)
        # what is there already goes at the chunk it was given, which is taken to be the same
        ahead_ms = own_ms * load.num_prefill_tokens / tokens
        itl_ms = self._decode_ms(end, self._cores(end, busy | {end}), 1)
        if load.batch:
            itl_ms = max(itl_ms, own_ms / steps)
        core_ms, more_ms = 0.0, 0.0
        if pair.moves:
            copy_ms = self._s.copy_ms.get(pair)
            if copy_ms is None:
                raise _Unknown
            # blocks go behind the steps that fill them; those of the last are waited for
            core_ms = MOVE_COST_MS + copy_ms
            more_ms = MOVE_COST_MS + copy_ms * min(chunk / tokens, 1.0)
        elif load.batch:
            core_ms = -self._decode_ms(end, cores, 0) * steps * cores
        cost_ms = own_ms * cores + core_ms + self._splits_ms(end)
        if not self._s.shares_memory_bus:
            cost_ms = ahead_ms + own_ms + more_ms + self._output_ms(itl_ms)
        ttft_ms = ahead_ms + own_ms
        target_ms = math.inf if self._ttft_target_ms is None else self._ttft_target_ms
        return Forecast(
            way=Way(
                pair,
                is_beside=any(self._s.loads[name].batch for name in pair),
                num_cores=cores,
                size=size_class(min(tokens, chunk)),
            ),
            ttft_ms=ttft_ms,
            own_ms=own_ms,
            itl_ms=itl_ms,
            cost_ms=cost_ms,
            miss=max(ttft_ms / target_ms, itl_ms / self._itl_target_ms),
            promise_ms=max(itl_ms, self._itl_target_ms),
            max_chunk_tokens=chunk if chunk < self._s.max_step_tokens else None,
        )

    def _num_left(self, worker: str) -> int:
        """Prompt tokens that a worker would have to compute."""
        return max(self._s.num_prompt_tokens - self._s.num_cached.get(worker, 0), 1)

    def _cores(self, worker: str, busy: set[str]) -> int:
        """On how many a worker computes while these do; who has nothing to do lends his."""
        own = self._s.num_cores
        if not self._s.lends_cores:
            return own[worker]
        active = [name for name in own if name in busy]
        spare = sum(count for name, count in own.items() if name not in busy)
        return own[worker] + len(range(active.index(worker), spare, len(active)))

    def _prompt_ms(
        self, worker: str, cores: int, chunk: int, beside: WorkerLoad | None = None
    ) -> float:
        """What is left of the prompt in steps of a chunk, with those who decode beside it."""
        tokens = self._num_left(worker)
        count = min(tokens, chunk)
        batch, context = (beside.batch, beside.context) if beside else (0, 0)
        attended = self._s.num_prompt_tokens - tokens / 2  # by one of those left, on average
        step = StepLoad(count, count * attended, batch, context)
        return self._step_ms(worker, cores, step) * tokens / count

    def _decode_ms(self, worker: str, cores: int, num_more: int) -> float:
        """A step of those who decode there, with so many more like this one."""
        load = self._s.loads[worker]
        num_back = min(num_more, load.num_expected)
        context = load.context + num_more * self._context
        context -= num_back * load.context // max(load.batch, 1)
        batch = load.batch + num_more - num_back
        return self._step_ms(worker, cores, StepLoad(batch=batch, context=context))

    def _step_ms(self, worker: str, cores: int, load: StepLoad) -> float:
        predicted_ms = self._predict(worker, cores, load)
        if predicted_ms is None:
            raise _Unknown
        return predicted_ms

    def _output_ms(self, itl_ms: float) -> float:
        return itl_ms * min(self._s.max_tokens, EXPECTED_OUTPUT_TOKENS)

    def _splits_ms(self, worker: str) -> float:
        """Core-ms that decoding there adds beyond where it adds least.

        Two workers that decode read the weights twice; one more in a step hardly costs anything.
        """
        return self._added_ms[worker] - min(self._added_ms.values())
