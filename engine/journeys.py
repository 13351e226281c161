"""Ways of a sequence through the workers, and how many blocks each takes in which pools.

Owns: nothing; pure. Called by: the router, before it reserves.
Invariant: all that the sequence can ever use is counted, so that decode never runs out.
Never: reserves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from engine.blocks import BlockPool, Ledger
from engine.errors import InvariantViolated, RequestError
from engine.places import Places
from engine.sequence import Leg, Moving, On, Route, Sequence, Waiting


def legs_of(sequence: Sequence, route: Route, places: Places) -> tuple[Leg, ...]:
    """A way from worker to worker; one that ends with its first token does not move."""
    max_tokens = sequence.sampling.max_tokens
    prefill, decode = places.names[0], places.names[-1]
    if route is not Route.MOVE or prefill == decode:
        return (Leg(prefill if route is Route.PREFILL else decode, max_tokens),)
    first = Leg(prefill, 1)
    return (first,) if max_tokens == 1 else (first, Leg(decode, max_tokens))


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


def can_ever_fit(needed: Mapping[str, int], pools: Mapping[str, BlockPool]) -> bool:
    """True if the pools are large enough, whoever holds them now."""
    return all(count <= pools[name].capacity for name, count in needed.items())


def fits_now(needed: Mapping[str, int], pools: Mapping[str, BlockPool]) -> bool:
    """True if so many blocks are free."""
    return all(count <= pools[name].num_free for name, count in needed.items())


def check_fits(
    sequence: Sequence, needed: Mapping[str, int], pools: Mapping[str, BlockPool]
) -> None:
    """Refuse what the pools could not hold, whoever held nothing.

    Raises:
        RequestError: `context_length_exceeded`.
    """
    for name, count in needed.items():
        if count > pools[name].capacity:
            raise RequestError(
                f"prompt ({sequence.num_prompt_tokens} tokens) and max_tokens "
                f"({sequence.sampling.max_tokens}) need {count} KV blocks, "
                f"the {name} pool has {pools[name].capacity}",
                code="context_length_exceeded",
                param="max_tokens",
            )


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
