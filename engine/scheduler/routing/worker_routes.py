"""List the routes that a sequence can take through the workers, and the blocks each needs.

Invariant: what fits a pool's capacity can be run to its end there, alone; what admission takes is
enough for all that is known of the sequence and for the steps until more can have come.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

from engine.errors import RequestError
from engine.scheduler.cache.block_pool import BlockPool
from engine.scheduler.cache.ledger import Ledger
from engine.scheduler.cache.topology import DECODE, PREFILL, Topology
from engine.scheduler.sequences.sequence import RouteStage, Sequence, route_of
from engine.wire.messages import Admit, Records

MIN_CHUNK_TOKENS = 64
"""Smallest prompt chunk per step; so few tokens hardly lengthen the ITL of decoding sequences."""
AHEAD_TOKENS = 8
"""Positions after its newest token that a sequence has blocks for: enough for a step with a draft
of 7 tokens. The next step may begin before the daemon has answered."""
MAX_FAILED_COPIES = 3
"""Failed handoffs of a sequence after which its decode worker computes the rest."""
MAX_PREEMPTIONS = 2
"""Preemptions after which a sequence returns only with blocks for many tokens more.

It keeps them while others have any to give."""
PORTION_TOKENS = 2048
"""Positions of such a sequence's portions of blocks: its limit may be the whole context, which it
hardly uses."""


class Pair(NamedTuple):
    """The worker that computes a prompt, and the one that decodes; one may do both."""

    prefill: str
    decode: str

    @property
    def moves(self) -> bool:
        return self.prefill != self.decode

    @property
    def route(self) -> str:
        return route_of(self)


def route_stages(sequence: Sequence, pair: Pair) -> tuple[RouteStage, ...]:
    """Make a route through a pair; a sequence that ends with its next token does not move."""
    max_tokens, until_output = sequence.sampling.max_tokens, sequence.num_output_tokens + 1
    if not pair.moves:
        return (RouteStage(pair.decode, max_tokens),)
    first = RouteStage(pair.prefill, until_output)
    return (first,) if until_output == max_tokens else (first, RouteStage(pair.decode, max_tokens))


def whole_length(sequence: Sequence) -> int:
    return sequence.num_prompt_tokens + sequence.sampling.max_tokens


def positions_needed(sequence: Sequence) -> int:
    """Positions that it should have blocks for now, where it decodes."""
    wanted = sequence.num_tokens + AHEAD_TOKENS
    if sequence.num_preemptions >= MAX_PREEMPTIONS:
        wanted = (wanted // PORTION_TOKENS + 1) * PORTION_TOKENS
    return min(wanted, whole_length(sequence))


def blocks_needed(
    sequence: Sequence,
    stages: tuple[RouteStage, ...],
    num_tokens: int,
    topology: Topology,
    pools: Mapping[str, BlockPool],
) -> dict[str, int]:
    """Count blocks by pool: for `num_tokens` on the last stage, for known tokens before it.

    Stages in one pool share the blocks.
    """
    needed: dict[str, int] = {}
    for stage in stages:
        pool = pools[topology.pool_of(stage.worker)]
        count = pool.num_blocks_for(num_tokens if stage is stages[-1] else sequence.num_tokens)
        needed[pool.name] = max(needed.get(pool.name, 0), count)
    return needed


def admit(
    sequence: Sequence,
    stage: RouteStage,
    table: list[int],
    records: Records | None = None,
    window_tables: list[list[int]] | None = None,
    max_chunk_beside: int | None = None,
) -> Admit:
    """Make the command that runs a sequence on a stage from its present state.

    Args:
        table: its blocks in the pool of the stage's worker.
        records: its records there; None: the model keeps none.
        window_tables: its window blocks there, by group of layers; None: there are none.
        max_chunk_beside: its tokens of a step in which others decode, at most; None: no limit.
    """
    return Admit(
        seq_id=sequence.seq_id,
        generation=sequence.generation,
        token_ids=sequence.token_ids,
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_computed_tokens=sequence.num_computed_tokens,
        block_table=table,
        spec=sequence.spec,
        until_output=stage.until_output,
        max_chunk_tokens=sequence.max_chunk_tokens,
        max_chunk_beside=max_chunk_beside,
        records=records,
        window_tables=window_tables or [],
        is_suspect=sequence.num_suspicions > 0,
    )


class Routes:
    """Which sequences of workers a request can go through, with the blocks that each takes.

    Args:
        topology: the workers and their pools.
        ledger: what is free in the pools.
    """

    def __init__(self, topology: Topology, ledger: Ledger) -> None:
        self._topology = topology
        self._ledger = ledger
        firsts, ends = topology.playing(PREFILL), topology.playing(DECODE)
        self._moving = [Pair(first, end) for first in firsts for end in ends]
        self._staying = [Pair(name, name) for name in topology.names]

    def needs(self, sequence: Sequence, stages: tuple[RouteStage, ...]) -> dict[str, int]:
        """Blocks by pool that a route takes to begin with."""
        return blocks_needed(
            sequence, stages, positions_needed(sequence), self._topology, self._ledger.pools
        )

    def usual_needs(self, sequence: Sequence) -> dict[str, int]:
        """Blocks by pool that the first route needs which could hold a sequence to its end."""
        routes = [route_stages(sequence, pair) for pair in (*self._moving, *self._staying)]
        return self.needs(
            sequence, next((r for r in routes if self.has_capacity(sequence, r)), routes[0])
        )

    def fits_in(self, needed: Mapping[str, int], num_available: Mapping[str, int]) -> bool:
        """Say whether tables of these lengths need no more blocks than are available, by pool."""
        pools = self._ledger.pools
        return all(pools[name].max_cost(n) <= num_available[name] for name, n in needed.items())

    def has_capacity(self, sequence: Sequence, stages: tuple[RouteStage, ...]) -> bool:
        """Say whether the pools of a route could hold it to its end."""
        pools, length = self._ledger.pools, whole_length(sequence)
        needed = blocks_needed(sequence, stages, length, self._topology, pools)
        return all(count <= pools[name].kv_capacity for name, count in needed.items())

    def fits(self, sequence: Sequence, num_available: Mapping[str, int]) -> bool:
        """Say whether some route needs no more blocks than are available, by pool."""
        return any(
            self._fits_in(sequence, p, num_available) for p in (*self._moving, *self._staying)
        )

    def _fits_in(self, sequence: Sequence, pair: Pair, num_available: Mapping[str, int]) -> bool:
        return self.fits_in(self.needs(sequence, route_stages(sequence, pair)), num_available)

    def elsewhere(
        self, sequence: Sequence, worker: str, ready_workers: Collection[str]
    ) -> tuple[RouteStage, ...]:
        """Find a route on which a sequence continues by roles, with its blocks; empty: none.

        Args:
            sequence: is on the worker.
            worker: to be relieved of what is another role's.
        """
        pool_of = self._topology.pool_of
        near = [
            pair
            for pair in self._moving
            if worker in pair
            and pair.moves
            and set(pair) <= {worker, *ready_workers}
            and pool_of(pair.prefill) == pool_of(pair.decode)
        ]
        if not near:
            return ()
        if sequence.num_prefill_tokens_left:
            return route_stages(sequence, near[0])
        return route_stages(sequence, Pair(near[0].decode, near[0].decode))

    def is_stray(self, sequence: Sequence, worker: str) -> bool:
        """Say whether a worker of streams would compute a prompt that prefill workers should."""
        return (
            worker not in self._topology.playing(PREFILL)
            and not sequence.is_on_probation
            and sequence.spares_streams_at != worker
            and sequence.num_failed_copies < MAX_FAILED_COPIES
            and sequence.num_prefill_tokens_left > MIN_CHUNK_TOKENS
        )

    def strays(self, ready: str, running: Iterable[Sequence]) -> list[Sequence]:
        """List the sequences that another role's worker has while this one was down.

        They go back with their blocks; a prompt that was placed there by a prediction stays.
        """
        pool, prefills = self._topology.pool_of, self._topology.playing(PREFILL)
        near = [
            one
            for one in running
            if one.worker is not None and one.worker != ready and pool(one.worker) == pool(ready)
        ]
        if ready in prefills:
            return [one for one in near if self.is_stray(one, str(one.worker))]
        return [
            one for one in near if one.worker in prefills and one.stages[-1].worker == one.worker
        ]

    def _can_stay(self, sequence: Sequence, worker: str) -> bool:
        """Say whether a worker's pool could hold its whole length."""
        return self.has_capacity(sequence, route_stages(sequence, Pair(worker, worker)))

    def check_fits(self, sequence: Sequence) -> None:
        """Refuse what could not be run by moving it, which is open to every sequence.

        Raises:
            RequestError: `context_length_exceeded`.
        """
        stages, pools = route_stages(sequence, self._moving[0]), self._ledger.pools
        needed = blocks_needed(sequence, stages, whole_length(sequence), self._topology, pools)
        for name, count in needed.items():
            capacity = pools[name].kv_capacity
            if count > capacity:
                raise RequestError(
                    f"prompt ({sequence.num_prompt_tokens} tokens) and max_tokens "
                    f"({sequence.sampling.max_tokens}) need {count} KV blocks, "
                    f"the {name} pool has {capacity}",
                    code="context_length_exceeded",
                    param="max_tokens",
                )

    def candidates(
        self,
        sequence: Sequence,
        open_workers: Collection[str],
        ready_workers: Collection[str],
        held: Iterable[Sequence],
        tokens_until: Callable[[str], int],
        hits: Mapping[str, int],
        num_available: Mapping[str, int],
    ) -> list[Pair]:
        """List pairs of workers that could run a sequence now.

        The first is static roles' choice: the prefill worker with least to compute until this
        prompt ends, and the decode worker with the smallest batch. Workers whose pools have enough
        blocks go first; of equals, the one that holds most of the prompt. All other pairs have
        enough blocks. If all workers of a role are down, workers of the other do both, each in a
        pool that could hold the whole. On one memory bus prefill workers do not decode otherwise:
        the weights would be read twice. A worker that is up but not open stands for its role where
        no other does: what would go there waits, and does not go to a worker of the other role.

        Args:
            sequence: is about to be placed.
            open_workers: may get it.
            ready_workers: are up.
            held: all sequences on workers or between two.
            tokens_until: prompt tokens that a worker would compute until it is done.
            hits: positions by pool that are computed there.
            num_available: blocks by pool, free or shared with others.
        """
        topology, batches = self._topology, Counter(other.stages[-1].worker for other in held)
        length, most = sequence.num_tokens, positions_needed(sequence)

        def there(role: str, num_tokens: int, load: Callable[[str], int]) -> list[str]:
            def key(name: str) -> tuple[bool, int, int, int]:
                kv_pool = self._ledger.pools[topology.pool_of(name)]
                num_there = hits.get(kv_pool.name, 0)
                num_new = kv_pool.max_cost(kv_pool.num_blocks_for(num_tokens - num_there))
                fits = num_new <= num_available[kv_pool.name]
                return not fits, load(name), -num_there, -kv_pool.num_free

            up = [name for name in topology.playing(role) if name in ready_workers]
            return sorted([name for name in up if name in open_workers] or up, key=key)

        firsts = there(PREFILL, length, tokens_until)
        ends = there(DECODE, most, batches.__getitem__)
        stays = [*ends]
        if not (ends and topology.shares_memory_bus):
            can = [name for name in firsts if self._can_stay(sequence, name)]
            stays += [name for name in can if name not in ends]
        if not (ends or stays):  # then it decodes at a worker that is down
            ends = topology.playing(DECODE)
        pairs = [Pair(first, end) for first in firsts for end in ends if first != end]
        pairs += [Pair(name, name) for name in stays]
        return pairs[:1] + [
            pair for pair in pairs[1:] if self._fits_in(sequence, pair, num_available)
        ]

    def fallbacks(
        self,
        sequence: Sequence,
        open_workers: Collection[str],
        ready_workers: Collection[str],
        held: Iterable[Sequence],
        num_there: Callable[[str], int],
    ) -> list[tuple[RouteStage, ...]]:
        """List routes for a sequence that lost its worker or its copied blocks, the best first.

        It decodes at its planned worker if that is up; else where most of it is computed, or at the
        worker with fewest sequences. A prefill worker computes the rest of its prompt, unless the
        rest is so short that it hardly delays decoding sequences: as long as one is up the rest
        waits for it, also if that is full or not open. Copies that keep failing end that.

        Args:
            open_workers: may get it.
            ready_workers: are up.
            held: all sequences on workers or between two.
            num_there: its positions that are computed in a worker's pool.
        """
        playing = self._topology.playing
        batches = Counter(other.stages[-1].worker for other in held)
        ends = [n for n in playing(DECODE) if n in open_workers] or sorted(open_workers)
        ends.sort(key=lambda n: (n != sequence.stages[-1].worker, -num_there(n), batches[n]))
        up = [n for n in playing(PREFILL) if n in ready_workers]
        firsts = [n for n in up if n in open_workers] or up
        firsts.sort(key=lambda n: (-num_there(n), batches[n]))
        routes = []
        for end in ends:
            moving = []
            num_left = sequence.num_tokens - num_there(end)
            may_move = sequence.num_failed_copies < MAX_FAILED_COPIES
            if end in playing(DECODE) and num_left > MIN_CHUNK_TOKENS and may_move:
                pairs = [Pair(first, end) for first in firsts if first != end]
                moving = [route_stages(sequence, pair) for pair in pairs]
                moving = [stages for stages in moving if self.has_capacity(sequence, stages)]
            routes += moving or [(RouteStage(end, sequence.sampling.max_tokens),)]
        return routes
