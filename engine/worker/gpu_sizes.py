"""Compute how many KV blocks, and how many tokens in a step, fit on a GPU.

Invariant: memory that a worker will allocate later is not given to the pool.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.errors import WorkerFailed
from engine.units import size_text

MARGIN_BYTES = 512 << 20
"""Bytes kept free for libraries' workspaces and fragments of the allocator."""
LEAST_MARGIN_BYTES = 128 << 20
"""Bytes kept free by a restarted worker; its pool must keep its size, although other processes may
have taken memory."""
CONTEXT_BYTES = 768 << 20
"""Memory of a second process on the GPU: its CUDA context, its modules and libraries."""
GRAPHS_BYTES = 512 << 20
"""Memory of the graphs, besides their steps' memory; the real size is reported after capture."""

MIN_STEP_TOKENS = 512
GOOD_RATE = 0.9
"""Minimum share of the best rate; the smallest such step is best for decode beside it."""


def step_tokens(max_tokens: int, seconds_of: Callable[[int], float]) -> int:
    """Choose the fewest prompt tokens of a step at a good rate: max_tokens, a half, a quarter...

    Args:
        max_tokens: maximum of a step.
        seconds_of: runs a step of a size and times it.
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
    """Count the blocks that the rest of a GPU's memory holds.

    Args:
        free_bytes: of the GPU, with the weights in place.
        step_bytes: needed by the largest step while it runs.
        static_bytes: that will be allocated once and stay: the graphs' buffers, and what texts are
            computed with.
        has_graphs: steps will be captured.
        is_shared: a second process will run steps on the GPU.
    """
    kept = margin_bytes + static_bytes + step_bytes
    if has_graphs:
        kept += GRAPHS_BYTES + step_bytes
    if is_shared:
        kept += CONTEXT_BYTES + step_bytes
    return max(0, (free_bytes - kept) // block_bytes)


def check_blocks(num_fitting: int, min_blocks: int, block_bytes: int, uuid: str) -> None:
    """Refuse a pool that is too small to be useful, or smaller than before.

    Raises:
        WorkerFailed: naming the blocks that fit and the blocks needed.
    """
    if num_fitting < min_blocks:
        raise WorkerFailed(
            f"memory for {num_fitting} KV blocks of {size_text(block_bytes)} is left, "
            f"{min_blocks} are needed",
            where=uuid,
            hint="end the processes that penstock doctor names, or serve a smaller model",
        )
