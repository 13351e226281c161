"""The reading verbs as people and scripts run them: golden output, JSON, exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from appliance.fleet.boot import lock_state_dir
from appliance.observe.log.query import SEVERITIES, USAGE_BY
from engine.scheduler.sequences.sequence import Phase
from tests.appliance.cli_data import ENDED, FRAME, REQUEST
from tests.appliance.cli_process import ROOT, command, penstock, run_on_terminal
from tests.worlds.fake_daemon import FakeDaemon


def test_a_terminal_gets_colour_unless_it_is_refused(
    daemon: FakeDaemon, environ: dict[str, str]
) -> None:
    daemon.script.replies = {"GET /v1/penstock/state": (200, FRAME)}
    environ["TERM"] = "xterm"
    assert b"\x1b[32mready\x1b[0m" in run_on_terminal(environ, "status")
    assert b"\x1b" not in run_on_terminal({**environ, "NO_COLOR": "1"}, "status")


def test_status_as_json_is_the_frame(daemon: FakeDaemon, environ: dict[str, str]) -> None:
    daemon.script.replies = {"GET /v1/penstock/state": (200, FRAME)}
    shown = json.loads(penstock(environ, "status", "-o", "json").stdout)
    assert shown == {"schema": "penstock.status/1", **FRAME}


def test_words_of_other_programs_are_taken(daemon: FakeDaemon, environ: dict[str, str]) -> None:
    daemon.script.replies = {"GET /v1/penstock/log?limit=20": (200, {"data": []})}
    assert penstock(environ, "logs").stdout == penstock(environ, "log").stdout
    daemon.script.replies["POST /v1/requests/cmpl-1/cancel"] = (200, {"status": "cancelled"})
    assert penstock(environ, "kill", "cmpl-1").stdout == "cancelled cmpl-1\n"


def test_ps_chooses_by_user_and_phase(daemon: FakeDaemon, environ: dict[str, str]) -> None:
    others = {**REQUEST, "id": "cmpl-2", "user": "bob", "phase": "queued"}
    listed = {"object": "list", "data": [REQUEST, others, ENDED]}
    daemon.script.replies = {"GET /v1/requests": (200, listed)}

    def shown(*arguments: str) -> list[str]:
        lines = penstock(environ, "ps", "-o", "ndjson", *arguments).stdout.splitlines()
        return [json.loads(line)["id"] for line in lines]

    assert shown() == ["cmpl-1", "cmpl-2"]
    assert shown("-a") == ["cmpl-1", "cmpl-2", "cmpl-0"]
    assert shown("-u", "bob") == ["cmpl-2"]
    assert shown("--state", "decoding") == ["cmpl-1"]
    assert shown("--state", "finished") == ["cmpl-0"]


def test_cancel_goes_on_after_an_unknown_id(daemon: FakeDaemon, environ: dict[str, str]) -> None:
    missing = {"error": {"message": "no live request", "code": "request_not_found"}}
    daemon.script.replies = {
        "POST /v1/requests/gone/cancel": (404, missing),
        "GET /v1/requests": (200, {"data": [REQUEST]}),
    }
    ended = penstock(environ, "cancel", "gone", "cmpl-1")
    assert ended.stdout == "cancelled cmpl-1\n"
    told, hint = ended.stderr.splitlines()
    assert told.startswith("penstock: gone: ")
    assert "`penstock ps -a`" in hint
    assert ended.returncode == 5


def test_a_full_disk_is_told_in_a_line(environ: dict[str, str]) -> None:
    for words in (["version"], ["--help"], ["status", "--help"]):
        with open("/dev/full", "wb") as full:
            ended = subprocess.run(
                command(*words), env=environ, stdout=full, stderr=subprocess.PIPE, check=False
            )
        said = b"penstock: cannot write: No space left on device\n"
        assert (ended.returncode, ended.stderr) == (1, said)


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("run", "--temp", "1", "hi"), ["--temperature"]),
        (("serve", "--models", "x"), ["--model"]),
        (("serve", "--kv-mem", "1GiB"), ["--kv-memory"]),
        (("serve", "--ctx-size", "4096"), []),
        (("status", "--json"), ["--output"]),
    ],
)
def test_a_wrong_option_suggests_what_it_begins_or_what_is_very_near(
    environ: dict[str, str], words: tuple[str, ...], meant: list[str]
) -> None:
    said = penstock(environ, *words).stderr
    assert re.findall(r"--[a-z-]+", said.partition("No such option: " + words[1])[2]) == meant


def test_a_recording_is_not_written_to_a_file_named_as_a_pipe(
    environ: dict[str, str], tmp_path: Path
) -> None:
    ended = penstock(environ, "record", "-o", "-", cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "to a pipe" in ended.stderr
    assert not (tmp_path / "-").exists()


def test_a_typo_in_the_config_file_stops_no_client(
    daemon: FakeDaemon, environ: dict[str, str], tmp_path: Path
) -> None:
    daemon.script.replies = {"GET /v1/penstock/state": (200, FRAME)}
    file = tmp_path / "penstock.toml"
    file.write_text(f'socket = "{environ.pop("PENSTOCK_SOCKET")}"\nkv_memmory = "2GiB"\n')
    environ["PENSTOCK_CONFIG"] = str(file)
    ended = penstock(environ, "status", "-o", "json")
    assert (ended.returncode, json.loads(ended.stdout)["model"]) == (0, FRAME["model"])
    warning = f"penstock: warning: {file}:2: unknown setting 'kv_memmory'\n"
    assert ended.stderr == f"{warning}hint: is kv_memory meant?\n"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("show", "\x01\udcff"), 5),
        (("cancel", "\udcff"), 5),
        (("log", "-u", "\udcff"), 0),
        (("show", ""), 2),
        (("cancel", " "), 2),
        (("status", "--host", "foo://x"), 2),
    ],
)
def test_whatever_is_typed_as_a_name_ends_as_documented(
    daemon: FakeDaemon, environ: dict[str, str], words: tuple[str, ...], code: int
) -> None:
    missing = (404, {"error": {"message": "no such request", "code": "request_not_found"}})
    daemon.script.replies = {
        "GET /v1/requests/%01%FF": missing,
        "POST /v1/requests/%FF/cancel": missing,
        "GET /v1/requests": (200, {"data": []}),
        "GET /v1/penstock/log?limit=1000": (200, {"data": []}),
        "GET /v1/penstock/log?limit=20&user=%FF": (200, {"data": []}),
    }
    ended = penstock(environ, *words)
    assert ended.returncode == code, ended.stderr
    assert "Traceback" not in ended.stderr
    assert ("hint: " in ended.stderr) == (code != 0)


def test_version_works_with_and_without_a_daemon(
    daemon: FakeDaemon, environ: dict[str, str]
) -> None:
    daemon.script.replies = {"GET /version": (200, {"version": "9.9.9"})}
    assert "(daemon 9.9.9)" in penstock(environ, "version").stdout
    environ["PENSTOCK_SOCKET"] = "/nonexistent"
    shown = json.loads(penstock(environ, "version", "-o", "json").stdout)
    assert shown["schema"] == "penstock.version/1"
    assert shown["daemon_version"] is None


@pytest.mark.parametrize("verb", [("status",), ("ps",), ("log",), ("run", "p"), ("cancel", "x")])
def test_no_daemon_is_exit_code_3_with_a_hint(
    environ: dict[str, str], verb: tuple[str, ...]
) -> None:
    ended = penstock(environ, *verb)
    assert (ended.returncode, ended.stdout) == (3, "")
    error, hint = ended.stderr.splitlines()
    where = f"{environ['PENSTOCK_STATE_DIR']}/requests.db" if verb == ("log",) else "unix://"
    assert error.startswith(f"penstock: {where}")
    assert hint.startswith("hint: ")


def test_usage_errors_are_exit_code_2(environ: dict[str, str]) -> None:
    assert penstock(environ, "dance").returncode == 2
    assert penstock(environ, "log", "-n", "0").returncode == 2


def test_help_and_version_are_where_people_look_for_them(environ: dict[str, str]) -> None:
    shown = penstock(environ, "--help").stdout
    assert {penstock(environ, word).stdout for word in ("-h", "help")} == {shown}
    assert penstock(environ, "help", "db", "prune").stdout == (
        penstock(environ, "db", "prune", "-h").stdout
    )
    version = penstock(environ, "version").stdout
    assert {penstock(environ, flag).stdout for flag in ("-V", "--version")} == {version}
    assert version.startswith("penstock ")


@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [
        (("ps", "--state", "foo"), Phase),
        (("events", "-p", "foo"), SEVERITIES),
        (("usage", "--by", "foo"), USAGE_BY),
    ],
)
def test_a_word_that_is_not_allowed_is_answered_with_those_that_are(
    environ: dict[str, str], arguments: tuple[str, ...], allowed: Iterable[str]
) -> None:
    ended = penstock(environ, *arguments)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.rstrip().endswith(", ".join(f"'{word}'" for word in allowed) + ".")
    assert arguments[1] in ended.stderr


def test_a_value_of_the_wrong_kind_is_refused_in_words(environ: dict[str, str]) -> None:
    for value, kind in (("--max-tokens", "whole number"), ("--temperature", "number")):
        ended = penstock(environ, "run", "x", value, "some")
        assert (ended.returncode, f"'some' is not a valid {kind}." in ended.stderr) == (2, True)


def test_a_wrong_configuration_is_exit_code_78(environ: dict[str, str]) -> None:
    ended = penstock(environ, "serve", "--transport", "shm", "--roles", "colocated")
    assert ended.returncode == 78
    assert "transport" in ended.stderr
    ended = penstock(environ, "serve", "--port", "99999")
    assert (ended.returncode, ended.stderr.startswith("penstock: --port: ")) == (78, True)
    ended = penstock(environ, "serve", "--kv-memory", "plenty")
    assert ended.returncode == 78
    assert ended.stderr.startswith("penstock: --kv-memory: 'plenty' ")
    assert "2GiB" in ended.stderr


def test_top_opens_the_console_with_the_socket_and_its_own_flags(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    console = tmp_path / "path" / "tui"
    console.mkdir(parents=True)
    (console / "__init__.py").touch()
    (console / "__main__.py").write_text("import sys; print(sys.argv[1:])")
    environ["PYTHONPATH"] = f"{tmp_path / 'path'}:{ROOT}"
    ended = penstock(environ, "top", "--ascii", "--socket", "/s.sock")
    assert ended.stdout == "['--socket', '/s.sock', '--ascii']\n"
    every = ("--once", "--json", "--plain", "--read-only", "--ascii")
    ended = penstock(environ, "top", *every, "--socket", "/s.sock")
    assert ended.stdout == f"{['--socket', '/s.sock', *every]}\n"


def test_help_has_the_first_sentence_of_each_verb_whole(environ: dict[str, str]) -> None:
    for arguments in ((), ("bench",), ("models",)):
        shown = penstock(environ, *arguments, "--help").stdout
        listed = shown.partition("exit.\n")[2]
        assert listed
        assert "..." not in listed
    words = " ".join(penstock(environ, "--help").stdout.split())
    assert "SIGTERM" in words


def test_a_second_daemon_is_told_so_after_what_was_asked_is_checked(
    environ: dict[str, str], tmp_path: Path
) -> None:
    state, socket = tmp_path / "state", tmp_path / "first.sock"
    state.mkdir(exist_ok=True)
    fd = lock_state_dir(state, socket)
    try:
        asked = ("serve", "--state-dir", str(state), "--socket", str(tmp_path / "second.sock"))
        second = penstock(environ, *asked)
        wrong = penstock(environ, *asked, "--model", str(tmp_path / "none"))
        checked = penstock(environ, *asked, "--check-config")
    finally:
        os.close(fd)
    assert (second.returncode, wrong.returncode, checked.returncode) == (9, 78, 0)
    assert f"pid {os.getpid()}, on {socket}" in second.stderr
    assert "penstock status shows it" in second.stderr
    assert "none" in wrong.stderr


def test_a_daemon_whose_socket_is_taken_says_so_before_it_times_anything(
    daemon: FakeDaemon, environ: dict[str, str]
) -> None:
    second = penstock(environ, "serve")
    assert (second.returncode, daemon.script.asked) == (9, [])
    assert "another daemon" in second.stderr


def test_ps_of_nothing_says_so_beside_its_heading(
    daemon: FakeDaemon, environ: dict[str, str]
) -> None:
    daemon.script.replies = {"GET /v1/requests": (200, {"object": "list", "data": []})}
    ended = penstock(environ, "ps")
    assert ended.stdout.split()[:2] == ["ID", "PHASE"]
    assert " -a " in ended.stderr
    assert penstock(environ, "ps", "-o", "ndjson").stderr == ""


def test_the_host_may_stand_before_the_verb(daemon: FakeDaemon, environ: dict[str, str]) -> None:
    daemon.script.replies = {"GET /v1/requests": (200, {"data": []})}
    path = environ.pop("PENSTOCK_SOCKET")
    for words in (("--host", path, "ps"), (f"--host={path}", "ps", "-a"), ("-H", path, "ps")):
        assert penstock(environ, *words).returncode == 0
    assert len(daemon.script.asked) == 3
    assert penstock(environ, "--host").returncode == 2
    assert penstock(environ, "--host", path).returncode == 2
