"""Stream weights from files to a GPU, several reads at a time.

Invariant: the files are not mapped; workers with shares read each byte of a file once; besides the
shared memory the host holds only the buffers.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.model_config import DTYPE_BYTES
from engine.checkpoint.model_file import open_model_fd
from engine.checkpoint.tensor_info import TensorInfo
from engine.checkpoint.weights_layout import PanelsLayout, WeightsLayout
from engine.errors import CheckpointError
from engine.worker.device import Device
from engine.worker.model.finite import check_finite
from engine.worker.model.weights import convert_weights, quantised_weights

PIECE_BYTES = 16 << 20
NUM_READS = 4
_NUM_BUFFERS = NUM_READS + 2
"""Buffers: one per read, and two being copied."""

Progress = Callable[[int, int], None]


class _Piece(NamedTuple):
    """A run of one tensor's values that is read at once."""

    file: Path
    start: int
    num_bytes: int
    dtype: torch.dtype
    target: torch.Tensor
    """Its place in the arena, [num_values]."""
    tensor: TensorInfo | None
    """What it is a part of; None: its values were checked before."""


class _Buffer:
    """Host memory that a piece passes through."""

    def __init__(self, device: Device, num_bytes: int) -> None:
        self.memory = device.buffer(num_bytes)
        self.wait: Callable[[], None] | None = None
        """Waits until the device has copied its content."""


def arena_views(layout: WeightsLayout, dtype: str, arena: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the weights by name in an arena [num_bytes] of uint8."""
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
    """Fill the views with the checkpoint's values, converted on the device if needed.

    Args:
        views: of arena_views().
        progress: called with (bytes done, bytes to do) after each piece.

    Raises:
        CheckpointError: a file cannot be read, or has shrunk; a value is infinite, or no number.
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
    """Fill a part of an arena in host memory.

    Args:
        checkpoint: with the stored tensors, in any form.
        fd: of the memory; other workers fill the rest.
        share: (index, count) of the part.
        progress: called with (bytes done, bytes to do), of the part.

    Raises:
        CheckpointError: a file cannot be read, or has shrunk; a value is infinite, or no number.
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
    """Copy a filled arena in host memory to one on a device.

    Shapes: arena [num_bytes] of uint8.
    """
    where = Path(f"/proc/self/fd/{fd}")
    starts = range(0, len(arena), PIECE_BYTES)
    targets = [arena[start : start + PIECE_BYTES] for start in starts]
    pieces = [
        _Piece(where, start, len(target), torch.uint8, target, None)
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
    """Yield pieces of all tensors, in the files' order."""
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
                tensor,
            )


def _open(path: Path) -> int:
    try:
        return open_model_fd(path)
    except OSError as error:
        raise CheckpointError(f"cannot open: {error.strerror}", where=str(path)) from error


def _read(fd: int, piece: _Piece, memory: torch.Tensor) -> None:
    """Fill memory with a piece, and check it; runs in a thread: Python's lock is released."""
    into = memoryview(memory.numpy().data)[: piece.num_bytes]
    num_read = 0
    while num_read < piece.num_bytes:
        try:
            count = os.preadv(fd, [into[num_read:]], piece.start + num_read)
        except OSError as error:
            what = f"cannot read: {error.strerror}"
            raise CheckpointError(what, where=str(piece.file)) from error
        if not count:
            what = f"the file ends at {piece.start + num_read} bytes, before its weights end"
            raise CheckpointError(what, where=str(piece.file), hint="download the file again")
        num_read += count
    if piece.tensor is not None:
        check_finite(memory[: piece.num_bytes].view(piece.dtype), piece.tensor)
