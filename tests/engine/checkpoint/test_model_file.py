"""What lies in a model's folder and is no regular file is refused at once."""

from __future__ import annotations

import os

import pytest

from engine.checkpoint import model_file
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.folder_files import read_object
from engine.checkpoint.gguf import is_gguf
from engine.checkpoint.model_file import read_model_text
from engine.checkpoint.safetensors_header import read_header
from engine.errors import CheckpointError
from tests.hostile_models import ODD_FILES

pytestmark = pytest.mark.usefixtures("in_time")


@pytest.mark.parametrize("make", ODD_FILES.values(), ids=ODD_FILES)
def test_only_a_regular_file_is_read(tmp_path, make):
    for name in ("config.json", "model.gguf"):
        make(tmp_path / name)
    for read in (read_model_text, read_header):
        with pytest.raises(CheckpointError):
            read(tmp_path / "config.json")
    for path in (tmp_path, tmp_path / "model.gguf"):
        with pytest.raises(CheckpointError):
            Checkpoint.open(path)


@pytest.mark.parametrize("make", ODD_FILES.values(), ids=ODD_FILES)
def test_what_is_no_regular_file_is_not_taken_for_an_absent_one(tmp_path, make):
    make(tmp_path / "tokenizer_config.json")
    with pytest.raises(CheckpointError):
        read_object(tmp_path / "tokenizer_config.json")
    assert read_object(tmp_path / "special_tokens_map.json") == {}


def test_a_pipe_is_no_model(tmp_path):
    os.mkfifo(tmp_path / "sha256-0123")
    assert not is_gguf(tmp_path / "sha256-0123")


def test_a_text_may_begin_with_a_byte_order_mark_and_has_a_longest_length(tmp_path, monkeypatch):
    path = tmp_path / "a"
    path.write_bytes("\ufeffé".encode())
    assert read_model_text(path) == "é"
    monkeypatch.setattr(model_file, "MAX_WHOLE_BYTES", 4)
    with pytest.raises(CheckpointError, match="at most"):
        read_model_text(path)
