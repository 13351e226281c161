"""penstock doctor and devices on a machine as it is, and on machines that are worse."""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from appliance.client.address import SshAddress, TcpAddress, UnixAddress
from appliance.client.calls import Client
from appliance.configuration import client_settings, config
from appliance.devices.machine import Devices, find_packages
from appliance.doctor import checks
from appliance.hub.names import STARTER_FOLDER
from engine.errors import PenstockError
from engine.kernels.cpu import has_kernels, load_kernels
from engine.kernels.product_choice import ProductChoice
from tests.appliance.cli_process import penstock
from tests.appliance.logs import write
from tests.gguf_files import write_gguf


def findings(environ: dict[str, str], *options: str, code: int) -> dict[str, dict[str, str]]:
    ended = penstock(environ, "doctor", *options, "-o", "json")
    assert ended.returncode == code, ended.stdout + ended.stderr
    return {row["check"]: row for row in json.loads(ended.stdout)["data"]}


def test_a_machine_that_serves_ends_with_0_and_says_what_is_missing(
    environ: dict[str, str],
) -> None:
    found = findings(environ, code=0)
    assert {row["verdict"] for row in found.values()} <= {"ok", "note"}
    assert "penstock-starter" in found["model"]["found"]
    assert found["daemon"]["verdict"] == "note"
    assert "penstock serve" in found["daemon"]["hint"]


def test_a_model_that_is_not_there_is_bad(environ: dict[str, str], tmp_path: Path) -> None:
    found = findings(environ, "--model", str(tmp_path / "none"), code=8)
    assert found["model"]["verdict"] == "bad"
    assert str(tmp_path / "none") in found["model"]["found"]


def test_a_models_name_moves_no_cursor_and_forges_no_line(
    environ: dict[str, str], tmp_path: Path
) -> None:
    named = tmp_path / "\x1b[2J\x1b]0;title\x07\nok   forged"
    shutil.copytree(STARTER_FOLDER, named)
    ended = penstock(environ, "doctor", "--model", str(named))
    assert "\\x1b[2J" in ended.stdout
    assert all(line.isprintable() for line in ended.stdout.splitlines())
    assert not re.search("^ok +forged", ended.stdout, re.MULTILINE)


def test_settings_that_cannot_be_read_are_bad_and_the_rest_is_still_looked_at(
    environ: dict[str, str], tmp_path: Path
) -> None:
    settings = tmp_path / "bad.toml"
    settings.write_text("max_queued = 'many'\n")
    found = findings(environ, "--config", str(settings), code=8)
    assert "max_queued" in found["configuration"]["found"]
    assert {"kernels", "cores", "daemon"} <= found.keys()


