"""A worker's start on a GPU: weights from files, sizes of pool and steps, graphs, what two share.

Workers on GPUs of their own export their pools to those that write blocks into them.
One of two workers on a GPU exports its weights and its pool, the other maps them: a handoff is then
an admit with the same block ids, and the weights are read once and lie there once. Where they have
a ring instead, each has weights and a pool of its own, and blocks go by way of the host.

Owns: the order of the start; buffers and threads of the reading, while it runs; how many blocks fit
and how many tokens a step has, and what is kept free.
Invariant: the pool is allocated once, by itself, after the largest step has been run and measured.
Never: steps for clients; chooses who exports.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from engine.errors import CheckpointError, WorkerFailed
from engine.folder.checkpoint import Checkpoint, PanelsLayout, WeightsLayout, gpu_layout
from engine.folder.model_config import DTYPE_BYTES, ModelConfig
from engine.model.transformer import Transformer
from engine.model.weights import Weight, convert_weights, quantised_weights
from engine.units import size_text
from engine.wire.channel import WorkerChannel
from engine.wire.messages import (
    GpuSpec,
    MapPool,
    MapShared,
    PoolMade,
    Ready,
    Setup,
    SharedMemory,
    Unmapped,
    WeightsComplete,
    WeightsLoaded,
)
from engine.workers.copying import map_pool, probe
from engine.workers.device import Device
from engine.workers.graphs import BATCH_SIZES, DecodeGraphs
from engine.workers.runner import Runner
from engine.workers.running import Grammars

# Weights from files to a GPU: several reads under way, and every copy while others are read.
# One read at a time leaves a fast disk, or the page cache, half idle, and a copy from ordinary
# memory waits for the host. So threads read pieces into pinned buffers, and each piece is copied as
# soon as it is there, to where it belongs in one arena of device memory. A buffer is read into
# again when the device has copied it. Where several devices need the weights each worker reads a
# share of the files into memory of the host that all inherit, and copies everything from there in
# the same way.
# Invariant: the pages of the files are mapped nowhere; no byte of a file is read by two workers
# that have shares; beside what they share the host holds no more than the buffers.
# Never: chooses the dtype or the layout (engine.folder.checkpoint does).


PIECE_BYTES = 16 << 20
NUM_READS = 4
_NUM_BUFFERS = NUM_READS + 2
"""Those that are read into, and two that are being copied."""

Progress = Callable[[int, int], None]


class _Piece(NamedTuple):
    """A run of one tensor's values that is read at once."""

    file: Path
    start: int
    num_bytes: int
    dtype: torch.dtype
    target: torch.Tensor
    """Its place in the arena, [num_values]."""


class _Buffer:
    """Host memory that a piece passes through."""

    def __init__(self, device: Device, num_bytes: int) -> None:
        self.memory = device.buffer(num_bytes)
        self.wait: Callable[[], None] | None = None
        """Until the device has copied what was in it."""


def arena_views(layout: WeightsLayout, dtype: str, arena: torch.Tensor) -> dict[str, torch.Tensor]:
    """The weights by name, as they lie in an arena [num_bytes] of uint8."""
    views = {}
    for name, offset in layout.offset_by_name.items():
        shape = layout.shape_by_name[name]
        end = offset + math.prod(shape) * DTYPE_BYTES[dtype]
        views[name] = arena[offset:end].view(getattr(torch, dtype)).view(shape)
    return views


@torch.inference_mode()
def stream_weights(
    checkpoint: Checkpoint, views: dict[str, torch.Tensor], device: Device, progress: Progress
) -> None:
    """Fill the views with the checkpoint's values, converted on the device where need be.

    Args:
        checkpoint: where the stored tensors lie.
        views: of arena_views().
        device: that the views are on.
        progress: called with (bytes done, bytes to do) after each piece.

    Raises:
        CheckpointError: a file cannot be read, or is shorter than it was.
    """
    pieces = list(_pieces(checkpoint, views))
    with _opened(piece.file for piece in pieces) as files:
        _stream(pieces, files, device, progress)


