"""Predict what each pair of workers would mean for a sequence, and choose one.

Invariant: the choice is one of the candidates: the cheapest that meets the targets, otherwise the
one that misses them least; within a tenth, the kind of route taken before. A prompt of several
steps joins sequences that decode only if they keep their target, or if there is no other route.
Never: chooses on a guess: a route whose steps have not been measured, or that turned out far from
what was predicted of it, is left out; with none left it is the first candidate, as with static
roles, but for a short prompt that would wait there behind a longer one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.scheduler.routing.step_times import StepLoad, size_class
from engine.scheduler.routing.worker_routes import MIN_CHUNK_TOKENS, Pair

EXPECTED_OUTPUT_TOKENS = 64
"""What a request is taken to generate, where it may generate more."""
MOVE_COST_MS = 1.0
"""Cost of a handoff and of the cores that change hands; copies of blocks are added."""
WAIT_SHARE = 0.1
"""Share of a prompt's wait in its cost: a tie-break toward the less loaded worker."""
KEEP_RATIO = 1.1
"""Minimum gain of a route over the one taken before."""
LENT_CHUNK_MS = 100.0
"""Maximum chunk on borrowed cores: a request that comes meanwhile waits for its end."""
MAX_CHUNK_COST = 1.03
"""Maximum cost of a token in such a chunk, relative to a whole step."""
DEFAULT_TTFT_RATIO = 3.0
"""Default TTFT target, as a multiple of the unloaded prefill time."""
DEFAULT_ITL_RATIO = 1.25
"""Default ITL target, as a multiple of the decode step on the worker's own cores."""


@dataclass(frozen=True, slots=True)
class Slo:
    """Targets; None: relative to what the machine does undisturbed."""

    ttft_ms: int | None = None
    itl_ms: int | None = None


class WorkerLoad(NamedTuple):
    """What a worker has to do."""

    num_prefill_tokens: int = 0
    """Tokens of prompts that the worker has already."""
    batch: int = 0
    """Sequences that decode there, or are about to."""
    context: int = 0
    """Their positions, all together."""
    num_expected: int = 0
    """Sequences of the batch that are only expected; the placed one may be one of them."""

    @property
    def is_idle(self) -> bool:
        return not (self.num_prefill_tokens or self.batch)


Predict = Callable[[str, int, StepLoad], float | None]
"""A step's time in ms by worker, number of cores (0: not lent) and load."""


class PredictionKind(NamedTuple):
    """Predictions that are alike enough for one outcome to tell of the next share a kind."""

    pair: Pair
    is_beside: bool
    """Whether sequences decode at its worker or, if it moves, at its target."""
    num_cores: int
    """On which its prompt is computed; 0 where none are lent."""
    size: int
    """Class of the prompt tokens in one of its steps, as size_class() has it."""

    @property
    def worker(self) -> str:
        """The worker that computes its prompt."""
        return self.pair.prefill


@dataclass(frozen=True, slots=True)
class Situation:
    """All that a choice depends on."""

    num_prompt_tokens: int
    max_tokens: int
    candidates: tuple[Pair, ...]
    """Pairs with enough blocks for it; the first is static roles' choice."""
    loads: Mapping[str, WorkerLoad]
    """Of every worker."""
    num_cores: Mapping[str, int]
    """Every worker's own."""
    max_num_batched_tokens: int
    slo: Slo
    shares_memory_bus: bool
    lends_cores: bool
    """Workers with nothing to do lend theirs to the others, equal shares to each."""
    lends_for_prompts: bool = True
    """Whether borrowed cores may make prompts faster; if not, pure prefill borrows none."""
    lends_for_decodes: bool = True
    """Whether borrowed cores may make decode steps faster; if not, pure decode borrows none."""
    copy_ms: Mapping[Pair, float] = field(default_factory=dict)
    """Time to copy its blocks by pair; missing pairs are unknown."""
    last: str | None = None
    """The kind of route that was taken last, as Pair.route has it."""
    num_cached: Mapping[str, int] = field(default_factory=dict)
    """Prompt tokens found computed, by worker."""
    closed: frozenset[PredictionKind] = frozenset()
    """Routes that turned out far worse than predicted, and have not been measured since."""
    waited_ms: float = 0.0
    """The part of its TTFT that is over; no route changes it."""

    @property
    def is_quiet(self) -> bool:
        """True where nothing runs and idle workers lend their cores: nothing can be disturbed."""
        return self.lends_cores and all(
            not load.num_prefill_tokens and load.batch == load.num_expected
            for load in self.loads.values()
        )

    @property
    def home(self) -> Pair | None:
        """The decode worker, where idle cores are, for a lone prompt of one step; None: it is not.

        If one sequence is expected back, it may be this one.
        """
        worker = self.candidates[0].decode
        is_short = self.num_left(worker) <= self.max_num_batched_tokens
        is_lone = self.is_quiet and sum(load.batch for load in self.loads.values()) <= 1
        pair = Pair(worker, worker)
        is_there = self.shares_memory_bus and pair in self.candidates
        return pair if is_short and is_lone and is_there else None

    def num_left(self, worker: str) -> int:
        """Count the prompt tokens that a worker would have to compute; the last one always is."""
        return max(self.num_prompt_tokens - self.num_cached.get(worker, 0), 1)


