"""The router with a tier below its pools, over fake workers whose KV is tokens.

The disk is a dictionary of tokens by place, which does things some time later, in part, or fails.
"""

import random

import pytest

from tests.worlds.router_world import World, expected_tokens
from tests.worlds.tiered_world import ARMS, TieredWorld, walk_beside_a_failing_disk


@pytest.mark.parametrize("arm", ARMS)
def test_what_was_used_twice_comes_from_disk_and_the_prompt_is_told_so(arm):
    world = TieredWorld(arm)
    prompt = list(range(41))
    world.use_twice(prompt)
    world.forget_pools()
    again = world.answered(prompt)
    assert again.num_cached_tokens == again.num_restored_tokens == 40
    assert "10 of 10 blocks" in again.restore_reason or ";" in again.restore_reason
    assert 0 < again.stamps.restored_ns <= again.stamps.started_ns - again.stamps.arrived_ns
    once_more = world.answered(prompt)
    assert (once_more.num_cached_tokens, once_more.num_restored_tokens) == (40, 0)


@pytest.mark.parametrize(("bytes_per_s", "is_fetched"), [(1e2, True), (1e12, False)])
def test_what_disk_and_another_pool_have_comes_from_where_it_is_quicker(bytes_per_s, is_fetched):
    world = TieredWorld("peer")
    prompt = list(range(41))
    world.use_twice(prompt)
    world.ledger.pools["prefill"].lose()
    world.ssd.costs.bytes_per_s = bytes_per_s
    world.router.copies.expected_ms = lambda *_: 5.0
    again = world.answered(prompt)
    assert again.num_cached_tokens == 40
    assert again.num_restored_tokens == (0 if is_fetched else 40)
    assert bool(world.router.counters.prefix_cache_fetches) == is_fetched
    assert "from another pool 6.0 ms" in again.restore_reason


@pytest.mark.parametrize("arm", ["peer", "shm"])
def test_where_nobody_prefills_blocks_come_to_the_pool_of_who_decodes(arm):
    world = TieredWorld(arm)
    prompt = list(range(41))
    world.use_twice(prompt)
    world.forget_pools()
    world.kill("prefill")
    again = world.answered(prompt)
    assert again.num_cached_tokens == again.num_restored_tokens == 40
    assert again.worker is None or again.worker == "decode"


def test_a_prefix_that_is_larger_than_what_may_be_loaded_at_once_comes_in_parts():
    world = TieredWorld("colocated", num_blocks=65)
    prompt = list(range(81))
    world.use_twice(prompt)
    world.forget_pools()
    again = world.answered(prompt)
    assert again.num_restored_tokens == 80
    assert again.restore_reason.count("8 of 8 blocks") == 2


@pytest.mark.parametrize("arm", ["colocated", "alias"])
def test_what_a_victim_had_computed_comes_back_from_disk(arm):
    world = TieredWorld(arm, num_blocks=17)
    sequences = [world.sequence(n, 40) for n in (10, 9, 12)]
    world.finish(*sequences)
    victims = [sequence for sequence in sequences if sequence.num_preemptions]
    assert victims
    assert world.ssd.counts.loaded_blocks
    computed = sum(world.scheduled[s.seq_id] for s in sequences)
    needed = sum(s.num_prompt_tokens + s.num_output_tokens - 1 for s in sequences)
    plain = World(arm, num_blocks=17)
    others = [plain.sequence(n, 40) for n in (10, 9, 12)]
    plain.submit(*others)
    plain.run()
    assert needed <= computed < sum(plain.scheduled[s.seq_id] for s in others)


def test_a_victim_whose_blocks_are_quicker_computed_leaves_nothing_on_disk():
    world = TieredWorld("colocated", num_blocks=17, compute_ms=0.001)
    world.finish(*[world.sequence(n, 40) for n in (10, 9, 12)])
    assert world.router.counters.preemptions
    assert world.ssd.counts.stored_blocks == 0


def test_who_needs_blocks_that_are_being_stored_gets_them_when_they_are():
    world = TieredWorld("colocated", num_blocks=17)
    for _ in range(2):  # a slab is made
        world.finish(world.sequence(prompt=[1, 2, 3, 4, 5, 6]))
    world.jobs_per_tick = 0
    sequences = [world.sequence(10, 40), world.sequence(10, 40)]
    world.submit(*sequences)
    for _ in range(60):
        world.tick()
    assert world.router.at.paused
    assert not world.is_quiet
    world.jobs_per_tick = 1
    world.run()
    for sequence in sequences:
        assert world.emitted[sequence.seq_id] == expected_tokens(sequence)


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("seed", range(4))
def test_a_long_random_walk_over_pool_and_disk_loses_nothing(arm, seed):
    rng = random.Random(seed)
    world = TieredWorld(arm, num_blocks=(26, 33)[seed % 2], num_slots=2)
    walk_beside_a_failing_disk(world, rng)
    assert world.ssd.counts.stored_blocks
