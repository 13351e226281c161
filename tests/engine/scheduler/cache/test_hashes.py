"""Chains of block hashes are alike exactly as far as their tokens are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduler.cache.hashes import HASH_BYTES, PrefixHasher

SIZE = 4
KEY = bytes(range(32))
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def hasher(key=KEY, extra=b"model", size=SIZE):
    return PrefixHasher(key, extra, size)


@given(tokens)
def test_every_full_block_has_a_hash_and_no_other(token_ids):
    chain = hasher().chain(token_ids)
    assert len(chain) == len(token_ids) // SIZE
    assert chain.num_tokens == len(chain) * SIZE
    assert all(len(each) == HASH_BYTES for each in chain.hashes)


@given(tokens, tokens, tokens)
def test_chains_are_alike_exactly_as_far_as_their_tokens_are(common, mine, theirs):
    one, other = common + mine, common + theirs
    num_alike = 0
    while one[: (num_alike + 1) * SIZE] == other[: (num_alike + 1) * SIZE] and (
        num_alike + 1
    ) * SIZE <= min(len(one), len(other)):
        num_alike += 1
    a, b = hasher().chain(one), hasher().chain(other)
    assert a.num_common(b) == b.num_common(a) == num_alike
    assert a.hashes[:num_alike] == b.hashes[:num_alike]
    assert not set(a.hashes[num_alike:]) & set(b.hashes[num_alike:])


@given(tokens, st.lists(st.integers(0, 40), max_size=4))
def test_a_chain_that_grows_is_the_chain_of_the_whole(token_ids, cuts):
    whole, grown = hasher().chain(token_ids), hasher().chain([])
    for cut in [*sorted(cuts), len(token_ids)]:
        grown.grow(token_ids[grown.num_tokens : cut])
    assert grown.hashes == whole.hashes


def test_a_copy_grows_on_its_own():
    chain = hasher().chain([1, 2, 3, 4])
    twin = chain.copy()
    twin.grow([5, 6, 7, 8])
    chain.grow([5, 6, 7, 9])
    assert (len(chain), len(twin), chain.num_common(twin)) == (2, 2, 1)
    assert chain.parent(0) == twin.parent(0) == chain.scope.root
    assert chain.parent(1) == chain.hashes[0]


@pytest.mark.parametrize(
    "other",
    [
        hasher(key=bytes(32)).chain([1, 2, 3, 4]),
        hasher(extra=b"another").chain([1, 2, 3, 4]),
        hasher().chain([1, 2, 3, 4], hasher().scope("salt")),
        hasher(size=2).chain([1, 2, 3, 4]),
    ],
    ids=["key", "extra", "salt", "block size"],
)
def test_what_a_block_depends_on_beside_its_tokens_sets_it_apart(other):
    assert not set(hasher().chain([1, 2, 3, 4]).hashes) & set(other.hashes)


def test_salts_are_told_apart_wherever_they_are_cut():
    one = PrefixHasher(KEY, b"model", SIZE, isolates_users=True)
    scopes = [(), ("ab",), ("a", "b"), ("", "ab"), ("b", "a"), ("\ud800",)]
    assert len({one.scope(*salts).root for salts in scopes}) == len(scopes)
