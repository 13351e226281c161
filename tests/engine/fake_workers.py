"""Workers without a model, over the router's own messages: small, honest, and killable.

A fake worker computes nothing, but it follows the contract of engine.messages: it plans its steps,
reports progress, stores into granted slots, loads, and releases. Its "KV" is a dictionary from
(pool, block_id, offset) to the token at that place, so that a block that is lost, swapped or
reused under somebody is noticed as a wrong token.
"""

from collections import deque

from engine.messages import (
    Admit,
    CoresUsed,
    GrantSlots,
    Load,
    Loaded,
    Release,
    SequenceStep,
    Stepped,
    Stored,
    UseCores,
)
from engine.plan import plan
from engine.workers.running import Running

BLOCK_SIZE = 4


def next_token(token_ids):
    """The fake model: a function of everything before it."""
    return (sum((i + 1) * t for i, t in enumerate(token_ids)) * 31 + len(token_ids)) % 997


class FakeWorker:
    def __init__(self, name, pool, memory, *, max_step_tokens=8, cpus=()):
        self.name, self.pool, self.memory = name, pool, memory
        self.own_cpus = list(cpus)
        self.max_step_tokens = max_step_tokens
        self.inbox = deque()
        self.outbox = deque()
        self.restart()

    def restart(self):
        self.running = {}
        self.slots = deque()
        self.cpus = self.own_cpus
        self.is_parked = False
        self.inbox.clear()
        self.outbox.clear()

    def receive(self, now_ns):
        """Take one command."""
        command = self.inbox.popleft()
        match command:
            case Admit():
                self.running[command.seq_id] = Running.of(command, (), now_ns)
            case Release(seq_id, generation):
                running = self.running.get(seq_id)
                if running is not None and running.generation == generation:
                    del self.running[seq_id]
                    entry = self.entry(running, None, None, [], 0, True)
                    self.outbox.append(Stepped(now_ns, now_ns, 0, 0, [entry]))
            case GrantSlots(slots):
                self.slots.extend(slots)
            case UseCores(cpus):
                self.cpus, self.is_parked = cpus, not cpus
                self.outbox.append(CoresUsed(cpus))
            case Load(load_id, slots, block_ids):
                for slot, block_id in zip(slots, block_ids, strict=True):
                    self.copy("ring", slot, self.pool, block_id)
                self.outbox.append(Loaded(load_id, len(slots) * BLOCK_SIZE, now_ns, now_ns))

    def copy(self, source, source_id, target, target_id):
        for offset in range(BLOCK_SIZE):
            token = self.memory.get((source, source_id, offset))
            self.memory[target, target_id, offset] = token

    def step(self, now_ns):
        """One step; its message waits in the outbox."""
        runnable = [r for r in self.running.values() if not r.is_complete and not self.is_parked]
        entries = []
        planned = plan(runnable, self.max_step_tokens, now_ns)
        planned = [(r, r.capped(n)) for r, n in planned]
        self.has_stepped = bool(planned)
        for running, num_new_tokens in planned:
            entries.append(self.compute(running, num_new_tokens))
        ids = {r.seq_id for r, _ in planned}
        for running in [r for r in self.running.values() if r.seq_id not in ids]:
            stored = self.store(running)
            if stored:
                entries.append(self.entry(running, None, None, stored, 0))
            elif self.is_done(running):
                entries.append(self.entry(running, None, None, [], 0))
        if entries:
            num_tokens = sum(n for _, n in planned)
            self.outbox.append(Stepped(now_ns, now_ns + 1, num_tokens, 0, entries))

    def compute(self, running, num_new_tokens):
        start, end = running.num_computed_tokens, running.num_computed_tokens + num_new_tokens
        for position in range(start, end):
            block_id = running.block_table[position // BLOCK_SIZE]
            place = (self.pool, block_id, position % BLOCK_SIZE)
            self.memory[place] = running.token_ids[position]
        running.num_computed_tokens = end
        token_id = reason = None
        if end == running.num_tokens:
            context = [
                self.memory[self.pool, running.block_table[p // BLOCK_SIZE], p % BLOCK_SIZE]
                for p in range(end)
            ]
            token_id = next_token(context)
            reason = running.append(token_id)
        stored = [] if reason else self.store(running)
        return self.entry(running, token_id, reason, stored, num_new_tokens)

    def store(self, running):
        if running.num_stored_blocks is None:
            return []
        stored = []
        while self.slots and running.num_stored_blocks < running.num_storable_blocks(BLOCK_SIZE):
            slot, index = self.slots.popleft(), running.num_stored_blocks
            self.copy(self.pool, running.block_table[index], "ring", slot)
            running.num_stored_blocks += 1
            stored.append(Stored(slot, index))
        return stored

    def is_done(self, running):
        return running.is_complete and (
            running.num_stored_blocks is None
            or running.num_stored_blocks >= running.num_storable_blocks(BLOCK_SIZE)
        )

    def entry(self, running, token_id, reason, stored, num_scheduled_tokens, is_released=False):
        is_released = is_released or bool(reason) or self.is_done(running)
        if is_released:
            self.running.pop(running.seq_id, None)
        return SequenceStep(
            running.seq_id,
            running.generation,
            running.num_computed_tokens,
            token_id,
            None,
            None if reason is None else str(reason),
            is_released,
            stored,
            num_scheduled_tokens,
            running.admitted_ns,
        )
