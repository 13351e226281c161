"""The file of the request log: private, migrated, and followed when it moves."""

from __future__ import annotations

import gzip
import json
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from sqlite_utils import Database

from appliance.daemon.survival.open_requests import OpenRequests
from appliance.observe.log import writer
from appliance.observe.log.log_file import damaged_logs, open_log, remove_backups, set_aside
from appliance.observe.log.query import RowQuery
from appliance.observe.log.reader import DamagedLog, read_row, read_rows
from appliance.observe.log.retention import RetentionLimits
from appliance.observe.log.writer import RequestLog
from engine.errors import ConfigError, PenstockError
from migrations.request_log import migration
from tests.appliance.logs import query, rids, row, start, write
from tests.waiting import wait_until

FIXTURES = Path(__file__).parents[3] / "fixtures"
SCHEMA = FIXTURES / "request-log-schema.json"
GARBAGE = "not a database, and long enough to be read as a header " * 40


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "requests.db"


def test_the_file_and_those_beside_it_are_private_to_owner_and_group(path: Path) -> None:
    log = start(path)
    log.record(row("cmpl-1"))
    assert log.flush(10)
    modes = {found.name: found.stat().st_mode & 0o777 for found in path.parent.iterdir()}
    assert modes.pop("requests.open") == 0o600
    assert modes == dict.fromkeys(("requests.db", "requests.db-wal", "requests.db-shm"), 0o640)
    assert log.close()
    assert query(path, "PRAGMA auto_vacuum") == [(2,)]
    assert query(path, "PRAGMA journal_mode") == [("wal",)]


def test_a_new_log_has_the_schema_that_all_steps_together_once_made(path: Path) -> None:
    open_log(path).close()
    made = query(path, "SELECT type, name, tbl_name, sql FROM sqlite_master")
    assert sorted(made, key=str) == [tuple(each) for each in json.loads(SCHEMA.read_text())]


def before_clients(path: Path) -> None:
    """Write a log with one row as the fourteenth step left it."""
    path.parent.mkdir()
    with closing(sqlite3.connect(path)) as db:
        migration.apply(Database(db, execute_plugins=False), stop_before="m015_clients")
        with db:
            db.execute(
                "INSERT INTO runs (run_id, started_at, version, model, dtype, roles)"
                " VALUES (1, '', '', '', '', '')"
            )
            db.execute(
                "INSERT INTO requests (rid, run_id, received_at, endpoint, model, peer_uid,"
                " stream, num_sequences, prompt_tokens, http_status, recoveries)"
                " VALUES ('a', 1, '2026-01-01T00:00:00.000Z', '', 'm', 8, 0, 1, 1, 200, 0)"
            )


def test_a_log_of_the_fourteenth_step_is_copied_and_brought_up_with_its_rows(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "penstock.request_log")
    before_clients(path)
    open_log(path).close()
    (found,) = read_rows(path, RowQuery())
    assert (found["id"], found["user"], found["client"]) == ("a", "uid:8", None)
    backup = path.with_name("requests.db.before-m015_clients")
    assert backup.stat().st_mode & 0o777 == 0o640
    assert query(backup, "SELECT rid, user FROM v_requests") == [("a", "uid:8")]
    assert backup.name in caplog.text


def test_a_log_from_before_the_fourteenth_step_is_kept_beside_a_new_one(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "penstock.request_log")
    for name in ("requests-before-0.2.db", "requests-before-0.2-2.db"):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(gzip.decompress((FIXTURES / "v0.1" / "requests.db.gz").read_bytes()))
        open_log(path).close()
        assert read_rows(path, RowQuery()) == []
        kept = path.with_name(name)
        assert query(kept, "SELECT count(*) FROM requests") == [(2,)]
        remove_backups(path, time.time() + 60)
        assert kept.exists()
        assert caplog.text.count(name) == 1


def test_a_new_log_names_every_step_of_before_0_2_which_then_calls_it_newer(path: Path) -> None:
    open_log(path).close()
    steps = "SELECT name FROM _sqlite_migrations"
    named = {name for (name,) in query(path, steps)}
    old = path.with_name("old.db")
    old.write_bytes(gzip.decompress((FIXTURES / "v0.1" / "requests.db.gz").read_bytes()))
    assert {name for (name,) in query(old, steps)} <= named
    assert {name[:4] for name in named} >= {f"m{number:03}" for number in range(1, 15)}


