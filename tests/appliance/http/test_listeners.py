"""Sockets that are made, taken over and closed; TLS; one daemon at a time."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import stat
import subprocess
import sys

import pytest

from appliance.configuration import paths
from appliance.http import listeners
from appliance.http.listeners import (
    Acceptor,
    ListenerCloser,
    bind_socket,
    bind_tcp,
    check_path,
    open_listeners,
)
from engine.errors import ConfigError, PenstockError
from tests.worlds.daemon_parts import until


@pytest.fixture(params=[0o000, 0o077])
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode_of(path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_socket_is_for_owner_and_group_whatever_the_umask(tmp_path, umask):
    path = tmp_path / "api.sock"
    with bind_socket(path):
        assert mode_of(path) == 0o660


def test_the_socket_file_is_never_wider_than_that(tmp_path, monkeypatch):
    """What bind() itself leaves behind, before anything after it has run."""
    before = os.umask(0)
    seen = []
    monkeypatch.setattr("os.chmod", lambda path, mode: seen.append(mode_of(path)))
    try:
        bind_socket(tmp_path / "api.sock").close()
    finally:
        os.umask(before)
    assert seen == [0o660]


def test_a_socket_that_nobody_answers_is_replaced(tmp_path):
    path = tmp_path / "api.sock"
    bind_socket(path).close()
    with bind_socket(path), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_a_path_that_can_be_no_socket_is_found_before_anything_is_made(tmp_path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / ("x" * 200)):
        with pytest.raises(ConfigError):
            check_path(path)
    check_path(tmp_path / "run" / "p.sock")


def test_a_live_socket_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "api.sock"
    with bind_socket(path):
        with pytest.raises(PenstockError, match="another daemon") as error:
            bind_socket(path)
        assert error.value.where == str(path)
        assert error.value.hint
        assert error.value.exit_code == 9
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_what_is_not_a_socket_is_not_touched(tmp_path, kind):
    path = tmp_path / "api.sock"
    if kind == "file":
        path.write_text("precious")
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="not a socket"):
        bind_socket(path)
    assert path.is_symlink() or path.exists()


def test_a_path_that_is_too_long_is_named(tmp_path):
    path = tmp_path / ("x" * 120)
    with pytest.raises(ConfigError, match="longer than 107 bytes") as error:
        bind_socket(path)
    assert error.value.where == str(path)


@pytest.mark.parametrize("folder", ["file", "nowhere"])
def test_a_folder_that_is_none_is_a_config_error(tmp_path, folder):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot listen there"):
        bind_socket(tmp_path / folder / "api.sock")


RACER = """
import sys, time
from pathlib import Path
from appliance.http.listeners import bind_socket
from engine.errors import PenstockError
sys.stdin.read(1)
try:
    listener = bind_socket(Path(sys.argv[1]))
except PenstockError:
    print("lost", flush=True)
else:
    print("won", flush=True)
    sys.stdin.read()
