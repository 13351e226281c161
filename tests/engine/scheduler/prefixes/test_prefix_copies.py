"""What only the pool of an answer holds is copied back to where the next turn would compute it."""

import random

import pytest

from engine.scheduler.sequences.sequence import Phase
from engine.wire.finish_reason import FinishReason
from tests.worlds.fake_workers import BLOCK_SIZE
from tests.worlds.router_world import COPYING, World, expected_tokens, next_turn, walk

PAIRS = [arm for arm in COPYING if arm[1:2] != "x" and "2x2" not in arm and "elastic" not in arm]


def answered(arm, **options):
    """A world in which a turn of 10 tokens has had an answer of 30, of which 29 are computed."""
    world = World(arm, **options)
    first = world.sequence(10, 30)
    world.finish(first)
    return world, first


@pytest.mark.parametrize("arm", COPYING)
def test_an_answer_is_found_where_the_next_turn_is_computed(arm):
    world, first = answered(arm)
    second = next_turn(world, first)
    world.finish(second)
    assert second.num_cached_tokens == 36
    assert world.scheduled[second.seq_id] == second.num_prompt_tokens - 36 + 4
    counters = world.router.counters
    if second.route == "move" and second.stages[0].worker == first.stages[0].worker:
        assert counters.prefix_cache_fetches == 36 - 8
    assert counters.handoff_bytes == first.handoff_bytes + second.handoff_bytes


@pytest.mark.parametrize("arm", PAIRS)
def test_what_is_cheaper_to_compute_is_computed(arm):
    world, first = answered(arm)
    world.router.prefix_copies.predict_ms = lambda *_: 0.5
    second = next_turn(world, first)
    world.finish(second)
    assert second.num_cached_tokens == 8
    assert world.router.counters.prefix_cache_fetches == 0


@pytest.mark.parametrize("arm", PAIRS)
def test_several_that_go_on_from_one_answer_wait_for_one_fetch(arm):
    world, first = answered(arm)
    turns = [next_turn(world, first, i) for i in (3, 5, 9)]
    world.submit(*turns)
    assert {turn.phase for turn in turns} == {Phase.QUEUED}
    world.run()
    for turn in turns:
        assert world.emitted[turn.seq_id] == expected_tokens(turn)
        assert turn.num_cached_tokens >= 36
    assert world.router.counters.prefix_cache_fetches == 36 - 8


def test_a_prompt_that_waits_for_blocks_can_be_cancelled():
    world, first = answered("peer")
    second = next_turn(world, first)
    world.submit(second)
    assert second.phase is Phase.QUEUED
    world.router.abort(second, FinishReason.ABORT, world.now_ns)
    world.check()
    world.run()
    world.assert_all_free()
    third = next_turn(world, first)
    world.finish(third)
    assert third.num_cached_tokens == 36


@pytest.mark.parametrize("arm", ["peer", "shm", "gpu peer", "gpu shm", "2x2 peer"])
def test_a_copy_that_fails_ends_the_wait(arm):
    world, first = answered(arm)
    second = next_turn(world, first)
    world.submit(second)
    decode = world.workers[first.stages[-1].worker]
    while decode.inbox:
        decode.receive(world.now_ns)
    decode.break_copies()
    world.run()
    assert world.emitted[second.seq_id] == expected_tokens(second)
    world.check_hashes()
    world.assert_all_free()


def test_a_worker_that_makes_no_progress_is_not_waited_for():
    world, first = answered("peer")
    second = next_turn(world, first)
    world.submit(second)
    world.router.roles.stalled = frozenset({"decode"})
    world.router.dispatch(world.now_ns)
    world.check()
    assert second.worker == "prefill"
    world.router.roles.stalled = frozenset()
    world.run()
    assert world.emitted[second.seq_id] == expected_tokens(second)


@pytest.mark.parametrize("arm", COPYING)
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("at", range(5))
def test_a_death_while_blocks_are_fetched_changes_no_token(arm, role, at):
    world, first = answered(arm)
    turns = [next_turn(world, first, i, max_tokens=9) for i in (2, 7)]
    world.submit(*turns)
    for worker in world.workers.values():
        while worker.inbox:
            worker.receive(world.now_ns)
    for number in range(at):  # block by block, and then as it goes on
        for worker in world.workers.values():
            worker.copy(world.now_ns, 1)
            while worker.outbox and number % 2:
                world.deliver(worker)
    world.kill(world.topology.playing(role)[0])
    world.tick()
    world.revive_all()
    world.run()
    for turn in turns:
        assert world.emitted[turn.seq_id] == expected_tokens(turn)
    world.check_hashes()
    world.assert_all_free()


@pytest.mark.parametrize("arm", ["peer", "shm", "gpu peer"])
def test_whoever_was_preempted_finds_its_outputs_where_they_are_computed_again(arm):
    world = World(arm, num_blocks=17)
    sequences = [world.sequence(10, 40), world.sequence(10, 40)]
    world.submit(*sequences)
    world.run()
    assert world.router.counters.preemptions
    for sequence in sequences:
        assert world.emitted[sequence.seq_id] == expected_tokens(sequence)
    assert world.router.counters.prefix_cache_fetches


@pytest.mark.parametrize("arm", COPYING)
def test_walks_with_fetches_lose_nothing(arm):
    num_fetched = 0
    for seed in range(2):
        world = World(arm, num_blocks=(40, 65)[seed % 2], num_slots=3)
        walk(world, random.Random(seed))
        num_fetched += world.router.counters.prefix_cache_fetches
    assert num_fetched
    assert num_fetched % BLOCK_SIZE == 0
