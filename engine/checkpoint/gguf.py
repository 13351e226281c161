"""Read and check GGUF headers: a model's metadata, and where its tensors lie.

The format's own package reads a header as one array per token: nine seconds and half a gigabyte for
a vocabulary of 150,000, and it follows counts beyond the end of the file. So the header, which is a
list of lengths and values, is read here; the package is what the tests compare with.

Invariant: no length of the file is believed before it is compared with what is left of the file.
"""

from __future__ import annotations

import os
import re
import struct
import sys
from array import array
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Final

from engine.checkpoint.model_file import open_model_file
from engine.checkpoint.tensor_info import BLOCKS, TensorInfo
from engine.errors import WHAT_IS_SERVED, CheckpointError, unreadable

_MAGIC = b"GGUF"
_MAX_HEADER_BYTES = 256 << 20
_BUFFER_BYTES = 1 << 20
_MAX_STRINGS = 1 << 22  # of one list: the largest vocabularies have a quarter of a million
_MAX_DIMENSIONS = 4
_STRING, _ARRAY = 8, 9
_CODE_BY_TYPE: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?"} | {
    10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_KINDS = {
    0: "float32", 1: "float16", 2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0", 9: "q8_1",
    10: "q2_k", 11: "q3_k", 12: "q4_k", 13: "q5_k", 14: "q6_k", 15: "q8_k", 16: "iq2_xxs",
    17: "iq2_xs", 18: "iq3_xxs", 19: "iq1_s", 20: "iq4_nl", 21: "iq3_s", 22: "iq2_s", 23: "iq4_xs",
    24: "int8", 25: "int16", 26: "int32", 27: "int64", 28: "float64", 29: "iq1_m", 30: "bfloat16",
    34: "tq1_0", 35: "tq2_0", 39: "mxfp4", 40: "nvfp4",
}  # fmt: skip
_SIZES = BLOCKS | {"float32": (1, 4), "float16": (1, 2), "bfloat16": (1, 2)}
_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_AGAIN = "download the file again"


@dataclass(frozen=True, slots=True)
class GgufModel:
    """One model's metadata and tensors, from one file or from all its parts."""

    path: Path
    """The file, or the first part."""
    metadata: dict[str, Any]
    """Numbers, strings, booleans, lists of strings, and arrays of numbers."""
    tensors: dict[str, TensorInfo]
    """Tensors by the file's names; shapes are torch's, [outputs, inputs]."""

    @classmethod
    def open(cls, path: Path) -> GgufModel:
        """Read the headers of a file, and of the other parts that its name tells of.

        Raises:
            CheckpointError: a part is missing or broken; `where` names it, and the place in it.
        """
        first, *others = parts_of(path)
        metadata, tensors = _read(first)
        for part in others:
            more = _read(part)[1]
            if twice := more.keys() & tensors.keys():
                what = f"tensor {min(twice)} is in an earlier part, too"
                raise CheckpointError(what, where=str(part), hint=_AGAIN)
            tensors |= more
        expected = metadata.get("split.tensors.count")
        if others and isinstance(expected, int) and expected != len(tensors):
            what = f"its parts have {len(tensors)} tensors, and the first says {expected}"
            raise CheckpointError(what, where=str(first), hint=_AGAIN)
        return cls(first, metadata, tensors)

    def bad(self, key: str, needed: str) -> CheckpointError:
        """Make the error for a wrong value of the metadata."""
        value = self.metadata.get(key)
        what = f"{key} is missing" if value is None else f"{key} is {str(value)[:60]!r}"
        return CheckpointError(f"{what}: {needed}", where=str(self.path), hint=WHAT_IS_SERVED)

    def text(self, key: str) -> str | None:
        """Read a string of the metadata; None: it is absent."""
        value = self.metadata.get(key)
        if value is not None and not isinstance(value, str):
            raise self.bad(key, "a string is needed")
        return value

    def integer(self, key: str) -> int | None:
        """Read a whole number; None: it is absent."""
        value = self.metadata.get(key)
        if value is not None and type(value) is not int:
            raise self.bad(key, "a whole number is needed")
        return value

    def flag(self, key: str) -> bool | None:
        """Read a boolean; None: it is absent."""
        value = self.metadata.get(key)
        if value is not None and type(value) is not bool:
            raise self.bad(key, "true or false is needed")
        return value

    def floats(self, name: str, count: int) -> list[float] | None:
        """Read a small float32 tensor; None: it is absent."""
        tensor = self.tensors.get(name)
        if tensor is None:
            return None
        if tensor.dtype != "float32" or tensor.shape != (count,):
            what, hint = f"tensor {name} is {tensor.dtype} of shape {tensor.shape}", "float32"
            raise CheckpointError(what, where=str(tensor.file), hint=f"{hint} ({count},) is needed")
        with open_model_file(tensor.file) as file:
            file.seek(tensor.start)
            return list(struct.unpack(f"<{count}f", file.read(4 * count)))


