"""Describe tensors of safetensors and GGUF files: type, shape, place in the file.

Invariant: a TensorInfo lies wholly inside its file.
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
    "q2_k": (256, 84),
    "q3_k": (256, 110),
    "q4_k": (256, 144),
    "q5_k": (256, 176),
    "q6_k": (256, 210),
    "iq4_nl": (32, 18),
    "iq4_xs": (256, 136),
    "mxfp4": (32, 17),
    "mxfp4_pairs": (32, 17),
}
"""Block formats by their names in GGUF: values of a row in a block, and its bytes.

Scales are in the block, beside the values that they scale. mxfp4_pairs is no GGUF format:
neighbours share a byte, and scales are in a tensor of their own."""


@dataclass(frozen=True, slots=True)
class SeparateTensors:
    """Where codes, scales and zeros of a quantised matrix lie, each a tensor of its own."""

    kind: str
    """How they lie: `fp8`, `int8`, `packed`, `gptq`, `awq`, `mxfp4` or `nvfp4`."""
    bits: int
    """Of a code."""
    group: int
    """Values of a row that share a scale."""
    scale_rows: int
    """Rows that share a scale."""
    parts: Mapping[str, TensorInfo]
    """`codes` and `scales`, perhaps `zeros`, `order` (each column's group), and the matrix's
    `factor` or `divisor`."""
    form: str | None
    """The form that keeps every value exact; None: the kernels have no such form."""
    zero: int = 0
    """The codes' zero if none is stored; else an offset of stored zeros."""
    rounds_inputs: bool = False
    """Inputs are to be rounded to what codes are, with a scale for each token."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor's bytes are, and how they become the values that the model wants."""

    name: str
    """The family's name, not the file's."""
    file: Path
    dtype: str
    """`float32`, `bfloat16`, `float16`, one of BLOCKS, or a kind of separate tensors.

    Tensors that are never served keep the file's name for it."""
    shape: tuple[int, ...]
    start: int
    """Offset of the first byte in the file."""
    num_bytes: int
    """Bytes of its values, or of its blocks."""
    head_rows: int = 0
    """Rows of a head with interleaved halves, as in some GGUF files.

    0: rows are in the model's order."""
    turned_rows: int = 0
    """The first of `head_rows` that are interleaved; 0: all of them."""
    shift: float = 0.0
    """What is added to each stored value."""
    row_runs: tuple[tuple[int, int], ...] = ()
    """Stored rows in the model's order, as runs: first row and count. Empty: they are in order."""
    is_negative_exp: bool = False
    """Each stored value is -exp of what the model wants."""
    strides: tuple[int, int] | None = None
    """Distances in items (values, or blocks without their scales): between rows, and between a
    row's items. None: rows lie end to end."""
    scales: TensorInfo | None = None
    """Separate scales of blocks, a byte for each block, in the blocks' layout."""
    apart: SeparateTensors | None = None
    """The tensors of a matrix of several; file, start and num_bytes are the codes'."""

    @property
    def is_plain(self) -> bool:
        """True if the stored bytes are the values, in order."""
        is_moved = self.head_rows or self.row_runs or self.strides is not None
        changed = is_moved or self.shift or self.is_negative_exp
        return not self.is_quantised and not changed

    @property
    def item_bytes(self) -> int:
        """Bytes of one stored value, or of a block whose scale is elsewhere."""
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
