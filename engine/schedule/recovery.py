"""How a sequence goes on: with more blocks, after preemption or handoff, after a worker's death.

Owns: who is short of blocks, and who has been told to let go of its own; which sequence is to
blame when workers die of it.
Invariant: what is computed in a pool that is left of the way is not computed again; a way is taken
with all its blocks, or not at all. A sequence that is suspected of deaths goes on elsewhere only
where nobody else is.
Never: admits or ends a sequence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from engine.cache.blocks import BlockPool, BlockState, Ledger
from engine.cache.places import Places
from engine.schedule.copies import Copies
from engine.schedule.journeys import MAX_PREEMPTIONS, Journeys, positions_needed, whole_length
from engine.schedule.prefix_cache import PrefixCache
from engine.schedule.sequence import Counters, Leg, Moving, On, Sequence, SequenceTable, age
from engine.wire.messages import Command, Extend, Extension, Release

# Blocks as they are needed: more for who decodes, and whose are taken away when there are no more.
# Admission takes blocks for what is known of a sequence. Where it decodes, it gets more, a few
# tokens before it would stand still without them. When those that are short want more than is free,
# or is about to be, somebody is preempted: its blocks go to them, and it is admitted again later
# and computes what it had. The oldest never is, so that it comes to its end, and then the next;
# whoever was preempted too often comes back with a portion of blocks, and is preempted again only
# where it waits for the next portion and nobody else has a block to give.
# Invariants: of those that are short in a pool nobody gets a block before an older one; a block is
# taken from nobody while as many are about to come back.
# Never: ends or admits a sequence; knows clocks.


@dataclass(frozen=True, slots=True)
class PreemptionCandidate:
    """What choosing whom to preempt takes into account of one sequence."""

    sequence: Sequence
    num_freed: int
    """Blocks of the pool that would become free."""
    num_lost: int
    """Positions that would have to be computed again: what others keep is not lost."""
    is_short: bool = False
    """It waits for blocks itself."""


def victim(holders: Collection[PreemptionCandidate]) -> PreemptionCandidate | None:
    """Choose whom to preempt: least to compute again for each block freed, the youngest of equals.

    Those who have lost theirs often enough come last, and only while they are short themselves:
    were all of them to keep what they have, none could go on.

    Args:
        holders: of blocks in one pool, with the oldest.

    Returns:
        None if there is nobody but the oldest, and those who have lost theirs often enough.
    """
    oldest = min((age(holder.sequence) for holder in holders), default=None)
    others = [one for one in holders if one.num_freed and age(one.sequence) != oldest]
    fresh = [one for one in others if one.sequence.num_preemptions < MAX_PREEMPTIONS]
    return max(fresh or [one for one in others if one.is_short], key=_gain, default=None)


def _gain(holder: PreemptionCandidate) -> tuple[float, tuple[int, int]]:
    return -holder.num_lost / holder.num_freed, age(holder.sequence)


class Growth:
    """Gives running sequences blocks before they need them, and preempts when there are none."""

    def __init__(
        self,
        places: Places,
        ledger: Ledger,
        sequences: SequenceTable,
        send: Callable[[str, Command], None],
    ) -> None:
        self._places = places
        self._ledger = ledger
        self._sequences = sequences
        self._send = send
        self._short: dict[int, Sequence] = {}
        self._leaving: dict[int, int] = {}
        """By seq_id, the generation that was told to let go of its blocks."""

    def note(self, sequence: Sequence) -> None:
        """It has been admitted, or has got further: is it short of blocks?"""
        if self._num_lacking(sequence) > 0:
            self._short[sequence.seq_id] = sequence

    def forget(self, sequence: Sequence) -> None:
        """It has ended, or its worker has let go of it."""
        self._short.pop(sequence.seq_id, None)
        self._leaving.pop(sequence.seq_id, None)

    def grow(self) -> list[Sequence]:
        """Give those that are short the blocks that are free, and preempt others for the rest.

        Returns:
            those preempted that are on no worker; of the others the workers are told.
        """
        if not self._short:
            return []
        missing: Counter[str] = Counter()
        extensions: dict[str, list[Extension]] = {}
        for sequence in sorted(self._short.values(), key=age):
            count = self._num_lacking(sequence)
            if count <= 0:
                del self._short[sequence.seq_id]
                continue
            worker = sequence.legs[-1].worker
            pool = self._places.pool_of(worker)
            if missing[pool] or not self._ledger.reserve(sequence.seq_id, {pool: count}):
                missing[pool] += count
                continue
            del self._short[sequence.seq_id]
            seq_id, generation = sequence.seq_id, sequence.generation
            block_ids = self._ledger.table(seq_id, pool)[-count:]
            self._ledger.extend_command(("admit", seq_id, generation), {pool: block_ids})
            extensions.setdefault(worker, []).append(Extension(seq_id, generation, block_ids))
        for worker, batch in extensions.items():
            self._send(worker, Extend(batch))
        victims = self._victims(missing) if missing else []
        for sequence in victims:
            if isinstance(sequence.where, On):
                self._short.pop(sequence.seq_id, None)
                self._leaving[sequence.seq_id] = sequence.generation
                release = Release(sequence.seq_id, sequence.generation, "preempted")
                self._send(sequence.where.leg.worker, release)
        return [sequence for sequence in victims if not isinstance(sequence.where, On)]

    def spare(self) -> dict[str, int]:
        """Free blocks by pool that admission may take.

        What is left to the others is one block for each sequence that may need more where it
        decodes, and all that is missing: else somebody new would be preempted at once, or others.
        """
        spare = {name: pool.num_free for name, pool in self._ledger.pools.items()}
        for sequence in self._sequences.holders():
            pool = self._places.pool_of(sequence.legs[-1].worker)
            books = self._ledger.pools[pool]
            num_held = len(self._ledger.table(sequence.seq_id, pool))
            if num_held < books.num_blocks_for(whole_length(sequence)):
                lacking = self._num_lacking(sequence) if sequence.seq_id in self._short else 0
                spare[pool] -= 1 + lacking
        return spare

    def _num_lacking(self, sequence: Sequence) -> int:
        """Blocks that it should have beyond its own; 0 where it does not decode, or is to leave."""
        where = sequence.where
        if (
            not isinstance(where, On)
            or where.leg is not sequence.legs[-1]
            or self._leaves(sequence)
        ):
            return 0
        pool = self._places.pool_of(where.leg.worker)
        wanted = self._ledger.pools[pool].num_blocks_for(positions_needed(sequence))
        return wanted - len(self._ledger.table(sequence.seq_id, pool))

    def _leaves(self, sequence: Sequence) -> bool:
        is_told = self._leaving.get(sequence.seq_id) == sequence.generation
        return is_told and isinstance(sequence.where, On)

    def _victims(self, missing: Counter[str]) -> list[Sequence]:
        """As few as free what is missing, with what is about to be free without them."""
        chosen: dict[int, Sequence] = {}
        for pool in sorted(missing):
            books = self._ledger.pools[pool]
            coming = books.num_free + books.counts[BlockState.DRAINING] - books.num_stuck
            holders = []
            for sequence in self._sequences.holders():
                table = self._ledger.table(sequence.seq_id, pool)
                num_freed = self._num_freed(books.name, table)
                if self._leaves(sequence) or sequence.seq_id in chosen:
                    coming += num_freed
                elif table:
                    num_lost = self._num_lost(sequence, books)
                    is_short = sequence.seq_id in self._short
                    holders.append(PreemptionCandidate(sequence, num_freed, num_lost, is_short))
            while coming < missing[pool] and (found := victim(holders)) is not None:
                holders.remove(found)
                chosen[found.sequence.seq_id] = found.sequence
                coming += found.num_freed
                if found.sequence.seq_id in self._short:
                    missing[pool] -= self._num_lacking(found.sequence)
        return list(chosen.values())

    def _num_lost(self, sequence: Sequence, books: BlockPool) -> int:
        """Positions that it would compute again, were its blocks given to others.

        What others refer to stays, and what another pool has. Its own that have a hash are found as
        long as they last, but in a full pool they are what goes next.
        """
        table = self._ledger.table(sequence.seq_id, books.name)
        num_left = sum(books.num_references[block_id] > 1 for block_id in table)
        if sequence.prefix is not None:
            hashes = sequence.prefix.hashes
            others = (pool for pool in self._ledger.pools.values() if pool is not books)
            num_left = max(num_left, *(pool.index.num_hit(hashes) for pool in others), 0)
        return max(sequence.num_computed_tokens - num_left * books.block_size, 0)

    def _num_freed(self, pool: str, table: Iterable[int]) -> int:
        """Of its blocks, those that nobody else refers to."""
        references = self._ledger.pools[pool].num_references
        return sum(references[block_id] == 1 for block_id in table)


# --------------------------------------------------------------------------------------------------


# Which sequence is to blame when a worker dies.
# A sequence that keeps killing workers is found out: after its second death each that was there
# makes its next step with no other suspect beside it, and a death then is blamed on it alone.
# Owns: how many deaths are too many.
# Invariant: a sequence that makes progress is not on probation any more, but its deaths still
# count. Never: ends a sequence.


PROBATION_SUSPICIONS = 2
MAX_SUSPICIONS = 3


def blame(victims: list[Sequence]) -> None:
    """Suspect those of a dead worker's sequences that are on probation; if none is, all."""
    for sequence in [s for s in victims if s.is_on_probation] or victims:
        sequence.num_suspicions += 1
        sequence.is_on_probation = sequence.num_suspicions >= PROBATION_SUSPICIONS


