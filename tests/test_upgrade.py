"""What version 0.1 has left behind is opened by this one: its settings, its recordings.

The files in fixtures/v0.1 were made by that version's own code, and are not made anew.
"""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import tomllib
from pathlib import Path

from appliance.configuration.client_settings import explain
from appliance.configuration.config import load
from appliance.configuration.sources import DEFAULT
from appliance.observe.frame.protocol import Frame
from tui.replay import Replay

OLD = Path(__file__).parent / "fixtures" / "v0.1"


def unpacked(name: str, folder: Path) -> Path:
    path = folder / name
    path.write_bytes(gzip.decompress((OLD / f"{name}.gz").read_bytes()))
    return path


def test_an_old_recording_plays(tmp_path):
    assert_plays(unpacked("recording.penstock", tmp_path))


def assert_plays(path: Path) -> None:
    """All twelve seconds, with the requests and events of their times."""
    replay = Replay(path)
    seen = [view.frame for view in replay.views()]
    assert replay.num_damaged == 0
    replay.close()
    assert all(isinstance(frame, Frame) for frame in seen)
    assert [frame.at[-7:-1] for frame in seen] == [f"{second:02}.000" for second in range(12)]
    assert {one.id for one in seen[5].requests} == {"cmpl-first", "chatcmpl-second"}
    assert seen[5].workers
    assert [event.code for event in seen[-1].events] == ["worker.died", "worker.ready"]


def test_every_setting_of_an_old_file_is_known_and_holds(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    flags = {"config": str(OLD / "penstock.toml")}
    config = load(flags, {})
    assert (config.max_queued, config.kv_memory_bytes, config.roles) == (256, 2 << 30, "elastic")
    assert config.max_body_bytes == 32 << 20
    named = set(tomllib.loads((OLD / "penstock.toml").read_text()))
    set_here = {found.name for found in explain(flags, {}) if found.origin != DEFAULT}
    assert set_here == named


def run(*command: str, **variables: str) -> tuple[int, str]:
    environ = {**os.environ, **variables}
    done = subprocess.run(
        [sys.executable, "-P", "-m", *command], env=environ, capture_output=True, check=False
    )
    return done.returncode, done.stdout.decode()


def test_programs_of_an_old_daemon_are_found_by_their_old_names(tmp_path):
    """Of one at 8d51d038, which runs on while its files are replaced; `restart` ends it."""
    code, said = run("engine.workers", "--help")
    assert (code, "engine.worker " in said, "--channel-fd" in said) == (0, True, True)
    code, said = run("appliance.models.hub", "a/b", HF_HUB_OFFLINE="1", HF_HUB_CACHE=str(tmp_path))
    assert (code, "error" in said) == (1, True)
