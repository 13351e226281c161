"""Who is let in, as what, by the socket's peer or by a key; what the gate refuses."""

from __future__ import annotations

import grp
import os
import pwd
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from appliance.configuration.settings import ServeConfig
from appliance.daemon.requests.request import Role
from appliance.http.access import (
    AccessPolicy,
    Credentials,
    UserDirectory,
    credentials_of,
    program_of,
)
from appliance.http.api_keys import key_digest, new_key
from engine.errors import ConfigError

STRANGER = Credentials(uid=54321, gid=54321, pid=1, gids=frozenset({54321, 777}))


@pytest.fixture
def config(tmp_path):
    def config(**settings):
        return ServeConfig(socket=tmp_path / "s", state_dir=tmp_path, model=tmp_path, **settings)

    return config


def test_whoever_the_kernel_knows_and_nobody_named_is_a_user():
    peer = AccessPolicy().peer_of(STRANGER)
    assert (peer.role, peer.user, peer.name) == (Role.USER, None, "uid:54321")


def test_root_and_the_daemons_own_user_are_operators_always():
    policy = AccessPolicy(viewers=UserDirectory(uids=frozenset({0, os.geteuid()})))
    for uid in (0, os.geteuid()):
        assert policy.peer_of(Credentials(uid, 1, 1, frozenset())).role is Role.OPERATOR


