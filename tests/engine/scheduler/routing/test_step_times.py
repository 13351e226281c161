import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.profile.facts import Profile
from engine.scheduler.routing.step_times import (
    MARGIN,
    MIN_STEPS,
    StepLoad,
    StepTimes,
    depth_class,
    size_class,
)
from tests.worlds.fake_workers import sequence_step


def truth_ms(load):
    """A machine as linear as machines are."""
    ms = 6 + 0.4 * load.batch + 0.001 * load.context
    return ms + 0.5 * load.num_prefill_tokens + 2e-4 * load.num_attended


def new():
    return StepTimes(Profile(), "w on 1")


def learn(times, load, elapsed_ms):
    times.learn([(load, elapsed_ms)])


def decode(batch, context):
    return StepLoad(batch=batch, context=context)


def prefill(tokens, start=0, batch=0, context=0):
    return StepLoad(tokens, tokens * (start + tokens / 2), batch, context)


def some_load(rng):
    batch = rng.randint(1, 16)
    if rng.random() < 0.6:
        return decode(batch, batch * rng.randint(10, 2000))
    beside = rng.choice([0, batch])
    return prefill(rng.randint(8, 512), rng.randint(0, 1500), beside, beside * 300)


def learnt(num_steps=400, *, seed=0, noise=0.05, factor=1.0, times=None):
    rng, times = random.Random(seed), times or new()
    for _ in range(num_steps):
        load = some_load(rng)
        learn(times, load, factor * truth_ms(load) * rng.uniform(1 - noise, 1 + noise))
    return times


CASES = [
    decode(1, 500),
    decode(8, 8000),
    prefill(512),
    prefill(128, 1000),
    prefill(256, 0, 8, 2400),
]


def test_nothing_is_predicted_before_a_few_steps_of_the_kind_are_seen():
    times = new()
    for _ in range(MIN_STEPS):
        assert times.predict_ms(decode(1, 100)) is None
        learn(times, decode(1, 100), 10)
    assert times.predict_ms(decode(1, 100)) == pytest.approx(10, rel=0.01)
    assert times.predict_ms(prefill(100)) is None


@pytest.mark.parametrize("load", CASES)
def test_a_linear_machine_is_learnt_within_a_fifth(load):
    assert learnt().predict_ms(load) == pytest.approx(truth_ms(load), rel=0.2)


@pytest.mark.parametrize("load", CASES)
def test_a_machine_that_becomes_slower_is_followed(load):
    times = learnt(800, factor=2.0, seed=1, times=learnt())
    assert times.predict_ms(load) == pytest.approx(2 * truth_ms(load), rel=0.25)


def test_one_stall_hardly_moves_a_prediction():
    times = learnt()
    before_ms = times.predict_ms(decode(4, 2000))
    learn(times, decode(4, 2000), 60_000)
    assert times.predict_ms(decode(4, 2000)) < 1.3 * before_ms


def test_steps_beside_something_else_hardly_move_a_size_of_few_samples():
    times = new()
    for tokens in (64, 256):
        for factor in (2.4, 1.0, 1.05, 3.0, 1.9):
            learn(times, prefill(tokens), factor * truth_ms(prefill(tokens)))
    assert times.predict_ms(prefill(256)) == pytest.approx(truth_ms(prefill(256)), rel=0.1)


def test_long_prompts_do_not_wash_out_what_is_known_of_decoding():
    times = learnt()
    before_ms = times.predict_ms(decode(4, 2000))
    for _ in range(1000):
        learn(times, prefill(512), truth_ms(prefill(512)))
    assert times.predict_ms(decode(4, 2000)) == before_ms


def test_beyond_what_was_measured_two_sizes_are_needed_and_a_margin_is_added():
    times = new()
    for _ in range(MIN_STEPS):
        learn(times, prefill(64), truth_ms(prefill(64)))
    assert times.predict_ms(prefill(50)) is not None
    assert times.predict_ms(prefill(256)) is None, "one size says nothing of the form"
    learn(times, prefill(16), truth_ms(prefill(16)))
    own_ms, most_ms = truth_ms(prefill(64)), times.predict_ms(prefill(256))
    assert most_ms == pytest.approx(4 * own_ms * MARGIN, rel=0.01)
    assert times.predict_ms(prefill(64, 4000)) is None, "attention has not been measured"
    learn(times, prefill(64, 1000), truth_ms(prefill(64, 1000)))
    deep = prefill(64, 4000)
    assert truth_ms(deep) < times.predict_ms(deep) <= MARGIN**2 * truth_ms(deep)


