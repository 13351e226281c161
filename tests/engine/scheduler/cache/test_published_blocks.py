"""The record of published blocks: what the next daemon believes, wherever this one died."""

import os

import pytest

from engine.scheduler.cache.block_pool import BlockPool
from engine.scheduler.cache.hashes import PrefixHasher
from engine.scheduler.cache.published_blocks import Damaged, PoolShape, PublishedBlocks, make_record

BLOCK_SIZE = 4
HASHER = PrefixHasher(bytes(32), b"", BLOCK_SIZE)
KEY = HASHER.fingerprint


@pytest.fixture
def make():
    """Make a record for pools of so many blocks; returns its descriptor and the record."""
    fds = []

    def made(num_blocks=9, fingerprint=KEY):
        fds.append(make_record(PoolShape(num_blocks, 100, 5000)))
        record = PublishedBlocks(fds[-1])
        record.begin(fingerprint)
        return fds[-1], record

    yield made
    for fd in fds:
        os.close(fd)


def chain(first_token, num_blocks):
    return HASHER.chain([first_token] * num_blocks * BLOCK_SIZE)


def pool_of(record, num_blocks=9, record_blocks=0):
    """A pool that has adopted a record."""
    pool = BlockPool("kv", num_blocks, BLOCK_SIZE, record_blocks)
    pool.adopt(record)
    pool.check_invariants()
    return pool


def compute(pool, hashes, user="ann"):
    """Take blocks, publish them as this chain, and release them; returns the blocks."""
    blocks = pool.allocate(len(hashes.hashes))
    for i, block_id in enumerate(blocks):
        pool.count(block_id, references=1)
        pool.publish(block_id, hashes.hashes[i], hashes.parent(i), user)
    for block_id in reversed(blocks):
        pool.count(block_id, references=-1)
    return blocks


def test_the_next_daemon_finds_what_was_published(make):
    fd, record = make()
    assert PublishedBlocks(fd).shape == PoolShape(9, 100, 5000)
    hashes = chain(1, 3)
    blocks = compute(pool_of(record), hashes)
    after = PublishedBlocks(fd)
    assert after.fingerprint == KEY
    again = pool_of(after)
    assert again.index.blocks(hashes.hashes) == blocks
    assert again.index.held == {"ann": 3}
    assert again.num_free == again.capacity


def test_adopted_blocks_are_evicted_in_the_order_of_their_publication(make):
    fd, record = make()
    pool = pool_of(record)
    old, new = chain(1, 2), chain(2, 2)
    compute(pool, old)
    compute(pool, new)
    again = pool_of(PublishedBlocks(fd))
    for block_id in again.allocate(again.capacity - 2):
        again.count(block_id, references=1)
    assert again.index.num_hit(old.hashes) == 0
    assert again.index.num_hit(new.hashes) == 2
    assert [each.hash for each in PublishedBlocks(fd).read()] == new.hashes


def test_blocks_of_a_second_life_follow_those_of_the_first(make):
    fd, record = make()
    compute(pool_of(record), chain(1, 2))
    compute(pool_of(PublishedBlocks(fd)), chain(2, 2))
    found = PublishedBlocks(fd).read()
    assert [each.hash for each in found] == chain(1, 2).hashes + chain(2, 2).hashes
    assert [each.number for each in found] == [0, 1, 2, 3]


def test_a_snapshot_is_found_with_all_its_parts_or_not_at_all(make):
    fd, record = make()
    pool, hashes = pool_of(record, record_blocks=2), chain(1, 1)
    (block,) = compute(pool, hashes)
    parts = pool.allocate(2)
    for block_id in parts:
        pool.count(block_id, references=1)
    assert pool.publish_snapshot(parts, hashes.hashes[0], "ann")
    again = pool_of(PublishedBlocks(fd), record_blocks=2)
    assert again.index.snapshots == {hashes.hashes[0]: parts}
    record.remove(parts[1])
    again = pool_of(PublishedBlocks(fd), record_blocks=2)
    assert again.index.snapshots == {}
    assert again.index.blocks(hashes.hashes) == [block]
    assert [each.block_id for each in PublishedBlocks(fd).read()] == [block]


