"""A router, fake workers and a clock, in each arrangement of workers and links; random walks."""

from collections import Counter

from engine.scheduler.cache.hashes import PrefixHasher
from engine.scheduler.cache.ledger import Ledger
from engine.scheduler.cache.topology import make_topology
from engine.scheduler.cache.window_blocks import NO_WINDOWS
from engine.scheduler.queue.queue import FairQueue
from engine.scheduler.router import Router
from engine.scheduler.sequences.sequence import Sequence, Stamps
from engine.wire.finish_reason import FinishReason
from engine.wire.messages import Begun, Copied, CoresUsed, Stepped
from engine.wire.run_spec import RunSpec
from engine.wire.sampling import SamplingParams
from tests.worlds.fake_workers import BLOCK_SIZE, RECORD, FakeWorker, next_token

HASHER = PrefixHasher(bytes(32), b"", BLOCK_SIZE)
COPYING = (
    *("peer", "shm", "elastic peer", "elastic shm", "gpu peer", "gpu shm"),
    *("2x1 peer", "1x2 shm", "2x2 peer", "gpu 2x2 shm"),
)
ARMS = ("alias", "colocated", "elastic", "gpu", "gpu colocated", "2x2 elastic", *COPYING)


def places_of(arm, num_blocks, num_slots):
    transport = arm.split()[-1] if arm in COPYING else "alias"
    if "colocated" in arm:
        home = "colocated" if "gpu" in arm else None
        topology = make_topology(["colocated"], ["colocated"], transport, home=home)
    else:
        home = "decode" if arm == "gpu" else None
        in_workers = "gpu" in arm and arm in COPYING
        counts = next((part for part in arm.split() if "x" in part[1:2]), "1x1").split("x")
        names = [
            [role, *(f"{role}{i}" for i in range(1, int(count)))]
            for role, count in zip(("prefill", "decode"), counts, strict=True)
        ]
        homes = [name for role in names for name in role] if in_workers else []
        topology = make_topology(*names, transport, home=home, in_workers=homes)
    many = num_blocks if isinstance(num_blocks, dict) else {}
    sizes = {
        p.name: num_slots + 1 if p.name == "ring" else many.get(p.name, num_blocks)
        for p in topology.pools
    }
    return topology.with_pools(sizes)


