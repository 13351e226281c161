"""What a disk allows an SSD cache, and folders that can hold none."""

import asyncio
import contextlib
import os
import re
import threading
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from appliance.configuration.settings import ServeConfig
from appliance.daemon.process import disk_reads
from appliance.fleet import ssd_cache
from appliance.fleet.placement import Placement
from appliance.fleet.ssd_cache import SsdAllowance, allowance, ssd_forecast
from engine.errors import PenstockError
from engine.scheduler.cache.topology import Topology
from engine.scheduler.offload import disk as disk_threads
from engine.scheduler.offload.files import BusyError, lock
from engine.scheduler.offload.index import RecordPlace
from engine.scheduler.offload.slab_files import RecordBuffer
from engine.system import threads

GIB = 1 << 30
Usage = namedtuple("Usage", "total used free")
PLACEMENT = Placement(Topology((), ()), (), block_bytes=100_000, max_model_len=64)


def said(folder, asked, block_bytes=PLACEMENT.block_bytes):
    config = ServeConfig(socket=folder, state_dir=folder, ssd_dir=folder, ssd_cache=asked)
    found = ssd_forecast(config, replace(PLACEMENT, block_bytes=block_bytes))
    return None if found is None else found.text


@pytest.fixture
def disk(monkeypatch):
    def has_free(num_bytes):
        usage = Usage(1000 * GIB, 0, num_bytes)
        monkeypatch.setattr(ssd_cache.shutil, "disk_usage", lambda _: usage)

    return has_free


def test_more_than_the_disk_has_is_cut_to_what_it_has_and_said(disk, tmp_path):
    disk(62 * GIB)
    allowed = allowance(tmp_path, 500 * GIB)
    assert allowed == SsdAllowance(52 * GIB, 10 * GIB, 500 * GIB)
    assert ("500 GiB" in allowed.words, "52.0 GiB" in allowed.words) == (True, True)
    assert allowed.words in said(tmp_path, 500 * GIB)
    assert allowance(tmp_path, 5 * GIB) == SsdAllowance(5 * GIB, 10 * GIB)
    assert "the disk allows" not in said(tmp_path, 5 * GIB)


def test_what_fits_is_said_in_blocks_and_tokens_and_that_headers_take_a_part(disk, tmp_path):
    disk(1000 * GIB)
    roomy, tight = said(tmp_path, GIB), said(tmp_path, 1 << 20)
    assert roomy.startswith(f"SSD cache in {tmp_path}: up to ")
    assert "GiB of files (" in roomy
    assert " blocks, " in roomy
    assert "too small to help" not in roomy
    assert tight.endswith("too small to help")
    assert "no block of 4.0 MiB" in said(tmp_path, 1 << 20, 4 << 20)
    off = ServeConfig(socket=tmp_path, state_dir=tmp_path, prefix_cache=False)
    why = "no SSD cache: it extends the prefix cache, which is off"
    assert ssd_forecast(off, PLACEMENT) == (why, False)
    asked = replace(off, ssd_cache=GIB)
    assert ssd_forecast(asked, PLACEMENT) == (why, True)


def test_without_a_size_it_takes_a_tenth_and_never_the_last_10_gib(disk, tmp_path):
    disk(1000 * GIB)
    assert allowance(tmp_path, "auto") == SsdAllowance(20 * GIB, 10 * GIB)
    disk(11 * GIB)
    assert allowance(tmp_path, "auto") == SsdAllowance(GIB, 10 * GIB)
    disk(10 * GIB)
    assert f"of the disk of {tmp_path} 10.0 GiB are free" in allowance(tmp_path, "auto")


def test_on_a_small_disk_a_size_that_was_asked_for_leaves_a_part_of_it(disk, tmp_path):
    disk(6 * GIB)
    assert allowance(tmp_path, 20 * GIB).cap_bytes == 5 * GIB
    disk(GIB)
    assert isinstance(allowance(tmp_path, 20 * GIB), str)