def test_a_prompt_beside_sequences_needs_both_kinds():
    times = new()
    for tokens in (16, 32, 64):
        learn(times, prefill(tokens), truth_ms(prefill(tokens)))
    assert times.predict_ms(prefill(50, 0, 2, 200)) is None
    for batch in (1, 2, 4):
        learn(times, decode(batch, batch * 100), truth_ms(decode(batch, batch * 100)))
    assert times.predict_ms(prefill(50, 0, 2, 200)) > times.predict_ms(prefill(50))


def test_between_two_sizes_lies_a_straight_line():
    times = new()
    for tokens, ms in ((64, 10.0), (64, 10.0), (256, 70.0), (256, 70.0)):
        learn(times, prefill(tokens), ms)
    assert times.predict_ms(prefill(160)) == pytest.approx(40, rel=0.01)


def test_a_step_is_entered_under_the_nearest_sizes_as_it_would_have_been_with_those():
    times = new()
    for tokens in (128, 256, 512):
        for _ in range(MIN_STEPS):
            learn(times, prefill(tokens), tokens / 4)
    for tokens in (200, 300, 350) * 3:
        learn(times, prefill(tokens), tokens / 4)
    assert times.predict_ms(prefill(256)) == pytest.approx(64, rel=0.02)


def test_a_size_that_becomes_slower_is_known_anew_after_sixteen_steps():
    times = new()
    for tokens in (64, 128, 256, 512) * 16:
        learn(times, prefill(tokens), truth_ms(prefill(tokens)))
    slow_ms = 3 * truth_ms(prefill(256))
    for _ in range(16):
        learn(times, prefill(256), slow_ms)
    assert times.predict_ms(prefill(256)) == pytest.approx(slow_ms, rel=0.2)


@pytest.mark.parametrize(("size", "cls"), [(1, 1), (3, 4), (5, 4), (6, 8), (300, 256), (400, 512)])
def test_sizes_go_to_the_nearest_power_of_two(size, cls):
    assert size_class(size) == cls


def test_few_positions_before_a_step_count_as_none():
    assert [depth_class(depth) for depth in (0, 100, 200, 1000)] == [0, 0, 256, 1024]


def test_jitter_to_both_sides_does_not_make_a_size_unpredictable():
    times = learnt()
    for factor in (0.6, 1.6, 0.5, 2.2) * 50:
        learn(times, decode(2, 600), factor * truth_ms(decode(2, 600)))
    assert times.predict_ms(decode(2, 600)) is not None


def test_steps_are_counted_by_their_size():
    times = learnt(20)
    same, other = size_class(500), size_class(20)
    before = times.num_prompt_steps(same), times.num_prompt_steps(other)
    learn(times, prefill(400), 100)
    assert (times.num_prompt_steps(same), times.num_prompt_steps(other)) == (
        before[0] + 1,
        before[1],
    )


LOADS = st.one_of(
    st.builds(decode, st.integers(1, 256), st.integers(0, 500_000)),
    st.builds(prefill, st.integers(2, 4096), st.integers(0, 100_000), st.integers(0, 200)),
)


@settings(deadline=None)
@given(st.lists(st.tuples(LOADS, st.floats(1e-4, 1e5)), max_size=40), LOADS, LOADS)
def test_whatever_was_seen_predictions_are_positive_and_grow_with_the_step(seen, load, more):
    times = new()
    for each, elapsed_ms in seen:
        learn(times, each, elapsed_ms)
    larger = StepLoad(*(a + b for a, b in zip(load, more, strict=True)))
    if bool(load.num_prefill_tokens) != bool(larger.num_prefill_tokens):
        larger = load
    low_ms, high_ms = times.predict_ms(load), times.predict_ms(larger)
    if low_ms is not None and high_ms is not None:
        assert 0 < low_ms <= high_ms * (1 + 1e-9) < float("inf")


def test_a_step_says_what_it_computed():
    load = StepLoad.of(
        [sequence_step(100, 1), sequence_step(41, 1), sequence_step(300, 100), sequence_step(7, 0)]
    )
    assert load == StepLoad(100, 100 * 250.0, 2, 141)
