from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.elastic import MIN_CHUNK_TOKENS, Choice, Situation, Slo, WorkerLoad, choose
from engine.sequence import Route
from engine.step_times import StepLoad

IDLE = WorkerLoad()
TWO_STREAMS = WorkerLoad(batch=2, context=1000)
PREFILLING = WorkerLoad(num_prefill_tokens=2000)
DOWN = WorkerLoad(is_ready=False)

CPU = Situation(
    num_prompt_tokens=1500,
    max_tokens=64,
    prefill=IDLE,
    decode=IDLE,
    max_step_tokens=512,
    slo=Slo(),
    shares_memory_bus=True,
    lends_cores=True,
    num_cores=(1, 1),
)
GPUS = replace(CPU, shares_memory_bus=False, lends_cores=False)


def linear(role, has_all, load):
    """20 ms to read the weights on one core, 1 ms a prompt token; both halve on all cores."""
    ms = 20 + load.num_prefill_tokens + 0.1 * load.batch + 0.001 * load.context
    return ms / 2 if has_all else ms


def route(situation, **changes):
    return choose(replace(situation, **changes), linear).route


def test_a_lone_request_stays_on_one_worker_with_all_cores():
    choice = choose(CPU, linear)
    assert (choice.route, choice.reason) == (Route.DECODE, "cheapest")
    assert choice.max_chunk_tokens is None


def test_a_long_prompt_does_not_disturb_those_who_decode():
    assert route(CPU, decode=TWO_STREAMS) is Route.MOVE


def test_a_prompt_that_the_step_hardly_notices_is_prefilled_beside_them():
    assert route(CPU, decode=TWO_STREAMS, num_prompt_tokens=4) is Route.DECODE


def test_a_generous_gap_target_allows_chunks_that_keep_it():
    choice = choose(replace(CPU, decode=TWO_STREAMS, slo=Slo(itl_ms=100)), linear)
    assert choice.route is Route.DECODE
    assert linear("decode", True, StepLoad(choice.max_chunk_tokens, 0.0, 2, 1000)) <= 100


def test_a_queue_too_long_for_the_target_spills_to_the_decode_worker():
    flood = WorkerLoad(num_prefill_tokens=60_000)
    choice = choose(replace(CPU, prefill=flood, decode=TWO_STREAMS), linear)
    assert (choice.route, choice.reason) == (Route.DECODE, "closest")
    assert choice.max_chunk_tokens >= MIN_CHUNK_TOKENS


def test_a_target_for_the_first_token_decides_when_it_spills():
    busy = replace(CPU, prefill=PREFILLING, decode=TWO_STREAMS)
    assert route(busy) is Route.MOVE
    assert route(busy, slo=Slo(ttft_ms=300, itl_ms=2000)) is Route.DECODE


def test_on_one_memory_bus_decoding_is_never_split():
    for prefill in (IDLE, PREFILLING):
        for decode in (IDLE, TWO_STREAMS, WorkerLoad(batch=100, context=90_000)):
            assert route(CPU, prefill=prefill, decode=decode) is not Route.PREFILL


def test_an_idle_gpu_for_prefill_takes_a_share_of_the_decodes():
    crowd = WorkerLoad(batch=60, context=60_000)
    assert route(GPUS, decode=crowd, num_prompt_tokens=64) is Route.PREFILL
    a_few_stay = WorkerLoad(batch=60, context=60_000)
    assert route(GPUS, decode=crowd, prefill=a_few_stay, num_prompt_tokens=64) is not Route.PREFILL


def test_what_stays_on_a_gpu_for_prefill_must_fit_there():
    crowd = WorkerLoad(batch=60, context=60_000)
    assert route(GPUS, decode=crowd, fits_prefill_pool=False) is not Route.PREFILL


