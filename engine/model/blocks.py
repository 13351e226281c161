"""Values out of quantised blocks: codes times scales, as GGUF's own package has them.

Owns: how each block format lays out its codes and scales. Called by: stored, quantised.
Invariant: `dequantised` is the format's value in float32, to the last bit.
Never: reads a file, knows a tensor's name.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from engine.tensor_info import BLOCKS


class Codes(NamedTuple):
    """Rows of values as codes: value = scale * code + minimum, each scale for `group` values."""

    codes: torch.Tensor
    """int8 [num_rows, depth]."""
    scales: torch.Tensor
    """float32 [num_rows, depth / group]."""
    minimums: torch.Tensor | None
    """The same, or None: all 0."""
    group: int

    def values(self) -> torch.Tensor:
        """float32 [num_rows, depth]."""
        codes = self.codes.float().view(*self.scales.shape, self.group)
        values = codes.mul_(self.scales[..., None])
        if self.minimums is not None:
            values += self.minimums[..., None]
        return values.view(len(self.codes), -1)


def codes_of(blocks: torch.Tensor, kind: str) -> Codes:
    """Codes and scales of rows of blocks.

    Args:
        blocks: uint8 [num_rows, bytes of a row].
        kind: one of BLOCKS.
    """
    num_rows = len(blocks)
    each = blocks.reshape(num_rows, -1, BLOCKS[kind][1])
    return _READERS[kind](each)


def dequantised(blocks: torch.Tensor, kind: str) -> torch.Tensor:
    """Values, float32 [num_rows, depth], of rows of blocks, uint8 [num_rows, bytes of a row]."""
    return codes_of(blocks, kind).values()


def _halves(bytes_: torch.Tensor) -> torch.Tensor:
    """float16 in [..., 2 * n] bytes, as float32 [..., n]."""
    return bytes_.contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """The low halves of bytes [..., n], then the high ones: [..., 2 * n]."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _cut(values: torch.Tensor, *sizes: int) -> torch.Tensor:
    """The last dimension as several."""
    return values.reshape(*values.shape[:-1], *sizes)


def _rows(codes: torch.Tensor) -> torch.Tensor:
    return codes.to(torch.int8).flatten(1)


def _q4_0(b: torch.Tensor) -> Codes:
    codes = _nibbles(b[..., 2:]).to(torch.int8) - 8
    return Codes(_rows(codes), _halves(b[..., :2])[..., 0], None, 32)


def _q4_1(b: torch.Tensor) -> Codes:
    scale, least = _halves(b[..., :4]).unbind(-1)
    return Codes(_rows(_nibbles(b[..., 4:])), scale, least, 32)


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """Bits of [..., n] bytes, the lowest first, as 0 and 16: [..., 8 * n]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (((packed[..., None] >> shifts) & 1) << 4).flatten(-2)


def _q5_0(b: torch.Tensor) -> Codes:
    codes = _nibbles(b[..., 6:]) | _fifth_bits(b[..., 2:6])
    return Codes(_rows(codes.to(torch.int8) - 16), _halves(b[..., :2])[..., 0], None, 32)


def _q5_1(b: torch.Tensor) -> Codes:
    scale, least = _halves(b[..., :4]).unbind(-1)
    return Codes(_rows(_nibbles(b[..., 8:]) | _fifth_bits(b[..., 4:8])), scale, least, 32)


def _q8_0(b: torch.Tensor) -> Codes:
    codes = b[..., 2:].contiguous().view(torch.int8)
    return Codes(_rows(codes), _halves(b[..., :2])[..., 0], None, 32)


def _six_bit_scales(b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight scales and eight minimums of a block of 256, from 12 bytes of six bits each."""
    low, middle, high = _cut(b, 3, 4).unbind(-2)
    scale = torch.cat((low & 63, (high & 15) | ((low >> 2) & 48)), -1)
    least = torch.cat((middle & 63, (high >> 4) | ((middle >> 2) & 48)), -1)
    return scale.float(), least.float()


def _of_256(b: torch.Tensor, codes: torch.Tensor) -> Codes:
    scale, least = _halves(b[..., :4]).unbind(-1)
    scales, leasts = _six_bit_scales(b[..., 4:16])
    return Codes(
        _rows(codes),
        (scale[..., None] * scales).flatten(1),
        (least[..., None] * leasts).neg_().flatten(1),
        32,
    )


def _q4_k(b: torch.Tensor) -> Codes:
    return _of_256(b, _nibbles(_cut(b[..., 16:], 4, 32)).flatten(-2))


def _q5_k(b: torch.Tensor) -> Codes:
    nibbles = _cut(_nibbles(_cut(b[..., 48:], 4, 32)), 2, 32).flatten(-3, -2)
    shifts = torch.arange(8, dtype=torch.uint8, device=b.device)[:, None]
    fifth = ((b[..., None, 16:48] >> shifts) & 1) << 4
    return _of_256(b, (nibbles | fifth).flatten(-2))


def _q6_k(b: torch.Tensor) -> Codes:
    low = _cut(_nibbles(_cut(b[..., :128], 2, 64)), 4, 32)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=b.device)[:, None]
    high = (_cut(b[..., 128:192], 2, 1, 32) >> shifts) & 3
    codes = (low | (high << 4)).to(torch.int8) - 32
    scales = b[..., 192:208].contiguous().view(torch.int8).float()
    return Codes(_rows(codes.flatten(-3)), (_halves(b[..., 208:]) * scales).flatten(1), None, 16)


_FP4_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def _mxfp4(b: torch.Tensor) -> Codes:
    table = torch.tensor(_FP4_DOUBLED, dtype=torch.int8, device=b.device)
    exponents = b[..., 0].int()
    # two to the power of (exponent - 128): half of the scale, for codes are doubled
    normal = ((exponents - 1).clamp_(min=0) << 23).view(torch.float32)
    tiny = (0x200000 << exponents.clamp(max=1)).view(torch.float32)
    scales = torch.where(exponents < 2, tiny, normal)
    return Codes(_rows(table[_nibbles(b[..., 1:]).long()]), scales, None, 32)


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
}
