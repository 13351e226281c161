"""Each part of a model is told with the file that it came from."""

import json

import pytest

from appliance.cli.model_sources import sources
from engine.checkpoint.checkpoint import Checkpoint
from engine.text.tokenizer import Tokenizer
from tests.appliance.model_folder import make_model
from tests.gguf_files import write_gguf


@pytest.fixture
def folder(tmp_path):
    make_model(tmp_path / "m")
    return tmp_path / "m"


def write(folder, name, **values):
    path = folder / name
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | values))


def told(folder):
    return sources(folder, Checkpoint.open(folder), Tokenizer.from_folder(folder))


def test_a_plain_folder_names_its_files(folder):
    write(folder, "tokenizer_config.json", chat_template="a", bos_token="<s>")
    assert told(folder) == {
        "config": "config.json",
        "weights": "model.safetensors",
        "tokenizer": "tokenizer.json",
        "special_tokens": "tokenizer.json, tokenizer_config.json",
        "sampling": "the usual",
        "chat_template": "tokenizer_config.json",
    }


def test_where_files_disagree_what_is_not_used_is_named(folder):
    write(folder, "tokenizer_config.json", chat_template="a", bos_token="<s>")
    (folder / "chat_template.jinja").write_text("b")
    write(folder, "special_tokens_map.json", bos_token="<b>")
    write(folder, "generation_config.json")
    (folder / "model.safetensors.index.json").write_text("{}")
    (folder / "m-Q8_0.gguf").write_bytes(b"")
    page = told(folder)
    assert page["chat_template"] == "chat_template.jinja"
    assert page["sampling"] == "generation_config.json"
    *unread, tokens = page["not_used"].split("; ")
    assert unread == ["m-Q8_0.gguf", "model.safetensors.index.json", "tokenizer_config.json"]
    assert tokens.startswith("tokenizer_config.json: bos_token is '<s>'")


def test_a_tokenizer_that_is_not_used_is_compared_with_the_one_that_is(folder):
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    write(folder, "vocab.json", **vocabulary)
    (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    assert told(folder)["not_used"].startswith("vocab.json, ")
    assert "900" not in told(folder)["not_used"]
    changed = {text: one for text, one in vocabulary.items() if text != "a"} | {"a": 900}
    (folder / "vocab.json").write_text(json.dumps(changed))
    (folder / "tekken.json").write_text("{}")
    tekken, pairs = told(folder)["not_used"].split("; ")
    assert tekken.startswith("tekken.json, ")
    assert f"1 of {len(vocabulary)}" in pairs
    assert "'a' is 900" in pairs
    (folder / "tokenizer.json").unlink()
    (folder / "tekken.json").unlink()
    assert told(folder)["tokenizer"] == "vocab.json, merges.txt"


def test_what_says_nothing_is_not_used(folder):
    write(folder, "config.json", eos_token_id=-1)
    (folder / "generation_config.json").write_text("")
    (folder / "special_tokens_map.json").write_text(" ")
    page = told(folder)
    assert page["sampling"] == "the usual"
    assert page["not_used"].split("; ") == [
        "generation_config.json, which is empty",
        "special_tokens_map.json, which is empty",
        "config.json: eos_token_id -1",
    ]


def test_weights_without_the_usual_name_are_named(folder):
    (folder / "model.safetensors").rename(folder / "odd")
    assert told(folder)["weights"] == "odd"


def test_all_of_a_gguf_file_is_in_it(folder, tmp_path):
    path = write_gguf(folder, tmp_path / "t.gguf", tokenizer__chat_template__rag="r")
    page = told(path)
    assert {page[part] for part in ("config", "tokenizer", "sampling")} == {"t.gguf, metadata"}
    assert (page["weights"], page["chat_template"]) == ("t.gguf", "metadata")
    beyond = "metadata: eos_token_id 267, 269"  # the config's vocabulary is shorter than the file's
    assert page["not_used"] == f"metadata, 'rag'; {beyond}"
