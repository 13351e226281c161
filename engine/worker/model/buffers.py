"""Reuse the tensors of a forward pass: keep one buffer for each kind of result.

Invariant: a result is read before the next one of its kind is asked for; `generation` grows when
a buffer moves.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Take = Callable[[str, int, int, torch.dtype], torch.Tensor]
"""Kind, num_tokens, width and dtype to [num_tokens, width], uninitialised."""


def fresh(_kind: str, num_tokens: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Allocate memory of its own for each result."""
    return torch.empty(num_tokens, width, dtype=dtype)


class Buffers:
    """Memory that results of a kind and width share."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, int, torch.dtype], torch.Tensor] = {}
        self.generation = 0

    def take(self, kind: str, num_tokens: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the first rows of the buffer; grow it if needed."""
        key = kind, width, dtype
        buffer = self._buffers.get(key)
        if buffer is None or len(buffer) < num_tokens:
            self._buffers[key] = buffer = torch.empty(num_tokens, width, dtype=dtype)
            self.generation += 1
        return buffer[:num_tokens]
