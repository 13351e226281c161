"""An arena that fake workers copy to and from, alone and above a disk, under deaths and faults."""

import random
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduler.cache.topology import DRAM, SSD
from engine.scheduler.offload.arena import CacheArena, WorkerCopies
from engine.scheduler.offload.cache_memory import CacheMemory
from engine.scheduler.offload.copy_deadlines import CopyDeadlines
from engine.scheduler.offload.index import IndexEntry, RecordPlace
from engine.scheduler.offload.jobs import CopyJob, GrowJob, ProbeJob, SweepJob
from engine.scheduler.offload.loads import JOB_BYTES
from engine.scheduler.offload.records import SlabHead
from engine.scheduler.offload.staged_disk import StagedDisk, num_slots_for
from engine.scheduler.offload.stores import URGENT_BYTES
from engine.wire.messages import Copied, Copy
from tests.worlds.tiered_world import ARMS, TieredWorld, TokenDisk, walk_beside_a_failing_disk

NUM_BLOCKS = 40


def served_in(memory, model=bytes(32)):
    """The index of a model that is served from now on, with blocks of one byte."""
    memory.make_room(1, 0)
    return memory.serve(model, "m", 1, 0)


class ArenaWorld(TieredWorld):
    """Its workers copy; `has_disk`: there is a disk below; `cache`: memory of several models."""

    def __init__(
        self,
        arm,
        *,
        has_disk=False,
        dram_compute_ms=1e6,
        cache=None,
        model=bytes(32),
        **options,
    ):
        super().__init__(arm, **options)
        if not has_disk:
            self.tiers.each.clear()
        copies = self.let_workers_copy()
        memory = cache or CacheMemory(NUM_BLOCKS, is_shared=False)
        arena = CacheArena(memory, self.worker_of, copies, lambda job: self.dram.done(job))
        patience = CopyDeadlines(1e9, 1e9, counts_waiting=False)
        more = {"patience": patience, "numbers": self.tiers.numbers}
        more["index"] = served_in(memory, model)
        self.dram = self.tier(DRAM, arena, memory.max_places(1), lambda: dram_compute_ms, **more)
        self.tiers.each.insert(0, self.dram)

    def check(self):
        super().check()
        if hasattr(self, "dram"):
            self.dram.index.check_invariants()


def test_the_arena_comes_before_the_disk_and_the_disk_has_what_it_lacks():
    world = ArenaWorld("colocated", has_disk=True)
    prompt = list(range(41))
    world.use_twice(prompt)
    world.forget_pools()
    for block_hash in world.dram.index.hashes[-4:]:  # the tail was stored last
        world.dram.index.drop(block_hash)
    again = world.answered(prompt)
    assert again.num_restored_tokens == 40
    assert "6 of 6 blocks from DRAM" in again.restore_reason
    assert "4 of 4 blocks" in again.restore_reason


def test_a_swap_and_back_computes_only_the_last_unfinished_block_again():
    prompt, cache, content = list(range(41)), CacheMemory(10 * NUM_BLOCKS, is_shared=True), {}
    for model, num_restored in ((b"a", 0), (b"b", 0), (b"a", 40), (b"b", 40)):
        world = ArenaWorld("colocated", cache=cache, model=model)
        world.memory |= content  # outlives the workers
        assert world.answered(prompt).num_restored_tokens == num_restored
        world.dram.flush()
        while world.dram.num_pending:
            world.tick()
        content = {at: data for at, data in world.memory.items() if at[0] == DRAM}


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
    walk_beside_a_failing_disk(world, rng)
    assert world.dram.counts.stored_blocks or world.dram.counts.failed_stores


class AloneArena:
    """An arena whose worker is `w`, or nobody."""

    def __init__(self):
        self.worker, self.sent, self.reports, self.due = "w", [], [], deque()
        self.copies = WorkerCopies(
            lambda name, command: self.sent.append((name, command)),
            lambda _, call: self.due.append(call),
        )
        served_in(memory := CacheMemory(NUM_BLOCKS, is_shared=False))
        self.arena = CacheArena(memory, lambda pool: self.worker, self.copies, self.reports.append)

    def load(self, copy_id, *pairs):
        """Of places to blocks."""
        entries = [IndexEntry(bytes([place]), RecordPlace(0, place), 1, 1) for place, _ in pairs]
        copy = Copy(copy_id, DRAM, "kv", list(enumerate(block for _, block in pairs)), None)
        self.arena.begin(job := CopyJob(copy=copy, life=1, entries=entries))
        return job


def test_places_follow_the_block_of_padding_and_parts_add_up():
    rig = AloneArena()
    job = rig.load(7, (0, 5), (3, 6))
    assert rig.sent == [("w", Copy(-7, DRAM, "kv", [(1, 5), (4, 6)], None))]
    rig.copies.copied(Copied(-7, 1, 100, 1_000_000, 2_000_000, is_last=False))
    assert not rig.reports
    rig.copies.copied(Copied(-7, 1, 100, 9_000_000, 11_000_000, is_last=True))
    assert rig.reports == [job]
    assert (job.num_done, job.error, job.elapsed_ms) == (2, None, 3.0)


