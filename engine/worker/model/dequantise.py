"""Read values out of quantised blocks, equal to GGUF's own to the last bit.

Invariant: `dequantised` is the format's value in float32, to the last bit.
Invariant: the parts' values are the format's in float32: (code - zero) * scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from engine.checkpoint.packed_layouts import FORMS
from engine.checkpoint.tensor_info import BLOCKS, TensorInfo
from engine.errors import CheckpointError
from engine.worker.model.finite import check_finite


class Parts(NamedTuple):
    """Rows of values in parts, as bytes are: value = scale * (code - zero) + minimum.

    Where there are heads, a scale is an integer times its block's head, and so is a minimum, which
    is then taken away.
    """

    codes: torch.Tensor
    """int8 [num_rows, depth], or float8; of float4 the four bits of each, as FLOAT4 has them."""
    scales: torch.Tensor
    """uint8 [num_rows, groups, bytes]: float32 or float16.

    With heads: an integer; for float4: 127 plus the exponent of a power of two."""
    minimums: torch.Tensor | None = None
    """As scales; None: all 0."""
    heads: torch.Tensor | None = None
    """uint8 [num_rows, blocks, 2]: float16."""
    head_minimums: torch.Tensor | None = None
    zero: int = 0
    zeros: torch.Tensor | None = None
    """uint8 [num_rows, groups, 1], in place of one for all."""
    is_float4: bool = False
    row_factors: torch.Tensor | None = None
    """uint8 [num_rows, 1, 8]: two float32. The row's scales are FP8, times the first, divided by
    the second."""
    is_curved: bool = False
    """A code is the number of an entry of CURVE."""

    def values(self) -> torch.Tensor:
        """Compute the values of codes and scales, float32 [num_rows, depth]."""
        if self.is_float4:
            table = torch.tensor(FLOAT4, device=self.codes.device)
            values = table[self.codes.long()].view(*self.scales.shape[:2], -1)
            if self.row_factors is None:
                scales = _powers_of_two(self.scales)
            else:
                factor, divisor = self.row_factors.view(torch.float32).unbind(-1)
                scales = self.scales.view(torch.float8_e4m3fn).float()[..., 0]
                scales = (scales * factor / divisor)[..., None]
            return values.mul_(scales).view(len(self.codes), -1)
        is_signed = self.minimums is None
        scales = _scaled(self.scales, self.heads, is_signed=is_signed)
        codes = self.codes.float()
        if self.is_curved:
            codes = torch.tensor(CURVE, device=codes.device)[self.codes.long()]
        codes = codes.view(*scales.shape, -1)
        values = codes.sub_(self.zero if self.zeros is None else self.zeros)
        values.mul_(scales[..., None])
        if self.minimums is not None:
            minimums = _scaled(self.minimums, self.head_minimums, is_signed=False)
            values += (minimums if self.heads is None else minimums.neg_())[..., None]
        return values.view(len(self.codes), -1)

    def of_columns(self, first: int, end: int) -> Parts:
        """Take columns [first, end) of all rows; they begin and end between groups, and blocks."""
        depth = self.codes.shape[1]

        def cut(each: torch.Tensor) -> torch.Tensor:
            count = each.shape[1]
            return each[:, first * count // depth : end * count // depth]

        found: dict[str, Any] = {name: cut(each) for name, each in self._by_columns.items()}
        return self._replace(**found | {"codes": found["codes"].contiguous()})

    @property
    def _by_columns(self) -> dict[str, torch.Tensor]:
        """What belongs to some columns each: all but a row's own factors."""
        names = "codes", "scales", "minimums", "heads", "head_minimums", "zeros"
        found = {name: getattr(self, name) for name in names}
        return {name: each for name, each in found.items() if each is not None}


def joined_columns(parts: Sequence[Parts]) -> Parts:
    """Join columns of the same rows that were read in several runs."""
    if len(parts) == 1:
        return parts[0]
    runs = [each._by_columns for each in parts]
    joined: dict[str, Any] = {name: torch.cat([run[name] for run in runs], 1) for name in runs[0]}
    return parts[0]._replace(**joined)


def joined_rows(parts: Sequence[Parts]) -> Parts:
    """Join rows of one matrix that were read in several runs."""
    if len(parts) == 1:
        return parts[0]
    columns = zip(*parts, strict=True)
    return Parts._make(torch.cat(each) if torch.is_tensor(each[0]) else each[0] for each in columns)


def parts_of(blocks: torch.Tensor, kind: str) -> Parts:
    """Read the codes and scales of rows of blocks.

    Args:
        blocks: uint8 [num_rows, bytes of a row].
        kind: one of BLOCKS.
    """
    return _READERS[kind](blocks.reshape(len(blocks), -1, BLOCKS[kind][1]))


def dequantised(blocks: torch.Tensor, kind: str) -> torch.Tensor:
    """Compute a format's values, float32 [num_rows, depth], from rows of its blocks."""
    return parts_of(blocks, kind).values()


