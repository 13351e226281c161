"""A router with tiers below its pools, whose blocks are tokens; walks beside a failing disk."""

from engine.scheduler.cache.topology import DRAM, SSD
from engine.scheduler.offload.arena import WorkerCopies
from tests.worlds.fake_workers import BLOCK_SIZE, RECORD
from tests.worlds.router_world import World, walk
from tests.worlds.tiers import FakeDisk, Rig

ARMS = ["colocated", "alias", "elastic", "peer", "shm"]
SLAB_RECORDS, NUM_SLABS = 16, 8


class TokenDisk(FakeDisk):
    """What a pool's block holds is tokens, or a part of a record."""

    def __init__(self, memory):
        super().__init__(NUM_SLABS, SLAB_RECORDS)
        self.memory = memory

    def reach(self, pool):
        return None if pool == "ring" else SSD

    def read(self, pool, block_id):
        return {i: self.memory.get((pool, block_id, i)) for i in (*range(BLOCK_SIZE), RECORD)}

    def write(self, pool, block_id, data):
        self.memory |= {(pool, block_id, i): token for i, token in data.items()}


class TieredWorld(Rig, World):
    """A disk does at most so many jobs a tick."""

    def __init__(self, arm, *, compute_ms=1e6, **options):
        Rig.__init__(self)
        World.__init__(self, arm, **options)
        self.disk, self.jobs_per_tick = TokenDisk(self.memory), 4
        self.tiers = self.router.prefixes.tiers
        numbers, places = self.tiers.numbers, NUM_SLABS * SLAB_RECORDS
        self.ssd = self.tier(SSD, self.store(), places, lambda: compute_ms, numbers=numbers)
        self.tiers.each.append(self.ssd)

    def store(self):
        """What the tier is told that the disk is."""
        return self.disk

    def disk_told(self, job):
        """The disk has done something."""
        self.ssd.done(job)

    def changed(self):
        self.router.dispatch(self.now_ns)

    def worker_of(self, pool):
        ready = self.router.roles.ready_workers
        return next(
            (w.name for w in self.workers.values() if w.pool == pool and w.name in ready), None
        )

    def may_write(self, pool, block_id):
        return pool == DRAM or block_id not in self.ledger.pools[pool].index

    def let_workers_copy(self):
        """For tiers."""
        for worker in self.workers.values():
            worker.may_write = self.may_write
        self.router.copies.of_tiers = WorkerCopies(
            lambda name, command: self.workers[name].inbox.append(command), self.later
        )
        return self.router.copies.of_tiers

    def tick(self):
        super().tick()
        self.work()

    def work(self):
        """Of the disk, and of the clock."""
        for _ in range(min(self.jobs_per_tick, len(self.disk.jobs))):
            job = self.disk.jobs.popleft()
            self.disk.do(job)
            self.disk_told(job)
            self.check()
        self.run_timers()
        self.check()

    @property
    def is_quiet(self):
        return super().is_quiet and not self.disk.jobs

    def answered(self, prompt):
        """A sequence of this prompt that has come to its end."""
        sequence = self.sequence(prompt=prompt)
        self.finish(sequence)
        return sequence

    def use_twice(self, prompt):
        """As often as makes its blocks worth keeping below the pools."""
        for _ in range(2):
            self.answered(prompt)

    def forget_pools(self):
        """As after a restart; nobody is there."""
        for pool in self.ledger.pools.values():
            pool.lose()


def walk_beside_a_failing_disk(world, rng):
    """A walk in which the disk works after each step of a worker, and now and then fails."""
    step = world.step

    def step_and_work(worker):
        step(worker)
        world.disk.error = "it is broken" if rng.random() < 0.05 else None
        world.work()

    world.step, world.jobs_per_tick = step_and_work, 1
    walk(world, rng)
