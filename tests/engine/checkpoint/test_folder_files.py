"""Each file of JSON in a model's folder is read once for all that ask for it."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from engine.checkpoint import model_file
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.folder_files import FolderFiles
from engine.errors import CheckpointError
from engine.text.tokenizer import TokenizerFiles
from tests.checkpoints import make_checkpoint


def words(folder):
    """Write a tokenizer of words, whose class tokenizer_config.json names."""
    folder.mkdir()
    (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\nonce\n")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    (folder / "config.json").write_text('{"model_type": "bert"}')
    return folder


@pytest.mark.parametrize(
    ("make", "read"),
    [
        (make_checkpoint, Checkpoint.open),
        (make_checkpoint, TokenizerFiles.read),
        (words, TokenizerFiles.read),
    ],
)
def test_no_file_of_json_is_read_twice(tmp_path, monkeypatch, make, read):
    open_fd, opened = model_file.open_model_fd, Counter()

    def noted(path):
        opened[path.name] += 1
        return open_fd(path)

    monkeypatch.setattr(model_file, "open_model_fd", noted)
    read(make(tmp_path / "m"))
    assert opened["tokenizer_config.json"] == 1
    assert {name for name, count in opened.items() if count > 1 and name.endswith(".json")} == set()


def test_what_was_read_first_is_what_all_get(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"a": 1}')
    files = FolderFiles(tmp_path)
    assert (files.object("config.json"), files.keys("config.json").values) == ({"a": 1},) * 2
    path.write_text(json.dumps({"a": 2}))
    assert (files.object("config.json"), files.keys("config.json").values) == ({"a": 1},) * 2
    assert files.object("missing.json") == {}
    with pytest.raises(CheckpointError):
        files.keys("missing.json")
