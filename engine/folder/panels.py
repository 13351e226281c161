"""How matrices lie for the C kernels: quantised ones in panels, bfloat16 ones in pairs.

Owns: its numbers, and which block formats have it; its two numbers.
Invariant: the C file has the same numbers; a test packs and multiplies.
Never: touches data.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.folder.tensor_info import BLOCKS, TensorInfo

PANEL_ROWS = 16
"""Rows of a matrix that lie together, one in each lane of a vector."""
BLOCK_VALUES = 256
"""Of a row, that share a head, where there is one."""


@dataclass(frozen=True, slots=True)
class Form:
    """How a panel lies in memory: groups of values of all its rows, each codes and then scales."""

    code_bits: int
    group: int
    """Values of a row with one scale."""
    scale_bytes: int
    """Of a row and a group: a scale, and perhaps a minimum or a zero."""
    head_bytes: int = 0
    """Of a row and a block: what the groups' scales are multiplied by, and those that have six
    bits."""
    row_scale_bytes: int = 0
    """Of a row that has one scale for all its values, and inputs of one byte each."""

    @property
    def has_sixes(self) -> bool:
        """True if scales and minimums are six bits each, in the block's head."""
        return self.head_bytes > 2

    def row_bytes(self, depth: int) -> int:
        """Bytes of one row of so many values within its panel; the last group counts as whole."""
        groups = -(-depth // self.group)
        group_bytes = self.group * self.code_bits // 8 + self.scale_bytes
        heads = depth // BLOCK_VALUES * self.head_bytes + self.row_scale_bytes
        return groups * group_bytes + heads


FORMS = {
    "q4_0": Form(4, 32, 2),
    "q4_1": Form(4, 32, 4),
    "q4_k": Form(4, 32, 0, 16),
    "q5_0": Form(5, 32, 2),
    "q5_1": Form(5, 32, 4),
    "q5_k": Form(5, 32, 0, 16),
    "q6_k": Form(6, 16, 1, 2),
    "q8_0": Form(8, 32, 2),
    "mxfp4": Form(4, 32, 1),
    "int4_32": Form(4, 32, 5),
    "int4_128": Form(4, 128, 5),
    "int8_128": Form(8, 128, 4),
    "int8_row": Form(8, 32, 0, row_scale_bytes=4),
    "fp8_128": Form(8, 128, 4),
}
"""By block format, or by kind of codes and values of a group. The last five have scales of float32,
which every format's scale is without being rounded. Products with int8_row are those of inputs that
are rounded to integers of one byte, with one scale each."""
FORM_BY_KIND = {kind: kind for kind in BLOCKS} | {"mxfp4_pairs": "mxfp4"}
"""Of block formats, the form's name."""


def form_of(tensor: TensorInfo) -> str | None:
    """The form of a matrix that is quantised in its file; None: the kernels know none for it."""
    if tensor.apart is not None:
        return tensor.apart.form
    return FORM_BY_KIND.get(tensor.dtype)


FP8_ROWS, FP8_ROW_END_BYTES = "fp8_rows", 16
"""Where a GPU multiplies FP8 by FP8: rows of codes, one behind the other, each with its scale of
float32 behind it, and as many bytes more as keep rows where such products want them."""


def panels_shape(form: str, num_rows: int, depth: int) -> tuple[int, int]:
    """[panels, bytes of a panel] of a matrix [num_rows, depth]."""
    if form == FP8_ROWS:
        return -(-num_rows // PANEL_ROWS), PANEL_ROWS * (depth + FP8_ROW_END_BYTES)
    return -(-num_rows // PANEL_ROWS), PANEL_ROWS * FORMS[form].row_bytes(depth)


# The layout of matrices that are packed in pairs, as engine/kernels/pairs.h has it.
# Invariant: the C files have the same numbers; a test packs and looks.
# Never: touches data.


TILE_DEPTH = 32
"""Values of a row in a tile of a matrix unit; packed rows are whole tiles."""


def packed_shape(num_rows: int, depth: int) -> tuple[int, int, int, int]:
    """[panels, pairs of a row, rows of a panel, 2] of a matrix [num_rows, depth]."""
    pairs = -(-depth // TILE_DEPTH) * TILE_DEPTH // 2
    return -(-num_rows // PANEL_ROWS), pairs, PANEL_ROWS, 2