def test_what_a_dead_worker_was_at_is_not_done_whatever_it_had_reported():
    rig = AloneArena()
    job = rig.load(7, (0, 5), (3, 6))
    rig.copies.copied(Copied(-7, 1, 100, 1, 2, is_last=False))
    rig.copies.worker_died("another")
    rig.copies.worker_died("w")
    assert not rig.reports  # its sequences are seen to first
    rig.due.popleft()()
    assert rig.reports == [job]
    assert (job.num_done, job.is_void, job.error) == (0, True, "worker w has died")


def test_without_a_worker_a_copy_is_void_and_other_jobs_are_done():
    rig = AloneArena()
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
    head = SlabHead(0, 4096, NUM_BLOCKS, bytes(32))
    assert (jobs[0].is_void, jobs[1].made, jobs[2].made, jobs[3].num_done) == (True, head, None, 1)


# A disk that pools reach by way of slots, which fake workers copy to and from.


SLOTS = range(7, 13)


class SlotDisk(TokenDisk):
    """Its threads reach the slots alone."""

    def reach(self, pool):
        return SSD if pool == DRAM else None


class StagedWorld(TieredWorld):
    """No pool is in the host's memory, and few blocks have room in the slots."""

    block_bytes = JOB_BYTES // 2

    def store(self):
        self.disk, copies = SlotDisk(self.memory), self.let_workers_copy()
        done = super().disk_told
        self.staged = StagedDisk(self.disk, SLOTS, self.worker_of, copies, done)
        return self.staged

    def disk_told(self, job):
        self.staged.told(job)

    def check_owing(self):
        """Blocks on their way through the slots count as owed by the worker of their pool."""
        if not self.staged._staged and not self.disk.jobs:
            super().check_owing()


def assert_slots_free(staged):
    free = [slot for slots in staged._free.values() for slot in slots]
    assert sorted(free) == list(SLOTS)
    assert not staged._staged


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize(("kind", "whence"), [(ArenaWorld, "DRAM"), (StagedWorld, "the SSD")])
def test_what_was_used_twice_comes_back_and_the_prompt_is_told_from_where(kind, whence, arm):
    world = kind(arm)
    prompt = list(range(41))
    world.use_twice(prompt)
    world.forget_pools()
    again = world.answered(prompt)
    assert again.num_cached_tokens == again.num_restored_tokens == 40
    assert f"blocks from {whence}" in again.restore_reason
    assert world.tiers.each[0].counts.loaded_blocks == 10
    assert not world.disk.jobs
    if kind is StagedWorld:
        assert_slots_free(world.staged)


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("seed", range(4))
def test_a_long_random_walk_over_pools_slots_and_disk_loses_nothing(arm, seed):
    rng = random.Random(seed)
    world = StagedWorld(arm, num_blocks=(26, 33)[seed % 2], num_slots=2)
    walk_beside_a_failing_disk(world, rng)
    assert world.ssd.counts.stored_blocks or world.ssd.counts.failed_stores
    while world.disk.jobs:
        world.tick()
    assert_slots_free(world.staged)


class AloneDisk:
    """A staged disk whose worker is `w`, or nobody."""

    def __init__(self):
        self.worker, self.sent, self.reports, self.due = "w", [], [], deque()
        self.disk = SlotDisk({})
        self.copies = WorkerCopies(
            lambda name, command: self.sent.append((name, command)),
            lambda _, call: self.due.append(call),
        )
        self.staged = StagedDisk(
            self.disk, SLOTS, lambda _: self.worker, self.copies, self.reports.append
        )

    def begin(self, copy_id, from_pool, to_pool, num_blocks=2):
        entries = [IndexEntry(bytes([n]), RecordPlace(0, n), 1, 1) for n in range(num_blocks)]
        pairs = [(n, 50 + n) if from_pool == SSD else (50 + n, n) for n in range(num_blocks)]
        copy = Copy(copy_id, from_pool, to_pool, pairs, None)
        self.staged.begin(job := CopyJob(copy=copy, life=1, entries=entries))
        return job

    def store(self, copy_id=1, num_blocks=2):
        return self.begin(copy_id, "kv", SSD, num_blocks)

    def load(self, copy_id=1, num_blocks=2):
        return self.begin(copy_id, SSD, "kv", num_blocks)

    def copied(self, copy_id, num_pairs, error=None):
        report = Copied(-copy_id, num_pairs, 1, 1_000_000, 3_000_000, is_last=True, error=error)
        self.copies.copied(report)

    def disk_has_done(self, num_done, error=None, *, is_damaged=False):
        job = self.disk.jobs.popleft()
        job.num_done, job.error, job.is_damaged = num_done, error, is_damaged
        job.started_ns, job.ended_ns = 3_000_000, 8_000_000
        self.staged.told(job)

    def die(self):
        self.copies.worker_died("w")
        while self.due:
            self.due.popleft()()

    def assert_over(self, *jobs):
        assert self.reports == list(jobs)
        assert_slots_free(self.staged)


