"""Who is let in, as what, by the socket's peer or by a key; what the gate refuses."""

from __future__ import annotations

import asyncio
import dataclasses
import grp
import hashlib
import os
import pwd
import re
import socket
import subprocess
import sys

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.api.routes import build_app
from appliance.configuration.config import ServeConfig
from appliance.http.access import (
    LOCAL_USER,
    AccessPolicy,
    Credentials,
    UserDirectory,
    credentials_of,
)
from appliance.http.api_keys import ApiKey, add_key, find_key, new_key, read_keys
from appliance.http.listeners import bind_tcp
from appliance.http.server import ApiServer
from appliance.request import Role
from engine.errors import ConfigError
from engine.text.tokenizer import Tokenizer
from tests.fakes import FakeAppliance
from tests.tiny_tokenizers import byte_level

STRANGER = Credentials(uid=54321, gid=54321, pid=1, gids=frozenset({54321, 777}))


@pytest.fixture
def config(tmp_path):
    def config(**settings):
        return ServeConfig(tmp_path / "s", tmp_path, tmp_path, **settings)

    return config


def test_whoever_the_kernel_knows_and_nobody_named_is_a_user():
    peer = AccessPolicy().peer_of(STRANGER)
    assert (peer.role, peer.user, peer.name) == (Role.USER, None, "uid:54321")


def test_root_and_the_daemons_own_user_are_operators_always():
    policy = AccessPolicy(viewers=UserDirectory(uids=frozenset({0, os.geteuid()})))
    for uid in (0, os.geteuid()):
        assert policy.peer_of(Credentials(uid, 1, 1, frozenset())).role is Role.OPERATOR


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
    peer = policy.holder_of(key)
    assert (peer.name, peer.role, peer.uid) == ("key:named", Role.VIEWER, None)
    assert policy.holder_of(credential) is None
    policy = AccessPolicy.from_config(config(listen=("::1", 1)), environ)
    assert policy.holder_of(credential).name == "key:systemd"
    assert policy.holder_of("") is None


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
@pytest.mark.parametrize("num_groups", [0, 3, 200])
def test_all_of_a_clients_groups_are_known(tmp_path, num_groups):
    groups = list(range(60000, 60000 + num_groups))
    assert connect_with_groups(tmp_path / "s", groups).gids == {os.getgid(), *groups}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be someone else")
def test_of_very_many_groups_those_of_the_user_database_count(tmp_path):
    name = pwd.getpwuid(os.getuid()).pw_name
    who = connect_with_groups(tmp_path / "s", list(range(60000, 60500)))
    assert who.gids == {os.getgid(), *os.getgrouplist(name, os.getgid())}


# --------------------------------------------------------------------------------------------------
#


@pytest.fixture
def write(tmp_path):
    def write(text, mode=0o600):
        path = tmp_path / "api-keys"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        path.chmod(mode)
        return path

    return write


def test_a_new_keys_line_lets_that_key_in_and_no_other(write):
    key, line = new_key("ann", "operator")
    other, other_line = new_key("bob")
    assert key not in line
    keys = read_keys(write(f"# people\n\n{line}  # until May\n{other_line}\n"))
    assert (find_key(keys, key).name, find_key(keys, key).role) == ("ann", Role.OPERATOR)
    assert (find_key(keys, other).name, find_key(keys, other).role) == ("bob", Role.USER)
    assert find_key(keys, key + " ") is None
    assert find_key(keys, line.split(":")[1]) is None
    assert find_key((), key) is None


def test_keys_have_256_bits_and_are_plain_ascii():
    keys = {new_key("a")[0] for _ in range(50)}
    assert len(keys) == 50
    assert all(re.fullmatch(r"penstock-[A-Za-z0-9_-]{43}", key) for key in keys)


@given(made_up=st.text(), digest=st.binary(min_size=32, max_size=32))
def test_a_key_is_what_has_the_digest_and_nothing_else(made_up, digest):
    real = hashlib.sha256(made_up.encode(errors="surrogateescape")).digest()
    keys = (ApiKey("other", Role.USER, digest), ApiKey("real", Role.USER, real))
    assert find_key(keys, made_up) is keys[1]
    assert find_key(keys[:1], made_up) is None


