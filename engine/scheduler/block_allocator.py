"""Give running sequences more blocks, and preempt the cheapest if none are free.

Owns: which sequences are short of blocks.
Invariant: of two sequences short of a pool's blocks the older gets its blocks first; none is
preempted while enough blocks are about to come back.
Never: admits or ends a sequence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from itertools import chain

from engine.scheduler.cache.block_pool import BlockPool, BlockState
from engine.scheduler.cache.ledger import Ledger
from engine.scheduler.cache.topology import Topology
from engine.scheduler.routing.worker_routes import MAX_PREEMPTIONS, positions_needed, whole_length
from engine.scheduler.sequences.sequence import On, Sequence
from engine.scheduler.sequences.sequence_table import SequenceTable, age
from engine.wire.messages import Command, Extend, Extension, Release


@dataclass(frozen=True, slots=True)
class PreemptionCandidate:
    """The facts about one sequence by which a victim is chosen."""

    sequence: Sequence
    num_freed: int
    """Blocks of the pool that would become free."""
    num_lost: int
    """Positions that would have to be computed again: what others keep is not lost."""
    is_short: bool = False
    """It waits for blocks itself."""


def victim(holders: Collection[PreemptionCandidate]) -> PreemptionCandidate | None:
    """Choose the sequence to preempt: least to recompute per freed block; of equals the youngest.

    Sequences that were preempted MAX_PREEMPTIONS times come last, and only while they are short
    themselves: if all of them kept their blocks, none could continue.

    Args:
        holders: of blocks in one pool, with the oldest.

    Returns:
        None if only the oldest and such sequences are left.
    """
    oldest = min((age(holder.sequence) for holder in holders), default=None)
    others = [one for one in holders if one.num_freed and age(one.sequence) != oldest]
    fresh = [one for one in others if one.sequence.num_preemptions < MAX_PREEMPTIONS]
    return max(fresh or [one for one in others if one.is_short], key=_gain, default=None)


def _gain(holder: PreemptionCandidate) -> tuple[float, tuple[int, int]]:
    return -holder.num_lost / holder.num_freed, age(holder.sequence)


class BlockAllocator:
    """Gives running sequences blocks before they need them, and preempts when there are none."""

    def __init__(
        self,
        topology: Topology,
        ledger: Ledger,
        sequences: SequenceTable,
        send: Callable[[str, Command], None],
    ) -> None:
        self._topology = topology
        self._ledger = ledger
        self._sequences = sequences
        self._send = send
        self._short: dict[int, Sequence] = {}
        self._leaving: dict[int, int] = {}
        """The generation that was told to release its blocks, by seq_id."""

    def note(self, sequence: Sequence) -> None:
        """Note whether a sequence is short of blocks, after an admission or a step."""
        if self._lacks(sequence):
            self._short[sequence.seq_id] = sequence

    def forget(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended, or that its worker has released."""
        self._short.pop(sequence.seq_id, None)
        self._leaving.pop(sequence.seq_id, None)

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
            if missing[pool] or (extension := self._extend(sequence, pool)) is None:
                missing[pool] += self._lacking_cost(sequence)
                continue
            del self._short[sequence.seq_id]
            extensions.setdefault(worker, []).append(extension)
        for worker, batch in extensions.items():
            self._send(worker, Extend(batch))
        victims = self._victims(missing) if missing else []
        for sequence in victims:
            if isinstance(sequence.where, On):
                self._short.pop(sequence.seq_id, None)
                self._leaving[sequence.seq_id] = sequence.generation
                release = Release(sequence.seq_id, sequence.generation, "preempted")
                self._send(sequence.where.stage.worker, release)
        return [sequence for sequence in victims if not isinstance(sequence.where, On)]

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
            kv_pool = self._ledger.pools[pool]
            coming = kv_pool.num_free + kv_pool.counts[BlockState.DRAINING] - kv_pool.num_stuck
            holders = []
            for sequence in self._sequences.holders():
                table = self._ledger.table(sequence.seq_id, pool)
                records = chain(*self._ledger.records(sequence.seq_id, pool))
                num_freed = self._num_freed(kv_pool, chain(table, records))
                if self._leaves(sequence) or sequence.seq_id in chosen:
                    coming += num_freed
                elif table:
                    num_lost = self._num_lost(sequence, kv_pool)
                    is_short = sequence.seq_id in self._short
                    holders.append(PreemptionCandidate(sequence, num_freed, num_lost, is_short))
            while coming < missing[pool] and (found := victim(holders)) is not None:
                holders.remove(found)
                chosen[found.sequence.seq_id] = found.sequence
                coming += found.num_freed
                if found.sequence.seq_id in self._short:
                    missing[pool] -= self._lacking_cost(found.sequence)
        return list(chosen.values())

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
