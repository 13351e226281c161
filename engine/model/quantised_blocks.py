"""Values out of quantised blocks: codes times scales, as GGUF's own package has them.

Owns: how each block format lays out its codes and scales.
Invariant: `dequantised` is the format's value in float32, to the last bit.
Never: reads a file, knows a tensor's name.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from engine.folder.tensor_info import BLOCKS


class Parts(NamedTuple):
    """Rows of values in parts, as bytes are: value = scale * (code - zero) + minimum.

    Where there are heads, a scale is an integer times its block's head, and so is a minimum, which
    is then taken away.
    """

    codes: torch.Tensor
    """int8 [num_rows, depth], or float8; of float4 the four bits of each, as FLOAT4 has them."""
    scales: torch.Tensor
    """uint8 [num_rows, groups, bytes]: float32 or float16, or with heads an integer, or of float4
    a power of two by its exponent and 127."""
    minimums: torch.Tensor | None = None
    """As scales; None: all 0."""
    heads: torch.Tensor | None = None
    """uint8 [num_rows, blocks, 2]: float16."""
    head_minimums: torch.Tensor | None = None
    zero: int = 0
    zeros: torch.Tensor | None = None
    """uint8 [num_rows, groups, 1], in place of one for all."""
    is_float4: bool = False

    def values(self) -> torch.Tensor:
        """The values that codes and scales stand for, float32 [num_rows, depth]."""
        if self.is_float4:
            table = torch.tensor(FLOAT4, device=self.codes.device)
            values = table[self.codes.long()].view(*self.scales.shape[:2], -1)
            return values.mul_(_powers_of_two(self.scales)).view(len(self.codes), -1)
        is_signed = self.minimums is None
        scales = _scaled(self.scales, self.heads, is_signed=is_signed)
        codes = self.codes.float().view(*scales.shape, -1)
        values = codes.sub_(self.zero if self.zeros is None else self.zeros)
        values.mul_(scales[..., None])
        if self.minimums is not None:
            minimums = _scaled(self.minimums, self.head_minimums, is_signed=False)
            values += (minimums if self.heads is None else minimums.neg_())[..., None]
        return values.view(len(self.codes), -1)


def parts_of(blocks: torch.Tensor, kind: str) -> Parts:
    """Codes and scales of rows of blocks.

    Args:
        blocks: uint8 [num_rows, bytes of a row].
        kind: one of BLOCKS.
    """
    return _READERS[kind](blocks.reshape(len(blocks), -1, BLOCKS[kind][1]))


def dequantised(blocks: torch.Tensor, kind: str) -> torch.Tensor:
    """Values, float32 [num_rows, depth], of rows of blocks, uint8 [num_rows, bytes of a row]."""
    return parts_of(blocks, kind).values()


def _scaled(stored: torch.Tensor, heads: torch.Tensor | None, *, is_signed: bool) -> torch.Tensor:
    """float32 [num_rows, groups]."""
    if heads is None:
        kind = torch.float16 if stored.shape[-1] == 2 else torch.float32
        return stored.contiguous().view(kind).float()[..., 0]
    integers = stored.contiguous().view(torch.int8 if is_signed else torch.uint8).float()
    by_block = integers.view(*heads.shape[:2], -1)
    return (heads.contiguous().view(torch.float16).float() * by_block).flatten(1)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """The low halves of bytes [..., n], then the high ones: [..., 2 * n]."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _cut(values: torch.Tensor, *sizes: int) -> torch.Tensor:
    """The last dimension as several."""
    return values.reshape(*values.shape[:-1], *sizes)


def _rows(codes: torch.Tensor) -> torch.Tensor:
    return codes.to(torch.int8).flatten(1)


def _q4_0(b: torch.Tensor) -> Parts:
    return Parts(_rows(_nibbles(b[..., 2:])), b[..., :2], zero=8)


def _q4_1(b: torch.Tensor) -> Parts:
    return Parts(_rows(_nibbles(b[..., 4:])), b[..., :2], b[..., 2:4])


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """Bits of [..., n] bytes, the lowest first, as 0 and 16: [..., 8 * n]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (((packed[..., None] >> shifts) & 1) << 4).flatten(-2)


def _q5_0(b: torch.Tensor) -> Parts:
    codes = _nibbles(b[..., 6:]) | _fifth_bits(b[..., 2:6])
    return Parts(_rows(codes.to(torch.int8) - 16), b[..., :2])


def _q5_1(b: torch.Tensor) -> Parts:
    codes = _nibbles(b[..., 8:]) | _fifth_bits(b[..., 4:8])
    return Parts(_rows(codes), b[..., :2], b[..., 2:4])


def _q8_0(b: torch.Tensor) -> Parts:
    return Parts(_rows(b[..., 2:].contiguous().view(torch.int8)), b[..., :2])


def _of_256(b: torch.Tensor, codes: torch.Tensor) -> Parts:
    """A head, twelve bytes of eight scales and minimums of six bits each, then the codes."""
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
    codes = (low | (high << 4)).to(torch.int8) - 32
    scales = b[..., 192:208].flatten(1)[..., None]
    return Parts(_rows(codes.flatten(-3)), scales, heads=b[..., 208:])


FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Four bits as numbers: a sign, two of the exponent, one of the mantissa."""


def _powers_of_two(stored: torch.Tensor) -> torch.Tensor:
    """float32 of bytes that are exponents; 0 is the smallest, which float32 has only denormal."""
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
    "mxfp4": _mxfp4,
    "mxfp4_pairs": _mxfp4_pairs,
}