def test_a_damaged_log_is_bad_and_stays_as_it_is(environ: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    path = folder / "requests.db"
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("CREATE TABLE requests (rid TEXT)")
        db.executemany("INSERT INTO requests VALUES (?)", [("x" * 500,)] * 200)
    damaged = bytearray(path.read_bytes())
    damaged[8192:20480] = b"\xff" * (20480 - 8192)
    path.write_bytes(damaged)
    found = findings({**environ, "PENSTOCK_STATE_DIR": str(folder)}, code=8)
    assert found["log"]["verdict"] == "bad"
    assert path.read_bytes() == damaged


def test_a_damaged_log_that_a_start_has_set_aside_is_a_note(tmp_path: Path) -> None:
    path = tmp_path / "requests.db"
    write(path)
    assert checks._log(path).verdict == "ok"
    path.with_name("requests.db.damaged-1").write_text("no database")
    found = checks._log(path)
    assert (found.verdict, "requests.db.damaged-1" in found.found) == ("note", True)


def test_a_state_folder_beneath_a_file_is_bad(environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    found = findings({**environ, "PENSTOCK_STATE_DIR": str(tmp_path / "file" / "state")}, code=8)
    assert found["state"]["verdict"] == "bad"


def test_what_may_not_be_looked_at_is_bad_and_the_rest_is_still_looked_at() -> None:
    def forbidden() -> checks.Finding:
        raise PermissionError(13, "Permission denied", "/closed")

    found = checks._looked_at({}, "log", forbidden)
    assert (found.verdict, found.found) == ("bad", "/closed: Permission denied")


def test_beside_a_daemon_its_own_ssd_cache_is_looked_at() -> None:
    ssd = {"state": "failed", "folder": "/x/kv", "reason": "/x is not a folder"}
    state = {"ssd": ssd, "workers": []}
    found = checks._ssd(client_settings.load_asked({}), state)
    assert (found.verdict, "/x is not a folder" in found.found) == ("note", True)
    ssd |= {"state": "on", "num_bytes": 1 << 30, "max_bytes": 2 << 30}
    found = checks._ssd(client_settings.load_asked({}), state)
    assert (found.verdict, found.found.startswith("/x/kv: 1.0 of 2.0 GiB")) == ("ok", True)
    ssd["limit"] = "its disk is full"
    found = checks._ssd(client_settings.load_asked({}), state)
    assert (found.verdict, found.found.endswith("; its disk is full")) == ("note", True)
    assert "--ssd-dir" in found.hint


def test_of_a_daemon_that_serves_quantised_its_losses_are_told() -> None:
    state = {"state": "ready", "model": "m", "roles": "static", "workers": [], "weights": None}
    assert "KV" not in checks._daemon(state).found
    found = checks._daemon(state | {"kv": "KV is int8; divergence 0.0001 nats"})
    assert found.verdict == "ok"
    assert found.found.endswith("; KV is int8; divergence 0.0001 nats")


def test_a_daemon_is_graded_as_status_grades_it() -> None:
    state = {"model": "m", "roles": "static", "workers": [], "state_reason": "a worker is gone"}
    verdicts = {name: checks._daemon(state | {"state": name}) for name in ("loading", "degraded")}
    assert {name: found.verdict for name, found in verdicts.items()} == {
        "loading": "note",
        "degraded": "bad",
    }
    assert verdicts["degraded"].found.endswith("; a worker is gone")


@pytest.mark.skipif(not has_kernels(), reason="no kernels")
def test_products_are_told_with_their_reason_and_a_wrong_one_is_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    level = load_kernels()[1]
    for choice, verdict in (
        (ProductChoice(None, 0, ""), "ok"),
        (ProductChoice(None, 0, "products: tiles (default of AMX)"), "ok"),
        (
            ProductChoice(None, 0, "tiles computes wrongly", ("tiles",)),
            "note",
        ),
    ):
        monkeypatch.setattr(checks, "products_here", lambda *, is_bitwise, choice=choice: choice)
        finding = checks._kernels()
        assert finding.verdict == verdict
        assert finding.found == f"compiled, for {level}" + (choice.why and f"; {choice.why}")


@pytest.mark.skipif(not has_kernels(), reason="no kernels")
def test_products_are_told_as_exact_chooses_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def chosen(*, is_bitwise: bool) -> ProductChoice:
        asked.append(is_bitwise)
        return ProductChoice(None, 0, "")

    monkeypatch.setattr(checks, "products_here", chosen)
    for exact in ("bitwise", "auto"):
        settings: dict[str, str | None] = {"exact": exact, "state_dir": str(tmp_path)}
        found = checks.examine(settings, lambda: Client(UnixAddress(tmp_path / "none")))
        next(each for each in found if each.check == "kernels")
    assert asked == [True, False]


def test_kernels_that_are_not_this_processors_best_are_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other_machines = SimpleNamespace(supported=lambda: ("avx512", "avx2", "portable"))
    monkeypatch.setattr(checks, "load_kernels", lambda: (other_machines, "portable"))
    found = checks._kernels(None)
    assert (found.verdict, "pip install" in found.hint) == ("note", True)
    assert {"portable", "avx512"} <= set(re.findall(r"\w+", found.found))


def test_beside_a_daemon_the_model_is_its_own_and_not_that_of_a_new_start() -> None:
    state = {"model": "penstock-starter-1", "dtype": "float32", "max_model_len": 512}
    found = checks._served(state, config.load({}, {}))
    told = "the daemon serves penstock-starter-1 in float32, up to 512 tokens per request"
    assert (found.verdict, found.found) == ("ok", told)
    found = checks._served(state | {"max_model_len": None}, config.load({"model": "a/b"}, {}))
    assert found.found.endswith(" a start would serve a/b")


def test_beside_a_daemon_a_model_that_a_start_could_not_serve_is_bad(tmp_path: Path) -> None:
    state = {"model": "penstock-starter-1", "dtype": "float32", "max_model_len": 512}
    settings: dict[str, str | None] = {"model": str(tmp_path / "none")}
    served = partial(checks._served, state, config.load(settings, {}))
    found = checks._looked_at(settings, "model", served)
    assert (found.verdict, ".gguf file" in found.hint) == ("bad", True)
    assert found.found.startswith(f"--model: {tmp_path}/none: ")
    assert "the daemon serves penstock-starter-1" in found.found


def test_a_daemons_alerts_are_notes() -> None:
    message = "2.0% of the first tokens take longer than 9 ms"
    alert = {"code": "slo.missed", "since": "2026-11-22T10:00:00Z", "message": message}
    (found,) = checks._alerts({"alerts": [alert]})
    assert (found.verdict, found.found) == ("note", f"slo.missed since {alert['since']}: {message}")
    assert found.hint == "run `penstock events`"
    (found,) = checks._alerts({"alerts": [alert | {"action": "top"}]})
    assert found.hint == "run `top`"
    assert list(checks._alerts(PenstockError("no daemon"))) == []


def test_a_log_that_cannot_be_written_is_a_fault() -> None:
    about = "cannot write the request log: database or disk is full; it lacks 3 requests so far"
    alert = {"code": "log.not_written", "since": "2026-11-22T10:00:00Z", "message": about}
    (found,) = checks._alerts({"alerts": [alert | {"action": "df -h /var/lib/penstock"}]})
    assert found.verdict == "bad"
    assert about in found.found
    assert found.hint == "run `df -h /var/lib/penstock`"


def test_a_link_that_is_down_is_told_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    about = "the link from gpu0 to gpu1 is down, its blocks go by shm: it was slow"
    alert = {"code": "link.down", "since": "2026-11-22T10:00:00Z", "message": about}
    link = {"from_pool": "gpu0", "to_pool": "gpu1", "transport": "shm", "down": "it was slow"}
    worker = {"name": "prefill", "state": "ready", "attention": "torch", "device": "gpu0"}
    state = {"alerts": [alert], "links": [link], "workers": [worker], "model": "m"}
    state |= {"state": "ready", "roles": "static", "dtype": "float32", "max_model_len": 9}
    state |= {"at": "2026-11-22T10:00:00Z", "uptime_s": 9.0}
    monkeypatch.setattr(checks, "_state", lambda client: state)
    found = checks.examine({"state_dir": str(tmp_path)}, lambda: _Asked(tmp_path))
    (told,) = [each for each in found if "gpu0 to gpu1" in each.found]
    assert (told.check, told.verdict) == ("alert", "note")
    assert "retries" in told.hint


@pytest.mark.skipif(not has_kernels(), reason="nothing is tried without kernels")
def test_of_a_quantised_model_the_trial_in_bfloat16_says_little(
    tiny_llama: Path, tmp_path: Path
) -> None:
    path = write_gguf(tiny_llama, tmp_path / "tiny.gguf", "Q8_0")
    for model, is_told in ((tiny_llama, False), (path, True)):
        settings = client_settings.load_asked({"model": str(model)})
        found = checks._kernels(checks._checkpoint(settings))
        assert ("quantised" in found.found) == is_told


def test_people_read_one_line_for_each_check(environ: dict[str, str]) -> None:
    ended = penstock(environ, "doctor")
    named = [line[5:20].strip() for line in ended.stdout.splitlines() if line[:1] != " "]
    assert named[:4] == ["packages", "kernels", "reader", "cores"]
    assert "daemon" in named  # after it come other daemons that use the same cores


def test_devices_lists_the_cores_and_reports_no_figure_that_it_has_not(
    environ: dict[str, str],
) -> None:
    ended = penstock(environ, "devices", "-o", "json")
    assert ended.returncode == 0, ended.stderr
    rows = json.loads(ended.stdout)["data"]
    assert rows[-1]["name"].startswith("cores 0")
    assert rows[-1]["power_w"] is None


def test_cpu_energy_is_asked_for(tmp_path: Path) -> None:
    (power,) = checks._devices(Devices([], []))
    assert (power.verdict, "/sys/class/powercap" in power.hint) == ("note", True)
    folder = tmp_path / "intel-rapl:0"
    folder.mkdir()
    (folder / "name").write_text("package-0")
    (folder / "energy_uj").write_text("5")
    (power,) = checks._devices(Devices(find_packages(tmp_path), []))
    assert power.verdict == "ok"


def test_whose_files_are_told_of_is_said_where_the_daemon_is_elsewhere(
    environ: dict[str, str],
) -> None:
    found = checks._elsewhere(lambda: Client(SshAddress("box")))
    assert found is not None
    assert "ssh://box" in found.found
    for near in (UnixAddress(Path("/s")), TcpAddress("127.0.0.1", 8000)):
        assert checks._elsewhere(lambda near=near: Client(near)) is None  # type: ignore[misc]
    for words in (("cache", "stats"), ("db", "path"), ("config", "show")):
        ended = penstock({**environ, "PENSTOCK_HOST": "ssh://box"}, *words)
        assert ended.returncode == 0
        assert "ssh://box" in ended.stderr
    assert penstock(environ, "db", "path").stderr == ""


@pytest.mark.parametrize(
    "words",
    [
        ("doctor", "--bundle", "report.tgz"),
        ("db", "prune", "--older-than", "1d"),
        ("cache", "clear"),
    ],
)
def test_what_needs_this_machines_files_is_refused_for_a_daemon_elsewhere(
    tmp_path: Path, environ: dict[str, str], words: tuple[str, ...]
) -> None:
    named = {**environ, "PENSTOCK_HOST": "https://box.example:8000"}
    ended = penstock(named, *words, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "the daemon on another" in ended.stderr
    assert "hint: run it there" in ended.stderr
    assert not (tmp_path / "report.tgz").exists()


def test_of_a_report_that_no_disk_has_room_for_nothing_is_left(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    program = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
    program += "import sys; from appliance.cli import main; sys.exit(main())"
    words = [sys.executable, "-B", "-c", program, "doctor", "--bundle", "report.tgz"]
    ended = subprocess.run(
        words, env=environ, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "cannot write" in ended.stderr
    assert list(tmp_path.glob("*report*")) == []


class _Asked(Client):
    """A daemon on a socket that has told of some events."""

    def __init__(self, socket: Path, *events: dict[str, str]) -> None:
        super().__init__(UnixAddress(socket))
        self.queries = list[Mapping[str, str]]()
        self._events = events

    def get(self, path: str, query: Mapping[str, str] | None = None) -> dict[str, Any]:
        self.queries.append(query or {})
        return {"data": list(self._events)}


@pytest.mark.parametrize("answer", [{}, {"state": 5}, {"alerts": [None]}, {"workers": {"a": 1}}])
def test_a_state_that_is_no_penstocks_is_told_as_the_daemons_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: dict[str, Any]
) -> None:
    asked = _Asked(tmp_path)
    monkeypatch.setattr(asked, "state", lambda: answer)
    assert isinstance(checks._state(lambda: asked), PenstockError)


@pytest.mark.parametrize(
    ("state", "event"),
    [
        ({}, {"code": "x", "message": ""}),
        ({"at": "soon", "uptime_s": 9.0}, {"code": "x", "message": ""}),
        ({"at": "2026-11-23T10:00:10Z", "uptime_s": 1e300}, {"code": "x", "message": ""}),
        ({"at": "2026-11-23T10:00:10Z", "uptime_s": 9.0}, {"message": ""}),
    ],
)
def test_answers_that_do_not_say_whether_it_is_open_are_a_note(
    tmp_path: Path, state: dict[str, Any], event: dict[str, str]
) -> None:
    found = checks._open_daemon(state, lambda: _Asked(tmp_path, event))
    assert found is not None
    assert (found.check, found.verdict) == ("network", "note")


def test_that_a_daemon_is_open_to_the_network_is_told_by_what_it_said_itself() -> None:
    state = {"at": "2026-11-23T10:00:10Z", "uptime_s": 9.0}
    message = "https://0.0.0.0:8443 is open to the network"
    opened = _Asked(Path("/s"), {"code": "listen.open", "message": message})
    found = checks._open_daemon(state, lambda: opened)
    assert found is not None
    assert (found.verdict, found.found) == ("note", f"the daemon: {message}")
    assert opened.queries[0]["since"] == "2026-11-23T10:00:00+00:00"
    other = _Asked(Path("/s"), {"code": "slo.missed", "message": "slow"})
    assert checks._open_daemon(state, lambda: other) is None
    assert checks._open_daemon(PenstockError("no daemon"), lambda: opened) is None


def test_a_folder_that_is_not_the_running_daemons_is_said_to_be_that_of_the_settings(
    tmp_path: Path,
) -> None:
    (tmp_path / "lock").write_text(f"7 {tmp_path}/own.sock\n")
    asked = {name: _Asked(tmp_path / name) for name in ("own.sock", "other.sock")}
    assert checks._whose(tmp_path, {}, lambda: asked["own.sock"]) == ""
    words = checks._whose(tmp_path, {}, lambda: asked["other.sock"])
    assert f" {tmp_path}/own.sock: " in words
    unknown = checks._whose(tmp_path / "none", {}, lambda: asked["other.sock"])
    assert "PENSTOCK_STATE_DIR" in unknown
    assert checks._whose(tmp_path, PenstockError("no"), lambda: asked["other.sock"]) == ""


def test_a_variable_that_sets_nothing_is_told(environ: dict[str, str]) -> None:
    found = findings({**environ, "PENSTOCK_KV_MEMROY": "2GiB"}, code=0)
    assert found["environment"]["verdict"] == "note"
    assert "is PENSTOCK_KV_MEMORY meant?" in found["environment"]["found"]


def test_a_state_folder_on_a_read_only_file_system_is_found_with_that_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _path: SimpleNamespace(f_flag=os.ST_RDONLY))
    found = checks._state_dir(tmp_path / "state")
    assert (found.verdict, "Read-only file system" in found.found) == ("bad", True)
