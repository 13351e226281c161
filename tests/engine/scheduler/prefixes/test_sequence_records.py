"""Records of recurrent states: two per sequence, snapshots that others go on from, nothing lost."""

import random

import pytest

from engine.errors import RequestError
from engine.scheduler.cache.block_pool import MIN_RECORDS
from engine.wire.finish_reason import FinishReason
from engine.wire.messages import Admit
from tests.worlds.fake_workers import BLOCK_SIZE
from tests.worlds.router_world import World, expected_tokens, next_turn, walk

HOST_ARMS = (
    *("alias", "colocated", "elastic", "peer", "shm"),
    *("elastic peer", "elastic shm", "2x2 elastic", "2x1 peer", "1x2 shm", "2x2 peer"),
)
RECORD_BLOCKS = 3


def world_of(arm, **options):
    return World(arm, **{"num_blocks": 97, "record_blocks": RECORD_BLOCKS} | options)


@pytest.mark.parametrize("arm", HOST_ARMS)
def test_walks_lose_no_record(arm):
    """Requests, preemption, deaths, broken copies and hits in any order; each read is checked."""
    num_blocks = 65 if " " in arm or arm in ("peer", "shm") else 49
    world = world_of(arm, num_blocks=num_blocks)
    walk(world, random.Random(len(arm)))


def test_walks_meet_every_case():
    """The walks are no use unless snapshots are found, and sequences preempted and recovered."""
    world = world_of("alias", num_blocks=41)
    walk(world, random.Random(0))
    counters = world.router.counters
    assert counters.prefix_cache_hits
    assert counters.preemptions
    assert counters.recovered_sequences


