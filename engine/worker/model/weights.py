"""Hold the weights in memory that all workers share: mapped, converted, or packed in panels.

Invariant: file pages are mapped privately, so that a stray write cannot reach the checkpoint; a
packed matrix has the values of the stored one, rounded to bfloat16 where that is its form.
"""

from __future__ import annotations

import math
import mmap
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import torch

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.model_config import DTYPE_BYTES
from engine.checkpoint.model_file import open_model_fd
from engine.checkpoint.packed_layouts import FP8_ROWS, panels_shape
from engine.checkpoint.tensor_info import TensorInfo
from engine.checkpoint.weights_layout import (
    AS_STORED,
    PanelsLayout,
    WeightsLayout,
    arena_layout,
    packed_layout,
    panels_layout,
)
from engine.errors import CheckpointError, unreadable
from engine.system.mapped_files import map_unchanged
from engine.worker.model.finite import check_blocks, check_finite
from engine.worker.model.stored_tensors import Stored
from engine.worker.model.weight import (
    _PIECE_VALUES,
    MatrixRows,
    Weight,
    memory_of,
    pack_panels,
    pack_weights,
    packed_weights,
)

Progress = Callable[[int, int], None]

_PROGRESS_INTERVAL_NS = 100_000_000
_FEW_ROWS = 80
"""Whole panels, and no whole tile of 32 or 64 rows."""


def load_weights(
    checkpoint: Checkpoint,
    dtype: str,
    arena: mmap.mmap | None,
    share: tuple[int, int] | None,
    progress: Progress,
    *,
    is_packed: bool = False,
    weights: str = AS_STORED,
    stays_on_disk: bool = False,
) -> dict[str, Weight]:
    """Load the model's weights by name, in `dtype` or as they are mapped.

    Args:
        checkpoint: where the stored tensors lie.
        arena: shared memory of `weights_layout`'s size; None maps the files.
        share: (index, count) of the part to convert into the arena; None if it is filled.
            The other parts are undefined until their workers have returned from this call.
        progress: called with (bytes done, bytes to do), at most ten times a second and at the end.
        is_packed: the arena holds matrices packed in pairs, as `packed_layout` has them, or of a
            quantised checkpoint in panels, as `panels_layout` has them.
        weights: what matrices are quantised to at start, as for `panels_layout`.
        stays_on_disk: mapped matrices are read by the steps alone, and their values not checked.

    Raises:
        CheckpointError: a value is infinite or no number, or a file cannot be read.
    """
    if arena is None:
        return _mapped(checkpoint, dtype, progress, checkpoint.tensors if stays_on_disk else ())
    if is_packed and (weights != AS_STORED or not checkpoint.is_plain):
        layout = panels_layout(checkpoint, dtype, weights)
        if layout is None:
            raise ValueError("this checkpoint has nothing that goes into panels")
        memory = memory_of(arena, layout.num_bytes)
        return quantised_weights(checkpoint, dtype, layout, memory, share, progress)
    if is_packed:
        pairs = packed_layout(checkpoint, dtype)
        if pairs is None:
            raise ValueError(f"this checkpoint is not packed for {dtype}")
        to_pack = set(pairs.source_by_packed.values())
        unchecked = checkpoint.tensors if share is None else to_pack
        mapped = _mapped(checkpoint, dtype, _ignore, unchecked)
        return mapped | pack_weights(mapped, checkpoint.tensors, pairs, arena, share, progress)
    views = _arena_views(checkpoint, dtype, arena)
    if share is not None:
        convert_weights(checkpoint, views, progress, share)
    else:
        progress(len(arena), len(arena))
    return {name: Weight.plain(view) for name, view in views.items()}


def quantised_weights(
    checkpoint: Checkpoint,
    dtype: str,
    layout: PanelsLayout,
    memory: torch.Tensor,
    share: tuple[int, int] | None,
    progress: Progress,
) -> dict[str, Weight]:
    """Load matrices in panels, rows to look up as the file has them, the rest in `dtype`.

    Args:
        checkpoint: where the stored tensors lie.
        layout: of panels_layout() or gpu_layout().
        memory: of the arena, uint8 [num_bytes], on any device.
        share: (index, count) of the part to fill; None if it is filled.
        progress: called with (bytes done, bytes to do).
    """
    stored = map_files(checkpoint.tensors, _ignore)
    rest = layout_views(layout.rest, dtype, memory[layout.rest_offset :])
    if share is not None:
        convert_weights(checkpoint, rest, _ignore, share)
    weights = {name: Weight.plain(view) for name, view in rest.items()}
    for name in layout.looked_up:
        info = checkpoint.tensors[name]
        if info.is_plain:
            weights[name] = Weight.plain(stored[name].values)
        else:
            weights[name] = Weight(stored[name].blocks, None, f"{info.dtype}_rows", info.shape)
        if share is not None:
            (check_finite if info.is_plain else check_blocks)(weights[name].data, info)
    return weights | packed_weights(stored, layout, memory, share, progress)


def first_rows(checkpoint: Checkpoint, layout: PanelsLayout) -> tuple[MatrixRows, ...]:
    """Pack the first rows of one matrix of each form, and read their values."""
    stored = map_files(checkpoint.tensors, _ignore)
    by_form = {panels.form: panels.source for panels in reversed(layout.panels.values())}
    return tuple(_few_rows(stored[source], form) for form, source in by_form.items())


