"""Where a tensor lies in a file, and in which form: what both file formats say of their tensors.

Owns: the block formats of quantised values.
Invariant: a TensorInfo lies wholly inside its file.
Never: reads tensor data.
"""

from __future__ import annotations

from collections.abc import Mapping
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
class Apart:
    """Of a matrix whose codes, scales and zeros are tensors of their own."""

    kind: str
    """How they lie: `fp8`, `int8`, `packed`, `gptq`, `awq` or `mxfp4`."""
    bits: int
    """Of a code."""
    group: int
    """Values of a row that share a scale."""
    scale_rows: int
    """Rows that share a scale."""
    parts: Mapping[str, TensorInfo]
    """`codes` and `scales`, perhaps `zeros`, and `order`: the group that each column is of."""
    form: str | None
    """That the kernels read without a value being changed; None: there is none."""
    zero: int = 0
    """Of codes where none are stored; and what is added to those that are."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor's bytes are, and how they become the values that the model wants."""

    name: str
    """As the model's family has it, whatever the file calls it."""
    file: Path
    dtype: str
    """`float32`, `bfloat16`, `float16`, one of BLOCKS, a name for what is `apart`, or the file's
    own for what is never served."""
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
    apart: Apart | None = None
    """Of a matrix of several tensors; file, start and num_bytes are then those of its codes."""

    @property
    def is_plain(self) -> bool:
        """True if the stored bytes are the values, in order."""
        changed = self.head_rows or self.shift or self.strides is not None
        return not self.is_quantised and not changed

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

    @property
    def is_in_blocks(self) -> bool:
        """True if rows are blocks end to end, with the scales among the codes."""
        return self.dtype in BLOCKS and self.strides is None and self.scales is None

    @property
    def is_quantised(self) -> bool:
        """True if values are codes and scales, wherever these lie."""
        return self.dtype in BLOCKS or self.apart is not None

    @property
    def pieces(self) -> Mapping[str, TensorInfo]:
        """The tensors that it is made of, by their roles: `codes`, itself, or its parts."""
        if self.apart is not None:
            return self.apart.parts
        scales = {} if self.scales is None else {"scales": self.scales}
        return {"codes": self, **scales}