@pytest.mark.parametrize("kind", ["before-m002_users", "damaged-1", "damaged-1-wal"])
def test_backups_go_when_what_they_hold_is_to_be_forgotten(path: Path, kind: str) -> None:
    write(path, row("cmpl-1"))
    backup = path.with_name(f"requests.db.{kind}")
    backup.write_bytes(b"")
    now_s = time.time()
    remove_backups(path, now_s - 60)
    assert backup.exists()
    os.utime(backup, (now_s - 120, now_s - 120))
    remove_backups(path, now_s - 60)
    assert not backup.exists()
    assert path.exists()


def test_a_log_deleted_under_the_daemon_is_made_again(path: Path) -> None:
    log = start(path)
    log.record(row("cmpl-1"))
    assert log.flush(10)
    path.unlink()
    with pytest.raises(PenstockError, match="cannot read"):
        log.rows(RowQuery())
    log.record(row("cmpl-2"))
    assert log.flush(10)
    assert log.close()
    assert rids(read_rows(path, RowQuery())) == ["cmpl-2"]
    assert query(path, "SELECT severity, code FROM events") == [("warning", "log.replaced")]
    assert query(path, "SELECT version, model FROM runs") == [("1", "tiny")]
    assert query(path, "PRAGMA integrity_check") == [("ok",)]


def test_a_log_replaced_under_the_daemon_takes_the_new_rows_and_the_old_stays_whole(
    path: Path,
) -> None:
    spare, moved = path.with_name("spare.db"), path.with_name("moved.db")
    write(spare, *(row(f"spare-{number}") for number in range(200)))
    log = start(path)
    log.record(row("cmpl-1"))
    assert log.flush(10)
    path.rename(moved)
    spare.rename(path)
    log.record(row("cmpl-2"))
    assert log.flush(10)
    assert log.close()
    assert rids(read_rows(moved, RowQuery())) == ["cmpl-1"]
    assert {"cmpl-2", "spare-0"} < set(rids(read_rows(path, RowQuery(limit=300))))
    for one in (path, moved):
        assert query(one, "PRAGMA integrity_check") == [("ok",)]


def test_a_log_that_is_damaged_under_the_daemon_is_kept_and_a_new_one_goes_on(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "RETRY_INTERVAL_S", 0.05)
    log = start(path)
    path.unlink()
    path.write_text(GARBAGE)
    log.record(row("cmpl-1"))
    assert log.flush(60)
    assert log.rows_lost == 0
    assert rids(log.rows(RowQuery())) == ["cmpl-1"]
    assert log.close()
    (kept,) = damaged_logs(path)
    assert kept.read_text() == GARBAGE
    assert [event.code for event in log.said] == ["log.damaged"]
    assert query(path, "SELECT code FROM events") == [("log.damaged",)]


