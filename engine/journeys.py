"""Ways of a sequence through the workers, and how many blocks each takes in which pools.

Owns: nothing; pure. Called by: the router, before it reserves.
Invariant: all that the sequence can ever use is counted, so that decode never runs out.
Never: reserves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from engine.blocks import BlockPool, Ledger
from engine.errors import InvariantViolated, RequestError
from engine.messages import Admit
from engine.places import DECODE, PREFILL, Places
from engine.sequence import Leg, Moving, On, Sequence, Waiting, route_of

MIN_CHUNK_TOKENS = 64
"""Of a prompt in a step: those who decode beside it hardly notice them; fewer are not worth it."""


class Pair(NamedTuple):
    """Who computes a prompt and who goes on; one worker twice does all of it."""

    prefill: str
    decode: str

    @property
    def moves(self) -> bool:
        """True if the one hands over to the other."""
        return self.prefill != self.decode

    @property
    def route(self) -> str:
        """In a word, as route_of() has it."""
        return route_of(self)


def legs_of(sequence: Sequence, pair: Pair) -> tuple[Leg, ...]:
    """A way from worker to worker; one that ends with its next token does not move."""
    max_tokens, until_output = sequence.sampling.max_tokens, sequence.num_output_tokens + 1
    if not pair.moves:
        return (Leg(pair.decode, max_tokens),)
    first = Leg(pair.prefill, until_output)
    return (first,) if until_output == max_tokens else (first, Leg(pair.decode, max_tokens))


def wants(
    sequence: Sequence, legs: tuple[Leg, ...], places: Places, pools: Mapping[str, BlockPool]
) -> dict[str, int]:
    """Blocks by pool: on the last leg for all that it may generate, before for what it computes.

    Legs in one pool share the blocks.
    """
    needed: dict[str, int] = {}
    for leg in legs:
        is_last = leg is legs[-1]
        num_tokens = sequence.num_prompt_tokens + leg.until_output - (not is_last)
        pool = pools[places.pool_of(leg.worker)]
        needed[pool.name] = max(needed.get(pool.name, 0), pool.num_blocks_for(num_tokens))
    return needed


def admit(sequence: Sequence, leg: Leg, table: list[int]) -> Admit:
    """The command by which a sequence runs on a leg, as it stands now.

    Args:
        sequence: which.
        leg: of its way.
        table: its blocks in the pool of the leg's worker.
    """
    return Admit(
        seq_id=sequence.seq_id,
        generation=sequence.generation,
        token_ids=sequence.token_ids,
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_computed_tokens=sequence.num_computed_tokens,
        block_table=table,
        sampling=sequence.sampling,
        until_output=leg.until_output,
        max_chunk_tokens=sequence.max_chunk_tokens,
    )


class Ways:
    """All ways through the workers.

    Args:
        places: the workers and their pools.
        ledger: what is free in the pools.
    """

    def __init__(self, places: Places, ledger: Ledger) -> None:
        self._places = places
        self._ledger = ledger
        firsts, ends = places.playing(PREFILL), places.playing(DECODE)
        self._moving = [Pair(first, end) for first in firsts for end in ends]
        self._staying = [Pair(name, name) for name in places.names]

    def wants(self, sequence: Sequence, legs: tuple[Leg, ...]) -> dict[str, int]:
        """Blocks by pool that a way takes."""
        return wants(sequence, legs, self._places, self._ledger.pools)

    def fits_now(self, sequence: Sequence, saved: Mapping[str, int] = MappingProxyType({})) -> bool:
        """True if the blocks of some way are free, but for those by pool that others have."""
        return any(self._has_room(sequence, p, saved) for p in (*self._moving, *self._staying))

    def _has_room(self, sequence: Sequence, pair: Pair, saved: Mapping[str, int]) -> bool:
        """True if the blocks of a way are free, but for those by pool that others have."""
        needed, pools = self.wants(sequence, legs_of(sequence, pair)), self._ledger.pools
        return all(n <= pools[name].num_free + saved.get(name, 0) for name, n in needed.items())

    def elsewhere(
        self, sequence: Sequence, worker: str, ready_workers: Collection[str]
    ) -> tuple[Leg, ...]:
        """A way by which a prompt goes on at another worker with the blocks that it has; or none.

        Args:
            sequence: is on the worker, where it will decode.
            worker: that is to be spared its prompt.
            ready_workers: those that could take it.
        """
        pool_of = self._places.pool_of
        near = [
            pair
            for pair in self._moving
            if pair.decode == worker != pair.prefill
            and pair.prefill in ready_workers
            and pool_of(pair.prefill) == pool_of(worker)
        ]
        is_open = sequence.num_computed_tokens < sequence.num_prompt_tokens
        return legs_of(sequence, near[0]) if near and is_open else ()

    def _can_stay(self, sequence: Sequence, worker: str) -> bool:
        """True if a worker's pool could hold its whole length."""
        needed = self.wants(sequence, legs_of(sequence, Pair(worker, worker)))
        return all(n <= self._ledger.pools[name].capacity for name, n in needed.items())

    def check_fits(self, sequence: Sequence) -> None:
        """Refuse what could not be run by moving it, which is open to every sequence.

        Raises:
            RequestError: `context_length_exceeded`.
        """
        needed = self.wants(sequence, legs_of(sequence, self._moving[0]))
        for name, count in needed.items():
            capacity = self._ledger.pools[name].capacity
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
        held: Iterable[Sequence],
        tokens_until: Callable[[str], int],
        hits: Mapping[str, int],
        saved: Mapping[str, int],
    ) -> list[Pair]:
        """Pairs of workers that could run a sequence now.

        The first is that of static roles, with least to do: one until this prompt is computed, one
        by its batch, and before that by whether their pools have room; of equals those that hold
        most of it. The others have room, too. Where all workers of a role are down, those of the
        other do both, each in a pool that could hold the whole. On one memory bus those that
        prefill do not decode otherwise: the weights would be read twice.

        Args:
            sequence: is about to be placed.
            open_workers: those that it could go to.
            held: all that is on workers or between two.
            tokens_until: prompt tokens that a worker would have to compute until it is done.
            hits: positions by pool that are computed there.
            saved: blocks by pool of those that take no room.
        """
        places, batches = self._places, Counter(other.legs[-1].worker for other in held)
        length, most = sequence.num_prompt_tokens, sequence.sampling.max_tokens

        def there(role: str, num_tokens: int, load: Callable[[str], int]) -> list[str]:
            def key(name: str) -> tuple[bool, int, int, int]:
                books = self._ledger.pools[places.pool_of(name)]
                num_there = hits.get(books.name, 0)
                has_room = books.num_blocks_for(num_tokens - num_there) <= books.num_free
                return not has_room, load(name), -num_there, -books.num_free

            return sorted((n for n in places.playing(role) if n in open_workers), key=key)

        firsts = there(PREFILL, length, tokens_until)
        ends = there(DECODE, length + most, batches.__getitem__)
        stays = [*ends]
        if not (ends and places.shares_memory_bus):
            can = [name for name in firsts if self._can_stay(sequence, name)]
            stays += [name for name in can if name not in ends]
        if not (ends or stays):  # then it decodes where nobody is yet
            ends = places.playing(DECODE)
        pairs = [Pair(first, end) for first in firsts for end in ends if first != end]
        pairs += [Pair(name, name) for name in stays]
        return pairs[:1] + [pair for pair in pairs[1:] if self._has_room(sequence, pair, saved)]

    def detours(
        self,
        sequence: Sequence,
        open_workers: Collection[str],
        held: Iterable[Sequence],
        num_there: Callable[[str], int],
    ) -> list[tuple[Leg, ...]]:
        """Ways by which a sequence goes on whose worker is down, the best first.

        It decodes where it was to decode, if that worker is there; else where most of it is
        computed, or at the worker with fewest sequences. What is left of its prompt is computed by
        a worker that prefills, if it is more than those who decode would hardly notice.

        Args:
            sequence: has lost its worker.
            open_workers: those that can be given something.
            held: all that is on workers or between two.
            num_there: of its positions, those that are computed in a worker's pool.
        """
        playing = self._places.playing
        batches = Counter(other.legs[-1].worker for other in held)
        ends = [n for n in playing(DECODE) if n in open_workers] or sorted(open_workers)
        ends.sort(key=lambda n: (n != sequence.legs[-1].worker, -num_there(n), batches[n]))
        firsts = [n for n in playing(PREFILL) if n in open_workers]
        firsts.sort(key=lambda n: (-num_there(n), batches[n]))
        ways = []
        for end in ends:
            num_left = sequence.num_tokens - num_there(end)
            if end in playing(DECODE) and num_left > MIN_CHUNK_TOKENS:
                pairs = [Pair(first, end) for first in firsts if first != end]
                ways += [legs_of(sequence, pair) for pair in pairs]
            ways.append((Leg(end, sequence.sampling.max_tokens),))
        return ways


def check_where(
    ledger: Ledger,
    queue: Iterable[Sequence],
    resuming: Iterable[Sequence],
    running: Iterable[Sequence],
    moving: Iterable[Sequence],
) -> None:
    """Raise InvariantViolated unless sequences are where their container and the ledger say."""
    owners, seen = ledger.owners(), set()
    for container, kind, has_blocks, is_admitted in (
        (queue, Waiting, False, False),
        (resuming, Waiting, True, False),
        (running, On, True, True),
        (moving, Moving, True, False),
    ):
        for sequence in container:
            key = ("admit", sequence.seq_id, sequence.generation)
            found = (type(sequence.where), sequence.seq_id in owners, ledger.is_open(key))
            if found != (kind, has_blocks, is_admitted) or sequence.seq_id in seen:
                raise InvariantViolated(
                    f"sequence {sequence.seq_id} is {sequence.where}; blocks {found[1]}, "
                    f"admitted {found[2]}",
                    where=f"those that are {kind.__name__}",
                )
            seen.add(sequence.seq_id)
    if owners - seen:
        raise InvariantViolated(f"{owners - seen} hold blocks and are nowhere", where="router")
