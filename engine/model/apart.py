"""Values out of quantised matrices whose codes, scales and zeros are tensors of their own.

Owns: how each way of storing them lays them out.
Invariant: the parts' values are the format's in float32: (code - zero) * scale.
Never: reads a file, checks a shape (engine.folder.quantisation does).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from engine.errors import CheckpointError
from engine.folder.panels import FORMS
from engine.folder.tensor_info import TensorInfo
from engine.model.quantised_blocks import Parts

_FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_INTEGERS = {"I8": torch.int8, "I32": torch.int32, "I64": torch.int64, "U8": torch.uint8}
_DTYPES = _FLOATS | _INTEGERS | {"F8_E4M3": torch.float8_e4m3fn}
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word the code of each of eight neighbours is."""


class ApartMatrix:
    """A quantised matrix whose codes and scales are mapped tensors of their own."""

    def __init__(self, info: TensorInfo, data: Mapping[str, torch.Tensor]) -> None:
        """Data are uint8, all bytes of each part by its role."""
        assert info.apart is not None
        self._info, self._apart = info, info.apart
        self._parts = {
            role: _viewed(data[role], info.apart.parts[role]) for role in info.apart.parts
        }
        self._columns: torch.Tensor | None = None
        if "order" in self._parts:
            self._columns = self._groups_of_columns(self._parts["order"].long())

    def parts(self, rows: torch.Tensor, form: str | None = None) -> Parts:
        """Codes and scales of rows by number, [n].

        Args:
            rows: which.
            form: whose groups they are to be in; None: each value has its own scale where the
                checkpoint's groups are not in order, else those of the checkpoint.

        Raises:
            CheckpointError: a code is no number.
        """
        codes, scales, zeros = self._codes(rows), self._scales(rows), self._zeros(rows)
        depth, group = codes.shape[1], self._apart.group
        if self._columns is not None:
            scales = scales[:, self._columns]
            zeros = None if zeros is None else zeros[:, self._columns]
        elif form is not None:
            places = torch.arange(-(-depth // FORMS[form].group)) * FORMS[form].group // group
            scales = scales[:, places]
            zeros = None if zeros is None else zeros[:, places]
        elif depth % group:  # a last group that is cut short: as many scales as values
            places = torch.arange(depth) // group
            scales = scales[:, places]
            zeros = None if zeros is None else zeros[:, places]
        stored = scales.float().contiguous()[..., None].view(torch.uint8)
        zero = self._apart.zero if zeros is None else 0
        if form in ("int4_32", "int4_128"):
            zeros = torch.full(scales.shape, zero) if zeros is None else zeros
            zeros = zeros.to(torch.uint8)
        if form == "int8_128" and zero:
            codes, zero = codes - zero, 0
        if form is not None and codes.dtype == torch.int16:
            codes = codes.to(torch.int8)
        return Parts(codes, stored, zero=zero, zeros=None if zeros is None else zeros[..., None])

    def _codes(self, rows: torch.Tensor) -> torch.Tensor:
        """[rows, depth], int16 where they are packed, or float8."""
        stored, kind, bits = self._parts["codes"], self._apart.kind, self._apart.bits
        if kind == "int8":
            return stored[rows]
        if kind == "fp8":
            codes = stored.view(torch.uint8)[rows]
            if (codes & 0x7F == 0x7F).any():
                what = f"tensor {self._info.name} has values that are no numbers"
                raise CheckpointError(what, where=str(self._info.file))
            return codes.view(torch.float8_e4m3fn)
        if kind == "packed":
            return _unpacked(stored[rows], bits).flatten(1)[:, : self._info.shape[1]]
        if kind == "gptq":
            return _unpacked(stored[:, rows].T, bits).flatten(1)
        return self._awq(stored, rows).T

    def _scales(self, rows: torch.Tensor) -> torch.Tensor:
        """[rows, groups]."""
        stored = self._parts["scales"]
        if self._apart.kind in ("gptq", "awq"):
            return stored[:, rows].T
        if self._apart.kind == "packed":
            return stored[rows]
        num_rows = -(-self._info.shape[0] // self._apart.scale_rows)
        return stored.reshape(num_rows, -1)[rows // self._apart.scale_rows]

    def _zeros(self, rows: torch.Tensor) -> torch.Tensor | None:
        """[rows, groups] of small integers; None: all have one."""
        stored = self._parts.get("zeros")
        if stored is None:
            return None
        kind, bits, shift = self._apart.kind, self._apart.bits, self._apart.zero
        per_word = 32 // bits
        if kind == "int8":
            num_rows = -(-self._info.shape[0] // self._apart.scale_rows)
            return stored.reshape(num_rows, -1)[rows // self._apart.scale_rows].short()
        if kind == "awq":
            return self._awq(stored, rows).T
        words = stored[rows // per_word] if kind == "packed" else stored[:, rows // per_word].T
        shifts = (rows % per_word * bits)[:, None].int()
        zeros = (words >> shifts) & ((1 << bits) - 1)
        return (zeros + (shift if kind == "gptq" else 0)).short()

    def _awq(self, stored: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Of words [n, rows / 8], those of some rows: [n, rows]."""
        order = torch.tensor(_AWQ_ORDER)
        shifts = 4 * order[rows % 8].int()
        return ((stored[:, rows // 8] >> shifts) & 15).short()

    def _groups_of_columns(self, order: torch.Tensor) -> torch.Tensor | None:
        """The group of each column; None where they are in order.

        Raises:
            CheckpointError: a number is of no group, or columns are not in order that should be.
        """
        depth, group = self._info.shape[1], self._apart.group
        what = f"tensor {self._apart.parts['order'].name}"
        if order.min() < 0 or order.max() >= depth // group:
            about = f"{what} has groups from {int(order.min())} to {int(order.max())}"
            hint = f"there are {depth // group}"
            raise CheckpointError(about, where=str(self._info.file), hint=hint)
        if torch.equal(order, torch.arange(depth) // group):
            return None
        if self._apart.form is not None:
            about = f"{what} has its columns in another order, and config.json says nothing of it"
            hint = "desc_act in quantization_config would"
            raise CheckpointError(about, where=str(self._info.file), hint=hint)
        return order


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes in words of 32 bits, the lowest first: [..., n] to [..., n, codes of a word]."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).short()


def _viewed(data: torch.Tensor, info: TensorInfo) -> torch.Tensor:
    dtype = _DTYPES[info.dtype]
    if info.start % dtype.itemsize:
        data = data.clone()  # only on the way into an arena
    return data.view(dtype).view(info.shape)
