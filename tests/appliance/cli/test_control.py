"""The verbs that change something, and the process around every verb."""

from __future__ import annotations

import fcntl
import json
import re
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from appliance.configuration.paths import log_path
from appliance.observe.log.query import EventQuery
from appliance.observe.log.reader import read_events
from appliance.observe.log.statements import end_crashed_run
from tests.appliance.cli_data import ENDED, REQUEST
from tests.appliance.cli_process import ROOT, command, penstock
from tests.appliance.model_folder import make_model
from tests.worlds.fake_daemon import FakeDaemon


def test_cancel_takes_a_user_and_leaves_the_others(
    daemon: FakeDaemon, environ: dict[str, str]
) -> None:
    others = [{**REQUEST, "id": "cmpl-2", "user": "bob"}, {**ENDED, "user": "ann"}]
    daemon.script.replies = {"GET /v1/requests": (200, {"data": [REQUEST, *others]})}
    assert penstock(environ, "cancel", "--user", "ann").stdout == "cancelled cmpl-1\n"
    assert len(daemon.script.asked) == 2


def test_cancel_says_that_a_user_has_nothing_to_cancel(
    daemon: FakeDaemon, environ: dict[str, str]
) -> None:
    daemon.script.replies = {"GET /v1/requests": (200, {"data": [REQUEST, ENDED]})}
    ended = penstock(environ, "cancel", "--user", "nobody")
    assert (ended.returncode, ended.stdout) == (0, "")
    assert " nobody " in ended.stderr


@pytest.mark.parametrize("arguments", [(), ("cmpl-1", "--user", "ann")])
def test_cancel_wants_ids_or_a_user(environ: dict[str, str], arguments: tuple[str, ...]) -> None:
    assert penstock(environ, "cancel", *arguments).returncode == 2


def test_drain_and_resume_say_what_they_did(daemon: FakeDaemon, environ: dict[str, str]) -> None:
    daemon.script.replies = {
        "POST /v1/penstock/drain": (200, {"status": "draining"}),
        "POST /v1/penstock/resume": (200, {"status": "resumed"}),
        "GET /v1/penstock/state": (200, {"num_requests": 0}),
    }
    assert penstock(environ, "drain").stdout == "draining\n"
    assert penstock(environ, "drain", "--wait").stdout == "drained\n"
    assert penstock(environ, "resume").stdout == "serving\n"


@pytest.mark.parametrize(("wait", "num_live"), [(("--wait",), 3), ((), 1)])
def test_a_drain_that_takes_too_long_is_exit_code_124(
    daemon: FakeDaemon, environ: dict[str, str], wait: tuple[str, ...], num_live: int
) -> None:
    daemon.script.replies = {
        "POST /v1/penstock/drain": (200, {"status": "draining"}),
        "GET /v1/penstock/state": (200, {"num_requests": num_live}),
    }
    ended = penstock(environ, "drain", *wait, "--timeout", "0")
    assert (ended.returncode, ended.stdout) == (124, "")
    assert re.findall(r"\d+", ended.stderr) == [str(num_live), "0"]


def test_who_may_not_drain_is_told(daemon: FakeDaemon, environ: dict[str, str]) -> None:
    refusal = {"error": {"message": "operators may\x1b[2J", "code": "role_required"}}
    daemon.script.replies = {"POST /v1/penstock/drain": (403, refusal)}
    ended = penstock(environ, "drain")
    assert (ended.returncode, ended.stderr) == (4, "penstock: operators may\\x1b[2J\n")


