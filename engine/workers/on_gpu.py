"""A worker's start on a GPU: weights, profile, pool, graphs, and what two workers share.

One of two workers on a GPU exports its weights and its pool, the other maps them: a handoff is then
an admit with the same block ids, and the weights are read once and lie there once.
Owns: the order of the start. Called by: engine.workers.__main__.
Invariant: the pool is allocated once, by itself, after the largest step has been run and measured.
Never: steps for clients; chooses who exports.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import torch

from engine.channel import WorkerChannel
from engine.checkpoint import Checkpoint, arena_layout
from engine.config import DTYPE_BYTES
from engine.errors import WorkerFailed
from engine.messages import (
    Go,
    GpuSpec,
    MapShared,
    PoolMade,
    Ready,
    Setup,
    SharedMemory,
    WeightsLoaded,
)
from engine.model.transformer import Transformer
from engine.workers.device import Device
from engine.workers.grammars import Grammars
from engine.workers.graphs import BATCH_SIZES, DecodeGraphs
from engine.workers.ordering import Ordering
from engine.workers.runner import Runner
from engine.workers.sizing import check_blocks, num_blocks_that_fit
from engine.workers.streaming import Progress, arena_views, stream_weights

_SEAL_BYTES = 16


@dataclass(frozen=True, slots=True)
class Started:
    """What the loop runs on."""

    runner: Runner
    pool: torch.Tensor
    ordering: Ordering | None
    ready: Ready


def start(
    channel: WorkerChannel,
    setup: Setup,
    gpu: GpuSpec,
    checkpoint: Checkpoint,
    device: Device,
    grammars: Grammars,
    progress: Progress,
) -> Started:
    """Everything up to Ready, which the caller sends.

    Raises:
        WorkerFailed: the GPU has no room for a pool, or another's memory could not be mapped.
    """
    shared = None
    if gpu.shares == "maps":
        channel.send(WeightsLoaded())
        channel.expect(Go)
        shared = channel.expect(MapShared).memory
        arena = device.map(shared.weights)
        views = _views(checkpoint, setup, arena)
        progress(checkpoint.num_bytes, checkpoint.num_bytes)
    else:
        num_bytes = arena_layout(checkpoint, setup.dtype).num_bytes
        arena = torch.empty(num_bytes, dtype=torch.uint8, device=device.torch_device)
        views = _views(checkpoint, setup, arena)
        stream_weights(checkpoint, views, device, progress)
        channel.send(WeightsLoaded())
        channel.expect(Go)
    config, block_size = checkpoint.config, setup.block_size
    transformer = Transformer(config, views, setup.dtype, setup.max_model_len, block_size)
    has_graphs = gpu.has_graphs and gpu.shares != "maps" and transformer.is_capturable
    if shared is not None:
        pool = _mapped_pool(device.map(shared.pool), shared, setup, gpu, transformer)
    else:
        num_blocks = _num_blocks(setup, gpu, transformer, device, grammars, has_graphs=has_graphs)
        memory = _pool_memory(num_blocks, setup, transformer)
        pool = _as_pool(memory, num_blocks, setup, transformer)
        exported = None
        if gpu.shares == "exports":
            seal = _sealed(memory)
            exported = SharedMemory(device.export(arena), device.export(memory), num_blocks, seal)
        channel.send(PoolMade(num_blocks, exported))
    before = device.memory()
    graphs = None
    if has_graphs:
        graphs = DecodeGraphs(
            transformer,
            pool,
            device,
            block_size=setup.block_size,
            max_model_len=setup.max_model_len,
        )
        graphs.capture()
    runner = Runner(transformer, pool, setup.block_size, grammars, device, graphs)
    runner.warm_up(setup.max_step_tokens)
    ordering = None if gpu.shares is None else Ordering(device)
    graph_bytes = before.free_bytes - device.memory().free_bytes
    ready = _ready(transformer.attention_backend, graphs, graph_bytes, ordering)
    return Started(runner, pool, ordering, ready)


def _ready(
    attention: str, graphs: DecodeGraphs | None, graph_bytes: int, ordering: Ordering | None
) -> Ready:
    events = [] if ordering is None else ordering.handles
    if graphs is None:
        return Ready(attention, events=events)
    return Ready(attention, graphs.num_graphs, graphs.capture_ms, graph_bytes, events)


def _views(checkpoint: Checkpoint, setup: Setup, arena: torch.Tensor) -> dict[str, torch.Tensor]:
    return arena_views(checkpoint, setup.dtype, arena_layout(checkpoint, setup.dtype), arena)


def _mapped_pool(
    memory: torch.Tensor,
    shared: SharedMemory,
    setup: Setup,
    gpu: GpuSpec,
    transformer: Transformer,
) -> torch.Tensor:
    """Another worker's pool, once it is known to be that."""
    if _sealed(memory) != shared.seal:
        raise WorkerFailed(
            "the memory that it has mapped is not what was exported",
            where=gpu.uuid,
            hint="serve with --roles colocated, which maps nothing",
        )
    return _as_pool(memory, shared.num_blocks, setup, transformer)


def _sealed(memory: torch.Tensor) -> bytes:
    """What is written behind a pool's last block."""
    return bytes(memory[-_SEAL_BYTES:].tolist())


def _as_pool(
    memory: torch.Tensor, num_blocks: int, setup: Setup, transformer: Transformer
) -> torch.Tensor:
    """Bytes as [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]."""
    config = transformer.config
    shape = (config.num_layers, 2, setup.block_size, config.num_kv_heads, config.head_dim)
    num_bytes = num_blocks * math.prod(shape) * DTYPE_BYTES[setup.dtype]
    return memory[:num_bytes].view(transformer.dtype).view(num_blocks, *shape)


def _pool_memory(num_blocks: int, setup: Setup, transformer: Transformer) -> torch.Tensor:
    """Bytes for a pool, zeros, and behind it a seal that no other memory has."""
    num_bytes = num_blocks * transformer.config.kv_block_bytes(setup.block_size, setup.dtype)
    memory = torch.zeros(num_bytes + _SEAL_BYTES, dtype=torch.uint8, device=transformer.device)
    memory[num_bytes:].copy_(torch.tensor(list(os.urandom(_SEAL_BYTES)), dtype=torch.uint8))
    return memory


def _num_blocks(
    setup: Setup,
    gpu: GpuSpec,
    transformer: Transformer,
    device: Device,
    grammars: Grammars,
    *,
    has_graphs: bool,
) -> int:
    """Blocks that the largest steps leave room for, when they have been run and measured."""
    block_bytes = transformer.config.kv_block_bytes(setup.block_size, setup.dtype)
    padding = _as_pool(_pool_memory(1, setup, transformer), 1, setup, transformer)
    runner = Runner(transformer, padding, setup.block_size, grammars, device)
    runner.rehearse(1, 1)  # what libraries allocate once is no part of a step
    device.forget_peak()
    allocated_bytes = device.memory().allocated_bytes
    runner.rehearse(1, min(setup.max_step_tokens, setup.max_model_len))
    runner.rehearse(BATCH_SIZES[-1], 1)
    measured = device.memory()
    num_fitting = num_blocks_that_fit(
        free_bytes=measured.free_bytes,
        step_bytes=measured.peak_bytes - allocated_bytes,
        block_bytes=block_bytes,
        static_bytes=BATCH_SIZES[-1] * transformer.config.vocab_size * 4 if has_graphs else 0,
        has_graphs=has_graphs,
        is_shared=gpu.shares is not None,
    )
    check_blocks(num_fitting, gpu.min_blocks, block_bytes, gpu.uuid)
    return min(num_fitting, setup.pool.num_blocks)
