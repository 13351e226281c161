import dataclasses
import io
import json
import mmap
import os
import stat
import threading
import time
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace

import pytest

from appliance.configuration.settings import ServeConfig
from appliance.fleet import cache_identity
from appliance.fleet.boot import make_plan
from appliance.fleet.cache_identity import (
    KEY_NAME,
    WEIGHTS_NAME,
    fingerprint,
    identity,
    load_key,
    make_hasher,
)
from engine.errors import ConfigError
from tests.appliance.model_folder import make_model
from tests.checkpoints import make_checkpoint
from tests.gguf_files import write_gguf


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_the_key_stays_and_is_for_this_user_alone(tmp_path):
    os.umask(os.umask(0))  # whatever it is, the file is private
    key = load_key(tmp_path)
    assert len(key) == 32
    assert mode(tmp_path / KEY_NAME) == 0o600
    assert load_key(tmp_path) == key


@pytest.mark.parametrize("damage", ["readable", "short", "long", "a pipe"])
def test_a_key_that_others_could_know_is_replaced(tmp_path, damage, caplog):
    key, path = load_key(tmp_path), tmp_path / KEY_NAME
    match damage:
        case "readable":
            path.chmod(0o640)
        case "short":
            path.write_bytes(key[:31])
        case "long":
            path.write_bytes(key + b"x")
        case "a pipe":
            path.unlink()
            os.mkfifo(path, 0o600)
    other = load_key(tmp_path)
    assert other != key
    assert len(other) == 32
    assert mode(path) == 0o600
    assert "a new one is made" in caplog.text
    assert load_key(tmp_path) == other


def test_weights_are_known_by_their_bytes(tmp_path):
    a, b = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    a.write_bytes(b"weights")
    b.write_bytes(b"more")
    one = fingerprint([a, b], tmp_path)
    assert fingerprint([b, a], tmp_path) == one
    b.write_bytes(b"less")
    assert fingerprint([a, b], tmp_path) != one
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    (moved / "a.safetensors").write_bytes(b"weights")
    (moved / "b.safetensors").write_bytes(b"more")
    assert fingerprint(list(moved.iterdir()), moved) == one
    assert fingerprint([a], tmp_path) != one


def test_a_file_is_read_once_while_it_is_the_same(tmp_path, monkeypatch):
    read = []
    digest = cache_identity._digest
    monkeypatch.setattr(
        cache_identity, "_digest", lambda file, size: read.append(file) or digest(file, size)
    )
    file = tmp_path / "a.safetensors"
    file.write_bytes(b"weights")
    one = fingerprint([file], tmp_path)
    assert fingerprint([file], tmp_path) == one
    assert read == [file]
    assert mode(tmp_path / WEIGHTS_NAME) == 0o600
    file.write_bytes(b"WEIGHTS")
    os.utime(file, ns=(1, 1))
    assert fingerprint([file], tmp_path) != one
    assert len(read) == 2


@pytest.mark.parametrize("text", ["", "[]", "{", '{"x": 3}', "\xff", "[" * 100_000])
def test_damaged_memory_is_no_memory(tmp_path, text):
    file = tmp_path / "a.safetensors"
    file.write_bytes(b"weights")
    one = fingerprint([file], tmp_path)
    (tmp_path / WEIGHTS_NAME).write_text(text)
    assert fingerprint([file], tmp_path) == one
    assert json.loads((tmp_path / WEIGHTS_NAME).read_text())


def test_parts_of_a_large_file_are_all_read(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_identity, "_PART_BYTES", 1000)
    file = tmp_path / "a.safetensors"
    data = bytearray(os.urandom(4500))
    file.write_bytes(data)
    one = fingerprint([file], tmp_path)
    data[4400] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(2, 2))
    assert fingerprint([file], tmp_path) != one
    parts = [blake2b(data[at : at + 1000], digest_size=32).digest() for at in range(0, 4500, 1000)]
    whole = blake2b((4500).to_bytes(8, "little") + b"".join(parts), digest_size=32)
    assert cache_identity._digest(file, 4500) == whole.hexdigest()
    with pytest.raises(FileNotFoundError):
        cache_identity._digest(tmp_path / "none", 4500)


