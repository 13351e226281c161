"""log, events, usage and show, with a daemon and without; and the file itself by `penstock db`."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.appliance import logs
from tests.appliance.cli_data import ROW
from tests.appliance.cli_process import penstock, start, user_environ
from tests.worlds.fake_daemon import FakeDaemon


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The log of a daemon that is gone: ann's request, and a slow and failed one of bob's."""
    path = tmp_path / "state" / "requests.db"
    bob = {"peer_user": "bob", "received_at": "2026-02-03T00:00:00.000Z", "finish_reason": "error"}
    logs.write(path, logs.row("cmpl-7"), logs.row("cmpl-8", t_first_token_us=25_000_000, **bob))
    return path


def ids(shown: str) -> list[str]:
    return [json.loads(line)["id"] for line in shown.splitlines()]


def test_parameters_reach_the_daemon_as_they_are(
    daemon: FakeDaemon, environ: dict[str, str]
) -> None:
    arguments = ("-n", "5", "--since", "-1h", "-u", "ann & bob", "--errors", "--slow", "ttft>500")
    penstock(environ, "log", *arguments)
    penstock(environ, "events", "-p", "warning", "--until", "2026-01-31T12:00")
    penstock(environ, "usage", "--by", "day", "--since", "-7d")
    assert [line for line, _ in daemon.script.asked] == [
        "GET /v1/penstock/log?limit=5&since=-1h&user=ann+%26+bob&errors=true&slow=ttft%3E500",
        "GET /v1/penstock/events?limit=20&until=2026-01-31T12%3A00&severity=warning",
        "GET /v1/penstock/usage?by=day&since=-7d",
    ]


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ((), ["cmpl-7", "cmpl-8"]),
        (("-n", "1"), ["cmpl-8"]),
        (("-u", "ann"), ["cmpl-7"]),
        (("--errors",), ["cmpl-8"]),
        (("--slow", "ttft>500"), ["cmpl-8"]),
        (("--until", "2026-02-01"), ["cmpl-7"]),
    ],
)
def test_the_file_answers_the_same_questions(
    file: Path, environ: dict[str, str], arguments: tuple[str, ...], found: list[str]
) -> None:
    ended = penstock(environ, "log", "-o", "ndjson", *arguments)
    assert ids(ended.stdout) == found
    assert ended.returncode == 0
    assert f"reading {file}" in ended.stderr


def test_every_format_has_the_newest_last(file: Path, environ: dict[str, str]) -> None:
    document = json.loads(penstock(environ, "log", "-o", "json").stdout)
    assert [row["id"] for row in document["data"]] == ["cmpl-7", "cmpl-8"]
    assert ids(penstock(environ, "log", "-o", "ndjson").stdout) == ["cmpl-7", "cmpl-8"]


def test_a_question_that_the_file_refuses_is_a_usage_error(
    file: Path, environ: dict[str, str]
) -> None:
    ended = penstock(environ, "log", "--slow", "lunch>500")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "ttft" in ended.stderr


def test_usage_and_events_come_from_the_file_too(file: Path, environ: dict[str, str]) -> None:
    shown = json.loads(penstock(environ, "usage", "-o", "json").stdout)
    assert shown["schema"] == "penstock.usage/1"
    assert {row["user"] for row in shown["data"]} == {"ann", "bob"}
    assert penstock(environ, "events", "-o", "csv").stdout == "at,severity,code,actor,message\n"


def test_show_finds_a_request_in_the_file(file: Path, environ: dict[str, str]) -> None:
    ended = penstock(environ, "show", "cmpl-7")
    _, _, waterfall = ended.stdout.partition("\n\n")
    stages = dict(line.split()[:2] for line in waterfall.splitlines())
    assert stages.keys() >= {"tokenize", "queue", "prefill", "handoff"}
    assert "end to end" in ended.stdout
    missing = penstock(environ, "show", "cmpl-nobody")
    assert (missing.returncode, missing.stdout) == (5, "")


def test_another_machines_log_is_not_looked_for_here(file: Path, environ: dict[str, str]) -> None:
    ended = penstock(environ, "log", "--host", "http://127.0.0.1:1")
    assert (ended.returncode, ended.stdout) == (3, "")


def test_following_prints_the_old_and_then_each_new_row_once(
    daemon: FakeDaemon, environ: dict[str, str]
) -> None:
    newer = {**ROW, "id": "cmpl-9", "cursor": 9}
    daemon.script.replies = {
        "GET /v1/penstock/log?limit=20": (200, {"data": [ROW]}),
        "GET /v1/penstock/log?limit=1000&after=5": (200, {"data": [newer]}),
        "GET /v1/penstock/log?limit=1000&after=9": (200, {"data": []}),
    }
    running = start(environ, "log", "-f", "-o", "ndjson")
    assert running.stdout is not None
    lines = [json.loads(running.stdout.readline())["id"] for _ in range(2)]
    running.terminate()
    rest, notes = running.communicate(timeout=120)
    assert lines == ["cmpl-1", "cmpl-9"]
    assert (running.returncode, rest, notes) == (143, b"", b"")


