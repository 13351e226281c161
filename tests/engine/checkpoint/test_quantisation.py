"""Quantised safetensors have the values that their formats mean; broken ones are refused."""

import json
import mmap
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.weights_layout import arena_layout, panels_layout
from engine.errors import CheckpointError
from engine.kernels.cpu import has_kernels
from engine.worker.model.linear import CompiledLinear, choose_linears
from engine.worker.model.weight import PLAIN, embedded
from engine.worker.model.weights import convert_weights, layout_views, load_weights
from tests.checkpoints import make_checkpoint
from tests.quantised_checkpoints import (
    KINDS,
    ROUNDED,
    SHAPE,
    WIDENED,
    rounded,
    write_quantised,
)

needs_kernels = pytest.mark.skipif(not has_kernels(), reason="no compiled kernels")
MATRIX = "model.layers.1.self_attn.k_proj."


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("hf") / "tiny", **SHAPE)


@pytest.fixture(scope="module", params=KINDS)
def made(request, folder, tmp_path_factory):
    into = tmp_path_factory.mktemp("made")
    quantised, meant = write_quantised(folder, request.param, into)
    yield request.param, quantised, load_file(meant / "model.safetensors")
    shutil.rmtree(into)


def values_of(checkpoint, num_shares=1):
    layout = arena_layout(checkpoint, "float32")
    views = layout_views(layout, "float32", torch.zeros(layout.num_bytes, dtype=torch.uint8))
    for index in range(num_shares):
        convert_weights(checkpoint, views, lambda done, total: None, (index, num_shares))
    return views


def test_values_are_those_that_the_format_means(made):
    _, path, meant = made
    checkpoint = Checkpoint.open(path)
    for num_shares in (1, 3):
        for name, values in values_of(checkpoint, num_shares).items():
            assert torch.equal(values, meant[name]), name


@needs_kernels
def test_products_with_panels_are_those_with_the_values(made):
    kind, path, meant = made
    checkpoint = Checkpoint.open(path)
    layout = panels_layout(checkpoint, "float32")
    if kind in WIDENED:
        assert layout is None
        return
    arena = mmap.mmap(-1, layout.num_bytes)
    for index in range(2):
        weights = load_weights(
            checkpoint, "float32", arena, (index, 2), lambda done, total: None, is_packed=True
        )
    kernels = choose_linears("cpu", torch.float32).kernels
    packed = 0
    for name, values in meant.items():
        weight = weights[name]
        assert weight.shape == values.shape
        if weight.scheme in PLAIN:
            assert torch.equal(weight.values, values)
            continue
        packed += 1
        x = torch.randn(3, values.shape[1])
        assert (weight.scheme == "int8_row_panels") == (kind in ROUNDED)
        inputs = rounded(x) if kind in ROUNDED else x
        expected = inputs.double() @ values.double().T
        found = CompiledLinear(kernels, [weight], [])(x).double()
        assert torch.allclose(found, expected, rtol=2e-5, atol=2e-5 * expected.abs().max().item())
    assert packed == 7 * 3


def test_a_value_that_is_no_number_is_refused(folder, tmp_path):
    path, _ = write_quantised(folder, "fp8-rows", tmp_path)
    tensors = load_file(path / "model.safetensors")
    tensors[f"{MATRIX}weight"].view(torch.uint8)[3, 5] = 0xFF
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"tensor {MATRIX}weight"):
        values_of(Checkpoint.open(path))


@pytest.mark.parametrize(
    ("kind", "end", "value", "said"),
    [
        ("gptq", "scales", torch.zeros(3, 64, dtype=torch.half), "no scales of 64 rows"),
        ("gptq", "qzeros", torch.zeros(1, 9, dtype=torch.int32), "asks for (1, 8)"),
        ("gptq", "qweight", torch.zeros(16, 60, dtype=torch.int32), "asks for (16, 64)"),
        ("gptq", "qweight", torch.zeros(17, 64, dtype=torch.int32), "neither 4 nor 8 bits"),
        ("gptq", "qweight", torch.zeros(16, 64), "is stored as float32"),
        ("gptq", "g_idx", torch.zeros(64, dtype=torch.int32), "asks for (128,)"),
        ("gptq", "scales", None, "is missing"),
        ("awq", "qweight", torch.zeros(128, 7, dtype=torch.int32), "asks for (128, 8)"),
        ("awq", "qzeros", torch.zeros(1, 8), "is stored as float32"),
        ("int4-32", "weight_packed", torch.zeros(64, 3, dtype=torch.int32), "neither 4 nor 8"),
        ("int4-32", "weight_scale", torch.zeros(64, 5), "no scales of 64 rows"),
        ("int4-128-zeros", "weight_zero_point", torch.zeros(8, 2, dtype=torch.int32), "(8, 1)"),
        ("fp8-blocks", "weight_scale_inv", torch.zeros(2, 1), "asks for (1, 1)"),
        ("fp8-rows", "weight_scale", torch.zeros(63, 1), "no scales of 64 rows"),
        ("fp8-rows", "weight_scale", torch.zeros(64, 1, dtype=torch.uint8), "is stored as U8"),
        ("int8-rows", "weight", torch.zeros(63, 128, dtype=torch.int8), "asks for (64, 128)"),
        ("int8-rows", "weight", torch.zeros(64, 128, dtype=torch.uint8), "is stored as U8"),
    ],
)
def test_a_part_that_does_not_fit_is_named(folder, tmp_path, kind, end, value, said):
    path, _ = write_quantised(folder, kind, tmp_path)
    tensors = load_file(path / "model.safetensors")
    del tensors[f"{MATRIX}{end}"]
    if value is not None:
        tensors[f"{MATRIX}{end}"] = value
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(path)
    assert f"{MATRIX}{end}" in caught.value.what
    assert said in caught.value.what
    assert caught.value.where == str(path / "model.safetensors")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"quant_method": "bitsandbytes"}, "quantization_config.quant_method is 'bitsandbytes'"),
        ({"quant_method": "quark"}, "fp8, compressed-tensors, gptq, awq"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "quant_algo is 'FP8', not NVFP4"),
        ({"quant_method": ["gptq"]}, "quant_method is ['gptq']"),
        ({}, "quant_method is None"),
        ({"quant_method": "awq", "version": "gemv"}, "version is 'gemv'"),
        ({"quant_method": "awq", "bits": 3}, "bits is 3, not 4"),
        ({"quant_method": "gptq", "bits": 3}, "bits is 3, not 4 or 8"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "not gptq or gptq_v2"),
        ({"quant_method": "gptq", "desc_act": 1}, "desc_act is 1"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size is [128]"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "two sizes"),
        ({"quant_method": "compressed-tensors", "config_groups": []}, "not an object"),
        (
            {"quant_method": "compressed-tensors", "transform_config": {"config_groups": 1}},
            "to be rotated",
        ),
        (
            {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24"}},
            "sparsity_config.format is 'sparse-24', not dense",
        ),
        (3, "quantization_config is 3"),
    ],
)
def test_a_key_that_is_not_served_is_named(folder, tmp_path, keys, said):
    path = shutil.copytree(folder, tmp_path / "model")
    config = json.loads((path / "config.json").read_text()) | {"quantization_config": keys}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(path)
    assert said in str(caught.value)
    assert caught.value.where == str(path / "config.json")