@pytest.mark.parametrize(
    ("name", "role", "where"),
    [("a b", "user", "NAME"), ("", "user", "NAME"), ("a", "root", "--role")],
)
def test_a_key_that_no_file_could_hold_is_not_made(name, role, where):
    with pytest.raises(ConfigError) as error:
        new_key(name, role)
    assert error.value.where == where


GOOD = "sha256:" + "0a" * 32


@pytest.mark.parametrize(
    ("line", "about"),
    [
        ("ann user", "2 fields"),
        (f"ann root {GOOD}", "viewer, user, operator"),
        (f"a/b user {GOOD}", "name"),
        ("ann user sha256:0a", "64"),
        ("ann user penstock-secret", "hash"),
        (f"first user {GOOD}", "taken"),
    ],
)
def test_a_wrong_line_is_named_by_its_number_but_not_quoted(write, line, about):
    path = write(f"first user {GOOD}\n# comment\n{line}\n")
    with pytest.raises(ConfigError, match=about) as error:
        read_keys(path)
    assert error.value.where == f"{path}:3"
    assert "penstock keys add" in error.value.hint
    assert "secret" not in str(error.value) + error.value.hint


def test_a_key_is_added_to_a_file_for_its_owner_alone_and_no_name_twice(tmp_path):
    path = tmp_path / "keys"
    keys = {name: add_key(path, name, role) for name, role in (("a", "user"), ("b", "viewer"))}
    assert path.stat().st_mode & 0o777 == 0o600
    assert {name: find_key(read_keys(path), key).name for name, key in keys.items()} == {
        "a": "a",
        "b": "b",
    }
    before = path.read_text()
    with pytest.raises(ConfigError, match="named 'a'") as error:
        add_key(path, "a")
    assert (error.value.where, path.read_text()) == (str(path), before)


def test_a_key_is_added_after_a_line_without_an_end(write):
    path = write(f"first user {GOOD}")
    add_key(path, "second")
    assert [key.name for key in read_keys(path)] == ["first", "second"]


def test_a_file_that_others_may_write_is_refused(write):
    for mode in (0o620, 0o602):
        with pytest.raises(ConfigError, match=f"mode {mode:04o}") as error:
            read_keys(write("", mode))
        assert "chmod go-w" in error.value.hint
    assert read_keys(write("", 0o644)) == ()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_of_someone_else_is_refused(write):
    path = write("")
    os.chown(path, 12345, -1)
    with pytest.raises(ConfigError, match="uid 12345"):
        read_keys(path)


def test_what_is_not_a_file_of_keys_is_refused(write, tmp_path):
    for path, about in (
        (tmp_path / "none", "cannot read"),
        (tmp_path, "cannot read"),
        (write(b"\xff\xfe"), "UTF-8"),
    ):
        with pytest.raises(ConfigError, match=about) as error:
            read_keys(path)
        assert error.value.where == str(path)
    with pytest.raises(ConfigError, match="larger"):
        read_keys(write("#" * (1 << 21)))


# --------------------------------------------------------------------------------------------------
#

