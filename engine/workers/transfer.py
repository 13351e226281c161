"""Copy whole blocks between a pool and the ring, and try that out. The only place where KV moves.

Owns: nothing. Called by: the worker loop; probe by who starts a worker.
Invariant: a block is copied with all its layers, also where it is part-filled; whoever is told of
the copy finds it complete.
Never: chooses a slot or a block, signals another worker.
"""

from __future__ import annotations

import time

import torch

from engine.errors import WorkerFailed
from engine.workers.device import Device

_NUM_PROBES = 8


def copy_blocks(
    source: torch.Tensor,
    source_ids: list[int],
    target: torch.Tensor,
    target_ids: list[int],
    device: Device | None = None,
) -> int:
    """Copy blocks, in order, and wait until they are there.

    Shapes: source and target [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim].

    Args:
        source: a pool or the ring.
        source_ids: blocks of it.
        target: the other.
        target_ids: where they go.
        device: that of the pool, if it is on one; the ring is then memory that it can reach.

    Returns:
        bytes copied.
    """
    for source_id, target_id in zip(source_ids, target_ids, strict=True):
        target[target_id].copy_(source[source_id], non_blocking=device is not None)
    if device is not None:
        device.mark()()
    return len(source_ids) * target[0].numel() * target.element_size()


def probe(pool: torch.Tensor, ring: torch.Tensor, device: Device | None = None) -> float:
    """Send a pattern to the ring and back, by way of their block 0, which is nobody's.

    All workers send the same one, so two that do it at once change nothing for each other.

    Returns:
        bytes per second, both ways counted; the best of a few.

    Raises:
        WorkerFailed: what came back is not what was sent.
    """
    values = torch.arange(pool[0].numel(), dtype=torch.float32).remainder_(251)
    pattern = values.view(pool.shape[1:]).to(pool.dtype).to(pool.device)
    rates = []
    for _ in range(_NUM_PROBES):
        pool[0].copy_(pattern)
        started_ns = time.monotonic_ns()
        num_bytes = copy_blocks(pool, [0], ring, [0], device)
        pool[0].zero_()
        num_bytes += copy_blocks(ring, [0], pool, [0], device)
        rates.append(num_bytes / max(time.monotonic_ns() - started_ns, 1) * 1e9)
        if not torch.equal(pool[0], pattern):
            raise WorkerFailed(
                "what came back from the ring is not what was sent to it",
                where="handoff by shm",
                hint="the memory or the device is at fault; see the kernel log",
            )
    pool[0].zero_()
    return max(rates)
