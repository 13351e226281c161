"""`penstock doctor --bundle`: what a report needs of a daemon in trouble, and nothing private."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import stat
import tarfile
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from tests.appliance.cli_process import penstock
from tests.daemons import Daemon, make_keys
from tui.replay import Replay

PROMPT = "a penguin that nobody may hear of"
PARTS = {
    "versions.json",
    "findings.json",
    "settings.json",
    "state.json",
    "events.json",
    "requests.json",
    "recording.penstock",
    "stacks.txt",
}


@pytest.fixture
def daemon(start_daemon, tiny_llama, tmp_path):
    """One that keeps prompts in its log, has been asked with a key, and has a worker that hangs."""
    path, keys = make_keys(tmp_path, laptop="user")
    options = ("--listen", "127.0.0.1:0", "--api-keys", str(path), "--log-text")
    daemon = start_daemon(*options, model=tiny_llama).wait_ready()
    daemon.key = keys["laptop"]
    headers = {"Authorization": f"Bearer {daemon.key}", "X-Request-Id": f"{PROMPT} {daemon.key}"}
    body = {"prompt": PROMPT, "max_tokens": 2, "ignore_eos": True}
    reply = httpx.post(f"{daemon.tcp_url}/v1/completions", json=body, headers=headers, timeout=120)
    assert reply.status_code == 200
    assert daemon.log_rows()[0]["client_rid"]
    daemon.wait_for(lambda: daemon.state()["seq"] > 6)  # frames are written some at a time
    os.kill(daemon.worker_pid("prefill"), signal.SIGSTOP)
    return daemon


def make_bundle(daemon: Daemon, path: Path) -> dict[str, bytes]:
    environ = {
        **daemon.env,
        "PENSTOCK_SOCKET": str(daemon.socket),
        "PENSTOCK_STATE_DIR": str(daemon.folder / "state"),
        "PENSTOCK_API_KEY": daemon.key,
    }
    made = penstock(environ, "doctor", "--bundle", str(path))
    assert "wrote" in made.stderr, made.stderr
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with tarfile.open(path) as archive:
        names = {Path(each.name).name: each for each in archive}
        return {name: archive.extractfile(each).read() for name, each in names.items()}


def test_a_report_has_what_is_needed_and_nothing_private_also_of_a_dead_daemon(daemon, tmp_path):
    with closing(sqlite3.connect(daemon.folder / "state" / "requests.db")) as db:
        assert PROMPT in str(db.execute("SELECT * FROM request_text").fetchall())
    parts = make_bundle(daemon, tmp_path / "report.tar.gz")
    assert parts.keys() == PARTS
    for name, data in parts.items():
        assert b"penguin" not in data, name
        assert daemon.key.encode() not in data, name
    assert json.loads(parts["versions.json"])["packages"]["penstock"]
    found = {row["name"]: row["value"] for row in json.loads(parts["settings.json"])}
    assert found["state_dir"] == str(daemon.folder / "state")
    assert "worker.ready" in {row["code"] for row in json.loads(parts["events.json"])}
    (request,) = json.loads(parts["requests.json"])
    assert request["completion_tokens"] == 2
    assert json.loads(parts["state.json"])["pid"] == daemon.pid
    assert {row["check"] for row in json.loads(parts["findings.json"])} >= {"kernels", "daemon"}
    recording = tmp_path / "recording"
    recording.write_bytes(parts["recording.penstock"])
    replay = Replay(recording)
    assert replay.start.at_ms
    replay.close()
    stacks = parts["stacks.txt"].decode().split("== ")[1:]
    ours, *workers = sorted(stacks, key=lambda each: f"pid {daemon.pid}," not in each)
    assert "in run_forever" in ours
    assert "most recent call first" in ours
    (hung,) = [each for each in workers if "no answer" in each]
    assert "stopped" in hung
    assert "penstock-prefil" in hung
    assert any('loop.py", line' in each for each in workers if each is not hung)
    daemon.kill()
    assert_says_what_cannot_be_had(daemon, tmp_path / "later.tar.gz")


def assert_says_what_cannot_be_had(daemon, path):
    parts = make_bundle(daemon, path)
    assert parts.keys() == PARTS
    assert b"no daemon runs" in parts["stacks.txt"]
    assert b"worker.ready" in parts["events.json"]
    environ = {**daemon.env, "PENSTOCK_STATE_DIR": str(daemon.folder / "state")}
    again = penstock(environ, "doctor", "--bundle", str(path))
    assert again.returncode == 2
    assert "File exists" in again.stderr
