"""Products with quantised matrices agree with products with the values that the format has."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.cpu import FORMS as NUMBERS
from engine.kernels.cpu import load_kernels
from engine.model.blocks import dequantised
from engine.model.linear import CompiledLinear
from engine.model.quantised import embedded, pack_panels
from engine.model.stored import Stored
from engine.model.weight import Weight
from engine.panels import FORM_BY_KIND, FORMS, panels_shape
from engine.tensor_info import BLOCKS, TensorInfo

LEVELS = load_kernels("portable")[0].supported()
KINDS = tuple(FORM_BY_KIND)


def blocks_of(kind, num_rows, depth, seed=0):
    """Random blocks whose values are about 1."""
    values, size = BLOCKS[kind]
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (num_rows, depth // values, size), dtype=np.uint8)
    heads = rng.uniform(0.01, 0.1, (num_rows, depth // values, 2)).astype(np.float16)
    halves = heads.view(np.uint8).reshape(num_rows, depth // values, 4)
    if kind == "q6_k":
        raw[..., 208:] = (heads[..., :1] / 16).view(np.uint8)
    elif kind in ("q4_1", "q5_1", "q4_k", "q5_k"):
        raw[..., :4] = halves
    else:
        raw[..., :2] = halves[..., :2]
    return torch.from_numpy(raw.reshape(num_rows, -1))


def packed(blocks, kind, depth):
    info = TensorInfo("w", Path("w"), kind, (len(blocks), depth), 0, blocks.nbytes)
    form = FORM_BY_KIND[kind]
    panels = torch.full(panels_shape(form, len(blocks), depth), 255, dtype=torch.uint8)
    stored = Stored(info, blocks.flatten())
    middle = len(panels) // 2
    pack_panels(stored, panels, middle, len(panels))
    if middle:
        pack_panels(stored, panels, 0, middle)
    return Weight(panels, None, f"{form}_panels", (len(blocks), depth))


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


@pytest.mark.parametrize("level", LEVELS)
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