def test_a_damaged_log_that_its_folder_holds_fast_is_set_aside_once_the_folder_lets_it_go(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refusals = iter([PermissionError(1, "no"), PermissionError(1, "no")])

    def refuse_twice(log_path: Path) -> Path:
        if (error := next(refusals, None)) is not None:
            raise error
        return set_aside(log_path)

    monkeypatch.setattr(writer, "RETRY_INTERVAL_S", 0.05)
    monkeypatch.setattr(writer, "set_aside", refuse_twice)
    log = start(path)
    path.unlink()
    path.write_text(GARBAGE)
    log.record(row("cmpl-1"))
    assert log.flush(60)
    assert rids(log.rows(RowQuery())) == ["cmpl-1"]
    assert caplog.text.count("cannot be moved away") == 1
    assert log.close()


@pytest.mark.parametrize("is_running", [True, False])
def test_a_log_whose_schema_is_no_text_any_more_is_kept_and_a_new_one_goes_on(
    path: Path, monkeypatch: pytest.MonkeyPatch, is_running: bool
) -> None:
    monkeypatch.setattr(writer, "RETRY_INTERVAL_S", 0.05)
    write(path, row("old"))
    garbled = path.read_bytes().replace(b"CREATE TABLE", b"CREATE \xcfABLE")
    log = None
    if is_running:
        log = start(path)
        path.unlink()
    path.write_bytes(garbled)
    log = log or start(path)
    log.record(row("cmpl-1"))
    assert log.flush(60)
    assert rids(log.rows(RowQuery())) == ["cmpl-1"]
    assert [event.code for event in log.said] == ["log.damaged"]
    assert log.close()
    (kept,) = damaged_logs(path)
    assert kept.read_bytes() == garbled


@pytest.mark.parametrize("where", ["the header", "_sqlite_migrations", "runs", "requests"])
def test_a_log_found_damaged_at_start_is_kept_a_new_one_goes_on_and_that_is_said(
    path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(writer, "RETRY_INTERVAL_S", 0.05)
    write(path, *(row(f"old-{number}") for number in range(20)))
    root = 1
    if where != "the header":
        ((root,),) = query(path, f"SELECT rootpage FROM sqlite_master WHERE name = '{where}'")
    with path.open("r+b") as file:
        file.seek((root - 1) * 4096)
        file.write(b"\xa5" * 4096)
    with closing(OpenRequests(path)) as left:  # by a daemon that was killed
        left.begin()
        left.add(row("cut", finish_reason=None))
        left_behind = left.path.read_bytes()
    path.with_name("requests.open").write_bytes(left_behind)
    log = start(path)
    log.record(row("cmpl-1"))
    assert log.flush(60)
    assert set(rids(log.rows(RowQuery()))) == {"cut", "cmpl-1"}
    (event,) = log.said
    (kept,) = damaged_logs(path)
    assert (event.severity, event.code) == ("error", "log.damaged")
    assert kept.name in event.message
    assert b"old-7" in kept.read_bytes()
    assert log.close()
    assert start(path).close()  # the new one is sound
    assert damaged_logs(path) == [kept]


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (b"stopped_at  TEXT", b"stopxed_at  TEXT"),
        (b"m015_clients", b"m015_climnts"),
        (b"CREATE TABLE runs", b"CREATE TABLE ruos"),
        (b"CREATE VIEW v_requests", b"CREATE VIEW v_reqqests"),
    ],
)
def test_a_log_whose_schema_a_flipped_bit_has_changed_is_set_aside_at_start(
    path: Path, right: bytes, wrong: bytes
) -> None:
    write(path, row("old"))
    data = path.read_bytes()
    assert right in data
    path.write_bytes(data.replace(right, wrong))
    log = start(path)
    log.record(row("new"))
    assert log.flush(60)
    assert rids(log.rows(RowQuery())) == ["new"]
    assert [event.code for event in log.said] == ["log.damaged"]
    assert len(damaged_logs(path)) == 1
    assert log.close()


def test_a_log_whose_schema_changes_under_the_daemon_is_set_aside(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "RETRY_INTERVAL_S", 0.05)
    log = start(path)
    log.record(row("old"))
    assert log.flush(60)
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("ALTER TABLE requests RENAME COLUMN temperature TO temperaturf")
    log.record(row("new"))
    assert log.flush(60)
    assert rids(log.rows(RowQuery())) == ["new"]
    assert len(damaged_logs(path)) == 1
    assert log.close()


@contextmanager
def unreadable(path: Path, table: str) -> Iterator[None]:
    """Let SQLite find a table's first page damaged, as on a disk that does not read."""
    ((root,),) = query(path, f"SELECT rootpage FROM sqlite_master WHERE name = '{table}'")
    with path.open("r+b", buffering=0) as file:
        file.seek((root - 1) * 4096)
        page = file.read(4096)
        os.pwrite(file.fileno(), b"\xa5" * 4096, (root - 1) * 4096)
        yield
        os.pwrite(file.fileno(), page, (root - 1) * 4096)


def test_a_log_that_cannot_be_read_for_a_while_stays_in_its_place(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "RETRY_INTERVAL_S", 0.05)
    monkeypatch.setattr(writer, "DAMAGED_WRITES", 10_000, raising=False)
    write(path, row("old"))
    with unreadable(path, "requests"):
        log = start(path)
        log.record(row("new"))
        wait_until(lambda: log.unwritten is not None)
    assert log.flush(60)
    assert damaged_logs(path) == []
    assert rids(log.rows(RowQuery())) == ["new", "old"]
    assert log.close()


def test_a_start_on_a_disk_that_cannot_be_read_goes_on_and_writes_once_it_can(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "RETRY_INTERVAL_S", 0.05)
    write(path, row("old"))
    connect = sqlite3.connect

    def refuse(database: Any, **options: Any) -> sqlite3.Connection:
        if database != path:
            return connect(database, **options)
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = sqlite3.SQLITE_IOERR_READ
        raise error

    with monkeypatch.context() as failing:
        failing.setattr(sqlite3, "connect", refuse)
        log = start(path)
        log.record(row("new"))
        assert log.unwritten is not None
    assert log.flush(60)
    assert damaged_logs(path) == []
    assert rids(log.rows(RowQuery())) == ["new", "old"]
    assert log.close()


