"""Elastic roles choose a pair of workers by prediction."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduler.routing.elastic import (
    PairChoice,
    PredictionKind,
    Situation,
    Slo,
    WorkerLoad,
    choose,
)
from engine.scheduler.routing.step_times import StepLoad
from engine.scheduler.routing.worker_routes import MIN_CHUNK_TOKENS, Pair

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
    max_num_batched_tokens=512,
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
    assert choice.max_chunk_tokens is None, "chunks of 256 cost 4 % more"


@pytest.mark.parametrize(
    ("ms_by_size", "chunk"),
    [
        ({64: 20, 128: 36, 256: 72, 512: 143}, 256),  # the largest that ends soon enough
        ({64: 20, 128: 36, 256: 60, 512: 90}, None),  # the largest of all does
        ({64: 30, 128: 65, 256: 110, 512: 220}, 256),  # smaller ones cost too much
        ({64: 20, 128: 45, 256: 86, 512: 172}, 256),  # one sample flatters a small one
        ({64: 200, 128: 250, 256: 400, 512: 700}, None),  # so do they of a large model
    ],
)
def test_a_chunk_on_borrowed_cores_ends_soon_where_that_costs_little(ms_by_size, chunk):
    def known(worker, num_cores, load):
        if not load.num_prefill_tokens:
            return 10.0
        size = min(s for s in ms_by_size if s >= load.num_prefill_tokens)
        return 2.0 * ms_by_size[size] / num_cores

    assert choose(CPU, known).max_chunk_tokens == chunk
    assert choose(replace(CPU, lends_cores=False), known).max_chunk_tokens is None


@pytest.mark.parametrize("decode", [IDLE, TWO_STREAMS])
def test_a_limit_of_the_whole_context_promises_nothing_of_the_answers_length(decode):
    modest = choice_of(CPU, decode=decode)
    assert choice_of(CPU, decode=decode, max_tokens=32_000) == modest


def test_a_long_prompt_does_not_disturb_those_who_decode():
    assert route(CPU, decode=TWO_STREAMS) == MOVE


def test_gaps_that_will_be_long_after_a_prompt_are_no_leave_to_make_them_so_before():
    """Who decodes after 4,000 positions makes each step 16 ms longer, as a chunk of 64 does."""

    def deep(worker, num_cores, load):
        ms = 1 + 0.25 * load.num_prefill_tokens + 0.004 * load.context
        return ms * (1.5 if worker == "prefill" else 1)

    long = replace(CPU, lends_cores=False, num_prompt_tokens=4000)
    chats = WorkerLoad(batch=2, context=100)
    choice = choice_of(long, predict=deep, decode=chats)
    assert choice.pair == MOVE
    assert all(gap in choice.about for gap in ("1.4 ms", "17.5 ms"))
    assert choice_of(long, predict=deep, decode=chats, slo=Slo(itl_ms=40)).pair == DECODE, "allowed"


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


def test_a_long_queue_spills_to_the_decode_worker_only_if_streams_there_keep_their_target():
    flood = WorkerLoad(num_prefill_tokens=60_000)
    beside = {"prefill": flood, "decode": TWO_STREAMS}
    choice = choice_of(CPU, **beside)
    assert (choice.pair, choice.reason) == (MOVE, "closest")
    choice = choice_of(CPU, **beside, slo=Slo(itl_ms=100))
    assert (choice.pair, choice.spares_streams) == (DECODE, True)
    assert choice.max_chunk_tokens >= MIN_CHUNK_TOKENS
    assert choice_of(CPU, **beside, num_prompt_tokens=512).pair == DECODE, "one step alone"
    expected = TWO_STREAMS._replace(num_expected=2)
    assert choice_of(CPU, prefill=flood, decode=expected).pair == DECODE, "nobody is there yet"


def test_beside_streams_that_would_miss_their_target_there_is_no_route_that_spares_them():
    others = (DECODE, Pair("decode1", "decode1"))
    busy = replace(CPU, candidates=others, num_cores={"decode": 1, "decode1": 1})
    busy = replace(busy, loads={"decode": TWO_STREAMS, "decode1": TWO_STREAMS})
    assert not choose(busy, linear).spares_streams
    assert not choose(replace(busy, candidates=others[:1]), linear).spares_streams


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
    choice = choice_of(CPU, predict=lambda *_: None, decode=TWO_STREAMS)
    assert (choice.pair, choice.reason) == (MOVE, "unknown")


def test_while_step_times_are_unknown_a_short_prompt_does_not_wait_behind_a_long_one():
    def unknown(situation, **changes):
        return choice_of(situation, predict=lambda *_: None, prefill=PREFILLING, **changes)

    assert unknown(CPU, num_prompt_tokens=43).pair == DECODE
    assert unknown(CPU, num_prompt_tokens=43, decode=TWO_STREAMS).pair == DECODE
    assert unknown(CPU, num_prompt_tokens=1043, num_cached={"decode": 1000}).pair == DECODE
    assert unknown(CPU, num_prompt_tokens=MIN_CHUNK_TOKENS + 1).pair == MOVE
    crowd = WorkerLoad(num_prefill_tokens=MIN_CHUNK_TOKENS)
    assert unknown(CPU, num_prompt_tokens=43, decode=crowd).pair == MOVE


def test_a_lone_prompt_of_unknown_time_leaves_the_decode_worker_free_unless_it_is_short():
    for num_tokens, pair in ((MIN_CHUNK_TOKENS, DECODE), (MIN_CHUNK_TOKENS + 1, MOVE)):
        choice = choose(replace(CPU, num_prompt_tokens=num_tokens), lambda *_: None)
        assert (choice.pair, choice.reason) == (pair, "alone")


@pytest.mark.parametrize("predict", [linear, lambda *_: None])
def test_a_lone_prompt_of_one_step_is_computed_where_the_idle_cores_are(predict):
    def lone(num_prompt_tokens, **changes):
        return choice_of(CPU, predict=predict, num_prompt_tokens=num_prompt_tokens, **changes)

    step = CPU.max_num_batched_tokens
    assert (lone(43).pair, lone(43).reason) == (DECODE, "alone")
    assert lone(step + 900, num_cached={"decode": 900}).reason == "alone"
    one = WorkerLoad(batch=1, context=100, num_expected=1)
    assert lone(43, decode=one).pair == DECODE, "it may be the one who is expected"
    two = WorkerLoad(batch=2, context=200, num_expected=2)
    assert lone(43, decode=two).pair == MOVE
    assert lone(43, decode=WorkerLoad(batch=1, context=100)).pair == MOVE


def test_a_short_prompt_passes_a_long_one_also_where_only_its_own_step_is_unknown():
    def decode_only(worker, num_cores, load):
        return None if load.num_prefill_tokens and load.batch else linear(worker, num_cores, load)

    busy = {"prefill": PREFILLING, "decode": TWO_STREAMS, "predict": decode_only}
    choice = choice_of(CPU, num_prompt_tokens=43, slo=Slo(itl_ms=5000), **busy)
    assert (choice.pair, choice.reason) == (DECODE, "unknown")


def test_where_nothing_runs_no_prediction_is_needed():
    nothing_known = {"predict": lambda *_: None}
    choice = choice_of(CPU, **nothing_known)
    assert (choice.pair, choice.reason) == (MOVE, "alone")
    back = WorkerLoad(batch=2, context=1000, num_expected=2)
    assert choice_of(CPU, **nothing_known, decode=back).reason == "alone", "nobody is there yet"
    assert choice_of(CPU, **nothing_known, prefill=PREFILLING).reason == "unknown"
    assert choice_of(GPUS, **nothing_known).reason == "unknown", "no core would be lent"


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
    choice = choose(replace(busy, closed=frozenset({first.forecast.kind})), linear)
    assert (choice.pair, choice.reason) == (MOVE, "wary")
    assert first.forecast.kind == PredictionKind(DECODE, is_beside=True, num_cores=2, size=4)
    larger = replace(busy, closed=frozenset({first.forecast.kind._replace(size=8)}))
    assert choose(larger, linear) == first


def test_a_forecast_promises_the_target_where_that_is_wider():
    busy = replace(loads(CPU, decode=TWO_STREAMS), slo=Slo(itl_ms=5000))
    assert choose(busy, linear).forecast.promise_ms == 5000
    missed = choose(replace(busy, slo=Slo(itl_ms=1)), linear).forecast
    assert missed.promise_ms == missed.max_itl_ms < missed.itl_ms


def test_a_way_that_is_hardly_better_does_not_replace_the_last_one():
    near = {"num_prompt_tokens": 20, "decode": TWO_STREAMS, "slo": Slo(itl_ms=5000)}
    best = choice_of(CPU, **near)
    assert best.pair == DECODE
    last = choice_of(CPU, **near, last="move")
    assert (last.pair, last.reason) in {(MOVE, "kept"), (DECODE, "cheapest")}
    assert choose(replace(CPU, last="move"), linear).pair == DECODE, "nothing runs: the best way"
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


def test_prompts_that_a_second_core_does_not_help_are_forecast_on_their_own():
    asked = set()

    def seen(worker, num_cores, load):
        """Decoding halves on two cores; a prompt takes as long on two as on one."""
        asked.add((worker, num_cores, bool(load.num_prefill_tokens)))
        return 20 / num_cores + load.num_prefill_tokens

    assert choose(CPU, seen).forecast.ttft_ms == pytest.approx(1558.6, abs=0.1)
    assert ("decode", 2, True) in asked
    asked.clear()
    choice = choose(replace(CPU, lends_for_prompts=False), seen)
    assert choice.forecast.ttft_ms == pytest.approx(1558.6, abs=0.1)
    assert {(cores, is_prompt) for _, cores, is_prompt in asked} == {
        (1, True),
        (1, False),
        (2, False),
    }


def test_decodes_that_borrowed_cores_do_not_help_are_forecast_on_their_own():
    asked = set()

    def seen(worker, num_cores, load):
        asked.add((num_cores, bool(load.num_prefill_tokens)))
        return 20 + load.num_prefill_tokens / num_cores

    choose(replace(CPU, lends_for_decodes=False), seen)
    assert (1, False) in asked
    assert (2, False) not in asked
    assert (2, True) in asked


def test_smaller_steps_follow_from_the_size_that_was_measured():
    """Beside those who decode chunks are halved, from what this machine's steps have at most."""
    sizes = {}
    for most in (128, 512):
        asked = set()

        def seen(worker, num_cores, load, asked=asked):
            if load.num_prefill_tokens and load.batch:
                asked.add(load.num_prefill_tokens)
            return linear(worker, num_cores, load)

        choice_of(CPU, predict=seen, decode=TWO_STREAMS, max_num_batched_tokens=most)
        sizes[most] = asked
    assert sizes == {128: {64, 128}, 512: {64, 128, 256, 512}}


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
    max_num_batched_tokens=st.sampled_from([8, 512, 2048]),
    slo=st.builds(
        Slo,
        st.one_of(st.none(), st.integers(1, 10_000)),
        st.one_of(st.none(), st.integers(1, 10_000)),
    ),
    shares_memory_bus=st.booleans(),
    lends_cores=st.booleans(),
    lends_for_prompts=st.booleans(),
    lends_for_decodes=st.booleans(),
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
        assert 1 <= choice.max_chunk_tokens < situation.max_num_batched_tokens
    assert choose(situation, linear) == choice
