"""Products with weights as stored agree with float64, by every way there is to multiply."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import CheckpointError
from engine.kernels.cpu import load_kernels
from engine.worker.model.linear import CompiledLinear, Linears, TorchLinear, choose_linears
from engine.worker.model.weight import Weight
from tests.levels import PARAMS, each_level, needs_kernels

MANY_TOKENS = 30
"""MANY_INPUTS of linear.c."""
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=PARAMS)
def compiled(request):
    return choose_linears("cpu", torch.float32, request.param)


def assert_close(linear, x, matrices, biases):
    """Within the rounding of float32 sums, and of the output's own dtype."""
    weight = torch.cat([matrix.double() for matrix in matrices])
    bias = torch.cat([bias.double() for bias in biases]) if biases else 0.0
    expected = x.double() @ weight.t() + bias
    size = x.double().abs() @ weight.abs().t() + abs(bias)
    output = linear(x)
    assert (output.dtype, output.shape) == (x.dtype, expected.shape)
    error = (output.double() - expected).abs()
    unit = 2**-8 if x.dtype == torch.bfloat16 else 0.0
    assert (error <= 1e-6 * size + unit * expected.abs()).all()


def compiled_linear(kernels, matrices, biases=(), *take):
    return CompiledLinear(kernels, list(map(Weight.plain, matrices)), list(biases), *take)


def some_linear(generator, num_tokens, depth, rows, weight_dtype, dtype, has_bias):
    x = torch.randn(num_tokens, depth, generator=generator).to(dtype)
    matrices = [torch.randn(n, depth, generator=generator).to(weight_dtype) for n in rows]
    biases = [torch.randn(n, generator=generator) for n in rows] if has_bias else []
    return x, matrices, biases


@needs_kernels
@each_level
@settings(max_examples=25, deadline=None)
@given(
    num_tokens=st.one_of(st.integers(1, 60), st.integers(1, 200)),
    depth=st.one_of(st.integers(1, 130), st.sampled_from([576, 2047, 2048, 2049, 4100])),
    rows=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    weight_dtype=st.sampled_from(DTYPES),
    dtype=st.sampled_from(DTYPES[:2]),
    has_bias=st.booleans(),
    num_threads=st.sampled_from([1, 1, 2, 3]),
    seed=st.integers(0, 2**31),
)
def test_kernels_agree_with_float64_for_any_shape(
    level, num_tokens, depth, rows, weight_dtype, dtype, has_bias, num_threads, seed
):
    generator = torch.Generator().manual_seed(seed)
    x, matrices, biases = some_linear(
        generator, num_tokens, depth, rows, weight_dtype, dtype, has_bias
    )
    kernels, _ = load_kernels(level)
    torch.set_num_threads(num_threads)
    assert_close(compiled_linear(kernels, matrices, biases), x, matrices, biases)


@pytest.mark.parametrize("num_tokens", [*range(1, 20), *range(MANY_TOKENS - 1, MANY_TOKENS + 15)])
def test_any_number_of_inputs_is_cut_into_tiles(compiled, num_tokens):
    generator = torch.Generator().manual_seed(num_tokens)
    x, matrices, _ = some_linear(
        generator, num_tokens, 96, [7, 12], torch.bfloat16, torch.float32, has_bias=False
    )
    assert_close(compiled_linear(compiled.kernels, matrices, []), x, matrices, [])


@pytest.mark.parametrize("num_tokens", [1, 2, 70])
def test_rows_that_lie_at_odd_addresses_are_read(compiled, num_tokens):
    stored = torch.randn(9 * 64 + 1).bfloat16()
    matrices = [stored[1:].view(9, 64)]
    x = torch.randn(num_tokens, 64)
    assert_close(compiled_linear(compiled.kernels, matrices, []), x, matrices, [])


@pytest.mark.parametrize("num_tokens", [5, MANY_TOKENS + 1])
def test_nothing_before_or_after_the_output_is_written(compiled, num_tokens):
    rows = [3, 6]
    matrices = [torch.randn(n, 33).bfloat16() for n in rows]
    around = torch.full((num_tokens + 2, sum(rows)), 7.0)
    x = torch.randn(num_tokens, 33)
    expected = compiled_linear(compiled.kernels, matrices, [])(x)
    compiled_linear(compiled.kernels, matrices, [], lambda *_: around[1:-1])(x)
    assert torch.equal(around[1:-1], expected)
    assert (around[0] == 7).all()
    assert (around[-1] == 7).all()


