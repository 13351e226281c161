"""Workers without a model, over the router's own messages: small, honest, and killable.

A fake worker computes nothing, but it follows the contract of engine.wire.messages: it plans its
steps, reports progress, copies some time later, and releases. Its "KV" is a dictionary from (pool,
block_id, offset) to the token at that place, so that a block that is lost, swapped or reused under
somebody is noticed as a wrong token.
"""

from collections import deque

import msgspec

from engine.wire.messages import (
    Admit,
    Begun,
    Copied,
    Copy,
    CoresUsed,
    Extend,
    Release,
    SequenceStep,
    Stepped,
    UseCores,
)
from engine.worker.plan import is_chunk, plan
from engine.worker.worker_request import WorkerRequest

BLOCK_SIZE = 4
RECORD = "record"
"""Where a block has the part of a record that it holds: its place, and the tokens that it is of."""


def next_token(token_ids):
    """The fake model: a function of everything before it."""
    return (sum((i + 1) * t for i, t in enumerate(token_ids)) * 31 + len(token_ids)) % 997


def sequence_step(num_computed_tokens, num_scheduled_tokens):
    """What a step of one token, or of a prompt's tokens, says of a sequence."""
    counts = num_scheduled_tokens, 0, num_scheduled_tokens == 1
    return SequenceStep(1, 1, num_computed_tokens, [], [], None, None, *counts)


class Pending:
    """A copy that is not done."""

    def __init__(self, copy, running, block_size):
        self.copy, self.running, self.block_size = copy, running, block_size
        """`running`: whose steps fill the blocks; None: they are filled."""
        self.num_done = 0
        self.is_void = False

    @property
    def num_ready(self):
        num_pairs = len(self.copy.pairs)
        if self.running is None or self.running.is_complete:
            return num_pairs - self.num_done
        num_full = (
            self.running.num_computed_tokens // self.block_size - self.copy.filled_by.first_block
        )
        return max(min(num_full, num_pairs) - self.num_done, 0)


