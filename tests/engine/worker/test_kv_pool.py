"""Pages of a pool that exist before a step writes them."""

import mmap
import os
import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from engine.wire.messages import PoolSpec
from engine.worker import kv_pool
from engine.worker.kv_pool import PagesAhead, map_pool

LINUX = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2])
pytestmark = pytest.mark.skipif(LINUX < (5, 14), reason="madvise() has no MADV_POPULATE_WRITE")
BLOCK_BYTES = 8 * mmap.PAGESIZE
NUM_BLOCKS = 40


@pytest.fixture
def pool(monkeypatch):
    """A pool of float32 in a memfd, and what tells how many of its blocks exist."""
    monkeypatch.setattr(kv_pool, "AHEAD_BYTES", 5 * BLOCK_BYTES)
    fd = os.memfd_create("pool")
    os.ftruncate(fd, NUM_BLOCKS * BLOCK_BYTES)
    memory = mmap.mmap(fd, NUM_BLOCKS * BLOCK_BYTES)
    blocks = torch.frombuffer(memory, dtype=torch.float32).view(NUM_BLOCKS, -1)
    yield blocks, lambda: 512 * os.fstat(fd).st_blocks // BLOCK_BYTES
    os.close(fd)


def make_all(pages):
    count = 0
    while pages.make_next():
        count += 1
    return count


def test_pages_are_made_a_distance_ahead_of_the_highest_used_block_one_by_one(pool):
    blocks, num_made = pool
    pages = PagesAhead(blocks)
    assert pages.make_next()
    assert num_made() == 1
    assert make_all(pages) == 4
    assert num_made() == 5
    pages.use([3, 7])
    pages.use([2])
    assert make_all(pages) == 7
    assert num_made() == 12
    assert not blocks[0].any()


def test_pages_are_made_to_the_end_of_the_pool_and_keep_their_bytes(pool):
    blocks, num_made = pool
    blocks[20] = 7.0
    pages = PagesAhead(blocks)
    pages.use([NUM_BLOCKS - 1])
    assert make_all(pages) == NUM_BLOCKS - 1
    assert num_made() == NUM_BLOCKS - 1
    assert blocks[20].eq(7.0).all()
    assert not blocks[21:].any()


def test_no_other_process_can_lock_a_mapped_pool():
    config = SimpleNamespace(
        kv_block_bytes=lambda *_: 128,
        kv_groups=SimpleNamespace(num_layers=1),
        num_kv_heads=1,
        head_dim=4,
    )
    fd = os.memfd_create("pool")
    os.ftruncate(fd, 3 * 128)
    lock = "import fcntl, sys; fcntl.lockf(int(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)"

    def can_lock():
        command = [sys.executable, "-c", lock, str(fd)]
        return subprocess.run(command, pass_fds=[fd], capture_output=True).returncode == 0

    assert can_lock()
    pool = map_pool(PoolSpec("kv", fd, 3), config, 4, "float32")
    assert pool.shape == (3, 1, 2, 4, 1, 4)
    assert not can_lock()
    os.close(fd)
