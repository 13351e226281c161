"""The file of stacks: what stands in its place is named, and neither followed nor waited for.

A process that does not wait for the signal is not sent it.
"""

import os
import subprocess
import sys

import pytest

from appliance.daemon.process.stacks import FILE_NAME, stacks, wait_for_signal
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


def test_a_process_that_catches_other_signals_only_is_not_ended(tmp_path):
    code = "import faulthandler; faulthandler.enable(); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "\n"  # it catches SIGSEGV now
        (tmp_path / "lock").write_text(f"{process.pid}\n")
        (tmp_path / FILE_NAME).touch()
        assert f"pid {process.pid}," in stacks(tmp_path)
        process.communicate("go\n", timeout=60)
    assert process.returncode == 0