@pytest.mark.parametrize("error", [None, RuntimeError, MemoryError])
def test_parts_are_read_without_other_threads_where_none_begins(tmp_path, monkeypatch, error):
    monkeypatch.setattr(cache_identity, "_PART_BYTES", 1000)
    file = tmp_path / "a.safetensors"
    file.write_bytes(os.urandom(4500))
    right = cache_identity._digest(file, 4500)

    def start(*_):
        if error is not None:
            raise error

    monkeypatch.setattr(cache_identity, "start_new_thread", start)
    assert cache_identity._digest(file, 4500) == right


def test_who_waits_for_anothers_part_computes_at_each_read_of_it(monkeypatch):
    """By its CPU time whoever looks knows that a slow disk is no disk that hangs."""
    monkeypatch.setattr(cache_identity, "_PART_BYTES", 5)
    monkeypatch.setattr(cache_identity, "_READ_BYTES", 1)
    has_begun, turns, found = threading.Event(), threading.Semaphore(0), []

    class Slow(io.BytesIO):
        def read(self, size=-1):
            if threading.current_thread() is caller:
                has_begun.wait()
            else:
                has_begun.set()
                turns.acquire()
            return super().read(size)

    monkeypatch.setattr(cache_identity, "open_model_file", lambda _path: Slow(bytes(10)))
    caller = threading.Thread(target=lambda: found.append(cache_identity._digest(Path("w"), 10)))
    caller.start()
    clock = time.pthread_getcpuclockid(caller.ident)
    patient_until_s, has_computed = time.monotonic() + 60, True
    for _ in range(4):
        before_s = -1.0
        while before_s != (before_s := time.clock_gettime(clock)):
            time.sleep(0.02)
        turns.release()
        while has_computed and time.clock_gettime(clock) == before_s:
            has_computed = time.monotonic() < patient_until_s
            time.sleep(0.001)
    turns.release()
    caller.join()
    assert has_computed
    assert len(found) == 1


def plan_of(folder, **changes):
    plan = make_plan(ServeConfig(socket=folder / "socket", state_dir=folder, model=folder))
    return dataclasses.replace(plan, **changes)


def test_hashes_are_of_one_model_served_in_one_variant(tmp_path, monkeypatch):
    weights = make_model(tmp_path / "model")
    folder = weights.parent
    plan = plan_of(folder)
    first = identity(plan, tmp_path)
    assert identity(plan_of(folder), tmp_path) == first
    other_size = dataclasses.replace(plan.placement, block_size=plan.placement.block_size * 2)
    others = [
        identity(dataclasses.replace(plan, dtype="other"), tmp_path),
        identity(dataclasses.replace(plan, kv_dtype="int8"), tmp_path),
        identity(dataclasses.replace(plan, product_variants="dots from 1"), tmp_path),
        identity(dataclasses.replace(plan, placement=other_size), tmp_path),
    ]
    with monkeypatch.context() as patched:
        patched.setattr("appliance.fleet.cache_identity.load_kernels", lambda: (None, "another"))
        others.append(identity(plan, tmp_path))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    os.utime(weights, ns=(1, 1))
    others.append(identity(plan, tmp_path))
    config = folder / "config.json"
    config.write_text(config.read_text() + " ")
    others.append(identity(plan, tmp_path))
    assert len({first, *others}) == 8


@pytest.mark.parametrize(
    ("isolation", "are_apart"), [("none", False), ("user", True)], ids=["none", "user"]
)
def test_users_share_what_is_cached_unless_they_are_set_apart(tmp_path, isolation, are_apart):
    folder = make_model(tmp_path / "model").parent
    config = ServeConfig(
        socket=tmp_path / "socket", state_dir=tmp_path, model=folder, cache_isolation=isolation
    )
    hasher = make_hasher(config, make_plan(config))
    assert hasher is not None
    ana, ben, salted = (
        hasher.scope(salt, user).root
        for salt, user in ((None, "ana"), (None, "ben"), ("secret", "ana"))
    )
    assert (ana != ben) == are_apart
    assert salted not in (ana, ben)
    assert hasher.scope("secret", "ben").root != salted or not are_apart


