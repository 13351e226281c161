"""`penstock roles`, against a daemon that answers from a script."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.appliance.cli_process import penstock, user_environ
from tests.appliance.fake_daemon import FakeDaemon

STATE = {"roles": "elastic", "slo_ttft_ms": None, "slo_itl_ms": 40}


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return user_environ(tmp_path)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(tmp_path / "p.sock") as fake:
        yield fake


def test_without_a_change_it_shows_what_is_so(daemon: FakeDaemon, environ: dict[str, str]) -> None:
    daemon.script.replies = {"GET /v1/penstock/state": (200, STATE)}
    assert penstock(environ, "roles").stdout == "elastic, targets gaps 40ms\n"


def test_a_switch_shows_what_the_daemon_then_has(
    daemon: FakeDaemon, environ: dict[str, str]
) -> None:
    changed = {"roles": "static", "slo_ttft_ms": 900, "slo_itl_ms": None}
    daemon.script.replies = {"POST /v1/penstock/roles": (200, changed)}
    ended = penstock(environ, "roles", "static", "--slo-ttft-ms", "900", "--slo-itl-ms", "0")
    assert ended.stdout == "static, targets ttft 900ms\n"


def test_a_refusal_is_told(daemon: FakeDaemon, environ: dict[str, str]) -> None:
    refusal = {"error": {"message": "there is one worker only", "code": "one_worker"}}
    daemon.script.replies = {"POST /v1/penstock/roles": (409, refusal)}
    ended = penstock(environ, "roles", "static")
    assert (ended.stdout, ended.stderr) == ("", "penstock: there is one worker only\n")
    assert ended.returncode


@pytest.mark.parametrize("arguments", [("--slo-itl-ms", "-1"), ("--slo-ttft-ms", "soon")])
def test_targets_are_numbers(environ: dict[str, str], arguments: tuple[str, ...]) -> None:
    assert penstock(environ, "roles", *arguments).returncode == 2