@torch.inference_mode()
def read_share(
    checkpoint: Checkpoint,
    dtype: str,
    layout: WeightsLayout | PanelsLayout,
    fd: int,
    share: tuple[int, int],
    progress: Progress,
) -> None:
    """Fill a part of an arena in the host's memory.

    Args:
        checkpoint: where the stored tensors lie, in whatever form.
        dtype: that they are to be in.
        layout: of the arena.
        fd: of the memory, which others fill the rest of.
        share: (index, count) of the part.
        progress: called with (bytes done, bytes to do), of the part.

    Raises:
        CheckpointError: a file cannot be read, or is shorter than it was.
    """
    memory = torch.frombuffer(mmap.mmap(fd, layout.num_bytes), dtype=torch.uint8)
    if isinstance(layout, PanelsLayout):
        quantised_weights(checkpoint, dtype, layout, memory, share, progress)
        return
    views = arena_views(layout, dtype, memory)
    if any(tensor.dtype != dtype for tensor in checkpoint.tensors.values()):
        convert_weights(checkpoint, views, progress, share)
        return
    index, count = share
    pieces = list(_pieces(checkpoint, views))[index::count]
    total_bytes, done_bytes = sum(piece.num_bytes for piece in pieces), 0
    with (
        _opened(piece.file for piece in pieces) as files,
        ThreadPoolExecutor(NUM_READS, "read") as threads,
    ):
        reads = [
            threads.submit(_read, files[piece.file], piece, piece.target.view(torch.uint8))
            for piece in pieces
        ]
        for piece, read in zip(pieces, reads, strict=True):
            read.result()
            done_bytes += piece.num_bytes
            progress(done_bytes, total_bytes)


@torch.inference_mode()
def stream_arena(fd: int, arena: torch.Tensor, device: Device) -> None:
    """Copy an arena in the host's memory, which is filled, to one on a device.

    Shapes: arena [num_bytes] of uint8.

    Args:
        fd: of the host's.
        arena: the device's.
        device: that it is on.
    """
    where = Path(f"/proc/self/fd/{fd}")
    starts = range(0, len(arena), PIECE_BYTES)
    targets = [arena[start : start + PIECE_BYTES] for start in starts]
    pieces = [
        _Piece(where, start, len(target), torch.uint8, target)
        for start, target in zip(starts, targets, strict=True)
    ]
    _stream(pieces, {where: fd}, device, lambda *_: None)


def _stream(
    pieces: list[_Piece], files: Mapping[Path, int], device: Device, progress: Progress
) -> None:
    total_bytes = sum(piece.num_bytes for piece in pieces)
    largest = max((piece.num_bytes for piece in pieces), default=0)
    free = deque(_Buffer(device, largest) for _ in range(min(_NUM_BUFFERS, len(pieces))))
    reading: deque[tuple[_Piece, _Buffer, Future[None]]] = deque()
    todo, done_bytes = iter(pieces), 0
    with ThreadPoolExecutor(NUM_READS, "read") as threads:
        while True:
            while len(reading) < NUM_READS and (piece := next(todo, None)) is not None:
                buffer = free.popleft()
                if buffer.wait is not None:
                    buffer.wait()
                future = threads.submit(_read, files[piece.file], piece, buffer.memory)
                reading.append((piece, buffer, future))
            if not reading:
                break
            piece, buffer, future = reading.popleft()
            future.result()
            stored = buffer.memory[: piece.num_bytes].view(piece.dtype)
            if piece.dtype != piece.target.dtype:
                stored = stored.to(device.torch_device, non_blocking=True)
            piece.target.copy_(stored, non_blocking=True)
            buffer.wait = device.mark()
            free.append(buffer)
            done_bytes += piece.num_bytes
            progress(done_bytes, total_bytes)
    device.mark()()


@contextlib.contextmanager
def _opened(paths: Iterable[Path]) -> Iterator[dict[Path, int]]:
    files: dict[Path, int] = {}
    try:
        for path in paths:
            if path not in files:
                files[path] = _open(path)
        yield files
    finally:
        for fd in files.values():
            os.close(fd)


def _pieces(checkpoint: Checkpoint, views: dict[str, torch.Tensor]) -> Iterator[_Piece]:
    """All tensors, in the order in which their files hold them."""
    tensors = sorted(checkpoint.tensors.values(), key=lambda t: (t.file, t.start))
    for tensor in tensors:
        item_bytes, flat = DTYPE_BYTES[tensor.dtype], views[tensor.name].view(-1)
        count = PIECE_BYTES // item_bytes
        for first in range(0, len(flat), count):
            target = flat[first : first + count]
            yield _Piece(
                tensor.file,
                tensor.start + first * item_bytes,
                len(target) * item_bytes,
                getattr(torch, tensor.dtype),
                target,
            )


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(f"cannot open: {error.strerror}", where=str(path)) from error


