"""Compute a layer's feed-forward block, dense or a mixture of experts.

Owns: the router of a mixture.
Invariant: a token's result depends on no other token of the step.
Never: knows norms or the residual stream.
"""

from __future__ import annotations

from typing import Any

import torch

from engine.checkpoint.model_config import ExpertsConfig, ModelConfig
from engine.model.backend import Backend
from engine.model.linear import Linears
from engine.model.weight import Weight


class FeedForward:
    """A layer's feed-forward: down(activation(gate(x)) * up(x))."""

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, Weight],
        prefix: str,
        backend: Backend,
        linears: Linears,
    ) -> None:
        self._gated = backend.gated
        self._activation = config.hidden_act
        gate_up, has_bias = [prefix + name for name in config.family.gate_up], config.has_mlp_bias
        self._gate_up = linears.make(weights, gate_up, has_bias=has_bias)
        self._down = linears.make(weights, [f"{prefix}down_proj"], has_bias=has_bias)

    def __call__(self, x: torch.Tensor, _step: Any) -> torch.Tensor:
        """What a step's tokens [num_tokens, hidden_size] become."""
        return self._down(self._gated(self._gate_up(x), self._activation))


class Experts:
    """A mixture: each token goes through the few feed-forwards that its router scores highest."""

    def __init__(
        self,
        experts: ExpertsConfig,
        weights: dict[str, Weight],
        prefix: str,
        activation: str,
        backend: Backend,
        linears: Linears,
    ) -> None:
        names = experts.names
        self._gated = backend.gated
        self._activation = activation
        router, has_bias = f"{prefix}{names.block}.{names.router}", names.has_bias
        self._router = linears.make(weights, [router], has_bias=has_bias)
        self._num_per_token = experts.num_per_token
        self._is_normalized = experts.is_normalized
        prefixes = [f"{prefix}{names.block}.experts.{i}." for i in range(experts.num_experts)]
        self._gate_ups = [
            linears.make(weights, [p + names.gate, p + names.up], has_bias=has_bias)
            for p in prefixes
        ]
        self._downs = [linears.make(weights, [p + names.down], has_bias=has_bias) for p in prefixes]
        self._compiled = linears.make_experts(experts, self._gate_ups, self._downs, activation)

    @property
    def is_one_kernel(self) -> bool:
        """False: torch has a part in it, and looks at values to know what comes next."""
        return self._compiled is not None

    def __call__(self, x: torch.Tensor, _step: Any) -> torch.Tensor:
        """What a step's tokens [num_tokens, hidden_size] become."""
        if self._compiled is not None:
            return self._compiled(x, self._router(x))
        scores = self._router(x).float().softmax(-1)
        shares, chosen = scores.topk(self._num_per_token)
        if self._is_normalized:
            shares /= shares.sum(-1, keepdim=True)
        # all pairs of a token and one of its experts, in the experts' order: a run for each
        order = chosen.flatten().argsort(stable=True)
        rows = order // self._num_per_token
        shares_in_order = shares.flatten()[order, None]
        counts = chosen.flatten().bincount(minlength=len(self._downs)).tolist()
        output, end = torch.zeros_like(x), 0
        for expert, count in enumerate(counts):
            if count:
                run = slice(end, end + count)
                inner = self._gated(self._gate_ups[expert](x[rows[run]]), self._activation)
                added = self._downs[expert](inner) * shares_in_order[run]
                output.index_add_(0, rows[run], added.to(x.dtype))
                end += count
        return output
