"""The file of stacks: what stands in its place is named, and neither followed nor waited for."""

import os

import pytest

from appliance.doctor.stacks import FILE_NAME, wait_for_signal
from engine.errors import ConfigError


@pytest.mark.parametrize("kind", ["folder", "pipe", "link"])
def test_what_stands_in_place_of_the_file_is_an_error_that_names_it(tmp_path, kind):
    path, other = tmp_path / FILE_NAME, tmp_path / "other"
    other.write_text("precious")
    match kind:
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "link":
            path.symlink_to(other)
    with pytest.raises(ConfigError) as told:
        wait_for_signal(tmp_path)
    assert told.value.where == str(path)
    assert other.read_text() == "precious"
