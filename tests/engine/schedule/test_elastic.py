from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.schedule.elastic import PairChoice, Situation, Slo, Way, WorkerLoad, choose
from engine.schedule.journeys import MIN_CHUNK_TOKENS, Pair
from engine.schedule.step_times import StepLoad

IDLE = WorkerLoad()
TWO_STREAMS = WorkerLoad(batch=2, context=1000)
PREFILLING = WorkerLoad(num_prefill_tokens=2000)
MOVE = Pair("prefill", "decode")
DECODE = Pair("decode", "decode")
PREFILL = Pair("prefill", "prefill")

CPU = Situation(
    num_prompt_tokens=1500,
    max_tokens=64,
    candidates=(MOVE, DECODE),
    loads={"prefill": IDLE, "decode": IDLE},
    num_cores={"prefill": 1, "decode": 1},
    max_step_tokens=512,
    slo=Slo(),
    shares_memory_bus=True,
    lends_cores=True,
    copy_ms={MOVE: 0.0},
)
GPUS = replace(CPU, candidates=(MOVE, DECODE, PREFILL), shares_memory_bus=False, lends_cores=False)


def linear(worker, num_cores, load):
    """20 ms to read the weights on one core, 1 ms a prompt token; both halve on two cores."""
    ms = 20 + load.num_prefill_tokens + 0.1 * load.batch + 0.001 * load.context
    return ms / num_cores


def loads(situation, **changed):
    return replace(situation, loads={**situation.loads, **changed})


def choice_of(situation, *, predict=linear, prefill=IDLE, decode=IDLE, **changes):
    return choose(replace(loads(situation, prefill=prefill, decode=decode), **changes), predict)


def route(situation, **changes):
    return choice_of(situation, **changes).pair


def test_a_lone_request_stays_on_one_worker_with_all_cores():
    choice = choose(CPU, linear)
    assert (choice.pair, choice.reason) == (DECODE, "cheapest")
    assert choice.max_chunk_tokens is None


def test_a_long_prompt_does_not_disturb_those_who_decode():
    assert route(CPU, decode=TWO_STREAMS) == MOVE


def test_who_is_placed_may_be_one_of_those_who_are_expected_back():
    def up_to_two(worker, num_cores, load):
        return None if load.batch > 2 else linear(worker, num_cores, load)

    both_back = TWO_STREAMS._replace(num_expected=1)
    assert choice_of(CPU, decode=both_back, predict=up_to_two).pair == MOVE
    assert choice_of(CPU, decode=both_back, predict=up_to_two).forecast is not None
    assert choice_of(CPU, decode=TWO_STREAMS, predict=up_to_two).reason == "unknown"


def test_a_prompt_that_the_step_hardly_notices_is_prefilled_beside_them():
    assert route(CPU, decode=TWO_STREAMS, num_prompt_tokens=4) == DECODE


def test_a_generous_gap_target_allows_chunks_that_keep_it():
    choice = choice_of(CPU, decode=TWO_STREAMS, slo=Slo(itl_ms=100))
    assert choice.pair == DECODE
    assert linear("decode", 2, StepLoad(choice.max_chunk_tokens, 0.0, 2, 1000)) <= 100


def test_a_queue_too_long_for_the_target_spills_to_the_decode_worker():
    flood = WorkerLoad(num_prefill_tokens=60_000)
    choice = choice_of(CPU, prefill=flood, decode=TWO_STREAMS)
    assert (choice.pair, choice.reason) == (DECODE, "closest")
    assert choice.max_chunk_tokens >= MIN_CHUNK_TOKENS


def test_a_target_for_the_first_token_decides_when_it_spills():
    busy = {"prefill": PREFILLING, "decode": TWO_STREAMS}
    assert route(CPU, **busy) == MOVE
    assert route(CPU, **busy, slo=Slo(ttft_ms=300, itl_ms=2000)) == DECODE


