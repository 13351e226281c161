"""Start a worker on a GPU: load weights, size the pool and steps, capture graphs.

Workers on GPUs of their own export their pools to the workers that write blocks into them. Of two
workers on a GPU one exports its weights and its pool, the other maps them: a handoff is then an
admit with unchanged block ids, and the weights are read and stored once. With a staging buffer
instead, each has weights and a pool of its own, and blocks go through the host.

Invariant: the pool is allocated once, separately, after the largest step has been run and measured.
"""

from __future__ import annotations

import math
import os
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

import torch

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.model_config import DTYPE_BYTES, ModelConfig
from engine.checkpoint.weights_layout import PanelsLayout, gpu_layout
from engine.errors import WorkerFailed
from engine.wire.channel import WorkerChannel
from engine.wire.messages import (
    GpuSpec,
    MapPool,
    MapShared,
    PoolMade,
    Proof,
    Ready,
    Setup,
    SharedMemory,
    Unmapped,
    WeightsComplete,
    WeightsLoaded,
)
from engine.worker.copying import probe
from engine.worker.device import Device
from engine.worker.gpu_sizes import (
    LEAST_MARGIN_BYTES,
    check_blocks,
    num_blocks_that_fit,
    step_tokens,
)
from engine.worker.grammars import Grammars
from engine.worker.graphs import BATCH_SIZES, DecodeGraphs
from engine.worker.kv_pool import map_pool
from engine.worker.model.transformer import Transformer
from engine.worker.model.weight import Weight
from engine.worker.model.weights import convert_weights, quantised_weights
from engine.worker.runner import Runner
from engine.worker.self_test import proof_of, proved_graphs, routed
from engine.worker.weight_streaming import (
    Progress,
    arena_views,
    read_share,
    stream_arena,
    stream_weights,
)

_SEAL_BYTES = 16
SLOW_ATTENTION = "attention by torch, many times slower than by kernels: run penstock doctor"


@dataclass(frozen=True, slots=True)
class Started:
    """The parts that the loop runs on."""

    transformer: Transformer
    runner: Runner
    pools: dict[str, torch.Tensor]
    """Its own pool and the pools that it copies to or from, by name; the loop takes them over."""
    map_pool: Callable[[SharedMemory], torch.Tensor]
    """Maps remade pools of other workers."""
    ready: Ready


def start(
    channel: WorkerChannel,
    setup: Setup,
    gpu: GpuSpec,
    checkpoint: Checkpoint,
    device: Device,
    grammars: Grammars,
    progress: Progress,
    heartbeat: Callable[[], None] = lambda: None,
) -> Started:
    """Do all up to Ready, which the caller sends; `heartbeat` is called after long parts of it.

    Raises:
        WorkerFailed: the GPU has no memory for a pool, or another's memory could not be mapped.
    """
    proof = None if device.card is None else proof_of(setup, gpu, checkpoint, device)
    gpu = gpu if proof is None else routed(setup, gpu, proof.refused)
    heartbeat()
    shared, arena = _weights(channel, setup, gpu, checkpoint, device, progress)
    config, block_size = checkpoint.config, setup.block_size
    transformer = _transformer(checkpoint, setup, gpu, arena)

    def map_exported(exported: SharedMemory) -> torch.Tensor:
        return _mapped_pool(device.map(exported.pool), exported, setup, gpu, transformer)

    has_graphs = gpu.has_graphs and gpu.shares != "maps" and transformer.is_capturable
    if shared is not None:
        pool = map_exported(shared)
    else:
        num_blocks = _num_blocks(setup, gpu, transformer, device, grammars, has_graphs=has_graphs)
        memory = _pool_memory(num_blocks, setup, transformer)
        pool = _as_pool(memory, num_blocks, setup, transformer)
        channel.send(PoolMade(num_blocks, _exported(gpu, device, arena, memory, num_blocks)))
    others, unmapped = _other_pools(channel, setup, config, device, map_exported)
    before, graphs = device.memory(), None
    if has_graphs:
        how = {"block_size": block_size, "max_model_len": setup.max_model_len}
        graphs = DecodeGraphs(transformer, pool, device, **how)
        graphs.capture(heartbeat)
        graphs, proof = proved_graphs(graphs, proof)
    runner = Runner(transformer, pool, block_size, grammars, device, graphs)
    runner.warm_up(setup.max_num_batched_tokens, setup.max_model_len)
    heartbeat()
    graph_bytes = before.free_bytes - device.memory().free_bytes
    ready = Ready(
        transformer.attention_backend,
        gpu.step_tokens
        or step_tokens(setup.max_num_batched_tokens, partial(_seconds_of, runner, setup, device)),
        _sharing(gpu, device),
        notes=_notes(transformer, proof),
        proof=proof,
        num_graphs=0 if graphs is None else graphs.num_graphs,
        capture_ms=0.0 if graphs is None else graphs.capture_ms,
        graph_bytes=0 if graphs is None else graph_bytes,
        probes=dict.fromkeys(unmapped, 0.0) | _probes(pool, others, setup, device),
    )
    return Started(transformer, runner, {setup.pool.name: pool, **others}, map_exported, ready)


