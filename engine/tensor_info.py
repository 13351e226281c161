"""Where a tensor lies in a file, and in which form: what both file formats say of their tensors.

Owns: the block formats of quantised values.
Invariant: a TensorInfo lies wholly inside its file.
Never: reads tensor data.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path

BLOCKS = {
    "q4_0": (32, 18),
    "q4_1": (32, 20),
    "q5_0": (32, 22),
    "q5_1": (32, 24),
    "q8_0": (32, 34),
    "q4_k": (256, 144),
    "q5_k": (256, 176),
    "q6_k": (256, 210),
    "mxfp4": (32, 17),
    "mxfp4_pairs": (32, 17),
}
"""Formats of blocks, by their names in GGUF: values of a row in a block, and its bytes. Scales are
in the block, beside the values that they scale. Of mxfp4_pairs, which is no GGUF format, neighbours
share a byte, and a file has the scales in a tensor of their own."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor's bytes are, and how they become the values that the model wants."""

    name: str
    """As the model's family has it, whatever the file calls it."""
    file: Path
    dtype: str
    """`float32`, `bfloat16`, `float16`, one of BLOCKS, or the file's own name for what is never
    served."""
    shape: tuple[int, ...]
    start: int
    """Offset of the first byte in the file."""
    num_bytes: int
    """Of its values, or of its blocks."""
    head_rows: int = 0
    """Rows of a head whose halves lie interleaved (first, middle, second, ...), as GGUF has some
    families' queries and keys; 0: rows lie as the model wants them."""
    turned_rows: int = 0
    """Of those rows the first, which alone lie so; 0: all of them."""
    shift: float = 0.0
    """What is added to each stored value."""
    strides: tuple[int, int] | None = None
    """Items (values, or blocks without their scales) from one row to the next, and from one item of
    a row to the next; None: rows lie end to end."""
    scales: TensorInfo | None = None
    """Of blocks that have them elsewhere: a byte for each block, laid out as these are."""

    @property
    def is_plain(self) -> bool:
        """True if the stored bytes are the values, in order."""
        changed = self.head_rows or self.shift or self.strides is not None
        return self.dtype not in BLOCKS and not changed

    @property
    def item_bytes(self) -> int:
        """Of a stored value, or of a block that has its scale elsewhere."""
        return self.num_bytes // (prod(self.shape[:1]) * self.row_items)

    @property
    def row_items(self) -> int:
        """Values of a row, or its blocks."""
        values = BLOCKS[self.dtype][0] if self.dtype in BLOCKS else 1
        return prod(self.shape[1:]) // values

    @property
    def end(self) -> int:
        """Offset in the file behind the last byte."""
        if self.strides is None:
            return self.start + self.num_bytes
        row, item = self.strides
        last = (self.shape[0] - 1) * row + (self.row_items - 1) * item
        return self.start + (last + 1) * self.item_bytes
