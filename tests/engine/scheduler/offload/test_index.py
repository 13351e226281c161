"""Blocks to places: what is kept, what goes, what a larger cache would have found."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.scheduler.cache.hashes import record_hashes
from engine.scheduler.cache.snapshot_worths import Saved
from engine.scheduler.offload.index import HIGH_WATERMARK, LOW_WATERMARK, RecordPlace, SlabIndex
from engine.scheduler.offload.records import DIGEST_BYTES, RecordHead

HASHES = st.integers(0, 11).map(lambda n: bytes([n]) * 16)


def head(block_hash, number=1, stored_at_s=0):
    return RecordHead(number, stored_at_s, 8, block_hash, bytes(DIGEST_BYTES), 0)


def name(n):
    return bytes([n]) * 16


def stored(index, *hashes, now_s=0):
    for block_hash in hashes:
        entry = index.begin_store(block_hash, now_s)
        assert entry is not None
        index.end_store(entry, is_written=True)


@pytest.fixture
def index():
    index = SlabIndex(max_age_s=100)
    index.add_slab(0, 4)
    return index


def test_a_block_is_there_when_it_has_been_written(index):
    entry = index.begin_store(name(1), 0)
    assert name(1) not in index
    assert index.is_known(name(1))
    assert index.begin_store(name(1), 0) is None
    index.end_store(entry, is_written=True)
    assert name(1) in index
    assert len(index) == 1


def test_what_could_not_be_written_is_not_there_and_its_place_is_free(index):
    index.end_store(index.begin_store(name(1), 0), is_written=False)
    assert not index.is_known(name(1))
    assert index.num_free == 4


def test_a_full_disk_takes_nothing_more(index):
    stored(index, *map(name, range(4)))
    assert index.begin_store(name(9), 0) is None


def test_a_chain_is_there_up_to_its_first_gap(index):
    stored(index, name(1), name(2), name(4))
    assert index.num_leading([name(1), name(2), name(3), name(4)]) == 2


def test_the_least_recently_used_goes_first_and_a_tail_before_its_head():
    index = SlabIndex()
    index.add_slab(0, 100)
    chain = [name(n) for n in range(100)]
    stored(index, *chain)
    index.touch(chain[:50])
    assert index.evict(100) == 100 - int(100 * LOW_WATERMARK)
    assert index.num_leading(chain) == 50
    index.touch(chain[60:])
    stored(index, *(name(n) for n in range(100, 106)))
    assert index.evict(100) == 6  # those of the second half that are oldest
    stored(index, *(name(n) for n in range(150, 156)))
    index.touch(chain[90:])
    index.touch([name(n) for n in (*range(60, 90), *range(100, 106), *range(150, 156))])
    while index.evict(60):
        pass
    assert index.num_leading(chain) < 50
    assert chain[0] not in index or index.num_leading(chain) > 0


def record(number):
    return record_hashes(name(number), 10)


@pytest.mark.parametrize("is_restarted", [False, True])
def test_snapshots_beyond_their_share_go_whole_the_least_recently_used_first(is_restarted):
    index = SlabIndex()
    hashes = [name(1), *(each for n in range(3, 7) for each in record(n)), name(2)]
    if is_restarted:
        heads = [RecordHead(n, 10, 8, each, bytes(32), 0) for n, each in enumerate(hashes)]
        index.add_slab(0, 60, enumerate(heads))
        index.order_by_age()
    else:
        index.add_slab(0, 60)
        stored(index, *hashes)
    index.check_invariants()
    index.touch([name(1), *record(3)])
    assert index.evict(60) == 10
    assert not any(map(index.is_known, record(4)))
    assert all(map(index.is_known, (name(1), name(2), *record(3), *record(5), *record(6))))
    assert index.evict(60) == 0
    index.check_invariants()


@pytest.mark.parametrize("is_restarted", [False, True])
def test_snapshots_go_that_save_the_fewest_blocks_and_what_follows_them_saves_theirs(is_restarted):
    index = SlabIndex()
    saved = {3: Saved(7), 4: Saved(2, name(3)), 5: Saved(5, name(4)), 6: Saved(6), 7: Saved(9)}
    index.add_slab(0, 0 if is_restarted else 60)
    for number, (border, each) in enumerate(saved.items()):
        heads = [
            RecordHead(10 * number + i, 10, 8, part, bytes(32), 0, each)
            for i, part in enumerate(record(border))
        ]
        if is_restarted:
            index.add_slab(number + 1, 10, enumerate(heads))
        for head in () if is_restarted else heads:
            index.end_store(index.begin_store(head.block_hash, 10, each), is_written=True)
    if is_restarted:
        index.order_by_age()
    gone = []
    for most in (40, 20):
        before = [border for border in saved if index.is_known(record(border)[0])]
        index.evict(2 * most)
        gone.append({b for b in before if not index.is_known(record(b)[0])})
        index.check_invariants()
    assert gone == [{4}, {6, 3}]  # without 4, that after it saves seven, as many as 3


def test_nothing_goes_before_the_high_watermark():
    index = SlabIndex()
    index.add_slab(0, 100)
    stored(index, *(name(n) for n in range(int(100 * HIGH_WATERMARK))))
    assert index.evict(100) == 0


def test_a_place_that_is_read_is_given_to_nobody_until_it_is_not(index):
    stored(index, *map(name, range(4)))
    entry = index.begin_load(name(0))
    index.drop(name(0))
    assert name(0) not in index
    assert index.begin_store(name(9), 0) is None
    index.end_load(entry)
    assert index.begin_store(name(9), 0).place == entry.place


def test_who_reads_and_finds_damage_has_it_dropped_once(index):
    stored(index, name(1))
    first, second = index.begin_load(name(1)), index.begin_load(name(1))
    index.end_load(first, is_sound=False)
    index.end_load(second, is_sound=False)
    assert name(1) not in index
    assert index.num_damaged == 1
    assert index.num_free == 4


def test_records_expire_and_what_is_left_of_older_ones_is_to_be_erased(index):
    stored(index, name(1), now_s=10)
    stored(index, name(2), now_s=60)
    index.drop(name(1))  # its bytes are still in its place
    assert index.expire(111) == [RecordPlace(0, 0)]
    assert index.expire(111) == []
    assert index.num_free == 2
    index.erased([RecordPlace(0, 0)])
    assert index.num_free == 3
    assert index.expire(161) == [RecordPlace(0, 1)]
    assert index.num_expired == 1


def test_of_a_block_from_before_the_start_is_known_since_when_nobody_used_it(index):
    assert index.unused_since_s is None
    heads = [RecordHead(n, 10 * n, 8, name(n), bytes(32), 0) for n in (1, 2)]
    index.add_slab(7, 2, enumerate(heads))
    index.order_by_age()
    assert index.unused_since_s == 10
    index.touch([name(1)])
    assert index.unused_since_s == 20
    index.end_load(index.begin_load(name(2)))
    assert index.unused_since_s is None, "all of them are in use"


def test_of_two_records_of_one_block_the_newer_is_found():
    for numbers in ((1, 2), (2, 1)):
        index = SlabIndex()
        index.add_slab(0, 2, [(i, head(name(1), n)) for i, n in enumerate(numbers)])
        index.order_by_age()
        assert index.begin_load(name(1)).place == RecordPlace(0, numbers.index(2))
        assert index.num_free == 1
        entry = index.begin_store(name(5), 0)
        assert entry.number == 3
        index.check_invariants()


def test_a_slab_that_is_gone_takes_its_records_with_it(index):
    index.add_slab(1, 2, [(0, head(name(7), 5))])
    entry = index.begin_load(name(7))
    index.remove_slab(1)
    assert name(7) not in index
    index.end_load(entry)
    assert index.num_places == index.num_free == 4


def test_clearing_leaves_nothing_to_find_and_names_all_that_is_to_be_erased(index):
    stored(index, name(1), name(2))
    reading = index.begin_load(name(2))
    assert index.clear() == [RecordPlace(0, 0)]
    index.end_load(reading)
    assert index.clear() == [RecordPlace(0, 1)]
    assert len(index) == 0


class Walk(RuleBasedStateMachine):
    """Any order of what the tier does with its index."""

    @initialize()
    def begin(self):
        self.index = SlabIndex(max_age_s=5)
        self.now_s = 0
        self.next_slab = 0
        self.writing, self.reading, self.erasing = [], [], []

    @rule(count=st.integers(1, 4))
    def grow(self, count):
        self.index.add_slab(self.next_slab, count)
        self.next_slab += 1

    @rule(data=st.data())
    @precondition(lambda self: self.next_slab)
    def lose(self, data):
        self.index.remove_slab(data.draw(st.integers(0, self.next_slab - 1)))
        self.erasing = [place for place in self.erasing if place.slab in self.index._slabs]

    @rule(block_hash=HASHES)
    def store(self, block_hash):
        if (entry := self.index.begin_store(block_hash, self.now_s)) is not None:
            assert entry.place not in {e.place for e in self.writing + self.reading}
            self.writing.append(entry)

    @rule(is_written=st.booleans())
    @precondition(lambda self: self.writing)
    def end_store(self, is_written):
        self.index.end_store(self.writing.pop(0), is_written=is_written)

    @rule(block_hash=HASHES)
    def load(self, block_hash):
        if (entry := self.index.begin_load(block_hash)) is not None:
            assert entry.block_hash == block_hash
            self.reading.append(entry)

    @rule(is_sound=st.booleans())
    @precondition(lambda self: self.reading)
    def end_load(self, is_sound):
        self.index.end_load(self.reading.pop(), is_sound=is_sound)

    @rule(chain=st.lists(HASHES, unique=True))
    def touch(self, chain):
        self.index.touch(chain)

    @rule()
    def evict(self):
        self.index.evict(self.index.num_places)

    @rule(elapsed_s=st.integers(1, 4))
    def expire(self, elapsed_s):
        self.now_s += elapsed_s
        self.erasing += self.index.expire(self.now_s)

    @rule()
    def clear(self):
        self.erasing += self.index.clear()

    @rule()
    def damaged(self):
        self.erasing += self.index.damaged()

    @rule()
    def erased(self):
        self.index.erased(self.erasing)
        self.erasing = []

    @invariant()
    def holds(self):
        self.index.check_invariants(self.erasing)


Walk.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestWalk = Walk.TestCase