class Forecast(NamedTuple):
    """What one route would mean."""

    kind: PredictionKind
    ttft_ms: float
    own_ms: float
    """The steps of its own prompt."""
    max_itl_ms: float
    """Longest ITL of the decoding sequences while this prompt is computed; without any, the ITL
    after it."""
    itl_ms: float
    """The maximum ITL during the prompt, or after it, when it decodes in the batch."""
    cost_ms: float
    """Core-ms that it adds on a shared memory bus, else the time until its end."""
    miss: float
    """How often the worst target is exceeded; 1 or less: both are met."""
    promise_ms: float
    """The ITL promised to the decoding sequences: `max_itl_ms`, or the target if that is longer."""
    max_chunk_tokens: int | None = None
    delays_streams: bool = False
    """Whether it has several steps beside sequences that would miss their ITL target."""

    @property
    def pair(self) -> Pair:
        """The prefill and decode worker of its route."""
        return self.kind.pair


class PairChoice(NamedTuple):
    """A pair of workers, or one worker twice, and why."""

    pair: Pair
    reason: str
    """One of `cheapest`, `closest`, `kept`, `alone`, `only`, `unknown`, `wary`, or what roles say
    for themselves."""
    about: str = ""
    max_chunk_tokens: int | None = None
    forecast: Forecast | None = None
    """What is expected of it; None: nothing was predicted."""
    spares_streams: bool = False
    """Whether sequences that decode beside the prompt were considered; else its chunks must be
    short beside them."""

    @property
    def words(self) -> str:
        return ": ".join(filter(None, (self.reason, self.about)))


_UNKNOWN = "step size not measured yet; default route"
_ALONE = "machine idle; all cores compute it"
_WARY = "the other routes were far slower than predicted; default route"
_SHORT = "step times not measured yet; short prompts avoid waiting behind long ones"


class _Unknown(Exception):
    """A step that matters is of a kind or size that has not been measured."""


def choose(situation: Situation, predict: Predict) -> PairChoice:
    """Choose how a sequence is run."""
    first = situation.candidates[0]
    if len(situation.candidates) == 1:
        return only(first)
    home, alone = situation.home, None
    if situation.is_quiet and first.moves:
        # a longer step of unknown time would hold up the tokens of requests that come meanwhile
        is_short = situation.num_left(first.decode) <= MIN_CHUNK_TOKENS
        pair = home if home and is_short else first
        alone = PairChoice(pair, "alone", _ALONE, spares_streams=is_short)
    try:
        forecasts = _Forecaster(situation, predict).all()
    except _Unknown:
        return alone or _short_choice(situation) or PairChoice(first, "unknown", _UNKNOWN)
    static = forecasts[0]
    trusted = [
        f for f in forecasts if f.pair.moves or f is static or f.kind not in situation.closed
    ]
    if trusted == [static]:
        if len(forecasts) > 1:
            return alone or _choice(situation, static, "wary", f"; {_WARY}")
        short = alone or _short_choice(situation)
        return short or _choice(situation, static, "unknown", f"; {_UNKNOWN}")
    trusted = [f for f in trusted if not f.delays_streams] or trusted
    if lone := [f for f in trusted if f.pair == home]:
        return _choice(situation, lone[0], "alone", f"; {_ALONE}")
    best = min(trusted, key=_key)
    kept = [f for f in trusted if f.pair.route == situation.last and _is_as_good(f, best)]
    if kept and not situation.is_quiet and situation.last != best.pair.route:
        return _choice(situation, min(kept, key=_key), "kept")
    return _choice(situation, best, "cheapest" if best.miss <= 1 else "closest")


def only(pair: Pair) -> PairChoice:
    """Take the one pair that there is."""
    about = "no other route has free blocks" if pair.moves else "no worker of the other role is up"
    return PairChoice(pair, "only", about)


def _short_choice(situation: Situation) -> PairChoice | None:
    """Choose a worker at which a short prompt does not wait for another prompt's step to end.

    Returns:
        None where it would not wait with static roles, or would wait everywhere.
    """
    loads, static = situation.loads, situation.candidates[0]
    if loads[static.prefill].num_prefill_tokens <= MIN_CHUNK_TOKENS:
        return None
    for pair in situation.candidates:
        num_tokens = loads[pair.prefill].num_prefill_tokens + situation.num_left(pair.prefill)
        if not pair.moves and num_tokens <= MIN_CHUNK_TOKENS:
            return PairChoice(pair, "unknown", _SHORT, spares_streams=True)
    return None


