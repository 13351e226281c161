"""Products with panels on a GPU are those of the format's values; by Triton's interpreter."""

import os

import pytest
import torch
from safetensors.torch import load_file

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.packed_layouts import CPU_FORMS, FORM_BY_KIND, FORMS
from engine.checkpoint.weights_layout import gpu_layout
from engine.worker.model.dequantise import dequantised
from engine.worker.model.linear import Linears
from engine.worker.model.stored_tensors import quantised
from engine.worker.model.triton_linear import multiply, rounded_inputs, rounded_to_fp8
from engine.worker.model.weight import Weight, panels_of
from engine.worker.model.weights import quantised_weights
from engine.worker.weight_streaming import read_share
from tests.checkpoints import make_checkpoint
from tests.engine.worker.model.test_quantised import blocks_of, packed, parts_of, values_of
from tests.quantised_checkpoints import SHAPE, write_quantised

pytestmark = pytest.mark.usefixtures("real_bfloat16")
KINDS = tuple(kind for kind in FORM_BY_KIND if kind not in {"mxfp4_pairs", *CPU_FORMS})
LIMITS = {torch.float32: 2e-5, torch.bfloat16: 2**-8, torch.float16: 2**-10}


def assert_right(weight, values, dtype, num_tokens, *, has_bias=False):
    torch.manual_seed(num_tokens)
    num_rows, depth = values.shape
    x = torch.randn(num_tokens, depth).to(dtype)
    bias = torch.randn(num_rows).to(dtype) if has_bias else None
    out = torch.full((num_tokens, num_rows + 5), 7.0, dtype=dtype)
    multiply(out, x, weight, bias, 3)
    expected = x.double() @ values.double().T + (0 if bias is None else bias.double())
    found = out[:, 3 : 3 + num_rows].double()
    limit = LIMITS[dtype]
    assert torch.allclose(found, expected, rtol=limit, atol=limit * expected.abs().max().item())
    assert (out[:, :3] == 7).all()
    assert (out[:, 3 + num_rows :] == 7).all()


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_files(kind):
    blocks = blocks_of(kind, 37, 512)
    weight, values = packed(blocks, kind, 512), dequantised(blocks, kind)
    assert_right(weight, values, torch.float32, 3)
    assert_right(weight, values, torch.bfloat16, 19, has_bias=True)


@pytest.mark.parametrize("form", ["int4_32", "int4_128", "int8_128", "fp8_128"])
@pytest.mark.parametrize("depth", [136, 384])
def test_forms_with_scales_of_float32_whatever_the_rows_length(form, depth):
    parts = parts_of(form, 70, depth)
    weight = Weight(panels_of(parts, FORMS[form]), None, f"{form}_panels", (70, depth))
    values = values_of(parts, FORMS[form].group)
    assert_right(weight, values, torch.float32, 2, has_bias=True)
    assert_right(weight, values, torch.float16, 17)


@pytest.mark.parametrize("dtype", LIMITS)
def test_products_of_bytes_are_exact(dtype):
    """To the last bit: integers, then one product of two scales and one with it."""
    torch.manual_seed(0)
    parts = quantised(torch.randn(40, 160), "int8_row")
    weight = Weight(panels_of(parts, FORMS["int8_row"]), None, "int8_row_panels", (40, 160))
    x = torch.randn(18, 160).to(dtype)
    x[3] = 0
    out = torch.empty(18, 40, dtype=dtype)
    multiply(out, x, weight, None, 0)
    codes, scales = rounded_inputs(x)
    assert codes.abs().max() == 127
    sums = (codes.long() @ parts.codes.long().T).float()
    row_scales = parts.scales.contiguous().view(torch.float32).view(-1)
    assert torch.equal(out, (sums * (row_scales * scales[:, None])).to(dtype))


def test_a_gpus_arena_holds_panels_and_all_the_rest_whoever_fills_it(tmp_path):
    """As one worker fills it, as two do in the host's memory, and as others map it."""
    path, meant = write_quantised(make_checkpoint(tmp_path / "tiny", **SHAPE), "awq", tmp_path)
    checkpoint, values = Checkpoint.open(path), load_file(meant / "model.safetensors")
    layout = gpu_layout(checkpoint, "float32", "fp8")
    assert gpu_layout(checkpoint, "float32", "widened").num_bytes > layout.num_bytes
    fd = os.memfd_create("weights")
    os.ftruncate(fd, layout.num_bytes)
    for index in range(2):
        read_share(checkpoint, "float32", layout, fd, (index, 2), lambda *_: None)
    arena = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    quantised_weights(checkpoint, "float32", layout, arena, (0, 1), lambda *_: None)
    assert os.pread(fd, layout.num_bytes, 0) == arena.numpy().tobytes()
    os.close(fd)
    weights = quantised_weights(checkpoint, "float32", layout, arena, None, lambda *_: None)
    assert weights.keys() == values.keys()
    names = ["model.layers.1.self_attn.q_proj", "lm_head", "model.layers.1.self_attn.v_proj"]
    assert [weights[f"{name}.weight"].scheme for name in names] == [
        "int4_128_panels", "float32", "int4_128_panels",
    ]  # fmt: skip
    torch.manual_seed(0)
    x = torch.randn(3, 128)
    found = Linears("torch", None).make(weights, names)(x)
    expected = torch.cat([x @ values[f"{name}.weight"].T for name in names], -1)
    assert torch.allclose(found, expected, rtol=2e-5, atol=2e-5)


def test_fp8_by_fp8_is_that_of_inputs_rounded_token_by_token(tmp_path):
    path, _ = write_quantised(make_checkpoint(tmp_path / "tiny", **SHAPE), "fp8-tokens", tmp_path)
    checkpoint = Checkpoint.open(path)
    names = ["model.layers.1.self_attn.q_proj", "lm_head", "model.layers.1.self_attn.v_proj"]
    weights = {}
    for packing in ("panels", "fp8"):
        layout = gpu_layout(checkpoint, "bfloat16", packing)
        arena = torch.zeros(layout.num_bytes, dtype=torch.uint8)
        weights[packing] = quantised_weights(
            checkpoint, "bfloat16", layout, arena, (0, 1), lambda *_: None
        )
    schemes = [[each[f"{name}.weight"].scheme for name in names] for each in weights.values()]
    assert schemes == [
        [quantised, "bfloat16", quantised] for quantised in ("fp8_128_panels", "fp8_rows")
    ]
    torch.manual_seed(0)
    x = torch.randn(5, 128).bfloat16()
    x[2] = 0
    codes, scales = rounded_to_fp8(x)
    assert codes.float().abs().amax(-1).tolist() == [448, 448, 0, 448, 448]
    if torch.__version__ < "2.12" and not torch.cuda.is_available():
        pytest.skip("torch 2.11 has no scaled products on CPUs")
    found = Linears("torch", None).make(weights["fp8"], names)(x)
    expected = Linears("torch", None).make(weights["panels"], names)(
        (codes.float() * scales).bfloat16()
    )
    assert torch.allclose(
        found[:, 128:-64], x @ weights["fp8"]["lm_head.weight"].values.T, 2**-6, 2**-6
    )
    # the reference's inputs are rounded once more, to bfloat16
    sizes = expected.float().abs().amax()
    assert (found.float() - expected.float())[:, :128].abs().max() < 2**-7 * sizes
    assert (found.float() - expected.float())[:, -64:].abs().max() < 2**-7 * sizes


def test_a_step_without_tokens_launches_nothing():
    blocks = blocks_of("q4_0", 16, 32)
    multiply(torch.empty(0, 16), torch.empty(0, 32), packed(blocks, "q4_0", 32), None, 0)
