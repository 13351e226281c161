"""Daemons of one user on the same cores know of each other, and of none that has died."""

import json
import os
import signal
import subprocess
import sys

import pytest

from appliance.client.address import UnixAddress
from appliance.client.calls import Client
from appliance.configuration import paths
from appliance.doctor import checks
from appliance.fleet.core_claims import FOLDER, CoreNote, shared_cores, sharing_text

HOLDS = """
import sys, time
from pathlib import Path
from appliance.fleet.core_claims import CoreNote
note = CoreNote(Path(sys.argv[1]))
print(list(note.claim({0, 1})), flush=True)
time.sleep(600)
"""


@pytest.fixture
def environ(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return {"XDG_RUNTIME_DIR": str(tmp_path)}


@pytest.fixture
def note(tmp_path, environ):
    made = []

    def note(name, cpus):
        made.append(one := CoreNote(tmp_path / name, environ))
        return list(one.claim(cpus)), one

    yield note
    for one in made:
        one.close()


def test_a_second_daemon_is_told_of_the_cores_that_both_use(tmp_path, note, environ):
    assert note("first", {0, 1, 2})[0] == []
    told, second = note("second", {1, 2, 3})
    assert len(told) == 1
    for part in ("Cores 1-2 ", str(tmp_path / "first"), str(os.getpid())):
        assert part in told[0]
    assert note("third", {7})[0] == []
    (claim,) = shared_cores({3}, tmp_path / "third", environ)
    assert "Core 3 is" in sharing_text(claim)
    second.close()
    assert list(shared_cores({3}, tmp_path / "third", environ)) == []


def test_a_daemons_claim_ends_with_kill_9_and_its_file_is_cleared(tmp_path, environ):
    command = [sys.executable, "-c", HOLDS, str(tmp_path / "other")]
    with subprocess.Popen(command, env={**os.environ, **environ}, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"[]\n"
        (claim,) = shared_cores({1}, None, environ)
        assert (claim.pid, claim.cpus) == (other.pid, {1})
        (found,) = checks._sharing(lambda: Client(UnixAddress(tmp_path / "p.sock")))
        assert (found.verdict, str(other.pid) in found.found) == ("note", True)
        other.send_signal(signal.SIGKILL)
    assert list(shared_cores({1}, None, environ)) == []
    assert list((paths.private_dir(environ) / FOLDER).iterdir()) == []


def test_foreign_files_and_a_folder_that_cannot_be_made_stop_no_start(tmp_path, note):
    folder = tmp_path / "penstock" / FOLDER
    note("first", {0})
    (folder / "of-another-version").write_text(json.dumps({"cpus": "0"}))
    (folder / "empty").touch()
    os.mkfifo(folder / "pipe")
    assert len(note("second", {0})[0]) == 1
    (tmp_path / "file").touch()
    (said,) = CoreNote(tmp_path / "s", {"XDG_RUNTIME_DIR": str(tmp_path / "file")}).claim({0})
    assert "Not a directory" in said


def test_no_claim_is_made_or_believed_in_a_folder_that_others_can_write_to(tmp_path, note, environ):
    note("first", {0})
    (tmp_path / "penstock" / FOLDER).chmod(0o777)
    (said,) = note("second", {0})[0]
    assert "other users can write" in said
    assert list(shared_cores({0}, None, environ)) == []
