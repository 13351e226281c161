import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from queue import Queue

import pytest

from engine.scheduler.offload.disk import NUM_READERS, NUM_WRITERS, Disk
from engine.scheduler.offload.index import RecordPlace, SlabIndex
from engine.scheduler.offload.jobs import CopyJob, GrowJob, ProbeJob, SweepJob
from engine.scheduler.offload.slab_files import Slabs
from engine.wire.messages import Copy

BLOCK_BYTES = 10_000
ROOT = Path(__file__).parents[4]


def block(n):
    return bytes([n]) * BLOCK_BYTES


def name(n):
    return bytes([n]) * 16


class Harness:
    """A pool of ten blocks in a memfd, and a disk."""

    def __init__(self, folder, block_bytes=BLOCK_BYTES):
        self.folder, self.block_bytes = folder, block_bytes
        self.pool = os.memfd_create("pool")
        for n in range(10):
            os.pwrite(self.pool, bytes([n]) * block_bytes, n * block_bytes)
        self.reports = Queue()
        self.start()

    def start(self):
        self.slabs = Slabs(self.folder, self.block_bytes, bytes(32), 1 << 20, reserve_bytes=0)
        self.index = SlabIndex(max_age_s=3600)
        for contents in self.slabs.open():
            head = contents.head
            self.index.add_slab(head.number, head.num_records, contents.records)
        self.disk = Disk(self.slabs, {"kv": self.pool}, self.reports.put, write_share=1)

    def stop(self):
        assert self.disk.close(5)
        self.slabs.close()

    def do(self, job):
        self.disk.begin(job)
        assert self.reports.get(timeout=120) is job
        return job

    def store(self, *numbers):
        if self.index.num_free < len(numbers):
            head = self.do(GrowJob()).made
            self.index.add_slab(head.number, head.num_records)
        entries = [self.index.begin_store(name(n), 1) for n in numbers]
        copy = Copy(1, "kv", "ssd", [(n, i) for i, n in enumerate(numbers)], None)
        job = self.do(CopyJob(life=1, copy=copy, entries=entries))
        for i, entry in enumerate(entries):
            self.index.end_store(entry, is_written=i < job.num_done)
        return job

    def load(self, *pairs, **more):
        entries = [self.index.begin_load(name(n)) for n, _ in pairs]
        copy = Copy(2, "ssd", "kv", [(i, block_id) for i, (_, block_id) in enumerate(pairs)], None)
        return self.do(CopyJob(life=1, copy=copy, entries=entries, **more))

    def in_pool(self, block_id):
        return os.pread(self.pool, self.block_bytes, block_id * self.block_bytes)


@pytest.fixture
def harness(tmp_path):
    harness = Harness(tmp_path / "kv")
    yield harness
    harness.stop()
    os.close(harness.pool)


def test_blocks_go_to_the_disk_and_come_back_to_other_places(harness):
    assert harness.store(3, 4).num_done == 2
    job = harness.load((4, 1), (3, 2))
    assert (job.error, job.num_done) == (None, 2)
    assert (harness.in_pool(1), harness.in_pool(2)) == (block(4), block(3))


def test_what_was_stored_is_there_after_a_restart(harness):
    harness.store(3)
    harness.stop()
    harness.start()
    harness.load((3, 9))
    assert harness.in_pool(9) == block(3)


def test_a_damaged_block_does_not_reach_the_pool_nor_what_follows_it(harness):
    harness.store(3, 4)
    place = harness.index.begin_load(name(3)).place
    path = harness.folder / f"slab-{place.slab:06}.kv"
    data = bytearray(path.read_bytes())
    at = data.index(block(3)[:100]) + 5000
    data[at] ^= 1
    path.write_bytes(data)
    job = harness.load((3, 1), (4, 2))
    assert job.is_damaged
    assert job.num_done == 0
    assert (harness.in_pool(1), harness.in_pool(2)) == (block(1), block(2))


def test_what_nobody_needs_any_more_is_not_loaded(harness):
    harness.store(3)
    job = harness.load((3, 1), is_void=True)
    assert (job.num_done, job.is_damaged, job.error) == (0, False, "no longer needed")
    assert harness.in_pool(1) == block(1)


def test_a_load_that_nobody_needs_any_more_ends_after_the_block_that_is_read(harness, monkeypatch):
    harness.store(3, 4)
    entries = [harness.index.begin_load(name(n)) for n in (3, 4)]
    copy = Copy(2, "ssd", "kv", [(0, 1), (1, 2)], None)
    job, read = CopyJob(life=1, copy=copy, entries=entries), harness.slabs.read

    def cancel(*args):
        assert not harness.disk.cancel(job)
        read(*args)

    monkeypatch.setattr(harness.slabs, "read", cancel)
    harness.do(job)
    assert (job.num_done, job.error) == (1, "no longer needed")
    assert (harness.in_pool(1), harness.in_pool(2)) == (block(3), block(2))


