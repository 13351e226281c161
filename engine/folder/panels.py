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
    """Of a row and a block: what the groups' scales are multiplied by."""

    def row_bytes(self, depth: int) -> int:
        """Of a row of so many values, beside the others of its panel; the last group is whole."""
        groups = -(-depth // self.group)
        group_bytes = self.group * self.code_bits // 8 + self.scale_bytes
        return groups * group_bytes + depth // BLOCK_VALUES * self.head_bytes


FORMS = {
    "q4_0": Form(4, 32, 2),
    "q4_1": Form(4, 32, 4),
    "q4_k": Form(4, 32, 2, 4),
    "q8_0": Form(8, 32, 2),
    "q5_1": Form(8, 32, 4),
    "q5_k": Form(8, 32, 2, 4),
    "q6_k": Form(8, 16, 1, 2),
    "mxfp4": Form(4, 32, 1),
    "int4_32": Form(4, 32, 5),
    "int4_128": Form(4, 128, 5),
    "int8_128": Form(8, 128, 4),
    "fp8_128": Form(8, 128, 4),
}
"""By block format, or by kind of codes and values of a group. Five and six bits take a byte each
here. The last four have scales of float32, which every format's scale is without being rounded."""
FORM_BY_KIND = {kind: kind for kind in BLOCKS} | {"q5_0": "q8_0", "mxfp4_pairs": "mxfp4"}
"""Of block formats, the form's name: five bits and a scale are eight bits and a scale."""


def form_of(tensor: TensorInfo) -> str | None:
    """The form of a matrix that is quantised in its file; None: the kernels know none for it."""
    if tensor.apart is not None:
        return tensor.apart.form
    return FORM_BY_KIND.get(tensor.dtype)


def panels_shape(form: str, num_rows: int, depth: int) -> tuple[int, int]:
    """[panels, bytes of a panel] of a matrix [num_rows, depth]."""
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
