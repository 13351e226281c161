"""Locate tensors in safetensors and GGUF files, with their types and shapes.

Owns: the block formats of quantised values; the checks that a file is what its header says.
Invariant: a TensorInfo lies wholly inside its file.
Never: reads tensor data.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from engine.errors import CheckpointError, unreadable

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


# The safetensors format, as far as its headers: where each tensor lies in which file.
# Invariant: a TensorInfo lies wholly inside its file and overlaps no other.
# Never: reads tensor data.


_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100 << 20  # the limit of the reference implementation
_ITEM_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F4": 4,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "F64": 64, "I64": 64, "U64": 64, "C64": 64,
}  # fmt: skip
_DTYPE_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def read_header(path: Path) -> tuple[bytes, list[TensorInfo]]:
    """Parse one file's header; returns its bytes and its tensors in file order.

    Raises:
        CheckpointError: the file is missing, truncated or not a safetensors file.
    """
    try:
        file_bytes = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(_LENGTH.size)
            header_bytes = _LENGTH.unpack(prefix)[0] if len(prefix) == _LENGTH.size else -1
            if not 2 <= header_bytes <= min(_MAX_HEADER_BYTES, file_bytes - _LENGTH.size):
                what = "not a safetensors file, or truncated within its header"
                raise CheckpointError(what, where=str(path), hint="download the file again")
            header = file.read(header_bytes)
    except FileNotFoundError:
        hint = "download the checkpoint again"
        raise CheckpointError("the file is missing", where=str(path), hint=hint) from None
    except OSError as error:
        raise unreadable(path, error) from error
    try:
        entries = json.loads(header)
    except (ValueError, RecursionError):
        raise CheckpointError("the header is not valid JSON", where=str(path)) from None
    if not isinstance(entries, dict):
        raise CheckpointError("the header is not a JSON object", where=str(path))
    entries.pop("__metadata__", None)
    data_start = _LENGTH.size + header_bytes
    tensors = [_tensor_info(path, name, entry, data_start) for name, entry in entries.items()]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.num_bytes))
    _check_extents(path, tensors, data_start, file_bytes)
    return header, tensors


def _tensor_info(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    try:
        code, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        is_sane = all(type(size) is int and size >= 0 for size in (*shape, begin, end))
        num_bits = _ITEM_BITS[code]
    except (KeyError, TypeError, ValueError):
        is_sane = False
    if not is_sane:
        raise CheckpointError(f"tensor {name}: malformed header entry", where=str(path))
    for size in shape:
        num_bits *= size
    if end - begin != -(-num_bits // 8):
        what = f"tensor {name}: {end - begin} bytes for {code} of shape {tuple(shape)}"
        raise CheckpointError(what, where=str(path))
    dtype = _DTYPE_NAMES.get(code, code)
    return TensorInfo(name, path, dtype, tuple(shape), data_start + begin, end - begin)


def _check_extents(path: Path, tensors: list[TensorInfo], data_start: int, file_bytes: int) -> None:
    end = data_start
    for tensor in tensors:
        if tensor.start < end:
            what = f"tensor {tensor.name} overlaps another one"
            raise CheckpointError(what, where=str(path))
        end = tensor.start + tensor.num_bytes
        if end > file_bytes:
            what = f"tensor {tensor.name} ends at byte {end}, the file at {file_bytes}: truncated"
            raise CheckpointError(what, where=str(path), hint="download the file again")
