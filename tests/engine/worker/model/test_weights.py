"""Weights are mapped where they can be and converted once where they cannot."""

import mmap
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.weights_layout import weights_layout
from engine.errors import CheckpointError
from engine.worker.model.linear import as_one_matrix
from engine.worker.model.weights import load_weights
from tests.checkpoints import make_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen2", "bfloat16")


def ignore(_done, _total):
    pass


def stored(folder):
    return load_file(folder / "model.safetensors")


def assert_equal(weights, expected, dtype):
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        assert weight.scheme == str(dtype).removeprefix("torch.")
        assert torch.equal(weight.values, expected[name].to(dtype)), name


def test_files_in_the_serving_dtype_are_mapped(folder):
    weights = load_weights(Checkpoint.open(folder), "bfloat16", None, None, ignore)
    assert_equal(weights, stored(folder), torch.bfloat16)
    with open("/proc/self/maps") as maps:
        assert str(folder / "model.safetensors") in maps.read()


def test_matrices_that_can_be_widened_stay_in_the_files(folder):
    checkpoint = Checkpoint.open(folder)
    assert weights_layout(checkpoint, "float32") is not None
    assert weights_layout(checkpoint, "float32", can_widen=True) is None
    assert weights_layout(checkpoint, "float16", can_widen=True) is not None
    weights, expected = load_weights(checkpoint, "float32", None, None, ignore), stored(folder)
    for name, weight in weights.items():
        assert weight.scheme == ("bfloat16" if weight.data.dim() == 2 else "float32")
        assert torch.equal(weight.values.float(), expected[name].float()), name


def test_a_write_to_mapped_weights_does_not_reach_the_file(folder):
    before = (folder / "model.safetensors").read_bytes()
    weights = load_weights(Checkpoint.open(folder), "bfloat16", None, None, ignore)
    weights["model.norm.weight"].data.zero_()
    assert (folder / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_shares_fill_the_arena_together(folder, count):
    checkpoint = Checkpoint.open(folder)
    arena = mmap.mmap(-1, weights_layout(checkpoint, "float32").num_bytes)
    totals = []
    for index in range(count):
        calls = []
        load_weights(
            checkpoint,
            "float32",
            arena,
            (index, count),
            lambda done, total, calls=calls: calls.append((done, total)),
        )
        assert calls == sorted(calls)
        assert calls[-1][0] == calls[-1][1]
        totals.append(calls[-1][1])
    assert sum(totals) == 4 * checkpoint.num_parameters
    assert max(totals) - min(totals) <= 2 * 4 * 96  # a share begins with a row
    weights = load_weights(checkpoint, "float32", arena, None, ignore)
    assert_equal(weights, stored(folder), torch.float32)


def test_one_share_leaves_the_others_alone(folder):
    checkpoint = Checkpoint.open(folder)
    arena = mmap.mmap(-1, weights_layout(checkpoint, "float32").num_bytes)
    weights = load_weights(checkpoint, "float32", arena, (1, 2), ignore)
    assert not weights["model.embed_tokens.weight"].data.any()
    assert weights["lm_head.weight"].data.any()


def test_projections_of_one_input_are_one_matrix_in_the_arena(folder):
    checkpoint = Checkpoint.open(folder)
    arena = mmap.mmap(-1, weights_layout(checkpoint, "float32").num_bytes)
    weights = load_weights(checkpoint, "float32", arena, (0, 1), ignore)
    parts = [weights[f"model.layers.1.self_attn.{name}_proj.weight"].data for name in "qkv"]
    assert torch.equal(as_one_matrix(parts), torch.cat(parts))
    assert as_one_matrix(parts[::-1]) is None
    assert as_one_matrix([parts[0], parts[2]]) is None
    assert as_one_matrix([part.clone() for part in parts]) is None


def test_storages_that_happen_to_be_neighbours_are_not_one_matrix():
    memory = bytearray(64)  # as two allocations of a GPU's memory may lie
    parts = [torch.frombuffer(memory, dtype=torch.float32, offset=o, count=8) for o in (0, 32)]
    parts = [part.view(2, 4) for part in parts]
    assert parts[1].data_ptr() == parts[0].data_ptr() + 32
    assert as_one_matrix(parts) is None
    both = torch.frombuffer(memory, dtype=torch.float32).view(4, 4)
    assert as_one_matrix([both[:2], both[2:]]).shape == (4, 4)


def test_unaligned_files_are_read_through_an_arena(tmp_path, folder):
    odd = make_checkpoint(tmp_path, "qwen2", "bfloat16")
    data = (odd / "model.safetensors").read_bytes()
    header_bytes = int.from_bytes(data[:8], "little") + 1
    moved = header_bytes.to_bytes(8, "little") + data[8 : 7 + header_bytes] + b" "
    (odd / "model.safetensors").write_bytes(moved + data[7 + header_bytes :])
    checkpoint = Checkpoint.open(odd)
    layout = weights_layout(checkpoint, "bfloat16")
    weights = load_weights(checkpoint, "bfloat16", mmap.mmap(-1, layout.num_bytes), (0, 1), ignore)
    assert_equal(weights, stored(folder), torch.bfloat16)


def test_a_file_that_shrank_after_the_check_is_an_error_not_a_crash(tmp_path):
    folder = make_checkpoint(tmp_path)
    checkpoint = Checkpoint.open(folder)
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(CheckpointError, match="shrunk") as caught:
        load_weights(checkpoint, "float32", None, None, ignore)
    assert caught.value.where == str(path)


def test_mixed_dtypes_are_brought_to_one(tmp_path):
    folder = make_checkpoint(tmp_path, "llama", "bfloat16")
    mixed = stored(folder)
    mixed["model.norm.weight"] = mixed["model.norm.weight"].float()
    save_file(mixed, folder / "model.safetensors", {"format": "pt"})
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.stored_dtype == "bfloat16"
    arena = mmap.mmap(-1, weights_layout(checkpoint, "bfloat16").num_bytes)
    assert_equal(load_weights(checkpoint, "bfloat16", arena, (0, 1), ignore), mixed, torch.bfloat16)


def test_rows_of_heads_whose_neighbours_turn_come_in_halves_and_the_rest_as_they_are(tmp_path):
    checkpoint = Checkpoint.open(make_checkpoint(tmp_path, "glm4", "bfloat16", head_dim=8))
    layout = weights_layout(checkpoint, "bfloat16", can_widen=True)
    assert layout is not None, "they cannot be mapped as they are"
    arena = mmap.mmap(-1, layout.num_bytes)
    for index in range(2):
        load_weights(checkpoint, "bfloat16", arena, (index, 2), ignore)
    weights = load_weights(checkpoint, "bfloat16", arena, None, ignore)
    place = "model.layers.1.self_attn"
    half_turns = [0, 2, 1, 3, 4, 5, 6, 7]  # of 8 rows the first 4 turn
    for kind in ("weight", "bias"):
        for name, num_heads in (("q_proj", 4), ("k_proj", 2)):
            before = stored(tmp_path)[f"{place}.{name}.{kind}"].view(num_heads, 8, -1)
            got = weights[f"{place}.{name}.{kind}"].values.view(num_heads, 8, -1)
            assert torch.equal(got, before[:, half_turns]), (name, kind)
        name = f"{place}.v_proj.{kind}"
        assert torch.equal(weights[name].values, stored(tmp_path)[name])