def test_an_idle_gpu_for_prefill_takes_a_share_of_the_decodes():
    crowd = WorkerLoad(batch=60, context=60_000)
    assert route(GPUS, decode=crowd, num_prompt_tokens=64) == PREFILL
    a_few_stay = WorkerLoad(batch=60, context=60_000)
    assert route(GPUS, decode=crowd, prefill=a_few_stay, num_prompt_tokens=64) != PREFILL


def test_what_stays_on_a_gpu_for_prefill_must_fit_there():
    crowd = WorkerLoad(batch=60, context=60_000)
    assert route(GPUS, decode=crowd, candidates=(MOVE, DECODE)) != PREFILL


def test_while_step_times_are_unknown_roles_are_static():
    choice = choose(CPU, lambda *_: None)
    assert (choice.pair, choice.reason) == (MOVE, "unknown")


def test_a_way_that_cannot_be_predicted_is_not_taken_and_that_is_said():
    def alone_only(worker, num_cores, load):
        is_mixed = load.num_prefill_tokens and load.batch
        return None if is_mixed else linear(worker, num_cores, load)

    choice = choice_of(CPU, predict=alone_only, decode=TWO_STREAMS, slo=Slo(itl_ms=5000))
    assert (choice.pair, choice.reason) == (MOVE, "unknown")
    assert choice.forecast is not None, "of the way taken there is one"
    assert route(CPU, decode=TWO_STREAMS, slo=Slo(itl_ms=5000)) == DECODE


def test_a_way_that_is_closed_is_not_taken_and_others_are():
    busy = replace(loads(CPU, decode=TWO_STREAMS), num_prompt_tokens=4)
    first = choose(busy, linear)
    assert first.pair == DECODE
    choice = choose(replace(busy, closed=frozenset({first.forecast.way})), linear)
    assert (choice.pair, choice.reason) == (MOVE, "wary")
    assert first.forecast.way == Way(DECODE, is_beside=True, num_cores=2, size=3)
    larger = replace(busy, closed=frozenset({first.forecast.way._replace(size=4)}))
    assert choose(larger, linear) == first


def test_a_forecast_promises_the_target_where_that_is_wider():
    busy = replace(loads(CPU, decode=TWO_STREAMS), slo=Slo(itl_ms=5000))
    assert choose(busy, linear).forecast.promise_ms == 5000
    missed = choose(replace(busy, slo=Slo(itl_ms=1)), linear).forecast
    assert missed.promise_ms == missed.itl_ms


def test_a_way_that_is_hardly_better_does_not_replace_the_last_one():
    last = choose(replace(CPU, last="move"), linear)
    assert (last.pair, last.reason) == (MOVE, "kept")
    far = choice_of(CPU, last="move", num_prompt_tokens=4, decode=TWO_STREAMS)
    assert far.pair == DECODE


TWO_BY_TWO = replace(
    CPU,
    candidates=tuple(
        Pair(first, end)
        for first, end in [("p", "d"), ("p", "e"), ("q", "d"), ("q", "e"), ("d", "d"), ("e", "e")]
    ),
    loads=dict.fromkeys("pqde", IDLE),
    num_cores=dict.fromkeys("pqde", 1),
    lends_cores=False,
)
TWO_BY_TWO = replace(TWO_BY_TWO, copy_ms=dict.fromkeys(TWO_BY_TWO.candidates, 1.0))


def of_two_by_two(*, predict=linear, shares_memory_bus=True, without=(), copy_ms=None, **changed):
    kept = tuple(p for p in TWO_BY_TWO.candidates if not set(p) & set(without))
    known = {**TWO_BY_TWO.copy_ms, **(copy_ms or {})}
    situation = replace(TWO_BY_TWO, candidates=kept, shares_memory_bus=shares_memory_bus)
    return choose(replace(loads(situation, **changed), copy_ms=known), predict)


STREAMS = {"d": TWO_STREAMS, "e": TWO_STREAMS}


def test_a_prompt_goes_to_whichever_prefill_worker_has_less_before_it():
    assert of_two_by_two(**STREAMS, p=PREFILLING).pair.prefill == "q"
    assert of_two_by_two(**STREAMS, q=PREFILLING).pair.prefill == "p"


