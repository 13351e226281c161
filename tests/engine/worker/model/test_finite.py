"""A weight that is infinite or no number is refused, with its file and its tensor."""

import math
import mmap

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.tensor_info import BLOCKS, TensorInfo
from engine.checkpoint.weights_layout import packed_layout, panels_layout, weights_layout
from engine.errors import CheckpointError
from engine.worker.model.dequantise import dequantised
from engine.worker.model.finite import check_blocks, check_finite
from engine.worker.model.weights import load_weights
from tests.checkpoints import make_checkpoint
from tests.levels import needs_kernels
from tests.quantised_checkpoints import KINDS, SHAPE, write_quantised

KEYS = "model.layers.1.self_attn.k_proj.weight"
NAMES = (KEYS, "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
MAPPED, CONVERTED, IN_PAIRS, IN_PANELS = "mapped", "converted", "in pairs", "in panels"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    shape = SHAPE | {"tie_word_embeddings": False}
    return make_checkpoint(tmp_path_factory.mktemp("model"), dtype="bfloat16", **shape)


def load(folder, way, **how):
    checkpoint, ignore = Checkpoint.open(folder), lambda *_: None
    if way == MAPPED:
        return load_weights(checkpoint, "bfloat16", None, None, ignore, **how)
    if way == CONVERTED:
        layout, dtype = weights_layout(checkpoint, "float32"), "float32"
    elif way == IN_PAIRS:
        layout, dtype = packed_layout(checkpoint, "bfloat16"), "bfloat16"
    else:
        how["weights"] = how.get("weights", "q8")
        layout, dtype = panels_layout(checkpoint, "bfloat16", how["weights"]), "bfloat16"
    how["is_packed"] = way != CONVERTED
    return load_weights(checkpoint, dtype, mmap.mmap(-1, layout.num_bytes), (0, 1), ignore, **how)


def spoil(folder, into, name, value):
    into.mkdir()
    for path in folder.iterdir():
        if path.name != "model.safetensors":
            (into / path.name).write_bytes(path.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    tensors[name].view(-1)[-1] = value
    save_file(tensors, into / "model.safetensors")
    return into


@needs_kernels
@pytest.mark.parametrize("way", [MAPPED, CONVERTED, IN_PAIRS, IN_PANELS])
@pytest.mark.parametrize("name", NAMES)
def test_one_value_that_is_not_finite_is_refused_however_it_is_loaded(folder, tmp_path, way, name):
    load(folder, way)
    for value in (math.nan, math.inf, -math.inf):
        spoiled = spoil(folder, tmp_path / str(value), name, value)
        with pytest.raises(CheckpointError, match=name) as refused:
            load(spoiled, way)
        assert refused.value.where == str(spoiled / "model.safetensors")


@needs_kernels
@pytest.mark.parametrize("way", [MAPPED, IN_PAIRS])
def test_a_vector_that_becomes_infinite_in_the_served_dtype_is_refused(folder, tmp_path, way):
    spoiled = spoil(folder, tmp_path / "made", "model.norm.weight", 1.0)
    tensors = load_file(spoiled / "model.safetensors")
    tensors["model.norm.weight"] = torch.full((SHAPE["hidden_size"],), 3.4e38)
    save_file(tensors, spoiled / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has a value"):
        load(spoiled, way)


def test_the_largest_values_are_no_infinite_ones():
    info = TensorInfo("w", "model.safetensors", "bfloat16", (2, 64), 0, 256)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        most = torch.finfo(dtype).max
        check_finite(torch.full((2, 64), most, dtype=dtype), info)
        check_finite(torch.full((2, 64), -most, dtype=dtype), info)


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_are_refused_if_a_value_of_them_is_not_finite(kind):
    num_values, num_bytes = BLOCKS[kind]
    info = TensorInfo("w", "model.gguf", kind, (1, num_values), 0, num_bytes)
    draws = torch.Generator().manual_seed(0)
    outcomes = set()
    for _ in range(600):
        blocks = torch.randint(0, 256, (1, num_bytes), dtype=torch.uint8, generator=draws)
        if blocks[0, 0] in (253, 254):  # mxfp4 has values that are larger than float32's
            continue
        is_finite = bool(torch.isfinite(dequantised(blocks, kind)).all())
        outcomes.add(is_finite)
        if is_finite:
            check_blocks(blocks, info)
        else:
            with pytest.raises(CheckpointError, match="infinite or no number"):
                check_blocks(blocks, info)
    assert outcomes == {True, False}


@pytest.mark.parametrize("kind", KINDS)
def test_scales_that_are_not_finite_are_refused(folder, tmp_path, kind):
    made, _ = write_quantised(folder, kind, tmp_path / "made")
    tensors = load_file(made / "model.safetensors")
    ends = ("scale", "scales", "scale_inv", "scale_2")
    scales = [name for name in tensors if name.endswith(ends) and tensors[name].dtype.itemsize > 1]
    tensors[scales[-1]].view(-1)[-1] = math.inf
    save_file(tensors, made / "model.safetensors")
    with pytest.raises(CheckpointError, match="infinite or no number") as refused:
        load(made, CONVERTED)
    assert scales[-1] in refused.value.what