def find_gguf(path: Path) -> Path | None:
    """Find the GGUF file at a path, or a folder's only model; None: neither.

    Raises:
        CheckpointError: the folder has several.
    """
    if path.is_file() or (path.suffix == ".gguf" and not path.is_dir()):
        return path if is_gguf(path) else None
    if (path / "config.json").exists():
        return None
    found = models_in(path) or _by_first_bytes(path)
    if len(found) > 1:
        listed = ", ".join(each.name for each in found[:8])
        what = f"{len(found)} GGUF models in one folder"
        raise CheckpointError(what, where=str(path), hint=f"name one of {listed}")
    return found[0] if found else None


def is_gguf(path: Path) -> bool:
    """Say whether a file is of this format, by its name or by its first bytes.

    Ollama's store, for one, names files by their sums.
    """
    if path.suffix == ".gguf":
        return True
    try:
        with open_model_file(path) as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except (OSError, CheckpointError):
        return False


def _by_first_bytes(folder: Path) -> list[Path]:
    """List a folder's files of this format that have other names."""
    if not folder.is_dir():
        return []
    return [path for path in sorted(folder.iterdir()) if path.is_file() and is_gguf(path)]


def models_in(folder: Path) -> list[Path]:
    """List a folder's GGUF models by their first parts, without vision projectors."""
    paths = sorted(folder.glob("*.gguf"))
    return [
        path
        for path in paths
        if not path.name.lower().startswith("mmproj")
        and ((part := _PART.fullmatch(path.name)) is None or int(part["number"]) == 1)
    ]


def parts_of(path: Path) -> list[Path]:
    """List all parts of a model in order; a file without parts is its only one."""
    part = _PART.fullmatch(path.name)
    if part is None:
        return [path]
    count = int(part["count"])
    return [
        path.with_name(f"{part['stem']}-{number:05}-of-{count:05}.gguf")
        for number in range(1, count + 1)
    ]


def _read(path: Path) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    """Metadata and tensors of one file."""
    try:
        # read, not mapped: a thread that waits for a page lets no other thread run
        with open_model_file(path, _BUFFER_BYTES) as file:
            if file.read(4) != _MAGIC:
                raise CheckpointError("not a GGUF file", where=str(path), hint=_AGAIN)
            reader = _Reader(path, file)
            metadata = reader.metadata()
            return metadata, reader.tensors(metadata)
    except FileNotFoundError:
        raise CheckpointError("the file is missing", where=str(path), hint=_AGAIN) from None
    except OSError as error:
        raise unreadable(path, error) from error