class FakeWorker:
    def __init__(
        self,
        name,
        pool,
        memory,
        *,
        max_num_batched_tokens=8,
        cpus=(),
        block_size=BLOCK_SIZE,
        next_token=next_token,
    ):
        self.name, self.pool, self.memory = name, pool, memory
        self.block_size, self.next_token = block_size, next_token
        self.own_cpus = list(cpus)
        self.may_write = lambda pool, block_id: True
        self.breaks = False
        self.eos_token_ids = ()
        self.num_read_tokens = 0
        """How far back layers with windows read."""
        self.tokens_per_step = 1
        """That a decoding sequence yields at most."""
        self.max_num_batched_tokens = max_num_batched_tokens
        self.is_after_chunk = False
        self.inbox = deque()
        self.outbox = deque()
        self.restart()

    def restart(self):
        self.running = {}
        self.copies = []
        self.cpus = self.own_cpus
        self.is_parked = False
        self.inbox.clear()
        self.outbox.clear()

    def receive(self, now_ns):
        """Take one command."""
        command = self.inbox.popleft()
        match command:
            case Admit():
                if command.is_suspect:
                    self.outbox.append(Begun(command.seq_id, command.generation))
                self.running[command.seq_id] = WorkerRequest.of(command, self.eos_token_ids, now_ns)
            case Release(seq_id, generation, reason):
                running = self.running.get(seq_id)
                if running is not None and running.generation == generation:
                    running.dropped_for = reason
                    entry = self.entry(running, is_dropped=True)
                    self.outbox.append(Stepped(now_ns, now_ns, 0, 0, [entry]))
            case Extend(extensions):
                for seq_id, generation, *more in map(msgspec.structs.astuple, extensions):
                    running = self.running.get(seq_id)
                    if running is not None and running.generation == generation:
                        tables = (running.block_table, *running.window_tables)
                        for table, block_ids in zip(tables, (more[0], *more[1]), strict=True):
                            table.extend(block_ids)
            case Copy(filled_by=filler):
                running = None if filler is None else self.running.get(filler.seq_id)
                if running is not None and running.generation != filler.generation:
                    running = None
                self.copies.append(Pending(command, running, self.block_size))
            case UseCores(cpus):
                self.cpus, self.is_parked = cpus, not cpus
                self.outbox.append(CoresUsed(cpus))

    def copy(self, now_ns, most=None):
        """Copy what is ready of the first copy that has something; False if none has."""
        for pending in self.copies:
            count = pending.num_ready if most is None else min(pending.num_ready, most)
            if count or pending.is_void:
                break
        else:
            return False
        copy, first = pending.copy, pending.num_done
        count = 0 if pending.is_void else count
        for from_id, to_id in copy.with_windows(first, first + count):
            assert self.may_write(copy.to_pool, to_id), "a copy into a block that others can find"
            self.copy_block((copy.from_pool, from_id), (copy.to_pool, to_id))
        pending.num_done += count
        is_last = pending.is_void or pending.num_done == len(copy.pairs)
        if is_last:
            self.copies.remove(pending)
        error = "Broken: it is" if self.breaks and not count else None
        report = Copied(
            copy.copy_id, count, count * self.block_size, now_ns, now_ns, is_last, error
        )
        self.outbox.append(report)
        return True

    def copy_block(self, source, target):
        for offset in (*range(self.block_size), RECORD):
            self.memory[*target, offset] = self.memory.get((*source, offset))

    def break_copies(self):
        """Whatever is under way fails."""
        self.breaks = True
        for pending in self.copies:
            pending.is_void = True
        while self.copy(0):
            pass
        self.breaks = False

    def step(self, now_ns):
        """One step; its message waits in the outbox."""
        runnable = [
            r
            for r in self.running.values()
            if not r.is_complete and not self.is_parked and r.room(self.block_size) > 0
        ]
        entries = []
        after = self.is_after_chunk
        planned = plan(runnable, self.max_num_batched_tokens, now_ns, is_after_chunk=after)
        planned = [(r, min(r.capped(n), r.room(self.block_size))) for r, n in planned]
        self.is_after_chunk = is_chunk(planned)
        self.has_stepped = bool(planned)
        for running, num_new_tokens in planned:
            entries.append(self.compute(running, num_new_tokens))
        ids = {r.seq_id for r, _ in planned}
        complete = [r for r in self.running.values() if r.seq_id not in ids and r.is_complete]
        entries += [self.entry(running) for running in complete]
        if entries:
            num_tokens = sum(n for _, n in planned)
            self.outbox.append(Stepped(now_ns, now_ns + 1, num_tokens, 0, entries))

    def compute(self, running, num_new_tokens):
        is_decoding = running.is_decoding
        start, end = running.num_computed_tokens, running.num_computed_tokens + num_new_tokens
        self.check_windows(running)
        for position in range(start, end):
            self.write(running, position)
        if running.records is not None:
            self.turn_record(running, end)
        running.computed(num_new_tokens)
        token_ids, reason = [], None
        while running.num_computed_tokens == running.num_tokens:
            token_ids.append(self.next_token(self.read(running)))
            _, reason = running.take(token_ids[-1:])
            is_over = reason is not None or running.is_complete or not running.room(self.block_size)
            if is_over or len(token_ids) == self.tokens_per_step:
                break
            self.write(running, running.num_computed_tokens)
            running.num_computed_tokens += 1
        return self.entry(running, token_ids, reason, num_new_tokens, is_decoding)

    def write(self, running, position):
        block_id = running.block_table[position // self.block_size]
        assert self.may_write(self.pool, block_id), "a step writes what others can find"
        for table in (running.block_table, *running.window_tables):
            place = (self.pool, table[position // self.block_size], position % self.block_size)
            assert place[1], "a step writes where it has no block"
            self.memory[place] = running.token_ids[position]
        if running.records is not None:
            self.memory.pop((self.pool, block_id, RECORD), None)

    def check_windows(self, running):
        """The newest tokens are also where layers with windows read them."""
        end = running.num_computed_tokens
        for table in running.window_tables:
            for p in range(max(end - self.num_read_tokens, 0), end):
                place = (self.pool, table[p // self.block_size], p % self.block_size)
                assert self.memory[place] == running.token_ids[p], "not what the window had"

    def record_of(self, place, token_ids):
        return place, token_ids

    def turn_record(self, running, end):
        """Read the record of all earlier tokens, write that of those up to `end` elsewhere."""
        blocks = running.record_blocks
        for place, block_id in enumerate(blocks.read):
            before = self.record_of(place, running.token_ids[: running.num_computed_tokens])
            assert self.memory[self.pool, block_id, RECORD] == before
        assert not set(blocks.read) & set(blocks.written)
        for place, block_id in enumerate(blocks.written):
            assert self.may_write(self.pool, block_id), "a record that others can find is written"
            self.forget_tokens(block_id)
            self.memory[self.pool, block_id, RECORD] = self.record_of(
                place, running.token_ids[:end]
            )

    def forget_tokens(self, block_id):
        for offset in range(self.block_size):
            self.memory.pop((self.pool, block_id, offset), None)

    def read(self, running):
        """The tokens that its context is of, as its blocks have them."""
        return [
            self.memory[self.pool, running.block_table[p // self.block_size], p % self.block_size]
            for p in range(running.num_computed_tokens)
        ]

    def entry(
        self, running, token_ids=(), reason=None, count=0, is_decoding=False, is_dropped=False
    ):
        has_ended = reason is not None or is_dropped
        released = running.dropped_for if has_ended else "moved" if running.is_complete else None
        if released:
            self.running.pop(running.seq_id, None)
        for pending in self.copies:
            if has_ended and pending.running is running:
                pending.is_void = True
        return SequenceStep(
            running.seq_id,
            running.generation,
            running.num_computed_tokens,
            list(token_ids),
            [],
            None if reason is None else str(reason),
            released,
            count,
            running.admitted_ns,
            is_decoding,
            valid_record=running.valid_record,
        )
