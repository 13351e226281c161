"""penstock worker: what it needs to be told, and what it says where Dynamo is not."""

from __future__ import annotations

import tomllib

import pytest

from appliance.doctor import checks
from appliance.dynamo import runtime
from tests.appliance.cli_process import ROOT, penstock

FOUND = ("--discovery", "file:found")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "--dynamo"),
        (("--dynamo",), "file:FOLDER"),
        (("--dynamo", "--discovery", "smoke:signals"), "smoke:signals"),
        (("--dynamo", "--discovery", "etcd:here"), "etcd:here"),
        (("--dynamo", *FOUND, "--host", "http://127.0.0.1:8000"), "beside the daemon"),
    ],
)
def test_what_it_cannot_know_it_asks_for(environ, words, says):
    ended = penstock(environ, "worker", *words)
    assert ended.returncode == 2
    assert says in ended.stderr


@pytest.mark.skipif(runtime.missing() is None, reason="Dynamo is here")
def test_without_the_wheels_it_says_which_and_how(environ, tmp_path):
    ended = penstock(environ, "worker", "--dynamo", *FOUND, "--host", str(tmp_path / "p.sock"))
    assert ended.returncode == 78
    assert runtime.PACKAGE in ended.stderr
    assert runtime.INSTALL in ended.stderr


@pytest.mark.parametrize(
    ("what", "verdicts"),
    [
        (None, ["ok"]),
        (f"{runtime.PACKAGE} is not installed", []),
        (f"{runtime.PACKAGE} is 9.9, not {runtime.VERSION}", ["note"]),
    ],
)
def test_doctor_names_a_package_that_is_installed(monkeypatch, what, verdicts):
    monkeypatch.setattr(runtime, "missing", lambda: what)
    found = list(checks._dynamo())
    assert [(each.check, each.verdict) for each in found] == [("dynamo", v) for v in verdicts]
    assert all(what is None or what in each.found for each in found)


def test_the_extra_is_the_version_that_the_adapter_was_made_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = project["optional-dependencies"]["dynamo"]
    assert extra == [f"{runtime.PACKAGE}=={runtime.VERSION}"]
