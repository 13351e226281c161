"""A step's sequences as every paged attention on a GPU reads them, and how its work is cut.

Owns: the numbers that kernels are launched with, chosen by shape and not by trial; the packing of
block tables and lengths, in one copy to the device.
Invariant: int32, contiguous; query i of a sequence sees the keys at positions up to
seq_len - query_len + i; a sequence of length 0 sees none, and its output is 0.
Never: reads a device value back, depends on the layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.nn.functional import pad

from engine.model.attention import StepBatch

# How attention is cut into programs of a GPU: tiles of queries and keys, parts of a sequence.
# Invariant: a choice depends on shapes and on what the device has, so that it is the same in every
# step of one shape, and a launch can be captured.
# Never: touches a device.


_MIN_KEYS_PER_PART = 128
_PROGRAMS_PER_PROCESSOR = 2
MAX_PARTS = 64
"""Of one sequence's keys."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """What one program works on, and with how many warps."""

    num_rows: int
    """Queries times the heads that share a key head."""
    num_keys: int
    num_warps: int


def several_queries_tiling(
    group_size: int, head_dim: int, itemsize: int, shared_bytes: int
) -> Tiling:
    """Tiles for sequences with several queries.

    Args:
        group_size: query heads per key head.
        head_dim: of a head.
        itemsize: bytes of one value; tensor cores multiply those of 2.
        shared_bytes: shared memory that one program may have.
    """
    rows = 128 if itemsize == 2 else 32
    return _fitting(rows, 8, group_size, padded_dim(head_dim) * itemsize, shared_bytes)


def single_query_tiling(group_size: int, head_dim: int, itemsize: int, shared_bytes: int) -> Tiling:
    """Tiles for single queries: as few rows as tensor cores take, two programs to a processor."""
    shared_bytes //= _PROGRAMS_PER_PROCESSOR
    return _fitting(16, 4, group_size, padded_dim(head_dim) * itemsize, shared_bytes)


def _fitting(
    num_rows: int, num_warps: int, group_size: int, row_bytes: int, shared_bytes: int
) -> Tiling:
    """As many keys as registers hold, and fewer until what is staged fits; then fewer rows."""
    least_rows = max(16, next_power_of_2(group_size))
    rows, keys = max(num_rows, least_rows), 64 if row_bytes <= 256 else 32
    while _staged_rows(rows, keys, row_bytes) * row_bytes > shared_bytes and (
        keys > 16 or rows > least_rows
    ):
        keys, rows = (keys // 2, rows) if keys > 16 else (keys, rows // 2)
    return Tiling(rows, keys, num_warps)


def _staged_rows(num_rows: int, num_keys: int, row_bytes: int) -> int:
    """Of queries, keys and values in shared memory at once; what the compiler makes of it, at most.

    Three tiles of keys and of values are on their way or in use. Narrow queries are in registers by
    the time that so many are; wide ones stay.
    """
    tiles = 6 * num_keys
    return num_rows + tiles if row_bytes > 256 else max(num_rows + 4 * num_keys, tiles)


def num_parts(
    num_sequences: int, num_kv_heads: int, max_visible_keys: int, num_processors: int
) -> int:
    """In how many parts to cut each sequence's keys: enough programs, none with too few keys."""
    programs = num_sequences * num_kv_heads
    wanted = -(-_PROGRAMS_PER_PROCESSOR * num_processors // programs)
    return max(1, min(wanted, max_visible_keys // _MIN_KEYS_PER_PART, MAX_PARTS))


def next_power_of_2(number: int) -> int:
    """The smallest that is no less."""
    return 1 << (number - 1).bit_length()


def padded_dim(head_dim: int) -> int:
    """How wide a head is in a tile."""
    return max(16, next_power_of_2(head_dim))


# --------------------------------------------------------------------------------------------------


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
    """[num_tiles, 2]: sequence and first query of each run of queries that one program serves, the
    longest work first; sequences with a single query have none."""
    max_query_len: int
    max_seq_len: int
    """At least the longest: it chooses grids, and may be the bound of a captured graph."""
    has_single_queries: bool


def paged_step(batch: StepBatch, device: torch.device, queries_per_tile: int) -> PagedStep:
    """Pack a step's sequences.

    Args:
        batch: the step.
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
    )


def _captured_step(batch: StepBatch, device: torch.device) -> PagedStep:
    """A decode step whose tables and lengths are on the device already, and change there."""
    tables, lens = batch.device_tables, batch.device_lens
    assert tables is not None
    assert lens is not None, "a step without host tables has those of the device"
    starts = torch.arange(len(batch.query_lens) + 1, dtype=torch.int32, device=device)
    key_starts = pad(lens.cumsum(0, dtype=torch.int32), (1, 0))
    no_tiles = starts.new_empty(0, 2)
    return PagedStep(tables, starts, key_starts, lens, no_tiles, 1, max(batch.seq_lens), True)


def _query_tiles(
    query_lens: Sequence[int], seq_lens: Sequence[int], queries_per_tile: int
) -> list[tuple[int, int]]:
    """Longest work first, so that no program is left alone with it at the end."""

    def tiles() -> Iterator[tuple[int, int, int]]:
        for i, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
            if query_len > 1 and queries_per_tile:
                for first in range(0, query_len, queries_per_tile):
                    yield query_len - first - seq_len, i, first

    return [(i, first) for _, i, first in sorted(tiles())]