def _read(fd: int, piece: _Piece, memory: torch.Tensor) -> None:
    """Fill memory with a piece; runs in a thread, which preadv lets run beside the others."""
    into = memoryview(memory.numpy().data)[: piece.num_bytes]
    num_read = 0
    while num_read < piece.num_bytes:
        try:
            count = os.preadv(fd, [into[num_read:]], piece.start + num_read)
        except OSError as error:
            what = f"cannot read: {error.strerror}"
            raise CheckpointError(what, where=str(piece.file)) from error
        if not count:
            what = f"the file ends at {piece.start + num_read} bytes, its weights after that"
            raise CheckpointError(what, where=str(piece.file), hint="download the file again")
        num_read += count


# --------------------------------------------------------------------------------------------------


# How large a GPU's pool and steps are: by what is left, and by what the steps gain.
# Invariant: nothing that a worker will allocate later is given to the pool.
# Never: measures or allocates.


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


# --------------------------------------------------------------------------------------------------


_SEAL_BYTES = 16
SLOW_ATTENTION = "attention by torch, many times slower than by kernels: run penstock doctor"


@dataclass(frozen=True, slots=True)
class Started:
    """What the loop runs on."""

    runner: Runner
    pools: dict[str, torch.Tensor]
    """By name: its own, and those that it copies to or from; the loop takes them over."""
    map_pool: Callable[[SharedMemory], torch.Tensor]
    """For pools of other workers that are made anew."""
    ready: Ready


def start(
    channel: WorkerChannel,
    setup: Setup,
    gpu: GpuSpec,
    checkpoint: Checkpoint,
    device: Device,
    grammars: Grammars,
    progress: Progress,
    goes_on: Callable[[], None] = lambda: None,
) -> Started:
    """Everything up to Ready, which the caller sends; `goes_on` is called after long parts of it.

    Raises:
        WorkerFailed: the GPU has no room for a pool, or another's memory could not be mapped.
    """
    shared, arena = _weights(channel, setup, gpu, checkpoint, device, progress)
    config, block_size = checkpoint.config, setup.block_size
    weights = _views(checkpoint, setup, gpu, arena)
    transformer = Transformer(config, weights, setup.dtype, setup.max_model_len, block_size)
    has_graphs = gpu.has_graphs and gpu.shares != "maps" and transformer.is_capturable
    if shared is not None:
        pool = _mapped_pool(device.map(shared.pool), shared, setup, gpu, transformer)
    else:
        num_blocks = _num_blocks(setup, gpu, transformer, device, grammars, has_graphs=has_graphs)
        memory = _pool_memory(num_blocks, setup, transformer)
        pool = _as_pool(memory, num_blocks, setup, transformer)
        exported = None
        if gpu.shares == "exports" or gpu.exports_pool:
            seal = _sealed(memory)
            weights_at = device.export(arena) if gpu.shares == "exports" else b""
            exported = SharedMemory(weights_at, device.export(memory), num_blocks, seal)
        channel.send(PoolMade(num_blocks, exported))

    def map_exported(exported: SharedMemory) -> torch.Tensor:
        return _mapped_pool(device.map(exported.pool), exported, setup, gpu, transformer)

    others, unmapped = _other_pools(channel, setup, config, device, map_exported)
    before, graphs = device.memory(), None
    if has_graphs:
        longest = setup.max_model_len
        graphs = DecodeGraphs(
            transformer, pool, device, block_size=block_size, max_model_len=longest
        )
        graphs.capture(goes_on)
    runner = Runner(transformer, pool, block_size, grammars, device, graphs)
    runner.warm_up(setup.max_step_tokens, setup.max_model_len)
    goes_on()
    graph_bytes = before.free_bytes - device.memory().free_bytes
    ready = Ready(
        transformer.attention_backend,
        step_tokens(setup.max_step_tokens, partial(_seconds_of, runner, setup, device)),
        _sharing(gpu, device),
        notes=[] if transformer.is_paged else [SLOW_ATTENTION],
        num_graphs=0 if graphs is None else graphs.num_graphs,
        capture_ms=0.0 if graphs is None else graphs.capture_ms,
        graph_bytes=0 if graphs is None else graph_bytes,
        probes=dict.fromkeys(unmapped, 0.0) | _probes(pool, others, setup, device),
    )
    return Started(runner, {setup.pool.name: pool, **others}, map_exported, ready)


