"""A tier over a ledger; a disk whose jobs are done when a test says so; clocks of its own."""

from collections import deque

from engine.cache.blocks import BlockPool, Ledger
from engine.cache.places import SSD
from engine.cache.prefix_index import PrefixHasher
from engine.tiers.files import SlabHead
from engine.tiers.index import SlabIndex
from engine.tiers.jobs import Context, CopyJob, GrowJob, ProbeJob, SweepJob
from engine.tiers.loads import Costs, Wanted
from engine.tiers.tier import Tier

BLOCK_SIZE = 4
BLOCK_BYTES = 1000
HASHER = PrefixHasher(bytes(32), b"model", BLOCK_SIZE)
CAPACITY = 64


class FakeDisk:
    """Its memory is which block's bytes lie in which place, and in which block of the pool."""

    def __init__(self, pool, num_slabs):
        self.pool = pool
        self.name = SSD
        self.num_slabs, self.slab_records = num_slabs, 4
        self.places = {}
        self.jobs = deque()
        self.write_share = 0.25
        self.error = None
        self.begun = None
        """A job that a thread has begun and does not end."""
        self.lost = []

    def reach(self, pool):
        return self.name

    def begin(self, job):
        self.jobs.append(job)

    def cancel(self, job):
        job.is_void = True
        return job is not self.begun

    def do(self, job):
        if job.is_void:
            job.error = "not needed any more"
        elif self.error is not None:
            job.error = self.error
        elif isinstance(job, CopyJob):
            self.copy(job)
        elif isinstance(job, GrowJob) and self.num_slabs:
            self.num_slabs -= 1
            job.made = SlabHead(100 + self.num_slabs, 4096, self.slab_records, bytes(32))
        elif isinstance(job, SweepJob):
            job.lost, self.lost = self.lost, []
            for place in job.places:
                self.places.pop(place, None)
                job.num_done += 1
        elif isinstance(job, ProbeJob):
            job.bytes_per_s = 1e6

    def copy(self, job):
        is_load = job.copy.from_pool == self.name
        for (from_id, to_id), entry in zip(job.copy.pairs, job.entries, strict=True):
            if not is_load:
                self.places[entry.place] = self.pool.get(from_id)
            elif self.places.get(entry.place) != entry.block_hash:
                job.is_damaged, job.error = True, "the checksum of its bytes is wrong"
                return
            else:
                self.pool[to_id] = entry.block_hash
            job.num_done += 1


class TierHarness:
    """Everything, and prompts as lists of tokens."""

    def __init__(self, *, capacity=CAPACITY, num_slabs=8, compute_ms=1e6, max_age_s=None):
        self.ledger = Ledger([BlockPool("kv", capacity + 1, BLOCK_SIZE)])
        self.books = self.ledger.pools["kv"]
        self.memory = {}
        self.disk = FakeDisk(self.memory, num_slabs)
        self.now_ns, self.now_s = 0, 0
        self.timers, self.events, self.num_changes = [], [], 0
        self.compute_ms = compute_ms
        self.last_seq_id = 0
        context = Context(
            self.ledger,
            SSD,
            SlabIndex(max_age_s),
            self.disk,
            BLOCK_BYTES,
            now_ns=lambda: self.now_ns,
            now_s=lambda: self.now_s,
            later=lambda s, callback: self.timers.append((self.now_ns + int(s * 1e9), callback)),
            tell=lambda *event: self.events.append(event[1]),
        )
        self.costs = Costs(bytes_per_s=1e6)
        self.ssd = Tier(context, 4 * num_slabs, self.costs, lambda *_: self.compute_ms, self.change)

    def change(self):
        self.num_changes += 1

    def chain(self, *tokens):
        """Of a prompt of one block for each of these."""
        return HASHER.chain([token for token in tokens for _ in range(BLOCK_SIZE)])

    def compute(self, chain):
        """A prompt is admitted, computed and done: its blocks are cached."""
        self.last_seq_id += 1
        there = self.books.index.blocks(chain.hashes)
        wants = {"kv": len(chain)}
        assert self.ledger.reserve(self.last_seq_id, wants, {"kv": there})
        table = self.ledger.table(self.last_seq_id, "kv")
        for place in range(len(there), len(chain)):
            self.memory[table[place]] = chain.hashes[place]
        for block_id, block_hash in zip(table, chain.hashes, strict=True):
            assert self.memory[block_id] == block_hash, "a wrong block was served"
        self.ssd.forget(self.last_seq_id)
        self.ssd.placed(chain.hashes, len(there))
        self.ledger.publish(self.last_seq_id, "kv", chain, range(len(chain)), "ana")
        self.ssd.computed(chain.hashes[len(there) :])
        self.ledger.release_all(self.last_seq_id)
        return len(there)

    def ask(self, chain, seq_id=1000):
        if not self.ssd.has_decided(seq_id):
            self.ssd.decide(Wanted(seq_id, "kv", chain, len(chain), "ana"))
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
        self.books.lose()
        self.memory.clear()

    def pass_time(self, seconds):
        self.now_ns += int(seconds * 1e9)
        self.now_s += int(seconds)
        for due in sorted((t for t in self.timers if t[0] <= self.now_ns), key=lambda t: t[0]):
            self.timers.remove(due)
            due[1]()

    def check(self):
        self.ledger.check_invariants()
        erasing = [p for job in self.disk.jobs if isinstance(job, SweepJob) for p in job.places]
        self.ssd.index.check_invariants(erasing)
