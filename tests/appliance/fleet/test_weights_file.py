"""Files of packed weights: whole or not there, checked before they are used, deleted when idle."""

import os
import shutil
import time
from types import SimpleNamespace

import pytest

from appliance.fleet import weights_file
from appliance.fleet.weights_file import WeightsFile, check_room
from engine.errors import ConfigError

ONE, OTHER = b"1" * 32, b"2" * 32
SIZE = (16 << 20) + 12_345
"""More than one piece with a sum."""


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "kv" / "weights"


@pytest.fixture
def opened(folder):
    files = []

    def open_file(identity=ONE, num_bytes=SIZE, keep_days=30):
        files.append(WeightsFile(folder, identity, num_bytes, keep_days))
        return files[-1]

    yield open_file
    for file in files:
        os.close(file.fd)


def written(opened, *args):
    file = opened(*args)
    assert not file.path.exists()
    os.pwrite(file.fd, b"weights" * 1000, 0)
    file.finish()
    return file


def test_what_was_packed_once_is_there_at_the_next_start(opened):
    file = written(opened)
    again = opened()
    assert again.is_whole
    assert again.path == file.path
    assert os.pread(again.fd, 7, 0) == b"weights"


def test_an_unfinished_file_has_no_name_and_the_next_start_deletes_it(opened, folder):
    file = opened()
    assert not file.path.exists()
    file.give_up()
    assert list(folder.iterdir()) == []
    dead = folder / "0.new"
    dead.touch(0o600)
    opened()
    assert not dead.exists()


def test_two_daemons_do_not_write_one_file(opened):
    opened()
    with pytest.raises(ConfigError) as refused:
        opened()
    assert refused.value.where == "offload_weights"


@pytest.mark.parametrize("at", [0, SIZE - 1, SIZE + 4096, -1])
def test_a_damaged_byte_anywhere_has_the_file_written_again(opened, at):
    file = written(opened)
    fd = os.open(file.path, os.O_RDWR)
    place = at if at >= 0 else os.fstat(fd).st_size + at
    os.pwrite(fd, bytes([os.pread(fd, 1, place)[0] ^ 1]), place)
    os.close(fd)
    assert not opened().is_whole


def test_a_file_of_another_version_or_size_is_written_again(opened, monkeypatch):
    written(opened)
    monkeypatch.setattr(weights_file, "VERSION", 99)
    file = written(opened)
    os.truncate(file.path, SIZE)
    assert not opened().is_whole


@pytest.mark.parametrize("kind", ["link", "open", "readable", "folder"])
def test_a_file_that_others_could_have_made_or_read_is_refused(opened, tmp_path, kind):
    path = written(opened).path
    if kind == "link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "folder":
        path.parent.chmod(0o755)
    else:
        path.chmod(0o666 if kind == "open" else 0o640)
    with pytest.raises(OSError, match=r".+"):
        opened()


def test_a_disk_without_room_is_refused_before_anything_is_made(folder, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=SIZE))
    with pytest.raises(ConfigError) as refused:
        check_room(folder, ONE, SIZE)
    assert refused.value.where == "offload_weights"
    assert not folder.exists()


def test_what_is_there_already_needs_no_room(opened, folder, monkeypatch):
    written(opened)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    check_room(folder, ONE, SIZE)
    with pytest.raises(ConfigError):
        check_room(folder, ONE, SIZE + (1 << 20))


def test_a_disk_in_memory_is_refused(folder, monkeypatch):
    monkeypatch.setattr(weights_file, "_kind_of_disk", lambda _: "tmpfs")
    with pytest.raises(ConfigError) as refused:
        check_room(folder, ONE, SIZE)
    assert refused.value.where == "offload_weights"


def test_files_that_no_start_has_used_for_long_are_deleted_but_not_one_in_use(opened, folder):
    used = written(opened)
    unused = folder / "0.weights"
    unused.touch(0o600)
    for path in (used.path, unused):
        os.utime(path, (0, time.time() - 31 * 86_400))
    opened(OTHER)
    assert used.path.exists()
    assert not unused.exists()


def test_a_full_disk_loses_the_weights_unused_longest(opened, folder, monkeypatch):
    folder.mkdir(parents=True, mode=0o700)
    for age, name in enumerate(("new.weights", "old.weights")):
        (folder / name).touch(0o600)
        os.utime(folder / name, (0, time.time() - 60 * age))
    room = 2 * SIZE + weights_file.RESERVE_BYTES

    def disk_usage(_):
        return SimpleNamespace(free=room if not (folder / "old.weights").exists() else 0)

    monkeypatch.setattr(weights_file, "check_room", lambda *_: None)
    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    opened()
    assert (folder / "new.weights").exists()
    assert not (folder / "old.weights").exists()
