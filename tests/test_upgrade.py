"""What earlier versions have left behind is opened by this one: settings, recordings, log, caches.

The files in fixtures/vX.Y were made by that version's own code, from 0.2 on by
`python -m tests.release.state`, and are not made anew.
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
from appliance.daemon.survival.journal import Journal
from appliance.fleet.profile_store import ProfileStore
from appliance.observe.frame.protocol import Frame
from appliance.observe.log.log_file import open_log
from appliance.observe.log.query import RowQuery
from appliance.observe.log.reader import read_rows
from engine.scheduler.offload.files import check_records, lock, make_private, survey
from engine.scheduler.offload.slab_files import Slabs
from tests.journals import BATCH, HEAD, REQUEST
from tui.replay import Replay

FIXTURES = Path(__file__).parent / "fixtures"
OLD = FIXTURES / "v0.1"
KEPT = FIXTURES / "v0.2"


def unpacked(name: str, folder: Path, version: Path = OLD) -> Path:
    path = folder / name
    path.write_bytes(gzip.decompress((version / f"{name}.gz").read_bytes()))
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


def test_the_log_of_0_2_has_its_rows(tmp_path):
    path = unpacked("requests.db", tmp_path, KEPT)
    open_log(path).close()
    rows = read_rows(path, RowQuery())
    assert len(rows) >= 2
    assert {(row["finish_reason"], row["completion_tokens"]) for row in rows} == {("length", 4)}


def test_a_recording_of_0_2_plays(tmp_path):
    replay = Replay(unpacked("recording.penstock", tmp_path, KEPT))
    frames = [view.frame for view in replay.views()]
    replay.close()
    assert replay.num_damaged == 0
    assert frames
    assert all(isinstance(frame, Frame) for frame in frames)


def test_the_profile_of_0_2_has_its_facts(tmp_path):
    unpacked("profile.db", tmp_path, KEPT)
    store = ProfileStore(tmp_path)
    assert {row.key.what for row in store.rows()} >= {"prompt_ms"}
    assert store.is_readable


def test_the_ssd_cache_of_0_2_has_its_blocks(tmp_path):
    make_private(tmp_path)
    os.close(lock(tmp_path))
    unpacked("slab-000000.kv", tmp_path, KEPT).chmod(0o600)
    ((path, found),) = survey(tmp_path)
    assert list(check_records(path, found)) == [True] * len(found.records)
    sizes = {record.num_bytes for _, record in found.records}
    slabs = Slabs(tmp_path, sizes.pop(), found.head.fingerprint, 64 << 20, 0, found.head.model)
    (opened,) = slabs.open()
    slabs.close()
    assert opened.records == found.records
    assert found.records


def test_the_journal_of_0_2_is_continued():
    fd = os.memfd_create("journal")
    os.write(fd, (KEPT / "journal").read_bytes())
    journal = Journal(fd)
    assert (journal.head, journal.request) == (HEAD, b"".join(REQUEST))
    assert journal.replayed(int) == "before it was admitted"
    assert list(journal.batches) == [BATCH]
    journal.close()
