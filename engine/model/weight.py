"""A tensor of the model on its way to a product: its data, what scales them, and the scheme.

Owns: which schemes there are in memory, and the check that data and scales are what theirs says.
Invariant: a Weight's scheme is one of SCHEMES, and its data are of the dtype that the scheme has.
Never: converts data; a copy is not made by looking.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.errors import CheckpointError
from engine.folder.panels import FORMS, FP8_ROWS
from engine.folder.tensor_info import BLOCKS

SCHEMES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "bfloat16_pairs": torch.bfloat16,
    **{f"{form}_panels": torch.uint8 for form in FORMS},
    **{f"{kind}_rows": torch.uint8 for kind in BLOCKS},
    FP8_ROWS: torch.uint8,
}
"""Names to the dtype of data. The first three are plain: data are the values. Pairs are packed for
the kernels, [panels, pairs of a row, rows of a panel, 2]. Quantised matrices have their scales
among their data: panels for the kernels, [panels, bytes of a panel], or blocks as the file has
them, [rows, bytes of a row]; FP8 for products with FP8 has both in each row. Nothing else scales
any of them."""
PLAIN = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix, [outputs, inputs], or a vector of the model.

    Raises:
        CheckpointError: the scheme is unknown, or data or scales are not what it has.
    """

    data: torch.Tensor
    scales: torch.Tensor | None
    """What data are multiplied by, as the scheme says; None where nothing scales them."""
    scheme: str
    shape: tuple[int, ...]
    """Of the values, however they are stored."""

    def __post_init__(self) -> None:
        dtype = SCHEMES.get(self.scheme)
        if dtype is None:
            hint = f"one of {', '.join(SCHEMES)}"
            raise CheckpointError(f"unknown scheme {self.scheme!r}", where="weight", hint=hint)
        if self.data.dtype != dtype or self.scales is not None:
            with_scales = "" if self.scales is None else " with scales"
            what = f"data of {self.data.dtype}{with_scales} are not {self.scheme}"
            raise CheckpointError(what, where="weight", hint=f"{self.scheme}: {dtype}, no scales")

    @classmethod
    def plain(cls, data: torch.Tensor) -> Weight:
        """Values as they are; the scheme is named after their dtype."""
        return cls(data, None, str(data.dtype).removeprefix("torch."), tuple(data.shape))

    @property
    def values(self) -> torch.Tensor:
        """The values themselves, where data are values.

        Raises:
            CheckpointError: they are packed.
        """
        if self.scheme not in PLAIN:
            hint = f"only {', '.join(PLAIN)} are read value by value"
            raise CheckpointError(f"{self.scheme} has no values", where="weight", hint=hint)
        return self.data
