"""The verbs on the SSD cache, over a folder with a few blocks."""

from __future__ import annotations

import errno
import json
import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from appliance.fleet.weights_file import WeightsFile
from engine.scheduler.offload.files import WEIGHTS_FOLDER
from engine.scheduler.offload.index import RecordPlace
from engine.scheduler.offload.slab_files import RecordBuffer, Slabs
from tests.appliance.cli_process import ROOT, penstock, user_environ
from tests.appliance.logs import query
from tests.recordings import at, frame_at, make_recording, request_row, write_log
from tests.worlds.fake_daemon import FakeDaemon

BLOCK_BYTES = 5000


@pytest.fixture
def slabs(tmp_path):
    """Of a daemon that is running; three blocks are in it."""
    slabs = Slabs(tmp_path / "kv", BLOCK_BYTES, bytes(32), 1 << 20, 0, "small in bfloat16")
    slabs.open()
    slabs.grow()
    for n in range(3):
        buffer = RecordBuffer(BLOCK_BYTES)
        buffer.block[:] = bytes([n]) * BLOCK_BYTES
        slabs.write(RecordPlace(0, n), bytes([n]) * 16, n, 1_700_000_000 + n, buffer)
    yield slabs
    slabs.close()


def cache(tmp_path, *words):
    return penstock(user_environ(tmp_path), "cache", *words, "--ssd-dir", str(tmp_path / "kv"))


def test_stats_say_what_is_there(slabs, tmp_path):
    done = cache(tmp_path, "stats", "-o", "json")
    content = json.loads(done.stdout)
    assert (content["blocks"], content["block_bytes"]) == (3, 15_000)
    assert content["models"] == [{"model": "small in bfloat16", "blocks": 3, "bytes": 15_000}]
    assert "small in bfloat16: 3 blocks, 14.6 KiB" in cache(tmp_path, "stats").stdout
    assert content["oldest"] < content["newest"]
    assert content["damaged_blocks"] is None  # it reads no block


def test_verify_reads_everything_and_exits_8_if_a_block_is_damaged(slabs, tmp_path):
    assert cache(tmp_path, "verify").stdout == "3 blocks sound\n"
    path = tmp_path / "kv" / "slab-000000.kv"
    with path.open("r+b") as file:
        file.seek(4096 + 8192 + 1000)
        file.write(b"x")
    done = cache(tmp_path, "verify")
    assert done.returncode == 8
    assert "1 damaged, 2 blocks sound" in done.stderr


def test_clear_deletes_what_no_daemon_has(slabs, tmp_path):
    done = cache(tmp_path, "clear")
    assert done.returncode == 9
    assert "a daemon uses it" in done.stderr
    slabs.close()
    assert cache(tmp_path, "clear").returncode == 0
    assert os.listdir(tmp_path / "kv") == ["lock"]
    assert json.loads(cache(tmp_path, "stats", "-o", "json").stdout)["blocks"] == 0


def test_packed_weights_are_counted_and_deleted_with_the_blocks(slabs, tmp_path):
    slabs.close()
    weights = WeightsFile(tmp_path / "kv" / WEIGHTS_FOLDER, bytes(32), 100_000, 30)
    weights.finish()
    content = json.loads(cache(tmp_path, "stats", "-o", "json").stdout)
    assert content["weights_files"] == 1
    assert content["weights_bytes"] >= 100_000
    done = cache(tmp_path, "clear")
    assert (done.returncode, weights.path.exists()) == (9, True)
    assert json.loads(cache(tmp_path, "stats", "-o", "json").stdout)["blocks"] == 3
    os.close(weights.fd)
    assert cache(tmp_path, "clear").returncode == 0
    assert not weights.path.exists()
    content = json.loads(cache(tmp_path, "stats", "-o", "json").stdout)
    assert (content["blocks"], content["weights_files"], content["weights_bytes"]) == (0, 0, 0)


