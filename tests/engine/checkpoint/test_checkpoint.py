"""Checkpoints are checked whole before anything is served."""

import contextlib
import json
import math
import os
import struct
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.hub.names import STARTER_FOLDER
from engine.checkpoint import safetensors_header
from engine.checkpoint.checkpoint import Checkpoint, choose_dtype, expected_shapes
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.safetensors_header import read_header
from engine.checkpoint.weights_layout import weights_layout
from engine.errors import CheckpointError, ConfigError, reading_model
from engine.text.tokenizer import Tokenizer

ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "I32": 4}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 10,
    "hidden_size": 6,
    "intermediate_size": 5,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
}

MIXTURE = {**CONFIG, "architectures": ["MixtralForCausalLM"], "num_local_experts": 3}


def shard(path, shapes, code="F32"):
    """Write zeros of the given shapes in safetensors format."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * ITEM_BYTES[code]
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [start, end]}
    write_raw(path, json.dumps(header).encode(), bytes(end))


def write_raw(path, header, data):
    header += b" " * (-len(header) % 8)
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.fixture
def shapes(folder):
    return dict(expected_shapes(ModelConfig.from_folder(folder)))


def refused(folder):
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    return caught.value


def test_a_single_file_opens(folder, shapes):
    shard(folder / "model.safetensors", shapes, "BF16")
    checkpoint = Checkpoint.open(folder)
    assert {name: tensor.shape for name, tensor in checkpoint.tensors.items()} == shapes
    assert checkpoint.stored_dtype == "bfloat16"
    assert checkpoint.num_bytes == 2 * checkpoint.num_parameters


def test_shards_open_through_their_index(folder, shapes):
    names = list(shapes)
    parts = {"a.safetensors": names[:7], "b.safetensors": names[7:]}
    for file, members in parts.items():
        shard(folder / file, {name: shapes[name] for name in members})
    weight_map = {name: file for file, members in parts.items() for name in members}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    checkpoint = Checkpoint.open(folder)
    assert list(checkpoint.tensors) == names
    assert {t.file.name for t in checkpoint.tensors.values()} == set(parts)

    (folder / "b.safetensors").unlink()
    error = refused(folder)
    assert (error.where, error.what) == (str(folder / "b.safetensors"), "the file is missing")


def test_the_stored_dtype_is_that_of_most_values_not_tensors_or_bytes(folder):
    (folder / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 100}))
    shapes = dict(expected_shapes(ModelConfig.from_folder(folder)))
    embedding = {"model.embed_tokens.weight": shapes.pop("model.embed_tokens.weight")}
    num_others = sum(math.prod(shape) for shape in shapes.values())
    assert num_others < 600 < 2 * num_others  # and they are 19 tensors to one
    weight_map = {}
    for file, members, code in (("a", embedding, "BF16"), ("b", shapes, "F32")):
        shard(folder / f"{file}.safetensors", members, code)
        weight_map |= dict.fromkeys(members, f"{file}.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert Checkpoint.open(folder).stored_dtype == "bfloat16"


def test_an_index_cannot_point_out_of_the_folder(folder):
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "../secret.safetensors"}}))
    assert refused(folder).where == str(index)


def test_extra_tensors_are_left_out(folder, shapes):
    extra = {"lm_head.weight": (10, 6), "model.layers.0.self_attn.rotary_emb.inv_freq": (1,)}
    shard(folder / "model.safetensors", shapes | extra)
    assert list(Checkpoint.open(folder).tensors) == list(shapes)


def test_a_missing_tensor_is_named(folder, shapes):
    name = "model.layers.1.mlp.up_proj.weight"
    shapes.pop(name)
    shard(folder / "model.safetensors", shapes)
    error = refused(folder)
    assert name in error.what
    assert error.where == str(folder / "model.safetensors")


def test_a_fused_layout_is_named_for_what_it_is(folder, shapes):
    prefix = "model.layers.0.self_attn."
    fused = {n: s for n, s in shapes.items() if not n.startswith(prefix) or "o_proj" in n}
    shard(folder / "model.safetensors", fused | {f"{prefix}qkv_proj.weight": (10, 6)})
    error = refused(folder)
    assert f"{prefix}q_proj.weight is missing" in error.what
    assert f"{prefix}qkv_proj.weight" in error.hint
    assert "fused" in error.hint


def test_experts_in_one_tensor_are_named_for_what_they_are(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MIXTURE))
    shapes = dict(expected_shapes(ModelConfig.from_folder(tmp_path)))
    block = "model.layers.0.block_sparse_moe."
    assert f"{block}experts.2.w3.weight" in shapes
    fused = {name: shape for name, shape in shapes.items() if ".experts." not in name}
    shard(tmp_path / "model.safetensors", fused | {f"{block}experts.gate_up_proj": (3, 10, 6)})
    error = refused(tmp_path)
    assert f"{block}experts.0.w1.weight is missing" in error.what
    assert f"{block}experts.gate_up_proj" in error.hint


def test_an_experts_gate_and_up_are_one_matrix_in_the_arena(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MIXTURE))
    shapes = dict(expected_shapes(ModelConfig.from_folder(tmp_path)))
    shard(tmp_path / "model.safetensors", shapes, "BF16")
    offsets = weights_layout(Checkpoint.open(tmp_path), "float32").offset_by_name
    expert = "model.layers.1.block_sparse_moe.experts.1."
    assert offsets[f"{expert}w3.weight"] == offsets[f"{expert}w1.weight"] + 4 * 5 * 6


def test_a_wrong_shape_is_named_with_both_shapes(folder, shapes):
    name = "model.layers.0.self_attn.k_proj.weight"
    assert shapes[name] == (2, 6)
    shard(folder / "model.safetensors", shapes | {name: (6, 2)})
    error = refused(folder)
    assert name in error.what
    assert "(6, 2)" in error.what
    assert "(2, 6)" in error.what


def test_a_truncated_file_is_named_with_the_first_tensor_lost(folder, shapes):
    path = folder / "model.safetensors"
    shard(path, shapes)
    os.truncate(path, path.stat().st_size - 1)
    error = refused(folder)
    assert error.where == str(path)
    assert "truncated" in error.what
    assert "model.norm.weight" in error.what


def test_integer_weights_are_refused(folder, shapes):
    shard(folder / "model.safetensors", shapes, "I32")
    assert "I32" in refused(folder).what


def test_no_folder_and_no_weights_are_named(folder, tmp_path):
    assert refused(tmp_path / "nowhere").where == str(tmp_path / "nowhere")
    assert refused(folder).where == str(folder)
    (folder / "pytorch_model.bin").write_bytes(b"PK")
    assert "pytorch_model.bin" in refused(folder).hint


@pytest.mark.parametrize(
    "files",
    [["weights.safetensors"], ["pytorch_model.bin"], ["sha256-0123abcd"], ["a-1-of-2", "b.st"]],
    ids=str,
)
def test_weights_are_what_their_first_bytes_say(folder, shapes, files):
    names = list(shapes)
    for number, file in enumerate(files):
        members = {name: shapes[name] for name in names[number :: len(files)]}
        shard(folder / file, members)
    shard(folder / "adapter_model.safetensors", {names[0]: shapes[names[0]]})
    (folder / "notes").write_bytes(b"\x10" + bytes(7) + b"not a header")
    checkpoint = Checkpoint.open(folder)
    assert {name: tensor.shape for name, tensor in checkpoint.tensors.items()} == shapes
    assert {path.name for path in checkpoint.files} == set(files)
    assert str(folder) in refused(folder / files[0]).hint


def test_two_files_with_one_tensor_and_no_index_are_refused(folder, shapes):
    shard(folder / "a.safetensors", shapes)
    shard(folder / "b.safetensors", dict(list(shapes.items())[:1]))
    error = refused(folder)
    assert error.where == str(folder / "b.safetensors")
    assert (next(iter(shapes)) in error.what, "a.safetensors" in error.what) == (True, True)


def test_a_gguf_file_in_the_place_of_weights_is_named(folder):
    (folder / "model.safetensors").write_bytes(b"GGUF" + bytes(60))
    assert "GGUF" in refused(folder).hint


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]},
        {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]},
        {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]},
        {"dtype": "X9", "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1]},
        {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]},
        "F32",
        None,
    ],
)
def test_a_malformed_entry_is_named(tmp_path, entry):
    path = tmp_path / "x.safetensors"
    write_raw(path, json.dumps({"bad": entry}).encode(), bytes(8))
    with pytest.raises(CheckpointError, match="bad") as caught:
        read_header(path)
    assert caught.value.where == str(path)


def test_overlapping_tensors_are_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    write_raw(path, json.dumps({"a": entry, "b": entry}).encode(), bytes(16))
    with pytest.raises(CheckpointError, match="overlaps"):
        read_header(path)


@given(st.binary(max_size=64))
def test_garbage_is_an_error_not_a_crash(tmp_path_factory, garbage):
    path = tmp_path_factory.mktemp("garbage") / "x.safetensors"
    path.write_bytes(garbage)
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert caught.value.where == str(path)


@given(st.binary(min_size=2, max_size=64))
def test_a_garbage_header_is_an_error_not_a_crash(tmp_path_factory, garbage):
    path = tmp_path_factory.mktemp("garbage") / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(garbage)) + garbage)
    with contextlib.suppress(CheckpointError):
        assert read_header(path)[1] == []


@pytest.mark.parametrize(
    ("stored", "flags", "chosen"),
    [
        ("BF16", {"avx2", "amx_bf16"}, "bfloat16"),
        ("BF16", {"avx512_bf16"}, "bfloat16"),
        ("F16", {"avx512_bf16"}, "bfloat16"),
        ("F32", {"avx512_bf16"}, "float32"),
        ("BF16", {"avx2"}, "float32"),
    ],
)
def test_auto_serves_bfloat16_only_where_it_is_native(folder, shapes, stored, flags, chosen):
    shard(folder / "model.safetensors", shapes, stored)
    checkpoint = Checkpoint.open(folder)
    assert choose_dtype("auto", checkpoint.stored_dtype, flags) == chosen
    assert choose_dtype("float16", checkpoint.stored_dtype, flags) == "float16"
    assert choose_dtype("auto", checkpoint.stored_dtype) in ("float32", "bfloat16")
    with pytest.raises(ConfigError, match="int8"):
        choose_dtype("int8", checkpoint.stored_dtype, flags)


def test_files_in_the_serving_dtype_need_no_arena(folder, shapes):
    shard(folder / "model.safetensors", shapes, "BF16")
    checkpoint = Checkpoint.open(folder)
    assert weights_layout(checkpoint, "bfloat16") is None
    assert weights_layout(checkpoint, "float16") is not None


@pytest.mark.parametrize(("dtype", "item_bytes"), [("float32", 4), ("float16", 2)])
def test_the_arena_is_aligned_without_gaps_inside_a_fused_matrix(folder, shapes, dtype, item_bytes):
    shard(folder / "model.safetensors", shapes, "BF16")
    checkpoint = Checkpoint.open(folder)
    layout = weights_layout(checkpoint, dtype)
    offsets = layout.offset_by_name
    end = 0
    for name, shape in shapes.items():
        is_continued = any(part in name for part in ("k_proj", "v_proj", "up_proj"))
        assert offsets[name] == end if is_continued else offsets[name] % 64 == 0
        assert end <= offsets[name] < end + 64
        end = offsets[name] + item_bytes * math.prod(shape)
    assert layout.num_bytes == end
    assert layout == weights_layout(checkpoint, dtype)


def test_reading_checkpoints_needs_no_torch():
    code = (
        "import sys, engine.checkpoint.checkpoint; "
        "sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class Panic(BaseException):
    """As a panic of Rust, which is no Exception."""


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RecursionError("deep"),
        Panic("at x.rs"),
        KeyError("k"),
        PermissionError(13, "no"),
    ],
)
@pytest.mark.parametrize("read", [Checkpoint.open, Tokenizer.from_folder])
def test_whatever_reading_a_model_raises_is_an_error_of_that_model(monkeypatch, error, read):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("json.loads", fail)
    monkeypatch.setattr("tokenizers.Tokenizer.from_str", fail)
    with pytest.raises(CheckpointError) as refused:
        read(STARTER_FOLDER)
    assert refused.value.exit_code == 78
    assert refused.value.where


def test_a_key_that_interrupts_reading_is_no_error_of_the_model():
    with pytest.raises(KeyboardInterrupt), reading_model("m"):
        raise KeyboardInterrupt


@pytest.mark.parametrize("shape", [[1] * 17, [2**63, 0], [-1]])
def test_absurd_dimensions_are_refused(tmp_path, shape):
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}
    write_raw(tmp_path / "x.safetensors", json.dumps({"x": entry}).encode(), b"")
    with pytest.raises(CheckpointError, match="malformed"):
        read_header(tmp_path / "x.safetensors")


@pytest.mark.parametrize("header_bytes", [0, 1, 1 << 40, 1 << 63, (1 << 64) - 1])
def test_a_header_that_the_file_cannot_hold_is_not_read(tmp_path, header_bytes):
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", header_bytes) + b"{}" * 100)
    with pytest.raises(CheckpointError) as refused:
        read_header(path)
    assert refused.value.where == str(path)


def test_more_tensors_than_any_model_has_are_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_header, "MAX_TENSORS", 3)
    path = tmp_path / "x.safetensors"
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    for count in (3, 4):
        write_raw(path, json.dumps(dict.fromkeys("abcd"[:count], entry)).encode(), b"")
        with pytest.raises(CheckpointError) if count > 3 else contextlib.nullcontext():
            assert len(read_header(path)[1]) == 3
