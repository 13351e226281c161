"""Muon: momentum whose update is made orthogonal, in float32.

Owns: the optimizer of the starter model's matrices. Called by: train.
Invariant: source is Keller Jordan's description (2024); torch's own computes in bfloat16, which
processors without such units do ten times slower.
Never: touches embeddings or norms.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

MOMENTUM = 0.95
_A, _B, _C = 3.4445, -4.7750, 2.0315
_NUM_ROUNDS = 5


class Muon(torch.optim.Optimizer):
    """For parameters of two dimensions.

    Args:
        params: the matrices.
        lr: of an update whose singular values are about one.
    """

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # no closure: nothing here uses one
        """One update of every matrix."""
        for group in self.param_groups:
            for matrix in group["params"]:
                state = self.state[matrix]
                momentum = state.setdefault("momentum", torch.zeros_like(matrix))
                momentum.lerp_(matrix.grad, 1 - MOMENTUM)
                update = _orthogonal(matrix.grad.lerp(momentum, MOMENTUM))
                rows, columns = matrix.shape
                matrix.add_(update, alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)


def _orthogonal(x: Tensor) -> Tensor:
    """Near the orthogonal matrix nearest to x, by Newton-Schulz iteration."""
    is_tall = x.shape[0] > x.shape[1]
    x = (x.T if is_tall else x) / (x.norm() + 1e-7)
    for _ in range(_NUM_ROUNDS):
        square = x @ x.T
        x = _A * x + (_B * square + _C * square @ square) @ x
    return x.T if is_tall else x