@pytest.mark.parametrize("asked", ["auto", 64 << 20])
def test_on_a_disk_that_has_become_full_what_is_there_is_served_and_grows_later(
    asked, disk, tmp_path
):
    def blocks(fingerprint):
        return ssd_cache.BlockFormat(bytes([fingerprint]) * 32, 4096, {}, range(0))

    disk(100 * GIB)
    opened = ssd_cache._open(tmp_path, 64 << 20, blocks(1))
    slab = opened.slabs.grow()
    buffer = RecordBuffer(4096)
    opened.slabs.write(RecordPlace(slab.number, 0), b"1" * 16, 1, 0, buffer)
    opened.close()
    disk(444 << 20)
    why = r"its disk is full: 444 MiB free, 1?[01]\.0 GiB reserved"
    assert re.search(why, said(tmp_path, asked))
    assert allowance(tmp_path, asked).cap_bytes == (20 * GIB if asked == "auto" else asked)
    opened = ssd_cache._open(tmp_path, asked, blocks(1))
    ((_, record),) = opened.found[0].records
    assert record.block_hash == b"1" * 16
    assert opened.slabs.grow() is None
    assert re.fullmatch(why, opened.slabs.limit())
    disk(100 * GIB)
    assert opened.slabs.limit() is None
    assert opened.slabs.grow() is not None
    opened.close()
    disk(444 << 20)
    opened = ssd_cache._open(tmp_path, asked, blocks(2))
    assert opened.found == []
    assert [share.num_blocks for share in opened.slabs.others.shares] == [1], "kept, though full"
    assert opened.slabs.grow() is None, "there would be no room without it either"
    assert opened.slabs.others.shares
    opened.close()
    for path in tmp_path.glob("slab-*"):
        path.unlink()
    with pytest.raises(PenstockError, match="444 MiB are free"):
        ssd_cache._open(tmp_path, asked, blocks(2))
    os.close(lock(tmp_path))


@pytest.mark.parametrize("asked", ["auto", GIB])
def test_a_folder_that_can_hold_nothing_is_named_with_the_reason_and_a_hint(asked, tmp_path):
    (tmp_path / "file").write_text("x")
    for folder, why in [
        ("/proc/none", "/proc, where /proc/none would be made, takes no files ("),
        (tmp_path / "file", "file is not a folder"),
        (tmp_path / "file" / "kv", "kv would be made, is not a folder"),
    ]:
        told = said(Path(folder), asked)
        assert str(folder) in told
        assert why in told
        assert "(ssd_dir)" in told
        assert said(Path(folder), "off") is None


def test_looking_leaves_nothing(tmp_path):
    allowance(tmp_path / "a" / "kv", "auto")
    assert list(tmp_path.iterdir()) == []


def config_of(folder):
    return SimpleNamespace(ssd_folder=folder, ssd_dir=None, ssd_cache=64 << 20, log_keep_days=1)


PLAN = SimpleNamespace(
    model_id="m",
    dtype="x",
    workers=[],
    arena=None,
    known=None,
    num_staging=0,
    placement=SimpleNamespace(whole_block_bytes=4096, record_blocks=0),
)
HASHER = SimpleNamespace(fingerprint=bytes(32))
NO_WORKERS = SimpleNamespace(workers={})


@pytest.mark.parametrize("about", ["can't start new thread", "no memory to begin"])
async def test_without_memory_for_its_threads_the_cache_is_done_without(
    tmp_path, monkeypatch, about
):
    started, is_over = [], threading.Event()

    class Scarce(threading.Thread):
        def start(self):
            if not started:
                started.append(self)
                super().start()
                if about == "no memory to begin":
                    monkeypatch.setattr(threads, "BEGIN_S", 0.02)
            elif about == "no memory to begin":
                is_over.wait()
            else:
                raise RuntimeError(about)

    monkeypatch.setattr(disk_threads, "Thread", Scarce)
    cache = ssd_cache.SsdCache(config_of(tmp_path / "kv"), lambda *_: None)
    await cache.open(PLAN, HASHER, SimpleNamespace(tier_host=None), NO_WORKERS, None)
    assert (cache.frame().state, cache.tier) == ("failed", None)
    assert about in cache.frame().reason
    is_over.set()
    os.close(lock(tmp_path / "kv"))  # another daemon may have the folder
    assert [thread.is_alive() for thread in started] == [False]
    await cache.close()


async def test_a_disk_that_hangs_while_it_is_opened_is_done_without(tmp_path, monkeypatch):
    for name, value in (("_LOOK_S", 0.01), ("SILENT_S", 0.05), ("HANG_S", 0.2)):
        monkeypatch.setattr(disk_reads, name, value)
    hangs, seen = threading.Event(), {}
    open_slabs = ssd_cache.Slabs.open
    monkeypatch.setattr(ssd_cache.Slabs, "open", lambda slabs: [open_slabs(slabs), hangs.wait()][0])
    folder = tmp_path / "kv"
    cache = ssd_cache.SsdCache(
        config_of(folder), lambda _, code, about: seen.update({code: cache.frame()})
    )
    await cache.open(PLAN, HASHER, None, NO_WORKERS, None)
    assert seen["ssd.slow"].state == "opening"
    assert f"{folder} does not answer for" in seen["ssd.slow"].reason
    assert (cache.frame().state, cache.tier) == ("failed", None)
    assert str(folder) in cache.frame().reason
    await cache.close()
    with pytest.raises(BusyError):
        lock(folder)
    hangs.set()
    while True:  # when it answers at last, the folder is let go of
        with contextlib.suppress(BusyError):
            os.close(lock(folder))
            return
        await asyncio.sleep(0.01)
