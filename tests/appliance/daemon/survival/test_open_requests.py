"""Requests that a killed daemon leaves without a row get one from the next."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec
import pytest

from appliance.daemon.requests.row import LogRow
from appliance.daemon.survival import open_requests
from appliance.daemon.survival.open_requests import CUT, OpenRequests
from appliance.observe.frame.logged_requests import ended_frame
from appliance.observe.frame.request_facts import request_facts
from appliance.observe.log.query import RowQuery
from tests.appliance.logs import query, request, rids, row, run_python, start


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "requests.db"


def test_requests_cut_by_a_kill_get_one_row_each_and_are_told(path: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path\n"
        "from tests.appliance.logs import row, start\n"
        "log = start(Path(sys.argv[1]))\n"
        "[log.opened(row(f'cmpl-{i}', finish_reason=None)) for i in range(4)]\n"
        "log.record(row('cmpl-1')); assert log.flush(10)\n"
        "log.opened(row('cmpl-4', stream=False, finish_reason=None))\n"
        "log.record(row('cmpl-2'))  # its row is not in the file yet\n"
        "os.kill(os.getpid(), 9)\n"
    )
    assert run_python(script, path).returncode == -9
    log = start(path)
    assert log.crash is not None
    assert "killed or crashed" in log.crash.about
    assert "; 3 requests" in log.crash.about
    found = {one["id"]: one for one in log.rows(RowQuery())}
    assert sorted(found) == [f"cmpl-{i}" for i in range(5)]
    assert found["cmpl-1"]["finish_reason"] == found["cmpl-2"]["finish_reason"] == "length"
    assert found["cmpl-2"]["error"] is None  # it had been answered
    for rid in ("cmpl-0", "cmpl-3", "cmpl-4"):
        assert (found[rid]["finish_reason"], found[rid]["error"]) == ("error", CUT)
        assert found[rid]["completion_tokens"] is None  # nobody knows what its client got
        assert request_facts(msgspec.to_builtins(ended_frame(found[rid])))["out"] == "- of 10 tok"
    assert found["cmpl-0"]["http_status"] == 200  # the head of its stream was out
    assert found["cmpl-4"]["http_status"] == 500
    log.end_run("clean")
    assert log.close()
    assert start(path).crash is None
    assert query(path, "SELECT run_id, count(*) FROM requests GROUP BY run_id") == [(1, 5)]
    assert query(path, "SELECT stop_reason, stopped_at >= started_at FROM runs WHERE run_id = 1")[
        0
    ] == ("crash", 1)


def test_a_daemon_was_heard_of_at_its_newest_request_at_least(path: Path) -> None:
    log, late = start(path), "2999-01-01T00:00:00.000Z"
    log.opened(row("cmpl-0", received_at=late, finish_reason=None))
    again = start(path)
    assert again.crash is not None
    assert f"last heard of at {late}; 1 request" in again.crash.about
    assert query(path, "SELECT stopped_at FROM runs WHERE run_id = 1") == [(late,)]


def test_no_prompt_is_in_the_file_and_nobody_else_reads_it(path: Path) -> None:
    log = start(path)
    asked = LogRow.from_request(request("cmpl-1", text="a secret"), with_text=True)
    log.opened(msgspec.structs.replace(asked, prompt=None))
    log.record(asked)
    left = OpenRequests(path)
    assert [one.rid for one in left.answered] == ["cmpl-1"]
    assert b"secret" not in left.path.read_bytes()
    assert left.path.stat().st_mode & 0o777 == 0o600
    log.close()


def test_a_daemon_that_stops_leaves_no_file(path: Path) -> None:
    log = start(path)
    log.opened(row("cmpl-1"))
    log.record(row("cmpl-1"))
    assert log.close()
    assert [each.name for each in path.parent.iterdir() if "open" in each.name] == []


def test_the_file_stays_small_and_holds_what_is_open(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_requests, "MIN_REWRITE_BYTES", 4096)
    path.parent.mkdir()
    mine = OpenRequests(path)
    mine.begin()
    mine.add(row("forever"))
    for number in range(200):
        mine.add(row(f"cmpl-{number}"))
        mine.drop_recorded([f"cmpl-{number}"])
        assert mine.path.stat().st_size < 3 * 4096
    mine.add(row("last"))
    found = [one.rid for one in OpenRequests(path).answered]
    assert {"forever", "last"} <= set(found)
    mine.drop_recorded(["forever", "last"])
    assert mine.path.stat().st_size == 0


def test_a_request_that_is_continued_stays_open_until_it_has_its_row(path: Path) -> None:
    path.parent.mkdir()
    dead = OpenRequests(path)
    dead.begin()
    for rid in ("continued", "cut"):
        dead.add(row(rid, finish_reason=None))
    dead.add(row("answered"))
    mine = OpenRequests(path)
    rows = mine.leave(["continued", "answered", "unknown"])
    assert {rid: each.error for rid, each in rows.items()} == {"continued": CUT}
    assert [one.rid for one in mine.cut] == ["cut"]
    mine.begin()
    again = OpenRequests(path)  # of the daemon after this one, if it dies, too
    assert [one.rid for one in again.cut] == ["continued"]
    mine.end(row("continued"))
    assert [one.rid for one in OpenRequests(path).answered] == ["continued"]
    mine.drop_recorded(["continued"])
    assert mine.path.stat().st_size == 0


def test_open_requests_are_written_again_with_a_log_whose_folder_was_emptied(path: Path) -> None:
    log = start(path)
    log.opened(row("cmpl-1", finish_reason=None))
    shutil.rmtree(path.parent)
    log.record(row("cmpl-2"))
    assert log.flush(60)
    assert [one.rid for one in OpenRequests(path).cut] == ["cmpl-1"]
    assert log.close()


def test_a_pipe_in_the_files_place_is_not_waited_for(path: Path) -> None:
    path.parent.mkdir()
    os.mkfifo(path.with_suffix(".open"))
    mine = OpenRequests(path)
    assert (mine.answered, mine.cut) == ([], [])
    mine.begin()
    mine.add(row("cmpl-1"))
    assert [one.rid for one in OpenRequests(path).answered] == ["cmpl-1"]


def test_a_torn_line_and_another_versions_cost_only_themselves(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.parent.mkdir()
    good = msgspec.json.encode(row("cmpl-1"))
    strange = msgspec.json.encode({"rid": "cmpl-0", "shape": "another"})
    flipped = good.replace(b"cmpl-1", b"cmpl-\xb1")
    lines = [good[:40], strange, good, flipped, good[:-9]]
    path.with_suffix(".open").write_bytes(b"\n".join(lines))
    log = start(path)
    assert log.flush(60)
    assert rids(log.rows(RowQuery())) == ["cmpl-1"]  # of the new log's run, as there is no other
    (told,) = [one.args for one in caplog.records if one.levelname == "WARNING"]
    assert told[1:3] == (1, 4)  # the first line, and how many
    log.close()


@pytest.mark.parametrize("num_fitting", [0, 40])
@pytest.mark.parametrize("ends_by", ["a request", "a commit"])
def test_what_a_full_disk_refused_is_written_when_it_has_room(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    num_fitting: int,
    ends_by: str,
) -> None:
    path.parent.mkdir()
    mine, write = OpenRequests(path), os.write
    mine.begin()
    mine.add(row("cmpl-0"))
    with monkeypatch.context() as full:

        def refuse(fd: int, data: bytes) -> int:
            if not num_fitting:
                raise OSError(28, os.strerror(28))
            return write(fd, data[:num_fitting])

        full.setattr(os, "write", refuse)
        mine.add(row("cmpl-1"))
        mine.add(row("cmpl-2"))
        assert "cmpl-0" in [one.rid for one in OpenRequests(path).answered]
    assert caplog.text.count("No space left") == 1
    mine.drop_recorded(["cmpl-0"]) if ends_by == "a commit" else mine.end(row("cmpl-0"))
    left = [one.rid for one in OpenRequests(path).answered]
    assert left[-2:] == ["cmpl-1", "cmpl-2"]
    assert ("cmpl-0" in left) is (ends_by == "a request")


def test_half_a_line_on_a_full_disk_costs_no_line_after_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.parent.mkdir()
    mine, write = OpenRequests(path), os.write
    mine.begin()
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda fd, data: write(fd, data[:40]))
        mine.add(row("cmpl-1"))
    with monkeypatch.context() as full:  # there is room for a line, and none for a second file

        def refuse(*_: object) -> int:
            raise OSError(28, os.strerror(28))

        full.setattr(os, "replace", refuse)
        mine.add(row("cmpl-2"))
    assert [one.rid for one in OpenRequests(path).answered] == ["cmpl-2"]


def test_a_daemon_that_starts_on_a_full_disk_notes_requests_when_it_has_room(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.parent.mkdir()
    mine = OpenRequests(path)
    with monkeypatch.context() as full:

        def refuse(*_: object) -> int:
            raise OSError(28, os.strerror(28))

        full.setattr(os, "open", refuse)
        mine.begin()
        mine.add(row("cmpl-1"))
    mine.add(row("cmpl-2"))
    assert [one.rid for one in OpenRequests(path).answered] == ["cmpl-1", "cmpl-2"]