def test_what_is_not_there_is_exit_code_5(tmp_path):
    environ = user_environ(tmp_path)
    for words in (("stats",), ("prune", "--older-than", "1d"), ("export", str(tmp_path / "copy"))):
        ended = penstock(environ, "db", *words)
        assert (ended.returncode, "requests.db" in ended.stderr) == (5, True)
        assert "hint: " in ended.stderr
    assert not (tmp_path / "copy").exists()
    ended = cache(tmp_path, "stats")
    assert (ended.returncode, f"{tmp_path / 'kv'}: " in ended.stderr) == (5, True)
    assert penstock(environ, "cache", "stats").returncode == 0  # nothing has been kept yet
    assert penstock(environ, "models", "list", "--dir", str(tmp_path / "none")).returncode == 5


def test_a_file_that_is_no_log_is_exit_code_8(tmp_path):
    environ, path = user_environ(tmp_path), tmp_path / "requests.db"
    path.write_text("no database, and long enough to be read as a header " * 40)
    for words in (("stats",), ("prune", "--older-than", "1d"), ("export", str(tmp_path / "copy"))):
        ended = penstock(environ, "db", *words, "--state-dir", str(tmp_path))
        assert (ended.returncode, f"{path}: " in ended.stderr) == (8, True)
        assert "hint: `sqlite3 FILE .dump`" in ended.stderr
    assert not (tmp_path / "copy").exists()


# `penstock record`: from a daemon, from its file, and when neither can.


