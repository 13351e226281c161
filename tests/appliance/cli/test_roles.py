"""`penstock roles`, against a daemon that answers from a script."""

from __future__ import annotations

import pytest

from appliance.cli import serve
from tests.appliance.cli_process import penstock
from tests.worlds.fake_daemon import FakeDaemon

STATE = {"roles": "elastic", "slo_ttft_ms": None, "slo_itl_ms": 40}


def test_without_a_change_it_shows_what_is_so(daemon: FakeDaemon, environ: dict[str, str]) -> None:
    daemon.script.replies = {"GET /v1/penstock/state": (200, STATE)}
    assert penstock(environ, "roles").stdout == "elastic, targets itl 40ms\n"


def test_a_switch_shows_what_the_daemon_then_has(
    daemon: FakeDaemon, environ: dict[str, str]
) -> None:
    changed = {"roles": "static", "slo_ttft_ms": 900, "slo_itl_ms": None}
    daemon.script.replies = {"POST /v1/penstock/roles": (200, changed)}
    ended = penstock(environ, "roles", "static", "--slo-ttft-ms", "900", "--slo-itl-ms", "0")
    assert ended.stdout == "static, targets ttft 900ms\n"


def test_a_refusal_is_told(daemon: FakeDaemon, environ: dict[str, str]) -> None:
    message = "one worker, started colocated"
    refusal = {"error": {"message": message, "code": "one_worker"}}
    daemon.script.replies = {"POST /v1/penstock/roles": (409, refusal)}
    ended = penstock(environ, "roles", "static")
    assert (ended.stdout, ended.stderr) == ("", f"penstock: {message}\n")
    assert ended.returncode


@pytest.mark.parametrize("arguments", [("--slo-itl-ms", "-1"), ("--slo-ttft-ms", "soon")])
def test_targets_are_numbers(environ: dict[str, str], arguments: tuple[str, ...]) -> None:
    assert penstock(environ, "roles", *arguments).returncode == 2


@pytest.mark.parametrize(
    ("options", "listen"),
    [
        (("--port", "8000"), "localhost:8000"),
        (("--host", "::1", "--port", "8000"), "[::1]:8000"),
        (("--listen", "127.0.0.1:1"), "127.0.0.1:1"),
        ((), None),
    ],
)
def test_host_and_port_are_the_address_to_listen_on(
    options: tuple[str, ...], listen: str | None
) -> None:
    named = dict(zip(options[::2], options[1::2], strict=True))
    given = (named.get(name) for name in ("--listen", "--host", "--port"))
    assert serve._listen_address(*given) == listen


@pytest.mark.parametrize(
    "options", [("--host", "127.0.0.1"), ("--port", "1", "--listen", "127.0.0.1:1")]
)
def test_half_an_address_and_two_addresses_are_usage_errors(
    environ: dict[str, str], options: tuple[str, ...]
) -> None:
    assert penstock(environ, "serve", *options).returncode == 2
