"""Weights in memory: files mapped as they are, or converted, paired, in panels, for all workers.

Owns: which schemes a weight in memory may have, and the check that data and scales are what theirs
says; filling the memory that all workers read, a share by each of them.
Invariant: file pages are mapped privately, so that a stray write cannot reach the checkpoint; a
packed matrix has the values of the stored one, rounded to bfloat16 where that is its form.
Never: decides the dtype or the layout (engine.folder.checkpoint does), makes that memory (the
daemon does).
"""

from __future__ import annotations

import math
import mmap
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812  # its name everywhere

from engine.errors import CheckpointError, unreadable
from engine.folder.checkpoint import (
    AS_STORED,
    Checkpoint,
    PanelsLayout,
    WeightsLayout,
    arena_layout,
    packed_layout,
    panels_layout,
)
from engine.folder.model_config import DTYPE_BYTES
from engine.folder.quantisation import (
    BLOCK_VALUES,
    FORMS,
    FP8_ROW_END_BYTES,
    FP8_ROWS,
    PANEL_ROWS,
    Form,
    packed_shape,
    panels_shape,
)
from engine.folder.tensor_info import BLOCKS
from engine.kernels.cpu import load_kernels
from engine.model.stored_tensors import Parts, Stored, parts_of

# A tensor of the model on its way to a product: its data, what scales them, and the scheme.
# Invariant: a Weight's scheme is one of SCHEMES, and its data are of the dtype that the scheme has.
# Never: converts data; a copy is not made by looking.


