"""The DRAM cache's memory, with models of several block sizes that take turns."""

import os
import random

import pytest

from engine.scheduler.offload.cache_memory import NUM_SEGMENTS, PADDING_BYTES, CacheMemory
from engine.scheduler.offload.index import SlabIndex

CAP_BYTES = 1 << 20
SIZES = {b"a": 1000, b"b": 1700, b"c": 4096}
"""Bytes of a model's block, by the model's fingerprint."""


class Turns:
    """Models that are served in turns, each of which stores blocks by one name each."""

    def __init__(self, *, is_shared=True):
        self.memory = CacheMemory(CAP_BYTES, is_shared=is_shared)
        self.now_s, self.served = 100, b""
        self.index = SlabIndex()
        self.content = {}
        """What lies where, by its first byte."""

    def serve(self, model):
        self.now_s += 10
        self.memory.make_room(SIZES[model], 0)
        self.index = self.memory.serve(model, model.decode(), SIZES[model], self.now_s)
        self.served = model
        return self

    def store(self, *names):
        """Store blocks as a tier does: evict, find a place, grow, write."""
        most = self.memory.max_places(SIZES[self.served])
        for name in (each for each in names if not self.index.is_known(each)):
            self.index.evict(most)
            if not self.index.num_free:
                head = self.memory.grow(self.index.unused_since_s)
                if head is not None:
                    self.index.add_slab(head.number, head.num_records)
                else:
                    most = self.index.num_places
                    self.index.evict(most)
            entry = self.index.begin_store(name, self.now_s)
            self.write(self.range_of(entry.place), name)
            self.index.end_store(entry, is_written=True)
        return self

    def range_of(self, place):
        start = self.memory.block_of(place) * SIZES[self.served]
        return range(start, start + SIZES[self.served])

    def write(self, where, name):
        over = [r for r in self.content if r.start < where.stop and where.start < r.stop]
        for one in over:
            del self.content[one]
        self.content[where] = (self.served, name)

    def check(self):
        """What the served model's index has lies where it says."""
        for name in self.index.hashes:
            entry = self.index.begin_load(name)
            where = self.range_of(entry.place)
            assert self.content[where] == (self.served, name)
            assert where.start >= SIZES[self.served], "block 0 is everybody's"
            assert where.stop <= os.fstat(self.memory.fd).st_size
            self.index.end_load(entry)
        self.index.check_invariants()


def names(first, count):
    return [n.to_bytes(16) for n in range(first, first + count)]


def test_a_model_finds_all_it_has_left_when_it_is_served_again():
    turns = Turns()
    turns.serve(b"a").store(*names(0, 100))
    turns.serve(b"b").store(*names(0, 100))
    assert [(s.model, s.num_blocks, s.num_bytes) for s in turns.memory.shares()] == [
        ("a", 100, 100 * SIZES[b"a"])
    ]
    turns.serve(b"a")
    assert set(turns.index.hashes) == set(names(0, 100))
    turns.check()
    turns.serve(b"b")
    assert set(turns.index.hashes) == set(names(0, 100))
    turns.check()


def test_the_cap_is_of_all_models_and_the_one_unused_longest_makes_room():
    turns = Turns()
    for model in (b"a", b"b"):
        turns.serve(model).store(*names(0, 250))
    turns.serve(b"c").store(*names(0, 120))
    kept = {share.model: share.num_blocks for share in turns.memory.shares()}
    assert kept["b"] == 250 > kept.get("a", 0)
    assert len(turns.index) == 120
    assert sum(s.num_bytes for s in turns.memory.shares()) + len(turns.index) * 4096 <= CAP_BYTES
    turns.check()


def test_own_blocks_unused_for_longer_go_before_anothers():
    turns = Turns()
    turns.serve(b"a").store(*names(0, 500))
    turns.serve(b"b").store(*names(0, 250))
    turns.serve(b"a").store(*names(1000, 200))
    (share,) = turns.memory.shares()
    assert (share.model, share.num_blocks) == ("b", 250)
    assert set(names(1000, 200)) <= set(turns.index.hashes)
    turns.check()


def test_what_was_being_stored_or_read_when_a_model_went_is_not_there_or_free_again():
    turns = Turns()
    turns.serve(b"a").store(*names(0, 3))
    turns.index.begin_store(names(7, 1)[0], turns.now_s)
    turns.index.begin_load(names(0, 1)[0])
    turns.index.drop(names(0, 1)[0])
    turns.serve(b"b").serve(b"a")
    assert set(turns.index.hashes) == set(names(1, 2))
    turns.check()


def test_a_cache_of_no_bytes_makes_no_memory_until_a_model_stages_blocks():
    memory = CacheMemory(0, is_shared=False)
    assert (memory.make_room(1000, 0), memory.fd, memory.num_bytes) == (0, None, 0)
    memory.close()
    num_blocks = memory.make_room(1000, 4)
    assert memory.fd is not None
    assert os.fstat(memory.fd).st_size == num_blocks * 1000 >= 4000
    memory.close()


def test_a_lone_model_has_all_of_the_memory():
    turns = Turns(is_shared=False)
    turns.serve(b"a")
    assert turns.memory.max_places(1000) == CAP_BYTES // 1000
    shared = Turns()
    shared.serve(b"a")
    assert shared.memory.num_segments == NUM_SEGMENTS
    lost = CAP_BYTES // 1000 - shared.memory.max_places(1000)
    assert 0 < lost <= 2 * NUM_SEGMENTS
    assert shared.memory.num_bytes == 0, "only what is written takes memory"


def test_a_block_larger_than_the_padding_costs_others_only_what_it_covers():
    turns = Turns()
    turns.serve(b"a").store(*names(0, 500))
    size = PADDING_BYTES + 1
    turns.memory.make_room(size, 0)
    turns.memory.serve(b"large", "large", size, 200)
    (share,) = turns.memory.shares()
    assert 0 < 500 - share.num_blocks <= -(-500 // NUM_SEGMENTS) + 65
    assert turns.memory.max_places(size) == 0


@pytest.mark.parametrize("seed", range(5))
def test_in_a_long_random_walk_no_block_is_written_by_another_model(seed):
    rng, turns, peak = random.Random(seed), Turns(), 0
    for _ in range(60):
        turns.serve(rng.choice(list(SIZES)))
        turns.check()
        turns.store(*names(rng.randrange(400), rng.randrange(300)))
        turns.index.touch(names(rng.randrange(400), 50))
        held = len(turns.index) * SIZES[turns.served]
        held += sum(share.num_bytes for share in turns.memory.shares())
        assert held <= CAP_BYTES
        peak = max(peak, held)
    assert peak > CAP_BYTES * 0.8
