"""How models are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.configuration.config import changes, load
from appliance.models.hub_http import RemoteFile, Repository, small_files, weight_files
from appliance.models.names import STARTER_FOLDER, HubName, a_model
from appliance.models.short_names import SHORT_NAMES
from engine.errors import CheckpointError, ConfigError


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen/Qwen3-0.6B", HubName("Qwen/Qwen3-0.6B")),
        ("o/n@v1.0", HubName("o/n", "v1.0")),
        ("o/n@refs/pr/3", HubName("o/n", "refs/pr/3")),
        ("o/n:Q4_K_M", HubName("o/n", "main", "Q4_K_M")),
        ("o/n@abc1234:sub/x-Q8_0.gguf", HubName("o/n", "abc1234", "sub/x-Q8_0.gguf")),
        ("hf.co/o/n:Q8_0", HubName("o/n", "main", "Q8_0")),
        ("https://huggingface.co/o/n", HubName("o/n")),
    ],
)
def test_a_name_on_the_hub(text: str, name: HubName) -> None:
    assert a_model(text) == name
    assert a_model(str(name)) == name


@pytest.mark.parametrize("text", ["/srv/models/m", "./o/n", "~/m", "name", "a/b/c", "o/n@", "o/.."])
def test_what_is_no_name_is_a_path(text: str) -> None:
    path = a_model(text)
    assert isinstance(path, Path)
    assert path.is_absolute()


def test_a_folder_that_is_there_is_never_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "o" / "n").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert a_model("o/n") == tmp_path / "o" / "n"
    assert a_model("o/other") == HubName("o/other")


def test_the_starter_is_known_by_its_name_unless_such_a_folder_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert a_model("penstock-starter-1") == STARTER_FOLDER
    assert (STARTER_FOLDER / "config.json").is_file()
    (tmp_path / "penstock-starter-1").mkdir()
    assert a_model("penstock-starter-1") == tmp_path / "penstock-starter-1"


@pytest.mark.parametrize(
    ("text", "repository"),
    [
        ("qwen3:0.6b", "Qwen/Qwen3-0.6B"),
        ("Llama3.2:1B", "meta-llama/Llama-3.2-1B-Instruct"),
        ("llama3.2:latest", "meta-llama/Llama-3.2-3B-Instruct"),
        ("mine", "o/mine"),
        ("qwen3", "Qwen/Qwen3-0.6B"),
    ],
)
def test_a_short_name_stands_for_a_name_on_the_hub(text: str, repository: str) -> None:
    assert a_model(text, {"mine": "o/mine", "qwen3": "qwen3:0.6b"}) == HubName(repository)


def test_short_names_stand_for_names_on_the_hub_and_a_folder_goes_before_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all(name == name.lower() for name in SHORT_NAMES)
    assert {type(a_model(name)) for name in SHORT_NAMES} == {HubName}
    for name in SHORT_NAMES:
        assert name.partition(":")[0] in SHORT_NAMES or name == "mixtral:8x7b"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen3").mkdir()
    assert a_model("qwen3") == tmp_path / "qwen3"


def test_a_config_files_short_names_hold_for_every_model_in_it(tmp_path: Path) -> None:
    path = tmp_path / "penstock.toml"
    path.write_text(
        'model = "mine"\n[short_names]\nmine = "o/mine"\n"big:70b" = "o/big"\n'
        '[models.other]\nmodel = "big:70b"\n'
    )
    environ = {"PENSTOCK_CONFIG": str(path), "XDG_RUNTIME_DIR": str(tmp_path)}
    config = load({}, environ)
    assert (config.model, config.models["other"].model) == (HubName("o/mine"), HubName("o/big"))
    assert load({"model": "big:70b"}, environ).model == HubName("o/big")
    path.write_text("[short_names]\nmine = 3\n")
    with pytest.raises(ConfigError) as refused:
        load({}, environ)
    assert refused.value.where == f"{path}:1: short_names"


@pytest.mark.parametrize("value", ["", 3, None, ["o/n"]])
def test_neither(value: object) -> None:
    with pytest.raises(ValueError, match="a path"):
        a_model(value)


# --------------------------------------------------------------------------------------------------
# Which files of a repository are needed.


def repository(*paths: str, file: str | None = None) -> Repository:
    files = {path: RemoteFile(path, 10, None, f"blob of {path}") for path in paths}
    return Repository(HubName("o/n", file=file), "c" * 40, files)


def chosen(there: Repository) -> list[str]:
    return [file.path for file in weight_files(there)]


SMALL = ("config.json", "tokenizer.json", "generation_config.json", "chat_template.jinja")
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"


def test_one_file_of_weights_and_nothing_else() -> None:
    there = repository(*SMALL, "README.md", "pytorch_model.bin", "model.safetensors", "x.onnx")
    assert chosen(there) == ["model.safetensors"]
    assert {file.path for file in small_files(there)} == set(SMALL)


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


# --------------------------------------------------------------------------------------------------
# The tables [models.NAME] of the configuration.

SHARED = 'kv_memory = "1GiB"\ndtype = "float32"\nmodel = "owner/large"\n'


def loaded(tmp_path: Path, text: str):
    path = tmp_path / "penstock.toml"
    path.write_text(text)
    return load({"config": str(path)}, {"HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)})


def test_a_model_has_its_own_settings_over_those_that_all_share(tmp_path: Path) -> None:
    tables = '[models.small]\nmodel = "owner/small"\nkv_memory = "64MiB"\n'
    config = loaded(tmp_path, SHARED + tables + '[models."o/n"]\nmodel = "/srv/n"\n')
    small, other = config.models["small"], config.models["o/n"]
    assert (small.model, small.kv_memory_bytes) == (HubName("owner/small"), 64 << 20)
    assert (other.model, other.kv_memory_bytes) == (Path("/srv/n"), 1 << 30)
    assert small.dtype == other.dtype == "float32"
    assert changes(config, loaded(tmp_path, SHARED)) == ([], ["models"])


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ("[models.small]\n", ["models.small", "which `model`", ":4"]),
        ('[models.small]\nmodel = "o/n"\nlisten = "x"\n', ["'listen'", "max_model_len"]),
        ('[models.small]\nmodel = "o/n"\nkv_memory = "much"\n', ["'much'", "2GiB"]),
        ("models = 3\n", ["models are tables"]),
        ("[models]\nsmall = 3\n", ["models are tables"]),
    ],
)
def test_a_wrong_table_is_named_with_its_place(
    tmp_path: Path, tables: str, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, SHARED + tables)
    said = f"{caught.value} {caught.value.hint}"
    assert [word for word in words if word not in said] == []
