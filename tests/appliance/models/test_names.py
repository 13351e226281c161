"""How models are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.models.names import HubName, a_model


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


@pytest.mark.parametrize("value", ["", 3, None, ["o/n"]])
def test_neither(value: object) -> None:
    with pytest.raises(ValueError, match="a path"):
        a_model(value)
