"""Quantised matrices packed into panels, in one arena that all workers read; rows for look-ups.

Owns: turning blocks into panels, a share by each worker.
Invariant: a packed matrix has the values of its blocks, to the last bit.
Never: decides what is packed, or where (engine.folder.checkpoint does).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F  # noqa: N812  # its name everywhere

from engine.folder.panels import (
    BLOCK_VALUES,
    FORMS,
    FP8_ROW_END_BYTES,
    FP8_ROWS,
    PANEL_ROWS,
    Form,
    panels_shape,
)
from engine.folder.panels_layout import PanelsLayout
from engine.model.packing import fill
from engine.model.stored_tensors import Parts, Stored, parts_of
from engine.model.weight import PLAIN, Weight


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
