"""Read or quantise rows of a stored tensor in the model's order, whatever the file's layout.

Invariant: rows() gives the same values however it is cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod

import torch

from engine.checkpoint.tensor_info import BLOCKS, TensorInfo
from engine.worker.model.dequantise import (
    Parts,
    SeparateMatrix,
    joined_columns,
    joined_rows,
    parts_of,
)
from engine.worker.model.finite import check_blocks, check_finite

GROUP = 32
_DRAWN_IN = (1.0, 0.95, 0.9, 0.85)
"""Shares of a group's range that are tried for 4 bits; the one that errs least is taken."""


def quantised(values: torch.Tensor, form: str) -> Parts:
    """Compute the nearest codes and scales of a form: `q8_0`, `q4_1` or `int8_row`.

    Args:
        values: float32 [num_rows, depth], in whole groups.
        form: of engine.checkpoint.quantisation; `int8_row` has a scale for the row.
    """
    if form == "int8_row":
        return _int8(values)
    groups = values.view(len(values), -1, GROUP)
    return _q8(groups) if form == "q8_0" else _q4(groups)


def _int8(rows: torch.Tensor) -> Parts:
    scales = rows.abs().amax(-1, keepdim=True) / 127
    codes = (rows / torch.where(scales == 0, 1, scales)).round_()
    return Parts(codes.to(torch.int8), scales[..., None].view(torch.uint8))


def _q8(groups: torch.Tensor) -> Parts:
    scales = (groups.abs().amax(-1, keepdim=True) / 127).half()
    codes = (groups * _inverse(scales)).round_().clamp_(-127, 127)
    return Parts(codes.to(torch.int8).flatten(1), scales.view(torch.uint8))


def _q4(groups: torch.Tensor) -> Parts:
    low, high = groups.aminmax(dim=-1, keepdim=True)
    middle, reach = (low + high) / 2, (high - low) / 2
    best: tuple[torch.Tensor, ...] | None = None
    for share in _DRAWN_IN:
        minimums = (middle - reach * share).half()
        scales = (reach * (share * 2 / 15)).half()
        codes = ((groups - minimums) * _inverse(scales)).round_().clamp_(0, 15)
        errors = torch.addcmul(minimums.float(), codes, scales.float()).sub_(groups).square_()
        found = errors.sum(-1, keepdim=True), codes, scales, minimums
        if best is None:
            best = found
        else:
            is_better = found[0] < best[0]
            pairs = zip(found, best, strict=True)
            best = tuple(torch.where(is_better, new, old) for new, old in pairs)
    assert best is not None
    _, codes, scales, minimums = best
    stored = scales.view(torch.uint8), minimums.view(torch.uint8)
    return Parts(codes.to(torch.int8).flatten(1), *stored)


def _inverse(scales: torch.Tensor) -> torch.Tensor:
    """Invert in float32; 0, of a group of equal values, stays 0."""
    wide = scales.float()
    return torch.where(wide == 0, 0.0, 1 / wide)