def _exported(
    gpu: GpuSpec, device: Device, arena: torch.Tensor, memory: torch.Tensor, num_blocks: int
) -> SharedMemory | None:
    """Export what other workers map; None: none does."""
    if gpu.shares != "exports" and not gpu.exports_pool:
        return None
    weights_at = device.export(arena) if gpu.shares == "exports" else b""
    return SharedMemory(weights_at, device.export(memory), num_blocks, _sealed(memory))


def _transformer(
    checkpoint: Checkpoint, setup: Setup, gpu: GpuSpec, arena: torch.Tensor
) -> Transformer:
    """Build the model over a filled arena."""
    weights, shape = _views(checkpoint, setup, gpu, arena), (setup.max_model_len, setup.block_size)
    return Transformer(checkpoint.config, weights, setup.dtype, *shape, faults=gpu.faults)


def _notes(transformer: Transformer, proof: Proof | None) -> list[str]:
    """Say what the operator should know of the kernels."""
    notes = [] if transformer.is_paged else [SLOW_ATTENTION]
    if proof is not None:
        notes += [f"self-test refused {name}: {about}" for name, about in proof.refused.items()]
        notes += proof.notes
    return notes


def _views(
    checkpoint: Checkpoint, setup: Setup, gpu: GpuSpec, arena: torch.Tensor
) -> dict[str, Weight]:
    """Return the weights by name, in a filled arena."""
    layout = gpu_layout(checkpoint, setup.dtype, gpu.packing)
    if isinstance(layout, PanelsLayout):
        return quantised_weights(checkpoint, setup.dtype, layout, arena, None, lambda *_: None)
    views = arena_views(layout, setup.dtype, arena)
    return {name: Weight.plain(view) for name, view in views.items()}