def test_root_and_the_daemons_own_user_are_operators_also_where_they_are_two(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    roles = [
        AccessPolicy().peer_of(Credentials(uid, 1, 1, frozenset())).role for uid in (0, 1234, 1)
    ]
    assert roles == [Role.OPERATOR, Role.OPERATOR, Role.USER]


def test_users_and_groups_get_the_role_they_are_named_for():
    by_uid = UserDirectory(uids=frozenset({54321}))
    by_group = UserDirectory(gids=frozenset({777}))
    for people in (by_uid, by_group):
        assert AccessPolicy(operators=people).peer_of(STRANGER).role is Role.OPERATOR
        assert AccessPolicy(viewers=people).peer_of(STRANGER).role is Role.VIEWER
    assert AccessPolicy(operators=by_group, viewers=by_uid).peer_of(STRANGER).role is Role.OPERATOR


def test_names_become_numbers_and_the_defaults_group_need_not_exist():
    user, group = pwd.getpwall()[-1], grp.getgrall()[-1]
    names = [user.pw_name, f"@{group.gr_name}", "@penstock-admin"]
    people = UserDirectory.named(names, "operators")
    assert people.uids == {user.pw_uid}
    assert group.gr_gid in people.gids


@pytest.mark.parametrize(("name", "kind"), [("no-such-user", "user"), ("@no-such-group", "group")])
def test_a_name_that_nobody_has_is_refused_and_not_left_out(name, kind):
    with pytest.raises(ConfigError, match=f"no {kind} 'no-such-{kind}'") as error:
        UserDirectory.named([name], "viewers")
    assert error.value.where == "viewers"


def test_tcp_without_keys_is_a_config_error_that_says_how_to_make_one(config):
    with pytest.raises(ConfigError) as error:
        AccessPolicy.from_config(config(listen=("127.0.0.1", 0)), {})
    assert error.value.where == "listen"
    assert "penstock keys add" in error.value.hint
    assert AccessPolicy.from_config(config(), {}).keys == ()


def test_keys_come_from_the_named_file_or_from_systemd(config, tmp_path):
    key, line = new_key("named", "viewer")
    named = tmp_path / "keys"
    named.write_text(line)
    named.chmod(0o600)
    credential, credential_line = new_key("systemd")
    (tmp_path / "api-keys").write_text(credential_line)
    (tmp_path / "api-keys").chmod(0o400)
    environ = {"CREDENTIALS_DIRECTORY": str(tmp_path)}
    policy = AccessPolicy.from_config(config(api_keys=named, listen=("::1", 1)), environ)
    peer = policy.holder_of(key_digest(key))
    assert (peer.name, peer.role, peer.uid) == ("key:named", Role.VIEWER, None)
    assert policy.holder_of(key_digest(credential)) is None
    policy = AccessPolicy.from_config(config(listen=("::1", 1)), environ)
    assert policy.holder_of(key_digest(credential)).name == "key:systemd"
    assert policy.holder_of(key_digest("")) is None


def test_a_tcp_connection_says_nothing_of_who_it_is():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
        with client, accepted:
            assert credentials_of(accepted) is None


def test_we_are_ourselves_at_both_ends():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        who = credentials_of(ours)
    assert (who.uid, who.gid, who.pid) == (os.getuid(), os.getgid(), os.getpid())
    assert who.gids == {os.getgid(), *os.getgroups()}


def test_a_client_is_its_program_by_name_and_number_and_never_by_its_arguments(tmp_path):
    script = "import socket,sys; c = socket.socket(1); c.connect(sys.argv[1]); c.recv(1)"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        command = [sys.executable, "-c", script, str(tmp_path / "s"), "secret"]
        client = subprocess.Popen(command)
        accepted, _ = listener.accept()
        with accepted:
            who = credentials_of(accepted)
            name = Path(f"/proc/{client.pid}/comm").read_text().strip()
            client.kill()
            os.waitid(os.P_PID, client.pid, os.WEXITED | os.WNOWAIT)  # its name can still be read
            ended = credentials_of(accepted)
            client.wait()
            later = credentials_of(accepted)
    assert AccessPolicy().peer_of(who).client == f"{name} {client.pid}"
    assert (ended.program, later.program) == (None, None), "its number may be another's by now"
    assert AccessPolicy().peer_of(later).client == f"pid {client.pid}"


def test_a_programs_name_is_one_word_without_what_moves_a_cursor(monkeypatch):
    ours, theirs = socket.socketpair()
    with ours, theirs, monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", lambda _: b"a b\x1b[2J\xff\n")
        assert program_of(ours, os.getpid(), os.getuid()) == "a_b_[2J\ufffd"


def connect_with_groups(path, groups):
    script = "import socket,sys; c = socket.socket(1); c.connect(sys.argv[1]); c.recv(1)"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        client = subprocess.Popen([sys.executable, "-c", script, str(path)], extra_groups=groups)
        accepted, _ = listener.accept()
        with accepted:
            who = credentials_of(accepted)
    assert client.wait(120) == 0
    assert who.pid == client.pid
    return who


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be someone else")
def test_numbers_of_users_beyond_half_of_them_are_what_they_are():
    """Directories of large companies give them out."""
    large = 3_000_000_000
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind(f"\0penstock-test-{os.getpid()}")  # which a stranger can reach
        listener.listen()
        if (child := os.fork()) == 0:
            os.setgroups([large + 1])
            os.setgid(large)
            os.setuid(large)
            os._exit(client.connect_ex(listener.getsockname()))
        assert os.waitpid(child, 0)[1] == 0
        accepted, _ = listener.accept()
        with accepted:
            who = credentials_of(accepted)
    assert (who.uid, who.gid, who.gids) == (large, large, {large, large + 1})
    policy = AccessPolicy(viewers=UserDirectory(uids=frozenset({large})))
    assert (policy.peer_of(who).role, policy.peer_of(who).name) == (Role.VIEWER, f"uid:{large}")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be someone else")
@pytest.mark.parametrize("num_groups", [0, 3, 200])
def test_all_of_a_clients_groups_are_known(tmp_path, num_groups):
    groups = list(range(60000, 60000 + num_groups))
    assert connect_with_groups(tmp_path / "s", groups).gids == {os.getgid(), *groups}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be someone else")
def test_of_very_many_groups_those_of_the_user_database_count(tmp_path):
    name = pwd.getpwuid(os.getuid()).pw_name
    who = connect_with_groups(tmp_path / "s", list(range(60000, 60500)))
    assert who.gids == {os.getgid(), *os.getgrouplist(name, os.getgid())}
