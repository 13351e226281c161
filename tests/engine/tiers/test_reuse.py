"""Distances against a list of all uses, and what a cache of each size finds."""

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.tiers.index import ReuseDistances

USES = st.lists(st.integers(0, 20), max_size=150)


def distances_of(uses):
    """By looking back, for each use that is not the first."""
    found = []
    for number, block in enumerate(uses):
        if block in uses[:number]:
            last = number - 1 - uses[:number][::-1].index(block)
            found.append(len(set(uses[last + 1 : number])))
    return found


def hits_of(uses, size):
    """A cache of so many blocks that forgets the least recently used."""
    cache, hits = OrderedDict(), 0
    for block in uses:
        hits += cache.pop(block, None) is not None
        cache[block] = True
        if len(cache) > size:
            cache.popitem(last=False)
    return hits


def watch(uses, **options):
    reuse = ReuseDistances(share=1, **options)
    for block in uses:
        reuse.use([bytes([block])])
    return reuse


@given(USES)
def test_distances_are_those_of_looking_back(uses):
    reuse = watch(uses, max_watched=32)
    wanted = sorted(distance.bit_length() for distance in distances_of(uses))
    assert sorted(reuse.counts.elements()) == wanted
    assert reuse.num_uses == len(uses)


@given(USES, st.sampled_from([1, 2, 4, 8, 16]))
def test_a_cache_of_a_power_of_two_finds_what_it_is_said_to(uses, size):
    if uses:
        found_by = watch(uses, max_watched=32).found_by(size)
        assert found_by * len(uses) == pytest.approx(hits_of(uses, size))


@given(USES)
def test_what_was_used_too_long_ago_counts_as_new(uses):
    reuse = watch(uses, max_watched=8)
    assert sum(reuse.counts.values()) == hits_of(uses, 8)


def test_what_was_never_used_tells_nothing():
    reuse = ReuseDistances()
    assert reuse.found_by(100) is None
    reuse.add([bytes(16)])
    assert reuse.found_by(100) is None
    reuse.use([bytes(16)])
    assert reuse.found_by(100) == 1


def test_of_eight_blocks_one_is_watched_and_its_distance_is_an_eighth():
    reuse = ReuseDistances()
    blocks = [bytes([n % 256, n // 256]) for n in range(2048)]
    for _ in range(3):
        reuse.use(blocks)
    assert reuse.num_uses == 3 * 256
    assert reuse.found_by(1000) == 0
    assert reuse.found_by(2048) == pytest.approx(2 / 3)