def test_without_a_cache_nothing_is_hashed_or_written(tmp_path):
    folder = make_model(tmp_path / "model").parent
    config = ServeConfig(
        socket=tmp_path / "socket", state_dir=tmp_path, model=folder, prefix_cache=False
    )
    assert make_hasher(config, make_plan(config)) is None
    assert not (tmp_path / KEY_NAME).exists()


def test_weights_that_cannot_be_read_are_an_error_with_a_hint(tmp_path):
    weights = make_model(tmp_path / "model")
    config = ServeConfig(socket=tmp_path / "socket", state_dir=tmp_path, model=weights.parent)
    plan = make_plan(config)
    weights.unlink()
    with pytest.raises(ConfigError, match="prefix cache") as refused:
        make_hasher(config, plan)
    assert "--prefix-cache off" in refused.value.hint


def rewritten(file, data, how):
    """Write other bytes of the same length in place, and put the time of modification back."""
    before = file.stat()
    match how:
        case "written":
            with file.open("r+b") as opened:
                opened.write(data)
        case "mapped":
            with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as memory:
                memory[:] = data
        case "through a hard link":
            link = file.with_name("link")
            link.hardlink_to(file)
            link.write_bytes(data)
            link.unlink()
        case "through a symbolic link":
            link = file.with_name("link")
            link.symlink_to(file)
            link.write_bytes(data)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.parametrize(
    "how", ["written", "mapped", "through a hard link", "through a symbolic link"]
)
def test_weights_rewritten_in_place_with_their_time_put_back_are_other_weights(tmp_path, how):
    file = tmp_path / "a.safetensors"
    data = bytearray(os.urandom(1 << 20))
    file.write_bytes(data)
    one = fingerprint([file], tmp_path)
    data[123_457] ^= 1  # between the samples
    time.sleep(0.02)  # clocks of file systems are as coarse as that
    rewritten(file, data, how)
    assert fingerprint([file], tmp_path) != one


@pytest.mark.parametrize("place", ["weights", "metadata"])
def test_a_gguf_file_rewritten_in_place_is_another_model(tmp_path, place):
    file = write_gguf(make_checkpoint(tmp_path / "m"), tmp_path / "m.gguf")
    plan = make_plan(ServeConfig(socket=tmp_path / "socket", state_dir=tmp_path, model=file))
    first = identity(plan, tmp_path)
    assert identity(plan, tmp_path) == first
    data = bytearray(file.read_bytes())
    data[-1 if place == "weights" else data.index(b"<|im_end|>")] ^= 1
    time.sleep(0.02)
    rewritten(file, data, "written")
    assert identity(plan, tmp_path) != first


def test_other_bytes_are_noticed_where_no_time_tells(tmp_path, monkeypatch):
    """As on a file system that keeps no times, or two writes within one tick of its clock."""
    file = tmp_path / "a.safetensors"
    file.write_bytes(os.urandom(1 << 20))
    times = file.stat()

    def fstat(fd):
        seen = stat_of(fd)
        same = {"st_mtime_ns": times.st_mtime_ns, "st_ctime_ns": times.st_ctime_ns}
        names = [name for name in dir(seen) if name.startswith("st_")]
        return SimpleNamespace(**{name: getattr(seen, name) for name in names} | same)

    stat_of = os.fstat
    monkeypatch.setattr(cache_identity.os, "fstat", fstat)
    one = fingerprint([file], tmp_path)
    assert fingerprint([file], tmp_path) == one
    rewritten(file, os.urandom(1 << 20), "written")
    assert fingerprint([file], tmp_path) != one