def test_a_store_goes_to_slots_first_and_only_what_is_there_to_the_disk():
    rig = AloneDisk()
    job = rig.store()
    assert rig.sent == [("w", Copy(-1, "kv", DRAM, [(50, 10), (51, 11)], None))]
    assert not rig.disk.jobs
    rig.copied(1, 1, "RuntimeError: no")
    (half,) = rig.disk.jobs
    assert (half.copy.pairs, half.entries) == ([(10, 0)], job.entries[:1])
    rig.disk_has_done(1)
    rig.assert_over(job)
    assert (job.num_done, job.error, job.elapsed_ms) == (1, "RuntimeError: no", 7.0)


def test_a_load_is_read_first_and_what_is_damaged_never_reaches_the_pool():
    rig = AloneDisk()
    job = rig.load()
    assert not rig.sent
    assert rig.disk.jobs[0].copy.pairs == [(0, 7), (1, 8)]
    rig.disk_has_done(1, "checksum mismatch", is_damaged=True)
    assert rig.sent == [("w", Copy(-1, DRAM, "kv", [(7, 50)], None))]
    rig.copied(1, 1)
    rig.assert_over(job)
    assert (job.num_done, job.is_damaged, job.elapsed_ms) == (1, True, 7.0)


def test_where_the_copy_fails_no_block_is_taken_to_be_damaged():
    rig = AloneDisk()
    job = rig.load()
    rig.disk_has_done(1, "checksum mismatch", is_damaged=True)
    rig.copied(1, 0, "RuntimeError: no")
    rig.assert_over(job)
    assert (job.num_done, job.is_damaged, job.error) == (0, False, "RuntimeError: no")


@pytest.mark.parametrize("when", ["waiting", "at the disk", "told to copy", "just before"])
def test_a_load_whose_worker_dies_is_void_and_no_worker_copies_it(when):
    rig = AloneDisk()
    others = [rig.load(2, 3)] if when == "waiting" else []
    job = rig.load()
    if when == "told to copy":
        rig.disk_has_done(2)
    rig.sent.clear()
    if when == "just before":  # the disk is done before the loop has come to the death
        rig.copies.worker_died("w")
        rig.disk_has_done(2)
    rig.die()
    if when == "at the disk":
        assert not rig.reports  # a thread may be at its slots
        rig.disk_has_done(2)
    if others:
        rig.disk_has_done(0)
    assert not rig.sent
    rig.assert_over(*([job, *others]))
    assert (job.num_done, job.is_void) == (0, True)


def test_a_store_that_is_at_the_disk_outlives_its_worker():
    rig = AloneDisk()
    job = rig.store()
    rig.copied(1, 2)
    rig.die()
    rig.disk_has_done(2)
    rig.assert_over(job)
    assert (job.num_done, job.is_void) == (2, False)


def test_loads_and_stores_have_slots_of_their_own_and_wait_in_turn():
    rig = AloneDisk()
    stores = [rig.store(1, 2), rig.store(2, 2), rig.store(3, 1)]
    load = rig.load(4, 3)
    assert [command.copy_id for _, command in rig.sent] == [-1]
    assert rig.disk.jobs[0].copy.pairs == [(0, 7), (1, 8), (2, 9)]
    rig.copied(1, 0, "RuntimeError: no")
    assert [command.copy_id for _, command in rig.sent] == [-1, -2, -3]
    for copy_id in (2, 3):
        rig.copied(copy_id, 0, "RuntimeError: no")
    rig.disk_has_done(0, "input/output error")
    rig.assert_over(*stores, load)
    assert load.error == "input/output error"


def test_what_is_cancelled_is_given_up_at_once_unless_somebody_is_at_it():
    rig = AloneDisk()
    at_disk, waiting = rig.load(1, 3), rig.load(2, 1)
    assert rig.staged.cancel(waiting)
    rig.disk.begun = rig.disk.jobs[0]
    assert not rig.staged.cancel(at_disk)
    rig.disk_has_done(3)
    assert not rig.sent
    rig.assert_over(at_disk)
    unread = rig.load(3)
    assert rig.staged.cancel(unread)
    rig.disk_has_done(0, "no longer needed")  # a thread comes to it after all
    rig.assert_over(at_disk)
    told = rig.store(4)
    assert not rig.staged.cancel(told)
    rig.copied(4, 2)
    rig.assert_over(at_disk, told)
    assert not rig.disk.jobs


def test_without_a_worker_a_copy_is_void_and_other_jobs_go_to_the_disk():
    rig = AloneDisk()
    rig.worker = None
    job = rig.load()
    rig.due.popleft()()
    rig.assert_over(job)
    assert job.is_void
    rig.staged.begin(probe := ProbeJob())
    rig.staged.told(rig.disk.jobs.popleft())
    assert rig.reports == [job, probe]


@given(st.integers(1, 1 << 28))
def test_loads_and_stores_have_room_for_a_job_however_large_blocks_are(block_bytes):
    room = num_slots_for(block_bytes) // 2
    assert room >= max(JOB_BYTES // block_bytes, URGENT_BYTES // block_bytes, 1)