def test_a_document_cannot_be_followed(daemon: FakeDaemon, environ: dict[str, str]) -> None:
    ended = penstock(environ, "log", "-f", "-o", "json")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "ndjson" in ended.stderr


def test_the_file_is_found_measured_copied_and_made_smaller(
    file: Path, environ: dict[str, str], tmp_path: Path
) -> None:
    assert penstock(environ, "db", "path").stdout == f"{file}\n"
    stats = json.loads(penstock(environ, "db", "stats", "-o", "json").stdout)
    assert (stats["schema"], stats["rows"]["requests"]) == ("penstock.db/1", 2)
    copy = tmp_path / "copy.db"
    assert penstock(environ, "db", "export", str(copy)).stdout == f"exported to {copy}\n"
    assert logs.query(copy, "SELECT count(*) FROM requests") == [(2,)]
    assert penstock(environ, "db", "export", str(copy)).returncode == 2
    forget = ("db", "prune", "--older-than", "1d")
    for words in (("--dry-run",), ()):
        assert logs.query(file, "SELECT count(*) FROM requests") == [(2,)]
        said = penstock(environ, *forget, *words).stdout
        assert re.findall(r"\d+ \w+", said) == ["2 requests", "0 events", "0 frames"]
    assert logs.query(file, "SELECT count(*) FROM requests") == [(0,)]


@pytest.mark.parametrize(
    "arguments", [(), ("--older-than", "soon"), ("--older-than", "٣d"), ("--max-size", "big")]
)
def test_pruning_wants_an_age_or_a_size(
    file: Path, environ: dict[str, str], arguments: tuple[str, ...]
) -> None:
    assert penstock(environ, "db", "prune", *arguments).returncode == 2
    assert logs.query(file, "SELECT count(*) FROM requests") == [(2,)]


def test_a_folder_whose_name_is_not_text_is_no_obstacle(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(bytes(tmp_path) + b"/s\xff"))
    logs.write(folder / "requests.db", logs.row("cmpl-7"))
    environ = {**user_environ(tmp_path), "PENSTOCK_STATE_DIR": str(folder)}
    assert ids(penstock(environ, "log", "-o", "ndjson").stdout) == ["cmpl-7"]
    for verb in (("db", "path"), ("db", "stats"), ("db", "stats", "-o", "csv")):
        ended = penstock(environ, *verb)
        assert (ended.returncode, ended.stderr) == (0, "")
    missing = penstock({**environ, "PENSTOCK_SOCKET": str(folder / "p.sock")}, "status")
    assert missing.returncode == 3
    assert "Traceback" not in missing.stderr


def test_another_daemons_file_is_not_taken_for_that_of_the_one_asked(
    file: Path, environ: dict[str, str]
) -> None:
    (file.parent / "lock").write_text("71 /elsewhere/p.sock\n")
    ended = penstock(environ, "log")
    assert (ended.returncode, ended.stdout) == (3, "")
    assert "/elsewhere/p.sock" in ended.stderr
    assert "--state-dir" in ended.stderr
    assert penstock(environ, "log", "--state-dir", str(file.parent)).returncode == 0
    (file.parent / "lock").write_text(f"71 {environ['PENSTOCK_SOCKET']}\n")
    assert penstock(environ, "log").returncode == 0


@pytest.mark.parametrize("arguments", [("log",), ("log", "-o", "csv"), ("usage",), ("events",)])
def test_rows_that_the_daemon_cannot_write_are_told_as_missing(
    daemon: FakeDaemon, environ: dict[str, str], arguments: tuple[str, ...]
) -> None:
    lacks: dict[str, Any] = {"reason": "cannot write the request log: disk full", "num_requests": 3}
    state = {"state": "ready", "unwritten": {**lacks, "folder": "/a b"}}
    for path in ("log?limit=20", "events?limit=20", "usage?by=user"):
        daemon.script.replies[f"GET /v1/penstock/{path}"] = (200, {"data": []})
    quiet = penstock(environ, *arguments)
    daemon.script.replies["GET /v1/penstock/state"] = (200, state)
    ended = penstock(environ, *arguments)
    assert (ended.returncode, ended.stdout) == (0, quiet.stdout)
    told = ended.stderr.removeprefix(quiet.stderr)
    assert len(told.splitlines()) == 2
    assert all(part in told for part in (lacks["reason"], "3 finished requests", "'/a b'"))


def test_lists_without_rows_say_so_to_people_alone(
    daemon: FakeDaemon, environ: dict[str, str]
) -> None:
    for verb in ("log", "events"):
        daemon.script.replies[f"GET /v1/penstock/{verb}?limit=20"] = (200, {"data": []})
        assert "nothing yet" in penstock(environ, verb).stderr
        assert penstock(environ, verb, "-o", "ndjson").stderr == ""
