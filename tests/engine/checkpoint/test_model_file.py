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


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer.json", "config.json"])
@pytest.mark.parametrize("is_from_a_linked_folder", [False, True])
def test_a_link_to_a_foreign_file_is_refused(tmp_path, name, is_from_a_linked_folder):
    secret, folder = tmp_path / "shadow", tmp_path / "model"
    secret.write_text("root:$6$")
    folder.mkdir()
    (folder / name).symlink_to("../shadow")
    if is_from_a_linked_folder:
        (tmp_path / "linked").symlink_to(folder)
        folder = tmp_path / "linked"
    with pytest.raises(CheckpointError, match="link out") as refused:
        read_model_text(folder / name)
    assert refused.value.where == str(folder / name)
    assert "$6$" not in str(refused.value)


def test_links_within_a_model_and_to_files_of_the_same_name_are_followed(tmp_path):
    folder, other = tmp_path / "model", tmp_path / "other"
    for each in (folder, other):
        each.mkdir()
    (other / "config.json").write_text("other")
    (folder / "config.json").symlink_to(other / "config.json")
    (folder / "old.json").write_text("own")
    (folder / "tokenizer.json").symlink_to("old.json")
    assert read_model_text(folder / "config.json") == "other"
    assert read_model_text(folder / "tokenizer.json") == "own"


def test_links_of_the_hubs_cache_lead_to_its_own_blobs_alone(tmp_path):
    own, other = (tmp_path / f"models--owner--{name}" for name in ("own", "other"))
    pooling = own / "snapshots" / "0123" / "1_Pooling"
    pooling.mkdir(parents=True)
    for each in (own, other):
        (each / "blobs").mkdir(parents=True)
        (each / "blobs" / "89ab").write_text(each.name)
    snapshot = pooling.parent
    (snapshot / "config.json").symlink_to("../../blobs/89ab")
    (pooling / "config.json").symlink_to("../../../blobs/89ab")
    (tmp_path / "linked").symlink_to(snapshot)
    for folder in (snapshot, pooling, tmp_path / "linked"):
        assert read_model_text(folder / "config.json") == own.name
    (snapshot / "tokenizer.json").symlink_to(other / "blobs" / "89ab")
    with pytest.raises(CheckpointError, match="link out"):
        read_model_text(snapshot / "tokenizer.json")


def test_a_text_may_begin_with_a_byte_order_mark_and_has_a_longest_length(tmp_path, monkeypatch):
    path = tmp_path / "a"
    path.write_bytes("\ufeffé".encode())
    assert read_model_text(path) == "é"
    monkeypatch.setattr(model_file, "MAX_WHOLE_BYTES", 4)
    with pytest.raises(CheckpointError, match="at most"):
        read_model_text(path)
