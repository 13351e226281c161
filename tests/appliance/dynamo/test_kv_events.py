"""Dynamo's router is told what the prefix cache holds, across the daemon's restarts."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.dynamo.kv_events import KvEvents


class Router:
    """Knows blocks by their ids, and refuses what it could not understand."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[int | None, list[int]]] = {}

    def stored(self, token_ids, block_ids, parent_id):
        size = len(token_ids) // len(block_ids)
        assert size * len(block_ids) == len(token_ids)
        for place, block_id in enumerate(block_ids):
            assert parent_id is None or parent_id in self.known
            self.known[block_id] = parent_id, token_ids[place * size : (place + 1) * size]
            parent_id = block_id

    def removed(self, block_ids):
        for block_id in block_ids:
            assert all(parent != block_id for parent, _ in self.known.values())
            del self.known[block_id]


def block(block_id: int, parent: int | None) -> dict:
    return {"id": block_id, "parent": parent, "token_ids": [block_id, block_id]}


def test_rows_of_blocks_are_told_together_each_after_its_parent():
    router = Router()
    contents = KvEvents(router)
    contents.read({"cleared": True, "block_size": 2})
    contents.read({"stored": [block(1, None), block(2, 1), block(5, None), block(3, 2)]})
    assert router.known == {i: (p, [i, i]) for i, p in ((1, None), (2, 1), (5, None), (3, 2))}
    contents.read({"removed": [3, 99]})
    assert sorted(router.known) == [1, 2, 5]
    contents.read({"cleared": True, "block_size": 2})
    assert not router.known
    assert not len(contents)


def test_a_block_without_the_one_before_it_is_not_told():
    router = Router()
    contents = KvEvents(router)
    contents.read({"stored": [block(2, 1), block(3, None)]})
    assert sorted(router.known) == [3]


@settings(max_examples=50)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=40))
def test_the_router_knows_what_the_daemon_has(changes):
    """Blocks of one chain come from the front and go from the back, as tails go before heads."""
    router, there = Router(), []
    contents = KvEvents(router)
    for is_stored, number in changes:
        if is_stored:
            new = [
                block(i, i - 1 if i else None) for i in range(len(there), max(number, len(there)))
            ]
            contents.read({"stored": new})
            there += [one["id"] for one in new]
        else:
            gone, there = there[number:], there[:number]
            contents.read({"removed": gone[::-1]})
        assert sorted(router.known) == there