_ITEMS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""The dtype in which items are moved, by their bytes."""


class Stored:
    """One tensor in a mapped file."""

    def __init__(self, info: TensorInfo, data: Mapping[str, torch.Tensor]) -> None:
        """Data are uint8, all bytes from the first to the last, of each part by its role."""
        self.info = info
        self.num_rows, self.depth = info.shape[0], prod(info.shape[1:])
        self._apart: SeparateMatrix | None = None
        if info.apart is not None:
            self._apart = SeparateMatrix(info, data)
        else:
            self._data, self._scales = data["codes"], data.get("scales")

    @property
    def values(self) -> torch.Tensor:
        """The bytes viewed as values, in place; only where they are values in order."""
        dtype = getattr(torch, self.info.dtype)
        # only on the way into an arena: weights_layout never maps such a file for serving
        data = self._data if self.info.start % dtype.itemsize == 0 else self._data.clone()
        return data.view(dtype).view(self.info.shape)

    @property
    def blocks(self) -> torch.Tensor:
        """All bytes, uint8 [num_rows, bytes of a row], in place; only where rows are in order."""
        return self._data.view(self.num_rows, -1)

    def rows(self, first: int, end: int) -> torch.Tensor:
        """Read values [end - first, depth] of rows [first, end); of a vector, a value is a row."""
        if self.info.is_quantised:
            values = self._parts(first, end, None).values()
        else:
            values = self._stored_rows(first, end).view(getattr(torch, self.info.dtype))
        if self.info.is_negative_exp:
            values = values.float().neg().log()
        elif self.info.shift:
            values = values.float() + self.info.shift
        check_finite(values, self.info)
        return values

    def parts(
        self, first: int, end: int, form: str | None, columns: tuple[int, int] | None = None
    ) -> Parts:
        """Read rows as codes and scales of a form: the stored ones, or the nearest.

        form: None: the stored form, which must exist.
        columns: the first one and the one behind the last, between groups of codes; None: all.
        """
        if self.info.is_quantised or form is None:
            return self._parts(first, end, form, columns)
        rows = self.rows(first, end)
        return quantised((rows if columns is None else rows[:, slice(*columns)]).float(), form)

    def _parts(
        self, first: int, end: int, form: str | None, columns: tuple[int, int] | None = None
    ) -> Parts:
        if self._apart is not None:
            found = self._apart.parts(self._wanted(first, end), form)
            return found if columns is None else found.of_columns(*columns)
        blocks = self._stored_rows(first, end)
        if columns is not None:
            num_values, num_bytes = BLOCKS[self.info.dtype]
            first_byte, end_byte = (each // num_values * num_bytes for each in columns)
            blocks = blocks[:, first_byte:end_byte]
        check_blocks(blocks, self.info)
        return parts_of(blocks, self.info.dtype)

    def _stored_rows(self, first: int, end: int) -> torch.Tensor:
        """Read uint8 [end - first, bytes of a row], in the order in which the model wants them."""
        if self.info.strides is not None:
            return self._strided_rows(first, end)
        stored = self._data.view(self.num_rows, -1)
        if self.info.head_rows or self.info.row_runs:
            return stored[self._wanted(first, end)]
        rows = stored[first:end]
        item_bytes = 1 if self.info.is_quantised else rows.shape[1] // self.depth
        return rows if self.info.start % item_bytes == 0 else rows.clone()

    def _wanted(self, first: int, end: int) -> torch.Tensor:
        """Number the stored rows that the model wants as its rows [first, end)."""
        if self.info.row_runs:
            runs = [torch.arange(start, start + count) for start, count in self.info.row_runs]
            return torch.cat(runs)[first:end]
        wanted, size = torch.arange(first, end), self.info.head_rows
        if not size:
            return wanted
        head, place = wanted // size, wanted % size
        half = (self.info.turned_rows or size) // 2
        place = torch.where(place < 2 * half, place % half * 2 + place // half, place)
        return head * size + place

    def _strided_rows(self, first: int, end: int) -> torch.Tensor:
        """Read rows that do not lie end to end, with blocks' scales before them."""
        row, item = self.info.strides or (0, 0)
        shape, strides = (end - first, self.info.row_items), (row, item)

        def items(data: torch.Tensor, num_bytes: int) -> torch.Tensor:
            wide = _ITEMS[num_bytes]
            is_aligned = data.storage_offset() % num_bytes == 0
            whole = (data if is_aligned else data.clone()).view(wide)
            offset = whole.storage_offset() + first * row
            return whole.as_strided(shape, strides, offset).contiguous()

        if self.info.scales is None or self._scales is None:
            return items(self._data, self.info.item_bytes).view(torch.uint8)
        blocks = self._data.view(-1, self.info.item_bytes)
        offset = blocks.storage_offset() + first * row * self.info.item_bytes
        spread = tuple(stride * self.info.item_bytes for stride in strides)
        parts = blocks.as_strided((*shape, self.info.item_bytes), (*spread, 1), offset)
        return torch.cat((items(self._scales, 1)[..., None], parts), -1).flatten(1)


class StoredPart:
    """Some rows of a stored tensor, or some columns of all its rows, as a tensor of its own.

    Args:
        runs: of rows, each as the first one and the one behind the last.
        columns: runs of columns, which begin and end between groups of codes; None: all.
    """

    def __init__(
        self,
        stored: Stored,
        runs: Sequence[tuple[int, int]],
        columns: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        self._stored, self._runs, self._columns = stored, runs, columns
        self.num_rows = sum(end - first for first, end in runs)
        self.depth = sum(end - first for first, end in columns or [(0, stored.depth)])

    def rows(self, first: int, end: int) -> torch.Tensor:
        """Read rows [first, end), as Stored's; a view of the file where they lie there."""
        found = [self._stored.rows(*run) for run in self._within(first, end)]
        rows = found[0] if len(found) == 1 else torch.cat(found)
        if self._columns is None:
            return rows
        columns = [rows[:, slice(*run)] for run in self._columns]
        return columns[0] if len(columns) == 1 else torch.cat(columns, 1)

    def parts(self, first: int, end: int, form: str | None) -> Parts:
        """Read rows as codes and scales, as Stored does."""
        runs = list(self._within(first, end))
        wanted: Sequence[tuple[int, int] | None] = self._columns or [None]
        return joined_columns(
            [
                joined_rows([self._stored.parts(*run, form, columns) for run in runs])
                for columns in wanted
            ]
        )

    def _within(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the stored rows, in runs, of this part's rows [first, end)."""
        before = 0
        for start, stop in self._runs:
            inner = max(start, start + first - before), min(stop, start + end - before)
            if inner[0] < inner[1]:
                yield inner
            before += stop - start
