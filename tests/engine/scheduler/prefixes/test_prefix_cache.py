"""Hits at admission, over fake workers whose KV is tokens: what is found is what was computed."""

import dataclasses

import msgspec
import pytest

from engine.scheduler.cache.block_pool import BlockState
from engine.scheduler.sequences.sequence import On, Phase
from engine.wire.finish_reason import FinishReason
from engine.wire.run_spec import RunSpec
from tests.worlds.fake_workers import BLOCK_SIZE
from tests.worlds.router_world import ARMS, COPYING, World, expected_tokens, next_turn


def with_logprobs(sequence):
    sampling = msgspec.structs.replace(sequence.sampling, prompt_logprobs=0)
    return dataclasses.replace(sequence, spec=RunSpec(sampling))


@pytest.mark.parametrize("arm", ARMS)
def test_a_second_turn_does_not_compute_the_first_again(arm):
    world = World(arm)
    first = world.sequence(42, 6)
    world.finish(first)
    second = next_turn(world, first)
    world.finish(second)
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens >= 40
    outputs_computed = second.sampling.max_tokens - 1
    computed = second.num_prompt_tokens - second.num_cached_tokens + outputs_computed
    assert world.scheduled[second.seq_id] == computed


@pytest.mark.parametrize("arm", ["alias", "colocated", "elastic", "gpu", "2x2 elastic"])
def test_an_answer_is_found_where_the_pool_is_shared(arm):
    world = World(arm)
    first = world.sequence(10, 30)
    world.finish(first)
    second = next_turn(world, first)
    world.finish(second)
    assert second.num_cached_tokens == 36  # of 39 tokens that were computed, those of full blocks


@pytest.mark.parametrize("arm", ARMS)
def test_choices_compute_their_prompt_once(arm):
    world = World(arm)
    leader = world.sequence(40, 6)
    twins = [world.sequence(max_tokens=6, prompt=leader.prompt_token_ids) for _ in range(3)]
    world.finish(leader, *twins)
    for twin in twins:
        # the last chunk of the prompt may be computed elsewhere as soon as it would be waited for
        assert twin.num_cached_tokens in ((32, 36) if "x" in arm else (36,))
        assert world.scheduled[twin.seq_id] == 40 - twin.num_cached_tokens + 5


@pytest.mark.parametrize("arm", ["alias", "elastic", "peer", "gpu shm"])
@pytest.mark.parametrize("after_ticks", [0, 2, 4])
def test_nobody_waits_for_one_who_has_ended(arm, after_ticks):
    world = World(arm)
    leader = world.sequence(60, 6)
    twin = world.sequence(max_tokens=6, prompt=leader.prompt_token_ids)
    world.submit(leader, twin)
    for _ in range(after_ticks):
        world.tick()
    assert twin.phase is Phase.QUEUED
    world.router.abort(leader, FinishReason.ABORT, world.now_ns)
    world.check()
    assert isinstance(twin.where, On)
    world.run()
    assert world.emitted[twin.seq_id] == expected_tokens(twin)


def test_a_short_prompt_does_not_wait_for_a_long_one_with_a_little_in_common():
    world = World("alias")
    long = world.sequence(120, 4)
    world.submit(long)
    short = world.sequence(prompt=[*long.prompt_token_ids[:4], 1, 2, 3], max_tokens=4)
    world.submit(short)
    assert isinstance(short.where, On)
    world.run()


def test_prompts_with_a_salt_of_their_own_find_only_their_own():
    world = World("alias")
    first = world.sequence(30, 4, salt="hers")
    world.finish(first)
    prompt = first.prompt_token_ids
    other, same = world.sequence(prompt=prompt), world.sequence(prompt=prompt, salt="hers")
    world.finish(other, same)
    assert (other.num_cached_tokens, same.num_cached_tokens) == (0, 28)


