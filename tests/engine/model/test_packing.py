"""Matrices packed in pairs: every way to multiply by them, on any machine, and who gets which."""

import mmap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import CheckpointError
from engine.folder.checkpoint import Checkpoint, packed_layout
from engine.kernels.cpu import (
    AGAIN,
    DOTS,
    EXACT,
    NUM_INPUTS,
    TILES,
    WAY_NAMES,
    WIDENED,
    AttentionTrial,
    MeasuredRatio,
    ProductWays,
    PromptTrial,
    StepValues,
    best_step_tokens,
    find_attention_way,
    find_ways,
    judge,
    judge_attention,
    load_kernels,
    step_costs,
    try_attention,
    try_prompts,
)
from engine.model.linear import CompiledLinear
from engine.model.transformer import Transformer
from engine.model.weights import Weight, load_weights, packed_weight
from engine.units import with_figures
from tests.checkpoints import make_checkpoint
from tests.engine.model.test_linear import assert_close
from tests.engine.model.test_transformer import Pool
from tests.levels import each_level, needs_kernels

pytestmark = needs_kernels
WAYS = (WIDENED, DOTS, TILES)
"""Of every level: what a processor has no instruction for is computed in C."""


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def packed_linear(level, matrices, biases, way):
    weights = [packed_weight(Weight.plain(matrix)) for matrix in matrices]
    ways = ProductWays((1,), (way,))
    return CompiledLinear(load_kernels(level)[0], weights, list(biases), ways=ways)


def test_a_packed_matrix_has_two_values_of_each_of_its_rows_in_turn():
    matrix = torch.randn(35, 41).bfloat16()
    packed = packed_weight(Weight.plain(matrix))
    assert packed.shape == (35, 41)
    rows = packed.data.permute(0, 2, 1, 3).reshape(48, 64)
    assert torch.equal(rows[:35, :41], matrix)
    assert not rows[35:].any()
    assert not rows[:, 41:].any()


@each_level
@settings(max_examples=20, deadline=None)
@given(
    num_tokens=st.one_of(st.integers(1, 40), st.sampled_from([64, 65, 97])),
    depth=st.one_of(st.integers(1, 130), st.sampled_from([576, 1031])),
    rows=st.lists(st.integers(1, 100), min_size=1, max_size=3),
    has_bias=st.booleans(),
    way=st.sampled_from(WAYS),
    num_threads=st.sampled_from([1, 2, 3]),
    seed=st.integers(0, 2**31),
)
def test_every_way_agrees_with_float64_for_any_shape(
    level, num_tokens, depth, rows, has_bias, way, num_threads, seed
):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, depth, generator=generator).bfloat16()
    matrices = [torch.randn(n, depth, generator=generator).bfloat16() for n in rows]
    biases = [torch.randn(n, generator=generator) for n in rows] if has_bias else []
    torch.set_num_threads(num_threads)
    assert_close(packed_linear(level, matrices, biases, way), x, matrices, biases)


@pytest.mark.parametrize("way", WAYS, ids=WAY_NAMES)
@each_level
def test_threads_change_nothing_in_the_result(level, way):
    matrices = [torch.randn(301, 200).bfloat16(), torch.randn(130, 200).bfloat16()]
    linear = packed_linear(level, matrices, [], way)
    for num_tokens in (1, 5, 40):
        x = torch.randn(num_tokens, 200).bfloat16()
        alone = linear(x)
        torch.set_num_threads(3)
        assert torch.equal(linear(x), alone)
        torch.set_num_threads(1)


@pytest.mark.parametrize("way", WAYS, ids=WAY_NAMES)
@each_level
def test_an_input_that_is_not_a_number_stays_in_its_row(level, way):
    matrix, x = torch.randn(48, 48).bfloat16(), torch.randn(40, 48).bfloat16()
    x[2, 5] = torch.nan
    output = packed_linear(level, [matrix], [], way)(x)
    assert output[2].isnan().all()
    assert output[[0, 1, *range(3, 40)]].isfinite().all()