@pytest.mark.parametrize("order", [torch.arange(128) % 2, torch.arange(128) - 1])
def test_columns_in_an_order_that_nobody_told_are_refused(folder, tmp_path, order):
    path, _ = write_quantised(folder, "gptq-32", tmp_path)
    tensors = load_file(path / "model.safetensors")
    tensors[f"{MATRIX}g_idx"] = order.int()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"tensor {MATRIX}g_idx has"):
        values_of(Checkpoint.open(path))


@pytest.fixture(scope="module")
def headers(folder, tmp_path_factory):
    """Of every kind: the file's header, the bytes behind it, the folder."""
    found, into = {}, tmp_path_factory.mktemp("headers")
    for kind in KINDS:
        path, meant = write_quantised(folder, kind, into)
        data = (path / "model.safetensors").read_bytes()
        size = int.from_bytes(data[:8], "little")
        found[kind] = (json.loads(data[8 : 8 + size]), len(data) - 8 - size, path)
        shutil.rmtree(meant)
    return found


SIZES = st.one_of(st.integers(-2, 260), st.sampled_from([2**31, 2**63, "8", None, 1.5, True]))


@settings(deadline=None, max_examples=150)
@given(kind=st.sampled_from(list(KINDS)), data=st.data())
def test_a_hostile_header_is_refused_or_read_but_nothing_else(headers, kind, data):
    header, num_bytes, path = headers[kind]
    header = json.loads(json.dumps(header))
    names = [name for name in header if MATRIX in name]
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from(names))
        change = data.draw(st.sampled_from(["shape", "dtype", "offsets", "gone", "swapped"]))
        entry = header.get(name)
        if entry is None:
            continue
        if change == "shape":
            entry["shape"] = data.draw(st.lists(SIZES, max_size=3))
        elif change == "dtype":
            dtypes = ["F32", "BF16", "I32", "I8", "U8", "F8_E4M3", "F8_E5M2", "X", None, 3]
            entry["dtype"] = data.draw(st.sampled_from(dtypes))
        elif change == "offsets":
            entry["data_offsets"] = [data.draw(SIZES), data.draw(SIZES)]
        elif change == "gone":
            del header[name]
        else:
            other = data.draw(st.sampled_from(names))
            header[name], header[other] = header.get(other, entry), entry
    raw = json.dumps(header).encode()
    file = path / "model.safetensors"
    with file.open("wb") as out:
        out.write(len(raw).to_bytes(8, "little") + raw)
        out.truncate(8 + len(raw) + num_bytes)
    error = None
    try:
        values_of(Checkpoint.open(path))
    except CheckpointError as caught:
        error = caught
    assert error is None or (str(path) in error.where and "tensor" in error.what)


def test_rows_that_are_looked_up_stay_in_the_file(folder, tmp_path):
    path, meant = write_quantised(folder, "awq", tmp_path)
    checkpoint = Checkpoint.open(path)
    layout = panels_layout(checkpoint, "float32")
    assert layout.looked_up == {"model.embed_tokens.weight"}
    arena = mmap.mmap(-1, layout.num_bytes)
    weights = load_weights(
        checkpoint, "float32", arena, (0, 1), lambda done, total: None, is_packed=True
    )
    rows = embedded(weights["model.embed_tokens.weight"], torch.tensor([5]), torch.float32)
    assert torch.equal(
        rows[0], load_file(meant / "model.safetensors")["model.embed_tokens.weight"][5]
    )
