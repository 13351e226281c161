"""Describe a weight in memory: its data, scales and scheme; pack it into panels.

Invariant: a Weight's scheme is one of SCHEMES, and its data are of the dtype that the scheme
has.
Invariant: a packed matrix is the stored one rounded to bfloat16, and nothing else.
Invariant: a packed matrix has the values of its blocks, to the last bit.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  # its name everywhere

from engine.checkpoint.packed_layouts import (
    BLOCK_VALUES,
    FORMS,
    FP8_ROW_END_BYTES,
    FP8_ROWS,
    PANEL_ROWS,
    Form,
    packed_shape,
    panels_shape,
)
from engine.checkpoint.tensor_info import BLOCKS, TensorInfo
from engine.checkpoint.weights_layout import PanelsLayout, WeightsLayout
from engine.errors import CheckpointError
from engine.kernels.cpu import load_kernels
from engine.worker.model.dequantise import Parts, parts_of
from engine.worker.model.finite import check_finite
from engine.worker.model.stored_tensors import Stored, StoredPart

SCHEMES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "bfloat16_pairs": torch.bfloat16,
    **{f"{form}_panels": torch.uint8 for form in FORMS},
    **{f"{kind}_rows": torch.uint8 for kind in BLOCKS},
    FP8_ROWS: torch.uint8,
}
"""Dtypes of data by scheme.

The first three are plain: data are the values. Pairs are packed for the kernels: [panels, pairs of
a row, rows of a panel, 2]. Quantised matrices have their scales among their data. As panels for the
kernels they are [panels, bytes of a panel]; as the file's blocks, [rows, bytes of a row]. FP8 for
products with FP8 has its scale in each row."""
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
    """Shape of the values, in any storage."""

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
        """Hold values as they are; the scheme is named after their dtype."""
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


class MatrixRows(NamedTuple):
    """The first rows of a matrix, as they are multiplied here, and their values."""

    weight: Weight
    values: torch.Tensor
    """float32 [num_rows, depth]."""

    @property
    def widened(self) -> MatrixRows:
        """The same rows without a form."""
        return MatrixRows(Weight.plain(self.values), self.values)


_PIECE_VALUES = 4 << 20  # converted between two looks at the clock: some milliseconds


def pack_weights(
    stored: dict[str, Weight],
    tensors: Mapping[str, TensorInfo],
    layout: WeightsLayout,
    arena: mmap.mmap,
    share: tuple[int, int] | None,
    progress: Callable[[int, int], None],
) -> dict[str, Weight]:
    """Pack matrices in pairs; return them by name.

    Args:
        stored: the plain matrices, by the names of their tensors.
        tensors: where these are from.
        layout: where the packed ones lie, of packed_layout().
        arena: shared memory of the layout's size.
        share: (index, count) of the part to fill; None if it is filled.
        progress: called with (bytes done, bytes to do).

    Raises:
        CheckpointError: a value is infinite, or no number.
        ValueError: the arena is smaller than the layout.
    """
    memory = memory_of(arena, layout.num_bytes).view(torch.bfloat16)
    packed = {}
    for name, source in layout.source_by_packed.items():
        num_rows, depth = stored[source].shape
        shape, first = packed_shape(num_rows, depth), layout.offset_by_name[name] // 2
        data = memory[first : first + math.prod(shape)].view(shape)
        packed[name] = Weight(data, None, "bfloat16_pairs", (num_rows, depth))

    def pack(name: str, first: int, end: int) -> None:
        source = layout.source_by_packed[name]
        pack_pairs(stored[source], packed[name], first, end)
        check_finite(packed[name].data[first:end], tensors[source])

    fill(packed, layout.num_bytes, share, progress, pack)
    return packed


def memory_of(arena: mmap.mmap, num_bytes: int) -> torch.Tensor:
    """View an arena as uint8 [its bytes].

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


def packed_in_pairs(stored: Weight) -> Weight:
    """Pack a matrix into memory of its own."""
    data = torch.empty(packed_shape(*stored.shape), dtype=torch.bfloat16)
    packed = Weight(data, None, "bfloat16_pairs", stored.shape)
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