class _Reader:
    """A place in a header, which every reading moves on."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file
        self._file_bytes = os.fstat(file.fileno()).st_size
        self._end = min(self._file_bytes, _MAX_HEADER_BYTES)
        self.offset = 4
        self._about = "the header"
        version = self._number("I")
        if version & 0xFFFF == 0 or sys.byteorder != "little":
            hint = "convert it to little-endian: gguf_convert_endian.py of llama.cpp"
            raise CheckpointError("its numbers are big-endian", where=str(path), hint=hint)
        if version not in (2, 3):
            what, hint = f"version {version} of GGUF", "2 and 3 are served; convert it again"
            raise CheckpointError(what, where=str(path), hint=hint)
        self._num_tensors, self._num_values = self._number("Q"), self._number("Q")

    def metadata(self) -> dict[str, Any]:
        """Read all keys and values of the file's metadata."""
        self._check_count(self._num_values, 13, "keys")
        found: dict[str, Any] = {}
        for _ in range(self._num_values):
            self._about = "a key of the metadata"
            key = self._string()
            self._about = f"metadata {key[:80]!r}"
            if key in found:
                raise self._broken("is there twice")
            found[key] = self._value(self._number("I"))
        return found

    def tensors(self, metadata: dict[str, Any]) -> dict[str, TensorInfo]:
        """Read where the tensors lie; none may overlap or leave the file."""
        self._about = "the list of tensors"
        self._check_count(self._num_tensors, 32, "tensors")
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 8 <= alignment <= 1 << 20 or alignment % 8:
            raise self._broken(f"is aligned to {str(alignment)[:20]}, no multiple of 8")
        listed = [self._tensor() for _ in range(self._num_tensors)]
        data_start = -(-self.offset // alignment) * alignment
        found: dict[str, TensorInfo] = {}
        end = data_start
        for name, kind, shape, offset in sorted(listed, key=lambda each: each[3]):
            self._about = f"tensor {name[:120]}"
            start = data_start + offset
            if name in found or offset % alignment:
                what = "is there twice" if name in found else f"is not aligned to {alignment} bytes"
                raise self._broken(what)
            num_bytes = self._num_bytes(kind, shape)
            if start < end:
                raise self._broken("overlaps another one")
            end = start + num_bytes
            if end > self._file_bytes:
                what = f"ends at byte {end}, the file at {self._file_bytes}: truncated"
                raise self._broken(what)
            found[name] = TensorInfo(name, self._path, kind, shape, start, num_bytes)
        return found

    def _tensor(self) -> tuple[str, str, tuple[int, ...], int]:
        self._about = "a tensor's name"
        name = self._string()
        self._about = f"tensor {name[:120]}"
        num_dimensions = self._number("I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise self._broken(f"has {num_dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(num_dimensions))[::-1]
        number = self._number("I")
        return name, _KINDS.get(number, f"type {number}"), shape, self._number("Q")

    def _num_bytes(self, kind: str, shape: tuple[int, ...]) -> int:
        if min(shape) < 1:
            raise self._broken(f"has shape {shape}")
        # others are refused when they are used
        block_values, block_bytes = _SIZES.get(kind, (1, 0))
        if shape[-1] % block_values:
            raise self._broken(f"has rows of {shape[-1]}, not whole blocks of {kind}")
        return prod(shape) // block_values * block_bytes

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._number(self._code(kind))
        kind, count = self._number("I"), self._number("Q")
        if kind == _STRING:
            self._check_count(count, 8, "strings")
            if count > _MAX_STRINGS:
                raise self._broken(f"has {count} strings, more than {_MAX_STRINGS}")
            return [self._string() for _ in range(count)]
        code = self._code(kind)
        size = struct.calcsize(f"<{code}")
        self._check_count(count, size, "values")
        return array("B" if code == "?" else code, self._bytes(count * size))

    def _code(self, kind: int) -> str:
        code = _CODE_BY_TYPE.get(kind)
        if code is None:
            raise self._broken(f"has a value of the unknown type {kind}")
        return code

    def _number(self, code: str) -> Any:
        (value,) = struct.unpack(f"<{code}", self._bytes(struct.calcsize(f"<{code}")))
        return value

    def _string(self) -> str:
        size = int.from_bytes(self._bytes(8), "little")
        if size > self._end - self.offset:
            raise self._broken(f"has a string of {size} bytes, beyond the header's end")
        return self._bytes(size).decode("utf-8", "replace")

    def _bytes(self, size: int) -> bytes:
        """Read the next bytes."""
        data = self._file.read(size) if self.offset + size <= self._end else b""
        if len(data) < size:
            raise self._broken("is cut off")
        self.offset += size
        return data

    def _check_count(self, count: int, least_bytes: int, things: str) -> None:
        if count * least_bytes > self._end - self.offset:
            raise self._broken(f"has {count} {things}, more than the file can hold")

    def _broken(self, why: str) -> CheckpointError:
        what = f"{self._about} {why} (at byte {self.offset})"
        return CheckpointError(what, where=str(self._path), hint=_AGAIN)
