import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.schedule.step_times import MIN_STEPS, StepLoad, StepTimes, size_class
from engine.wire.messages import SequenceStep


def truth_ms(load):
    """A machine as linear as machines are."""
    ms = 6 + 0.4 * load.batch + 0.001 * load.context
    return ms + 0.5 * load.num_prefill_tokens + 2e-4 * load.num_attended


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
    rng, times = random.Random(seed), times or StepTimes()
    for _ in range(num_steps):
        load = some_load(rng)
        times.observe(load, factor * truth_ms(load) * rng.uniform(1 - noise, 1 + noise))
    return times


CASES = [
    decode(1, 500),
    decode(8, 8000),
    prefill(512),
    prefill(128, 1000),
    prefill(256, 0, 8, 2400),
]


def test_nothing_is_predicted_before_a_few_steps_of_the_kind_are_seen():
    times = StepTimes()
    for _ in range(MIN_STEPS):
        assert times.predict_ms(decode(1, 100)) is None
        times.observe(decode(1, 100), 10)
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
    times.observe(decode(4, 2000), 60_000)
    assert times.predict_ms(decode(4, 2000)) < 1.3 * before_ms


def test_long_prompts_do_not_wash_out_what_is_known_of_decoding():
    times = learnt()
    before_ms = times.predict_ms(decode(4, 2000))
    for _ in range(1000):
        times.observe(prefill(512), truth_ms(prefill(512)))
    assert times.predict_ms(decode(4, 2000)) == before_ms


def test_a_step_larger_than_any_that_was_measured_is_not_predicted():
    times = StepTimes()
    for tokens in (4, 8, 16, 32, 64):
        times.observe(prefill(tokens), truth_ms(prefill(tokens)))
        times.observe(decode(tokens // 4, 1000), 10)
    assert times.predict_ms(prefill(50)) is not None
    assert times.predict_ms(prefill(128)) is None, "more tokens"
    assert times.predict_ms(prefill(64, 4000)) is None, "further into its prompt"
    assert times.predict_ms(prefill(50, 0, 2, 500)) is not None
    assert times.predict_ms(prefill(50, 0, 40, 500)) is None, "beside more sequences"
    assert times.predict_ms(decode(40, 1000)) is None
    times.observe(prefill(512, 4000), truth_ms(prefill(512, 4000)))
    assert times.predict_ms(prefill(64, 4000)) is not None


def test_a_size_whose_steps_keep_taking_another_time_is_not_predicted_until_they_do_not():
    times = learnt()
    assert times.predict_ms(prefill(400)) is not None
    for _ in range(60):  # slower than a line through the other sizes can say
        times.observe(prefill(400), 6 * truth_ms(prefill(400)))
        for tokens in (200, 150, 100, 512, 600, 30):
            times.observe(prefill(tokens), truth_ms(prefill(tokens)))
    assert times.predict_ms(prefill(400)) is None
    assert times.predict_ms(prefill(30)) is not None, "others are as good as before"
    for _ in range(150):
        times.observe(prefill(400), truth_ms(prefill(400)))
    assert times.predict_ms(prefill(400)) is not None


def test_jitter_to_both_sides_does_not_make_a_size_unpredictable():
    times = learnt()
    for factor in (0.6, 1.6, 0.5, 2.2) * 50:
        times.observe(decode(2, 600), factor * truth_ms(decode(2, 600)))
    assert times.predict_ms(decode(2, 600)) is not None


def test_steps_are_counted_by_their_size():
    times = learnt(20)
    same, other = size_class(500), size_class(20)
    before = times.num_prompt_steps(same), times.num_prompt_steps(other)
    times.observe(prefill(400), 100)
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
    times = StepTimes()
    for each, elapsed_ms in seen:
        times.observe(each, elapsed_ms)
    larger = StepLoad(*(a + b for a, b in zip(load, more, strict=True)))
    if bool(load.num_prefill_tokens) != bool(larger.num_prefill_tokens):
        larger = load
    low_ms, high_ms = times.predict_ms(load), times.predict_ms(larger)
    if low_ms is not None and high_ms is not None:
        assert 0 < low_ms <= high_ms * (1 + 1e-9) < float("inf")


def entry(num_computed_tokens, num_scheduled_tokens):
    return SequenceStep(
        1,
        1,
        num_computed_tokens,
        [],
        [],
        None,
        None,
        num_scheduled_tokens,
        0,
        num_scheduled_tokens == 1,
    )


def test_a_step_says_what_it_computed():
    load = StepLoad.of([entry(100, 1), entry(41, 1), entry(300, 100), entry(7, 0)])
    assert load == StepLoad(100, 100 * 250.0, 2, 141)
