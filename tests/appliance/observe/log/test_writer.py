"""One row per request, kept through crashes, full disks and upgrades."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlite_utils import Database

from appliance.daemon.requests.row import LogRow, RowEnergy
from appliance.daemon.survival.open_requests import OpenRequests
from appliance.observe.frame.latency import Stages, stages
from appliance.observe.log import store, writer
from appliance.observe.log.query import RowQuery
from appliance.observe.log.reader import read_rows
from appliance.observe.log.statements import insert_row
from appliance.observe.log.writer import RequestLog
from engine.scheduler.sequences.sequence import Stamps
from engine.wire.run_spec import RunSpec
from migrations.request_log import migration
from tests.appliance.logs import US, query, request, rids, row, run_python, sequence, start, write
from tests.waiting import wait_until

STAGES = Stages.__dataclass_fields__


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "requests.db"


def test_a_recorded_request_is_read_back_with_its_stages(path: Path) -> None:
    log = start(path)
    log.record(row("cmpl-1"))
    (found,) = log.rows(RowQuery())
    assert log.close()
    expected = {
        "id": "cmpl-1",
        "model": "tiny",
        "peer_user": "ann",
        "stream": True,
        "prompt_tokens": 3,
        "completion_tokens": 10,
        "finish_reason": "length",
        "transport": "shm",
        "handoff_bytes": 64,
        "handoff_blocks": 2,
        "tokenize_ms": 1.0,
        "queue_ms": 2.0,
        "prefill_ms": 7.0,
        "ttft_ms": 10.0,
        "handoff_ms": 1.0,
        "decode_wait_ms": 1.0,
        "decode_ms": 18.0,
        "first_itl_ms": 4.0,
        "tpot_ms": 2.0,
        "e2e_ms": 30.0,
    }
    assert {key: found[key] for key in expected} == expected
    assert json.loads(json.dumps(found)) == found


def test_a_row_is_completed_by_the_reading_that_comes_after_it(path: Path) -> None:
    log = start(path)
    log.record(row("cmpl-1", prefill_j=0.5))
    log.record(row("cmpl-2"))
    log.record(RowEnergy("cmpl-1", 1.5, 8.0))
    log.record(RowEnergy("forgotten", 1.0, 1.0))
    second, first = log.rows(RowQuery())
    assert log.rows_lost == 0
    assert log.close()
    assert (first["prefill_j"], first["decode_j"]) == (1.5, 8.0)
    assert (second["prefill_j"], second["decode_j"]) == (None, None)


OFFSETS_US = st.none() | st.integers(0, 5_000_000)


@given(
    st.tuples(*[OFFSETS_US] * 7),
    st.integers(0, 5_000_000),
    OFFSETS_US,
    st.integers(0, 40),
)
def test_the_view_cuts_stages_as_latency_does(
    offsets_us: tuple[int | None, ...], finished_us: int, paused_us: int | None, num_tokens: int
) -> None:
    one = sequence()
    at_ns = [None if offset is None else 7_000 + offset * US for offset in offsets_us]
    one.stamps = Stamps(7_000, *at_ns, finished_ns=7_000 + finished_us * US)
    one.stamps.paused_ns = None if paused_us is None else paused_us * US
    one.output_token_ids = [4] * num_tokens
    with closing(sqlite3.connect(":memory:")) as db:
        migration.apply(Database(db, execute_plugins=False))
        db.execute(
            "INSERT INTO runs (run_id, started_at, version, model, dtype, roles)"
            " VALUES (1, '', '', '', '', '')"
        )
        assert insert_row(db, 1, LogRow.from_request(request("cmpl-1", one)))
        db.row_factory = sqlite3.Row
        found = db.execute("SELECT * FROM v_requests").fetchone()
        expected = stages(one.stamps, num_tokens)
        for name in STAGES:
            assert found[name] == pytest.approx(getattr(expected, name)), name


def test_several_sequences_make_one_row_timed_by_the_last_to_finish() -> None:
    made = LogRow.from_request(
        request(
            "cmpl-1",
            sequence(0, finished_us=40_000, reason="stop"),
            sequence(1, finished_us=30_000, reason="abort"),
        )
    )
    assert (made.num_sequences, made.prompt_tokens, made.completion_tokens) == (2, 6, 20)
    assert (made.t_finished_us, made.finish_reason) == (40_000, "abort")
    assert (made.handoff_bytes, made.num_timed_tokens) == (128, 10)


def test_a_request_that_goes_on_from_another_says_with_which_output(path: Path) -> None:
    """Its seed alone does not tell what it drew."""
    asked = request("cmpl-1")
    (one,) = asked.sequences
    one.spec = RunSpec(msgspec.structs.replace(one.sampling, output_offset=2))
    log = start(path)
    log.record(LogRow.from_request(asked))
    log.record(row("cmpl-2"))
    assert log.close()
    kept = query(path, "SELECT rid, output_offset, seed FROM v_requests ORDER BY rid")
    assert kept == [("cmpl-1", 2, 5), ("cmpl-2", 0, 5)]


def test_prompt_text_is_kept_only_when_asked_for(path: Path) -> None:
    log = start(path)
    log.record(row("cmpl-1"))
    log.record(LogRow.from_request(request("cmpl-2", text="half \ud83d"), with_text=True))
    assert log.close()
    assert query(path, "SELECT request_id, prompt FROM request_text") == [(2, "half ?")]
    assert b"secret" not in path.read_bytes()


def test_what_the_client_calls_it_is_cut_to_size() -> None:
    asked = request()
    asked.client_request_id = "x" * 1_000
    assert LogRow.from_request(asked).client_rid == "x" * 128


def test_rows_are_found_by_id_and_newest_come_first(path: Path) -> None:
    log = start(path)
    for number in range(120):
        log.record(row(f"cmpl-{number}"))
    assert rids(log.rows(RowQuery(limit=2))) == ["cmpl-119", "cmpl-118"]
    assert log.row("cmpl-7")["id"] == "cmpl-7"
    assert log.row("cmpl-none") is None
    assert log.close()
    assert log.rows_lost == 0
    assert query(path, "SELECT count(*) FROM requests") == [(120,)]


def test_a_clean_end_is_told_from_a_crash(path: Path) -> None:
    log = start(path)
    log.event("info", "drain.started", "bye")
    log.end_run("clean")
    assert log.close()
    assert start(path).close()  # ends without end_run(), as a crash would
    assert start(path).close()
    reasons = query(path, "SELECT stop_reason, stopped_at IS NULL FROM runs ORDER BY run_id")
    assert reasons == [("clean", 0), ("crash", 0), (None, 1)]
    assert query(path, "SELECT run_id, code, message FROM events") == [(1, "drain.started", "bye")]


def test_closing_twice_or_before_a_run_is_harmless(path: Path) -> None:
    log = RequestLog(path)
    assert log.close()
    log = start(path)
    assert log.close()
    assert log.close()


def test_what_a_killed_daemon_committed_is_there(path: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path\n"
        "from tests.appliance.logs import row, start\n"
        "log = start(Path(sys.argv[1]))\n"
        "[log.record(row(f'cmpl-{i}')) for i in range(60)]\n"
        "assert log.flush(10)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    ended = run_python(script, path)
    assert ended.returncode == -9
    assert len(read_rows(path, RowQuery(limit=100))) == 60
    assert query(path, "PRAGMA integrity_check") == [("ok",)]


def test_a_full_disk_is_outlived_and_counted(path: Path) -> None:
    script = (
        "import resource, sys, time; from pathlib import Path\n"
        "from appliance.observe.log import writer\n"
        "from tests.appliance.logs import row, start\n"
        "writer.RETRY_INTERVAL_S = 0.05\n"
        "log = start(Path(sys.argv[1]))\n"
        "unlimited = resource.RLIM_INFINITY\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1, unlimited))\n"
        "log.record(row('cmpl-1'))\n"
        "while log.unwritten is None: time.sleep(0.01)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (unlimited, unlimited))\n"
        "assert log.flush(10) and log.close() and log.rows_lost == 0\n"
    )
    ended = run_python(script, path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("will keep trying") == 1
    assert rids(read_rows(path, RowQuery())) == ["cmpl-1"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of our own, of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("only root may mount a small disk")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_log_on_a_full_disk_tells_what_it_lacks_until_there_is_room(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "RETRY_INTERVAL_S", 0.05)
    path = small_disk / "requests.db"
    log = start(path)
    assert log.flush(60)
    assert log.unwritten is None
    filler = small_disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    for number in range(3):
        log.record(row(f"cmpl-{number}"))
    wait_until(lambda: log.unwritten is not None)
    lacks = log.unwritten
    assert lacks is not None
    assert "database or disk is full" in lacks.reason
    assert (lacks.folder, lacks.num_requests) == (str(small_disk), 3)
    assert lacks.would_crash_lose
    filler.unlink()
    assert log.flush(60)
    assert log.unwritten is None
    assert log.close()
    assert log.rows_lost == 0


@pytest.mark.parametrize("has_file", [True, False])
def test_a_start_on_a_full_disk_writes_all_once_there_is_room(path: Path, has_file: bool) -> None:
    """What a killed daemon left open, and what comes meanwhile."""
    if has_file:
        write(path, row("old"))
        with closing(sqlite3.connect(path)) as db:
            db.execute("UPDATE runs SET stopped_at = NULL, stop_reason = NULL")
            db.commit()
    path.parent.mkdir(exist_ok=True)
    with closing(OpenRequests(path)) as left:
        left.begin()
        left.add(row("cut", finish_reason=None))
        left_behind = left.path.read_bytes()
    path.with_name("requests.open").write_bytes(left_behind)
    script = (
        "import resource, sys, time; from pathlib import Path\n"
        "from appliance.observe.log import writer\n"
        "from tests.appliance.logs import row, start\n"
        "writer.RETRY_INTERVAL_S = 0.05\n"
        "unlimited = resource.RLIM_INFINITY\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1, unlimited))\n"
        "log = start(Path(sys.argv[1]))\n"
        "assert log.unwritten.num_requests == 0\n"
        "log.record(row('cmpl-1'))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (unlimited, unlimited))\n"
        "assert log.flush(10) and log.close() and log.rows_lost == 0\n"
    )
    ended = run_python(script, path)
    assert ended.returncode == 0, ended.stderr
    (told,) = [line for line in ended.stderr.splitlines() if "will keep trying" in line]
    assert told.count(str(path)) == 1
    before = {"old"} if has_file else set()
    assert set(rids(read_rows(path, RowQuery()))) == {"cut", "cmpl-1"} | before
    reasons = query(path, "SELECT stop_reason FROM runs ORDER BY run_id")
    assert [reason for (reason,) in reasons][:-1] == (["crash"] if has_file else [])
    assert not path.with_name("requests.open").exists()


@pytest.mark.parametrize("place", ["_store", "_take_batch", "_keep_up"])
def test_the_log_goes_on_when_there_is_memory_again(
    path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setattr(writer, "RETRY_INTERVAL_S", 0.01)
    log = start(path)
    assert log.flush(10)
    work, has_failed = getattr(log, place), threading.Event()

    def fail_once(*args: object) -> object:
        if not has_failed.is_set():
            has_failed.set()
            raise MemoryError
        return work(*args)

    monkeypatch.setattr(log, place, fail_once)
    log.record(row("cmpl-1"))
    log.record(row("cmpl-2"))
    assert log.flush(60)
    assert has_failed.wait(60)
    log.record(row("cmpl-3"))
    assert log.close()
    assert rids(read_rows(path, RowQuery())) == ["cmpl-3", "cmpl-2", "cmpl-1"]
    assert log.rows_lost == 0


def test_rows_that_cannot_be_written_in_the_end_are_counted(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "BUSY_TIMEOUT_MS", 1)
    log = start(path)
    with closing(sqlite3.connect(path)) as other:
        other.execute("BEGIN IMMEDIATE")
        log.record(row("cmpl-1"))
        assert not log.close()
    assert log.rows_lost == 1


def test_a_full_queue_drops_old_events_before_rows(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "MAX_QUEUED_ROWS", 3)
    log = RequestLog(path)  # its writer starts with the run, so the queue fills up
    for number in range(2):
        log.event("info", "test", f"event {number}")
    for number in range(4):
        log.record(row(f"cmpl-{number}"))
    assert log.rows_lost == 3
    log.start_run(version="1", model="m", dtype="d", roles="static", transport=None)
    assert rids(log.rows(RowQuery(limit=9))) == ["cmpl-3", "cmpl-2", "cmpl-1"]
    assert log.close()
    assert query(path, "SELECT count(*) FROM events") == [(0,)]


def test_a_row_the_schema_refuses_does_not_hold_up_the_next(path: Path) -> None:
    log = start(path)
    for rid in ("cmpl-1", "cmpl-1", "cmpl-2"):
        log.record(row(rid))
    assert rids(log.rows(RowQuery(limit=9))) == ["cmpl-2", "cmpl-1"]
    assert log.rows_lost == 1
    assert log.close()


def test_many_threads_may_record_at_once(path: Path) -> None:
    log = start(path)

    def record(group: int) -> None:
        for number in range(50):
            log.record(row(f"cmpl-{group}-{number}"))

    threads = [threading.Thread(target=record, args=(group,)) for group in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert log.close()
    assert query(path, "SELECT count(DISTINCT rid) FROM requests") == [(200,)]
