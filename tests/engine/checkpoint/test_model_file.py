"""What lies in a model's folder and is no regular file is refused at once."""

from __future__ import annotations

import os

import pytest

from engine.checkpoint.chat_files import read_text
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.gguf import is_gguf
from engine.checkpoint.safetensors_header import read_header
from engine.errors import CheckpointError


@pytest.mark.parametrize("read", [Checkpoint.open, read_text, read_header])
def test_a_pipe_in_a_models_folder_is_refused(tmp_path, read):
    for name in ("config.json", "model.gguf"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(CheckpointError):
            read(tmp_path if read == Checkpoint.open else tmp_path / name)
        (tmp_path / name).unlink()


def test_a_pipe_is_no_model(tmp_path):
    os.mkfifo(tmp_path / "sha256-0123")
    assert not is_gguf(tmp_path / "sha256-0123")


def test_a_regular_file_is_read_from_its_beginning(tmp_path):
    (tmp_path / "a").write_bytes("\ufeffé".encode())
    assert read_text(tmp_path / "a") == "é"