def _scaled(stored: torch.Tensor, heads: torch.Tensor | None, *, is_signed: bool) -> torch.Tensor:
    """Compute scales in float32, [num_rows, groups]."""
    if heads is None:
        kind = torch.float16 if stored.shape[-1] == 2 else torch.float32
        return stored.contiguous().view(kind).float()[..., 0]
    integers = stored.contiguous().view(torch.int8 if is_signed else torch.uint8).float()
    by_block = integers.view(*heads.shape[:2], -1)
    return (heads.contiguous().view(torch.float16).float() * by_block).flatten(1)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Split bytes [..., n] into their low halves, then the high ones: [..., 2 * n]."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _cut(values: torch.Tensor, *sizes: int) -> torch.Tensor:
    """Cut the last dimension into several."""
    return values.reshape(*values.shape[:-1], *sizes)


def _rows(codes: torch.Tensor) -> torch.Tensor:
    return codes.to(torch.int8).flatten(1)


def _q4_0(b: torch.Tensor) -> Parts:
    return Parts(_rows(_nibbles(b[..., 2:])), b[..., :2], zero=8)


def _q4_1(b: torch.Tensor) -> Parts:
    return Parts(_rows(_nibbles(b[..., 4:])), b[..., :2], b[..., 2:4])


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """Spread bits of [..., n] bytes, the lowest first, as 0 and 16: [..., 8 * n]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (((packed[..., None] >> shifts) & 1) << 4).flatten(-2)


def _q5_0(b: torch.Tensor) -> Parts:
    codes = _nibbles(b[..., 6:]) | _fifth_bits(b[..., 2:6])
    return Parts(_rows(codes), b[..., :2], zero=16)


def _q5_1(b: torch.Tensor) -> Parts:
    codes = _nibbles(b[..., 8:]) | _fifth_bits(b[..., 4:8])
    return Parts(_rows(codes), b[..., :2], b[..., 2:4])


def _q8_0(b: torch.Tensor) -> Parts:
    return Parts(_rows(b[..., 2:].contiguous().view(torch.int8)), b[..., :2])


def _of_256(b: torch.Tensor, codes: torch.Tensor) -> Parts:
    """Read a head, eight six-bit scales and minimums in twelve bytes, and the codes."""
    low, middle, high = _cut(b[..., 4:16], 3, 4).unbind(-2)
    scales = torch.cat((low & 63, (high & 15) | ((low >> 2) & 48)), -1)
    minimums = torch.cat((middle & 63, (high >> 4) | ((middle >> 2) & 48)), -1)
    by_group = (scales.flatten(1)[..., None], minimums.flatten(1)[..., None])
    return Parts(_rows(codes), *by_group, b[..., :2], b[..., 2:4])


def _q4_k(b: torch.Tensor) -> Parts:
    return _of_256(b, _nibbles(_cut(b[..., 16:], 4, 32)).flatten(-2))


def _q5_k(b: torch.Tensor) -> Parts:
    nibbles = _cut(_nibbles(_cut(b[..., 48:], 4, 32)), 2, 32).flatten(-3, -2)
    shifts = torch.arange(8, dtype=torch.uint8, device=b.device)[:, None]
    fifth = ((b[..., None, 16:48] >> shifts) & 1) << 4
    return _of_256(b, (nibbles | fifth).flatten(-2))


def _q6_k(b: torch.Tensor) -> Parts:
    low = _cut(_nibbles(_cut(b[..., :128], 2, 64)), 4, 32)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=b.device)[:, None]
    high = (_cut(b[..., 128:192], 2, 1, 32) >> shifts) & 3
    codes = low | (high << 4)
    scales = b[..., 192:208].flatten(1)[..., None]
    return Parts(_rows(codes.flatten(-3)), scales, heads=b[..., 208:], zero=32)


def _shifted(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Cut bytes [..., n] into codes of `bits` bits, the lowest of all bytes first."""
    shifts = bits * torch.arange(count, dtype=torch.uint8, device=packed.device)
    return (packed[..., None, :] >> shifts[:, None]) & ((1 << bits) - 1)


def _q2_k(b: torch.Tensor) -> Parts:
    codes = _shifted(_cut(b[..., 16:80], 2, 32), 2, 4).flatten(-3)
    scales = b[..., :16].flatten(1)[..., None]
    return Parts(_rows(codes), scales & 15, scales >> 4, b[..., 80:82], b[..., 82:84])


def _q3_k(b: torch.Tensor) -> Parts:
    low = _shifted(_cut(b[..., 32:96], 2, 32), 2, 4).flatten(-3)
    high = _shifted(b[..., :32], 1, 8).flatten(-2)
    scales = _nibbles(b[..., 96:104]) | (_shifted(b[..., 104:108], 2, 4).flatten(-2) << 4)
    signed = (scales.to(torch.int8) - 32).view(torch.uint8).flatten(1)[..., None]
    return Parts(_rows(low | (high << 2)), signed, heads=b[..., 108:], zero=4)


CURVE = tuple(
    map(float, (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113))
)
"""The values of four bits in formats that space them unevenly."""


def _iq4_nl(b: torch.Tensor) -> Parts:
    return Parts(_rows(_nibbles(b[..., 2:])), b[..., :2], is_curved=True)


