"""Every prompt that misses the cache says at which token, and the right reason."""

import msgspec

from engine.scheduler.cache.hashes import PrefixHasher
from engine.scheduler.cache.prefix_misses import NUM_SHOWN, PrefixMisses
from engine.wire.finish_reason import FinishReason
from tests.worlds.fake_workers import BLOCK_SIZE
from tests.worlds.router_world import World

BASE = list(range(100, 100 + 10 * BLOCK_SIZE))
EDITED = 4 * BLOCK_SIZE + 1


def missed(world, prompt, **own):
    sequence = world.sequence(prompt=list(prompt), **own)
    world.finish(sequence)
    return sequence.cache_miss and sequence.cache_miss.reason


def edited(at):
    return [*BASE[:at], 7, *BASE[at + 1 :]]


LONGER = [*BASE, *range(900, 900 + 2 * BLOCK_SIZE)]
OTHER = PrefixHasher(bytes(32), b"another model", BLOCK_SIZE)
"""Hashes the blocks of a second model of the same daemon."""

MISSES = [
    ({}, BASE, 0, "never stored"),
    ({}, edited(EDITED), EDITED, "other text"),
    ({}, edited(8 * BLOCK_SIZE), 8 * BLOCK_SIZE, "other text"),
    ({}, edited(2), 2, "other text"),
    ({}, LONGER, 10 * BLOCK_SIZE, "never stored"),
    ({}, [5, *BASE], 0, "never stored"),
    ({"salt": "mine"}, BASE, 0, "another salt"),
    ({"salt": "yours"}, edited(EDITED), 0, "another salt"),
    ({"owner": "ana", "salt": "hers"}, BASE, 0, "never stored"),  # others' prompts are not told
    ({"hasher": OTHER}, BASE, 0, "another model"),
    ({"hasher": OTHER}, LONGER, 10 * BLOCK_SIZE, "another model"),
    ({"hasher": OTHER}, [6, *BASE], 0, "never stored"),
    ({"hasher": OTHER, "salt": "mine"}, [6, *BASE], 0, "another salt"),
    ({"hasher": OTHER, "owner": "ana"}, edited(2), 0, "never stored"),
]
"""Prompts in this order, each with the place and the reason of its miss."""


def test_each_prompt_that_misses_says_where_and_why():
    misses = PrefixMisses()
    first, second = World("alias", misses=misses), World("alias", misses=misses)
    for number, (how, prompt, at, why) in enumerate(MISSES):
        world = second if "hasher" in how else first
        assert missed(world, prompt, **how) == f"token {at}: {why}", number
        assert missed(world, prompt, **how) is None, number
    for prompt in BASE, LONGER:
        probed = first.sequence(prompt=prompt)
        sampling = msgspec.structs.replace(probed.sampling, prompt_logprobs=1)
        probed.spec = msgspec.structs.replace(probed.spec, sampling=sampling)
        first.submit(probed)
        assert probed.cache_miss.reason == "token 0: prompt_logprobs"
        first.router.abort(probed, FinishReason.ABORT, first.now_ns)
        first.run()


def test_blocks_that_made_room_or_went_with_their_model_were_evicted():
    misses = PrefixMisses()
    world = World("alias", misses=misses)
    for prompt in BASE, LONGER:
        missed(world, prompt)
        flood(world)
        assert missed(world, prompt) == "token 0: evicted"
        assert missed(world, prompt) is None
    world.router.unloaded()
    again = World("alias", misses=misses)
    assert missed(again, BASE) == "token 0: evicted"
    assert missed(again, LONGER) == f"token {10 * BLOCK_SIZE}: evicted"


def test_the_texts_around_the_place_are_those_of_the_same_owner():
    world = World("alias")
    world.finish(world.sequence(prompt=edited(EDITED + 2), owner="ana"))
    world.finish(world.sequence(prompt=BASE, owner="bob"))
    asked = world.sequence(prompt=edited(EDITED), owner="bob")
    world.finish(asked)
    around = slice(EDITED - NUM_SHOWN, EDITED + NUM_SHOWN)
    assert asked.cache_miss.prompt_ids == tuple(edited(EDITED)[around])
    assert asked.cache_miss.earlier_ids == tuple(BASE[around])
    alone = world.sequence(prompt=edited(EDITED + 1), owner="eve")
    world.finish(alone)
    assert alone.cache_miss.earlier_ids == ()


def flood(world):
    """Fill the pool with other prompts, one after the other."""
    for number in range(20):
        world.finish(world.sequence(prompt=[1000 + number, *range(30)]))


def test_a_prompt_that_was_given_up_was_never_stored():
    world = World("alias")
    given_up = world.sequence(prompt=BASE)
    world.submit(given_up)
    world.router.abort(given_up, FinishReason.ABORT, world.now_ns)
    world.run()
    assert missed(world, BASE) == "token 0: never stored"


def test_a_prompt_shorter_than_a_block_misses_nothing():
    assert missed(World("alias"), BASE[: BLOCK_SIZE - 1]) is None
