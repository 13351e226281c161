"""Sequences of a dead daemon go on in the next one's router, with the blocks that it adopts."""

import os
import random

import pytest

from engine.errors import RequestError
from engine.scheduler.cache.published_blocks import PoolShape, PublishedBlocks, make_record
from engine.scheduler.sequences.sequence import Ended, Paused
from engine.wire.finish_reason import FinishReason
from tests.worlds.fake_workers import BLOCK_SIZE
from tests.worlds.router_world import ARMS, HASHER, World, expected_tokens


@pytest.fixture
def record_of():
    """Open the record of a pool as one daemon after the other does."""
    fds = {}

    def opened(pool):
        if pool.name not in fds:
            fds[pool.name] = make_record(PoolShape(pool.num_blocks, 64, 0))
            PublishedBlocks(fds[pool.name]).begin(HASHER.fingerprint)
        return PublishedBlocks(fds[pool.name])

    yield opened
    for fd in fds.values():
        os.close(fd)


def start(arm, record_of, memory, **options):
    """A daemon whose pools in host memory are adopted, and recorded."""
    world = World(arm, memory=memory, **options)
    for pool in world.topology.pools:
        if pool.home is None and pool.tier == "device":
            world.ledger.pools[pool.name].adopt(record_of(world.ledger.pools[pool.name]))
    world.check()
    return world


def left_by(sequence, world, after):
    """The same sequence as the next daemon makes it, with the tokens that its reply has taken."""
    prompt, most = sequence.prompt_token_ids, sequence.sampling.max_tokens
    again = after.sequence(prompt=prompt, max_tokens=most)
    again.output_token_ids = list(world.emitted.get(sequence.seq_id, []))
    return again


def all_whole(world, sequences):
    return all(world.emitted[one.seq_id] == expected_tokens(one) for one in sequences)


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("record_blocks", [0, 2], ids=["", "records"])
def test_sequences_go_on_and_find_what_was_computed(arm, record_blocks, record_of):
    drawn, memory = random.Random(arm), {}
    options = {"num_blocks": 129, "record_blocks": record_blocks}
    world = start(arm, record_of, memory, **options)
    sequences = [world.sequence(drawn.randint(9, 40), drawn.randint(9, 40)) for _ in range(5)]
    world.submit(*sequences)
    num_adopted = 0
    for _ in range(4):  # one daemon after the other dies
        for _ in range(drawn.randint(3, 9)):
            world.tick()
        after = start(arm, record_of, memory, **options)
        num_adopted += sum(len(pool.index) for pool in after.ledger.pools.values())
        after.check_hashes()
        assert all_whole(world, [one for one in sequences if one.is_finished])
        left = [left_by(one, world, after) for one in sequences if not one.is_finished]
        begun = {one.seq_id: list(one.output_token_ids) for one in left}
        after.router.resume(left, after.now_ns)
        world, sequences = after, left
        world.emitted = begun
    world.run()
    assert all_whole(world, sequences)
    world.check_hashes()
    world.assert_all_free()
    assert (num_adopted > 0) == ("gpu" not in arm)


def test_a_resumed_sequence_computes_less_than_a_block_again(record_of):
    memory = {}
    world = start("colocated", record_of, memory)
    sequence = world.sequence(21, 20)
    world.submit(sequence)
    while len(world.emitted.get(sequence.seq_id, [])) < 10:
        world.tick()
    after = start("colocated", record_of, memory)
    again = left_by(sequence, world, after)
    num_left = again.sampling.max_tokens - again.num_output_tokens
    after.router.resume([again], after.now_ns)
    assert after.router.counters.recovered_sequences == 1
    after.run()
    assert after.emitted[again.seq_id] == expected_tokens(again)[-num_left:]
    assert after.scheduled[again.seq_id] - num_left < BLOCK_SIZE


def test_resumed_sequences_are_placed_before_the_queue_and_ended_ones_stay_ended():
    world = World("colocated", num_blocks=9)
    for name in world.workers:
        world.kill(name)
    waiting, ended, left = world.sequence(20, 4), world.sequence(8, 1), world.sequence(20, 4)
    world.submit(waiting)
    ended.where, ended.finish_reason = Ended(), FinishReason.LENGTH
    world.router.resume([ended, left], world.now_ns)
    assert isinstance(left.where, Paused)
    world.revive_all()
    world.run()
    assert list(world.ended) == [left.seq_id, waiting.seq_id]


def test_what_no_longer_fits_the_pool_is_refused_and_nothing_is_kept():
    world = World("colocated", num_blocks=5)
    small, large = world.sequence(4, 4), world.sequence(40, 4)
    with pytest.raises(RequestError):
        world.router.resume([small, large], world.now_ns)
    assert world.is_quiet
    world.check()
