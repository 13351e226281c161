"""Sequences whose layers with sliding windows give their blocks up: exact in every arrangement."""

import random

import pytest

from engine.scheduler.cache.window_blocks import Windows
from tests.worlds.router_world import ARMS, World, walk

WINDOWS = Windows(num_each=2, num_tokens=7, ahead_tokens=16)


@pytest.mark.parametrize("arm", ARMS)
def test_random_walks_are_exact(arm):
    world = World(arm, num_blocks=65, num_slots=9, windows=WINDOWS)
    walk(world, random.Random(arm))


def test_a_prefix_whose_window_was_given_away_is_computed_again_and_found_from_then_on():
    world = World("colocated", num_blocks=65, windows=WINDOWS)
    pool = world.ledger.pools["kv"]
    world.finish(long := world.sequence(80, 5))
    for block_id in list(pool.windows.spare):
        pool.drop_windows(block_id)
    prompt = [*long.prompt_token_ids[:40], *range(900, 910)]
    world.finish(bare := world.sequence(prompt=prompt))
    assert bare.num_cached_tokens == 0
    assert bare.cache_miss.reason == "token 0: window evicted"
    world.finish(again := world.sequence(prompt=prompt))
    assert again.num_cached_tokens == 48