def test_a_log_that_cannot_be_read_when_it_is_pruned_stays_in_its_place(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(path, row("old", received_at="2026-01-01T12:00:00.000Z"))
    with unreadable(path, "requests"):
        log = start(path, RetentionLimits(keep_days=30))
        wait_until(lambda: "not pruned" in caplog.text)
    log.record(row("new"))
    assert log.flush(60)
    assert damaged_logs(path) == []
    assert rids(log.rows(RowQuery())) == ["new", "old"]
    assert log.close()


def test_damaged_logs_are_numbered_and_take_their_write_ahead_log_along(path: Path) -> None:
    path.parent.mkdir()
    for number in range(1, 12):
        path.write_text(f"{number}")
        path.with_name("requests.db-wal").write_text(f"wal {number}")
        assert set_aside(path).name == f"requests.db.damaged-{number}"
    assert [kept.read_text() for kept in damaged_logs(path)] == [f"{n}" for n in range(1, 12)]
    assert path.with_name("requests.db.damaged-11-wal").read_text() == "wal 11"
    assert not path.with_name("requests.db-wal").exists()


def test_a_newer_schema_is_refused_and_left_alone(path: Path) -> None:
    assert start(path).close()
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(
            "INSERT INTO _sqlite_migrations (migration_set, name, applied_at)"
            " VALUES ('request_log', 'm999_from_the_future', '')"
        )
    with pytest.raises(ConfigError, match="m999") as caught:
        RequestLog(path)
    assert str(path) in str(caught.value)
    assert caught.value.exit_code == 78


def test_a_file_that_is_something_else_is_a_clear_error(path: Path) -> None:
    path.parent.mkdir()
    path.write_text(GARBAGE)
    with pytest.raises(DamagedLog, match=r"requests\.db") as caught:
        read_rows(path, RowQuery())
    assert (caught.value.exit_code, ".dump" in caught.value.hint) == (8, True)
    with pytest.raises(PenstockError, match=r"missing\.db"):
        read_row(path.with_name("missing.db"), "cmpl-1")


@pytest.mark.parametrize("application_id", [0, 252006674])
@pytest.mark.parametrize("mode", ["wal", "delete"])
def test_another_programs_database_is_refused_and_stays_as_it_is(
    path: Path, application_id: int, mode: str
) -> None:
    path.parent.mkdir()
    with closing(sqlite3.connect(path)) as theirs:
        theirs.execute(f"PRAGMA journal_mode = {mode}")
        theirs.execute(f"PRAGMA application_id = {application_id}")
        theirs.execute("CREATE TABLE notes (text)")
        theirs.execute("INSERT INTO notes VALUES ('precious')")
        theirs.commit()
    before = path.read_bytes()
    with pytest.raises(ConfigError) as refused:
        open_log(path)
    assert (refused.value.where, refused.value.exit_code) == (str(path), 78)
    assert "--state-dir" in refused.value.hint
    assert path.read_bytes() == before
    assert {each.name for each in path.parent.iterdir()} <= {
        "requests.db",
        "requests.db-wal",
        "requests.db-shm",
    }


def test_a_log_of_ours_whose_id_is_damaged_is_still_ours(path: Path) -> None:
    open_log(path).close()
    with closing(sqlite3.connect(path)) as ours:
        ours.execute("PRAGMA application_id = 7")
    with closing(open_log(path)) as opened:
        assert opened.execute("PRAGMA application_id").fetchone() == (0x50454E53,)


@pytest.mark.parametrize("name", ["requests.db", "requests.open", "requests.open.new"])
def test_a_link_in_a_files_place_leads_nowhere(path: Path, name: str) -> None:
    path.parent.mkdir()
    victim = path.parent.parent / "victim"
    victim.write_text("precious")
    path.with_name(name).symlink_to(victim)
    if name == "requests.db":
        with pytest.raises(ConfigError):
            open_log(path)
    else:
        open_requests = OpenRequests(path)
        open_requests.begin()
        open_requests.add(row("cmpl-1"))
        open_requests.close()
    assert victim.read_text() == "precious"


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
def test_a_reader_without_write_permission_reads_a_stopped_log() -> None:
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        path = Path(folder, "requests.db")
        log = start(path)
        log.record(row("cmpl-1"))
        assert log.close()
        path.chmod(0o644)
        child = os.fork()
        if child == 0:
            os.setuid(65534)
            os._exit(len(read_rows(path, RowQuery())))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
