"""Files that change, vanish or refuse under an open cache: right answers, or none."""

import errno
import os
import random

import pytest

from engine.scheduler.offload.index import RecordPlace
from engine.scheduler.offload.jobs import GrowJob
from engine.scheduler.offload.slab_files import DamagedError, RecordBuffer
from tests.engine.scheduler.offload.test_disk import BLOCK_BYTES, Harness, block, name
from tests.worlds.tiers import TierHarness

NUM_FLIPS = 2000


@pytest.fixture
def harness(tmp_path):
    harness = Harness(tmp_path / "kv")
    yield harness
    harness.stop()


def slab_path(harness):
    (path,) = harness.folder.glob("slab-*.kv")
    return path


def test_of_many_flipped_bytes_none_reaches_a_reader(harness):
    """Every read gives the block as it was stored, or says that it is damaged."""
    harness.store(*range(6))
    path, rng = slab_path(harness), random.Random(1)
    size, buffer = path.stat().st_size, RecordBuffer(BLOCK_BYTES)
    record_bytes = harness.slabs._record_bytes
    num_damaged = 0
    with path.open("r+b", buffering=0) as file:
        for _ in range(NUM_FLIPS):
            at, mask = rng.randrange(size), rng.randrange(1, 256)
            before = os.pread(file.fileno(), 1, at)
            os.pwrite(file.fileno(), bytes([before[0] ^ mask]), at)
            record = min(max((at - 4096) // record_bytes, 0), 5)
            try:
                harness.slabs.read(RecordPlace(0, record), name(record), buffer)
            except DamagedError:
                num_damaged += 1
            else:
                assert bytes(buffer.block) == block(record)
            os.pwrite(file.fileno(), before, at)
    assert num_damaged > NUM_FLIPS // 10


def test_a_slab_that_is_cut_off_under_the_cache_gives_what_is_left(harness):
    harness.store(1, 2, 3)
    record_bytes = harness.slabs._record_bytes
    os.truncate(slab_path(harness), 4096 + record_bytes + 100)
    job = harness.load((1, 4), (2, 5), (3, 6))
    assert (job.num_done, job.is_damaged) == (1, True)
    assert "truncated" in job.error
    assert [harness.in_pool(n) for n in (4, 5, 6)] == [block(1), block(5), block(6)]


def test_a_slab_that_is_deleted_under_the_cache_is_still_read(harness):
    harness.store(1)
    slab_path(harness).unlink()
    assert harness.load((1, 4)).error is None
    assert harness.in_pool(4) == block(1)


@pytest.mark.parametrize("code", [errno.EACCES, errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_folder_that_takes_no_file_is_an_error_of_the_job(harness, code, monkeypatch):
    def refuse(path, flags):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(harness.slabs, "open_file", refuse)
    job = harness.do(GrowJob())
    assert (job.made, job.error) == (None, os.strerror(code))


@pytest.mark.parametrize("code", [errno.EIO, errno.ENODEV])
def test_a_read_that_fails_leaves_the_pool_as_it_was(harness, code, monkeypatch):
    harness.store(1)

    def fail(fd, buffers, offset):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("engine.scheduler.offload.disk.os.preadv", fail)
    job = harness.load((1, 4))
    assert (job.num_done, job.error) == (0, os.strerror(code))
    assert harness.in_pool(4) == block(4)


def test_a_write_that_comes_to_its_limit_is_no_record(harness):
    """As RLIMIT_FSIZE or a quota has it: less is written than was given."""
    harness.store(1)
    entry = harness.index.begin_store(name(2), 1)
    real, os_pwritev = os.pwritev, "engine.scheduler.offload.files.os.pwritev"
    buffer = RecordBuffer(BLOCK_BYTES)
    buffer.block[:] = block(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os_pwritev, lambda fd, b, at: real(fd, [memoryview(b[0])[:4096]], at))
        with pytest.raises(OSError, match="written incompletely"):
            harness.slabs.write(entry.place, name(2), entry.number, 1, buffer)
    harness.index.end_store(entry, is_written=False)
    with pytest.raises(DamagedError):
        harness.slabs.read(entry.place, name(2), RecordBuffer(BLOCK_BYTES))


def test_a_disk_that_stalls_for_half_a_minute_is_left_and_taken_up_again():
    """Prompts wait no longer than their deadlines; what comes late is of no harm."""
    tier = TierHarness()
    chain = tier.chain(1, 2, 3)
    for _ in range(2):
        tier.compute(chain)
    tier.run()
    tier.forget_pool()
    for seq_id in range(5):
        is_loading = tier.ask(chain, seq_id)
        assert is_loading == (seq_id < 3)
        tier.pass_time(10)
        tier.check()
    assert tier.events == ["ssd.down"]
    tier.run()  # the disk goes on, the probe with it
    assert tier.events == ["ssd.down", "ssd.up"]
    assert tier.ask(chain, 99) or tier.compute(chain) == 3
    tier.run()
    assert tier.compute(chain) == 3
    tier.check()
