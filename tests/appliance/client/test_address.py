"""Where a daemon is: every form of an address, and each way to it tried against a daemon."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.client.address import KeyInClear, SshAddress, TcpAddress, UnixAddress, find, parse
from appliance.client.calls import Client, DaemonUnreachable, ReplyError
from appliance.configuration.setting_kinds import is_loopback
from engine.errors import ConfigError
from tests.appliance.cli_process import ROOT, penstock, start, user_environ
from tests.worlds.fake_daemon import FakeDaemon, Script, _Handler, text_event


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("unix:///run/p.sock", UnixAddress(Path("/run/p.sock"))),
        ("unix:///a%20b", UnixAddress(Path("/a b"))),
        ("http://127.0.0.1:9000", TcpAddress("127.0.0.1", 9000)),
        ("http://[::1]:9000/", TcpAddress("::1", 9000)),
        ("http://localhost", TcpAddress("localhost", 8000)),
        ("https://box.lan:8443/v1", TcpAddress("box.lan", 8443, is_tls=True)),
        ("https://box.lan", TcpAddress("box.lan", 443, is_tls=True)),
        ("http://localhost:9000/v1", TcpAddress("localhost", 9000)),
        ("http://localhost:9000/v1/", TcpAddress("localhost", 9000)),
        ("ssh://box", SshAddress("box")),
        ("ssh://ann@box:22/run/p.sock", SshAddress("ann@box", 22, "/run/p.sock")),
    ],
)
def test_an_address_is_a_url(text, address):
    assert parse(text, where="x") == address
    assert parse(str(address), where="x") == address or "%20" in text


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:8000", TcpAddress("127.0.0.1", 8000)),
        ("[::1]:8000", TcpAddress("::1", 8000)),
        ("box.lan:80", TcpAddress("box.lan", 80)),
        ("/run/p.sock:80", UnixAddress(Path("/run/p.sock:80"))),
        ("/run/p.sock", UnixAddress(Path("/run/p.sock"))),
    ],
)
def test_a_host_and_a_port_need_no_scheme(text, address):
    assert find(None, {"PENSTOCK_HOST": text}) == address
    assert find(text, {}) == address


@pytest.mark.parametrize(
    "text",
    [
        "unix://p.sock",
        "ftp://x",
        "http://",
        "http://x:port",
        "http://\x01",
        "http://a b:80",
        "http://x/path",
        "ssh://",
        "https://x/path",
    ],
)
def test_what_is_no_address_is_refused_with_the_forms_there_are(text):
    with pytest.raises(ConfigError) as refusal:
        parse(text, where="PENSTOCK_HOST")
    assert "PENSTOCK_HOST" in str(refusal.value)
    assert "ssh://" in refusal.value.hint


@given(st.text())
def test_no_text_is_more_than_refused(text):
    with suppress(ConfigError):
        parse(text, where="x")


def test_the_flag_comes_before_the_environment_and_a_path_is_a_socket():
    environ = {"PENSTOCK_HOST": "http://localhost:1", "PENSTOCK_SOCKET": "/s.sock"}
    assert find("ssh://box", environ) == SshAddress("box")
    assert find("/p.sock", environ) == UnixAddress(Path("/p.sock"))
    assert find(None, environ) == TcpAddress("localhost", 1)
    assert find(None, {"PENSTOCK_SOCKET": "/s.sock"}) == UnixAddress(Path("/s.sock"))


def test_ssh_gets_words_that_its_shell_cannot_take_for_more():
    command = SshAddress("ann@box", 22, "/a; rm b").command("top", options=("-t",))
    assert command[:6] == ["ssh", "-p", "22", "-t", "--", "ann@box"]
    assert shlex.split(" ".join(command[6:])) == ["penstock", "top", "--host", "/a; rm b"]


class _TcpDaemon(ThreadingHTTPServer):
    """The fake daemon on TCP, where it lets in whoever has the key."""

    script = Script()


class _KeyHandler(_Handler):
    def _answer(self, body: dict[str, Any] | None) -> None:
        if self.headers.get("Authorization") == "Bearer k":
            super()._answer(body)
        else:
            self._reply(401, {"error": {"message": "a key is needed", "code": None}})


@pytest.fixture
def tcp() -> Iterator[TcpAddress]:
    with _TcpDaemon(("127.0.0.1", 0), _KeyHandler) as server:
        server.script.replies = {"GET /version": (200, {"version": "9"})}
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield TcpAddress("127.0.0.1", server.server_address[1])
        server.shutdown()
        thread.join()


def test_tcp_takes_the_key_from_the_environment(tcp, monkeypatch):
    monkeypatch.setenv("PENSTOCK_API_KEY", "k")
    assert Client(tcp).get("/version") == {"version": "9"}
    monkeypatch.delenv("PENSTOCK_API_KEY")
    with pytest.raises(ReplyError) as refusal:
        Client(tcp).get("/version")
    assert refusal.value.exit_code == 4
    assert "PENSTOCK_API_KEY" in refusal.value.hint


def test_tcp_takes_the_key_out_of_the_address_before_the_environments(tcp, monkeypatch):
    monkeypatch.setenv("PENSTOCK_API_KEY", "another")
    for text in (f"http://x:k@127.0.0.1:{tcp.port}", f"x:k@127.0.0.1:{tcp.port}"):
        address = find(text, {})
        assert Client(address).get("/version") == {"version": "9"}
        assert ":k" not in f"{address} {address!r}"


@pytest.mark.parametrize(
    "text",
    [
        "http://x:SE/CRET@box:8000",
        "http://x:secret@box:port",
        "http://secret@box",
        "https://x:SECRET@box/PATH",
        "ssh://x:secret@box",
        "x:secret@box:99999",
    ],
)
def test_an_address_that_is_refused_does_not_show_its_key(text):
    with pytest.raises(ConfigError) as refusal:
        find(text, {})
    assert "cret" not in f"{refusal.value} {refusal.value.hint}".lower()
    assert refusal.value.__suppress_context__ or refusal.value.__context__ is None


def test_a_key_that_no_header_can_carry_is_refused_and_not_quoted(tcp, monkeypatch):
    monkeypatch.setenv("PENSTOCK_API_KEY", "secret\n")
    with pytest.raises(ConfigError) as refusal:
        Client(tcp).get("/version")
    assert "secret" not in str(refusal.value)


class _Elsewhere(socket.socket):
    """A connection to this machine that seems to lead to another."""

    def getpeername(self):
        return "192.0.2.7", 80


@pytest.mark.parametrize("told", [False, True])
def test_no_key_goes_to_another_machine_in_clear_unless_that_is_said(tcp, monkeypatch, told):
    def connect(where, timeout_s):
        made = _Elsewhere(socket.AF_INET, socket.SOCK_STREAM)
        made.connect(where)
        return made

    monkeypatch.setattr(socket, "create_connection", connect)
    monkeypatch.setenv("PENSTOCK_API_KEY", "k")
    if told:
        monkeypatch.setenv("PENSTOCK_INSECURE", "1")
        assert Client(tcp).get("/version") == {"version": "9"}
        return
    before = list(_TcpDaemon.script.asked)
    with pytest.raises(KeyInClear) as refusal:
        Client(tcp).get("/version")
    assert "192.0.2.7" in str(refusal.value)
    assert "PENSTOCK_INSECURE" in refusal.value.hint
    assert _TcpDaemon.script.asked == before
    monkeypatch.delenv("PENSTOCK_API_KEY")
    with pytest.raises(ReplyError):  # without a key there is nothing to protect
        Client(tcp).get("/version")


@pytest.mark.parametrize(
    ("address", "is_here"),
    [
        *(("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("::ffff:127.0.0.1", True)),
        *(("10.0.0.1", False), ("::ffff:10.0.0.1", False), ("fe80::1%eth0", False)),
        *(("192.168.1.1", False), ("::", False), ("0.0.0.0", False), ("1.1.1.1", False)),
    ],
)
def test_which_addresses_are_this_machines(address, is_here):
    assert is_loopback(address) is is_here


def test_nobody_on_tcp_is_no_daemon():
    with _TcpDaemon(("127.0.0.1", 0), _KeyHandler) as server:
        port = server.server_address[1]
    with pytest.raises(DaemonUnreachable):
        Client(TcpAddress("127.0.0.1", port)).get("/version")


@pytest.fixture
def ssh_environ(tmp_path: Path) -> dict[str, str]:
    """A user whose ssh runs the command on this machine, after it has noted its arguments."""
    programs = tmp_path / "bin"
    programs.mkdir()
    penstock_there = f"{shlex.quote(sys.executable)} -m appliance.cli"
    _program(programs / "penstock", f'exec {penstock_there} "$@"')
    _program(
        programs / "ssh",
        f'echo "$@" >> {tmp_path}/ssh.log\nwhile [ "$1" != -- ]; do shift; done\n'
        'shift 2\nunset PENSTOCK_HOST\neval "$@"',
    )
    environ = user_environ(tmp_path)
    environ["PATH"] = f"{programs}:{environ['PATH']}"
    environ["PENSTOCK_HOST"] = "ssh://ann@box"
    return environ


def _program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_ssh_carries_a_call_and_a_stream(tmp_path, ssh_environ):
    with FakeDaemon(tmp_path / "p.sock") as daemon:
        daemon.script.replies = {"GET /v1/requests": (200, {"data": []})}
        assert penstock(ssh_environ, "ps", "-o", "csv").returncode == 0
        daemon.script.events = [text_event("a"), text_event("b", "stop"), b"data: [DONE]"]
        ended = penstock(ssh_environ, "run", "p")
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, "ab\n", "")
    calls = ["-T -- ann@box penstock dial-stdio"] * 3  # run asks for the models, too
    assert (tmp_path / "ssh.log").read_text().splitlines() == calls


def test_the_daemon_sees_the_far_client_hang_up(tmp_path, ssh_environ):
    with FakeDaemon(tmp_path / "p.sock") as daemon:
        daemon.script.events = [text_event("x" * 1000) for _ in range(2000)]
        running = start(ssh_environ, "run", "p")
        assert running.stdout is not None
        assert running.stderr is not None
        assert running.stdout.read(1) == b"x"
        running.stdout.close()
        running.stderr.close()
        assert running.wait(120) == 141
        assert daemon.script.cancelled.is_set()


def test_no_daemon_behind_ssh_is_said_by_the_machine_it_is_missing_on(ssh_environ):
    ended = penstock(ssh_environ, "status")
    assert ended.returncode == 3
    assert "unix://" in ended.stderr.splitlines()[0]
    assert "ssh://ann@box" in ended.stderr


def test_no_ssh_is_an_error_with_words(tmp_path):
    environ = {**user_environ(tmp_path), "PATH": str(tmp_path), "PENSTOCK_HOST": "ssh://box"}
    ended = penstock(environ, "status")
    assert ended.returncode == 3
    assert "cannot run ssh" in ended.stderr


def test_the_console_runs_on_the_far_machine(tmp_path, ssh_environ):
    _program(tmp_path / "bin" / "penstock", 'echo "$@"')
    ended = penstock(ssh_environ, "top", "--once")
    assert ended.stdout == "top --once\n"


def test_the_console_cannot_use_tcp(tmp_path):
    ended = penstock({**user_environ(tmp_path), "PENSTOCK_HOST": "http://127.0.0.1:1"}, "top")
    assert ended.returncode == 2
    assert "ssh://" in ended.stderr


def test_dial_stdio_ends_with_either_side(tmp_path):
    with FakeDaemon(tmp_path / "p.sock") as daemon:
        daemon.script.replies = {"GET /a": (200, {"x": 1})}
        ended = subprocess.run(
            [sys.executable, "-m", "appliance.cli", "dial-stdio"],
            env=user_environ(tmp_path),
            input=b"GET /a HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
            capture_output=True,
            timeout=120,
            cwd=ROOT,
            check=True,
        )
    assert ended.stdout.endswith(b'{"x": 1}')
    assert os.path.exists(tmp_path / "p.sock")