@pytest.mark.parametrize(
    ("prefill", "decode", "expected"),
    [(DOWN, TWO_STREAMS, Route.DECODE), (IDLE, DOWN, Route.PREFILL)],
)
def test_with_one_worker_down_the_other_does_it_all(prefill, decode, expected):
    choice = choose(replace(CPU, prefill=prefill, decode=decode), lambda *_: None)
    assert (choice.route, choice.reason) == (expected, "only")


def test_while_step_times_are_unknown_roles_are_static():
    choice = choose(CPU, lambda *_: None)
    assert (choice.route, choice.reason) == (Route.MOVE, "unknown")


def test_a_way_that_cannot_be_predicted_is_not_taken_and_that_is_said():
    def alone_only(role, has_all, load):
        is_mixed = load.num_prefill_tokens and load.batch
        return None if is_mixed else linear(role, has_all, load)

    choice = choose(replace(CPU, decode=TWO_STREAMS, slo=Slo(itl_ms=5000)), alone_only)
    assert (choice.route, choice.reason) == (Route.MOVE, "unknown")
    assert choice.forecast is not None, "of the way taken there is one"
    assert route(CPU, decode=TWO_STREAMS, slo=Slo(itl_ms=5000)) is Route.DECODE


def test_a_way_that_is_closed_is_not_taken_and_others_are():
    busy = replace(CPU, decode=TWO_STREAMS, num_prompt_tokens=4)
    first = choose(busy, linear)
    assert first.route is Route.DECODE
    choice = choose(replace(busy, closed=frozenset({first.forecast.way})), linear)
    assert (choice.route, choice.reason) == (Route.MOVE, "wary")
    assert first.forecast.way == (Route.DECODE, "decode", True, True, 3)
    larger = replace(busy, closed=frozenset({first.forecast.way._replace(size=4)}))
    assert choose(larger, linear) == first


def test_a_forecast_promises_the_target_where_that_is_wider():
    busy = replace(CPU, decode=TWO_STREAMS, slo=Slo(itl_ms=5000))
    assert choose(busy, linear).forecast.promise_ms == 5000
    missed = choose(replace(busy, slo=Slo(itl_ms=1)), linear).forecast
    assert missed.promise_ms == missed.itl_ms


def test_a_way_that_is_hardly_better_does_not_replace_the_last_one():
    last = choose(replace(CPU, last=Route.MOVE), linear)
    assert (last.route, last.reason) == (Route.MOVE, "kept")
    far = choose(replace(CPU, last=Route.MOVE, num_prompt_tokens=4, decode=TWO_STREAMS), linear)
    assert far.route is Route.DECODE


LOADS = st.builds(
    WorkerLoad, st.integers(0, 50_000), st.integers(0, 200), st.integers(0, 200_000), st.booleans()
)
SITUATIONS = st.builds(
    Situation,
    num_prompt_tokens=st.integers(1, 30_000),
    max_tokens=st.integers(1, 4096),
    prefill=LOADS,
    decode=LOADS,
    max_step_tokens=st.sampled_from([8, 512, 2048]),
    slo=st.builds(
        Slo,
        st.one_of(st.none(), st.integers(1, 10_000)),
        st.one_of(st.none(), st.integers(1, 10_000)),
    ),
    shares_memory_bus=st.booleans(),
    lends_cores=st.booleans(),
    num_cores=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    fits_prefill_pool=st.booleans(),
    last=st.one_of(st.none(), st.sampled_from(Route)),
)


@settings(deadline=None)
@given(SITUATIONS)
def test_every_situation_has_a_choice_that_is_open(situation):
    choice = choose(situation, linear)
    assert isinstance(choice, Choice)
    assert choice.reason
    if choice.route is Route.PREFILL:
        assert situation.fits_prefill_pool
        assert not situation.shares_memory_bus or not situation.decode.is_ready
    if situation.prefill.is_ready != situation.decode.is_ready and situation.decode.is_ready:
        assert choice.route is Route.DECODE
    if choice.max_chunk_tokens is not None:
        assert choice.route is Route.DECODE
        assert 1 <= choice.max_chunk_tokens < situation.max_step_tokens
    assert choose(situation, linear) == choice
