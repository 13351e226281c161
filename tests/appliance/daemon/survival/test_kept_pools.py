"""Pools that outlive a daemon: what the next one adopts, and what it drops."""

import os
import subprocess
import sys

import pytest

from appliance.daemon.survival import keeper_channel
from appliance.daemon.survival.kept_pools import KeptPools
from engine.scheduler.cache.block_pool import BlockPool
from engine.scheduler.cache.hashes import PrefixHasher
from engine.scheduler.cache.published_blocks import PoolShape
from tests.sweep.keeper import Keeper

HASHER = PrefixHasher(bytes(32), b"", 4)
SHAPE = PoolShape(num_blocks=9, block_bytes=64, free_bytes=1 << 30)
CONTENT = b"keys and values"
LOCK = (
    "import fcntl, sys; fcntl.lockf(int(sys.argv[1]), fcntl.LOCK_SH); print(1, flush=True); input()"
)


class Life:
    """One daemon's pools, as a start makes them."""

    def __init__(self, kept, shape=SHAPE, fingerprint=HASHER.fingerprint):
        self.kept, self.events = kept, []
        self.free_bytes = kept.free_bytes
        self.fd = kept.memory_of("kv", shape)
        kept.give_to_keeper()
        self.pool = BlockPool("kv", shape.num_blocks, 4)
        kept.adopt({"kv": self.pool}, fingerprint, lambda *event: self.events.append(event))
        self.pool.check_invariants()

    def compute(self, num_blocks=3):
        """Write and publish some blocks; returns them."""
        blocks, chain = self.pool.allocate(num_blocks), HASHER.chain([7] * 4 * num_blocks)
        for i, block_id in enumerate(blocks):
            os.pwrite(self.fd, CONTENT, block_id * SHAPE.block_bytes)
            self.pool.count(block_id, references=1)
            self.pool.publish(block_id, chain.hashes[i], chain.parent(i), "ann")
        return blocks

    def found(self):
        """The content of the blocks of that chain."""
        blocks = self.pool.index.blocks(HASHER.chain([7] * 12).hashes)
        return [os.pread(self.fd, len(CONTENT), each * SHAPE.block_bytes) for each in blocks]

    def end(self):
        os.close(self.fd)


@pytest.fixture
def keeper(monkeypatch):
    made = Keeper()
    monkeypatch.setattr(keeper_channel, "_channel", lambda: made)
    yield made
    for fd in made.files:
        os.close(fd)


@pytest.fixture
def first(keeper):
    """A daemon that has computed three blocks, and died."""
    life = Life(KeptPools({}))
    assert life.events == []
    assert life.free_bytes is None
    life.compute()
    yield life
    life.end()


def test_the_next_daemon_finds_the_blocks_in_the_same_memory(keeper, first):
    assert keeper.names == {"pool-kv"}
    nums_fds = set()
    for _ in range(4):  # one daemon after the other
        second = Life(keeper.pass_on().pools)
        assert second.free_bytes == SHAPE.free_bytes
        assert second.found() == [CONTENT] * 3
        assert second.pool.num_free == second.pool.capacity
        about = "Adopted 3 cached blocks from the previous daemon"
        assert second.events == [("info", "pool.adopted", about)]
        second.end()
        nums_fds.add(len(os.listdir("/proc/self/fd")))
        assert len(keeper.files) == 2
    assert len(nums_fds) == 1


def test_what_a_second_daemon_computes_is_there_for_the_third(keeper, first):
    second = Life(keeper.pass_on().pools)
    other = HASHER.chain([1] * 4)
    (block_id,) = second.pool.allocate(1)
    second.pool.count(block_id, references=1)
    second.pool.publish(block_id, other.hashes[0], other.parent(0), "ben")
    second.end()
    third = Life(keeper.pass_on().pools)
    assert third.pool.index.block_of(other.hashes[0]) == block_id
    assert third.found() == [CONTENT] * 3
    third.end()


def codes(life):
    return [(severity, code) for severity, code, _ in life.events]


def test_another_model_begins_with_an_empty_pool(keeper, first):
    second = Life(keeper.pass_on().pools, fingerprint=b"m" * 32)
    assert second.found() == []
    assert codes(second) == [("warning", "pool.dropped")]
    second.end()
    third = Life(keeper.pass_on().pools)
    assert third.found() == []
    third.end()


def test_a_pool_of_another_size_is_dropped_and_replaced(keeper, first):
    shape = SHAPE._replace(num_blocks=5)
    second = Life(keeper.pass_on().pools, shape)
    assert second.found() == []
    assert codes(second) == [("warning", "pool.dropped")]
    sizes = {os.fstat(fd).st_size for fd in keeper.files}
    assert len(keeper.files) == 2
    assert 5 * SHAPE.block_bytes in sizes
    second.end()


def test_memory_that_a_worker_may_still_write_is_not_adopted(keeper, first):
    with subprocess.Popen(
        [sys.executable, "-c", LOCK, str(first.fd)],
        pass_fds=[first.fd],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as worker:
        assert worker.stdout.read(1) == b"1"
        second = Life(keeper.pass_on().pools)
        worker.stdin.close()
    assert second.found() == []
    assert "still runs" in second.events[0][2]
    assert os.stat(second.fd).st_ino != os.stat(first.fd).st_ino
    second.end()


@pytest.mark.parametrize("lost", ["memory", "record"])
def test_half_a_pool_is_dropped(keeper, first, lost):
    is_lost = {"memory": 0, "record": 1}[lost]
    _, fd = keeper._kept.pop(is_lost)
    os.close(fd)
    second = Life(keeper.pass_on().pools)
    assert second.found() == []
    assert codes(second) == [("warning", "pool.dropped")]
    assert len(keeper.files) == 2
    second.end()


@pytest.mark.parametrize("at", [0, 80 + 120], ids=["head", "entry"])
def test_a_damaged_record_leaves_an_empty_pool(keeper, first, at):
    (_, record_fd) = keeper._kept[1]
    os.pwrite(record_fd, b"\xee" * 20, at)
    second = Life(keeper.pass_on().pools)
    assert second.found() == []
    assert second.pool.num_free == second.pool.capacity
    assert codes(second) == [("warning", "pool.dropped")]
    second.compute()
    second.end()
    third = Life(keeper.pass_on().pools)
    assert third.found() == [CONTENT] * 3
    third.end()


def test_memory_of_the_wrong_size_is_dropped(keeper, first):
    os.ftruncate(first.fd, 100)
    num_fds = len(os.listdir("/proc/self/fd"))
    second = Life(keeper.pass_on().pools)
    assert second.found() == []
    assert codes(second) == [("warning", "pool.dropped")]
    second.end()
    assert len(os.listdir("/proc/self/fd")) == num_fds + 1  # the map of the new record


def test_an_unloaded_models_pool_is_kept_no_more(keeper, first):
    first.kept.close()
    assert keeper.names == set()


def test_a_pool_that_no_model_takes_is_dropped(keeper, first):
    num_fds = len(os.listdir("/proc/self/fd"))
    pools = keeper.pass_on().pools
    pools.give_to_keeper()
    assert keeper.names == set()
    assert len(os.listdir("/proc/self/fd")) == num_fds - 2  # the keeper's own