def test_a_sequence_without_hashes_neither_finds_nor_leaves_anything():
    world = World("alias")
    for _ in range(2):
        sequence = world.sequence(prompt=list(range(30)))
        sequence.prefix = None
        world.finish(sequence)
        assert sequence.num_cached_tokens == 0
    assert world.ledger.pools["kv"].counts[BlockState.CACHED] == 0
    assert world.router.counters.prefix_cache_queries == 0


def test_where_prompt_tokens_are_reported_on_all_of_them_are_computed():
    world = World("alias")
    first = world.sequence(30, 4)
    world.finish(first)
    second = with_logprobs(world.sequence(prompt=first.prompt_token_ids))
    world.finish(second)
    assert second.num_cached_tokens == 0
    assert world.scheduled[second.seq_id] == 30 + 4


@pytest.mark.parametrize("arm", COPYING)
def test_only_what_is_missing_is_copied(arm):
    if "2" in arm:
        pytest.skip("which pair takes the second turn depends on their loads")
    world = World(arm.removeprefix("elastic "))
    first = world.sequence(42, 6)
    world.finish(first)
    assert first.handoff_bytes == 11 * BLOCK_SIZE
    second = next_turn(world, first)
    world.finish(second)
    num_blocks = -(-second.num_prompt_tokens // BLOCK_SIZE)
    assert second.handoff_bytes == (num_blocks - 11) * BLOCK_SIZE  # 47 tokens: eleven full blocks


@pytest.mark.parametrize("arm", ARMS)
def test_a_pool_that_holds_little_more_than_one_sequence_evicts_all_the_time(arm):
    world = World(arm, num_blocks=15)
    last = world.sequence(20, 3)
    world.finish(last)
    for _ in range(6):
        last, other = next_turn(world, last, 1, max_tokens=3), world.sequence(22, 9)
        world.finish(last, other)
    evicted = sum(pool.index.num_evicted for pool in world.ledger.pools.values())
    assert evicted


@pytest.mark.parametrize("arm", ["gpu", "gpu peer", "gpu shm", "gpu colocated", "gpu 2x2 shm"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("after_ticks", range(2, 9))
def test_what_is_shared_is_lost_with_its_memory_and_computed_by_each_alone(arm, role, after_ticks):
    world = World(arm)
    leader = world.sequence(40, 12)
    world.finish(leader)
    turns = [next_turn(world, leader, i, max_tokens=9) for i in (1, 5, 9)]
    world.submit(*turns)
    for _ in range(after_ticks):
        world.tick()
    world.kill(world.topology.playing(role)[0])
    world.revive_all()
    world.run()
    for sequence in turns:
        assert world.emitted[sequence.seq_id] == expected_tokens(sequence)
    world.assert_all_free()


def test_hits_and_queries_are_counted_in_tokens():
    world = World("alias")
    first = world.sequence(30, 4)
    world.finish(first)
    world.finish(world.sequence(prompt=first.prompt_token_ids))
    counters = world.router.counters
    assert (counters.prefix_cache_queries, counters.prefix_cache_hits) == (60, 28)
    assert counters.prefix_cache_ns > 0


def test_a_turn_is_charged_what_is_not_cached():
    world = World("alias")
    first = world.sequence(30, 4, owner="her")
    world.finish(first)
    queue = world.router.queue
    world.submit(*[world.sequence(60, 60, owner="him") for _ in range(5)])
    level = min(queue._charged.values())
    again = world.sequence(prompt=first.prompt_token_ids, owner="her", max_tokens=4)
    world.submit(again)
    assert isinstance(again.where, On)
    assert queue._charged["her"] == level + 2
    while not again.is_finished:
        world.tick()
    assert queue._charged["her"] == level + 2 + 4
    world.run()


def test_a_flood_of_one_user_leaves_another_users_conversation_cached():
    world = World("alias", num_blocks=65)
    hers = world.sequence(60, 4, owner="her")
    world.finish(hers)
    for _ in range(12):
        world.finish(*[world.sequence(40, 6, owner="him") for _ in range(2)])
    assert world.ledger.pools["kv"].index.num_evicted > 100
    turn = next_turn(world, hers, owner="her")
    world.finish(turn)
    assert turn.num_cached_tokens == 60
