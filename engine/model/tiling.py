"""How attention is cut into programs of a GPU: tiles of queries and keys, parts of a sequence.

Owns: the numbers that kernels are launched with, chosen by shape and not by trial.
Invariant: a choice depends on shapes and on what the device has, so that it is the same in every
step of one shape, and a launch can be captured.
Never: touches a device.
"""

from __future__ import annotations

from dataclasses import dataclass

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
