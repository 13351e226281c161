"""Test all variants of products with matrices packed in pairs, and which machine gets which."""

import mmap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.weights_layout import packed_layout
from engine.errors import CheckpointError
from engine.kernels.cpu import DOTS, TILES, VARIANT_NAMES, WIDENED, ProductVariants, load_kernels
from engine.worker.model.linear import CompiledLinear
from engine.worker.model.transformer import Transformer
from engine.worker.model.weight import Weight, packed_in_pairs
from engine.worker.model.weights import load_weights
from tests.checkpoints import make_checkpoint
from tests.engine.worker.model.test_linear import assert_close
from tests.engine.worker.model.test_transformer import Pool
from tests.levels import each_level, needs_kernels

pytestmark = needs_kernels
VARIANTS = (WIDENED, DOTS, TILES)
"""Of every level: what a processor has no instruction for is computed in C."""


def of_variant(variant):
    """A way to multiply in which rows beyond the few take the variant."""
    return ProductVariants(WIDENED if variant == TILES else variant, has_tiles=variant == TILES)


def packed_linear(level, matrices, biases, variant, num_few=0):
    weights = [packed_in_pairs(Weight.plain(matrix)) for matrix in matrices]
    kernels, variants = load_kernels(level)[0], of_variant(variant)
    linear = CompiledLinear(kernels, weights, list(biases), variants=variants)
    return lambda x: linear(x, min(num_few, len(x)))


def test_a_packed_matrix_has_two_values_of_each_of_its_rows_in_turn():
    matrix = torch.randn(35, 41).bfloat16()
    packed = packed_in_pairs(Weight.plain(matrix))
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
    variant=st.sampled_from(VARIANTS),
    num_few=st.sampled_from([0, 0, 1, 7, 30]),
    num_threads=st.sampled_from([1, 2, 3]),
    seed=st.integers(0, 2**31),
)
def test_every_variant_agrees_with_float64_for_any_shape(
    level, num_tokens, depth, rows, has_bias, variant, num_few, num_threads, seed
):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, depth, generator=generator).bfloat16()
    matrices = [torch.randn(n, depth, generator=generator).bfloat16() for n in rows]
    biases = [torch.randn(n, generator=generator) for n in rows] if has_bias else []
    torch.set_num_threads(num_threads)
    linear = packed_linear(level, matrices, biases, variant, num_few)
    assert_close(linear, x, matrices, biases)


@pytest.mark.parametrize("variant", VARIANTS, ids=VARIANT_NAMES)
@each_level
def test_threads_change_nothing_in_the_result(level, variant):
    matrices = [torch.randn(301, 200).bfloat16(), torch.randn(130, 200).bfloat16()]
    linear = packed_linear(level, matrices, [], variant)
    for num_tokens in (1, 5, 40):
        x = torch.randn(num_tokens, 200).bfloat16()
        alone = linear(x)
        torch.set_num_threads(3)
        assert torch.equal(linear(x), alone)
        torch.set_num_threads(1)


@each_level
def test_rows_that_tiles_take_in_cuts_have_the_bits_of_whole_ones(level):
    matrix, x = torch.randn(40, 4200).bfloat16(), torch.randn(40, 4200).bfloat16()
    linear = packed_linear(level, [matrix], [], TILES)
    assert_close(linear, x, [matrix], [])
    begin = x.clone()
    begin[:, 1000:] = 0
    short = packed_linear(level, [matrix[:, :1000]], [], TILES)
    assert torch.equal(linear(begin), short(x[:, :1000]))
    end = x.clone()
    end[:, :3200] = 0
    short = packed_linear(level, [matrix[:, 3200:]], [], TILES)
    assert torch.equal(linear(end), short(x[:, 3200:]))


@pytest.mark.parametrize("variant", VARIANTS, ids=VARIANT_NAMES)
@each_level
def test_an_input_that_is_not_a_number_stays_in_its_row(level, variant):
    matrix, x = torch.randn(48, 48).bfloat16(), torch.randn(40, 48).bfloat16()
    x[2, 5] = torch.nan
    output = packed_linear(level, [matrix], [], variant)(x)
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


@pytest.mark.parametrize("variant", VARIANTS, ids=VARIANT_NAMES)
def test_a_model_of_packed_matrices_is_the_model(folder, variant):
    checkpoint = Checkpoint.open(folder)
    ignore = lambda *_: None  # noqa: E731
    arena = filled_arena(checkpoint)
    packed = load_weights(checkpoint, "bfloat16", arena, None, ignore, is_packed=True)
    stored = load_weights(checkpoint, "bfloat16", None, None, ignore)
    assert sum(weight.scheme == "bfloat16_pairs" for weight in packed.values()) > 8
    found, expected = (
        Transformer(checkpoint.config, weights, "bfloat16", 64, variants=of_variant(variant))
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
    packed = packed_in_pairs(Weight.plain(torch.zeros(3, 4)))
    with pytest.raises(CheckpointError, match="bfloat16_pairs has no values"):
        _ = packed.values