@pytest.mark.parametrize("arm", ["alias", "peer", "shm", "2x1 peer"])
def test_a_second_turn_goes_on_from_the_end_of_the_first_reply(arm):
    world = world_of(arm)
    first = world.sequence(30, 9)
    world.finish(first)
    second = next_turn(world, first)
    world.finish(second)
    border = (first.num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert second.num_cached_tokens == border > first.num_prompt_tokens
    assert world.scheduled[second.seq_id] == second.num_tokens - 1 - border


def test_a_third_prompt_goes_on_from_where_the_second_branched_off():
    world = world_of("alias")
    common = list(range(100, 130))
    for number, cached in enumerate((0, 0, 28)):
        sequence = world.sequence(prompt=[*common, *range(500 + 50 * number, 540 + 50 * number)])
        world.finish(sequence)
        assert sequence.num_cached_tokens == cached
        if number == 1:
            assert sequence.cache_miss.reason == "token 0: no snapshot"


def test_a_second_prompt_goes_on_from_where_the_first_said_that_others_part():
    world = world_of("alias")
    common = list(range(100, 130))
    first = world.sequence(prompt=[*common, *range(500, 540)])
    first.branches = (len(common),)
    world.finish(first)
    second = world.sequence(prompt=[*common, *range(600, 640)])
    world.finish(second)
    assert second.num_cached_tokens == 28
    third = world.sequence(prompt=[*first.prompt_token_ids, 7, 8])
    world.finish(third)
    assert third.num_cached_tokens == 68  # its prompt's last full block


def test_a_prompt_beside_the_first_waits_for_the_part_that_they_share():
    world = world_of("alias")
    prompts = [[*range(100, 130), *range(i, i + 40)] for i in (500, 600)]
    sequences = [world.sequence(prompt=prompt) for prompt in prompts]
    for sequence in sequences:
        sequence.branches = (30,)
    world.finish(*sequences)
    assert [sequence.num_cached_tokens for sequence in sequences] == [0, 28]


def test_a_record_is_never_copied_into_a_snapshot():
    """Where a prompt was computed by the decode worker, its pool has a snapshot of its own."""
    world = world_of("peer")
    world.kill("prefill")
    first = world.sequence(30, 9)
    world.finish(first)
    world.revive("prefill")
    assert world.ledger.pools["decode"].index.snapshots
    world.finish(next_turn(world, first))
    world.check_hashes()


def answered_by_decode(arm, **options):
    """A first turn whose snapshot is in the pool of the worker that decodes, and nowhere else."""
    world = world_of(arm, **options)
    world.kill("prefill")
    first = world.sequence(30, 9)
    world.finish(first)
    world.revive("prefill")
    world.finish(world.sequence(5))  # its handoff is timed
    return world, first


@pytest.mark.parametrize("arm", ["peer", "shm"])
def test_turns_wait_for_one_fetch_of_a_snapshot_from_another_pool(arm):
    world, first = answered_by_decode(arm)
    turns = [world.sequence(prompt=[*first.prompt_token_ids, i, i, i]) for i in (801, 802)]
    world.finish(*turns)
    for turn in turns:
        assert turn.num_cached_tokens == 28
        assert world.scheduled[turn.seq_id] == turn.num_tokens - 1 - 28
    assert world.router.counters.prefix_cache_fetches == 28


@pytest.mark.parametrize("arm", ["peer", "shm"])
def test_a_snapshot_is_fetched_alone_where_its_blocks_are(arm):
    world, first = answered_by_decode(arm)
    second, third = (world.sequence(prompt=[*first.prompt_token_ids, i, i, i]) for i in (801, 802))
    world.finish(second)
    index = world.ledger.pools["prefill"].index
    world.ledger.pools["prefill"].remove_hash(index.snapshots[second.prefix.hashes[6]][0])
    world.finish(third)
    assert third.num_cached_tokens == 28
    assert world.router.counters.prefix_cache_fetches == 28


@pytest.mark.parametrize("arm", ["peer", "shm"])
@pytest.mark.parametrize("name", ["prefill", "decode"])
@pytest.mark.parametrize("num_copied", [1, 8])
def test_a_death_while_a_snapshot_is_fetched_changes_no_token(arm, name, num_copied):
    """Before and after the seven blocks of keys and values."""
    world, first = answered_by_decode(arm, num_slots=12)
    turn = next_turn(world, first)
    world.submit(turn)
    for worker in world.workers.values():
        while worker.inbox:
            worker.receive(world.now_ns)
        worker.copy(world.now_ns, num_copied)
        while worker.outbox:
            world.deliver(worker)
    world.kill(name)
    world.revive(name)
    world.run()
    assert world.emitted[turn.seq_id] == expected_tokens(turn)
    world.check_hashes()
    world.assert_all_free()


def test_a_turn_within_one_block_leaves_no_snapshot():
    world = world_of("alias")
    world.finish(world.sequence(BLOCK_SIZE - 1, 1))
    assert not world.ledger.pools[world.topology.workers[0].pool].index.snapshots


@pytest.mark.parametrize(("num_blocks", "num_records"), [(97, MIN_RECORDS + 1), (24, MIN_RECORDS)])
def test_a_decoding_sequence_has_a_third_record_where_a_quarter_of_the_pool_is_free_besides(
    num_blocks, num_records
):
    world = world_of("alias", num_blocks=num_blocks)
    sequence = world.sequence(20, 30)
    world.submit(sequence)
    for _ in range(12):
        world.tick()
    assert sequence.num_output_tokens > 1
    records = world.ledger.records(sequence.seq_id, world.topology.workers[0].pool)
    assert sum(bool(record) for record in records) == num_records


def test_a_cancelled_reply_leaves_no_snapshot_that_its_worker_may_still_write():
    world = world_of("colocated")
    sequence = world.sequence(6, 30)
    world.submit(sequence)
    while sequence.kept_record is None:
        world.tick()
    world.workers["colocated"].step(world.now_ns)  # not reported yet
    world.router.abort(sequence, FinishReason.ABORT, world.now_ns)
    world.run()
    assert sequence.kept_record is not None
    (pool,) = world.ledger.pools.values()
    assert [hashed.border for hashed in pool.index._hashed.values() if hashed.border] == [
        sequence.prefix.hashes[0]
    ] * RECORD_BLOCKS
    world.assert_all_free()


def test_a_death_between_steps_goes_on_from_the_reported_record():
    world = world_of("alias")
    sequence = world.sequence(20, 12)
    world.submit(sequence)
    while sequence.num_output_tokens < 4:
        world.tick()
    computed = sequence.num_computed_tokens
    world.kill("decode")
    world.revive("decode")
    admits = [c for w in world.workers.values() for c in w.inbox if isinstance(c, Admit)]
    assert [admit.num_computed_tokens for admit in admits] == [computed]
    assert admits[0].records.valid == sequence.valid_record
    world.run()
    assert world.scheduled[sequence.seq_id] == sequence.num_tokens - 1


def test_snapshots_take_at_most_their_share():
    world = world_of("alias", num_blocks=61)
    for _ in range(9):
        world.finish(world.sequence(20))
    pool = world.ledger.pools[world.topology.workers[0].pool]
    assert len(pool.index.snapshots) == pool.capacity // 4 // RECORD_BLOCKS


def test_a_request_that_fits_only_without_its_records_is_refused():
    world = world_of("alias", num_blocks=21)
    room = (20 - MIN_RECORDS * RECORD_BLOCKS) * BLOCK_SIZE
    world.finish(world.sequence(room - 5, 5))
    with pytest.raises(RequestError, match="KV blocks"):
        world.submit(world.sequence(room - 4, 5))


def test_a_snapshot_goes_whole():
    world = world_of("alias", num_blocks=40)
    world.finish(world.sequence(20))
    pool = world.ledger.pools[world.topology.workers[0].pool]
    border, record = next(iter(pool.index.snapshots.items()))
    pool.remove_hash(record[-1])
    assert border not in pool.index.snapshots
    assert not any(block in pool.index for block in record)
    world.router.check_invariants()