def test_a_pool_that_is_cut_off_is_not_stored(harness):
    os.ftruncate(harness.pool, 3 * BLOCK_BYTES + 1)
    job = harness.store(2, 3)
    assert (job.num_done, "truncated" in job.error) == (1, True)


def test_an_error_of_the_disk_is_reported_with_what_was_done_before(harness):
    harness.store(3, 4)
    harness.index.begin_load(name(4)).place = RecordPlace(99, 0)
    job = harness.load((3, 1), (4, 2))
    assert (job.num_done, job.error, job.is_damaged) == (1, "the slab file is missing", False)


def test_erased_places_are_zeros(harness):
    harness.store(3)
    places = harness.index.clear()
    assert harness.do(SweepJob(places=places)).error is None
    assert block(3)[:100] not in (harness.folder / "slab-000000.kv").read_bytes()


def test_a_sweep_erases_what_is_too_old_of_other_models(harness):
    harness.store(3)
    harness.slabs.close()
    other = Slabs(harness.folder, harness.block_bytes, bytes([9]) * 32, 1 << 20, 0)
    other.open()
    swept = []
    disk = Disk(other, {}, swept.append)
    disk.begin(SweepJob(places=[], oldest_s=1 << 40))
    assert disk.close(60)
    assert swept[0].error is None
    assert (other.others.shares, list(harness.folder.glob("slab-*"))) == ([], [])
    other.close()


def test_a_probe_says_how_fast_the_disk_reads_and_leaves_nothing(harness):
    assert harness.do(ProbeJob()).bytes_per_s > 0
    assert not list(harness.folder.glob("*probe*"))


def test_threads_have_the_idle_priority_for_the_disk_and_the_usual_one_for_cores(harness):
    harness.store(3)
    threads = []
    for task in Path("/proc/self/task").iterdir():
        ioprio = subprocess.run(["ionice", "-p", task.name], capture_output=True, text=True)
        if ioprio.stdout.strip() == "idle":
            threads.append(os.getpriority(os.PRIO_PROCESS, int(task.name)))
    assert len(threads) == NUM_READERS + NUM_WRITERS
    assert set(threads) == {os.getpriority(os.PRIO_PROCESS, 0)}


WRITER = """
import hashlib, itertools, os, sys
from pathlib import Path
from queue import Queue
from engine.wire.messages import Copy
from engine.scheduler.offload.disk import CopyJob, Disk, GrowJob
from engine.scheduler.offload.index import SlabIndex
from engine.scheduler.offload.disk import Slabs

size = 300_000
pool = os.memfd_create("pool")
os.ftruncate(pool, size)
slabs = Slabs(Path(sys.argv[1]), size, bytes(32), 8 << 20, reserve_bytes=0)
slabs.open()
index, reports = SlabIndex(), Queue()
disk = Disk(slabs, {"kv": pool}, reports.put, write_share=1)
for n in itertools.count():
    name = n.to_bytes(16, "little")
    os.pwrite(pool, hashlib.shake_128(name).digest(size), 0)
    index.evict(slabs.max_places)
    if not index.num_free:
        disk.begin(grow := GrowJob())
        reports.get()
        if grow.made:
            index.add_slab(grow.made.number, grow.made.num_records)
    entry = index.begin_store(name, 0)
    disk.begin(job := CopyJob(life=1, copy=Copy(n, "kv", "ssd", [(0, 0)], None), entries=[entry]))
    reports.get()
    assert job.error is None, job.error
    index.end_store(entry, is_written=True)
    print(n, flush=True)
"""


@pytest.mark.parametrize("num_stored", [3, 25, 60])
def test_after_kill_minus_nine_what_is_there_is_whole_or_found_out(tmp_path, num_stored):
    import hashlib

    folder = tmp_path / "kv"
    writer = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WRITER), str(folder)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    for line in writer.stdout:
        if int(line) >= num_stored:
            break
    time.sleep(0.002)  # somewhere in the next one
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    writer.stdout.close()

    size = 300_000
    slabs = Slabs(folder, size, bytes(32), 8 << 20, reserve_bytes=0)
    index = SlabIndex()
    for contents in slabs.open():
        head = contents.head
        index.add_slab(head.number, head.num_records, contents.records)
    pool = os.memfd_create("pool")
    reports = Queue()
    disk = Disk(slabs, {"kv": pool}, reports.put)
    num_sound = 0
    for n in range(num_stored + 2):
        block_hash = n.to_bytes(16, "little")
        if (entry := index.begin_load(block_hash)) is None:
            continue
        disk.begin(
            job := CopyJob(life=1, copy=Copy(n, "ssd", "kv", [(0, 0)], None), entries=[entry])
        )
        assert reports.get(timeout=120) is job
        index.end_load(entry, is_sound=not job.is_damaged)
        if job.error is None:
            num_sound += 1
            assert os.pread(pool, size, 0) == hashlib.shake_128(block_hash).digest(size)
    assert index.num_damaged <= 1  # the one that was being written
    assert num_sound >= min(num_stored, slabs.max_places // 2)
    assert disk.close(5)
    slabs.close()
    os.close(pool)
