"""Products with quantised matrices agree with products with the values that the format has."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.checkpoint.packed_layouts import FORM_BY_KIND, FORMS, panels_shape
from engine.checkpoint.tensor_info import BLOCKS, TensorInfo
from engine.kernels.cpu import FORMS as NUMBERS
from engine.kernels.cpu import load_kernels
from engine.worker.model.dequantise import Parts, dequantised
from engine.worker.model.linear import CompiledLinear
from engine.worker.model.stored_tensors import Stored, StoredPart, quantised
from engine.worker.model.weight import Weight, embedded, pack_panels, panels_of
from tests.levels import LEVELS, each_level

KINDS = tuple(FORM_BY_KIND)
HAS_DOTS = {"avx512_vnni", "avx512vbmi"} <= set(Path("/proc/cpuinfo").read_text().split())


def blocks_of(kind, num_rows, depth, seed=0):
    """Random blocks whose values are about 1."""
    values, size = BLOCKS[kind]
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (num_rows, depth // values, size), dtype=np.uint8)
    heads = rng.uniform(0.01, 0.1, (num_rows, depth // values, 2)).astype(np.float16)
    halves = heads.view(np.uint8).reshape(num_rows, depth // values, 4)
    if kind == "q2_k":
        raw[..., 80:] = halves
    elif kind == "q3_k":
        raw[..., 108:] = (heads[..., :1] / 16).view(np.uint8)
    elif kind == "iq4_xs":
        raw[..., :2] = (heads[..., :1] / 512).view(np.uint8)
    elif kind == "q6_k":
        raw[..., 208:] = (heads[..., :1] / 16).view(np.uint8)
    elif kind in ("q4_1", "q5_1", "q4_k", "q5_k"):
        raw[..., :4] = halves
    elif kind.startswith("mxfp4"):
        raw[..., 0] = rng.integers(121, 126, raw.shape[:2])
    else:
        raw[..., :2] = halves[..., :2]
    return torch.from_numpy(raw.reshape(num_rows, -1))


def packed(blocks, kind, depth):
    info = TensorInfo("w", Path("w"), kind, (len(blocks), depth), 0, blocks.nbytes)
    form = FORM_BY_KIND[kind]
    panels = torch.full(panels_shape(form, len(blocks), depth), 255, dtype=torch.uint8)
    stored = Stored(info, {"codes": blocks.flatten()})
    middle = len(panels) // 2
    pack_panels(stored, form, panels, middle, len(panels))
    if middle:
        pack_panels(stored, form, panels, 0, middle)
    return Weight(panels, None, f"{form}_panels", (len(blocks), depth))


def parts_of(form, num_rows, depth, seed=0):
    """Random parts of a form whose scales are float32, with values of about 1."""
    spec, generator = FORMS[form], torch.Generator().manual_seed(seed)
    shape, groups = (num_rows, depth), -(-depth // spec.group)
    scales = (0.001 + torch.rand(num_rows, groups, 1, generator=generator)) / 32
    stored = scales.view(torch.uint8)
    if form == "fp8_128":
        codes = torch.randint(0, 256, shape, generator=generator).to(torch.uint8)
        codes[codes & 127 == 127] = 0  # which is no number
        return Parts(codes.view(torch.float8_e4m3fn), stored)
    if form == "int8_128":
        codes = torch.randint(-128, 128, shape, generator=generator)
        return Parts(codes.to(torch.int8), stored)
    codes, zeros = (
        torch.randint(0, 16, each, generator=generator) for each in (shape, (num_rows, groups, 1))
    )
    return Parts(codes.to(torch.int8), stored, zeros=zeros.to(torch.uint8))


def values_of(parts, group):
    """By the definition: each value its own scale and zero."""
    scales = parts.scales.contiguous().view(torch.float32)[..., 0].repeat_interleave(group, 1)
    codes = parts.codes.float()
    if parts.zeros is not None:
        codes = codes - parts.zeros[..., 0].float().repeat_interleave(group, 1)[:, : codes.shape[1]]
    return codes * scales[:, : codes.shape[1]]


@each_level
@pytest.mark.parametrize("form", ["int4_32", "int4_128", "int8_128", "fp8_128"])
def test_forms_with_scales_of_float32_whatever_the_rows_length(level, form):
    kernels, _ = load_kernels(level)
    for depth in (8, 40, 128, 136, 576, 1288):
        parts = parts_of(form, 37, depth, depth)
        panels = panels_of(parts, FORMS[form])
        assert panels.shape == panels_shape(form, 37, depth)
        linear = CompiledLinear(kernels, [Weight(panels, None, f"{form}_panels", (37, depth))], [])
        values = values_of(parts, FORMS[form].group)
        if depth % FORMS[form].group == 0:
            assert torch.equal(parts.values(), values)
        for num_inputs in (1, 2, 3, 4, 7, 33):
            for dtype in (torch.float32, torch.bfloat16):
                x = torch.randn(num_inputs, depth).to(dtype)
                expected = x.double() @ values.double().T
                limit = 2e-5 if dtype == torch.float32 else 2**-8
                atol = limit * expected.abs().max().item()
                assert torch.allclose(linear(x).double(), expected, rtol=limit, atol=atol)


def nvfp4_parts(num_rows, depth, place, generator):
    """Random parts of NVFP4, whose matrix has a factor or a divisor besides."""
    codes = torch.randint(0, 16, (num_rows, depth), generator=generator).to(torch.int8)
    shape = (num_rows, depth // 16, 1)
    scales = torch.randint(1, 127, shape, generator=generator).to(torch.uint8)
    factors = torch.ones(num_rows, 1, 2)
    factors[..., place] = 300.0 if place else 0.0031
    return Parts(codes, scales, is_float4=True, row_factors=factors.view(torch.uint8))


@each_level
@pytest.mark.parametrize("place", [0, 1], ids=["multiplied", "divided"])
def test_small_floats_whose_scales_have_a_scale(level, place):
    kernels, _ = load_kernels(level)
    generator = torch.Generator().manual_seed(place)
    for depth in (16, 48, 704):
        parts = nvfp4_parts(37, depth, place, generator)
        panels = panels_of(parts, FORMS["nvfp4"])
        assert panels.shape == panels_shape("nvfp4", 37, depth)
        linear = CompiledLinear(kernels, [Weight(panels, None, "nvfp4_panels", (37, depth))], [])
        for num_inputs in (1, 3, 33):
            for dtype, limit in ((torch.float32, 2e-5), (torch.bfloat16, 2**-8)):
                x = torch.randn(num_inputs, depth, generator=generator).to(dtype)
                expected = x.double() @ parts.values().double().T
                atol = limit * expected.abs().max().item()
                assert torch.allclose(linear(x).double(), expected, rtol=limit, atol=atol)


@each_level
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_bytes_are_those_of_inputs_rounded_token_by_token(level, dtype):
    """Integers, then one product of two scales and one with it; dots are exact to the last bit."""
    kernels, _ = load_kernels(level)
    for depth in (8, 40, 128, 576, 1288):
        torch.manual_seed(depth)
        parts = quantised(torch.randn(37, depth), "int8_row")
        panels = panels_of(parts, FORMS["int8_row"])
        assert panels.shape == panels_shape("int8_row", 37, depth)
        weight = Weight(panels, None, "int8_row_panels", (37, depth))
        row_scales = parts.scales.contiguous().view(torch.float32).view(-1)
        assert torch.equal(parts.codes.float() * row_scales[:, None], parts.values())
        for num_inputs in (1, 4, 33):
            x = torch.randn(num_inputs, depth).to(dtype)
            x[0] = 0
            scales = x.float().abs().amax(-1, keepdim=True) / 127
            codes = x.float() / torch.where(scales > 0, scales, 1)
            sums = (codes.round().long() @ parts.codes.long().T).float()
            expected = sums * (row_scales * scales)
            found = CompiledLinear(kernels, [weight], [])(x)
            if level.startswith(("avx512", "amx")) and HAS_DOTS:
                assert torch.equal(found, expected.to(dtype))
            limit = 2e-6 if dtype == torch.float32 else 2**-8
            atol = limit * expected.abs().max().item()
            assert torch.allclose(found.float(), expected, rtol=limit, atol=atol)


@each_level
def test_a_token_that_is_no_number_or_too_small_spoils_nobody_else(level):
    kernels, _ = load_kernels(level)
    torch.manual_seed(0)
    parts = quantised(torch.randn(16, 64), "int8_row")
    weight = Weight(panels_of(parts, FORMS["int8_row"]), None, "int8_row_panels", (16, 64))
    x = torch.randn(4, 64)
    x[1, 40], x[2, 3] = float("nan"), float("inf")
    x[3] = 1e-40
    found = CompiledLinear(kernels, [weight], [])(x)
    assert found[0].isfinite().all()
    assert not found[1:3].isfinite().any()
    assert (found[3] == 0).all()


@each_level
@pytest.mark.parametrize("form", ["fp8_128", "mxfp4", "int4_128"])
def test_every_code_is_the_value_that_its_format_gives_it(level, form):
    kernels, _ = load_kernels(level)
    if form == "mxfp4":
        raw = np.arange(16 * 17, dtype=np.uint8).reshape(16, 17)
        raw[:, 0] = np.arange(16) * 16  # exponents of all sizes, the smallest among them
        values = dequantised(torch.from_numpy(raw), "mxfp4")
        weight = packed(torch.from_numpy(raw), "mxfp4", 32)
    else:
        parts = parts_of(form, 16, 128)
        count = 16 if form == "int4_128" else 256
        codes = torch.arange(16 * 128).view(16, 128) % count
        codes[codes & 127 == 127] = 0
        codes = codes.to(torch.uint8)
        parts = parts._replace(codes=codes.view(parts.codes.dtype))
        values = values_of(parts, 128)
        weight = Weight(panels_of(parts, FORMS[form]), None, f"{form}_panels", (16, 128))
    linear = CompiledLinear(kernels, [weight], [])
    depth = values.shape[1]
    # one input of few, and as many as make a panel: each is one value of each row
    found = [linear(torch.eye(depth)[i : i + 1])[0] for i in range(depth)]
    many = linear(torch.eye(depth)[: max(depth, 32)])
    for each in (torch.stack(found), many):
        # a zero times a scale is rounded before a code's part is added to it
        atol = 1e-6 if form == "int4_128" else 0
        assert torch.allclose(each, values.T, rtol=1e-6, atol=atol)


def assert_right(level, dtype, parts, num_inputs, has_bias, num_threads=1):
    """`parts` are (kind, rows) of one depth."""
    depth = 512
    kernels, _ = load_kernels(level)
    blocks = [blocks_of(kind, rows, depth, seed) for seed, (kind, rows) in enumerate(parts)]
    torch.manual_seed(num_inputs)
    x = torch.randn(num_inputs, depth).to(dtype)
    biases = [torch.randn(rows) for _, rows in parts] if has_bias else []
    linear = CompiledLinear(
        kernels,
        [packed(b, kind, depth) for b, (kind, _) in zip(blocks, parts, strict=True)],
        biases,
    )
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        found = linear(x).double()
    finally:
        torch.set_num_threads(before)
    values = [dequantised(b, kind) for b, (kind, _) in zip(blocks, parts, strict=True)]
    expected = x.double() @ torch.cat(values).double().T
    if biases:
        expected += torch.cat(biases)
    limit = 2e-5 if dtype == torch.float32 else 2**-8
    assert torch.allclose(found, expected, rtol=limit, atol=limit * expected.abs().max().item())


@each_level
@pytest.mark.parametrize("kind", KINDS)
def test_each_form_at_each_level_with_few_and_with_many_inputs(level, kind):
    for num_inputs in (1, 2, 3, 4, 5, 9, 40):
        for dtype in (torch.float32, torch.bfloat16):
            assert_right(level, dtype, [(kind, 70)], num_inputs, has_bias=True)


@settings(deadline=None, max_examples=60)
@given(
    level=st.sampled_from(LEVELS),
    parts=st.lists(st.tuples(st.sampled_from(KINDS), st.integers(1, 150)), min_size=1, max_size=3),
    num_inputs=st.integers(1, 40),
    has_bias=st.booleans(),
    num_threads=st.integers(1, 3),
)
def test_odd_shapes_and_several_matrices_of_one_input(
    level, parts, num_inputs, has_bias, num_threads
):
    assert_right(level, torch.float32, parts, num_inputs, has_bias, num_threads)


@pytest.mark.parametrize("kind", ["q4_k", "q6_k", "q4_1"])
def test_long_rows_are_cut_where_groups_end(kind):
    kernels, _ = load_kernels()
    for depth in (1280, 2304):
        blocks = blocks_of(kind, 40, depth)
        linear = CompiledLinear(kernels, [packed(blocks, kind, depth)], [])
        x = torch.randn(33, depth)
        expected = x.double() @ dequantised(blocks, kind).double().T
        limit = 2e-5 * expected.abs().max().item()
        assert torch.allclose(linear(x).double(), expected, rtol=2e-5, atol=limit)


@pytest.mark.parametrize("kind", [kind for kind in BLOCKS if kind != "mxfp4_pairs"])
def test_rows_that_are_looked_up_are_the_formats_values(kind):
    depth = 2 * BLOCKS[kind][0]
    blocks = blocks_of(kind, 9, depth)
    weight = Weight(blocks, None, f"{kind}_rows", (9, depth))
    ids = torch.tensor([8, 0, 8, 3])
    with np.errstate(all="ignore"):
        reference = gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[kind.upper()])
    found = embedded(weight, ids, torch.float32).numpy()
    assert np.array_equal(found, reference[ids.numpy()], equal_nan=True)


def test_both_tables_of_forms_name_the_same():
    assert NUMBERS.keys() == FORMS.keys()


@each_level
@pytest.mark.parametrize("kind", KINDS)
def test_inputs_in_bfloat16_lose_little_beside_the_largest_near_them(level, kind):
    """An input that is small beside another of its 32 may be rounded, by 2^-14 of that one."""
    kernels, _ = load_kernels(level)
    depth = 512
    blocks = blocks_of(kind, 20, depth)
    linear = CompiledLinear(kernels, [packed(blocks, kind, depth)], [])
    torch.manual_seed(1)
    sizes = 10.0 ** torch.empty(12, depth).uniform_(-8, 8)
    x = torch.cat([torch.randn(12, depth) * sizes, torch.randn(2, depth) * 1e-37]).bfloat16()
    x[3] = 0
    values = dequantised(blocks, kind).double()
    expected = x.double() @ values.T
    units = x.double().abs().view(len(x), -1, 32)
    largest = units.amax(-1, keepdim=True).expand_as(units).reshape(x.shape)
    limit = 2**-14 * largest @ values.abs().T + 2**-8 * expected.abs() + 2**-98
    assert ((linear(x).double() - expected).abs() <= limit).all()
    assert (linear(x)[3] == 0).all()


@each_level
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_an_input_that_is_no_number_makes_no_number(level, value):
    kernels, _ = load_kernels(level)
    linear = CompiledLinear(kernels, [packed(blocks_of("q4_1", 16, 64), "q4_1", 64)], [])
    x = torch.randn(2, 64).bfloat16()
    x[1, 40] = value
    found = linear(x)
    assert not found[1].isfinite().any()
    assert found[0].isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_a_matrix_have_the_codes_that_it_has_there(kind):
    depth = 2 * 512
    blocks = blocks_of(kind, 20, depth)
    info = TensorInfo("w", Path("w"), kind, (20, depth), 0, blocks.nbytes)
    stored, form = Stored(info, {"codes": blocks.flatten()}), FORM_BY_KIND[kind]
    whole = stored.parts(0, 20, form).values()
    runs = StoredPart(stored, [(3, 8), (12, 17)])
    expected = torch.cat((whole[3:8], whole[12:17]))
    assert torch.equal(runs.parts(0, 10, form).values(), expected)
    assert torch.equal(runs.parts(4, 6, form).values(), expected[4:6])
    apart = StoredPart(stored, [(0, 20)], [(256, 512), (768, 1024)])
    expected = torch.cat((whole[:, 256:512], whole[:, 768:]), 1)
    assert apart.depth == 512
    assert torch.equal(apart.parts(5, 20, form).values(), expected[5:])
    columns = StoredPart(stored, [(0, 20)], [(256, 512)])
    assert (columns.num_rows, columns.depth) == (20, 256)
    assert torch.equal(columns.parts(5, 20, form).values(), whole[5:, 256:512])
    panels = torch.empty(panels_shape(form, 20, 256), dtype=torch.uint8)
    pack_panels(columns, form, panels, 0, len(panels))
    alone = panels_of(parts_of_blocks(blocks, kind, 256, 512), FORMS[form])
    assert torch.equal(panels, alone)


def parts_of_blocks(blocks, kind, first, end):
    """Parts of a matrix that has only some of another's columns."""
    values, size = BLOCKS[kind]
    cut = blocks.view(len(blocks), -1, size)[:, first // values : end // values]
    info = TensorInfo("w", Path("w"), kind, (len(blocks), end - first), 0, cut.numel())
    return Stored(info, {"codes": cut.flatten()}).parts(0, len(blocks), FORM_BY_KIND[kind])