def _views(
    checkpoint: Checkpoint, setup: Setup, gpu: GpuSpec, arena: torch.Tensor
) -> dict[str, Weight]:
    """The weights by name, in an arena that is filled."""
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
    """Pools that it copies to or from, in the host and on other GPUs; and those not mapped."""
    pools, unmapped = {}, []
    for spec in setup.other_pools:
        if spec.fd is not None:
            pools[spec.name] = map_pool(spec, config, setup.block_size, setup.dtype)
            device.pin(pools[spec.name])
    for name, told in _told_of(channel, _on_gpus(setup)).items():
        try:
            pools[name] = map_exported(told)
        except Exception:  # noqa: BLE001  # whatever it is, blocks go by way of the host
            traceback.print_exc()
            unmapped.append(name)
    return pools, unmapped


def _on_gpus(setup: Setup) -> set[str]:
    """Other workers' pools that are not in the host's memory."""
    return {spec.name for spec in setup.other_pools if spec.fd is None}


def _probes(
    pool: torch.Tensor, others: dict[str, torch.Tensor], setup: Setup, device: Device
) -> dict[str, float]:
    """Bytes a second by pool; 0 if what came back from another GPU is not what was sent to it."""
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
    """Where other workers' pools are, when all of them have been made."""
    told: dict[str, SharedMemory] = {}
    while told.keys() != set(pools):
        command = channel.expect(MapPool)
        if command.memory is not None:
            told[command.pool] = command.memory
        else:  # that worker has died, and starts again when nobody holds its memory
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
    """The bytes of all weights, read or mapped, when all workers have their share of them."""
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


def rehearse_largest(runner: Runner, max_step_tokens: int, max_model_len: int) -> None:
    """Run the steps that need most memory: none that serves needs more.

    Those are new prompts, a prompt's last chunk, and a step's most sequences at full length.
    """
    _rehearse(runner, max_model_len, max_step_tokens)
    runner.rehearse(1, max_model_len, min(max_step_tokens, max_model_len))
    runner.rehearse(BATCH_SIZES[-1], max_model_len, 1)


def _rehearse(runner: Runner, max_model_len: int, num_tokens: int) -> None:
    """Run a step of so many prompt tokens, of more than one prompt if none may be so long."""
    length = min(num_tokens, max_model_len)
    runner.rehearse(num_tokens // length, length)


def _seconds_of(runner: Runner, setup: Setup, device: Device, num_tokens: int) -> float:
    """Of a step, when it has run once before."""
    _rehearse(runner, setup.max_model_len, num_tokens)
    device.mark()()
    started_ns = time.monotonic_ns()
    _rehearse(runner, setup.max_model_len, num_tokens)
    device.mark()()
    return max(time.monotonic_ns() - started_ns, 1) / 1e9


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
            hint="serve with roles colocated, which maps nothing",
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
    rehearse_largest(runner, setup.max_step_tokens, setup.max_model_len)
    measured = device.memory()
    fitting = partial(
        num_blocks_that_fit,
        free_bytes=measured.free_bytes,
        step_bytes=measured.peak_bytes - allocated_bytes,
        block_bytes=block_bytes,
        static_bytes=BATCH_SIZES[-1] * transformer.config.vocab_size * 4 if has_graphs else 0,
        has_graphs=has_graphs,
        is_shared=gpu.is_shared,
    )
    num_fitting = fitting()
    if num_fitting < gpu.min_blocks == setup.pool.num_blocks:
        # started again, with the pool that it had: sequences are in its blocks
        num_fitting = min(gpu.min_blocks, fitting(margin_bytes=LEAST_MARGIN_BYTES))
    check_blocks(num_fitting, gpu.min_blocks, block_bytes, gpu.uuid)
    return min(num_fitting, setup.pool.num_blocks)