ASKED = "GET /v1/penstock/recording"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """The log of a daemon that is gone."""
    seen = [frame_at(second) for second in range(60)]
    log = write_log(tmp_path / "state" / "requests.db", seen, [request_row("cmpl-1", 3)])
    assert log.close()
    return log.path


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Where it goes, in a folder of its own."""
    (tmp_path / "kept").mkdir()
    return tmp_path / "kept" / "incident.penstock"


def test_a_daemon_is_asked_for_the_last_half_hour(
    daemon: FakeDaemon, environ: dict[str, str], target: Path, tmp_path: Path
) -> None:
    made = make_recording(tmp_path, [frame_at(0), frame_at(1)])
    daemon.script.replies = {f"{ASKED}?since=30m": (200, made.read_bytes())}
    ended = penstock(environ, "record", "-o", str(target))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith(f"{at(0)} to {at(1)}: 2 frames, 0 requests, 0 events\n")
    assert f"penstock top --replay {target} " in ended.stdout
    assert target.read_bytes() == made.read_bytes()
    assert target.stat().st_mode & 0o777 == 0o600
    penstock(environ, "record", "-o", str(target) + "2", "--since", "-2h", "--until", "1h")
    assert daemon.script.asked[-1][0] == f"{ASKED}?since=-2h&until=1h"


def test_requests_that_the_daemon_cannot_log_are_told_as_missing(
    daemon: FakeDaemon, environ: dict[str, str], target: Path, tmp_path: Path
) -> None:
    made = make_recording(tmp_path, [frame_at(0), frame_at(1)])
    lacks = {"reason": "cannot write the request log: disk full", "num_requests": 3, "folder": "/a"}
    daemon.script.replies = {
        f"{ASKED}?since=30m": (200, made.read_bytes()),
        "GET /v1/penstock/state": (200, {"state": "ready", "unwritten": lacks}),
    }
    ended = penstock(environ, "record", "-o", str(target))
    assert ended.returncode == 0
    assert all(part in ended.stderr for part in (lacks["reason"], "3 finished requests"))


def test_without_a_daemon_its_file_is_read(
    log: Path, environ: dict[str, str], target: Path
) -> None:
    ended = penstock(environ, "record", "-o", str(target), "--since", at(10), "--until", at(20))
    assert ended.returncode == 0, ended.stderr
    assert f"reading {log}" in ended.stderr
    assert query(target, "SELECT count(*) FROM frames") == [(10,)]
    assert target.stat().st_mode & 0o777 == 0o600
    shown = penstock(environ, "top", "--replay", str(target), "--once", "--at", "14:00:12")
    assert shown.returncode == 0, shown.stderr
    assert "REPLAY 2999-11-21 14:00:12Z" in shown.stdout
    assert "decoding" in shown.stdout
    last = penstock(environ, "top", "--replay", str(target), "--once")
    assert "REPLAY 2999-11-21 14:00:19Z" in last.stdout
    lines = penstock(environ, "top", "--replay", str(target)).stdout.splitlines()
    assert len(lines) == 10
    assert all(line.startswith("REPLAY  14:00:1") for line in lines)


@pytest.mark.usefixtures("log")
def test_damage_is_told_in_every_form(environ: dict[str, str], target: Path) -> None:
    assert penstock(environ, "record", "-o", str(target)).returncode == 0
    with closing(sqlite3.connect(target)) as db, db:
        db.execute("UPDATE frame_templates SET frame = '[1,2'")
    for flags in (("--once", "--json"), ("--once",)):
        shown = penstock(environ, "top", "--replay", str(target), *flags)
        assert (shown.returncode, "is damaged" in shown.stderr) == (8, True)
        assert "--json" not in flags or shown.stdout == ""
    assert "is damaged" in penstock(environ, "top", "--replay", str(target), "--plain").stdout


@pytest.mark.parametrize(
    ("arguments", "code", "about"),
    [
        (("--since", "soon"), 2, "must be a time"),
        (("--since", at(1000)), 5, "nothing was recorded"),
    ],
)
@pytest.mark.usefixtures("log")
def test_what_cannot_be_recorded_leaves_nothing(
    environ: dict[str, str], target: Path, arguments: tuple[str, ...], code: int, about: str
) -> None:
    ended = penstock(environ, "record", "-o", str(target), *arguments)
    assert (ended.returncode, ended.stdout) == (code, "")
    assert about in ended.stderr
    assert os.listdir(target.parent) == []


def test_no_daemon_and_no_file_is_exit_3(environ: dict[str, str], target: Path) -> None:
    ended = penstock(environ, "record", "-o", str(target))
    assert (ended.returncode, os.listdir(target.parent)) == (3, [])
    assert "hint: start it with" in ended.stderr


@pytest.mark.usefixtures("log")
def test_nothing_is_overwritten(environ: dict[str, str], target: Path) -> None:
    target.write_text("mine")
    ended = penstock(environ, "record", "-o", str(target), "--since", at(0))
    assert (ended.returncode, target.read_text()) == (2, "mine")
    assert "File exists" in ended.stderr
    ended = penstock(environ, "record", "-o", str(target.parent / "no" / "where"))
    assert ended.returncode == 5
    assert os.strerror(errno.ENOENT) in ended.stderr


@pytest.mark.parametrize("content", [b"", b"no recording", b"SQLite format 3\0" + b"\0" * 500])
def test_what_a_daemon_sends_is_looked_at_before_it_is_kept(
    daemon: FakeDaemon, environ: dict[str, str], target: Path, content: bytes
) -> None:
    daemon.script.replies = {f"{ASKED}?since=30m": (200, content)}
    ended = penstock(environ, "record", "-o", str(target))
    assert (ended.returncode, os.listdir(target.parent)) == (8, [])
    assert "not a recording" in ended.stderr


@pytest.mark.parametrize(("name", "code"), [("README.md", 8), ("no such file", 5), ("docs", 8)])
def test_what_is_no_recording_is_not_replayed(
    environ: dict[str, str], name: str, code: int
) -> None:
    ended = penstock(environ, "top", "--once", "--replay", str(ROOT / name))
    assert (ended.returncode, ended.stdout) == (code, "")
    assert ended.stderr.startswith(f"penstock: {ROOT / name}: ")
    assert "`penstock record -o FILE`" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_time_that_is_none_is_refused(environ: dict[str, str], tmp_path: Path) -> None:
    path = make_recording(tmp_path)
    ended = penstock(environ, "top", "--once", "--replay", str(path), "--at", "soon")
    assert ended.returncode == 2
    assert "--at: 'soon' is no time" in ended.stderr
