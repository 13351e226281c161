"""Where a tensor lies in a file, and in which form: what both file formats say of their tensors.

Owns: the block formats of quantised values.
Invariant: a TensorInfo lies wholly inside its file.
Never: reads tensor data.
"""

from __future__ import annotations

from dataclasses import dataclass
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
}
"""Formats of blocks, by their names in GGUF: values of a row in a block, and its bytes. Scales are
in the block, beside the values that they scale."""


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
    head_rows: int = 0
    """Rows of a head whose halves lie interleaved (first, middle, second, ...), as GGUF has some
    families' queries and keys; 0: rows lie as the model wants them."""
    turned_rows: int = 0
    """Of those rows the first, which alone lie so; 0: all of them."""
    shift: float = 0.0
    """What is added to each stored value."""

    @property
    def is_plain(self) -> bool:
        """True if the stored bytes are the values, in order."""
        return self.dtype not in BLOCKS and not self.head_rows and not self.shift
