"""Tiers over ledgers; disks whose jobs are done when a test says so; clocks of their own."""

from collections import deque

from engine.scheduler.cache.block_pool import BlockPool
from engine.scheduler.cache.hashes import PrefixHasher
from engine.scheduler.cache.ledger import Ledger
from engine.scheduler.cache.topology import SSD
from engine.scheduler.offload.copy_deadlines import Context
from engine.scheduler.offload.index import SlabIndex
from engine.scheduler.offload.jobs import CopyJob, GrowJob, ProbeJob, SweepJob
from engine.scheduler.offload.load_costs import Costs
from engine.scheduler.offload.loads import WantedBlocks
from engine.scheduler.offload.records import SlabHead
from engine.scheduler.offload.tier import Tier

BLOCK_SIZE = 4
BLOCK_BYTES = 1000
HASHER = PrefixHasher(bytes(32), b"model", BLOCK_SIZE)
CAPACITY = 64


class FakeDisk:
    """Its jobs are done when a test says so; what a block's bytes are is the subclass's affair."""

    name = SSD

    def __init__(self, num_slabs, slab_records):
        self.num_slabs, self.slab_records = num_slabs, slab_records
        self.places = {}
        """What lies in which place."""
        self.jobs = deque()
        self.write_share = 0.25
        self.error = None
        self.begun = None
        """A job that a thread has begun and does not end."""
        self.lost = []
        self.limit = None
        """Why it has no room for as much as its cap allows."""

    def reach(self, pool):
        return self.name

    def begin(self, job):
        self.jobs.append(job)

    def cancel(self, job):
        job.is_void = True
        return job is not self.begun

    def do(self, job):
        if job.is_void:
            job.error = "no longer needed"
        elif self.error is not None:
            job.error = self.error
        elif isinstance(job, CopyJob):
            self.copy(job)
        elif isinstance(job, GrowJob) and self.num_slabs:
            self.num_slabs -= 1
            job.made = SlabHead(100 + self.num_slabs, 4096, self.slab_records, bytes(32))
        elif isinstance(job, GrowJob):
            job.limit = self.limit
        elif isinstance(job, SweepJob):
            job.limit, job.lost, self.lost = self.limit, self.lost, []
            for place in job.places:
                self.places.pop(place, None)
                job.num_done += 1
        elif isinstance(job, ProbeJob):
            job.bytes_per_s = 1e6

    def copy(self, job):
        copy = job.copy
        windows = job.windows or [[]] * len(copy.pairs)
        for (from_id, to_id), more, entry in zip(copy.pairs, windows, job.entries, strict=True):
            if copy.to_pool == self.name:
                whole = [from_id, *more]
                self.places[entry.place] = [self.read(copy.from_pool, b) for b in whole]
            elif not self.is_sound(entry):
                job.is_damaged, job.error = True, "checksum mismatch"
                return
            else:
                for block_id, data in zip((to_id, *more), self.places[entry.place], strict=True):
                    self.write(copy.to_pool, block_id, data)
            job.num_done += 1

    def is_sound(self, entry):
        return True


class HashDisk(FakeDisk):
    """What a pool's block holds is a hash."""

    def __init__(self, memory, num_slabs):
        super().__init__(num_slabs, slab_records=4)
        self.memory = memory

    def read(self, pool, block_id):
        return self.memory.get(block_id)

    def write(self, pool, block_id, data):
        self.memory[block_id] = data

    def is_sound(self, entry):
        return self.places.get(entry.place) == [entry.block_hash]


