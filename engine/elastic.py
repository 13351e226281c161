"""Which workers should run a sequence: predicted wait, harm and cost of every way, and a choice.

Owns: the ways there are, what each would mean, and the words for why one was chosen. Pure.
Called by: roles, for each sequence that is about to be placed.
Invariant: the choice is one of the ways open; of those that meet the targets the cheapest, of
those that miss them the one that misses least; within a tenth, the way that was taken before.
Never: chooses on a guess: a way whose steps have not been measured, or that turned out far from
what was predicted of it, is no candidate; with none left it is as with static roles.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from engine.journeys import MIN_CHUNK_TOKENS
from engine.sequence import Route
from engine.step_times import StepLoad, size_class

EXPECTED_OUTPUT_TOKENS = 64
"""What a request is taken to generate, where it may generate more."""
MOVE_COST_MS = 1.0
"""Of a handoff, and of cores that change hands for it."""
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
    is_ready: bool = True

    @property
    def is_idle(self) -> bool:
        """True if it has nothing to do."""
        return not (self.num_prefill_tokens or self.batch)


Predict = Callable[[str, bool, StepLoad], float | None]
"""A step's ms by role (`prefill` or `decode`), whether it has all cores, and its load."""


class Way(NamedTuple):
    """What is alike enough that one outcome tells of the next."""

    route: Route
    worker: str
    """Who computes its prompt."""
    is_beside: bool
    """Somebody decodes where it is prefilled, or, if it moves, where it goes."""
    has_all: bool
    """Its prompt is computed on all cores."""
    size: int
    """Class of the prompt tokens in one of its steps, as size_class() has it."""


@dataclass(frozen=True, slots=True)
class Situation:
    """All that a choice depends on."""

    num_prompt_tokens: int
    max_tokens: int
    prefill: WorkerLoad
    decode: WorkerLoad
    max_step_tokens: int
    slo: Slo
    shares_memory_bus: bool
    lends_cores: bool
    num_cores: tuple[int, int]
    """Of the prefill worker, of the decode worker."""
    fits_prefill_pool: bool = True
    """Its whole length, so that it could stay there."""
    last: Route | None = None
    names: tuple[str, str] = ("prefill", "decode")
    """Of the two workers."""
    num_cached: tuple[int, int] = (0, 0)
    """Of the prompt, what each worker would find computed."""
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
    def route(self) -> Route:
        """Of its way."""
        return self.way.route


class Choice(NamedTuple):
    """A route, and why."""

    route: Route
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
_WARY = "the other way was far worse than predicted and is not measured anew; as static roles do"


class _Unknown(Exception):
    """A step that matters is of a kind or size that has not been measured."""


def choose(situation: Situation, predict: Predict) -> Choice:
    """Choose how a sequence is run."""
    routes = _open_routes(situation)
    if len(routes) == 1:
        return Choice(routes[0], "only", "the other worker is not there")
    try:
        forecasts = _Forecaster(situation, predict).all(routes)
    except _Unknown:
        return Choice(Route.MOVE, "unknown", _UNKNOWN)
    static = next(f for f in forecasts if f.route is Route.MOVE)
    trusted = [f for f in forecasts if f is static or f.way not in situation.closed]
    if trusted == [static]:
        reason, why = ("unknown", _UNKNOWN) if len(forecasts) == 1 else ("wary", _WARY)
        return _choice(static, reason, f"; {why}")
    best = min(trusted, key=_key)
    kept = [f for f in trusted if f.route == situation.last and _is_as_good(f, best)]
    if kept and situation.last != best.route:
        return _choice(min(kept, key=_key), "kept")
    return _choice(best, "cheapest" if best.miss <= 1 else "closest")


def _open_routes(situation: Situation) -> list[Route]:
    prefill, decode = situation.prefill, situation.decode
    if prefill.is_ready == decode.is_ready:
        routes = [Route.DECODE, Route.MOVE]
        # two that decode on one bus read the weights twice
        if not situation.shares_memory_bus and situation.fits_prefill_pool:
            routes.append(Route.PREFILL)
        return routes
    if decode.is_ready:
        return [Route.DECODE]
    return [Route.PREFILL if situation.fits_prefill_pool else Route.MOVE]