class World:
    """A router, its fake workers and a clock; delivers messages when told to."""

    def __init__(
        self,
        arm,
        *,
        num_blocks=65,
        num_slots=3,
        max_queued=50,
        max_queued_tokens=5000,
        record_blocks=0,
        windows=NO_WINDOWS,
        misses=None,
        memory=None,
    ):
        self.topology = places_of(arm, num_blocks, num_slots)
        self.ledger = Ledger(self.topology.new_block_pools(BLOCK_SIZE, record_blocks, windows))
        self.now_ns = 10**9
        self.memory = {} if memory is None else memory
        cores = {name: (core,) for core, name in enumerate(self.topology.names)}
        self.workers = {
            worker.name: FakeWorker(worker.name, worker.pool, self.memory, cpus=cores[worker.name])
            for worker in self.topology.workers
        }
        for worker in self.workers.values():
            worker.num_read_tokens = windows.num_tokens
            worker.may_write = lambda pool, block_id: block_id not in self.ledger.pools[pool].index
        self.emitted = {}
        self.ended = {}
        self.scheduled = Counter()
        self.num_checks = 0
        self.told, self.num_told = {}, 0
        self.router = Router(
            self.topology,
            self.ledger,
            FairQueue(max_queued, max_queued_tokens),
            send=lambda name, command: self.workers[name].inbox.append(command),
            emit=self.emit,
            max_num_batched_tokens=8,
            roles="elastic" if "elastic" in arm else "static",
            cores=cores,
            misses=misses,
        )
        self.router.prefix_copies.predict_ms = lambda *_: None  # steps take no time here
        self.next_seq_id = 1
        for name in self.workers:
            self.router.worker_ready(name, self.now_ns)

    def emit(self, sequence, token_ids, logprobs, is_last):
        assert sequence.seq_id not in self.ended, "tokens after the end"
        self.emitted.setdefault(sequence.seq_id, []).extend(token_ids)
        if is_last:
            self.ended[sequence.seq_id] = sequence.finish_reason

    def sequence(
        self, num_prompt_tokens=10, max_tokens=5, owner="", prompt=None, salt="", hasher=HASHER
    ):
        """Of a prompt that no other of these begins like, or of a given one."""
        seq_id, self.next_seq_id = self.next_seq_id, self.next_seq_id + 1
        prompt = prompt or [(seq_id * 7 + i) % 991 for i in range(num_prompt_tokens)]
        return Sequence(
            seq_id=seq_id,
            request_id=f"r{seq_id}",
            index=0,
            prompt_token_ids=prompt,
            spec=RunSpec(SamplingParams(max_tokens=max_tokens, seed=0, temperature=0), owner=owner),
            stamps=Stamps(self.now_ns, self.now_ns),
            prefix=hasher.chain(prompt, hasher.scope(salt)),
        )

    def submit(self, *sequences):
        self.router.submit(list(sequences), self.now_ns)
        self.check()

    def finish(self, *sequences):
        """All of them, to their right ends."""
        self.submit(*sequences)
        self.run()
        for sequence in sequences:
            assert self.emitted[sequence.seq_id] == expected_tokens(sequence)
        self.check_hashes()

    def deliver(self, worker):
        """Hand one message of a worker to the router."""
        report = worker.outbox.popleft()
        match report:
            case Stepped():
                for entry in report.entries:
                    self.scheduled[entry.seq_id] += entry.num_scheduled_tokens
                self.router.stepped(worker.name, report, self.now_ns)
            case Begun():
                self.router.begun(report)
            case CoresUsed():
                self.router.roles.answered(worker.name, report)
            case Copied():
                self.router.copied(worker.name, report, self.now_ns)
        self.check()

    def kill(self, name):
        """The worker dies, and who has mapped its memory; what they have sent is still read."""
        lost = {pool.name for pool in self.topology.pools if pool.home == name}
        killed = [name, *(n for n, w in self.workers.items() if n != name and w.pool in lost)]
        for each in killed:
            worker = self.workers[each]
            while worker.outbox:
                self.deliver(worker)
            worker.restart()
            self.router.worker_died(each, self.now_ns)
            self.check()
        for place in [place for place in self.memory if place[0] in lost]:
            del self.memory[place]
        return set(killed)

    def revive(self, name):
        """The worker starts again, and first the one whose memory it maps."""
        home = self.topology.home_of(self.workers[name].pool) or name
        revived = [n for n in (home, name) if n not in self.router.roles.ready_workers]
        for each in dict.fromkeys(revived):
            self.router.worker_ready(each, self.now_ns)
            self.check()
        return set(revived)

    def revive_all(self):
        for name in self.workers:
            self.revive(name)

    def tick(self):
        """Everybody does everything there is to do, once."""
        self.now_ns += 1_000_000
        for worker in self.workers.values():
            self.receive(worker)
            self.step(worker)
            while worker.copy(self.now_ns):
                pass
            while worker.outbox:
                self.deliver(worker)

    def receive(self, worker):
        """The worker takes all its commands."""
        while worker.inbox:
            worker.receive(self.now_ns)

    def step(self, worker):
        """One step; a core that two compute on is one of theirs, which was taken back."""
        worker.step(self.now_ns)
        if worker.has_stepped:
            own = self.router.roles.cores.own
            for other in self.workers.values():
                if other is not worker and other.running and not other.is_parked:
                    shared = set(worker.cpus) & set(other.cpus)
                    assert shared <= own[worker.name] or shared <= own[other.name]

    def run(self, *, ticks=2000):
        for _ in range(ticks):
            if self.is_quiet:
                return
            self.tick()
        raise AssertionError("still busy")

    @property
    def is_quiet(self):
        at = self.router.at
        held = self.router.queue, at.paused, at.resuming, at.running, at.moving
        return not any(held) and self.ledger.is_idle

    def check(self):
        self.router.check_invariants()
        self.check_owing()
        self.num_checks += 1
        if self.num_checks % 16 == 0:
            self.check_hashes()

    def check_owing(self):
        """A worker that has read all and said all owes what it can go on with, and nothing else."""
        for name, now in self.router.workers_now().items():
            worker = self.workers[name]
            if worker.inbox or worker.outbox or now.is_parked:
                continue
            runs = any(r.is_complete or r.room(BLOCK_SIZE) > 0 for r in worker.running.values())
            copies = any(each.num_ready or each.is_void for each in worker.copies)
            assert now.owes == (runs or copies), f"{name} owes, or does not"

    def check_hashes(self):
        """Every block that can be found has the tokens that its hash says."""
        for name, pool in self.ledger.pools.items():
            for block_id, hashed in pool.index._hashed.items():
                if hashed.border is not None:
                    place, tokens = self.memory[name, block_id, RECORD]
                    hashes = HASHER.chain(tokens).hashes
                    assert hashes[-1] == hashed.border
                    assert len(hashes) * BLOCK_SIZE == len(tokens)
                    assert pool.index.snapshots[hashed.border][place] == block_id
                    continue
                for each in (block_id, *pool.windows.of(block_id)):
                    tokens = [self.memory[name, each, i] for i in range(BLOCK_SIZE)]
                    assert HASHER.hashes(hashed.parent, tokens) == [hashed.hash]
        self.check_contents()

    def check_contents(self):
        """Who follows what is told of the cache knows what is in it, and nothing else."""
        contents, root = self.router.prefixes.contents, HASHER.scope().root
        for is_stored, block in contents.changes(self.num_told, root):
            if is_stored:
                assert block.block_id not in self.told
                self.told[block.block_id] = block
            else:
                assert self.told.pop(block.block_id) == block
        self.num_told = contents.num_changes
        assert contents.blocks(root) == sorted(self.told.values(), key=lambda block: block.number)
        hashes = [one.hash for p in self.ledger.pools.values() for one in p.index._hashed.values()]
        assert set(self.told) <= {int.from_bytes(h[:8], "little", signed=True) for h in hashes}
        for block in self.told.values():
            tokens, before = list(block.token_ids), block
            while before.parent_id is not None and before.parent_id in self.told:
                before = self.told[before.parent_id]
                tokens = [*before.token_ids, *tokens]
            if before.parent_id is None:
                last = HASHER.hashes(root, tokens)[-1]
                assert int.from_bytes(last[:8], "little", signed=True) == block.block_id

    def assert_all_free(self):
        for pool in self.ledger.pools.values():
            assert pool.num_free == pool.capacity


