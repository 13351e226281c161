"""An arena that fake workers copy to and from, alone and above a disk, under deaths and faults."""

import random
from collections import deque

import pytest

from engine.cache.places import DRAM
from engine.tiers.arena import CacheArena, WorkerCopies
from engine.tiers.files import SlabHead
from engine.tiers.index import IndexEntry, RecordPlace
from engine.tiers.jobs import CopyDeadlines, CopyJob, GrowJob, ProbeJob, SweepJob
from engine.wire.messages import Copied, Copy
from tests.engine.schedule.test_router import walk
from tests.engine.tiers.test_router import ARMS, TieredWorld

NUM_BLOCKS = 40
HEAD = SlabHead(0, 4096, NUM_BLOCKS, bytes(32))


class ArenaWorld(TieredWorld):
    """Its workers copy; `has_disk`: there is a disk below."""

    def __init__(self, arm, *, has_disk=False, dram_compute_ms=1e6, **options):
        super().__init__(arm, **options)
        if not has_disk:
            self.tiers.each.clear()
        copies = self.let_workers_copy()
        arena = CacheArena(HEAD, self.worker_of, copies, lambda job: self.dram.done(job))
        patience = CopyDeadlines(1e9, 1e9, counts_waiting=False)
        more = {"patience": patience, "numbers": self.tiers.numbers}
        self.dram = self.tier(DRAM, arena, NUM_BLOCKS, lambda: dram_compute_ms, **more)
        self.tiers.each.insert(0, self.dram)

    def check(self):
        super().check()
        if hasattr(self, "dram"):
            self.dram.index.check_invariants()


@pytest.mark.parametrize("arm", ARMS)
def test_what_was_used_twice_comes_from_the_arena_and_the_prompt_is_told_so(arm):
    world = ArenaWorld(arm)
    prompt = list(range(41))
    for _ in range(2):
        world.finish(world.sequence(prompt=prompt))
    world.forget_pools()
    again = world.sequence(prompt=prompt)
    world.finish(again)
    assert again.num_cached_tokens == again.num_restored_tokens == 40
    assert "blocks from DRAM" in again.restore_reason
    assert world.dram.counts.loaded_blocks == 10
    assert not world.disk.jobs


def test_the_arena_comes_before_the_disk_and_the_disk_has_what_it_lacks():
    world = ArenaWorld("colocated", has_disk=True)
    prompt = list(range(41))
    for _ in range(2):
        world.finish(world.sequence(prompt=prompt))
    world.forget_pools()
    for block_hash in world.dram.index.hashes[-4:]:  # the tail was stored last
        world.dram.index.drop(block_hash)
    again = world.sequence(prompt=prompt)
    world.finish(again)
    assert again.num_restored_tokens == 40
    assert "6 of 6 blocks from DRAM" in again.restore_reason
    assert "4 of 4 blocks from the SSD" in again.restore_reason


@pytest.mark.parametrize("arm", ["colocated", "alias"])
def test_what_a_victim_had_computed_goes_to_the_arena_and_not_to_the_disk(arm):
    world = ArenaWorld(arm, has_disk=True, num_blocks=17)
    sequences = [world.sequence(n, 40) for n in (10, 9, 12)]
    world.finish(*sequences)
    assert any(sequence.num_preemptions for sequence in sequences)
    assert world.dram.counts.loaded_blocks
    assert world.ssd.counts.stored_blocks == 0


def test_a_victim_goes_to_the_disk_where_the_arena_does_not_pay():
    world = ArenaWorld("colocated", has_disk=True, num_blocks=17, dram_compute_ms=0.001)
    world.finish(*[world.sequence(n, 40) for n in (10, 9, 12)])
    assert world.dram.counts.stored_blocks == 0
    assert world.ssd.counts.stored_blocks


@pytest.mark.parametrize("has_disk", [False, True])
@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("seed", range(3))
def test_a_long_random_walk_over_pool_and_tiers_loses_nothing(arm, seed, has_disk):
    rng = random.Random(seed)
    world = ArenaWorld(arm, has_disk=has_disk, num_blocks=(26, 33)[seed % 2], num_slots=2)
    step = world.step

    def step_and_work(worker):
        step(worker)
        world.disk.error = "it is broken" if rng.random() < 0.05 else None
        world.work()

    world.step, world.jobs_per_tick = step_and_work, 1
    walk(world, rng)
    assert world.dram.counts.stored_blocks or world.dram.counts.failed_stores


class Alone:
    """An arena whose worker is `w`, or nobody."""

    def __init__(self):
        self.worker, self.sent, self.reports, self.due = "w", [], [], deque()
        self.copies = WorkerCopies(
            lambda name, command: self.sent.append((name, command)),
            lambda _, call: self.due.append(call),
        )
        self.arena = CacheArena(HEAD, lambda pool: self.worker, self.copies, self.reports.append)

    def load(self, copy_id, *pairs):
        """Of places to blocks."""
        entries = [IndexEntry(bytes([place]), RecordPlace(0, place), 1, 1) for place, _ in pairs]
        copy = Copy(copy_id, DRAM, "kv", list(enumerate(block for _, block in pairs)), None)
        self.arena.begin(job := CopyJob(copy=copy, life=1, entries=entries))
        return job


def test_places_follow_the_block_of_padding_and_parts_add_up():
    rig = Alone()
    job = rig.load(7, (0, 5), (3, 6))
    assert rig.sent == [("w", Copy(-7, DRAM, "kv", [(1, 5), (4, 6)], None))]
    rig.copies.copied(Copied(-7, 1, 100, 1_000_000, 2_000_000, is_last=False))
    assert not rig.reports
    rig.copies.copied(Copied(-7, 1, 100, 9_000_000, 11_000_000, is_last=True))
    assert rig.reports == [job]
    assert (job.num_done, job.error, job.elapsed_ms) == (2, None, 3.0)


def test_what_a_dead_worker_was_at_is_not_done_whatever_it_had_reported():
    rig = Alone()
    job = rig.load(7, (0, 5), (3, 6))
    rig.copies.copied(Copied(-7, 1, 100, 1, 2, is_last=False))
    rig.copies.worker_died("another")
    rig.copies.worker_died("w")
    assert not rig.reports  # its sequences are seen to first
    rig.due.popleft()()
    assert rig.reports == [job]
    assert (job.num_done, job.is_void, job.error) == (0, True, "worker w has died")


def test_without_a_worker_a_copy_is_void_and_other_jobs_are_done():
    rig = Alone()
    rig.worker = None
    jobs = [
        rig.load(1, (0, 5)),
        GrowJob(),
        GrowJob(),
        SweepJob(places=[RecordPlace(0, 1)]),
        ProbeJob(),
    ]
    for job in jobs[1:]:
        rig.arena.begin(job)
    assert not rig.reports
    while rig.due:
        rig.due.popleft()()
    assert rig.reports == jobs
    assert (jobs[0].is_void, jobs[1].made, jobs[2].made, jobs[3].num_done) == (True, HEAD, None, 1)