def test_a_new_key_is_a_line_for_the_file_and_itself_only_on_stderr(
    environ: dict[str, str], tmp_path: Path
) -> None:
    from appliance.http.api_keys import find_key, key_digest, read_keys

    ended = penstock(environ, "keys", "new", "ann", "--role", "viewer")
    key = ended.stderr.split()[-1]
    assert key not in ended.stdout
    (tmp_path / "keys").write_text(ended.stdout)
    (tmp_path / "keys").chmod(0o600)
    found = find_key(read_keys(tmp_path / "keys"), key_digest(key))
    assert found is not None
    assert found.name == "ann"
    assert penstock(environ, "keys", "new", "a b").returncode == 2
    listed = penstock(environ, "keys", "list", "--file", str(tmp_path / "keys"), "-o", "ndjson")
    assert json.loads(listed.stdout) == {"name": "ann", "role": "viewer"}


def test_serve_takes_its_settings_from_a_file_that_is_named(
    environ: dict[str, str], tmp_path: Path
) -> None:
    settings = tmp_path / "p.toml"
    settings.write_text("\ndtype = 'int3'\n")
    ended = penstock(environ, "serve", "--config", str(settings))
    assert ended.returncode == 78
    assert f"{settings}:2: dtype" in ended.stderr
    ended = penstock(environ, "serve", "--listen", "0.0.0.0:80")
    assert ended.returncode == 78
    assert "listen: 0.0.0.0" in ended.stderr
    assert "--tls-cert" in ended.stderr


def test_serve_has_a_flag_for_every_setting_that_says_what_it_is(environ: dict[str, str]) -> None:
    from appliance.configuration.settings import SETTINGS

    shown = " ".join(penstock(environ, "serve", "--help-all").stdout.split())
    for name, setting in SETTINGS.items():
        assert f"--{name.replace('_', '-')} " in shown
        assert setting.about[1:] in shown
    for flags in (("--max-body", "tiny"), ("--log-keep-days", "0")):
        ended = penstock(environ, "serve", *flags)
        assert ended.returncode == 78
        assert ended.stderr.startswith(f"penstock: {flags[0]}: ")


def test_serve_takes_the_model_as_people_write_it_once(
    environ: dict[str, str], tmp_path: Path
) -> None:
    folder = str(tmp_path / "tiny")
    make_model(tmp_path / "tiny")
    for given in ((folder,), ("-m", folder), ("--model", folder)):
        ended = penstock(environ, "serve", *given, "--no-log-text", "--check-config")
        assert (ended.returncode, ended.stderr) == (0, "")
        assert f"{folder} in float32, up to 64" in ended.stdout
    ended = penstock(environ, "serve", folder, "-m", folder)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "once" in ended.stderr


def test_checking_says_what_the_starter_model_can_take(environ: dict[str, str]) -> None:
    said = penstock(environ, "serve", "--check-config").stdout
    assert "penstock-starter-1 in float32" in said


def test_checking_tells_of_a_cache_that_was_asked_for_and_would_not_be(
    environ: dict[str, str],
) -> None:
    asked = ("--dram-cache", "64MiB", "--ssd-cache", "1GiB", "--ssd-dir", "/proc/x")
    ended = penstock(environ, "serve", "--check-config", *asked)
    lines = ended.stdout.splitlines()
    assert ended.returncode == 0  # as a start, which serves without it
    assert "a configured cache" in lines[0]
    assert lines[-2].startswith("DRAM cache ")
    assert lines[-1].startswith("no SSD cache: /proc, ")


def test_checking_tells_of_each_model_and_names_it_where_it_is_wrong(
    environ: dict[str, str], tmp_path: Path
) -> None:
    folder, path = tmp_path / "tiny", tmp_path / "penstock.toml"
    make_model(folder)
    asked = ("serve", str(folder), "--config", str(path), "--check-config")
    path.write_text(f'[models.small]\nmodel = "{folder}"\nmax_model_len = 32\n')
    ended = penstock(environ, *asked)
    assert ended.returncode == 0
    assert f"{folder} in float32, up to 32" in ended.stdout
    path.write_text('[models.a]\nmodel = "/nowhere"\n[models.b]\nmodel = "/there"\n')
    ended = penstock(environ, *asked)
    assert ended.returncode == 78
    assert "models.a: " in ended.stderr
    assert "models.b: " in ended.stderr


