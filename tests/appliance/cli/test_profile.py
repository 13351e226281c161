"""`penstock profile`: facts as a table and as JSON, measured now, forgotten."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from appliance.fleet.profile_store import FILE_NAME, ProfileStore
from engine.profile.facts import FactKey, Scope
from tests.appliance.cli_process import penstock
from tests.worlds.fake_daemon import FakeDaemon

SCOPE = Scope("A CPU [1234], cpus 0,1", "avx2 5678", "tiny [9abc]", "float32", "prefill cpu 0")
KEY = FactKey("prompt_ms", 256, 0, "decode on 2")


@pytest.fixture
def store(environ: dict[str, str]) -> ProfileStore:
    folder = Path(environ["PENSTOCK_STATE_DIR"])
    folder.mkdir()
    store = ProfileStore(folder)
    store.save(SCOPE, {KEY: [100.0, 105.0, 110.0, 120.0, 130.0]})
    return store


def test_facts_are_shown_with_their_spread_and_date(
    environ: dict[str, str], store: ProfileStore
) -> None:
    header, row = penstock(environ, "profile", "show").stdout.splitlines()
    assert header.split()[:3] == ["MODEL", "WHAT", "WHERE"]
    assert "prefill step" in row
    assert "decode, cores: 2" in row
    assert (header.split().index("UNIT"), " ms " in row) == (6, True)
    shown = json.loads(penstock(environ, "profile", "show", "-o", "json").stdout)
    (fact,) = shown["data"]
    assert (fact["machine"], fact["model"]) == (SCOPE.machine, SCOPE.model)
    assert (fact["value"], fact["low"], fact["high"], fact["samples"]) == (110, 100, 130, 5)
    assert fact["at"].startswith("20")
    assert (fact["what"], fact["unit"], fact["place"]) == ("prompt_ms", "ms", "decode on 2")


def test_two_samples_have_no_spread(environ: dict[str, str], store: ProfileStore) -> None:
    store.save(SCOPE, {KEY: [100.0, 130.0]})
    (fact,) = json.loads(penstock(environ, "profile", "show", "-o", "json").stdout)["data"]
    assert (fact["value"], fact["low"], fact["high"], fact["samples"]) == (115, None, None, 2)


def test_where_nothing_is_known_there_is_a_header(environ: dict[str, str]) -> None:
    ended = penstock(environ, "profile", "show")
    assert (ended.returncode, len(ended.stdout.splitlines())) == (0, 1)


def test_what_is_cleared_is_forgotten(environ: dict[str, str], store: ProfileStore) -> None:
    assert penstock(environ, "profile", "clear").stdout == "forgot 1 fact\n"
    assert not store.path.exists()
    assert penstock(environ, "profile", "clear").stdout == "forgot 0 facts\n"


def test_the_profile_of_another_daemon_is_not_taken_for_the_running_ones(
    daemon: FakeDaemon, environ: dict[str, str], store: ProfileStore
) -> None:
    lock, told = store.path.parent / "lock", [*("--state-dir", str(store.path.parent))]
    lock.write_text("1 /another/socket\n")
    for verb in ("show", "clear"):
        ended = penstock(environ, "profile", verb)
        assert (ended.returncode, "--state-dir" in ended.stderr) == (2, True)
    assert len(penstock(environ, "profile", "show", *told).stdout.splitlines()) == 2
    lock.write_text(f"1 {daemon.socket_path}\n")
    assert len(penstock(environ, "profile", "show").stdout.splitlines()) == 2


def test_a_damaged_file_is_an_error_with_the_way_out(environ: dict[str, str]) -> None:
    folder = Path(environ["PENSTOCK_STATE_DIR"])
    folder.mkdir()
    (folder / FILE_NAME).write_bytes(b"no database" * 1000)
    ended = penstock(environ, "profile", "show")
    assert ended.returncode == 1
    assert "penstock profile clear" in ended.stderr
    assert penstock(environ, "profile", "clear").returncode == 0
    assert penstock(environ, "profile", "show").returncode == 0


def test_measuring_waits_until_all_is_known_or_the_time_is_spent(
    daemon: FakeDaemon, environ: dict[str, str]
) -> None:
    begun = {"num_facts": 3, "num_unknown": 2, "work_ms": 0.0, "is_going_on": True}
    for last, figures in (
        ({"num_facts": 5, "num_unknown": 0}, ["5"]),
        ({"num_unknown": 1, "is_going_on": False}, ["3", "1"]),
    ):
        daemon.script.replies = {
            "POST /v1/penstock/measure": (200, begun),
            "GET /v1/penstock/measure": (200, begun | last),
        }
        said = penstock(environ, "profile", "measure").stdout
        assert re.findall(r"\d+", said) == figures
