"""Read the headers of safetensors files: where each tensor lies in which file.

Invariant: a TensorInfo lies wholly inside its file and overlaps no other.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

import msgspec

from engine.checkpoint.model_file import open_model_file
from engine.checkpoint.tensor_info import TensorInfo
from engine.errors import CheckpointError, unreadable

_LENGTH = struct.Struct("<Q")
_MAX_DIMENSIONS = 16
_AGAIN = "download the file again"
_MAX_HEADER_BYTES = 100 << 20  # the limit of the reference implementation
_ITEM_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F4": 4,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "F64": 64, "I64": 64, "U64": 64, "C64": 64,
}  # fmt: skip
_DTYPE_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def is_safetensors(path: Path) -> bool:
    """Say whether a file is of this format, by its first bytes."""
    if not path.is_file():
        return False
    try:
        with open_model_file(path) as file:
            prefix = file.read(_LENGTH.size + 1)
    except (OSError, CheckpointError):
        return False
    is_long = len(prefix) > _LENGTH.size and prefix.endswith(b"{")
    return is_long and 2 <= _LENGTH.unpack(prefix[:-1])[0] <= _MAX_HEADER_BYTES


MAX_TENSORS = 1 << 19
"""Maximum number of tensors in a file; published models have fewer in all."""


class _Entry(msgspec.Struct, gc=False):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


_HEADER = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENTRY = msgspec.json.Decoder(_Entry)


def read_header(path: Path) -> tuple[bytes, list[TensorInfo]]:
    """Parse one file's header; returns its bytes and its tensors in file order.

    Raises:
        CheckpointError: the file is missing, truncated or not a safetensors file.
    """
    try:
        with open_model_file(path) as file:
            file_bytes = os.fstat(file.fileno()).st_size
            prefix = file.read(_LENGTH.size)
            header_bytes = _LENGTH.unpack(prefix)[0] if len(prefix) == _LENGTH.size else -1
            if not 2 <= header_bytes <= min(_MAX_HEADER_BYTES, file_bytes - _LENGTH.size):
                what = "not a safetensors file, or truncated within its header"
                is_gguf = prefix.startswith(b"GGUF")
                hint = "it is a GGUF file: serve it by itself" if is_gguf else _AGAIN
                raise CheckpointError(what, where=str(path), hint=hint)
            header = file.read(header_bytes)
    except FileNotFoundError:
        hint = "download the checkpoint again"
        raise CheckpointError("the file is missing", where=str(path), hint=hint) from None
    except OSError as error:
        raise unreadable(path, error) from error
    try:
        entries = _HEADER.decode(header)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"the header is no JSON object: {error}", where=str(path)) from None
    if len(entries) > MAX_TENSORS:
        what = f"{len(entries)} tensors, at most {MAX_TENSORS} are read"
        raise CheckpointError(what, where=str(path))
    entries.pop("__metadata__", None)
    data_start = _LENGTH.size + header_bytes
    tensors = [_tensor_info(path, name, entry, data_start) for name, entry in entries.items()]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.num_bytes))
    _check_extents(path, tensors, data_start, file_bytes)
    return header, tensors


def _tensor_info(path: Path, name: str, raw: msgspec.Raw, data_start: int) -> TensorInfo:
    try:
        entry = _ENTRY.decode(raw)
        code, shape, (begin, end) = entry.dtype, entry.shape, entry.data_offsets
        is_sane = len(shape) <= _MAX_DIMENSIONS
        is_sane &= all(0 <= size < 2**63 for size in (*shape, begin, end))
        num_bits = _ITEM_BITS[code]
    except (KeyError, ValueError, RecursionError):
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
            raise CheckpointError(what, where=str(path), hint=_AGAIN)