def next_turn(world, sequence, num_more=6, **options):
    """Of a conversation: what was asked and answered, and what is asked now."""
    tokens = sequence.prompt_token_ids + sequence.output_token_ids
    prompt = [*tokens, *range(900, 900 + num_more)]
    return world.sequence(prompt=prompt, **options)


def expected_tokens(sequence):
    tokens = list(sequence.prompt_token_ids)
    for _ in range(sequence.sampling.max_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(sequence.prompt_token_ids) :]


def related(rng, earlier):
    """A prompt that goes on from an earlier one, or is its twin; None: like no other."""
    if not earlier or rng.random() < 0.3:
        return None
    other = rng.choice(earlier[-8:])
    tokens = other.prompt_token_ids + other.output_token_ids
    kept = tokens[: rng.choice([len(tokens), other.num_prompt_tokens, rng.randint(1, 60)])]
    more = [rng.randrange(900) for _ in range(rng.choice([0, 1, 9]))]
    return (kept + more)[:80]


def walk(world, rng, sometimes=lambda: None):
    """Requests, aborts, deaths and messages in any order; then all that is left, to the end."""
    live, down = [], set()
    for _ in range(1500):
        world.now_ns += rng.randrange(1_000_000)
        action = rng.random()
        name = rng.choice(list(world.workers))
        worker = world.workers[name]
        if rng.random() < 0.01:
            sometimes()
        if action < 0.06 and len(world.router.queue) < 20:
            owner = rng.choice(["", "her", "him"])
            prompt = related(rng, live)
            sequence = world.sequence(rng.randint(1, 40), rng.randint(1, 25), owner, prompt)
            world.submit(sequence)
            live.append(sequence)
        elif action < 0.09 and live:
            world.router.abort(rng.choice(live), FinishReason.ABORT, world.now_ns)
            world.check()
        elif action < 0.10 and name not in down:
            down |= world.kill(name)
        elif action < 0.14 and down:
            down -= world.revive(rng.choice(sorted(down)))
        elif name in down:
            continue
        elif action < 0.145:
            worker.break_copies()
        elif action < 0.4 and worker.inbox:
            worker.receive(world.now_ns)
        elif action < 0.6:
            world.step(worker)
        elif action < 0.75:
            worker.copy(world.now_ns, rng.choice([1, 2, None]))
        elif worker.outbox:
            world.deliver(worker)
    world.revive_all()
    world.run()
    world.assert_all_free()
    assert set(world.ended) == {s.seq_id for s in live}
    for sequence in live:
        tokens = world.emitted[sequence.seq_id]
        assert tokens == expected_tokens(sequence)[: len(tokens)]
        if sequence.finish_reason is FinishReason.LENGTH:
            assert len(tokens) == sequence.sampling.max_tokens
