"""Build a step's block tables and lengths on the GPU for all attention kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.nn.functional import pad

from engine.worker.model.attention import StepBatch


@dataclass(frozen=True, slots=True)
class PagedStep:
    """Block tables, lengths and query offsets of a step's sequences, on the device."""

    block_tables: torch.Tensor
    """[num_sequences, num_columns] int32, as all here; unused columns name block 0."""
    query_starts: torch.Tensor
    """[num_sequences + 1]: each sequence's first row in the step, and the end."""
    key_starts: torch.Tensor
    """[num_sequences + 1]: the sums of seq_lens, which flash-attn reads lengths from."""
    seq_lens: torch.Tensor
    """[num_sequences]: tokens with the new ones."""
    query_tiles: torch.Tensor
    """[num_tiles, 2]: sequence and first query of each program's queries, the longest first.

    Sequences with a single query have none."""
    max_query_len: int
    max_seq_len: int
    """An upper bound of the lengths: it chooses grids, and may be a captured graph's."""
    has_single_queries: bool
    max_tiled_len: int = 0
    """The longest of the sequences with tiles."""


def paged_step(batch: StepBatch, device: torch.device, queries_per_tile: int) -> PagedStep:
    """Pack a step's sequences.

    Args:
        device: where attention runs.
        queries_per_tile: of one program of the kernel for several queries; 0: no tiles are wanted.
    """
    if not batch.block_tables:
        return _captured_step(batch, device)
    num_sequences = len(batch.query_lens)
    num_columns = max(map(len, batch.block_tables))
    tiles = _query_tiles(batch.query_lens, batch.seq_lens, queries_per_tile)
    parts = [
        [i for table in batch.block_tables for i in (*table, *[0] * (num_columns - len(table)))],
        list(accumulate(batch.query_lens, initial=0)),
        list(accumulate(batch.seq_lens, initial=0)),
        batch.seq_lens,
        [i for tile in tiles for i in tile],
    ]
    values = [value for part in parts for value in part]
    packed = torch.tensor(values, dtype=torch.int32, pin_memory=device.type == "cuda")
    tables, query_starts, key_starts, seq_lens, query_tiles = torch.split(
        packed.to(device, non_blocking=True), [len(part) for part in parts]
    )
    return PagedStep(
        tables.view(num_sequences, num_columns),
        query_starts,
        key_starts,
        seq_lens,
        query_tiles.view(-1, 2),
        max(batch.query_lens),
        max(batch.seq_lens),
        1 in batch.query_lens,
        max((batch.seq_lens[i] for i, _ in tiles), default=0),
    )


def _captured_step(batch: StepBatch, device: torch.device) -> PagedStep:
    """Make a decode step whose tables and lengths are on the device and change there."""
    tables, lens = batch.device_tables, batch.device_lens
    assert tables is not None
    assert lens is not None, "a step without host tables needs the device's"
    starts = torch.arange(len(batch.query_lens) + 1, dtype=torch.int32, device=device)
    key_starts = pad(lens.cumsum(0, dtype=torch.int32), (1, 0))
    no_tiles = starts.new_empty(0, 2)
    return PagedStep(tables, starts, key_starts, lens, no_tiles, 1, max(batch.seq_lens), True)


def _query_tiles(
    query_lens: Sequence[int], seq_lens: Sequence[int], queries_per_tile: int
) -> list[tuple[int, int]]:
    """List the tiles, the longest work first, so that no program ends alone."""

    def tiles() -> Iterator[tuple[int, int, int]]:
        for i, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
            if query_len > 1 and queries_per_tile:
                for first in range(0, query_len, queries_per_tile):
                    yield query_len - first - seq_len, i, first

    return [(i, first) for _, i, first in sorted(tiles())]
