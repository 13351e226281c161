"""How many blocks a sequence takes, and in which pools.

Owns: nothing; pure. Called by: the router, before it reserves.
Invariant: all that the sequence can ever use is counted, so that decode never runs out.
Never: reserves.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine.blocks import BlockPool
from engine.errors import RequestError
from engine.sequence import Route, Sequence
from engine.topology import Topology


def wants(
    sequence: Sequence, route: Route, topology: Topology, pools: Mapping[str, BlockPool]
) -> dict[str, int]:
    """Blocks by pool.

    With two pools, a sequence that moves takes its prompt's blocks where it is prefilled, and
    nothing on the decode side if it ends with its first token.
    """
    num_tokens = sequence.num_prompt_tokens + sequence.sampling.max_tokens
    prefill, decode = pools[topology.prefill_pool], pools[topology.decode_pool]
    if prefill is decode or route is Route.DECODE:
        return {decode.name: decode.num_blocks_for(num_tokens)}
    if route is Route.PREFILL:
        return {prefill.name: prefill.num_blocks_for(num_tokens)}
    needed = {prefill.name: prefill.num_blocks_for(sequence.num_prompt_tokens)}
    if sequence.sampling.max_tokens > 1:
        needed[decode.name] = decode.num_blocks_for(num_tokens)
    return needed


def can_ever_fit(needed: Mapping[str, int], pools: Mapping[str, BlockPool]) -> bool:
    """True if the pools are large enough, whoever holds them now."""
    return all(count <= pools[name].capacity for name, count in needed.items())


def fits_now(needed: Mapping[str, int], pools: Mapping[str, BlockPool]) -> bool:
    """True if so many blocks are free."""
    return all(count <= pools[name].num_free for name, count in needed.items())


def check_fits(sequence: Sequence, topology: Topology, pools: Mapping[str, BlockPool]) -> None:
    """Refuse what could not be run by moving it, which is open to every sequence.

    Raises:
        RequestError: `context_length_exceeded`.
    """
    for name, count in wants(sequence, Route.MOVE, topology, pools).items():
        if count > pools[name].capacity:
            raise RequestError(
                f"prompt ({sequence.num_prompt_tokens} tokens) and max_tokens "
                f"({sequence.sampling.max_tokens}) need {count} KV blocks, "
                f"the {name} pool has {pools[name].capacity}",
                code="context_length_exceeded",
                param="max_tokens",
            )