@pytest.fixture(scope="module", params=["llama", "qwen2", "mixtral"])
def folder(request, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"), request.param, "bfloat16")


def filled_arena(checkpoint, count=2):
    layout = packed_layout(checkpoint, "bfloat16")
    arena = mmap.mmap(-1, layout.num_bytes)
    for index in range(count):
        told = []
        load_weights(
            checkpoint,
            "bfloat16",
            arena,
            (index, count),
            lambda *progress, told=told: told.append(progress),
            is_packed=True,
        )
        assert told[-1][0] == told[-1][1]
    return arena


def test_shares_fill_the_arena_together(folder):
    checkpoint = Checkpoint.open(folder)
    whole = filled_arena(checkpoint, 1)
    for count in (2, 3, 7):
        assert filled_arena(checkpoint, count)[:] == whole[:]


@pytest.mark.parametrize("way", WAYS, ids=WAY_NAMES)
def test_a_model_of_packed_matrices_is_the_model(folder, way):
    checkpoint = Checkpoint.open(folder)
    ignore = lambda *_: None  # noqa: E731
    arena = filled_arena(checkpoint)
    packed = load_weights(checkpoint, "bfloat16", arena, None, ignore, is_packed=True)
    stored = load_weights(checkpoint, "bfloat16", None, None, ignore)
    assert sum(weight.scheme == "bfloat16_pairs" for weight in packed.values()) > 8
    found, expected = (
        Transformer(checkpoint.config, weights, "bfloat16", 64, ways=ProductWays((1,), (way,)))
        for weights in (packed, stored)
    )
    logits = []
    for model in (found, expected):
        generator = torch.Generator().manual_seed(0)
        pool = Pool(model, 8, generator)
        tokens = torch.randint(0, 90, (40,), generator=generator).tolist()
        table = pool.table(41)
        logits.append(torch.cat([pool.step([(tokens, 0, table)]), pool.step([([7], 40, table)])]))
    torch.testing.assert_close(*logits, rtol=0.05, atol=0.05)


def test_only_bfloat16_is_packed_and_only_files_that_can_be_mapped(folder):
    checkpoint = Checkpoint.open(folder)
    assert packed_layout(checkpoint, "float32") is None
    assert packed_layout(checkpoint, "float16") is None
    layout = packed_layout(checkpoint, "bfloat16")
    assert all(offset % 64 == 0 for offset in layout.offset_by_name.values())


def test_packed_values_cannot_be_read_one_by_one():
    packed = packed_weight(Weight.plain(torch.zeros(3, 4)))
    with pytest.raises(CheckpointError, match="bfloat16_pairs has no values"):
        _ = packed.values


def test_this_machine_is_tried_and_says_what_was_found():
    kernels, level = load_kernels()
    found = find_ways(kernels, level)
    assert ("rearranged at start" if found.ways else "as they are stored") in found.why
    assert "wrongly" not in found.why
    assert find_ways(*load_kernels("portable")).ways is None


@each_level
def test_attention_by_tiles_is_tried_against_attention_without(level):
    is_right, widened_s, tiled_s = try_attention(load_kernels(level)[0], 100)
    assert is_right
    assert min(widened_s, tiled_s) > 0
    trial = find_attention_way(load_kernels(level)[0], level)
    assert (trial.why == "") == (level != "amx")


def test_tiles_are_taken_for_attention_where_they_are_right_and_sooner():
    assert judge_attention(True, 3.0, 1.0) == AttentionTrial(
        TILES, "attention of prompts by tiles. Timed: tiles are 3x as fast at it"
    )
    assert judge_attention(True, 1.0, 2.0).way == WIDENED
    wrong = judge_attention(False, 3.0, 1.0)
    assert wrong.way == WIDENED
    assert "wrongly" in wrong.why


def times(stored, **ways):
    numbers = dict(zip(WAY_NAMES, WAYS, strict=True))
    return {
        count: {None: [stored[i]]} | {numbers[name]: [taken[i]] for name, taken in ways.items()}
        for i, count in enumerate(NUM_INPUTS)
    }


def test_each_number_of_inputs_gets_its_fastest_way():
    tiles = judge(times([1, 1, 1, 4, 16], widened=[1, 1, 2, 4, 16], tiles=[2, 2, 1, 1, 4]), [])
    assert tiles.ways == ProductWays(NUM_INPUTS, (WIDENED, WIDENED, TILES, TILES, TILES))
    assert [tiles.ways.way_of(n) for n in (1, 3, 15, 16, 5000)] == [0, 0, 0, 2, 2]
    assert tiles.why.endswith(" they are 1.00x as fast for 1 token at a time, 4.00x for 256")
    assert ", widened from 1, tiles from 16 tokens at a time. Timed: " in tiles.why
    assert EXACT.way_of(9000) == WIDENED


def test_matrices_stay_as_they_are_where_packing_gains_nothing_or_costs_decode():
    for packed in ([1, 1, 1, 4, 15], [1.5, 1, 1, 1, 4]):
        found = judge(times([1, 1, 1, 4, 16], widened=packed), [])
        assert found.ways is None
        assert found.why.startswith("used as they are stored: rearranged ")


def test_rounds_that_differ_about_packing_leave_matrices_as_they_are_stored():
    tried = times([1, 1, 1, 4, 16], widened=[1, 1, 1, 1, 4])
    quick, slow = tried[256][WIDENED][0], 15.0
    for rounds, is_packed in (([quick] * 5, True), ([*[quick] * 4, slow], True),
                              ([quick, quick, quick, slow, slow], False)):  # fmt: skip
        found = judge({n: {way: s * 5 for way, s in t.items()} for n, t in tried.items()}
                      | {256: {None: [16.0] * 5, WIDENED: rounds}}, [])  # fmt: skip
        assert (found.ways is not None) == is_packed
        assert ("undecided" in found.why) == (AGAIN in found.why) != is_packed


def test_a_way_that_computes_wrongly_is_not_used_and_named():
    found = judge(times([1, 1, 1, 4, 16], widened=[1, 1, 1, 1, 1]), ["tiles"])
    assert found.ways.ways == (WIDENED,) * 5
    assert "tiles compute wrongly" in found.why
    assert judge({1: {None: [1.0]}}, ["widened"]).ways is None


def test_this_machine_finds_how_many_prompt_tokens_a_step_is_worth():
    found = try_prompts(*load_kernels(), None, 2)
    assert found.step_tokens in (128, 256, 512)
    assert found.costs.keys() == {128, 256, 512} - {found.step_tokens}
    assert ". Timed: a token takes " in found.why
    assert (found.second_core_gain, found.lends) == (None, True), "it decides nothing"
    if load_kernels()[1] == "amx":
        tiles = ProductWays((1,), (TILES,))
        gain = try_prompts(*load_kernels(), tiles, 2).second_core_gain
        assert 0 < gain.low <= gain.high
        assert try_prompts(*load_kernels(), tiles, 1).second_core_gain is None
    assert try_prompts(*load_kernels("portable"), None, 2) == PromptTrial(512, None)


def test_a_mixture_is_tried_with_the_few_inputs_that_an_expert_gets():
    mixture = StepValues(dense=10, experts=1000, expert_share=1 / 16, head=0)
    found = try_prompts(*load_kernels(), None, 1, mixture)
    assert {found.step_tokens, *found.costs} == {128, 256, 512, 1024, 2048}


FLAT = dict.fromkeys((128, 256, 512), 1.0)


def test_a_step_is_no_larger_than_its_rate_asks_for():
    assert best_step_tokens([FLAT]) == (128, True)
    assert best_step_tokens([FLAT | {256: 0.9, 512: 0.89}]) == (256, True)
    assert best_step_tokens([FLAT | {256: 0.9, 512: 0.8}]) == (512, True)
    assert best_step_tokens([FLAT | {128: 0.93, 256: 0.85, 512: 0.91}]) == (256, True)


def test_rounds_that_differ_leave_steps_as_near_to_the_usual_as_is_in_question():
    sooner, later = FLAT | {512: 0.9}, FLAT | {512: 1.1}
    assert best_step_tokens([sooner, later]) == (512, False)
    assert best_step_tokens([sooner] * 3) == (512, True)
    between = FLAT | {128: 1.2}
    assert best_step_tokens([FLAT, between]) == (256, False), "larger than that is never better"
    large = FLAT | {1024: 0.8, 2048: 0.8}
    assert best_step_tokens([large, large | {2048: 0.6}]) == (1024, False), "of a mixture"


def test_one_round_beside_something_else_decides_nothing():
    assert best_step_tokens([FLAT, FLAT, FLAT, FLAT | {128: 3.0}]) == (128, True)


@given(st.lists(st.fixed_dictionaries(dict.fromkeys(FLAT, st.floats(0.5, 2))), min_size=1))
def test_what_is_chosen_is_a_size_that_was_tried_and_more_of_the_same_changes_nothing(rounds):
    chosen = best_step_tokens(rounds)
    assert chosen[0] in FLAT
    assert best_step_tokens(rounds[::-1]) == chosen, "whatever the order of rounds"
    if all(each == rounds[0] for each in rounds):
        assert chosen[1]


def test_experts_who_get_few_of_a_steps_tokens_want_larger_steps():
    rising = {1: 64.0, 4: 16.0, 16: 4.0, 64: 1.0, 128: 1.0, 256: 1.0, 512: 1.0}
    mixture = StepValues(dense=10, experts=1000, expert_share=1 / 16, head=0)
    assert best_step_tokens([step_costs(rising)]) == (128, True)
    assert best_step_tokens([step_costs(rising, mixture)]) == (1024, True)


def gain(low, high=None):
    return MeasuredRatio.of([low, low if high is None else high])


def test_a_second_core_that_shares_the_unit_for_matrices_is_not_borrowed_for_prompts():
    for ratio, lends, follows in (
        (1.02, False, "a prompt has its worker's own cores alone"),
        (1.9, True, "a prompt borrows idle cores"),
    ):
        trial = PromptTrial(512, gain(ratio))
        said = f"up to 512 prompt tokens a step; {follows}"
        figures = f"two cores compute a prompt {ratio:.2f}x as fast as one"
        assert (trial.lends, trial.why) == (lends, with_figures(said, figures))
    assert PromptTrial(512, None).lends


def test_what_is_undecided_is_said_and_stays_as_is_usual():
    noisy = PromptTrial(512, gain(0.9, 1.6), {128: gain(0.9, 1.2)}, is_decided=False)
    assert noisy.lends
    assert noisy.why == (
        "up to 512 prompt tokens a step, too near to call: of those that may be best the one "
        "nearest to 512; a prompt borrows idle cores, undecided if it gains by them; a start while "
        "the machine is idle may find out. Timed: a token takes 1.20 (0.90 to 1.20) in steps of "
        "128, against 1; two cores compute a prompt 1.60 (0.90 to 1.60)x as fast as one"
    )


@given(st.lists(st.floats(0.01, 100), min_size=1))
def test_a_spread_lies_within_its_ratios_and_without_the_outermost_of_many(ratios):
    spread = MeasuredRatio.of(ratios)
    assert min(ratios) <= spread.low <= spread.median <= spread.high <= max(ratios)
    if len(ratios) >= 4:
        assert (spread.low, spread.high) == (sorted(ratios)[1], sorted(ratios)[-2])
