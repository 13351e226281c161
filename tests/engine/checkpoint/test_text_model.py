"""A folder of a model of texts that would make each request too large is refused."""

from __future__ import annotations

import json
import os
import shutil
import struct

import pytest

from engine.checkpoint.text_model import (
    MAX_DIMENSIONS,
    MAX_MODULES,
    MAX_PROMPT_CHARS,
    TextModelConfig,
)
from engine.errors import CheckpointError
from tests.text_checkpoints import add_modules, make_text_checkpoint


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = make_text_checkpoint(tmp_path_factory.mktemp("made") / "m", "bert")
    add_modules(folder, dense=(8,))
    return folder


@pytest.fixture
def folder(made, tmp_path):
    return shutil.copytree(made, tmp_path / "m")


def write(path, value):
    path.write_text(json.dumps(value))


def more_modules(folder, count):
    """List the product so often that there are `count` modules."""
    path = folder / "modules.json"
    modules = json.loads(path.read_text())
    write(path, [*modules[:2], *([modules[2]] * (count - 3)), modules[-1]])


def more_prompts(folder, count):
    write(folder / "config_sentence_transformers.json", {"prompts": {"q": "x" * (count - 1)}})


def more_rows(folder, count):
    """Let the product have so many rows, of which the file has no byte written."""
    num_bytes = count * 64 * 4
    entry = {"dtype": "F32", "shape": [count, 64], "data_offsets": [0, num_bytes]}
    header = json.dumps({"linear.weight": entry}).encode()
    path = folder / "2_Dense/model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(path, 8 + len(header) + num_bytes)


@pytest.mark.parametrize(
    ("change", "most"),
    [(more_prompts, MAX_PROMPT_CHARS), (more_rows, MAX_DIMENSIONS)],
)
def test_prompts_and_vectors_have_a_largest_size(folder, change, most):
    change(folder, most)
    TextModelConfig.from_folder(folder, "embedding")
    change(folder, most + 1)
    with pytest.raises(CheckpointError):
        TextModelConfig.from_folder(folder, "embedding")


def test_vectors_without_numbers_are_refused(folder):
    more_rows(folder, 0)
    with pytest.raises(CheckpointError):
        TextModelConfig.from_folder(folder, "embedding")


def test_more_modules_than_any_model_has_are_refused(folder):
    more_modules(folder, MAX_MODULES + 1)
    with pytest.raises(CheckpointError, match=str(MAX_MODULES)):
        TextModelConfig.from_folder(folder, "embedding")


@pytest.mark.parametrize("modes", [["mean", "mean"], ["mean"] * 100_000, [["mean"]], [None]])
def test_each_way_of_pooling_is_named_once(folder, modes):
    where = folder / "1_Pooling/config.json"
    listed = folder / "modules.json"
    write(listed, json.loads(listed.read_text())[:2])
    write(where, {"pooling_mode": ["mean", "max"]})
    assert TextModelConfig.from_folder(folder, "embedding").num_dimensions == 128
    write(where, {"pooling_mode": modes})
    with pytest.raises(CheckpointError):
        TextModelConfig.from_folder(folder, "embedding")