def packed_weights(
    stored: dict[str, Stored],
    layout: PanelsLayout,
    memory: torch.Tensor,
    share: tuple[int, int] | None,
    progress: Callable[[int, int], None],
) -> dict[str, Weight]:
    """Pack matrices in panels; return them by name.

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


def pack_panels(
    stored: Stored | StoredPart, form: str, panels: torch.Tensor, first: int, end: int
) -> None:
    """Fill panels [first, end) of a matrix, uint8 [num_panels, bytes of a panel]."""
    last = min(end * PANEL_ROWS, stored.num_rows)
    if form == FP8_ROWS:
        panels[first:end] = _fp8_rows(stored.parts(first * PANEL_ROWS, last, None))
        return
    parts = stored.parts(first * PANEL_ROWS, last, form)
    panels[first:end] = panels_of(parts, FORMS[form])


def panels_of(parts: Parts, form: Form) -> torch.Tensor:
    """Lay out rows in parts as the kernels read them, uint8 [panels, bytes of a panel]."""
    num_rows, depth = parts.codes.shape
    missing = -num_rows % PANEL_ROWS  # rows of the last panel: zeros; their products are unused
    codes = F.pad(parts.codes.view(torch.uint8), (0, -depth % form.group, 0, missing))
    bits = form.code_bits
    if bits < 4:
        groups = list(_by_panel(0, _words(codes & 3, 2, form.group)))
    else:
        groups = [_lanes(codes, form.group, 8 if bits == 8 else 4)]
    if bits == 3:
        words = _words(codes >> 2, 1, form.group)
        groups += _by_panel(0, words[..., ::2] | (words[..., 1::2] << 4))
    if 4 < bits < 8:
        groups += _by_panel(0, _words(codes >> 4, bits - 4, form.group))
    heads: list[torch.Tensor | None] = [parts.heads, parts.head_minimums]
    offsets = parts.minimums if parts.zeros is None else parts.zeros
    if form.has_sixes:
        assert offsets is not None
        heads += _sixes(parts.scales, offsets)
    elif bits == 2:
        assert offsets is not None
        groups += _by_panel(missing, parts.scales | (offsets << 4))
    elif not form.rounds_inputs:
        groups += _by_panel(missing, parts.scales, offsets)
    packed = torch.cat(groups, -1)
    if form.row_scale_bytes == 8:
        assert parts.row_factors is not None
        factors = [parts.row_factors[..., :4], parts.row_factors[..., 4:]]
        head = torch.cat(list(_by_panel(missing, *factors)), -1)
        return torch.cat((head.flatten(1), packed.flatten(1)), -1)
    if form.row_scale_bytes:
        scales = next(_by_panel(missing, parts.scales[:, :1]))
        return torch.cat((scales.flatten(1), packed.flatten(1)), -1)
    if parts.heads is not None:
        blocks = packed.view(len(packed), -1, BLOCK_VALUES // form.group * packed.shape[-1])
        packed = torch.cat([*_by_panel(missing, *heads), blocks], -1)
    return packed.flatten(1)


def _fp8_rows(parts: Parts) -> torch.Tensor:
    """Lay out rows of codes with a scale behind each, uint8 [panels, bytes of a panel]."""
    codes, scales = parts.codes.view(torch.uint8), parts.scales[:, 0]
    filler = codes.new_zeros(len(codes), FP8_ROW_END_BYTES - scales.shape[1])
    rows = torch.cat((codes, scales, filler), -1)
    return F.pad(rows, (0, 0, 0, -len(rows) % PANEL_ROWS)).view(-1, PANEL_ROWS * rows.shape[1])


def embedded(weight: Weight, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Look up rows of a matrix, [ids, depth], in `dtype`, whether it is plain or in blocks."""
    if weight.scheme in PLAIN:
        return F.embedding(ids, weight.values).to(dtype)
    kind = weight.scheme.removesuffix("_rows")
    return parts_of(weight.data[ids], kind).values().to(dtype)


def _words(codes: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """Pack codes of few bits, [rows, depth], into a word of each row and group, as bytes.

    Value 8 * i + 2 * b + k of a group is in byte b of the word, at place 2 * i + k.
    """
    by_byte = codes.view(len(codes), -1, group // 8, 4, 2)
    shifts = bits * torch.arange(group // 4, dtype=torch.uint8).view(-1, 1, 2)
    return (by_byte << shifts).sum((2, 4), dtype=torch.uint8)


def _sixes(scales: torch.Tensor, minimums: torch.Tensor) -> list[torch.Tensor]:
    """Pack six-bit scales and minimums, [rows, groups, 1], as a block's three words.

    The first four groups have a byte each, with two bits of the other four above them. The other
    groups' lower bits are in the halves of the third word's bytes.
    """
    s, m = (each.view(len(each), -1, 2, 4).unbind(2) for each in (scales, minimums))
    low, middle = (each[0] | (each[1] >> 4 << 6) for each in (s, m))
    return [low, middle, (s[1] & 15) | (m[1] << 4)]


def _lanes(codes: torch.Tensor, group: int, bits: int) -> torch.Tensor:
    """Lay out codes of panels, [rows, depth], for the kernels: uint8 [panels, groups, bytes].

    Of codes with more than four bits, these are the lowest four.
    """
    num_panels, depth = len(codes) // PANEL_ROWS, codes.shape[1]
    if bits == 8:
        by_value = codes.view(num_panels, PANEL_ROWS, depth).transpose(1, 2).contiguous()
        return by_value.view(num_panels, depth // group, group * PANEL_ROWS)
    pairs = codes.view(num_panels, PANEL_ROWS, depth // 8, 4, 2)
    bytes_ = (pairs[..., 0] & 15 | (pairs[..., 1] << 4)).transpose(1, 2).contiguous()
    return bytes_.view(num_panels, depth // group, group * PANEL_ROWS // 2)


def _by_panel(num_missing: int, *tensors: torch.Tensor | None) -> Iterator[torch.Tensor]:
    """Turn each [rows, groups, bytes] into [panels, groups, rows of a panel * bytes]."""
    for each in tensors:
        if each is not None:
            padded = F.pad(each, (0, 0, 0, 0, 0, num_missing))
            rows, groups, size = padded.shape
            by_group = padded.view(rows // PANEL_ROWS, PANEL_ROWS, groups, size).transpose(1, 2)
            yield by_group.reshape(rows // PANEL_ROWS, groups, PANEL_ROWS * size)