def test_checking_refuses_what_a_start_would(environ: dict[str, str], tmp_path: Path) -> None:
    folder, path = tmp_path / "tiny", tmp_path / "penstock.toml"
    make_model(folder)
    asked = ("serve", str(folder), "--config", str(path), "--check-config")
    path.write_text(f'[models.tiny]\nmodel = "{folder}"\n')
    ended = penstock(environ, *asked)
    assert (ended.returncode, "has this name, too" in ended.stderr) == (78, True)
    path.write_text("")
    (folder / "tokenizer.json").write_text("{")
    ended = penstock(environ, *asked)
    assert (ended.returncode, "tokenizer.json" in ended.stderr) == (78, True)


def test_a_start_that_fails_says_why_in_the_log_and_did_not_crash(
    environ: dict[str, str], tmp_path: Path
) -> None:
    make_model(tmp_path / "tiny")
    (tmp_path / "tiny" / "tokenizer.json").write_text("{")
    failed = penstock(environ, "serve", str(tmp_path / "tiny"), "--roles", "colocated")
    assert failed.returncode == 78
    log = log_path(Path(environ["PENSTOCK_STATE_DIR"]))
    (event,) = read_events(log, EventQuery())
    assert (event["code"], "tokenizer.json" in str(event["message"])) == ("daemon.failed", True)
    with closing(sqlite3.connect(log)) as db:
        assert end_crashed_run(db, (), ()) is None