"""


def test_of_daemons_that_race_for_a_stale_socket_one_wins(tmp_path):
    path = tmp_path / "api.sock"
    bind_socket(path).close()
    command = [sys.executable, "-c", RACER, str(path)]
    racers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(6)
    ]
    for racer in racers:
        racer.stdin.write(b"\n")
        racer.stdin.flush()
    verdicts = [racer.stdout.readline().strip() for racer in racers]
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    for racer in racers:
        racer.communicate(timeout=120)
    assert sorted(verdicts) == [b"lost"] * 5 + [b"won"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["api.sock"]


def test_a_folder_that_someone_keeps_locked_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(listeners, "LOCK_PATIENCE_S", 0.05)
    folder_fd = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(folder_fd, fcntl.LOCK_EX)
    with pytest.raises(PenstockError, match="locked") as error:
        bind_socket(tmp_path / "api.sock")
    os.close(folder_fd)
    assert error.value.where == str(tmp_path)


def test_a_folder_that_others_can_open_they_cannot_keep_locked(tmp_path, monkeypatch):
    monkeypatch.setattr(listeners, "LOCK_PATIENCE_S", 0.05)
    monkeypatch.setattr(paths, "TEMPORARY_DIR", tmp_path / "tmp")
    (tmp_path / "tmp").mkdir()
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o1755)
    folder_fd = os.open(shared, os.O_RDONLY)
    fcntl.flock(folder_fd, fcntl.LOCK_EX)
    bind_socket(shared / "api.sock").close()
    own = tmp_path / "tmp" / f"penstock-{os.getuid()}"
    assert mode_of(own) == 0o700
    own.chmod(0o777)
    with pytest.raises(ConfigError):  # another user's, perhaps
        bind_socket(shared / "other.sock")
    os.close(folder_fd)


def test_a_listener_takes_its_file_with_it(tmp_path):
    path = tmp_path / "api.sock"
    closer = ListenerCloser(bind_socket(path))
    closer.close()
    assert not path.exists()
    with bind_socket(path):
        closer.close()
        assert path.exists()


def test_a_file_that_is_anothers_by_now_is_left(tmp_path):
    path = tmp_path / "api.sock"
    closer = ListenerCloser(bind_socket(path))
    path.unlink()
    with bind_socket(path):
        closer.close()
        assert path.exists()


@pytest.mark.parametrize(("host", "ends"), [("127.0.0.1", 1), ("localhost", 2)])
def test_tcp_is_loopback_and_localhost_is_both_families(host, ends):
    bound = bind_tcp(host, 0)
    ports = {listener.getsockname()[1] for listener in bound}
    for listener in bound:
        assert listener.getsockname()[0] in ("127.0.0.1", "::1")
        with socket.create_connection(listener.getsockname()[:2]):
            pass
        listener.close()
    assert len(ports) == 1
    assert 1 <= len(bound) <= ends


def test_a_taken_port_leaves_no_socket_file(tmp_path):
    path = tmp_path / "api.sock"
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError):
        open_listeners(path, taken.getsockname(), kept=())
    assert not path.exists()


def test_a_taken_port_is_a_config_error():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}.*in use") as error:
            bind_tcp("127.0.0.1", port)
        assert error.value.where == "listen"
        with pytest.raises(ConfigError):
            bind_tcp("localhost", port)


async def test_on_tcp_a_short_reply_does_not_wait_for_an_acknowledgement():
    (listener,) = bind_tcp("127.0.0.1", 0)
    accepted = asyncio.Queue()
    acceptor = Acceptor(listener, accepted.put_nowait, lambda: None)
    with listener, socket.create_connection(listener.getsockname()):
        connection = await asyncio.wait_for(accepted.get(), 120)
        acceptor.close()
    with connection:
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def connected(path, num, data):
    clients = []
    for _ in range(num):
        clients.append(socket.socket(socket.AF_UNIX))
        clients[-1].connect(str(path))
        clients[-1].sendall(data)
    return clients


@pytest.fixture
async def begun(tmp_path):
    """An acceptor before its first turn, and what has begun, by its first byte."""
    listener, begun = bind_socket(tmp_path / "s"), []

    def begin(connection):
        with contextlib.suppress(BlockingIOError):
            begun.append(connection.recv(1))
        connection.close()

    acceptor = Acceptor(listener, begin, lambda: None)
    yield tmp_path / "s", begun, acceptor
    acceptor.close()
    listener.close()


async def test_a_connection_that_reads_begins_before_those_that_came_first(begun):
    path, found, _acceptor = begun
    clients = connected(path, 50, b"POST") + connected(path, 1, b"GET ")
    await until(lambda: len(found) == 51)
    assert found.index(b"G") == 0
    for each in clients:
        each.close()


async def test_silent_connections_begin_too_and_all_that_are_accepted_when_it_closes(begun):
    path, found, acceptor = begun
    silent, loud = connected(path, 3, b""), connected(path, 40, b"POST")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert 0 < len(found) < 40
    acceptor.close()
    assert found == [b"P"] * 40
    assert [each.recv(1) for each in silent] == [b""] * 3  # begun, and closed as nothing had come
    for each in silent + loud:
        each.close()