def test_a_long_name_is_cut(make):
    fd, record = make()
    compute(pool_of(record), chain(1, 1), user="é" * 60)
    (found,) = PublishedBlocks(fd).read()
    assert found.user == "é" * 32


def test_another_fingerprint_begins_empty(make):
    fd, record = make()
    compute(pool_of(record), chain(1, 2))
    record.begin(bytes(32))
    assert PublishedBlocks(fd).read() == []
    assert PublishedBlocks(fd).fingerprint == bytes(32)


class Killed(Exception):
    """The daemon dies here."""


class DyingMemory:
    """Memory in which only so many bytes can still be written."""

    def __init__(self, memory, num_left):
        self._memory, self._num_left = memory, num_left

    def __setitem__(self, where, data):
        places = range(len(self._memory))[where] if isinstance(where, slice) else [where]
        for place, byte in zip(places, data if isinstance(where, slice) else [data], strict=True):
            if not self._num_left:
                raise Killed
            self._num_left -= 1
            self._memory[place] = byte

    def __getitem__(self, where):
        return self._memory[where]


def run_until_killed(record, num_bytes):
    """Publish, reuse and evict blocks; returns each block's content when the daemon died."""
    content = {}
    pool = pool_of(record, num_blocks=4)
    record._memory = DyingMemory(record._memory, num_bytes)
    try:
        for number in range(4):
            hashes = chain(number, 2)
            blocks = pool.allocate(2)
            for i, block_id in enumerate(blocks):
                pool.count(block_id, references=1)
                content[block_id] = hashes.hashes[i]  # a worker has written it
                pool.publish(block_id, hashes.hashes[i], hashes.parent(i), "ann")
            for block_id in reversed(blocks):
                pool.count(block_id, references=-1)
            for block_id in pool.allocate(1):
                content[block_id] = b"half written"
                pool.count(block_id, references=1)
                pool.count(block_id, references=-1)
    except Killed:
        return content
    return None


def test_wherever_the_daemon_dies_what_is_found_has_its_content(make):
    seen, num_bytes = set(), 0
    while True:
        fd, record = make(num_blocks=4)
        if (content := run_until_killed(record, num_bytes)) is None:
            break
        after = PublishedBlocks(fd)
        found = {each.block_id: each.hash for each in after.read()}
        assert found.items() <= content.items()
        assert len(pool_of(after, num_blocks=4).index) == len(found)
        seen.add(len(found))
        num_bytes += 1
    assert num_bytes > 800
    assert seen == {0, 1, 2, 3}


def damaged(fd, at, data):
    os.pwrite(fd, data, at)
    return fd


@pytest.mark.parametrize(
    "damage",
    [
        lambda fd: damaged(fd, 0, b"x"),
        lambda fd: damaged(fd, 8, b"\x09"),
        lambda fd: damaged(fd, 12, b"\x0a"),
        lambda fd: os.ftruncate(fd, 90),
        lambda fd: os.ftruncate(fd, 3),
    ],
    ids=["magic", "version", "number of blocks", "cut in an entry", "cut in its head"],
)
def test_what_is_no_record_is_refused(make, damage):
    fd, _ = make()
    damage(fd)
    with pytest.raises(Damaged):
        PublishedBlocks(fd)


@pytest.mark.parametrize("offset", [0, 3, 30], ids=["flag", "checksum", "hash"])
def test_a_damaged_entry_leaves_the_pool_empty(make, offset):
    fd, record = make()
    (block_id,) = compute(pool_of(record), chain(1, 1))
    damaged(fd, PublishedBlocks._start(block_id) + offset, b"\xee")
    pool = BlockPool("kv", 9, BLOCK_SIZE)
    with pytest.raises(Damaged):
        pool.adopt(PublishedBlocks(fd))
    pool.check_invariants()
    assert pool.num_free == pool.capacity
    assert len(pool.index) == 0