def test_checking_finds_folders_that_cannot_be_made(
    environ: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("x")
    state = str(tmp_path / "file" / "state")
    ended = penstock(environ, "serve", "--check-config", "--state-dir", state)
    assert (ended.returncode, "is not a folder" in ended.stderr) == (78, True)
    ended = penstock(environ, "serve", "--check-config", "--socket", str(tmp_path / "file"))
    assert (ended.returncode, "not a socket" in ended.stderr) == (78, True)


def test_checking_names_variables_that_set_nothing(environ: dict[str, str]) -> None:
    environ |= {"PENSTOCK_DTYP": "secret", "PENSTOCK_API_KEY": "k"}
    ended = penstock(environ, "serve", "--check-config")
    assert ended.returncode == 0
    assert re.findall(r"PENSTOCK_\w+", ended.stderr) == ["PENSTOCK_DTYP", "PENSTOCK_DTYPE"]
    assert "secret" not in ended.stderr


def test_settings_are_shown_to_people_as_they_would_type_them(environ: dict[str, str]) -> None:
    shown = penstock(environ, "config", "show", "-o", "wide").stdout.splitlines()
    lines = {line.split()[0]: line.split() for line in shown}
    assert (lines["max_body"][1], lines["max_body"][3]) == ("8MiB", "yes")
    assert (lines["log_text"][1], lines["dtype"][3]) == ("false", "no")
    rows = json.loads(penstock(environ, "config", "show", "-o", "json").stdout)["data"]
    values = {row["name"]: row["value"] for row in rows}
    assert (values["max_body"], values["log_text"]) == (8 << 20, False)


def test_the_socket_of_a_running_daemon_is_told_where_a_start_would_take_another(
    environ: dict[str, str],
) -> None:
    lock = Path(environ["PENSTOCK_STATE_DIR"]) / "lock"
    lock.parent.mkdir(mode=0o700)
    for socket, is_told in ((environ["PENSTOCK_SOCKET"], False), ("/run/other.sock", True)):
        lock.write_text(f"17 {socket}\n")
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            shown = penstock(environ, "config", "show")
        assert (socket in shown.stderr) == is_told
        assert environ["PENSTOCK_SOCKET"] in shown.stdout
    assert penstock(environ, "config", "show").stderr == "", "the daemon has ended"


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_a_verb_works_with_its_streams_closed(
    daemon: FakeDaemon, environ: dict[str, str], closed: str
) -> None:
    daemon.script.replies = {"GET /v1/requests": (200, {"data": []})}
    line = f"'{command()[0]}' -m appliance.cli ps {closed}"
    assert subprocess.run(["sh", "-c", line], env=environ, cwd=ROOT, check=False).returncode == 0
    assert daemon.script.asked == [("GET /v1/requests", None)]


def test_what_a_verb_starts_has_streams_as_well(environ: dict[str, str]) -> None:
    script = (
        "import subprocess, sys\n"
        "from appliance.cli import terminal\n"
        "terminal.prepare()\n"
        "child = 'import os; [os.fstat(number) for number in range(3)]'\n"
        "sys.exit(subprocess.run([sys.executable, '-c', child]).returncode)"
    )
    line = f"'{command()[0]}' -c \"{script}\" 0<&- 1>&- 2>&-"
    assert subprocess.run(["sh", "-c", line], env=environ, cwd=ROOT, check=False).returncode == 0


def test_serve_without_stderr_still_says_by_its_exit_code_what_is_wrong(
    environ: dict[str, str],
) -> None:
    line = f"'{command()[0]}' -m appliance.cli serve --kv-memory plenty 2>&-"
    assert subprocess.run(["sh", "-c", line], env=environ, cwd=ROOT, check=False).returncode == 78


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_a_script_for_the_shell(environ: dict[str, str], shell: str) -> None:
    ended = penstock(environ, "completion", shell)
    assert ended.returncode == 0
    assert f"complete_{shell}" in ended.stdout


def completed(environ: dict[str, str], *words: str) -> list[str]:
    asking = {
        "_PENSTOCK_COMPLETE": "complete_bash",
        "COMP_WORDS": "\n".join(["penstock", *words]),
        "COMP_CWORD": str(len(words)),
    }
    ended = penstock({**environ, **asking})
    assert ended.stderr == ""
    return ended.stdout.split()


def test_verbs_and_ids_are_completed(daemon: FakeDaemon, environ: dict[str, str]) -> None:
    daemon.script.replies = {"GET /v1/requests": (200, {"data": [REQUEST, ENDED]})}
    assert completed(environ, "resu") == ["resume"]
    assert completed(environ, "show", "cm") == ["cmpl-1", "cmpl-0"]
    assert completed(environ, "cancel", "cm") == ["cmpl-1"]
    hostile = [REQUEST | {"id": f"cmpl-{end}"} for end in ("$(id)", "`id`", "x;id", "\n", "a b")]
    daemon.script.replies = {"GET /v1/requests": (200, {"data": hostile})}
    assert completed(environ, "show", "cm") == []


def test_completion_without_a_daemon_is_silent(environ: dict[str, str]) -> None:
    assert completed(environ, "show", "cm") == []
    assert completed({**environ, "PENSTOCK_HOST": "ftp://x"}, "show", "cm") == []


def test_looking_at_the_status_imports_nothing_slow(environ: dict[str, str]) -> None:
    script = (
        "import sys; sys.argv = ['penstock', 'status']\n"
        "import appliance.cli\n"
        "try: appliance.cli.main()\n"
        "except SystemExit: pass\n"
        "slow = {'pydantic','httpx','textual','torch','msgspec','sqlite3','asyncio','numpy'}\n"
        "print(sorted(sys.modules.keys() & slow))"
    )
    ended = subprocess.run(
        [command()[0], "-c", script], env=environ, capture_output=True, cwd=ROOT, check=True
    )
    assert ended.stdout == b"[]\n"


def test_every_verb_has_help(environ: dict[str, str]) -> None:
    from appliance.cli.main import VERBS

    shown = penstock(environ, "--help").stdout
    assert all(name in shown for name in VERBS if name != "dial-stdio")
    for name in VERBS:
        assert penstock(environ, name, "--help").stdout.startswith(f"Usage: penstock {name}")
