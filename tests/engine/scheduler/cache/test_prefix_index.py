"""Blocks found by hashes of their tokens, and which go first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvariantViolated
from engine.scheduler.cache.hashes import PrefixHasher
from engine.scheduler.cache.prefix_index import PrefixIndex


def chain(name, length):
    return [f"{name}{i}".encode() for i in range(length)]


def fill(index, first_block, hashes, user="", root=b""):
    """Publish a chain in blocks one after the other, and let go of it, tail first."""
    for i, each in enumerate(hashes):
        assert index.publish(first_block + i, each, hashes[i - 1] if i else root, user)
    for i in reversed(range(len(hashes))):
        index.released(first_block + i)


def evict(index):
    block_id = index.choose()
    index.taken(block_id)
    index.remove(block_id)
    return block_id


def test_the_longest_prefix_is_found():
    index = PrefixIndex("kv")
    hashes = chain("a", 5)
    fill(index, 1, hashes[:3])
    assert index.num_hit(hashes) == 3
    assert index.blocks(hashes) == [1, 2, 3]
    assert index.num_hit(chain("b", 5)) == 0
    assert index.blocks(chain("b", 5)) == []


def test_the_first_block_with_a_hash_keeps_it():
    index = PrefixIndex("kv")
    assert index.publish(1, b"x", b"", "ana")
    assert not index.publish(2, b"x", b"", "ben")
    assert not index.publish(1, b"y", b"", "ana")
    assert index.blocks([b"x"]) == [1]
    assert index.held == {"ana": 1}


def test_a_tail_goes_before_its_head_and_the_oldest_chain_first():
    index = PrefixIndex("kv")
    fill(index, 1, chain("a", 3))
    fill(index, 4, chain("b", 2))
    assert [evict(index) for _ in range(5)] == [3, 2, 1, 5, 4]


def test_what_was_used_again_is_young():
    index = PrefixIndex("kv")
    fill(index, 1, chain("a", 2))
    fill(index, 3, chain("b", 2))
    for block_id in (1, 2):
        index.taken(block_id)
    for block_id in (2, 1):
        index.released(block_id)
    assert [evict(index) for _ in range(4)] == [4, 3, 2, 1]


def test_a_head_waits_for_all_that_is_behind_it_whosever_it_is():
    index = PrefixIndex("kv")
    head = chain("head", 1)
    fill(index, 1, head, "ana")
    index.taken(1)
    fill(index, 2, chain("b", 2), "ben", root=head[0])
    index.released(1)
    fill(index, 4, chain("c", 4), "ana")
    assert [evict(index) for _ in range(7)] == [7, 6, 5, 3, 4, 2, 1]


def test_who_holds_more_than_a_share_loses_first():
    index = PrefixIndex("kv")
    fill(index, 1, chain("old", 2), "ben")
    for i in range(6):
        fill(index, 10 + i, chain(f"flood{i}", 1), "ana")
    assert [evict(index) for _ in range(4)] == [10, 11, 12, 13]
    assert index.held == {"ana": 2, "ben": 2}
    assert evict(index) == 2  # both hold alike: the least recently used


def test_a_user_whose_blocks_are_all_in_use_is_passed():
    index = PrefixIndex("kv")
    for i in range(5):
        index.publish(10 + i, f"flood{i}".encode(), b"", "ana")
    fill(index, 1, chain("old", 1), "ben")
    assert index.choose() == 1


def test_nothing_to_evict_is_a_bug():
    index = PrefixIndex("kv")
    index.publish(1, b"x", b"", "")
    with pytest.raises(InvariantViolated):
        index.choose()


class Snapshots:
    """An index of chains whose blocks lie end to end, with snapshots at some of their borders."""

    def __init__(self):
        self.index = PrefixIndex("kv")
        self.num_blocks = 0

    def chain(self, first_token, length):
        hashes = (
            PrefixHasher(bytes(32), b"", 1).chain(range(first_token, first_token + length)).hashes
        )
        fill(self.index, self.num_blocks + 1, hashes)
        self.num_blocks += length
        return hashes

    def keep(self, border):
        record = [self.num_blocks + 1, self.num_blocks + 2]
        self.num_blocks += 2
        assert self.index.publish_snapshot(record, border, "")
        for block_id in reversed(record):
            self.index.released(block_id)
        self.index.check_invariants(set(self.index._hashed))

    def use(self, border):
        for block_id in self.index.snapshots[border]:
            self.index.taken(block_id)
        for block_id in reversed(self.index.snapshots[border]):
            self.index.released(block_id)

    def drop(self):
        record = self.index.cheapest_snapshot()
        border = self.index.border_of(record[0])
        for block_id in record:
            self.index.taken(block_id)
            self.index.remove(block_id)
        return border


def test_of_snapshots_the_one_goes_that_saves_the_fewest_blocks():
    kept = Snapshots()
    a, b, c = (kept.chain(100 * number, length) for number, length in ((1, 9), (2, 4), (3, 6)))
    for border in (a[8], b[3], c[5], a[7]):
        kept.keep(border)
    assert [kept.drop() for _ in range(3)] == [a[8], b[3], c[5]]


def test_where_a_snapshot_has_gone_the_next_on_its_chain_saves_what_it_saved():
    kept = Snapshots()
    a, b = kept.chain(100, 9), kept.chain(200, 8)
    for border in (a[2], a[4], a[8], b[7]):
        kept.keep(border)
    # after a[2], the next saves five blocks; then a[8], which saved four, saves all nine
    assert [kept.drop() for _ in range(3)] == [a[4], a[2], b[7]]


def test_a_snapshot_within_a_chain_lowers_what_the_next_on_it_saves():
    kept = Snapshots()
    a, other = kept.chain(100, 9), kept.chain(200, 3)
    kept.keep(other[2])
    kept.keep(a[8])
    kept.keep(a[6])  # a[8] saves two blocks from now on, and nine again once a[6] has gone
    saved = {border: each.num_blocks for border, each in kept.index.worths.items()}
    assert saved == {other[2]: 3, a[8]: 2, a[6]: 7}
    assert [kept.drop() for _ in range(2)] == [a[8], other[2]]


def test_what_saves_much_and_is_not_used_goes_in_the_end():
    kept = Snapshots()
    large = kept.chain(100, 20)
    kept.keep(large[-1])
    gone = []
    for number in range(2, 8):
        kept.keep(kept.chain(100 * number, 6)[-1])
        gone.append(kept.drop())
    assert gone.index(large[-1]) == 3  # others were dropped that save 18 blocks together


def test_a_snapshot_in_use_is_not_dropped_and_one_used_again_goes_later():
    kept = Snapshots()
    assert kept.index.cheapest_snapshot() == []
    a, b, c = (kept.chain(100 * number, 5) for number in (1, 2, 3))
    for border in (a[-1], b[-1], c[-1]):
        kept.keep(border)
    for block_id in kept.index.snapshots[a[-1]]:
        kept.index.taken(block_id)
    assert kept.drop() == b[-1]
    for block_id in reversed(kept.index.snapshots[a[-1]]):
        kept.index.released(block_id)
    assert kept.drop() == c[-1]


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4), st.sampled_from("ab")), max_size=30)
)
def test_any_order_of_use_keeps_the_order_of_eviction(uses):
    """Chains used and let go of over and over: the heaps never lose a tail, nor grow for ever."""
    index, blocks = PrefixIndex("kv"), {}
    for name, length, user in uses:
        hashes = chain(f"c{name}-", length)
        for i, each in enumerate(hashes):
            if each in blocks:
                index.taken(blocks[each])
            else:
                blocks[each] = len(blocks) + 1
                index.publish(blocks[each], each, hashes[i - 1] if i else b"", user)
        for each in reversed(hashes):
            index.released(blocks[each])
        index.check_invariants(set(blocks.values()))
    left = {block_id: each.decode() for each, block_id in blocks.items()}
    while left:
        name, _, number = left.pop(evict(index)).rpartition("-")
        assert f"{name}-{int(number) + 1}" not in left.values()
        assert len(index) == len(left)
        index.check_invariants(set(left))


@pytest.mark.parametrize("damage", ["hashes", "users", "evictable blocks", "chains", "tails"])
def test_check_invariants_finds_damage(damage):
    index = PrefixIndex("kv")
    fill(index, 1, chain("a", 2), "ana")
    index.check_invariants({1, 2})
    match damage:
        case "hashes":
            index._blocks[b"a0"] = 7
        case "users":
            index.held["ana"] += 1
        case "evictable blocks":
            index._hashed[1].released_at = None
        case "chains":
            index._num_behind[b"a0"] += 1
        case "tails":
            index._tails["ana"].clear()
    with pytest.raises(InvariantViolated, match=damage):
        index.check_invariants({1, 2})
