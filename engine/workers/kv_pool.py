"""Map a KV pool as one tensor.

Owns: the pool's shape.
Invariant: never grows, never moves.
Never: chooses a block.
"""

from __future__ import annotations

import mmap

import torch

from engine.checkpoint.model_config import INT8_KV, ModelConfig
from engine.wire.messages import PoolSpec

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    INT8_KV: torch.int8,
}


def block_shape(config: ModelConfig, block_size: int, dtype: str) -> tuple[int, ...]:
    """Return the shape of one block in a pool's tensor: [num_layers, 2, block_size, ...]."""
    if dtype == INT8_KV:
        num_bytes = config.kv_plane_bytes(block_size, dtype) // block_size
        return (config.num_kv_layers, 2, block_size, num_bytes)
    return (config.num_kv_layers, 2, block_size, config.num_kv_heads, config.head_dim)


def map_pool(spec: PoolSpec, config: ModelConfig, block_size: int, dtype: str) -> torch.Tensor:
    """Map a pool's shared memory as one tensor [num_blocks, ...].

    Shapes: returns [num_blocks, *block_shape()].
    """
    assert spec.fd is not None, "a pool on a GPU is not mapped but made"
    num_bytes = spec.num_blocks * config.kv_block_bytes(block_size, dtype)
    memory = mmap.mmap(spec.fd, num_bytes, mmap.MAP_SHARED)
    flat = torch.frombuffer(memory, dtype=TORCH_DTYPES[dtype])
    return flat.view(spec.num_blocks, *block_shape(config, block_size, dtype))
