"""Quantised matrices packed into panels, in one arena that all workers read; rows for look-ups.

Owns: turning blocks into panels, a share by each worker.
Invariant: a packed matrix has the values of its blocks, to the last bit.
Never: decides what is packed, or where (engine.folder.checkpoint does).
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F  # noqa: N812  # its name everywhere

from engine.folder.panels import BLOCK_VALUES, FORMS, PANEL_ROWS, Form, panels_shape
from engine.folder.panels_layout import PanelsLayout
from engine.model.packing import fill, memory_of
from engine.model.stored import Parts, Stored, parts_of
from engine.model.weight import PLAIN, Weight


def packed_weights(
    stored: dict[str, Stored],
    layout: PanelsLayout,
    arena: mmap.mmap,
    share: tuple[int, int] | None,
    progress: Callable[[int, int], None],
) -> dict[str, Weight]:
    """The packed matrices by name.

    Args:
        stored: the tensors in their files.
        layout: where the panels lie.
        arena: shared memory of the layout's size.
        share: (index, count) of the part to fill; None if it is filled.
        progress: called with (bytes done, bytes to do).

    Raises:
        ValueError: the arena is smaller than the layout.
    """
    memory = memory_of(arena, layout.num_bytes)
    packed = {}
    for name, panels in layout.panels.items():
        num_rows, depth = stored[panels.source].info.shape
        num_panels, num_bytes = panels_shape(panels.form, num_rows, depth)
        end = panels.offset + num_panels * num_bytes
        data = memory[panels.offset : end].view(num_panels, num_bytes)
        packed[name] = Weight(data, None, f"{panels.form}_panels", (num_rows, depth))
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
    parts = stored.parts(first * PANEL_ROWS, last, form)
    panels[first:end] = panels_of(parts, FORMS[form])


def panels_of(parts: Parts, form: Form) -> torch.Tensor:
    """Rows in parts as the kernels read them, uint8 [panels, bytes of a panel]."""
    num_rows, depth = parts.codes.shape
    missing = -num_rows % PANEL_ROWS  # rows of the last panel: zeros, whose products nobody reads
    codes = F.pad(parts.codes.view(torch.uint8), (0, -depth % form.group, 0, missing))
    offsets = parts.minimums if parts.zeros is None else parts.zeros
    by_panel = _by_panel(parts.scales, offsets, missing)
    packed = torch.cat([_lanes(codes, form.group, form.code_bits), *by_panel], -1)
    if parts.heads is not None:
        blocks = packed.view(len(packed), -1, BLOCK_VALUES // form.group * packed.shape[-1])
        packed = torch.cat([*_by_panel(parts.heads, parts.head_minimums, missing), blocks], -1)
    return packed.flatten(1)


def embedded(weight: Weight, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows of a matrix, [ids, depth], in `dtype`, whether it is plain or in blocks."""
    if weight.scheme in PLAIN:
        return F.embedding(ids, weight.values).to(dtype)
    kind = weight.scheme.removesuffix("_rows")
    return parts_of(weight.data[ids], kind).values().to(dtype)


def _lanes(codes: torch.Tensor, group: int, bits: int) -> torch.Tensor:
    """Codes of panels, [rows, depth], as the kernels read them: uint8 [panels, groups, bytes]."""
    num_panels, depth = len(codes) // PANEL_ROWS, codes.shape[1]
    if bits == 8:
        by_value = codes.view(num_panels, PANEL_ROWS, depth).transpose(1, 2).contiguous()
        return by_value.view(num_panels, depth // group, group * PANEL_ROWS)
    pairs = codes.view(num_panels, PANEL_ROWS, depth // 8, 4, 2)
    bytes_ = (pairs[..., 0] | (pairs[..., 1] << 4)).transpose(1, 2).contiguous()
    return bytes_.view(num_panels, depth // group, group * PANEL_ROWS // 2)


def _by_panel(
    scales: torch.Tensor, minimums: torch.Tensor | None, num_missing: int
) -> Iterator[torch.Tensor]:
    """Each [rows, groups, bytes] as [panels, groups, rows of a panel * bytes]."""
    for each in (scales, minimums):
        if each is not None:
            padded = F.pad(each, (0, 0, 0, 0, 0, num_missing))
            rows, groups, size = padded.shape
            by_group = padded.view(rows // PANEL_ROWS, PANEL_ROWS, groups, size).transpose(1, 2)
            yield by_group.reshape(rows // PANEL_ROWS, groups, PANEL_ROWS * size)
