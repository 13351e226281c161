"""The log as a file: counted, copied and pruned, with a daemon writing or without."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from appliance.observe.log import store as log_store
from appliance.observe.log.query import RowQuery
from appliance.observe.log.reader import read_rows
from appliance.observe.log.retention import Pruned
from engine.errors import PenstockError
from tests.appliance.logs import query, rids, row, start, write

OLD, NEW = "2020-01-01T00:00:00.000Z", "2999-01-01T00:00:00.000Z"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "requests.db"
    rows = [row(f"old-{number}", received_at=OLD, prompt="secret") for number in range(3)]
    write(path, *rows, row("new", received_at=NEW))
    return path


def test_stats_count_bytes_and_rows_and_name_the_span(path: Path) -> None:
    found = log_store.stats(path)
    assert found["rows"] == {
        "requests": 4,
        "events": 0,
        "request_text": 3,
        "runs": 1,
        "frames": 0,
        "refusals": 0,
    }
    assert (found["oldest"], found["newest"]) == (OLD, NEW)
    assert found["schema"] == "m015_clients"
    assert found["file_bytes"] == path.stat().st_size >= found["used_bytes"] > 0
    assert found["wal_bytes"] == 0


def test_stats_of_an_empty_log_report_no_span(tmp_path: Path) -> None:
    path = tmp_path / "requests.db"
    write(path)
    found = log_store.stats(path)
    assert (found["oldest"], found["newest"]) == (None, None)


def test_an_export_holds_what_a_running_daemon_has_written(path: Path) -> None:
    log = start(path)
    log.record(row("live"))
    assert log.flush(10)
    found = log_store.stats(path)
    assert found["wal_bytes"]
    assert found["used_bytes"] <= found["disk_bytes"] == found["file_bytes"] + found["wal_bytes"]
    target = path.with_name("copy.db")
    log_store.export(path, target)
    assert log.close()
    assert "live" in rids(read_rows(target, RowQuery()))
    assert target.stat().st_mode & 0o777 == 0o640
    assert query(target, "PRAGMA integrity_check") == [("ok",)]


def test_an_export_overwrites_nothing_and_leaves_nothing_half_done(path: Path) -> None:
    target = path.with_name("copy.db")
    target.write_text("mine")
    with pytest.raises(PenstockError, match=r"copy\.db") as caught:
        log_store.export(path, target)
    assert caught.value.hint
    assert target.read_text() == "mine"
    with pytest.raises(PenstockError):
        log_store.export(path, path)
    with pytest.raises(PenstockError):
        log_store.export(path, path.with_name("none") / "copy.db")
    with pytest.raises(PenstockError, match="missing"):
        log_store.export(path.with_name("missing.db"), path.with_name("other.db"))
    assert not path.with_name("other.db").exists()


def test_names_that_are_not_utf_8_are_names_like_others(path: Path) -> None:
    odd = path.with_name(os.fsdecode(b"odd \xff?#%.db"))
    log_store.export(path, odd)
    assert len(read_rows(odd, RowQuery())) == 4
    assert log_store.prune(odd, keep_days=30) == Pruned(3, 0)


def test_pruning_by_hand_forgets_and_says_how_much(path: Path) -> None:
    assert log_store.prune(path, keep_days=30, dry_run=True) == Pruned(3, 0)
    assert len(read_rows(path, RowQuery())) == 4
    assert log_store.prune(path, keep_days=30) == Pruned(3, 0)
    assert rids(read_rows(path, RowQuery())) == ["new"]
    assert query(path, "SELECT count(*) FROM request_text") == [(0,)]


def test_pruning_and_a_running_daemon_take_turns(path: Path) -> None:
    log = start(path)
    for number in range(200):
        log.record(row(f"live-{number}", received_at=NEW))
    assert log_store.prune(path, keep_days=30) == Pruned(3, 0)
    assert log.close()
    assert log.rows_lost == 0
    assert query(path, "SELECT count(*) FROM requests") == [(201,)]


def test_who_looks_at_the_log_of_its_own_process_leaves_it_the_locks(path: Path) -> None:
    log = start(path)
    assert len(read_rows(path, RowQuery())) == 4
    assert log_store.problem(path) is None
    assert log_store.prune(path, keep_days=100_000, dry_run=True) == Pruned(0, 0)
    assert log_store.prune(path, keep_days=100_000) == Pruned(0, 0)
    # the last one to close a file takes its write-ahead log away; this process has not closed it
    script = (
        "import sqlite3, sys; sqlite3.connect(sys.argv[1]).execute('VACUUM').connection.close()"
    )
    subprocess.run([sys.executable, "-c", script, str(path)], check=True)
    assert path.with_name(f"{path.name}-wal").exists()
    log.record(row("after"))
    assert log.close()
    assert query(path, "SELECT count(*) FROM requests") == [(5,)]


def test_a_log_that_another_program_holds_is_left_alone(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_store, "BUSY_TIMEOUT_MS", 1)
    with closing(sqlite3.connect(path)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(PenstockError, match="locked"):
            log_store.prune(path, keep_days=30)
    assert len(read_rows(path, RowQuery())) == 4
    with pytest.raises(PenstockError, match="missing"):
        log_store.prune(path.with_name("missing.db"), keep_days=30)


def test_a_file_that_is_no_log_is_a_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("CREATE TABLE requests (id)")
    with pytest.raises(PenstockError, match=r"other\.db"):
        log_store.stats(path)
    with pytest.raises(PenstockError, match=r"other\.db"):
        log_store.prune(path, keep_days=30)


def test_pruning_a_log_on_a_read_only_file_system_names_that_and_not_the_user(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _path: SimpleNamespace(f_flag=os.ST_RDONLY))
    with pytest.raises(PenstockError, match="Read-only") as refused:
        log_store.prune(path, keep_days=1)
    assert (refused.value.exit_code, "user" in refused.value.hint) == (4, False)