PAGE = {"origin": "https://app.example"}
ASKS = {
    **PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


@pytest.fixture
async def served(tmp_path):
    """A server on TCP, a client with a key, and the server's policy."""
    key, line = new_key("page", "user")
    path = tmp_path / "keys"
    path.write_text(line)
    path.chmod(0o600)
    listeners = bind_tcp("127.0.0.1", 0)
    app = build_app(FakeAppliance(Tokenizer(byte_level())))
    server = ApiServer(app, listeners, AccessPolicy(keys=read_keys(path)))
    await server.start()
    url = f"http://127.0.0.1:{listeners[0].getsockname()[1]}"
    async with httpx.AsyncClient(base_url=url) as client:
        yield server, client, {"authorization": f"Bearer {key}"}
    await server.stop(grace_s=1.0)


async def test_where_no_key_is_asked_for_programs_are_users_and_other_sites_pages_nobody(served):
    server, client, _ = served
    assert (await client.get("/v1/models")).status_code == 401
    server.policy = dataclasses.replace(server.policy, asks_for_keys=False)
    for headers in ({}, {"authorization": "Bearer EMPTY"}, {"origin": "http://localhost:3000"}):
        assert (await client.get("/v1/models", headers=headers)).status_code == 200
    told = (await client.get("/v1/penstock/whoami")).json()
    assert (told["role"], told["name"]) == ("user", LOCAL_USER)
    assert (await client.post("/v1/penstock/drain")).status_code == 403
    for headers, code in (
        (PAGE, "origin_not_allowed"),
        ({"origin": "null"}, "origin_not_allowed"),
        ({"origin": "http://localhost.evil.example"}, "origin_not_allowed"),
        ({"host": "evil.example"}, "host_not_allowed"),
    ):
        reply = await client.get("/v1/models", headers=headers)
        assert (reply.status_code, reply.json()["error"]["code"]) == (403, code)
    server.policy = dataclasses.replace(server.policy, cors_origins=(PAGE["origin"],))
    assert (await client.get("/v1/models", headers=PAGE)).status_code == 200


LOCAL = b"Host: localhost"


@pytest.mark.parametrize(
    ("version", "headers", "status"),
    [
        (b"1.1", [LOCAL], 200),
        (b"1.1", [LOCAL, b"Sec-Fetch-Site: none"], 200),
        (b"1.1", [LOCAL, b"Sec-Fetch-Site: cross-site", b"Origin: http://127.0.0.1:3000"], 200),
        (b"1.1", [LOCAL, b"Sec-Fetch-Site: cross-site"], 403),
        (b"1.1", [LOCAL, b"Origin: http://localhost", b"Origin: http://localhost"], 403),
        (b"1.1", [LOCAL, b"Origin: https://evil.example", b"Origin: http://localhost"], 403),
        (b"1.1", [b"Host:"], 403),
        (b"1.0", [], 403),
        (b"1.0", [LOCAL], 200),
    ],
)
async def test_without_keys_a_request_shows_that_no_foreign_page_sent_it(
    served, version, headers, status
):
    server, client, _ = served
    server.policy = dataclasses.replace(server.policy, asks_for_keys=False)
    reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
    head = [b"GET /v1/models HTTP/" + version, *headers, b"Connection: close"]
    writer.write(b"\r\n".join([*head, b"", b""]))
    assert int((await reader.read()).split()[1]) == status
    writer.close()


async def test_with_a_key_no_host_header_is_needed_and_health_needs_neither(served):
    _server, client, key = served
    shown = f"Authorization: {key['authorization']}".encode()
    for path, headers in ((b"/v1/models", [shown]), (b"/health", [])):
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        writer.write(b"\r\n".join([b"GET " + path + b" HTTP/1.0", *headers, b"", b""]))
        assert int((await reader.read()).split()[1]) == 200
        writer.close()


def test_a_socket_units_port_always_asks_for_keys():
    with pytest.raises(ConfigError):
        AccessPolicy(asks_for_keys=False).check_tcp("ListenStream")


async def test_without_the_setting_no_page_is_answered(served):
    _server, client, key = served
    asked = await client.options("/v1/models", headers=ASKS)
    assert asked.status_code == 401
    reply = await client.get("/v1/models", headers=PAGE | key)
    assert "access-control-allow-origin" not in reply.headers


@pytest.mark.parametrize("origin", ["https://app.example", "*"])
async def test_an_allowed_page_asks_without_a_key_and_reads_with_one(served, origin):
    server, client, key = served
    server.policy = dataclasses.replace(server.policy, cors_origins=(origin,))
    asked = await client.options("/v1/models", headers=ASKS)
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] == "https://app.example"
    assert asked.headers["access-control-allow-headers"] == "authorization,content-type"
    reply = await client.get("/v1/models", headers=PAGE | key)
    assert reply.headers["access-control-allow-origin"] == "https://app.example"
    assert "x-request-id" in reply.headers["access-control-expose-headers"]
    assert (await client.get("/v1/models", headers=PAGE)).status_code == 401


async def test_another_page_is_not_answered(served):
    server, client, key = served
    server.policy = dataclasses.replace(server.policy, cors_origins=("https://app.example",))
    other = {"origin": "https://evil.example"}
    assert (await client.options("/v1/models", headers=ASKS | other)).status_code == 401
    reply = await client.get("/v1/models", headers=other | key)
    assert "access-control-allow-origin" not in reply.headers
