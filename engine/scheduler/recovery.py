"""Continue sequences after preemption, handoff or a worker's death.

Invariant: KV in a pool that is left of the route is not computed again; a route is taken with all
its blocks, or not at all. A sequence suspected of deaths continues only on an empty worker.
"""

from __future__ import annotations

from collections.abc import Collection

from engine.scheduler.cache.ledger import Ledger
from engine.scheduler.cache.topology import Topology
from engine.scheduler.prefixes.prefix_cache import PrefixCache
from engine.scheduler.routing.copies import Copies
from engine.scheduler.routing.worker_routes import MIN_CHUNK_TOKENS, Routes
from engine.scheduler.sequences.sequence import Counters, Moving, On, RouteStage, Sequence

PROBATION_SUSPICIONS = 2
MAX_SUSPICIONS = 3


def blame(victims: list[Sequence]) -> None:
    """Suspect a dead worker's sequences on probation; without any, suspect all.

    A suspect that had not begun was sent to a worker that was dying already.
    """
    possible = [s for s in victims if s.has_begun or not s.num_suspicions]
    for sequence in [s for s in possible if s.is_on_probation] or possible:
        sequence.num_suspicions += 1
        sequence.is_on_probation = sequence.num_suspicions >= PROBATION_SUSPICIONS


def is_proven(sequence: Sequence) -> bool:
    """Say whether too many workers have died under it."""
    return sequence.num_suspicions > MAX_SUSPICIONS


def must_wait(sequence: Sequence, at_worker: list[Sequence]) -> bool:
    return sequence.is_on_probation and any(other.is_on_probation for other in at_worker)


class Recovery:
    """How one router's sequences go on after a worker's death or a failed copy."""

    def __init__(
        self,
        topology: Topology,
        ledger: Ledger,
        routes: Routes,
        copies: Copies,
        prefixes: PrefixCache,
        counters: Counters,
    ) -> None:
        self._topology = topology
        self._ledger = ledger
        self._routes = routes
        self._copies = copies
        self._prefixes = prefixes
        self._counters = counters

    def hand_over(self, sequence: Sequence) -> Moving:
        """Move a sequence on to its next stage, after a worker finished and dropped it."""
        assert isinstance(sequence.where, On)
        source = sequence.where.stage
        target = sequence.stages[sequence.stages.index(source) + 1]
        sequence.transport = self._copies.links.between(source.worker, target.worker).transport
        pool = self._ledger.pools[self._topology.pool_of(target.worker)]
        sequence.handoff_blocks = pool.num_blocks_for(sequence.num_computed_tokens)
        self._counters.handoffs += 1
        return Moving(source, target)

    def fallback(
        self,
        sequence: Sequence,
        open_workers: Collection[str],
        ready_workers: Collection[str],
        held: Collection[Sequence],
    ) -> RouteStage | None:
        """Another route for a sequence whose worker is down, or whose blocks did not come.

        Returns:
            Its first stage; None: no other worker is there, or its blocks are not to be had yet.
        """
        others = {other.worker for other in held if other is not sequence}
        if sequence.is_on_probation:
            open_workers = [name for name in open_workers if name not in others]
            ready_workers = [name for name in ready_workers if name not in others]

        hits = self._prefixes.hits(sequence)

        def num_there(worker: str) -> int:
            pool = self._topology.pool_of(worker)
            # where it has blocks already, others are not exchanged for them
            has_own = bool(self._ledger.table(sequence.seq_id, pool))
            return max(self._num_computed(sequence, pool), 0 if has_own else hits.get(pool, 0))

        routes = self._routes.fallbacks(sequence, open_workers, ready_workers, held, num_there)
        for stages in routes:
            if self._take(sequence, stages):
                return stages[0]
        return None

    def _take(self, sequence: Sequence, stages: tuple[RouteStage, ...]) -> bool:
        """Reserve what a route needs beyond what the sequence has; True if it takes it."""
        seq_id, ledger, copies = sequence.seq_id, self._ledger, self._copies
        needed = self._routes.needs(sequence, stages)
        missing = {name: n - len(ledger.table(seq_id, name)) for name, n in needed.items()}
        if any(copies.is_written(sequence, name) for name in needed):
            return False
        here = self._topology.pool_of(stages[0].worker)
        num_computed = self._num_computed(sequence, here)
        new_pools = [name for name in needed if not ledger.table(seq_id, name)]
        found = self._prefixes.find(sequence, new_pools)
        wants = {name: max(n, 0) for name, n in missing.items()}
        new = {name: wants[name] for name in new_pools}
        kept = self._prefixes.records.needed(sequence, new, found)
        spans = self._prefixes.spans(sequence, new_pools, here, len(found.get(here, ())))
        if not ledger.reserve(
            seq_id, wants, found, records=kept.new, snapshots=kept.found, spans=spans
        ):
            return False
        self._keep(sequence, needed, here, num_computed)
        sequence.stages = stages
        if len(stages) > 1:
            copies.begin(sequence, copies.links.between(stages[0].worker, stages[1].worker))
        sequence.route_reason = f"{sequence.route_reason}; went on at {stages[0].worker}"
        return True

    def has_come(self, sequence: Sequence, ready_workers: Collection[str]) -> bool:
        """Check how many blocks of a moving sequence have arrived.

        If some will not arrive, it continues with the arrived ones and computes the others.

        Returns:
            True if no copy writes its blocks any more.
        """
        assert isinstance(sequence.where, Moving)
        from_pool, to_pool = (self._topology.pool_of(stage.worker) for stage in sequence.where)
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
            sequence.num_failed_copies += 1
            self._keep(sequence, {to_pool}, to_pool, self._num_computed(sequence, to_pool))
        return not (copies.is_under_way(sequence) or copies.is_written(sequence, to_pool))

    def lacks_blocks(self, sequence: Sequence) -> bool:
        """Say whether streams would notice the computing of what a moving sequence lacks."""
        num_left = sequence.num_tokens - sequence.num_computed_tokens
        return num_left > MIN_CHUNK_TOKENS and not sequence.is_on_probation

    def arrive(self, sequence: Sequence) -> None:
        """Note that its blocks have arrived and are computed in the target's pool."""
        assert isinstance(sequence.where, Moving)
        from_pool, to_pool = (self._topology.pool_of(stage.worker) for stage in sequence.where)
        if from_pool != to_pool and self._copies.num_arrived(sequence, to_pool):
            sequence.moved_to((to_pool, self._ledger.pools[to_pool].life))
        self._copies.drop(sequence.seq_id)

    def _keep(
        self, sequence: Sequence, pools: Collection[str], here: str, num_computed: int
    ) -> None:
        """Keep what is computed in one pool, and its blocks in some; stop moving."""
        if num_computed < sequence.num_computed_tokens:
            sequence.forget_computed(num_computed)
        sequence.moved_to((here, self._ledger.pools[here].life))
        self._copies.drop(sequence.seq_id)
        for name in self._ledger.pools:
            if name not in pools:
                self._ledger.release(sequence.seq_id, name)

    def _num_computed(self, sequence: Sequence, pool: str) -> int:
        """Positions that are computed in a pool."""
        kv_pool = self._ledger.pools[pool]
        has_blocks = bool(self._ledger.table(sequence.seq_id, pool))
        if has_blocks and sequence.computed_in == (pool, kv_pool.life):
            return sequence.num_computed_tokens
        num_arrived = self._copies.num_arrived(sequence, pool) * kv_pool.block_size
        return min(num_arrived, sequence.num_computed_tokens)
