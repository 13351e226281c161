"""The verbs on the SSD cache, over a folder with a few blocks."""

import json
import os

import pytest

from engine.tiers.disk import RecordBuffer, Slabs
from engine.tiers.index import RecordPlace
from tests.appliance.cli_process import penstock, user_environ

BLOCK_BYTES = 5000


@pytest.fixture
def slabs(tmp_path):
    """Of a daemon that is running; three blocks are in it."""
    slabs = Slabs(tmp_path / "kv", BLOCK_BYTES, bytes(32), 1 << 20, reserve_bytes=0)
    slabs.open()
    slabs.grow()
    for n in range(3):
        buffer = RecordBuffer(BLOCK_BYTES)
        buffer.block[:] = bytes([n]) * BLOCK_BYTES
        slabs.write(RecordPlace(0, n), bytes([n]) * 16, n, 1_700_000_000 + n, buffer)
    yield slabs
    slabs.close()


def cache(tmp_path, *words):
    return penstock(user_environ(tmp_path), "cache", *words, "--ssd-dir", str(tmp_path / "kv"))


def test_stats_say_what_is_there(slabs, tmp_path):
    done = cache(tmp_path, "stats", "-o", "json")
    content = json.loads(done.stdout)
    assert (content["blocks"], content["block_bytes"], content["models"]) == (3, 15_000, 1)
    assert content["oldest"] < content["newest"]
    assert content["damaged_blocks"] is None  # it reads no block


def test_verify_reads_everything_and_exits_8_if_a_block_is_damaged(slabs, tmp_path):
    assert cache(tmp_path, "verify").stdout == "3 blocks sound\n"
    path = tmp_path / "kv" / "slab-000000.kv"
    with path.open("r+b") as file:
        file.seek(4096 + 8192 + 1000)
        file.write(b"x")
    done = cache(tmp_path, "verify")
    assert done.returncode == 8
    assert "1 damaged, 2 blocks sound" in done.stderr


def test_clear_deletes_what_no_daemon_has(slabs, tmp_path):
    done = cache(tmp_path, "clear")
    assert done.returncode == 9
    assert "a daemon uses it" in done.stderr
    slabs.close()
    assert cache(tmp_path, "clear").returncode == 0
    assert os.listdir(tmp_path / "kv") == ["lock"]
    assert json.loads(cache(tmp_path, "stats", "-o", "json").stdout)["blocks"] == 0
