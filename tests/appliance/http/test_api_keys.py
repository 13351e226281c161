"""A file of keys is read whole or refused with its line."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import resource
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.daemon.requests.request import Role
from appliance.http.api_keys import ApiKey, add_key, find_key, key_digest, new_key, read_keys
from engine.errors import ConfigError


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
    found, other_found = (find_key(keys, key_digest(each)) for each in (key, other))
    assert (found.name, found.role) == ("ann", Role.OPERATOR)
    assert (other_found.name, other_found.role) == ("bob", Role.USER)
    assert find_key(keys, key_digest(key + " ")) is None
    assert find_key(keys, key_digest(line.split(":")[1])) is None
    assert find_key((), key_digest(key)) is None


def test_keys_have_256_bits_and_are_plain_ascii():
    keys = {new_key("a")[0] for _ in range(50)}
    assert len(keys) == 50
    assert all(re.fullmatch(r"penstock-[A-Za-z0-9_-]{43}", key) for key in keys)


@given(made_up=st.text(), digest=st.binary(min_size=32, max_size=32))
def test_a_key_is_what_has_the_digest_and_nothing_else(made_up, digest):
    real = hashlib.sha256(made_up.encode(errors="surrogateescape")).digest()
    keys = (ApiKey("other", Role.USER, digest), ApiKey("real", Role.USER, real))
    assert find_key(keys, key_digest(made_up)) is keys[1]
    assert find_key(keys[:1], key_digest(made_up)) is None


@pytest.mark.parametrize(
    ("name", "role", "where"),
    [
        ("a b", "user", "NAME"),
        ("", "user", "NAME"),
        ("a" * 65, "user", "NAME"),
        ("a", "root", "--role"),
    ],
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
    for name, key in keys.items():
        assert find_key(read_keys(path), key_digest(key)).name == name
    before = path.read_text()
    with pytest.raises(ConfigError, match="named 'a'") as error:
        add_key(path, "a")
    assert (error.value.where, path.read_text()) == (str(path), before)


def test_a_key_is_added_after_a_line_without_an_end(write):
    path = write(f"first user {GOOD}")
    add_key(path, "second")
    assert [key.name for key in read_keys(path)] == ["first", "second"]


def test_a_disk_that_fills_leaves_no_part_of_a_line(tmp_path):
    path = tmp_path / "keys"
    add_key(path, "first")
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, hard))
    try:
        with pytest.raises(ConfigError, match="cannot add a key"):
            add_key(path, "second")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before


def test_of_two_who_add_a_name_at_once_one_is_told_that_it_is_taken(tmp_path):
    path, told = tmp_path / "keys", []
    add_key(path, "first")

    def add():
        try:
            told.append(add_key(path, "second"))
        except ConfigError as error:
            told.append(error)

    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        other = threading.Thread(target=add)
        other.start()
        other.join(0.3)  # it has come to the lock, or would be through
        file.write(new_key("second")[1].encode() + b"\n")
    other.join(60)
    assert isinstance(told[0], ConfigError)
    assert [key.name for key in read_keys(path)] == ["first", "second"]


def test_a_file_that_others_may_write_is_refused(write):
    for mode in (0o620, 0o602):
        with pytest.raises(ConfigError, match=f"mode {mode:04o}") as error:
            read_keys(write("", mode))
        assert "chmod go-w" in error.value.hint
    assert read_keys(write("", 0o644)) == ()


def test_keys_that_others_could_exchange_are_refused_and_get_no_key(tmp_path):
    folder = tmp_path / "open"
    folder.mkdir()
    path = folder / "keys"
    add_key(path, "a")
    before = path.read_bytes()
    folder.chmod(0o777)
    for use in (read_keys, lambda path: add_key(path, "b")):
        with pytest.raises(ConfigError, match="mode 0777"):
            use(path)
    assert path.read_bytes() == before


def test_keys_are_found_through_a_link_and_a_pipe_is_not_waited_for(write, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(write("").name)
    add_key(link, "a")
    assert [key.name for key in read_keys(tmp_path / "api-keys")] == ["a"]
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ConfigError):
        read_keys(tmp_path / "pipe")


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