@pytest.mark.parametrize("weight_dtype", DTYPES)
def test_every_stored_value_is_widened_exactly(compiled, weight_dtype):
    if weight_dtype == torch.float32:
        stored = torch.randn(1 << 16)
    else:
        stored = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(weight_dtype)
        stored = stored[stored.isfinite()]
    matrix = stored[: len(stored) // 64 * 64].view(-1, 64)
    linear = compiled_linear(compiled.kernels, [matrix], [])
    for few in (torch.eye(64)[:1], torch.eye(64)[1:9], torch.eye(64)):
        assert torch.equal(linear(few), few @ matrix.float().t())


def test_an_input_that_is_not_a_number_stays_in_its_row(compiled):
    matrix = torch.randn(16, 48).bfloat16()
    x = torch.randn(4, 48)
    x[2, 5] = torch.nan
    output = compiled_linear(compiled.kernels, [matrix], [])(x)
    assert output[2].isnan().all()
    assert output[[0, 1, 3]].isfinite().all()


def test_an_infinite_weight_stays_in_its_row(compiled):
    matrix = torch.ones(6, 37).half()
    matrix[4, 36] = torch.inf
    output = compiled_linear(compiled.kernels, [matrix], [])(torch.ones(2, 37))
    assert output[:, 4].isposinf().all()
    assert (output[:, [0, 1, 2, 3, 5]] == 37).all()


@pytest.mark.parametrize("num_tokens", [3, MANY_TOKENS])
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_matrices_of_several_schemes_are_one_projection(compiled, num_tokens, dtype):
    x, matrices, biases = some_linear(
        torch.Generator().manual_seed(1), num_tokens, 40, [5, 6, 3, 9], torch.bfloat16, dtype, True
    )
    matrices[1], matrices[2] = matrices[1].half(), matrices[2].float()
    assert_close(compiled_linear(compiled.kernels, matrices, biases), x, matrices, biases)


def test_threads_change_nothing_in_the_result(compiled):
    matrices = [torch.randn(501, 200).bfloat16(), torch.randn(130, 200).bfloat16()]
    linear = compiled_linear(compiled.kernels, matrices, [])
    for num_tokens in (1, 5, 64):
        x = torch.randn(num_tokens, 200)
        alone = linear(x)
        torch.set_num_threads(3)
        assert torch.equal(linear(x), alone)
        torch.set_num_threads(1)


@pytest.mark.parametrize("num_tokens", [1, 3, 9])
@pytest.mark.parametrize("has_bias", [False, True])
def test_torch_multiplies_what_the_kernels_do_not(num_tokens, has_bias):
    x, matrices, biases = some_linear(
        torch.Generator().manual_seed(2),
        num_tokens,
        24,
        [4, 8],
        torch.float32,
        torch.float32,
        has_bias,
    )
    linear = TorchLinear(list(map(Weight.plain, matrices)), biases)
    assert_close(linear, x, matrices, biases)


def test_a_way_that_is_not_the_best_says_why():
    assert choose_linears("cuda", torch.bfloat16) == Linears("torch", None)
    half = choose_linears("cpu", torch.float16)
    assert half.kernels is None
    assert half.name.startswith("torch")
    assert "float16" in half.name
    unknown = choose_linears("cpu", torch.float32, "no such level")
    assert unknown.kernels is None
    assert "compiled kernels" in unknown.name


def test_a_scheme_that_nobody_knows_is_refused_by_name():
    with pytest.raises(CheckpointError, match="unknown scheme 'int4'"):
        Weight(torch.zeros(2, 2), None, "int4", (2, 2))
    with pytest.raises(CheckpointError, match="unknown scheme 'int32'"):
        Weight.plain(torch.zeros(2, 2, dtype=torch.int32))


def test_data_and_scales_are_what_the_scheme_has():
    with pytest.raises(CheckpointError, match="not bfloat16"):
        Weight(torch.zeros(2, 2), None, "bfloat16", (2, 2))
    with pytest.raises(CheckpointError, match="not float32"):
        Weight(torch.zeros(2, 2), torch.ones(2), "float32", (2, 2))
