"""The tables [models.NAME] of the configuration are settings of one model each."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.configuration.config import changes, load
from appliance.hub.names import HubName
from engine.errors import ConfigError

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