class Rig:
    """Clocks, timers and what was told, and tiers that use them; its user has a ledger."""

    block_bytes = BLOCK_BYTES

    def __init__(self):
        self.timers, self.events = [], []

    def later(self, seconds, callback):
        self.timers.append((self.now_ns + int(seconds * 1e9), callback))

    def run_timers(self):
        """What is due now, the earliest first."""
        for due in sorted((t for t in self.timers if t[0] <= self.now_ns), key=lambda t: t[0]):
            self.timers.remove(due)
            due[1]()

    def tier(
        self, name, store, max_places, compute_ms, *, rate=1e9, max_age_s=None, index=None, **more
    ):
        """A tier over a store.

        Args:
            compute_ms: says what computing a prompt's blocks takes.
            rate: of the store, bytes a second.
            index: of blocks that are there already; None: none is.
            more: of its context.
        """
        context = Context(
            self.ledger,
            name,
            SlabIndex(max_age_s) if index is None else index,
            store,
            self.block_bytes,
            now_ns=lambda: self.now_ns,
            now_s=lambda: self.now_ns // 1_000_000_000,
            later=self.later,
            tell=lambda *event: self.events.append(event[1]),
            **more,
        )
        return Tier(context, max_places, Costs(rate), lambda *_: compute_ms(), self.changed)


class TierHarness(Rig):
    """A disk's tier over a ledger, and prompts as lists of tokens."""

    def __init__(self, *, capacity=CAPACITY, num_slabs=8, compute_ms=1e6, max_age_s=None):
        super().__init__()
        self.ledger = Ledger([BlockPool("kv", capacity + 1, BLOCK_SIZE)])
        self.kv_pool = self.ledger.pools["kv"]
        self.memory = {}
        self.disk = HashDisk(self.memory, num_slabs)
        self.now_ns, self.num_changes, self.last_seq_id = 0, 0, 0
        self.compute_ms = compute_ms
        of_disk = SSD, self.disk, 4 * num_slabs
        self.ssd = self.tier(*of_disk, lambda: self.compute_ms, rate=1e6, max_age_s=max_age_s)
        self.costs = self.ssd.costs

    def changed(self):
        self.num_changes += 1

    def chain(self, *tokens):
        """Of a prompt of one block for each of these."""
        return HASHER.chain([token for token in tokens for _ in range(BLOCK_SIZE)])

    def compute(self, chain):
        """A prompt is admitted, computed and done: its blocks are cached."""
        self.last_seq_id += 1
        there = self.kv_pool.index.blocks(chain.hashes)
        wants = {"kv": len(chain)}
        assert self.ledger.reserve(self.last_seq_id, wants, {"kv": there})
        table = self.ledger.table(self.last_seq_id, "kv")
        for place in range(len(there), len(chain)):
            self.memory[table[place]] = chain.hashes[place]
        for block_id, block_hash in zip(table, chain.hashes, strict=True):
            assert self.memory[block_id] == block_hash, "a wrong block was served"
        self.ssd.end_wait(self.last_seq_id)
        self.ssd.placed(chain.hashes[: len(there)], chain.hashes[len(there) :])
        self.ledger.publish(self.last_seq_id, "kv", chain, range(len(chain)), "ana")
        self.ssd.computed(chain.hashes[len(there) :])
        self.ledger.release_all(self.last_seq_id)
        return len(there)

    def ask(self, chain, seq_id=1000):
        if not self.ssd.has_decided(seq_id):
            self.ssd.decide(WantedBlocks(seq_id, "kv", chain, len(chain), "ana"))
        return self.ssd.is_loading(seq_id)

    def run(self, most=1000):
        """Do what the disk was given."""
        for _ in range(most):
            if not self.disk.jobs:
                return
            job = self.disk.jobs.popleft()
            self.disk.do(job)
            self.ssd.done(job)

    def forget_pool(self):
        """As after a restart: what was cached is gone."""
        self.kv_pool.lose()
        self.memory.clear()

    def pass_time(self, seconds):
        self.now_ns += int(seconds * 1e9)
        self.run_timers()

    def check(self):
        self.ledger.check_invariants()
        erasing = [p for job in self.disk.jobs if isinstance(job, SweepJob) for p in job.places]
        self.ssd.index.check_invariants(erasing)
