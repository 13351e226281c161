"""Map a KV pool as one tensor, and make its pages before a step writes them.

Invariant: never grows, never moves; making a page changes no byte.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections.abc import Iterable

import torch

from engine.checkpoint.model_config import INT8_KV, ModelConfig
from engine.wire.messages import PoolSpec

AHEAD_BYTES = 64 << 20
"""Memory made beyond the highest used block: a prompt of 2,900 tokens of a model of 135 M."""
_POPULATE_WRITE = 23
"""Advice to madvise(), since Linux 5.14: make all pages of a range, as if written."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    INT8_KV: torch.int8,
}


def block_shape(config: ModelConfig, block_size: int, dtype: str) -> tuple[int, ...]:
    """Return the shape of one block in a pool's tensor: [layers of a group, 2, block_size, ...]."""
    num_layers = config.kv_groups.num_layers
    if dtype == INT8_KV:
        num_bytes = config.kv_plane_bytes(block_size, dtype) // block_size
        return (num_layers, 2, block_size, num_bytes)
    return (num_layers, 2, block_size, config.num_kv_heads, config.head_dim)


def map_pool(spec: PoolSpec, config: ModelConfig, block_size: int, dtype: str) -> torch.Tensor:
    """Map a pool's shared memory as one tensor [num_blocks, ...].

    Shapes: returns [num_blocks, *block_shape()].
    """
    assert spec.fd is not None, "a pool on a GPU is not mapped but made"
    num_bytes = spec.num_blocks * config.kv_block_bytes(block_size, dtype)
    memory = mmap.mmap(spec.fd, num_bytes, mmap.MAP_SHARED)
    fcntl.lockf(spec.fd, fcntl.LOCK_SH)  # until we end: no later daemon adopts it before
    flat = torch.frombuffer(memory, dtype=TORCH_DTYPES[dtype])
    return flat.view(spec.num_blocks, *block_shape(config, block_size, dtype))


def make_pages(pool: torch.Tensor, first: int, count: int) -> None:
    """Make the kernel map the pages of adjacent blocks in host memory; no byte changes.

    Older kernels leave it to the first write, which then takes longer.
    """
    address = pool[first].data_ptr()
    start = address // _PAGE_BYTES * _PAGE_BYTES  # a block may begin within a page
    length = address + count * pool.stride(0) * pool.element_size() - start
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _POPULATE_WRITE)


class PagesAhead:
    """Make pages of a pool in host memory while its worker waits; a step would wait for them.

    Unused blocks are taken in order of their ids, so those above the highest used one are next.
    """

    def __init__(self, pool: torch.Tensor) -> None:
        self._pool = pool
        self._num_ahead = max(AHEAD_BYTES // (pool.stride(0) * pool.element_size()), 1)
        self._next = 1
        self._end = 0
        self.use(())

    def use(self, block_ids: Iterable[int]) -> None:
        """Note blocks that steps will write."""
        highest = max(block_ids, default=0)
        self._end = max(self._end, min(highest + 1 + self._num_ahead, len(self._pool)))

    def make_next(self) -> bool:
        """Make one block's pages; False: enough of them exist."""
        if self._next >= self._end:
            return False
        make_pages(self._pool, self._next, 1)
        self._next += 1
        return True
