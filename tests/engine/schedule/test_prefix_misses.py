"""Every prompt that misses the cache says at which token, and the right reason."""

import msgspec

from engine.schedule.prefix_misses import NUM_SHOWN
from engine.schedule.sequence import FinishReason
from tests.engine.fake_workers import BLOCK_SIZE
from tests.engine.schedule.harness import World

BASE = list(range(100, 100 + 10 * BLOCK_SIZE))
EDITED = 4 * BLOCK_SIZE + 1


def missed(world, prompt, **own):
    sequence = world.sequence(prompt=list(prompt), **own)
    world.finish(sequence)
    return sequence.cache_miss and sequence.cache_miss.reason


def edited(at):
    return [*BASE[:at], 7, *BASE[at + 1 :]]


def test_ten_prompts_that_miss_say_why():
    world = World("alias")
    more = [*BASE, *range(900, 900 + 2 * BLOCK_SIZE)]
    said = [
        missed(world, BASE),
        missed(world, edited(EDITED)),
        missed(world, edited(8 * BLOCK_SIZE)),
        missed(world, more),
        missed(world, [5, *BASE]),
        missed(world, BASE, salt="mine"),
        missed(world, BASE, owner="ana", salt="hers"),
        missed(world, edited(2)),
    ]
    probed = world.sequence(prompt=BASE)
    sampling = msgspec.structs.replace(probed.sampling, prompt_logprobs=1)
    probed.spec = msgspec.structs.replace(probed.spec, sampling=sampling)
    world.submit(probed)
    said.append(probed.cache_miss.reason)
    world.router.abort(probed, FinishReason.ABORT, world.now_ns)
    world.run()
    flood(world)
    said.append(missed(world, BASE))
    assert said == [
        "token 0: never stored",
        f"token {EDITED}: another token",
        f"token {8 * BLOCK_SIZE}: another token",
        f"token {10 * BLOCK_SIZE}: never stored",
        "token 0: never stored",
        "token 0: another salt",
        "token 0: never stored",  # what other owners have sent is not told
        "token 2: another token",
        "token 0: prompt_logprobs",
        "token 0: evicted",
    ]
    assert missed(world, BASE) is None


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
        world.finish(world.sequence(prompt=[1000 + number, *range(30)], owner="flood"))


def test_a_prompt_that_was_given_up_was_never_stored():
    world = World("alias")
    given_up = world.sequence(prompt=BASE)
    world.submit(given_up)
    world.router.abort(given_up, FinishReason.ABORT, world.now_ns)
    world.run()
    assert missed(world, BASE) == "token 0: never stored"


def test_a_prompt_shorter_than_a_block_misses_nothing():
    assert missed(World("alias"), BASE[: BLOCK_SIZE - 1]) is None