def _key(forecast: Forecast) -> tuple[float, float]:
    return max(forecast.miss, 1.0), forecast.cost_ms


def _is_as_good(forecast: Forecast, best: Forecast) -> bool:
    (miss, cost_ms), (best_miss, best_cost_ms) = _key(forecast), _key(best)
    if miss > best_miss * KEEP_RATIO:
        return False
    return best_miss > 1 or cost_ms <= best_cost_ms * KEEP_RATIO


def _choice(forecast: Forecast, reason: str, why: str = "") -> Choice:
    about = f"ttft {forecast.ttft_ms:.0f} ms and gaps up to {forecast.itl_ms:.1f} ms predicted{why}"
    return Choice(forecast.route, reason, about, forecast.max_chunk_tokens, forecast)


class _Forecaster:
    """The arithmetic of all ways in one situation."""

    def __init__(self, situation: Situation, predict: Predict) -> None:
        self._s = situation
        self._predict = predict
        prefill, decode = situation.prefill, situation.decode
        self._prefill_has_all = situation.lends_cores and decode.is_idle
        self._decode_has_all = situation.lends_cores and prefill.is_idle
        self._context = situation.num_prompt_tokens + situation.max_tokens // 2
        self._ttft_target_ms: float | None = situation.slo.ttft_ms
        if self._ttft_target_ms is None:
            # relative to what it would take undisturbed, which may not have been measured
            with suppress(_Unknown):
                chunk, has_all = situation.max_step_tokens, situation.lends_cores
                self._ttft_target_ms = DEFAULT_TTFT_RATIO * self._prompt_ms(
                    "decode", has_all, chunk
                )
        own_step = self._decode_ms("decode", decode, 1, has_all=False)
        self._itl_target_ms = situation.slo.itl_ms or own_step * DEFAULT_ITL_RATIO

    def all(self, routes: list[Route]) -> list[Forecast]:
        """Every way that can be predicted, with each size of chunk that makes a difference.

        Without a target there is nothing to compare by, and the static way is all there is.

        Raises:
            _Unknown: the static way cannot be predicted.
        """
        forecasts = [self._moved()]
        if self._ttft_target_ms is None:
            return forecasts
        if Route.DECODE in routes:
            for chunk in self._chunks():
                with suppress(_Unknown):
                    forecasts.append(self._on_decode(chunk))
        if Route.PREFILL in routes:
            with suppress(_Unknown):
                forecasts.append(self._on_prefill())
        return forecasts

    def _chunks(self) -> list[int]:
        """From the largest down; one is enough where nobody waits for a step's end."""
        chunks = [self._s.max_step_tokens]
        while self._s.decode.batch and chunks[-1] // 2 >= MIN_CHUNK_TOKENS:
            chunks.append(chunks[-1] // 2)
        return chunks

    def _on_decode(self, chunk: int) -> Forecast:
        decode, has_all = self._s.decode, self._decode_has_all
        beside_ms = self._decode_ms("decode", decode, 0, has_all=has_all) if decode.batch else 0.0
        tokens = self._num_left("decode")
        steps = math.ceil(tokens / chunk)
        own_ms = self._prompt_ms("decode", has_all, chunk, decode)
        # what is there already goes at the chunk it was given, which is taken to be the same
        ahead_ms = own_ms * decode.num_prefill_tokens / tokens
        itl_ms = self._decode_ms("decode", decode, 1, has_all=has_all)
        if decode.batch:
            itl_ms = max(itl_ms, own_ms / steps)
        added_ms = own_ms - beside_ms * steps
        cost_ms = added_ms * self._num_cores(1, has_all)
        if not self._s.shares_memory_bus:
            cost_ms = ahead_ms + own_ms + self._output_ms(itl_ms)
        limit = chunk if decode.batch and chunk < self._s.max_step_tokens else None
        way = self._way(Route.DECODE, has_all, is_beside=bool(decode.batch), chunk=chunk)
        return self._forecast(way, ahead_ms, own_ms, itl_ms, cost_ms, limit)

    def _moved(self) -> Forecast:
        decode = self._s.decode
        ahead_ms, own_ms = self._prefill_ms()
        itl_ms = self._decode_ms("decode", decode, 1, has_all=False)
        cost_ms = own_ms * self._num_cores(0, self._prefill_has_all) + MOVE_COST_MS
        if not self._s.shares_memory_bus:
            cost_ms = ahead_ms + own_ms + MOVE_COST_MS + self._output_ms(itl_ms)
        way = self._way(Route.MOVE, self._prefill_has_all, is_beside=bool(decode.batch))
        return self._forecast(way, ahead_ms, own_ms, itl_ms, cost_ms)

    def _on_prefill(self) -> Forecast:
        prefill = self._s.prefill
        ahead_ms, own_ms = self._prefill_ms()
        itl_ms = self._decode_ms("prefill", prefill, 1, has_all=self._prefill_has_all)
        is_beside = not prefill.is_idle
        if is_beside:
            steps = math.ceil(self._num_left("prefill") / self._s.max_step_tokens)
            itl_ms = max(itl_ms, own_ms / steps)
        cost_ms = ahead_ms + own_ms + self._output_ms(itl_ms)
        way = self._way(Route.PREFILL, self._prefill_has_all, is_beside=is_beside)
        return self._forecast(way, ahead_ms, own_ms, itl_ms, cost_ms)

    def _prefill_ms(self) -> tuple[float, float]:
        """On the prefill worker: what is there already, and this prompt."""
        prefill = self._s.prefill
        own_ms = self._prompt_ms("prefill", self._prefill_has_all, self._s.max_step_tokens, prefill)
        return own_ms * prefill.num_prefill_tokens / self._num_left("prefill"), own_ms

    def _num_left(self, role: str) -> int:
        """Prompt tokens that the worker would have to compute."""
        return max(self._s.num_prompt_tokens - self._s.num_cached[role == "decode"], 1)

    def _way(
        self, route: Route, has_all: bool, *, is_beside: bool, chunk: int | None = None
    ) -> Way:
        worker, role = self._s.names[route is Route.DECODE], "prefill"
        if route is Route.DECODE:
            role = "decode"
        step_tokens = min(self._num_left(role), chunk or self._s.max_step_tokens)
        return Way(route, worker, is_beside, has_all, size_class(step_tokens))

    def _forecast(
        self,
        way: Way,
        ahead_ms: float,
        own_ms: float,
        itl_ms: float,
        cost_ms: float,
        chunk: int | None = None,
    ) -> Forecast:
        ttft_ms = ahead_ms + own_ms
        target_ms = math.inf if self._ttft_target_ms is None else self._ttft_target_ms
        miss = max(ttft_ms / target_ms, itl_ms / self._itl_target_ms)
        promise_ms = max(itl_ms, self._itl_target_ms)
        return Forecast(way, ttft_ms, own_ms, itl_ms, cost_ms, miss, promise_ms, chunk)

    def _prompt_ms(
        self, role: str, has_all: bool, chunk: int, beside: WorkerLoad | None = None
    ) -> float:
        """What is left of the prompt in steps of a chunk, with those who decode beside it."""
        tokens = self._num_left(role)
        count = min(tokens, chunk)
        batch, context = (beside.batch, beside.context) if beside else (0, 0)
        attended = self._s.num_prompt_tokens - tokens / 2  # by one of those left, on average
        step = StepLoad(count, count * attended, batch, context)
        return self._step_ms(role, has_all, step) * tokens / count

    def _decode_ms(self, role: str, load: WorkerLoad, num_more: int, *, has_all: bool) -> float:
        """A step of those who decode there, with so many more like this one."""
        step = StepLoad(
            batch=load.batch + num_more, context=load.context + num_more * self._context
        )
        return self._step_ms(role, has_all, step)

    def _step_ms(self, role: str, has_all: bool, load: StepLoad) -> float:
        predicted_ms = self._predict(role, has_all, load)
        if predicted_ms is None:
            raise _Unknown
        return predicted_ms

    def _output_ms(self, itl_ms: float) -> float:
        return itl_ms * min(self._s.max_tokens, EXPECTED_OUTPUT_TOKENS)

    def _num_cores(self, index: int, has_all: bool) -> int:
        return sum(self._s.num_cores) if has_all else self._s.num_cores[index]
