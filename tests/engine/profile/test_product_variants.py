"""Variants to multiply bfloat16: timed once, chosen by facts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.kernels.cpu import (
    DOTS,
    EXACT,
    TILES,
    VARIANT_NAMES,
    WIDENED,
    ProductVariants,
    has_kernels,
    load_kernels,
)
from engine.profile.facts import IS_WRONG, FactKey, Profile
from engine.profile.product_variants import (
    ATTENTION_TOKENS,
    ATTENTION_US,
    LEVELS,
    NUM_INPUTS,
    PRODUCT_US,
    STORED,
    choose_variants,
    try_variants,
)

KERNELS = pytest.mark.skipif(not has_kernels(), reason="no compiled kernels")


def known(level="amx", wrong=(), **times):
    """A profile with microseconds by variant, for each number of inputs."""
    profile = Profile()
    for variant in LEVELS[level]:
        is_wrong = float(VARIANT_NAMES[variant] in wrong)
        profile.put(FactKey(IS_WRONG, place=VARIANT_NAMES[variant]), [is_wrong])
    for name, taken in times.items():
        for count, us in zip(NUM_INPUTS, taken, strict=True):
            profile.put(FactKey(PRODUCT_US, count, 0, name), [us] if us else [])
    return profile


def chosen(level="amx", **options):
    return choose_variants(known(level, **options), level)


@KERNELS
@pytest.mark.parametrize("level", sorted(LEVELS))
def test_a_level_is_tried_once_and_what_it_computes_is_right(level):
    try:
        kernels, _ = load_kernels(level)
    except ImportError:
        pytest.skip("this processor does not have it")
    profile = Profile()
    try_variants(profile, kernels, level)
    assert all(
        not profile.value(IS_WRONG, place=VARIANT_NAMES[variant]) for variant in LEVELS[level]
    )
    assert len(list(profile.about(PRODUCT_US))) == len(NUM_INPUTS) * (1 + len(LEVELS[level]))
    assert choose_variants(profile, level).why
    profile.take_changed()
    try_variants(profile, kernels, level)
    assert not profile.take_changed(), "it is known"


def test_a_level_without_instructions_for_it_has_nothing_to_choose():
    profile = Profile()
    try_variants(profile, None, "avx2")
    assert not profile.facts
    assert choose_variants(profile, "avx2").variants is None


TILED = {"widened": [1, 1, 2, 4, 16], "dots": [9] * 5, "tiles": [2, 2, 1, 1, 4]}


def test_one_variant_serves_all_numbers_of_inputs_but_tiles_may_leave_the_few_to_another():
    stored = [1, 1, 1, 4, 16]
    choice = chosen(stored=[2, 2, 2, 4, 16], **TILED | {"widened": [1, 1, 0.5, 4, 16]})
    assert choice.variants == ProductVariants((1, 17), (WIDENED, TILES))
    near = chosen(stored=stored, **TILED | {"tiles": [1.05, 1, 1, 1, 4]})
    assert near.variants == ProductVariants((1,), (TILES,))
    few = {"widened": [1, 1, 1, 4, 4], "dots": [2, 2, 2, 2, 2]}
    dots = chosen("avx512bf16", stored=[2, 2, 2, 8, 16], **few)
    assert dots.variants == ProductVariants((1,), (DOTS,))
    assert EXACT.variant_of(9000) == WIDENED


def test_bitwise_takes_a_variant_that_slows_no_number_of_inputs_and_no_tiles_for_attention():
    times = {"stored": [1, 1, 1, 4, 16], "widened": [1, 1, 1, 4, 9], "dots": [1, 1, 1, 4, 8]}
    profile = known(**times, tiles=[2, 2, 1, 1, 4])
    profile.put(FactKey(ATTENTION_US, ATTENTION_TOKENS, 0, "widened"), [30])
    profile.put(FactKey(ATTENTION_US, ATTENTION_TOKENS, 0, "tiles"), [10])
    profile.put(FactKey(IS_WRONG, place="attention"), [0.0])
    assert choose_variants(profile, "amx").attention == TILES
    choice = choose_variants(profile, "amx", is_bitwise=True)
    assert (choice.variants, choice.attention) == (ProductVariants((1,), (DOTS,)), WIDENED)


@given(
    st.lists(st.floats(0.97, 1.03), min_size=10, max_size=10),
    st.lists(st.floats(0.97, 1.03), min_size=10, max_size=10),
)
def test_noise_of_three_percent_changes_no_choice(first, second):
    """As measured on a Zen 5: dots twice as fast, and all alike where reading binds."""

    def noisy(noise):
        plain = {"stored": [100, 139, 385, 1470, 5880], "dots": [98, 85, 149, 600, 1270],
                 "widened": [97, 92, 290, 1200, 4800]}  # fmt: skip
        factors = iter(noise * 2)
        return {name: [us * next(factors) for us in taken] for name, taken in plain.items()}

    choices = [chosen("avx512bf16", **noisy(noise)).variants for noise in (first, second)]
    assert choices == [ProductVariants((1,), (DOTS,))] * 2


def test_matrices_stay_as_they_are_where_packing_gains_nothing_or_costs_decode():
    for packed in ([1, 1, 1, 4, 15], [1.5, 1, 1, 1, 4]):
        choice = chosen(stored=[1, 1, 1, 4, 16], widened=packed, dots=packed, tiles=packed)
        assert choice.variants is None
        assert "stored layout" in choice.why


def test_a_variant_that_computes_wrongly_is_not_used_and_named():
    choice = chosen(
        stored=[1, 1, 1, 4, 16], widened=[1] * 5, dots=[1] * 5, tiles=[0.1] * 5, wrong=("tiles",)
    )
    assert TILES not in choice.variants.variants
    assert "tiles compute wrongly" in choice.why
    none = known("avx512bf16", wrong=("widened", "dots"))
    assert choose_variants(none, "avx512bf16").variants is None


@pytest.mark.parametrize(
    ("widened_us", "tiled_us", "is_wrong", "variant"),
    [(30, 10, 0, TILES), (10, 9.5, 0, WIDENED), (10, 20, 0, WIDENED), (30, 10, 1, WIDENED)],
)
def test_tiles_meet_keys_where_they_are_right_and_clearly_faster(
    widened_us, tiled_us, is_wrong, variant
):
    profile = known(stored=[4] * 5, widened=[3] * 5, dots=[2] * 5, tiles=[1] * 5)
    profile.put(FactKey(ATTENTION_US, ATTENTION_TOKENS, 0, "widened"), [widened_us])
    profile.put(FactKey(ATTENTION_US, ATTENTION_TOKENS, 0, "tiles"), [tiled_us])
    profile.put(FactKey(IS_WRONG, place="attention"), [float(is_wrong)])
    assert choose_variants(profile, "amx").attention == variant


def test_without_facts_matrices_are_read_as_they_are_stored():
    assert choose_variants(Profile(), "amx").variants is None
    assert STORED not in VARIANT_NAMES
