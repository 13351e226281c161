"""Where a served model's files are."""

import os
from pathlib import Path

import pytest

from appliance.fleet.model_files import model_folder
from engine.errors import ConfigError


def test_a_path_that_is_not_utf8_is_refused_for_every_reply_names_it(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(bytes(tmp_path) + b"/m\xff"))
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    for path in (folder, tmp_path / "link"):
        with pytest.raises(ConfigError, match="not UTF-8"):
            model_folder(path)
    assert model_folder(tmp_path) == tmp_path
