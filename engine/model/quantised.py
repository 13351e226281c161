"""Quantised matrices packed into panels, in one arena that all workers read; rows for look-ups.

Owns: turning blocks into panels, a share by each worker.
Invariant: a packed matrix has the values of its blocks, to the last bit.
Never: decides what is packed, or where (engine.checkpoint does).
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F  # noqa: N812  # its name everywhere

from engine.model.blocks import parts_of
from engine.model.packing import fill
from engine.model.stored import Stored
from engine.model.weight import PLAIN, Weight
from engine.panels import BLOCK_VALUES, FORM_BY_KIND, FORMS, PANEL_ROWS, panels_shape
from engine.panels_layout import PanelsLayout


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
    if len(arena) < layout.num_bytes:
        raise ValueError(f"an arena of {len(arena)} bytes does not fit {layout.num_bytes}")
    memory = torch.frombuffer(arena, dtype=torch.uint8)
    packed = {}
    for name, (offset, source) in layout.panels.items():
        info = stored[source].info
        num_rows, depth = info.shape
        form = FORM_BY_KIND[info.dtype]
        num_panels, num_bytes = panels_shape(form, num_rows, depth)
        data = memory[offset : offset + num_panels * num_bytes].view(num_panels, num_bytes)
        packed[name] = Weight(data, None, f"{form}_panels", (num_rows, depth))
    fill(
        packed,
        layout.num_bytes,
        share,
        progress,
        lambda name, first, end: pack_panels(
            stored[layout.panels[name][1]], packed[name].data, first, end
        ),
    )
    return packed


def pack_panels(stored: Stored, panels: torch.Tensor, first: int, end: int) -> None:
    """Fill panels [first, end) of a matrix, uint8 [num_panels, bytes of a panel]."""
    last = min(end * PANEL_ROWS, stored.num_rows)
    parts = stored.parts(first * PANEL_ROWS, last)
    missing = end * PANEL_ROWS - last  # rows of the last panel: zeros, whose products nobody reads
    form = FORMS[FORM_BY_KIND[stored.info.dtype]]
    codes = _lanes(F.pad(parts.codes, (0, 0, 0, missing)), form.group, form.code_bits)
    packed = torch.cat([codes, *_by_panel(parts.scales, parts.minimums, missing)], -1)
    if parts.heads is not None:
        blocks = packed.view(end - first, -1, BLOCK_VALUES // form.group * packed.shape[-1])
        packed = torch.cat([*_by_panel(parts.heads, parts.head_minimums, missing), blocks], -1)
    panels[first:end] = packed.flatten(1)


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
        return by_value.view(torch.uint8).view(num_panels, depth // group, group * PANEL_ROWS)
    pairs = codes.view(torch.uint8).view(num_panels, PANEL_ROWS, depth // 8, 4, 2)
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