def _key(forecast: Forecast) -> tuple[float, float]:
    waits_ms = WAIT_SHARE * (forecast.ttft_ms - forecast.own_ms)
    return max(forecast.miss, 1.0), forecast.cost_ms + waits_ms


def _is_as_good(forecast: Forecast, best: Forecast) -> bool:
    (miss, cost_ms), (best_miss, best_cost_ms) = _key(forecast), _key(best)
    if miss > best_miss * KEEP_RATIO:
        return False
    return best_miss > 1 or cost_ms <= best_cost_ms * KEEP_RATIO


def _choice(situation: Situation, forecast: Forecast, reason: str, why: str = "") -> PairChoice:
    ttft_ms = situation.waited_ms + forecast.ttft_ms
    about = f"predicted TTFT {ttft_ms:.0f} ms, longest ITL {forecast.max_itl_ms:.1f} ms"
    about += (
        f", {forecast.itl_ms:.1f} ms after{why}" if forecast.itl_ms > forecast.max_itl_ms else why
    )
    spares = not forecast.delays_streams
    return PairChoice(forecast.pair, reason, about, forecast.max_chunk_tokens, forecast, spares)


def _lone_chunk(num_tokens: int) -> StepLoad:
    return StepLoad(num_tokens, num_tokens**2 / 2)


