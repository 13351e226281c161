"""How models are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.configuration.config import load
from appliance.hub.names import STARTER_FOLDER, HubName, a_model
from appliance.hub.short_names import SHORT_NAMES
from engine.errors import ConfigError


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


@pytest.mark.parametrize("kind", ["@", ":"])
@pytest.mark.parametrize("part", ["x/../../y", "x/..", "x/./y", "x//y", "x/", "../x", "x/.../y"])
def test_a_revision_or_file_that_could_leave_its_folder_is_no_name(kind: str, part: str) -> None:
    assert isinstance(a_model(f"o/n{kind}{part}"), Path)


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
