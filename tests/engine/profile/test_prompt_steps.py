"""How many prompt tokens a step computes: by facts, with a default that is hard to beat."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.profile.facts import PROMPT_MS, Fact, FactKey, Profile
from engine.profile.prompt_steps import MIN_SAMPLES as NINE
from engine.profile.prompt_steps import STEP_TOKENS, choose_prompt_steps, may_gain

LENT = "decode on 2"
DEFAULT = STEP_TOKENS[0]


def known(ms_by_size):
    profile = Profile()
    for size, samples in ms_by_size.items():
        profile.put(FactKey(PROMPT_MS, size, 0, LENT), samples)
    return profile


def choice(ms_by_size):
    return choose_prompt_steps(known(ms_by_size), STEP_TOKENS, LENT)


def test_without_facts_it_is_the_default():
    found = choice({})
    assert found.step_tokens == DEFAULT
    assert "default" in found.why


@pytest.mark.parametrize(
    ("ms_128", "ms_256", "ms_512", "size"),
    [
        (65, 110, 220, 256),
        (55, 110, 215, 256),
        (65, 110, 190, 512),
        (45, 110, 215, 128),
        (45, 110, 150, 512),
    ],
)
def test_a_size_replaces_the_default_where_its_rate_is_clearly_better(ms_128, ms_256, ms_512, size):
    found = choice({128: [ms_128] * NINE, 256: [ms_256] * NINE, 512: [ms_512] * NINE})
    assert found.step_tokens == size


def test_a_spread_that_reaches_the_defaults_keeps_the_default():
    assert choice({256: [110] * NINE, 512: [190] * (NINE - 1) + [230]}).step_tokens == DEFAULT


def test_few_samples_change_nothing():
    few = {256: [110] * NINE, 512: [150] * (NINE - 1)}
    assert choice(few).step_tokens == DEFAULT


@given(st.integers(0, 1000))
def test_ten_noisy_profiles_of_one_machine_choose_alike(seed):
    rng = random.Random(seed)
    found = {
        choice(
            {size: [size / 2.3 * rng.uniform(1, 1.3) for _ in range(NINE)] for size in STEP_TOKENS}
        ).step_tokens
        for _ in range(10)
    }
    assert found == {DEFAULT}


@pytest.mark.parametrize(
    ("own_ms", "lent_ms", "gains"),
    [
        ([200], [100], True),
        ([105], [100], False),
        ([105] * 8 + [130] * 2, [100], True),
        ([200], None, True),
        (None, [100], True),
    ],
)
def test_borrowed_cores_are_tried_until_they_are_known_to_bring_nothing(own_ms, lent_ms, gains):
    own, lent = (None if ms is None else Fact(ms * NINE) for ms in (own_ms, lent_ms))
    assert may_gain(own, lent) is gains
