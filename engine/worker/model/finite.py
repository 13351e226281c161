"""Refuse weights that are no finite numbers: what is computed with one is nonsense.

Invariant: a tensor that was looked at and not refused has finite values in every row.
"""

from __future__ import annotations

import math

import torch

from engine.checkpoint.tensor_info import BLOCKS, TensorInfo
from engine.errors import NotFinite

_NO_POWER = 255
"""The exponent byte that stands for no number."""
_SCALES = {
    **dict.fromkeys(("q4_0", "q5_0", "q8_0", "iq4_nl", "iq4_xs"), (0,)),
    **dict.fromkeys(("q4_1", "q5_1", "q4_k", "q5_k"), (0, 2)),
    "q2_k": (80, 82),
    "q3_k": (108,),
    "q6_k": (208,),
}
"""Where the float16 numbers of a block begin; mxfp4 has a byte instead."""


def check_finite(values: torch.Tensor, tensor: TensorInfo) -> None:
    """Look at values; half a millisecond for four million.

    Raises:
        NotFinite: one is infinite, or no number.
    """
    low, high = torch.aminmax(values)  # both are NaN if one value is
    if not (math.isfinite(low) and math.isfinite(high)):
        raise _not_finite(tensor)


def check_blocks(blocks: torch.Tensor, tensor: TensorInfo) -> None:
    """Look at the scales of quantised rows, uint8 [num_rows, bytes of a row].

    Raises:
        NotFinite: as check_finite().
    """
    by_block = blocks.reshape(-1, BLOCKS[tensor.dtype][1])
    if tensor.dtype not in _SCALES and (by_block[:, 0] == _NO_POWER).any():
        raise _not_finite(tensor)
    for start in _SCALES.get(tensor.dtype, ()):
        scales = by_block[:, start : start + 2].contiguous()
        check_finite(scales.view(torch.float16), tensor)


def _not_finite(tensor: TensorInfo) -> NotFinite:
    what = f"tensor {tensor.name} has a value that is infinite or no number"
    hint = "download the file again; if it stays so, report it to the model's publisher"
    return NotFinite(what, where=str(tensor.file), hint=hint)
