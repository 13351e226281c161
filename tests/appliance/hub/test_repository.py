"""Only the files of a repository that serving needs are chosen."""

from __future__ import annotations

import pytest

from appliance.hub.hub_http import RemoteFile, Repository, small_files, weight_files
from appliance.hub.names import HubName
from engine.errors import CheckpointError


def repository(*paths: str, file: str | None = None) -> Repository:
    files = {path: RemoteFile(path, 10, None, f"blob of {path}") for path in paths}
    return Repository(HubName("o/n", file=file), "c" * 40, files)


def chosen(there: Repository) -> list[str]:
    return [file.path for file in weight_files(there)]


SMALL = ("config.json", "tokenizer.json", "generation_config.json", "chat_template.jinja")
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def test_one_file_of_weights_and_nothing_else() -> None:
    there = repository(*SMALL, "README.md", "pytorch_model.bin", "model.safetensors", "x.onnx")
    assert chosen(there) == ["model.safetensors"]
    assert {file.path for file in small_files(there)} == set(SMALL)


@pytest.mark.parametrize(
    "files", [["tekken.json"], ["tokenizer.model"], ["vocab.json", "merges.txt"], ["vocab.txt"]]
)
def test_the_tokenizer_that_serving_would_read_comes_alone(files: list[str]) -> None:
    there = repository("config.json", SINGLE, "spiece.model", *files)
    assert chosen(there) == [SINGLE]
    assert [file.path for file in small_files(there)] == ["config.json", *files]
    beside = repository(*SMALL, SINGLE, *files)
    assert {file.path for file in small_files(beside)} == set(SMALL)


def test_templates_and_the_stages_after_a_model_of_vectors_come_without_pickles() -> None:
    wanted = ["processor_config.json", "chat_template.json", "additional_chat_templates/rag.jinja"]
    wanted += ["modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"]
    wanted += ["1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"]
    left = ["2_Dense/pytorch_model.bin", "pytorch_model.bin", "x.pt", "onnx/model.onnx", "3_x/a.py"]
    there = repository(*SMALL, SINGLE, *wanted, *left)
    assert {file.path for file in small_files(there)} == {*SMALL, *wanted}
    assert chosen(there) == [SINGLE]
    bare = repository(*SMALL, SINGLE, "1_Pooling/config.json")  # of something else
    assert {file.path for file in small_files(bare)} == set(SMALL)


def test_a_small_file_that_is_listed_large_is_refused_by_name() -> None:
    large = RemoteFile("tokenizer.json", (128 << 20) + 1, None, "b")
    there = Repository(HubName("o/n"), "c" * 40, {large.path: large})
    with pytest.raises(CheckpointError, match=r"tokenizer\.json has 128 MiB"):
        small_files(there)


def test_the_parts_that_the_index_names() -> None:
    there = repository(*SMALL, INDEX, *SHARDS, "consolidated.safetensors")
    assert chosen(there) == list(SHARDS)
    assert INDEX in {file.path for file in small_files(there)}
    named = weight_files(there, ["consolidated.safetensors"])
    assert [file.path for file in named] == ["consolidated.safetensors"]
    with pytest.raises(CheckpointError, match=r"names x\.safetensors"):
        weight_files(there, ["x.safetensors"])


@pytest.mark.parametrize(
    ("there", "words"),
    [
        (repository(*SMALL, "pytorch_model.bin"), ["no weights", "pytorch_model"]),
        (repository("tokenizer.json", "model.safetensors"), ["no config.json"]),
        (repository("config.json", "model.safetensors"), ["no tokenizer.json"]),
        (repository("config.json", INDEX, "spiece.model"), ["no tokenizer.json", "spiece.model"]),
        (repository("config.json", INDEX, "vocab.json"), ["no tokenizer.json", "of vocab.json"]),
        (repository("m-Q4_K_M.gguf", "m-Q8_0.gguf"), ["m-Q8_0.gguf", "o/n:Q4_K_M"]),
        (repository("m-Q8_0.gguf", file="Q4_K_M"), ["no quantisation 'Q4_K_M'", "m-Q8_0.gguf"]),
    ],
)
def test_what_cannot_be_served_is_named_with_what_there_is(
    there: Repository, words: list[str]
) -> None:
    with pytest.raises(CheckpointError) as caught:
        weight_files(there)
    said = f"{caught.value} {caught.value.hint}"
    assert [word for word in words if word not in said] == []


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ("Q4_K_M", ["m-Q4_K_M.gguf"]),
        ("q8_0", ["Q8_0/m-Q8_0-00001-of-00002.gguf", "Q8_0/m-Q8_0-00002-of-00002.gguf"]),
        ("F16", ["m.F16.gguf"]),
        ("m-Q4_K_M.gguf", ["m-Q4_K_M.gguf"]),
    ],
)
def test_a_quantisation_or_a_file(wanted: str, expected: list[str]) -> None:
    parts = [f"Q8_0/m-Q8_0-0000{i}-of-00002.gguf" for i in (1, 2)]
    there = repository("m-Q4_K_M.gguf", "mmproj-F16.gguf", "m.F16.gguf", *parts, file=wanted)
    assert chosen(there) == expected
