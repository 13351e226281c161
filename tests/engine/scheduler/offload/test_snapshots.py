"""Tiers below pools that hold records: a snapshot is stored, loaded and lost whole."""

import random

import pytest

from engine.scheduler.cache.hashes import record_hashes
from engine.scheduler.cache.snapshot_worths import Saved
from tests.engine.scheduler.offload.test_arena import ArenaWorld
from tests.worlds.fake_workers import BLOCK_SIZE
from tests.worlds.router_world import HASHER, next_turn
from tests.worlds.tiered_world import ARMS, TieredWorld, walk_beside_a_failing_disk

RECORD_BLOCKS = 3
PROMPT = list(range(41))
BORDER = 40


def world_of(arm="colocated", kind=TieredWorld, **options):
    return kind(arm, **{"num_blocks": 97, "record_blocks": RECORD_BLOCKS} | options)


@pytest.mark.parametrize("arm", ARMS)
def test_a_second_turn_after_a_restart_goes_on_from_the_snapshot_on_disk(arm):
    world = world_of(arm)
    first = world.answered(PROMPT)
    world.answered(PROMPT)
    world.forget_pools()
    second = next_turn(world, first)
    world.finish(second)
    assert second.num_cached_tokens == second.num_restored_tokens == BORDER
    assert world.scheduled[second.seq_id] == second.num_tokens - 1 - BORDER
    assert world.ssd.counts.loaded_tokens == BORDER


@pytest.mark.parametrize("kind", [TieredWorld, ArenaWorld])
def test_a_stored_snapshot_saves_what_the_pool_says_also_after_a_branch_before_it(kind):
    world = world_of(kind=kind)
    world.use_twice(PROMPT)
    (kv_pool,), tier = world.ledger.pools.values(), world.tiers.each[-1]
    hashes = HASHER.chain(PROMPT).hashes
    assert tier.index.worths.of(hashes[9]) == kv_pool.index.worths.of(hashes[9]) == Saved(10)
    branch = world.sequence(prompt=[*PROMPT[:20], *range(500, 530)])
    world.finish(branch)
    world.use_twice([*PROMPT[:20], *range(700, 703)])
    for index in (kv_pool.index, tier.index):
        assert index.worths.of(hashes[4]) == Saved(5)
        assert index.worths.of(hashes[9]) == Saved(5, hashes[4])


def test_an_evicted_snapshot_comes_back_from_dram():
    world = world_of(kind=ArenaWorld)
    world.use_twice(PROMPT)
    (kv_pool,) = world.ledger.pools.values()
    for record in list(kv_pool.index.snapshots.values()):
        kv_pool.remove_hash(record[0])
    again = world.answered(PROMPT)
    assert again.num_cached_tokens == BORDER
    assert f"{RECORD_BLOCKS} of {RECORD_BLOCKS} blocks from DRAM" in again.restore_reason
    assert world.dram.counts.loaded_tokens == 0


def test_a_daemon_that_ends_stores_snapshots_that_were_used_once():
    world = world_of()
    world.answered(PROMPT)
    world.ssd.flush()
    while world.ssd.num_pending:
        world.tick()
    world.forget_pools()
    assert world.answered(PROMPT).num_restored_tokens == BORDER


@pytest.mark.parametrize("place", range(RECORD_BLOCKS))
def test_a_damaged_snapshot_is_computed_again_and_dropped_whole(place):
    world = world_of()
    world.use_twice(PROMPT)
    world.forget_pools()
    border = HASHER.chain(PROMPT).hashes[-1]
    record = record_hashes(border, RECORD_BLOCKS)
    world.disk.is_sound = lambda entry: entry.block_hash != record[place]
    again = world.answered(PROMPT)
    assert again.num_cached_tokens == again.num_restored_tokens == 0
    assert world.scheduled[again.seq_id] == again.num_tokens - 1
    assert not any(world.ssd.index.is_known(block_hash) for block_hash in record)
    assert world.ssd.index.num_damaged == 1


def test_blocks_beyond_the_last_snapshot_are_not_loaded():
    world = world_of()
    first = world.answered(PROMPT)
    world.ssd.flush()
    while world.ssd.num_pending:
        world.tick()
    world.forget_pools()
    (piece,) = record_hashes(first.prefix.hashes[first.num_tokens // BLOCK_SIZE - 1], 1)
    world.ssd.index.drop(piece)
    second = next_turn(world, first)
    world.finish(second)
    assert second.num_restored_tokens == second.num_cached_tokens == BORDER
    assert world.ssd.counts.loaded_tokens == BORDER


def test_a_prefix_and_snapshot_larger_than_may_be_loaded_at_once_come_in_parts():
    world = world_of(num_blocks=65)
    prompt = list(range(73))
    world.use_twice(prompt)
    world.forget_pools()
    again = world.answered(prompt)
    assert again.num_restored_tokens == again.num_cached_tokens == 72
    assert again.restore_reason.count("8 of 8 blocks") == 2
    assert "5 of 5 blocks" in again.restore_reason  # two, and the snapshot


def test_a_preempted_sequence_continues_from_its_last_border():
    world = world_of(num_blocks=73)
    sequences = [world.sequence(n, 70) for n in (20, 21, 22)]
    world.finish(*sequences)
    assert world.router.counters.preemptions
    assert world.ssd.counts.loaded_blocks
    computed = sum(world.scheduled[s.seq_id] for s in sequences)
    num_lost = computed - sum(s.num_tokens - 1 for s in sequences)
    assert num_lost < BLOCK_SIZE * world.router.counters.preemptions


def test_a_long_random_walk_over_pool_and_disk_reads_right_records():
    world = world_of(num_blocks=39)
    walk_beside_a_failing_disk(world, random.Random(0))
    assert world.ssd.counts.stored_blocks
    assert world.ssd.counts.loaded_blocks
