"""Copy whole blocks between a pool and the ring. The only place where KV bytes move.

Owns: nothing. Called by: the worker loop.
Invariant: a block is copied with all its layers, also where it is part-filled.
Never: chooses a slot or a block, signals another worker.
"""

from __future__ import annotations

import torch


def copy_blocks(
    source: torch.Tensor,
    source_ids: list[int],
    target: torch.Tensor,
    target_ids: list[int],
) -> int:
    """Copy blocks, in order.

    Shapes: source and target [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim].

    Returns:
        bytes copied.
    """
    for source_id, target_id in zip(source_ids, target_ids, strict=True):
        target[target_id].copy_(source[source_id])
    return len(source_ids) * target[0].numel() * target.element_size()
