"""Give running sequences more blocks, and have others preempted if none are free.

Invariant: of two sequences short of a pool's blocks the older gets its blocks first; none is
preempted while enough blocks are about to come back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import chain

from engine.scheduler.cache.block_pool import BlockPool, BlockState
from engine.scheduler.cache.ledger import CommandKey, Ledger
from engine.scheduler.cache.topology import Topology
from engine.scheduler.preemption import PoolShares, PreemptionCandidate, victim, victim_for
from engine.scheduler.queue.queue import FairQueue
from engine.scheduler.routing.worker_routes import positions_needed, whole_length
from engine.scheduler.sequences.sequence import On, Sequence
from engine.scheduler.sequences.sequence_table import SequenceTable, age
from engine.wire.messages import Command, Extend, Extension, Release


class BlockAllocator:
    """Gives running sequences blocks before they need them, and preempts when there are none."""

    def __init__(
        self,
        topology: Topology,
        ledger: Ledger,
        sequences: SequenceTable,
        queue: FairQueue,
        send: Callable[[str, Command], None],
    ) -> None:
        self._topology = topology
        self._ledger = ledger
        self._sequences = sequences
        self._queue = queue
        self._send = send
        self._short: dict[int, Sequence] = {}
        self._leaving: dict[int, int] = {}
        """The generation that was told to release its blocks, by seq_id."""
        self._promised: frozenset[str] = frozenset()
        """Pools whose next free blocks are a waiting sequence's."""
        self._over: set[str] = set()
        """Owners above their shares when turns began."""
        self.is_claimed = False
        """Whether an owner within its share waits for blocks while others hold more than theirs."""

    def note(self, sequence: Sequence) -> None:
        """Note whether a sequence is short of blocks, after an admission or a step."""
        if self._lacks(sequence):
            self._short[sequence.seq_id] = sequence

    def forget(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended, or that its worker has released."""
        self._short.pop(sequence.seq_id, None)
        self._leaving.pop(sequence.seq_id, None)

    def waiting(self) -> set[CommandKey]:
        """List the admissions that no worker can go on with before others free blocks."""
        return {
            ("admit", sequence.seq_id, sequence.generation)
            for sequence in self._short.values()
            if self._lacks(sequence) and not self._has_room(sequence)
        }

    def _has_room(self, sequence: Sequence) -> bool:
        """Say whether a sequence on a worker has a block for its next position."""
        assert isinstance(sequence.where, On)
        pool = self._topology.pool_of(sequence.where.stage.worker)
        length = len(self._ledger.table(sequence.seq_id, pool))
        num_usable = min(length, self._ledger.span(sequence.seq_id, pool).end)
        return sequence.num_computed_tokens < num_usable * self._ledger.pools[pool].block_size

    def grow(self) -> list[Sequence]:
        """Give short sequences the free blocks, and preempt others for the rest.

        Returns:
            preempted sequences that are on no worker; workers are told of the others.
        """
        if not self._short:
            return []
        missing: Counter[str] = Counter()
        extensions: dict[str, list[Extension]] = {}
        for sequence in sorted(self._short.values(), key=age):
            if not self._lacks(sequence):
                del self._short[sequence.seq_id]
                continue
            assert isinstance(sequence.where, On)
            worker = sequence.where.stage.worker
            pool = self._topology.pool_of(worker)
            if pool in self._promised:  # a step or two, until others have left
                continue
            if missing[pool] or (extension := self._extend(sequence, pool)) is None:
                missing[pool] += self._lacking_cost(sequence)
                continue
            del self._short[sequence.seq_id]
            extensions.setdefault(worker, []).append(extension)
        for worker, batch in extensions.items():
            self._send(worker, Extend(batch))
        victims = self._victims(missing) if missing else []
        self._dismiss(victims)
        return [sequence for sequence in victims if not isinstance(sequence.where, On)]

    def _dismiss(self, victims: Iterable[Sequence]) -> None:
        """Tell workers to release the victims that they have."""
        for sequence in victims:
            if isinstance(sequence.where, On):
                self._short.pop(sequence.seq_id, None)
                self._leaving[sequence.seq_id] = sequence.generation
                release = Release(sequence.seq_id, sequence.generation, "preempted")
                self._send(sequence.where.stage.worker, release)

    # For sequences that wait

    def begin_turns(self, most_sequences: int) -> set[str]:
        """Begin to place what waits; no blocks are promised any more.

        Returns:
            owners that hold more than their shares of some pool, or of the sequences.
        """
        self._promised, self.is_claimed, self._over = frozenset(), False, set()
        owners, holders = self._queue.owners(), self._sequences.holders()
        if owners and len(owners.union(one.owner for one in holders)) > 1:
            sizes, pools = self._ledger.table_sizes(), {one.pool for one in self._topology.workers}
            self._over = self._sequence_shares(most_sequences).over()
            self._over.update(*(self._pool_shares(pool, sizes[pool]).over() for pool in pools))
        return set(self._over)

    def make_room(
        self, sequence: Sequence, needed: Mapping[str, int], num_available: Mapping[str, int]
    ) -> None:
        """Have others preempted for a waiting sequence, if that is its owner's due and enough.

        One at a time: what becomes free is promised to it.

        Args:
            sequence: waits for blocks, and for nothing else.
            needed: blocks by pool.
            num_available: blocks by pool, free or shared with others.
        """
        if not self._over - {sequence.owner}:
            return
        self.is_claimed |= sequence.owner not in self._over
        if self._promised:
            return
        chosen: dict[int, Sequence] = {}
        costs = {name: self._ledger.pools[name].max_cost(n) for name, n in needed.items()}
        short = [name for name in sorted(costs) if costs[name] > num_available[name]]
        for pool in short:
            missing = costs[pool] - num_available[pool] - self._num_draining(pool)
            coming, holders = self._candidates(pool, chosen)
            holders = [one for one in holders if isinstance(one.sequence.where, On)]
            shares = self._pool_shares(pool, self._ledger.table_sizes()[pool])
            while coming < missing:
                wanted = costs[pool], missing - coming
                found = victim_for(sequence.owner, *wanted, holders, shares)
                if found is None:
                    return
                holders.remove(found)
                chosen[found.sequence.seq_id] = found.sequence
                coming += found.num_freed
                shares.held[found.owner] -= found.num_freed
        self._promised = frozenset(short)
        self._dismiss(chosen.values())

    def make_place(self, sequence: Sequence, most_sequences: int) -> None:
        """Have a sequence preempted for the first of an owner, where workers take no more."""
        if self._leaving:
            return
        on_workers = [one for one in self._sequences.held() if isinstance(one.where, On)]
        holders = [PreemptionCandidate(one, 1, one.num_computed_tokens) for one in on_workers]
        shares = self._sequence_shares(most_sequences)
        found = victim_for(sequence.owner, 1, 1, holders, shares)
        self._dismiss([] if found is None else [found.sequence])

    def _sequence_shares(self, most_sequences: int) -> PoolShares:
        sizes = [(one.owner, 1) for one in self._sequences.held()]
        return PoolShares(most_sequences, sizes, self._queue.owners(), self._queue.weights)

    def _pool_shares(self, pool: str, sizes: Mapping[int, int]) -> PoolShares:
        """Compare what owners hold of a pool, without the sequences that leave, with their shares.

        Args:
            pool: its name.
            sizes: each sequence's blocks there.
        """
        staying = [one for one in self._sequences.holders() if not self._leaves(one)]
        each = [(one.owner, sizes[one.seq_id]) for one in staying if one.seq_id in sizes]
        capacity = self._ledger.pools[pool].capacity
        return PoolShares(capacity, each, self._queue.owners(), self._queue.weights)

    def _extend(self, sequence: Sequence, pool: str) -> Extension | None:
        """Take what a sequence lacks; None: too few blocks are free."""
        ledger, seq_id, generation = self._ledger, sequence.seq_id, sequence.generation
        count = max(self._num_lacking(sequence), 0)
        span = ledger.pools[pool].windows.span(sequence.num_computed_tokens)
        num_before = len(ledger.table(seq_id, pool))
        num_whole = min(ledger.span(seq_id, pool).end, num_before)
        if not ledger.grow(seq_id, pool, count, span):
            return None
        block_ids = ledger.table(seq_id, pool)[num_before:]
        ledger.extend_command(("admit", seq_id, generation), {pool: block_ids})
        window_ids = [table[num_whole:] for table in ledger.window_tables(seq_id, pool)]
        return Extension(seq_id, generation, block_ids, window_ids)

    def num_free(self) -> dict[str, int]:
        """Count the free blocks by pool that admission may take.

        It leaves one block for each sequence that may need more where it decodes, and all that are
        missing; otherwise an admission would cause a preemption at once.
        """
        num_free = {name: pool.num_free for name, pool in self._ledger.pools.items()}
        for sequence in self._sequences.holders():
            pool = self._topology.pool_of(sequence.stages[-1].worker)
            kv_pool = self._ledger.pools[pool]
            num_held = len(self._ledger.table(sequence.seq_id, pool))
            if num_held < kv_pool.num_blocks_for(whole_length(sequence)):
                num_free[pool] -= kv_pool.max_cost(1)
            if sequence.seq_id in self._short and isinstance(sequence.where, On):
                here = self._topology.pool_of(sequence.where.stage.worker)
                num_free[here] -= self._lacking_cost(sequence)
        return num_free

    def _num_lacking(self, sequence: Sequence) -> int:
        """Blocks that it should have beyond its own; 0 where it does not decode, or is to leave."""
        where = sequence.where
        if (
            not isinstance(where, On)
            or where.stage is not sequence.stages[-1]
            or self._leaves(sequence)
        ):
            return 0
        pool = self._topology.pool_of(where.stage.worker)
        wanted = self._ledger.pools[pool].num_blocks_for(positions_needed(sequence))
        return wanted - len(self._ledger.table(sequence.seq_id, pool))

    def _lacks(self, sequence: Sequence) -> bool:
        if self._num_lacking(sequence) > 0:
            return True
        return self._ledger.has_windows and self._num_bare(sequence) > 0

    def _num_bare(self, sequence: Sequence) -> int:
        """Count the blocks of its table that it may soon write, and that lack window blocks."""
        where = sequence.where
        if not isinstance(where, On) or self._leaves(sequence):
            return 0
        pool = self._topology.pool_of(where.stage.worker)
        kv_pool = self._ledger.pools[pool]
        length = len(self._ledger.table(sequence.seq_id, pool))
        wanted = min(kv_pool.windows.span(sequence.num_computed_tokens).end, length)
        return wanted - self._ledger.span(sequence.seq_id, pool).end

    def _lacking_cost(self, sequence: Sequence) -> int:
        """Count the free blocks that it needs now."""
        if not isinstance(sequence.where, On):
            return 0
        kv_pool = self._ledger.pools[self._topology.pool_of(sequence.where.stage.worker)]
        cost = kv_pool.max_cost(max(self._num_lacking(sequence), 0))
        if self._ledger.has_windows:
            cost += max(self._num_bare(sequence), 0) * kv_pool.windows.num_each
        return cost

    def _leaves(self, sequence: Sequence) -> bool:
        is_told = self._leaving.get(sequence.seq_id) == sequence.generation
        return is_told and isinstance(sequence.where, On)

    def _victims(self, missing: Counter[str]) -> list[Sequence]:
        """Choose the fewest victims that, with blocks about to be free, free enough."""
        chosen: dict[int, Sequence] = {}
        for pool in sorted(missing):
            leaving, holders = self._candidates(pool, chosen)
            coming = self._ledger.pools[pool].num_free + self._num_draining(pool) + leaving
            shares = self._pool_shares(pool, self._ledger.table_sizes()[pool])
            while coming < missing[pool]:
                if (found := victim(holders, shares)) is None:
                    break
                holders.remove(found)
                chosen[found.sequence.seq_id] = found.sequence
                coming += found.num_freed
                shares.held[found.owner] -= found.num_freed
                if found.sequence.seq_id in self._short:
                    missing[pool] -= self._lacking_cost(found.sequence)
        return list(chosen.values())

    def _num_draining(self, pool: str) -> int:
        """Count the blocks that become free once commands have been answered."""
        kv_pool = self._ledger.pools[pool]
        return kv_pool.counts[BlockState.DRAINING] - kv_pool.num_stuck

    def _candidates(
        self, pool: str, chosen: Collection[int]
    ) -> tuple[int, list[PreemptionCandidate]]:
        """Count the blocks of sequences that leave or are chosen, and list the other holders."""
        kv_pool, leaving = self._ledger.pools[pool], 0
        holders: list[PreemptionCandidate] = []
        for sequence in self._sequences.holders():
            table = self._ledger.table(sequence.seq_id, pool)
            records = chain(*self._ledger.records(sequence.seq_id, pool))
            num_freed = self._num_freed(kv_pool, chain(table, records))
            if self._leaves(sequence) or sequence.seq_id in chosen:
                leaving += num_freed
            elif table:
                num_lost = self._num_lost(sequence, kv_pool)
                is_short = sequence.seq_id in self._short
                holders.append(PreemptionCandidate(sequence, num_freed, num_lost, is_short))
        return leaving, holders

    def _num_lost(self, sequence: Sequence, kv_pool: BlockPool) -> int:
        """Positions that it would compute again, were its blocks given to others.

        What others refer to stays, and what another pool has. Its own that have a hash are found as
        long as they last, but in a full pool they are what goes next.
        """
        if kv_pool.record_blocks:  # blocks are little use without the record at their end
            return sequence.num_computed_tokens
        table = self._ledger.table(sequence.seq_id, kv_pool.name)
        num_left = sum(kv_pool.num_references[block_id] > 1 for block_id in table)
        if sequence.prefix is not None:
            hashes = sequence.prefix.hashes
            others = (pool for pool in self._ledger.pools.values() if pool is not kv_pool)
            num_left = max(num_left, *(pool.index.num_hit(hashes) for pool in others), 0)
        return max(sequence.num_computed_tokens - num_left * kv_pool.block_size, 0)

    def _num_freed(self, kv_pool: BlockPool, table: Iterable[int]) -> int:
        """Count its blocks that no other sequence refers to, with their window blocks."""
        references, windows = kv_pool.num_references, kv_pool.windows
        own = [block_id for block_id in table if references[block_id] == 1]
        return len(own) + sum(len(windows.of(b)) for b in own if b not in windows.spare)
