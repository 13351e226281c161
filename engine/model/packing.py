"""Matrices packed in pairs, in one arena that all workers read.

Owns: filling the arena, a share by each worker.
Invariant: a packed matrix is the stored one rounded to bfloat16, and nothing else.
Never: decides whether to pack, or where (boot and engine.folder.checkpoint do).
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator

import torch

from engine.folder.checkpoint import WeightsLayout
from engine.folder.panels import PANEL_ROWS, packed_shape
from engine.kernels.cpu import load_kernels
from engine.model.weight import Weight

_PIECE_VALUES = 4 << 20  # packed between two reports: some milliseconds


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
        lambda name, first, end: pack_panels(
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
    todo = [] if share is None else list(_pieces(packed, *share))
    total = sum(packed[name].data[first:end].nbytes for name, first, end in todo)
    done = 0
    for name, first, end in todo:
        pack(name, first, end)
        done += packed[name].data[first:end].nbytes
        progress(done, total)
    if not todo:
        progress(num_bytes, num_bytes)


def pack_panels(stored: Weight, packed: Weight, first: int, end: int) -> None:
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
    pack_panels(stored, packed, 0, len(data))
    return packed


def _pieces(packed: dict[str, Weight], index: int, count: int) -> Iterator[tuple[str, int, int]]:
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