def is_proven(sequence: Sequence) -> bool:
    """True if too many workers have died under it."""
    return sequence.num_suspicions > MAX_SUSPICIONS


def must_wait(sequence: Sequence, at_worker: list[Sequence]) -> bool:
    """True if it is on probation, and so is one that is at its worker already."""
    return sequence.is_on_probation and any(other.is_on_probation for other in at_worker)


class Recovery:
    """How one router's sequences go on after a worker's death or a failed copy.

    Args:
        places: workers and pools.
        ledger: the blocks.
        ways: through the workers.
        copies: blocks that are under way.
        prefixes: what others have computed.
        counters: what is counted.
    """

    def __init__(
        self,
        places: Places,
        ledger: Ledger,
        ways: Journeys,
        copies: Copies,
        prefixes: PrefixCache,
        counters: Counters,
    ) -> None:
        self._places = places
        self._ledger = ledger
        self._ways = ways
        self._copies = copies
        self._prefixes = prefixes
        self._counters = counters

    def hand_over(self, sequence: Sequence) -> Moving:
        """A worker has done its leg and has dropped the sequence: on to the next."""
        assert isinstance(sequence.where, On)
        source = sequence.where.leg
        target = sequence.legs[sequence.legs.index(source) + 1]
        sequence.transport = self._copies.links.between(source.worker, target.worker).transport
        pool = self._ledger.pools[self._places.pool_of(target.worker)]
        sequence.handoff_blocks = pool.num_blocks_for(sequence.num_computed_tokens)
        self._counters.handoffs += 1
        return Moving(source, target)

    def detour(
        self, sequence: Sequence, open_workers: Collection[str], held: Collection[Sequence]
    ) -> Leg | None:
        """Another way for a sequence whose worker is down; its first leg, or None.

        None: no other worker is there, or its blocks are not to be had yet.
        """
        others = {other.worker for other in held if other is not sequence}
        if sequence.is_on_probation:
            open_workers = [name for name in open_workers if name not in others]

        hits = self._prefixes.hits(sequence)

        def num_there(worker: str) -> int:
            pool = self._places.pool_of(worker)
            return max(self._num_computed(sequence, pool), hits.get(pool, 0))

        for legs in self._ways.detours(sequence, open_workers, held, num_there):
            if self._take(sequence, legs):
                return legs[0]
        return None

    def _take(self, sequence: Sequence, legs: tuple[Leg, ...]) -> bool:
        """Reserve what a way needs beyond what the sequence has; True if it goes that way."""
        seq_id, ledger, copies = sequence.seq_id, self._ledger, self._copies
        needed = self._ways.needs(sequence, legs)
        missing = {name: n - len(ledger.table(seq_id, name)) for name, n in needed.items()}
        if any(copies.is_written(sequence, name) for name in needed):
            return False
        here = self._places.pool_of(legs[0].worker)
        num_computed = self._num_computed(sequence, here)
        new_pools = [name for name in needed if not ledger.table(seq_id, name)]
        found = self._prefixes.find(sequence, new_pools)
        if not ledger.reserve(seq_id, {name: max(n, 0) for name, n in missing.items()}, found):
            return False
        self._keep(sequence, needed, here, num_computed)
        sequence.legs = legs
        if len(legs) > 1:
            copies.begin(sequence, copies.links.between(legs[0].worker, legs[1].worker))
        sequence.route_reason = f"{sequence.route_reason}; went on at {legs[0].worker}"
        return True

    def has_come(self, sequence: Sequence, ready_workers: Collection[str]) -> bool:
        """See how far the blocks of a sequence have come that is between two workers.

        Of blocks that will not arrive it goes on with those that have; the others are computed.

        Returns:
            True if nothing is to be waited for: no copy writes its blocks any more.
        """
        assert isinstance(sequence.where, Moving)
        from_pool, to_pool = (self._places.pool_of(leg.worker) for leg in sequence.where)
        copies, source_is_there = self._copies, sequence.where.source.worker in ready_workers
        is_lost = copies.error(sequence) is not None
        if from_pool != to_pool and copies.has_left(sequence):
            self._ledger.release(sequence.seq_id, from_pool)
        elif copies.is_under_way(sequence):
            is_there = sequence.computed_in == (from_pool, self._ledger.pools[from_pool].life)
            has_blocks = bool(self._ledger.table(sequence.seq_id, from_pool))
            is_lost |= not (is_there and has_blocks and source_is_there)
        if is_lost:
            self._counters.failed_handoffs += 1
            self._keep(sequence, {to_pool}, to_pool, self._num_computed(sequence, to_pool))
        return not (copies.is_under_way(sequence) or copies.is_written(sequence, to_pool))

    def arrive(self, sequence: Sequence) -> None:
        """Its blocks have come: it is computed where it goes on."""
        assert isinstance(sequence.where, Moving)
        from_pool, to_pool = (self._places.pool_of(leg.worker) for leg in sequence.where)
        if from_pool != to_pool and self._copies.num_arrived(sequence, to_pool):
            sequence.computed_in = (to_pool, self._ledger.pools[to_pool].life)
        self._copies.forget(sequence.seq_id)

    def _keep(
        self, sequence: Sequence, pools: Collection[str], here: str, num_computed: int
    ) -> None:
        """It goes on with what is computed in one pool, keeps its blocks in some, moves nothing."""
        if num_computed < sequence.num_computed_tokens:
            sequence.forget_computed(num_computed)
        sequence.computed_in = (here, self._ledger.pools[here].life)
        self._copies.forget(sequence.seq_id)
        for name in self._ledger.pools:
            if name not in pools:
                self._ledger.release(sequence.seq_id, name)

    def _num_computed(self, sequence: Sequence, pool: str) -> int:
        """Positions that are computed in a pool."""
        books = self._ledger.pools[pool]
        has_blocks = bool(self._ledger.table(sequence.seq_id, pool))
        if has_blocks and sequence.computed_in == (pool, books.life):
            return sequence.num_computed_tokens
        num_arrived = self._copies.num_arrived(sequence, pool) * books.block_size
        return min(num_arrived, sequence.num_computed_tokens)
