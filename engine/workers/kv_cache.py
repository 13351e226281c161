"""The worker's view of a KV pool: one tensor over the memfd that the daemon made.

kv: [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim], block-major, so that one block
of all layers is one contiguous run and a handoff, a store or a load is one large copy.
Owns: the mapping.
Invariant: never grows, never moves. Never: chooses a block id.
"""

from __future__ import annotations

import mmap

import torch

from engine.folder.model_config import ModelConfig
from engine.wire.messages import PoolSpec

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def map_pool(spec: PoolSpec, config: ModelConfig, block_size: int, dtype: str) -> torch.Tensor:
    """Map a pool.

    Shapes: returns [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim].
    """
    assert spec.fd is not None, "a pool on a GPU is not mapped but made"
    num_bytes = spec.num_blocks * config.kv_block_bytes(block_size, dtype)
    memory = mmap.mmap(spec.fd, num_bytes, mmap.MAP_SHARED)
    flat = torch.frombuffer(memory, dtype=TORCH_DTYPES[dtype])
    return flat.view(
        spec.num_blocks, config.num_layers, 2, block_size, config.num_kv_heads, config.head_dim
    )