class _Forecaster:
    """The arithmetic of all candidates in one situation."""

    def __init__(self, situation: Situation, predict: Predict) -> None:
        self._s = situation
        self._predict = predict
        # A limit says little: most clients name none, or far more than comes.
        self._num_outputs = min(situation.max_tokens, EXPECTED_OUTPUT_TOKENS)
        self._busy = {name for name, load in situation.loads.items() if not load.is_idle}
        self._context = situation.num_prompt_tokens + self._num_outputs // 2
        self._ttft_target_ms: float | None = situation.slo.ttft_ms
        if self._ttft_target_ms is None:
            # relative to what it would take undisturbed, which may not have been measured
            with suppress(_Unknown):
                worker, chunk = situation.candidates[0].decode, situation.max_num_batched_tokens
                cores = self._prompt_cores(worker, {worker}, WorkerLoad())
                alone_ms = self._prompt_ms(worker, cores, chunk)
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
        """Forecast each candidate with each useful chunk size.

        The first is static roles' choice. Without a target it is the only one, because there is
        nothing to compare by.

        Raises:
            _Unknown: it cannot be predicted.
        """
        static, *others = self._s.candidates
        forecasts = [self._of(static, self._lent_chunk(static))]
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
        """List chunk sizes, the largest first; one is enough if nothing waits for a step's end."""
        is_beside = self._s.loads[pair.prefill].batch and not pair.moves
        chunks = [self._s.max_num_batched_tokens if is_beside else self._lent_chunk(pair)]
        while is_beside and chunks[-1] // 2 >= MIN_CHUNK_TOKENS:
            chunks.append(chunks[-1] // 2)
        return chunks

    def _lent_chunk(self, pair: Pair) -> int:
        """Halve the step until it is over soon on borrowed cores, which others may want back.

        It stays where half of it costs more: a large model's chunk is long anyway.
        """
        first, chunk = pair.prefill, self._s.max_num_batched_tokens
        cores = self._prompt_cores(first, self._busy | {first}, self._s.loads[first])
        if cores <= self._s.num_cores[first]:
            return chunk
        with suppress(_Unknown):
            chunk_ms = self._step_ms(first, cores, _lone_chunk(chunk))
            most_ms_per_token = MAX_CHUNK_COST * chunk_ms / chunk
            while chunk_ms > LENT_CHUNK_MS and (half := chunk // 2) >= MIN_CHUNK_TOKENS:
                half_ms = self._step_ms(first, cores, _lone_chunk(half))
                if half_ms > most_ms_per_token * half:
                    break
                chunk, chunk_ms = half, half_ms
        return chunk

    def _of(self, pair: Pair, chunk: int) -> Forecast:
        """Forecast a prompt on one worker in chunks, and its decode there or elsewhere."""
        (first, end), load = pair, self._s.loads[pair.prefill]
        tokens, busy = self._s.num_left(first), self._busy | {first}
        cores, steps = self._prompt_cores(first, busy, load), math.ceil(tokens / chunk)
        own_ms = self._prompt_ms(first, cores, chunk, load)
        # earlier prompts are taken to have chunks of this size
        ahead_ms = own_ms * load.num_prefill_tokens / tokens
        after_ms = self._decode_ms(end, self._cores(end, busy | {end}), 1)
        step_ms = own_ms * min(tokens, chunk) / tokens  # of the first ones; the last has the rest
        max_itl_ms, itl_target_ms = self._max_itl_ms(pair, step_ms, after_ms)
        core_ms, more_ms = 0.0, 0.0
        if pair.moves:
            copy_ms = self._s.copy_ms.get(pair)
            if copy_ms is None:
                raise _Unknown
            # blocks are copied behind the steps that fill them; the last step's are waited for
            core_ms = MOVE_COST_MS + copy_ms
            more_ms = MOVE_COST_MS + copy_ms * min(chunk / tokens, 1.0)
        elif load.batch:
            core_ms = -self._decode_ms(end, cores, 0) * steps * cores
        cost_ms = own_ms * cores + core_ms + self._splits_ms(end)
        if not self._s.shares_memory_bus:
            cost_ms = ahead_ms + own_ms + more_ms + self._output_ms(max(max_itl_ms, after_ms))
        ttft_ms = ahead_ms + own_ms
        target_ms = math.inf if self._ttft_target_ms is None else self._ttft_target_ms
        is_beside = not pair.moves and load.batch > load.num_expected
        return Forecast(
            kind=PredictionKind(
                pair,
                is_beside=any(self._s.loads[name].batch for name in pair),
                num_cores=cores,
                size=size_class(min(tokens, chunk)),
            ),
            ttft_ms=ttft_ms,
            own_ms=own_ms,
            max_itl_ms=max_itl_ms,
            itl_ms=max(max_itl_ms, after_ms),
            cost_ms=cost_ms,
            miss=max(
                ttft_ms / target_ms, max_itl_ms / itl_target_ms, after_ms / self._itl_target_ms
            ),
            promise_ms=max(max_itl_ms, itl_target_ms),
            max_chunk_tokens=chunk if chunk < self._s.max_num_batched_tokens else None,
            delays_streams=(
                is_beside and tokens > self._s.max_num_batched_tokens and max_itl_ms > itl_target_ms
            ),
        )

    def _max_itl_ms(self, pair: Pair, step_ms: float, after_ms: float) -> tuple[float, float]:
        """Predict the longest ITL while the prompt is computed; return it with its target.

        Without a target it is relative to what they have before the prompt joins them: one that is
        long makes their steps longer once it decodes, which is no reason to be slow before.
        """
        own, target_ms = self._s.num_cores, self._s.slo.itl_ms
        first, end = pair
        if self._s.loads[first].batch:
            return step_ms, target_ms or self._decode_ms(first, own[first], 0) * DEFAULT_ITL_RATIO
        if self._s.loads[end].batch:
            max_itl_ms = self._decode_ms(end, self._cores(end, self._busy | {first, end}), 0)
            return max_itl_ms, target_ms or self._decode_ms(end, own[end], 0) * DEFAULT_ITL_RATIO
        return after_ms, self._itl_target_ms

    def _cores(self, worker: str, busy: set[str]) -> int:
        """Count the cores on which a worker decodes while these compute."""
        if self._s.lends_for_decodes:
            return self._with_borrowed(worker, busy)
        return self._s.num_cores[worker]

    def _with_borrowed(self, worker: str, busy: set[str]) -> int:
        """Count a worker's cores, with its share of the idle workers' cores."""
        own = self._s.num_cores
        if not self._s.lends_cores:
            return own[worker]
        active = [name for name in own if name in busy]
        spare = sum(count for name, count in own.items() if name not in busy)
        return own[worker] + len(range(active.index(worker), spare, len(active)))

    def _prompt_cores(self, worker: str, busy: set[str], load: WorkerLoad) -> int:
        """Count a worker's cores while it computes a prompt beside its load."""
        if self._s.lends_for_prompts or (load.batch and self._s.lends_for_decodes):
            return self._with_borrowed(worker, busy)
        return self._s.num_cores[worker]

    def _prompt_ms(
        self, worker: str, cores: int, chunk: int, beside: WorkerLoad | None = None
    ) -> float:
        """Predict the rest of the prompt in chunks, with sequences decoding beside it."""
        tokens = self._s.num_left(worker)
        count = min(tokens, chunk)
        batch, context = (beside.batch, beside.context) if beside else (0, 0)
        attended = self._s.num_prompt_tokens - tokens / 2  # by one of those left, on average
        step = StepLoad(count, count * attended, batch, context)
        return self._step_ms(worker, cores, step) * tokens / count

    def _decode_ms(self, worker: str, cores: int, num_more: int) -> float:
        """Predict a decode step there, with `num_more` sequences like this one."""
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
        return itl_ms * self._num_outputs

    def _splits_ms(self, worker: str) -> float:
        """Compute the core-ms that decoding there adds beyond the cheapest worker.

        Two workers that decode read the weights twice; one more in a step hardly costs anything.
        """
        return self._added_ms[worker] - min(self._added_ms.values())
