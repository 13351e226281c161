"""How many blocks a GPU's pool gets: what is left when weights, steps and graphs have theirs.

Owns: the arithmetic, and what is kept free. Called by: on_gpu, after its profiling run.
Invariant: nothing that a worker will allocate later is given to the pool.
Never: measures or allocates.
"""

from __future__ import annotations

from engine.errors import WorkerFailed

MARGIN_BYTES = 512 << 20
"""Kept free: libraries' workspaces, and fragments of the allocator."""
CONTEXT_BYTES = 768 << 20
"""Of a second process on the GPU: its CUDA context, its modules and libraries."""
GRAPHS_BYTES = 512 << 20
"""Of the graphs themselves, beside the memory of a step that they keep for good; how much it was
is said when they have been captured."""


def num_blocks_that_fit(
    *,
    free_bytes: int,
    step_bytes: int,
    block_bytes: int,
    static_bytes: int,
    has_graphs: bool,
    is_shared: bool,
) -> int:
    """Blocks that the rest of a GPU's memory holds.

    Args:
        free_bytes: of the GPU, with the weights in place.
        step_bytes: that the largest step needs while it runs.
        block_bytes: of one block.
        static_bytes: that will be allocated once and stay, as the graphs' buffers.
        has_graphs: steps will be captured.
        is_shared: a second process will run steps on the same GPU.
    """
    kept = MARGIN_BYTES + static_bytes + step_bytes
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
            f"memory for {num_fitting} KV blocks of {block_bytes / 2**20:.1f} MiB is left, "
            f"{min_blocks} are needed",
            where=uuid,
            hint="end what else uses the GPU, or serve a smaller model",
        )