def _iq4_xs(b: torch.Tensor) -> Parts:
    high = _shifted(b[..., 2:4, None], 2, 4).flatten(-3)
    low = torch.stack((b[..., 4:8] & 15, b[..., 4:8] >> 4), -1).flatten(-2)
    signed = ((low | (high << 4)).to(torch.int8) - 32).view(torch.uint8).flatten(1)[..., None]
    codes = _nibbles(_cut(b[..., 8:], 8, 16)).flatten(-2)
    return Parts(_rows(codes), signed, heads=b[..., :2], is_curved=True)


FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Four bits as numbers: a sign, two of the exponent, one of the mantissa."""


def _powers_of_two(stored: torch.Tensor) -> torch.Tensor:
    """Turn exponent bytes into float32; 0 is the smallest, a denormal."""
    exponents = stored.int()
    return torch.where(exponents == 0, 0x400000, exponents << 23).view(torch.float32)


def _mxfp4(b: torch.Tensor) -> Parts:
    return _fp4(b, _nibbles(b[..., 1:]))


def _mxfp4_pairs(b: torch.Tensor) -> Parts:
    return _fp4(b, torch.stack((b[..., 1:] & 15, b[..., 1:] >> 4), -1).flatten(-2))


def _fp4(b: torch.Tensor, codes: torch.Tensor) -> Parts:
    return Parts(_rows(codes), b[..., :1], is_float4=True)


_READERS = {
    "q4_0": _q4_0,
    "q4_1": _q4_1,
    "q5_0": _q5_0,
    "q5_1": _q5_1,
    "q8_0": _q8_0,
    "q4_k": _q4_k,
    "q5_k": _q5_k,
    "q6_k": _q6_k,
    "q2_k": _q2_k,
    "q3_k": _q3_k,
    "iq4_nl": _iq4_nl,
    "iq4_xs": _iq4_xs,
    "mxfp4": _mxfp4,
    "mxfp4_pairs": _mxfp4_pairs,
}


_FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_INTEGERS = {"I8": torch.int8, "I32": torch.int32, "I64": torch.int64, "U8": torch.uint8}
_DTYPES = _FLOATS | _INTEGERS | {"F8_E4M3": torch.float8_e4m3fn}
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word the code of each of eight neighbours is."""


class SeparateMatrix:
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
        """Read the codes and scales of rows by number, [n].

        Args:
            form: its groups are used; None: the checkpoint's groups, or a scale per value if
                these are not in order.

        Raises:
            CheckpointError: a code or a scale is infinite, or no number.
        """
        if self._apart.kind == "nvfp4":
            return self._float4(rows)
        codes, scales, zeros = self._codes(rows), self._scales(rows), self._zeros(rows)
        check_finite(scales, self._apart.parts["scales"])
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

    def _float4(self, rows: torch.Tensor) -> Parts:
        bytes_ = self._parts["codes"][rows]
        codes = torch.stack((bytes_ & 15, bytes_ >> 4), -1).flatten(1).to(torch.int8)
        scales = self._parts["scales"].view(torch.uint8)[rows]
        if (scales & 0x7F == 0x7F).any():
            what = f"tensor {self._apart.parts['scales'].name} has values that are no numbers"
            raise CheckpointError(what, where=str(self._info.file))
        both = torch.ones(2)
        for place, role in enumerate(("factor", "divisor")):
            if role in self._parts:
                both[place] = self._parts[role].reshape(())
                check_finite(torch.cat((both, both[:1] / both[1:])), self._apart.parts[role])
        factors = both.view(torch.uint8).expand(len(rows), 1, 8).contiguous()
        return Parts(codes, scales[..., None], is_float4=True, row_factors=factors)

    def _codes(self, rows: torch.Tensor) -> torch.Tensor:
        """Read codes, [rows, depth]: int16 from packed ones, or float8."""
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
        """Read scales, [rows, groups]."""
        stored = self._parts["scales"]
        if self._apart.kind in ("gptq", "awq"):
            return stored[:, rows].T
        if self._apart.kind == "packed":
            return stored[rows]
        num_rows = -(-self._info.shape[0] // self._apart.scale_rows)
        return stored.reshape(num_rows, -1)[rows // self._apart.scale_rows]

    def _zeros(self, rows: torch.Tensor) -> torch.Tensor | None:
        """Read zeros, [rows, groups] of small integers; None: all have one."""
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
        """Unpack some rows, [n, rows], from AWQ's words, [n, rows / 8]."""
        order = torch.tensor(_AWQ_ORDER)
        shifts = 4 * order[rows % 8].int()
        return ((stored[:, rows // 8] >> shifts) & 15).short()

    def _groups_of_columns(self, order: torch.Tensor) -> torch.Tensor | None:
        """Return the group of each column; None: columns are in order.

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
    """Unpack codes of 32-bit words, the lowest first: [..., n] to [..., n, codes of a word]."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).short()


def _viewed(data: torch.Tensor, info: TensorInfo) -> torch.Tensor:
    dtype = _DTYPES[info.dtype]
    if info.start % dtype.itemsize:
        data = data.clone()  # only on the way into an arena
    return data.view(dtype).view(info.shape)
