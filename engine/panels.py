"""The layout of quantised matrices for the kernels, as engine/kernels/quantised.h has it.

Owns: its numbers, and which block formats have it.
Invariant: the C file has the same numbers; a test packs and multiplies.
Never: touches data.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    """Of a row and a group: a scale, and perhaps a minimum."""
    head_bytes: int = 0
    """Of a row and a block: what the groups' scales are multiplied by."""

    def row_bytes(self, depth: int) -> int:
        """Of a row of so many values, beside the others of its panel."""
        groups = depth // self.group
        codes = depth * self.code_bits // 8
        return codes + groups * self.scale_bytes + depth // BLOCK_VALUES * self.head_bytes


FORMS = {
    "q4_0": Form(4, 32, 2),
    "q4_1": Form(4, 32, 4),
    "q4_k": Form(4, 32, 2, 4),
    "q8_0": Form(8, 32, 2),
    "q5_1": Form(8, 32, 4),
    "q5_k": Form(8, 32, 2, 4),
    "q6_k": Form(8, 16, 1, 2),
}
"""By block format. Five and six bits take a byte each here."""
FORM_BY_KIND = {kind: kind for kind in FORMS} | {"q5_0": "q8_0"}
"""Of formats that are packed, the form's name: five bits and a scale are eight bits and a scale."""


def panels_shape(form: str, num_rows: int, depth: int) -> tuple[int, int]:
    """[panels, bytes of a panel] of a matrix [num_rows, depth]."""
    return -(-num_rows // PANEL_ROWS), PANEL_ROWS * FORMS[form].row_bytes(depth)