def _few_rows(matrix: Stored, form: str) -> MatrixRows:
    num_rows = min(matrix.num_rows, _FEW_ROWS)
    shape = panels_shape(form, num_rows, matrix.depth)
    data = torch.zeros(shape, dtype=torch.uint8)
    pack_panels(matrix, form, data, 0, len(data))
    scheme = FP8_ROWS if form == FP8_ROWS else f"{form}_panels"
    values = matrix.parts(0, num_rows, None if form == FP8_ROWS else form).values()
    return MatrixRows(Weight(data, None, scheme, (num_rows, matrix.depth)), values)


def layout_views(
    layout: WeightsLayout, dtype: str, memory: torch.Tensor
) -> dict[str, torch.Tensor]:
    """View tensors by name in memory [num_bytes] of uint8."""
    views = {}
    for name, offset in layout.offset_by_name.items():
        shape = layout.shape_by_name[name]
        end = offset + math.prod(shape) * DTYPE_BYTES[dtype]
        views[name] = memory[offset:end].view(getattr(torch, dtype)).view(shape)
    return views


def convert_weights(
    checkpoint: Checkpoint,
    views: dict[str, torch.Tensor],
    progress: Progress,
    share: tuple[int, int] = (0, 1),
) -> None:
    """Fill the views with the checkpoint's values, whatever form they are stored in.

    Args:
        checkpoint: where the stored tensors lie.
        views: by name, of one dtype, on any device.
        progress: called with (bytes done, bytes to do), at most ten times a second and at the end.
        share: (index, count) of the part to fill.
    """
    stored = map_files(checkpoint.tensors, _ignore)
    rows_by_name = {name: view.view(len(view), -1) for name, view in views.items()}
    pieces = list(_pieces(rows_by_name, *share))
    total = sum(rows_by_name[name][first:end].nbytes for name, first, end in pieces)
    done, reported_ns = 0, 0
    for name, first, end in pieces:
        target = rows_by_name[name][first:end]
        target.copy_(stored[name].rows(first, end))
        done += target.nbytes
        now_ns = time.monotonic_ns()
        if now_ns - reported_ns >= _PROGRESS_INTERVAL_NS:
            reported_ns = now_ns
            progress(done, total)
    progress(total, total)


def _mapped(
    checkpoint: Checkpoint, dtype: str, progress: Progress, unchecked: Collection[str]
) -> dict[str, Weight]:
    """Leave matrices in the files; convert vectors to `dtype`.

    Args:
        unchecked: matrices whose values are not read here, and so not checked.
    """
    total, done, weights = checkpoint.num_bytes, 0, {}
    for name, stored in map_files(checkpoint.tensors, _ignore).items():
        values = stored.values
        if values.dim() == 1:
            values = values.to(getattr(torch, dtype))
        if values.dim() == 1 or name not in unchecked:
            check_finite(values, stored.info)
        weights[name] = Weight.plain(values)
        done += stored.info.num_bytes
        progress(done, total)
    return weights


def map_files(tensors: Mapping[str, TensorInfo], progress: Progress) -> dict[str, Stored]:
    """Map the files of tensors; return these by the same names.

    Args:
        progress: called with (bytes mapped, bytes to map).
    """
    end_by_file: dict[Path, int] = {}
    for tensor in tensors.values():
        for piece in tensor.pieces.values():
            end_by_file[piece.file] = max(piece.end, end_by_file.get(piece.file, 0))
    total_bytes, mapped_bytes = sum(end_by_file.values()), 0
    bytes_by_file = {}
    for path, end in end_by_file.items():
        bytes_by_file[path] = _map_file(path, end)
        mapped_bytes += end
        progress(mapped_bytes, total_bytes)

    return {
        name: Stored(
            tensor,
            {
                role: bytes_by_file[piece.file][piece.start : piece.end]
                for role, piece in tensor.pieces.items()
            },
        )
        for name, tensor in tensors.items()
    }


def _map_file(path: Path, end: int) -> torch.Tensor:
    """Map a whole file and read its pages ahead."""
    try:
        fd = open_model_fd(path)
    except OSError as error:
        raise unreadable(path, error, "cannot open") from error
    try:
        file_bytes = os.fstat(fd).st_size
        if file_bytes < end:  # reading past its end would be a fatal signal, not an exception
            what = f"the file has shrunk to {file_bytes} bytes, its weights end at {end}"
            raise CheckpointError(what, where=str(path), hint="download the file again")
        mapped = map_unchanged(fd, file_bytes)
    finally:
        os.close(fd)
    mapped.madvise(mmap.MADV_WILLNEED)
    return torch.frombuffer(mapped, dtype=torch.uint8)


def _arena_views(checkpoint: Checkpoint, dtype: str, arena: mmap.mmap) -> dict[str, torch.Tensor]:
    layout = arena_layout(checkpoint, dtype)
    if len(arena) < layout.num_bytes:
        raise ValueError(f"an arena of {len(arena)} bytes does not fit {layout}")
    return layout_views(layout, dtype, torch.frombuffer(arena, dtype=torch.uint8))


def _pieces(
    rows_by_name: dict[str, torch.Tensor], index: int, count: int
) -> Iterator[tuple[str, int, int]]:
    """Share `index` of `count` of all values, in runs of rows of one tensor."""
    total = sum(rows.numel() for rows in rows_by_name.values())
    share_first, share_end, before = total * index // count, total * (index + 1) // count, 0
    for name, rows in rows_by_name.items():
        # a row belongs to the share in which its first value lies
        depth = rows.shape[1]
        first = -(-max(share_first - before, 0) // depth)
        end = min(-(-max(share_end - before, 0) // depth), len(rows))
        step = max(_PIECE_VALUES // depth, 1)
        for row in range(first, end, step):
            yield name, row, min(row + step, end)
        before += rows.numel()


def _ignore(_done: int, _total: int) -> None:
    """Drop the progress."""
