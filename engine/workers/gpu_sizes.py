"""Compute how large a GPU's pool and steps are.

Owns: what is kept free.
Invariant: nothing that a worker will allocate later is given to the pool.
Never: measures or allocates.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.errors import WorkerFailed
from engine.units import size_text

MARGIN_BYTES = 512 << 20
"""Kept free: libraries' workspaces, and fragments of the allocator."""
LEAST_MARGIN_BYTES = 128 << 20
"""The same for a worker that starts again, whose pool has to be what it was: something else may
have taken memory meanwhile."""
CONTEXT_BYTES = 768 << 20
"""Of a second process on the GPU: its CUDA context, its modules and libraries."""
GRAPHS_BYTES = 512 << 20
"""Of the graphs themselves, beside the memory of a step that they keep for good; how much it was
is said when they have been captured."""

MIN_STEP_TOKENS = 512
GOOD_RATE = 0.9
"""Of the best: a smaller step that comes so close is better, for those who decode beside it."""


def step_tokens(max_tokens: int, seconds_of: Callable[[int], float]) -> int:
    """The fewest prompt tokens of a step at a good rate: max_tokens, or a half, a quarter of it...

    Args:
        max_tokens: most that a step may have.
        seconds_of: runs a step of so many and times it.
    """
    sizes = [max_tokens]
    while sizes[-1] // 2 >= MIN_STEP_TOKENS:
        sizes.append(sizes[-1] // 2)
    rates = {size: size / seconds_of(size) for size in sizes}
    return min(size for size, rate in rates.items() if rate >= GOOD_RATE * max(rates.values()))


def num_blocks_that_fit(
    *,
    free_bytes: int,
    step_bytes: int,
    block_bytes: int,
    static_bytes: int,
    has_graphs: bool,
    is_shared: bool,
    margin_bytes: int = MARGIN_BYTES,
) -> int:
    """Blocks that the rest of a GPU's memory holds.

    Args:
        free_bytes: of the GPU, with the weights in place.
        step_bytes: that the largest step needs while it runs.
        block_bytes: of one block.
        static_bytes: that will be allocated once and stay, as the graphs' buffers.
        has_graphs: steps will be captured.
        is_shared: a second process will run steps on the same GPU.
        margin_bytes: kept free beside what is known.
    """
    kept = margin_bytes + static_bytes + step_bytes
    if has_graphs:
        kept += GRAPHS_BYTES + step_bytes
    if is_shared:
        kept += CONTEXT_BYTES + step_bytes
    return max(0, (free_bytes - kept) // block_bytes)


def check_blocks(num_fitting: int, min_blocks: int, block_bytes: int, uuid: str) -> None:
    """Refuse a pool that is too small to be of use, or smaller than it was.

    Raises:
        WorkerFailed: naming what there is and what is needed.
    """
    if num_fitting < min_blocks:
        raise WorkerFailed(
            f"memory for {num_fitting} KV blocks of {size_text(block_bytes)} is left, "
            f"{min_blocks} are needed",
            where=uuid,
            hint="end what else uses the GPU, or serve a smaller model",
        )
