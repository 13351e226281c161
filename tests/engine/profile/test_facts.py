"""Facts: what 32 samples say, and when it is forgotten."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.profile.facts import MAX_SAMPLES, REOPEN_AFTER, Fact, FactKey, Profile

KEY = FactKey("prompt_ms", 256, 0, "decode on 2")


@given(st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=100))
def test_the_median_lies_between_the_ends_and_few_samples_are_kept(samples):
    fact = Fact()
    for sample in samples:
        fact.observe(sample)
    assert len(fact.samples) <= MAX_SAMPLES
    assert min(fact.samples) <= fact.low <= fact.value <= fact.high <= max(fact.samples)


@given(st.randoms(use_true_random=False))
def test_noise_with_stalls_hardly_moves_a_fact(rng):
    fact = Fact()
    for _ in range(200):
        stall = rng.choice([1, 1, 1, 1, 8])
        fact.observe(100 * rng.uniform(0.9, 1.1) * stall)
    assert 85 <= fact.value <= 115


def test_sixteen_samples_in_a_row_beyond_the_median_replace_it():
    fact = Fact([10.0] * MAX_SAMPLES)
    for _ in range(REOPEN_AFTER - 1):
        fact.observe(30.0)
    assert fact.value == 10.0
    fact.observe(30.0)
    assert (fact.value, len(fact.samples)) == (30.0, REOPEN_AFTER)


def test_one_that_is_within_breaks_the_row():
    fact = Fact([10.0] * MAX_SAMPLES)
    for _ in range(5):
        for _ in range(REOPEN_AFTER - 10):
            fact.observe(30.0)
        for _ in range(6):
            fact.observe(10.0)
    assert len(fact.samples) == MAX_SAMPLES


def test_what_has_changed_is_handed_out_once():
    profile = Profile()
    profile.observe(KEY, 3.0)
    profile.observe(KEY, 5.0)
    assert profile.take_changed() == {KEY: [3.0, 5.0]}
    assert profile.take_changed() == {}
    profile.put(KEY, [7.0])
    assert profile.take_changed() == {KEY: [7.0]}
    assert profile.value(*KEY) == 7.0
    assert profile.value("prompt_ms", 512, 0, "decode on 2") is None


def test_a_rate_is_the_usual_one_not_the_newest():
    profile = Profile()
    rates = [profile.observe(KEY, sample) for sample in (100.0, 90.0, 10.0, 95.0, 105.0)]
    assert rates[-1] == 95.0


@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_samples_does_not_matter_while_all_are_kept(seed):
    samples = [random.Random(seed).uniform(1, 1.4) for _ in range(MAX_SAMPLES)]
    shuffled = random.Random(seed + 1).sample(samples, len(samples))
    assert Fact(samples).value == Fact(shuffled).value
