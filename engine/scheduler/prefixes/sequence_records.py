"""Give sequences their records, choose where to take snapshots, and find earlier snapshots.

A model with recurrent layers continues from a border only where both the blocks before it and the
record at it are there. A running sequence has two records, of which a step reads one and writes the
other; one more for each snapshot: the record just written there is frozen, and found by others from
then on, while the sequence continues with the rest. If there is room, a sequence has one more, in
which its worker keeps the record at the last border. When the worker releases the sequence, that
record becomes a snapshot, so that a conversation's next turn continues within the reply.

Invariant: a record that can be found is never written; a sequence has two others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from engine.scheduler.cache.block_pool import MIN_RECORDS, BlockPool, BlockState
from engine.scheduler.cache.hashes import Hash, record_hashes
from engine.scheduler.cache.ledger import Ledger
from engine.scheduler.routing.worker_routes import positions_needed
from engine.scheduler.sequences.sequence import KeptRecord, Sequence
from engine.wire.messages import Records

KEEPING_SHARE = 0.25
"""Share of a pool that must stay free where a sequence has a third record."""


class NeededRecords(NamedTuple):
    """What a sequence needs in the pools of a route."""

    new: dict[str, int]
    """Records by pool."""
    found: dict[str, list[int]]
    """The blocks of the snapshot that it continues from, by pool."""


class SequenceRecords:
    """The records of one router's sequences; none where the model keeps no recurrent states."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    # Before a sequence is placed

    def has_room(self, sequence: Sequence, kv_pool: BlockPool) -> bool:
        """Say whether a pool could hold a snapshot beside all that the sequence needs."""
        num_needed = kv_pool.num_blocks_for(positions_needed(sequence)) + kv_pool.record_blocks
        return not kv_pool.record_blocks or num_needed <= kv_pool.kv_capacity

    def border(self, sequence: Sequence, kv_pool: BlockPool, hashes: list[Hash]) -> int:
        """Count the leading blocks up to the last border that has a snapshot.

        Args:
            sequence: would go on from there.
            kv_pool: that is looked at.
            hashes: of the sequence's leading blocks that are there.
        """
        return kv_pool.index.border(hashes) if self.has_room(sequence, kv_pool) else 0

    def room(self, sequence: Sequence, hits: Mapping[str, int]) -> dict[str, int]:
        """Count, by pool, the free blocks that its records would take."""
        taken = {}
        for name, kv_pool in self._ledger.pools.items():
            if kv_pool.record_blocks and not self._ledger.records(sequence.seq_id, name):
                snapshot = self._snapshot(sequence, kv_pool, hits.get(name, 0))
                num_cached = sum(kv_pool.state(b) is BlockState.CACHED for b in snapshot)
                taken[name] = MIN_RECORDS * kv_pool.record_blocks + num_cached
        return taken

    def needed(
        self,
        sequence: Sequence,
        wants: Mapping[str, int],
        found: Mapping[str, list[int]],
        first: str | None = None,
    ) -> NeededRecords:
        """Find the records to reserve with a route, and decide where snapshots are taken.

        Args:
            sequence: has no records in these pools.
            wants: blocks by pool that it is about to take.
            found: by pool, the found blocks that its tables begin with.
            first: the pool that it computes its prompt in; None: snapshots are not used.
        """
        new, snapshots = {}, {}
        for name, count in wants.items():
            kv_pool, there = self._ledger.pools[name], found.get(name, [])
            if not kv_pool.record_blocks:
                continue
            new[name] = MIN_RECORDS
            if name == first:  # elsewhere its record arrives by copy, into a new one
                snapshot = self._snapshot(sequence, kv_pool, len(there) * kv_pool.block_size)
                if snapshot:
                    snapshots[name] = snapshot
                num_kept = sum(kv_pool.state(b) is BlockState.CACHED for b in (*there, *snapshot))
                num_left = kv_pool.num_free - num_kept - (count - len(there))
                num_spare = max(num_left // kv_pool.record_blocks - MIN_RECORDS, 0)
                borders = self._borders(sequence, kv_pool, len(there))[:num_spare]
                sequence.snapshots_at = tuple(sorted(borders))
                new[name] += len(borders)
            if sequence.prefix is not None:
                num_left = kv_pool.num_free - (count - len(there))
                num_left -= (new[name] + 1) * kv_pool.record_blocks
                new[name] += num_left >= kv_pool.capacity * KEEPING_SHARE
        return NeededRecords(new, snapshots)

    def _borders(self, sequence: Sequence, kv_pool: BlockPool, num_found: int) -> list[int]:
        """List where snapshots would be of use, the best first.

        That is the end of the prompt's last full block, for what continues it; where its template
        or client says that others part from it; and where blocks end that others have left without
        a record: a third prompt may well begin so.
        """
        if sequence.prefix is None or sequence.sampling.prompt_logprobs is not None:
            return []
        size, index = kv_pool.block_size, kv_pool.index
        hashes = sequence.prefix.hashes[: (sequence.num_prompt_tokens - 1) // size]
        said = (num_tokens // size for num_tokens in sequence.branches)
        places = dict.fromkeys((len(hashes), *said, len(index.blocks(hashes))))
        return [
            place * size
            for place in places
            if place > num_found and hashes[place - 1] not in index.snapshots
        ]

    def _snapshot(self, sequence: Sequence, kv_pool: BlockPool, num_tokens: int) -> list[int]:
        if not num_tokens or sequence.prefix is None:
            return []
        border = sequence.prefix.hashes[num_tokens // kv_pool.block_size - 1]
        return kv_pool.index.snapshots.get(border, [])

    # While it runs

    def begin_at(self, sequence: Sequence, kv_pool: BlockPool, num_hashed: int) -> None:
        """Go on from what is computed, else from the last of its records that is a snapshot.

        Args:
            sequence: is about to be admitted.
            kv_pool: of the worker.
            num_hashed: its leading blocks that are computed, as far as a hit may go.
        """
        if sequence.num_computed_tokens or sequence.prefix is None:
            return
        hashes = sequence.prefix.hashes[:num_hashed]
        for place, record in enumerate(self._ledger.records(sequence.seq_id, kv_pool.name)):
            border = kv_pool.index.border_of(record[0]) if record else None
            num_tokens = 0
            if border is not None and border in hashes:
                num_tokens = (hashes.index(border) + 1) * kv_pool.block_size
            if num_tokens > sequence.num_computed_tokens:
                sequence.num_computed_tokens, sequence.valid_record = num_tokens, place

    def of(self, sequence: Sequence, pool: str) -> Records | None:
        """Describe its records in a pool for the worker that continues it."""
        blocks = self._ledger.records(sequence.seq_id, pool)
        if not blocks:
            return None
        index = self._ledger.pools[pool].index
        frozen = [i for i, record in enumerate(blocks) if not record or record[0] in index]
        sequence.frozen_records = set(frozen)
        num_spare = max(len(blocks) - len(frozen) - MIN_RECORDS, 0)
        ahead = [at for at in sequence.snapshots_at if at > sequence.num_computed_tokens]
        sequence.snapshots_at = tuple(ahead[:num_spare])
        sequence.keeps_records = num_spare > len(sequence.snapshots_at)
        if not sequence.keeps_records:
            sequence.kept_record = None
        copied, kept = [list(record) for record in blocks], sequence.kept_record
        return Records(
            copied,
            sequence.valid_record,
            frozen,
            list(sequence.snapshots_at),
            self._ledger.pools[pool].block_size if sequence.keeps_records else 0,
            None if kept is None else kept.place,
        )

    def advanced(self, sequence: Sequence) -> None:
        """Release snapshots that a step has read for the last time; note which record is kept."""
        num_computed = sequence.num_computed_tokens
        if sequence.computed_in is None:
            return
        block_size = self._ledger.pools[sequence.computed_in[0]].block_size
        if num_computed in sequence.snapshots_at:
            sequence.frozen_records.add(sequence.valid_record)
        is_kept = sequence.keeps_records and num_computed % block_size == 0
        if num_computed and is_kept and sequence.valid_record not in sequence.frozen_records:
            sequence.kept_record = KeptRecord(sequence.valid_record, num_computed)
        pool, key = sequence.computed_in[0], ("admit", sequence.seq_id, sequence.generation)
        for place in sequence.frozen_records - {sequence.valid_record}:
            self._ledger.drop_record(sequence.seq_id, pool, place, key)
            sequence.frozen_records.remove(place)

    def publish_border(self, sequence: Sequence, kv_pool: BlockPool) -> list[Hash]:
        """Let others find the record that it has just left at a border, if it is to.

        Returns:
            the hashes of the new snapshot's blocks.
        """
        if sequence.num_computed_tokens not in sequence.snapshots_at:
            return []
        last = KeptRecord(sequence.valid_record, sequence.num_computed_tokens)
        return self._publish(sequence, kv_pool, last)

    def keep_last(self, sequence: Sequence) -> list[Hash]:
        """Let others find the record at its last border, once its worker has released it.

        Returns:
            the hashes of the new snapshot's blocks.
        """
        kept, here = sequence.kept_record, sequence.computed_in
        sequence.kept_record = None
        if kept is None or here is None or here[1] != self._ledger.pools[here[0]].life:
            return []
        return self._publish(sequence, self._ledger.pools[here[0]], kept)

    def _publish(self, sequence: Sequence, kv_pool: BlockPool, kept: KeptRecord) -> list[Hash]:
        if (chain := sequence.prefix) is None:
            return []
        border = chain.hashes[kept.num_tokens // kv_pool.block_size - 1]
        record = self._ledger.records(sequence.seq_id, kv_pool.name)[kept.place]
        is_new = kv_pool.publish_snapshot(record, border, sequence.owner)
        return record_hashes(border, len(record)) if is_new else []