def test_one_more_decodes_where_it_adds_least_on_one_bus_and_where_fewest_are_on_two():
    crowd = {"d": WorkerLoad(batch=60, context=60_000), "e": TWO_STREAMS}
    assert of_two_by_two(d=TWO_STREAMS).pair.decode == "d", "who decodes already reads the weights"
    assert of_two_by_two(e=TWO_STREAMS).pair.decode == "e"
    assert of_two_by_two(**crowd).pair.decode == "e", "gaps there are half as long"
    assert of_two_by_two(**crowd, shares_memory_bus=False).pair.decode == "e"
    assert of_two_by_two(d=TWO_STREAMS, shares_memory_bus=False).pair.decode == "e"


def test_of_two_links_the_faster_is_taken():
    slow = {Pair(first, "d"): 50.0 for first in "pq"}
    assert of_two_by_two(**STREAMS, copy_ms=slow).pair.decode == "e"
    unknown = dict.fromkeys(slow)
    assert of_two_by_two(**STREAMS, copy_ms=unknown).reason == "unknown", "the static way's is not"


@pytest.mark.parametrize("without", ["", "q", "e", "qe"])
@pytest.mark.parametrize("shares_memory_bus", [True, False])
def test_ignorance_is_the_static_pair_among_any_number_of_workers(without, shares_memory_bus):
    choice = of_two_by_two(
        predict=lambda *_: None, shares_memory_bus=shares_memory_bus, without=without, **STREAMS
    )
    assert (choice.pair, choice.reason) == (Pair("p", "d"), "unknown")


def test_idle_workers_lend_equal_shares_of_their_cores():
    asked = set()

    def seen(worker, num_cores, load):
        asked.add((worker, num_cores, bool(load.num_prefill_tokens)))
        return linear(worker, num_cores, load)

    three = replace(
        CPU,
        candidates=(Pair("p", "d"), Pair("d", "d")),
        loads={"p": IDLE, "q": IDLE, "d": TWO_STREAMS},
        num_cores={"p": 2, "q": 2, "d": 2},
        copy_ms={Pair("p", "d"): 0.0},
    )
    choose(three, seen)
    assert ("p", 3, True) in asked, "beside the one that decodes"
    assert ("d", 6, True) in asked


NAMES = ("p", "q", "d")
LOADS = st.builds(WorkerLoad, st.integers(0, 50_000), st.integers(0, 200), st.integers(0, 200_000))
PAIRS = st.sampled_from([Pair(a, b) for a in NAMES for b in NAMES])
SITUATIONS = st.builds(
    Situation,
    num_prompt_tokens=st.integers(1, 30_000),
    max_tokens=st.integers(1, 4096),
    candidates=st.lists(PAIRS, min_size=1, unique=True).map(tuple),
    loads=st.fixed_dictionaries(dict.fromkeys(NAMES, LOADS)),
    num_cores=st.fixed_dictionaries(dict.fromkeys(NAMES, st.integers(1, 8))),
    max_step_tokens=st.sampled_from([8, 512, 2048]),
    slo=st.builds(
        Slo,
        st.one_of(st.none(), st.integers(1, 10_000)),
        st.one_of(st.none(), st.integers(1, 10_000)),
    ),
    shares_memory_bus=st.booleans(),
    lends_cores=st.booleans(),
    copy_ms=st.dictionaries(PAIRS, st.floats(0, 1000)),
    last=st.one_of(st.none(), st.sampled_from(["move", *NAMES])),
)


@settings(deadline=None)
@given(SITUATIONS)
def test_every_situation_has_a_choice_that_is_open(situation):
    choice = choose(situation, linear)
    assert isinstance(choice, PairChoice)
    assert choice.reason
    assert choice.pair in situation.candidates
    if choice.pair != situation.candidates[0] and choice.pair.moves:
        assert choice.pair in situation.copy_ms, "no guess"
    if choice.max_chunk_tokens is not None:
        assert not choice.pair.moves
        assert 1 <= choice.max_chunk_tokens < situation.max_step_tokens
    assert choose(situation, linear) == choice
