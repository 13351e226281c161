"""GET /v1/penstock/cache: who reads all lines knows what its prompts would find."""

from __future__ import annotations

import json

import pytest

from engine.scheduler.cache.block_pool import BlockPool
from engine.scheduler.cache.hashes import PrefixHasher
from engine.scheduler.prefixes.cache_contents import CacheContents
from engine.scheduler.sequences.sequence import Sequence, Stamps
from engine.text.tokenizer import Tokenizer
from engine.wire.run_spec import RunSpec
from engine.wire.sampling import SamplingParams
from tests.appliance.api_server import serving
from tests.appliance.peers import BOB, client_of
from tests.tiny_tokenizers import byte_level
from tests.worlds.daemon_parts import FakeAppliance

HASHER = PrefixHasher(bytes(32), b"", 4)


@pytest.fixture
def appliance():
    appliance = FakeAppliance(Tokenizer(byte_level()))
    appliance.hasher = HASHER
    return appliance


@pytest.fixture
def pool():
    return BlockPool("only", 16, 4)


@pytest.fixture
async def served(appliance, pool, tmp_path):
    appliance.cache_contents = CacheContents({"only": pool})
    async with serving(appliance, tmp_path / "p.sock") as served:
        yield served


def store(appliance, pool, tokens, salt: str = "") -> list[int]:
    """Let the blocks of these tokens be found; which they are."""
    chain = HASHER.chain(tokens, HASHER.scope(salt))
    sequence = Sequence(
        1,
        "r",
        0,
        list(tokens),
        RunSpec(SamplingParams(max_tokens=1, seed=0)),
        Stamps(0),
        prefix=chain,
    )
    blocks = pool.allocate(len(chain))
    for place, block_id in enumerate(blocks):
        pool.index.publish(block_id, chain.hashes[place], chain.parent(place), "")
    appliance.cache_contents.stored(sequence, range(len(chain)))
    return blocks


class Lines:
    """The stream, line by line."""

    def __init__(self, reply) -> None:
        self._lines = reply.aiter_lines()

    async def next(self) -> dict:
        return json.loads(await anext(self._lines))


async def test_what_is_there_comes_first_and_then_each_change(served, appliance, pool):
    first = store(appliance, pool, range(10))
    async with served.http.stream("GET", "/v1/penstock/cache") as reply:
        lines = Lines(reply)
        assert await lines.next() == {"cleared": True, "block_size": 4}
        told = (await lines.next())["stored"]
        assert [one["token_ids"] for one in told] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert [one["parent"] for one in told] == [None, told[0]["id"]]
        store(appliance, pool, [*range(8), 70, 71, 72, 73])
        ((more,)) = (await lines.next())["stored"]
        assert (more["parent"], more["token_ids"]) == (told[1]["id"], [70, 71, 72, 73])
        pool._forget(first[1])
        assert await lines.next() == {"removed": [told[1]["id"]]}


async def test_nobody_is_told_of_prompts_that_its_own_would_not_find(served, appliance, pool):
    store(appliance, pool, range(4), "a secret")
    async with served.http.stream("GET", "/v1/penstock/cache") as reply:
        lines = Lines(reply)
        assert (await lines.next())["cleared"]
        store(appliance, pool, range(20, 24))
        assert [one["token_ids"][0] for one in (await lines.next())["stored"]] == [20]


async def test_who_falls_behind_begins_anew(served, appliance, pool, monkeypatch):
    async with served.http.stream("GET", "/v1/penstock/cache") as reply:
        lines = Lines(reply)
        await lines.next()
        changes = appliance.cache_contents.changes
        monkeypatch.setattr(appliance.cache_contents, "changes", lambda *_: None)
        store(appliance, pool, range(4))
        assert (await lines.next())["cleared"]
        assert (await lines.next())["stored"]
        monkeypatch.setattr(appliance.cache_contents, "changes", changes)


async def test_it_ends_with_the_model(served, appliance, pool):
    async with served.http.stream("GET", "/v1/penstock/cache") as reply:
        appliance.cache_contents = CacheContents({"only": pool})
        assert [json.loads(line) async for line in reply.aiter_lines()][1:] == []


async def test_it_is_for_operators_and_where_there_is_a_cache(served, appliance):
    client = client_of(appliance, BOB)
    assert (await client.get("/v1/penstock/cache")).status_code == 403
    appliance.hasher = None
    reply = await served.http.get("/v1/penstock/cache")
    assert (reply.status_code, reply.json()["error"]["code"]) == (409, "no_prefix_cache")


def test_only_so_many_changes_are_kept(pool, appliance):
    contents = appliance.cache_contents = CacheContents({"only": pool})
    root = HASHER.scope().root
    store(appliance, pool, range(4))
    assert [change.is_stored for change in contents.changes(0, root)] == [True]
    assert contents.changes(contents.num_changes, root) == []
    contents._changes.clear()
    assert contents.changes(0, root) is None