SCHEMES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "bfloat16_pairs": torch.bfloat16,
    **{f"{form}_panels": torch.uint8 for form in FORMS},
    **{f"{kind}_rows": torch.uint8 for kind in BLOCKS},
    FP8_ROWS: torch.uint8,
}
"""Names to the dtype of data. The first three are plain: data are the values. Pairs are packed for
the kernels, [panels, pairs of a row, rows of a panel, 2]. Quantised matrices have their scales
among their data: panels for the kernels, [panels, bytes of a panel], or blocks as the file has
them, [rows, bytes of a row]; FP8 for products with FP8 has both in each row. Nothing else scales
any of them."""
PLAIN = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix, [outputs, inputs], or a vector of the model.

    Raises:
        CheckpointError: the scheme is unknown, or data or scales are not what it has.
    """

    data: torch.Tensor
    scales: torch.Tensor | None
    """What data are multiplied by, as the scheme says; None where nothing scales them."""
    scheme: str
    shape: tuple[int, ...]
    """Of the values, however they are stored."""

    def __post_init__(self) -> None:
        dtype = SCHEMES.get(self.scheme)
        if dtype is None:
            hint = f"one of {', '.join(SCHEMES)}"
            raise CheckpointError(f"unknown scheme {self.scheme!r}", where="weight", hint=hint)
        if self.data.dtype != dtype or self.scales is not None:
            with_scales = "" if self.scales is None else " with scales"
            what = f"data of {self.data.dtype}{with_scales} are not {self.scheme}"
            raise CheckpointError(what, where="weight", hint=f"{self.scheme}: {dtype}, no scales")

    @classmethod
    def plain(cls, data: torch.Tensor) -> Weight:
        """Values as they are; the scheme is named after their dtype."""
        return cls(data, None, str(data.dtype).removeprefix("torch."), tuple(data.shape))

    @property
    def values(self) -> torch.Tensor:
        """The values themselves, where data are values.

        Raises:
            CheckpointError: they are packed.
        """
        if self.scheme not in PLAIN:
            hint = f"only {', '.join(PLAIN)} are read value by value"
            raise CheckpointError(f"{self.scheme} has no values", where="weight", hint=hint)
        return self.data


# Matrices packed in pairs, in one arena that all workers read.
# Invariant: a packed matrix is the stored one rounded to bfloat16, and nothing else.
# Never: decides whether to pack, or where (boot and engine.folder.checkpoint do).


_PIECE_VALUES = 4 << 20  # converted between two looks at the clock: some milliseconds


def pack_weights(
    stored: dict[str, Weight],
    layout: WeightsLayout,
    arena: mmap.mmap,
    share: tuple[int, int] | None,
    progress: Callable[[int, int], None],
) -> dict[str, Weight]:
    """The packed matrices by name.

    Args:
        stored: the matrices as they are, by the names of their tensors.
        layout: where the packed ones lie, of packed_layout().
        arena: shared memory of the layout's size.
        share: (index, count) of the part to fill; None if it is filled.
        progress: called with (bytes done, bytes to do).

    Raises:
        ValueError: the arena is smaller than the layout.
    """
    memory = memory_of(arena, layout.num_bytes).view(torch.bfloat16)
    packed = {}
    for name, source in layout.source_by_packed.items():
        num_rows, depth = stored[source].shape
        shape, first = packed_shape(num_rows, depth), layout.offset_by_name[name] // 2
        data = memory[first : first + math.prod(shape)].view(shape)
        packed[name] = Weight(data, None, "bfloat16_pairs", (num_rows, depth))
    fill(
        packed,
        layout.num_bytes,
        share,
        progress,
        lambda name, first, end: pack_pairs(
            stored[layout.source_by_packed[name]], packed[name], first, end
        ),
    )
    return packed


def memory_of(arena: mmap.mmap, num_bytes: int) -> torch.Tensor:
    """An arena as uint8 [its bytes].

    Raises:
        ValueError: it is smaller than the layout's `num_bytes`.
    """
    if len(arena) < num_bytes:
        raise ValueError(f"an arena of {len(arena)} bytes does not fit {num_bytes}")
    return torch.frombuffer(arena, dtype=torch.uint8)


def fill(
    packed: dict[str, Weight],
    num_bytes: int,
    share: tuple[int, int] | None,
    progress: Callable[[int, int], None],
    pack: Callable[[str, int, int], None],
) -> None:
    """Fill a share of an arena's panels, some milliseconds' worth between two reports.

    Args:
        packed: the matrices in the arena, panels first.
        num_bytes: of the arena; reported at once where nothing is to be done.
        share: (index, count) of the part to fill; None if it is filled.
        progress: called with (bytes done, bytes to do).
        pack: fills panels [first, end) of the matrix of a name.
    """
    todo = [] if share is None else list(_packed_pieces(packed, *share))
    total = sum(packed[name].data[first:end].nbytes for name, first, end in todo)
    done = 0
    for name, first, end in todo:
        pack(name, first, end)
        done += packed[name].data[first:end].nbytes
        progress(done, total)
    if not todo:
        progress(num_bytes, num_bytes)


def pack_pairs(stored: Weight, packed: Weight, first: int, end: int) -> None:
    """Fill panels [first, end) of a packed matrix."""
    kernels, _ = load_kernels()
    rows = stored.values[first * PANEL_ROWS : end * PANEL_ROWS].bfloat16().contiguous()
    target = packed.data[first:end]
    kernels.pack_pairs(target.data_ptr(), rows.data_ptr(), *rows.shape, 0, end - first)


def packed_weight(stored: Weight) -> Weight:
    """A matrix packed into memory of its own."""
    num_rows, depth = stored.shape
    data = torch.empty(packed_shape(num_rows, depth), dtype=torch.bfloat16)
    packed = Weight(data, None, "bfloat16_pairs", (num_rows, depth))
    pack_pairs(stored, packed, 0, len(data))
    return packed


def _packed_pieces(
    packed: dict[str, Weight], index: int, count: int
) -> Iterator[tuple[str, int, int]]:
    """Share `index` of `count` of all bytes, in runs of panels of one matrix."""
    total = sum(weight.data.nbytes for weight in packed.values())
    share_first, share_end, before = total * index // count, total * (index + 1) // count, 0
    for name, weight in packed.items():
        # a panel belongs to the share in which its first byte lies
        panel_bytes = weight.data[0].nbytes
        first = -(-max(share_first - before, 0) // panel_bytes)
        end = min(-(-max(share_end - before, 0) // panel_bytes), len(weight.data))
        step = max(_PIECE_VALUES // (weight.shape[1] * PANEL_ROWS), 1)
        for panel in range(first, end, step):
            yield name, panel, min(panel + step, end)
        before += weight.data.nbytes


# Quantised matrices packed into panels, in one arena that all workers read; rows for look-ups.
# Invariant: a packed matrix has the values of its blocks, to the last bit.
# Never: decides what is packed, or where (engine.folder.checkpoint does).


def packed_weights(
    stored: dict[str, Stored],
    layout: PanelsLayout,
    memory: torch.Tensor,
    share: tuple[int, int] | None,
    progress: Callable[[int, int], None],
) -> dict[str, Weight]:
    """The packed matrices by name.

    Args:
        stored: the tensors in their files.
        layout: where the panels lie.
        memory: of the arena, uint8 [at least the panels' bytes], on any device.
        share: (index, count) of the part to fill; None if it is filled.
        progress: called with (bytes done, bytes to do).
    """
    packed = {}
    for name, panels in layout.panels.items():
        num_rows, depth = stored[panels.source].info.shape
        num_panels, num_bytes = panels_shape(panels.form, num_rows, depth)
        end = panels.offset + num_panels * num_bytes
        data = memory[panels.offset : end].view(num_panels, num_bytes)
        scheme = FP8_ROWS if panels.form == FP8_ROWS else f"{panels.form}_panels"
        packed[name] = Weight(data, None, scheme, (num_rows, depth))
    fill(
        packed,
        layout.num_bytes,
        share,
        progress,
        lambda name, first, end: pack_panels(
            stored[layout.panels[name].source],
            layout.panels[name].form,
            packed[name].data,
            first,
            end,
        ),
    )
    return packed


def pack_panels(stored: Stored, form: str, panels: torch.Tensor, first: int, end: int) -> None:
    """Fill panels [first, end) of a matrix, uint8 [num_panels, bytes of a panel]."""
    last = min(end * PANEL_ROWS, stored.num_rows)
    if form == FP8_ROWS:
        panels[first:end] = _fp8_rows(stored.parts(first * PANEL_ROWS, last, None))
        return
    parts = stored.parts(first * PANEL_ROWS, last, form)
    panels[first:end] = panels_of(parts, FORMS[form])


def panels_of(parts: Parts, form: Form) -> torch.Tensor:
    """Rows in parts as the kernels read them, uint8 [panels, bytes of a panel]."""
    num_rows, depth = parts.codes.shape
    missing = -num_rows % PANEL_ROWS  # rows of the last panel: zeros, whose products nobody reads
    codes = F.pad(parts.codes.view(torch.uint8), (0, -depth % form.group, 0, missing))
    groups = [_lanes(codes, form.group, 8 if form.code_bits == 8 else 4)]
    if 4 < form.code_bits < 8:
        groups += _by_panel(0, _high_bits(codes, form))
    heads: list[torch.Tensor | None] = [parts.heads, parts.head_minimums]
    offsets = parts.minimums if parts.zeros is None else parts.zeros
    if form.has_sixes:
        assert offsets is not None
        heads += _sixes(parts.scales, offsets)
    elif not form.row_scale_bytes:
        groups += _by_panel(missing, parts.scales, offsets)
    packed = torch.cat(groups, -1)
    if form.row_scale_bytes:
        scales = next(_by_panel(missing, parts.scales[:, :1]))
        return torch.cat((scales.flatten(1), packed.flatten(1)), -1)
    if parts.heads is not None:
        blocks = packed.view(len(packed), -1, BLOCK_VALUES // form.group * packed.shape[-1])
        packed = torch.cat([*_by_panel(missing, *heads), blocks], -1)
    return packed.flatten(1)


def _fp8_rows(parts: Parts) -> torch.Tensor:
    """Rows of codes with a scale behind each, uint8 [panels, bytes of a panel]."""
    codes, scales = parts.codes.view(torch.uint8), parts.scales[:, 0]
    filler = codes.new_zeros(len(codes), FP8_ROW_END_BYTES - scales.shape[1])
    rows = torch.cat((codes, scales, filler), -1)
    return F.pad(rows, (0, 0, 0, -len(rows) % PANEL_ROWS)).view(-1, PANEL_ROWS * rows.shape[1])


def embedded(weight: Weight, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows of a matrix, [ids, depth], in `dtype`, whether it is plain or in blocks."""
    if weight.scheme in PLAIN:
        return F.embedding(ids, weight.values).to(dtype)
    kind = weight.scheme.removesuffix("_rows")
    return parts_of(weight.data[ids], kind).values().to(dtype)


def _high_bits(codes: torch.Tensor, form: Form) -> torch.Tensor:
    """Of codes [rows, depth] what is above four bits: a word of each row and group, as bytes.

    Value 8 * i + 2 * b + k of a group is in byte b of the word, at place 2 * i + k.
    """
    more = form.code_bits - 4
    high = (codes >> 4).view(len(codes), -1, form.group // 8, 4, 2)
    shifts = more * torch.arange(form.group // 4, dtype=torch.uint8).view(-1, 1, 2)
    return (high << shifts).sum((2, 4), dtype=torch.uint8)


def _sixes(scales: torch.Tensor, minimums: torch.Tensor) -> list[torch.Tensor]:
    """Scales and minimums of six bits, [rows, groups, 1], as a block's three words.

    Those of the first four groups have a byte each, with two bits of the other four above them;
    what is left of these lies in the halves of the third word's bytes.
    """
    s, m = (each.view(len(each), -1, 2, 4).unbind(2) for each in (scales, minimums))
    low, middle = (each[0] | (each[1] >> 4 << 6) for each in (s, m))
    return [low, middle, (s[1] & 15) | (m[1] << 4)]


def _lanes(codes: torch.Tensor, group: int, bits: int) -> torch.Tensor:
    """Codes of panels, [rows, depth], as the kernels read them: uint8 [panels, groups, bytes].

    Of those with more than four bits, the lowest four.
    """
    num_panels, depth = len(codes) // PANEL_ROWS, codes.shape[1]
    if bits == 8:
        by_value = codes.view(num_panels, PANEL_ROWS, depth).transpose(1, 2).contiguous()
        return by_value.view(num_panels, depth // group, group * PANEL_ROWS)
    pairs = codes.view(num_panels, PANEL_ROWS, depth // 8, 4, 2)
    bytes_ = (pairs[..., 0] & 15 | (pairs[..., 1] << 4)).transpose(1, 2).contiguous()
    return bytes_.view(num_panels, depth // group, group * PANEL_ROWS // 2)


def _by_panel(num_missing: int, *tensors: torch.Tensor | None) -> Iterator[torch.Tensor]:
    """Each [rows, groups, bytes] as [panels, groups, rows of a panel * bytes]; None is left out."""
    for each in tensors:
        if each is not None:
            padded = F.pad(each, (0, 0, 0, 0, 0, num_missing))
            rows, groups, size = padded.shape
            by_group = padded.view(rows // PANEL_ROWS, PANEL_ROWS, groups, size).transpose(1, 2)
            yield by_group.reshape(rows // PANEL_ROWS, groups, PANEL_ROWS * size)


# --------------------------------------------------------------------------------------------------


Progress = Callable[[int, int], None]

_PROGRESS_INTERVAL_NS = 100_000_000


def load_weights(
    checkpoint: Checkpoint,
    dtype: str,
    arena: mmap.mmap | None,
    share: tuple[int, int] | None,
    progress: Progress,
    *,
    is_packed: bool = False,
    weights: str = AS_STORED,
) -> dict[str, Weight]:
    """The model's weights by name: in `dtype`, but for matrices that are mapped in another.

    Args:
        checkpoint: where the stored tensors lie.
        dtype: to serve in.
        arena: shared memory of `weights_layout`'s size; None maps the files.
        share: (index, count) of the part to convert into the arena; None if it is filled.
            The other parts are undefined until their workers have returned from this call.
        progress: called with (bytes done, bytes to do), at most ten times a second and at the end.
        is_packed: the arena holds matrices packed in pairs, as `packed_layout` has them, or of a
            quantised checkpoint in panels, as `panels_layout` has them.
        weights: what matrices are quantised to at start, as for `panels_layout`.
    """
    if arena is None:
        return _mapped(checkpoint, dtype, progress)
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
        mapped = _mapped(checkpoint, dtype, _ignore)
        return mapped | pack_weights(mapped, pairs, arena, share, progress)
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
    """Matrices in panels, rows that are looked up as the file has them, the rest in `dtype`.

    Args:
        checkpoint: where the stored tensors lie.
        dtype: to serve in.
        layout: of panels_layout() or gpu_layout().
        memory: of the arena, uint8 [num_bytes], on any device.
        share: (index, count) of the part to fill; None if it is filled.
        progress: called with (bytes done, bytes to do).
    """
    stored = _map_files(checkpoint, _ignore)
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
    return weights | packed_weights(stored, layout, memory, share, progress)


def layout_views(
    layout: WeightsLayout, dtype: str, memory: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Tensors by name, as they lie in memory [num_bytes] of uint8."""
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
    stored = _map_files(checkpoint, _ignore)
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


def _mapped(checkpoint: Checkpoint, dtype: str, progress: Progress) -> dict[str, Weight]:
    """Matrices in the files, vectors in `dtype`."""
    return {
        name: Weight.plain(values.to(getattr(torch, dtype)) if values.dim() == 1 else values)
        for name, values in (
            (name, stored.values) for name, stored in _map_files(checkpoint, progress).items()
        )
    }


def _map_files(checkpoint: Checkpoint, progress: Progress) -> dict[str, Stored]:
    end_by_file: dict[Path, int] = {}
    for tensor in checkpoint.tensors.values():
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
        for name, tensor in checkpoint.tensors.items()
    }


def _map_file(path: Path, end: int) -> torch.Tensor:
    """All bytes of a file, its pages being read ahead."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise unreadable(path, error, "cannot open") from error
    try:
        file_bytes = os.fstat(fd).st_size
        if file_bytes < end:  # reading past its end would be a fatal signal, not an exception
            what = f"the file has shrunk to {file_bytes} bytes, its weights end at {end}"
            raise CheckpointError(what, where=str(path), hint="download the file again")
        # A private mapping: torch wants writable memory, the file must stay as it is.
        mapped = mmap.mmap(fd, file_bytes, access=mmap.ACCESS_COPY)
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
    """Progress that nobody asked for."""