def _other_pools(
    channel: WorkerChannel,
    setup: Setup,
    config: ModelConfig,
    device: Device,
    map_exported: Callable[[SharedMemory], torch.Tensor],
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Map the pools that it copies to or from; list the unmapped ones."""
    pools, unmapped = {}, []
    for spec in setup.other_pools:
        if spec.fd is not None:
            pools[spec.name] = map_pool(spec, config, setup.block_size, setup.dtype)
            device.pin(pools[spec.name])
    for name, told in _told_of(channel, _on_gpus(setup)).items():
        try:
            pools[name] = map_exported(told)
        except Exception:  # noqa: BLE001  # after any error blocks go through the host
            traceback.print_exc()
            unmapped.append(name)
    return pools, unmapped


def _on_gpus(setup: Setup) -> set[str]:
    """List other workers' pools outside host memory."""
    return {spec.name for spec in setup.other_pools if spec.fd is None}


def _probes(
    pool: torch.Tensor, others: dict[str, torch.Tensor], setup: Setup, device: Device
) -> dict[str, float]:
    """Measure the copy rate to each pool; 0: the data came back changed."""
    rates = {}
    for name, other in others.items():
        try:
            rates[name] = probe(pool, other, device)
        except WorkerFailed:
            if name not in _on_gpus(setup):  # there is no other way
                raise
            traceback.print_exc()
            rates[name] = 0.0
    return rates


def _told_of(channel: WorkerChannel, pools: Collection[str]) -> dict[str, SharedMemory]:
    """Wait until all other workers' pools have been made; return their handles."""
    told: dict[str, SharedMemory] = {}
    while told.keys() != set(pools):
        command = channel.expect(MapPool)
        if command.memory is not None:
            told[command.pool] = command.memory
        else:  # that worker has died, and restarts once its memory is unmapped
            told.pop(command.pool, None)
            channel.send(Unmapped(command.pool))
    return told


def _weights(
    channel: WorkerChannel,
    setup: Setup,
    gpu: GpuSpec,
    checkpoint: Checkpoint,
    device: Device,
    progress: Progress,
) -> tuple[SharedMemory | None, torch.Tensor]:
    """Read or map all weights; return when all workers have their share."""
    if gpu.shares == "maps":
        channel.send(WeightsLoaded())
        channel.expect(WeightsComplete)
        shared = channel.expect(MapShared).memory
        progress(checkpoint.num_bytes, checkpoint.num_bytes)
        return shared, device.map(shared.weights)
    layout = gpu_layout(checkpoint, setup.dtype, gpu.packing)
    arena = torch.empty(layout.num_bytes, dtype=torch.uint8, device=device.torch_device)
    spec = setup.weights
    if spec is not None:  # other devices need them, too
        if not spec.is_filled:
            share = spec.share_index, spec.share_count
            read_share(checkpoint, setup.dtype, layout, spec.fd, share, progress)
        channel.send(WeightsLoaded())
        channel.expect(WeightsComplete)
        stream_arena(spec.fd, arena, device)
        return None, arena
    if isinstance(layout, PanelsLayout):
        quantised_weights(checkpoint, setup.dtype, layout, arena, (0, 1), progress)
    elif checkpoint.is_plain:
        stream_weights(checkpoint, arena_views(layout, setup.dtype, arena), device, progress)
    else:
        convert_weights(checkpoint, arena_views(layout, setup.dtype, arena), progress)
    channel.send(WeightsLoaded())
    channel.expect(WeightsComplete)
    return None, arena


def _sharing(gpu: GpuSpec, device: Device) -> str | None:
    if not gpu.is_shared:
        return None
    return "mps" if device.is_served_by_mps else "time-sliced"


def run_largest_steps(runner: Runner, max_num_batched_tokens: int, max_model_len: int) -> None:
    """Run the steps that need most memory: none that serves needs more.

    They are new prompts, a prompt's last chunk, and the maximum sequences at full length.
    """
    _run_largest_step(runner, max_model_len, max_num_batched_tokens)
    runner.dummy_step(1, max_model_len, min(max_num_batched_tokens, max_model_len))
    runner.dummy_step(BATCH_SIZES[-1], max_model_len, 1)


def _run_largest_step(runner: Runner, max_model_len: int, num_tokens: int) -> None:
    """Run a step of this many prompt tokens, in several prompts if one may not be so long."""
    length = min(num_tokens, max_model_len)
    runner.dummy_step(num_tokens // length, length)


def _seconds_of(runner: Runner, setup: Setup, device: Device, num_tokens: int) -> float:
    """Time a step after one warm-up run."""
    _run_largest_step(runner, setup.max_model_len, num_tokens)
    device.mark()()
    started_ns = time.monotonic_ns()
    _run_largest_step(runner, setup.max_model_len, num_tokens)
    device.mark()()
    return max(time.monotonic_ns() - started_ns, 1) / 1e9


def _mapped_pool(
    memory: torch.Tensor,
    shared: SharedMemory,
    setup: Setup,
    gpu: GpuSpec,
    transformer: Transformer,
) -> torch.Tensor:
    """Map another worker's pool, and check its seal."""
    if _sealed(memory) != shared.seal:
        raise WorkerFailed(
            "the mapped memory is not the exported memory",
            where=gpu.uuid,
            hint="serve with --roles colocated, which maps no memory",
        )
    return _as_pool(memory, shared.num_blocks, setup, transformer)


def _sealed(memory: torch.Tensor) -> bytes:
    """Return the bytes after a pool's last block."""
    return bytes(memory[-_SEAL_BYTES:].tolist())


def _as_pool(
    memory: torch.Tensor, num_blocks: int, setup: Setup, transformer: Transformer
) -> torch.Tensor:
    """View bytes as [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]."""
    config = transformer.config
    shape = (config.num_kv_layers, 2, setup.block_size, config.num_kv_heads, config.head_dim)
    num_bytes = num_blocks * math.prod(shape) * DTYPE_BYTES[setup.dtype]
    return memory[:num_bytes].view(transformer.dtype).view(num_blocks, *shape)


def _pool_memory(num_blocks: int, setup: Setup, transformer: Transformer) -> torch.Tensor:
    """Allocate a zeroed pool, followed by a unique seal."""
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
    """Count the blocks that fit beside the largest steps, after measuring them."""
    block_bytes = transformer.config.kv_block_bytes(setup.block_size, setup.dtype)
    padding = _as_pool(_pool_memory(1, setup, transformer), 1, setup, transformer)
    runner = Runner(transformer, padding, setup.block_size, grammars, device)
    runner.dummy_step(1, 1)  # what libraries allocate once is no part of a step
    device.forget_peak()
    allocated_bytes = device.memory().allocated_bytes
    run_largest_steps(runner, setup.max_num_batched_tokens, setup.max_model_len)
    static_bytes = BATCH_SIZES[-1] * transformer.config.vocab_size * 4 if has_graphs else 0
    static_bytes += max((text.scratch_bytes for text in setup.text_models), default=0)
    measured = device.memory()
    fitting = partial(
        num_blocks_that_fit,
        free_bytes=measured.free_bytes,
        step_bytes=measured.peak_bytes - allocated_bytes,
        block_bytes=block_bytes,
        static_bytes=static_bytes,
        has_graphs=has_graphs,
        is_shared=gpu.is_shared,
    )
    num_fitting = fitting()
    if num_fitting < gpu.min_blocks == setup.pool.num_blocks:
        # started again, with the pool that it had: sequences are in its blocks
        num_fitting = min(gpu.min_blocks, fitting(margin_bytes=LEAST_MARGIN_BYTES))
    check_blocks(num_fitting, gpu.min_blocks, block_bytes, gpu.uuid)
    return min(num_fitting, setup.pool.num_blocks)
