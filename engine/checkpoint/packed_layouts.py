"""Describe how matrices lie in memory for the C kernels: quantised in panels, bfloat16 in pairs.

Invariant: the C files have the same numbers; a test packs and multiplies.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.checkpoint.tensor_info import BLOCKS, TensorInfo

PANEL_ROWS = 16
"""Rows of a matrix that lie together, one in each lane of a vector."""
BLOCK_VALUES = 256
"""Values of a row that share a head, if the form has heads."""


@dataclass(frozen=True, slots=True)
class Form:
    """How a panel lies in memory: groups of values of all its rows, each codes and then scales."""

    code_bits: int
    group: int
    """Values of a row with one scale."""
    scale_bytes: int
    """Bytes per row and group: a scale, and perhaps a minimum or a zero."""
    head_bytes: int = 0
    """Bytes per row and block: factors of the groups' scales, and six-bit scales."""
    row_scale_bytes: int = 0
    """Bytes of a row's own factors."""
    rounds_inputs: bool = False
    """Products round their inputs to integers of one byte."""

    @property
    def has_sixes(self) -> bool:
        """Return whether scales and minimums are six bits each, in the block's head."""
        return self.head_bytes > 4

    def row_bytes(self, depth: int) -> int:
        """Compute the bytes of a row in its panel; the last group counts as whole."""
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
    "q2_k": Form(2, 16, 1, 4),
    "q3_k": Form(3, 16, 1, 2),
    "iq4_nl": Form(4, 32, 2),
    "iq4_xs": Form(4, 32, 1, 2),
    "mxfp4": Form(4, 32, 1),
    "nvfp4": Form(4, 16, 1, row_scale_bytes=8),
    "int4_32": Form(4, 32, 5),
    "int4_128": Form(4, 128, 5),
    "int8_128": Form(8, 128, 4),
    "int8_row": Form(8, 32, 0, row_scale_bytes=4, rounds_inputs=True),
    "fp8_128": Form(8, 128, 4),
}
"""Forms by block format, or by kind of codes and values of a group.

The last five have scales of float32, which hold every format's scale without rounding. int8_row
multiplies inputs that are rounded to bytes, with one scale each."""
FORM_BY_KIND = {kind: kind for kind in BLOCKS} | {"mxfp4_pairs": "mxfp4"}
"""The form's name by block format."""
CPU_FORMS = frozenset({"q2_k", "q3_k", "iq4_nl", "iq4_xs", "nvfp4"})
"""Forms that no kernel for GPUs reads."""


def form_of(tensor: TensorInfo) -> str | None:
    """Return the form of a matrix that its file quantises; None: the kernels know none."""
    if tensor.apart is not None:
        return tensor.apart.form
    return FORM_BY_KIND.get(tensor.dtype)


FP8_ROWS, FP8_ROW_END_BYTES = "fp8_rows", 16
"""A GPU's form for products of FP8 with FP8.

Behind each row of codes are its float32 scale and padding for alignment."""


def panels_shape(form: str, num_rows: int, depth: int) -> tuple[int, int]:
    """Compute [panels, bytes of a panel] of a matrix [num_rows, depth]."""
    if form == FP8_ROWS:
        return -(-num_rows // PANEL_ROWS), PANEL_ROWS * (depth + FP8_ROW_END_BYTES)
    return -(-num_rows // PANEL_ROWS), PANEL_ROWS * FORMS[form].row_bytes(depth)


TILE_DEPTH = 32
"""Values of a row in a tile of a matrix unit; packed rows are whole tiles."""


def packed_shape(num_rows: int, depth: int) -> tuple[int, int, int, int]:
    """Compute [panels, pairs of a row, rows of a panel, 2] of a matrix [num_rows, depth]."""
    pairs = -(-depth // TILE_DEPTH) * TILE_DEPTH // 2
    return -(-num_rows // PANEL_ROWS), pairs, PANEL_ROWS, 2
