"""The layout of matrices that are packed in pairs, as engine/kernels/pairs.h has it.

Owns: its two numbers.
Invariant: the C files have the same numbers; a test packs and looks.
Never: touches data.
"""

PANEL_ROWS = 16
"""Rows of a matrix that lie together: of all of them two values, then of all the next two."""
TILE_DEPTH = 32
"""Values of a row in a tile of a matrix unit; packed rows are whole tiles."""


def packed_shape(num_rows: int, depth: int) -> tuple[int, int, int, int]:
    """[panels, pairs of a row, rows of a panel, 2] of a matrix [num_rows, depth]."""
    pairs = -(-depth // TILE_DEPTH) * TILE_DEPTH // 2
    return -(-num_rows // PANEL_ROWS), pairs, PANEL_ROWS, 2
