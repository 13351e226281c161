"""Compute a layer's feed-forward block: dense, a mixture of experts, or both.

Invariant: a token's result depends on no other token of the step.
"""

from __future__ import annotations

from typing import Any

import torch

from engine.checkpoint.model_config import ExpertsConfig, ModelConfig
from engine.worker.model.backend import Backend
from engine.worker.model.linear import Linears
from engine.worker.model.weight import Weight


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
        """Read the matrices under a prefix that ends with a dot."""
        gate_up, has_bias = [prefix + name for name in config.family.gate_up], config.has_mlp_bias
        how = weights, gate_up, config.hidden_act, backend.gated
        self._gated = linears.make_gated(*how, has_bias=has_bias)
        down = [f"{prefix}down_proj"]
        self._down = linears.make(weights, down, has_bias=has_bias, kind="output")

    def __call__(self, x: torch.Tensor, step: Any) -> torch.Tensor:
        """Return what a step's tokens [num_tokens, hidden_size] become."""
        return self._down(self._gated(x, step.num_few), step.num_few)


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
        router, has_bias = f"{prefix}{names.block}{names.router}", names.has_bias
        self._router = linears.make(weights, [router], has_bias=has_bias, kind="router")
        self._num_per_token = experts.num_per_token
        self._is_normalized = experts.is_normalized
        self._share_scale: torch.Tensor | None = None
        """Factors of each expert's share, float32 [num_experts]; None: shares are as they are."""
        if names.beside_dense is not None:
            name = prefix + names.beside_dense.share_scale
            self._share_scale = weights[name].values.float()
        prefixes = [f"{prefix}{names.block}experts.{i}." for i in range(experts.num_experts)]
        self._gate_ups = [
            linears.make(weights, [p + names.gate, p + names.up], has_bias=has_bias)
            for p in prefixes
        ]
        self._downs = [linears.make(weights, [p + names.down], has_bias=has_bias) for p in prefixes]
        self._compiled = linears.make_experts(
            experts, self._gate_ups, self._downs, activation, self._share_scale
        )

    @property
    def is_one_kernel(self) -> bool:
        """False: torch has a part in it, and looks at values to know what comes next."""
        return self._compiled is not None

    def __call__(self, x: torch.Tensor, step: Any) -> torch.Tensor:
        """Return what a step's tokens [num_tokens, hidden_size] become."""
        return self.routed(x, self.scores(x, step), step)

    def scores(self, x: torch.Tensor, step: Any) -> torch.Tensor:
        """Return the router's score of each expert, [num_tokens, num_experts]."""
        return self._router(x, step.num_few)

    def routed(self, x: torch.Tensor, scores: torch.Tensor, step: Any) -> torch.Tensor:
        """Send tokens [num_tokens, hidden_size] through the experts that their scores choose."""
        if self._compiled is not None:
            return self._compiled(x, scores, step.num_few)
        shares, chosen = scores.float().softmax(-1).topk(self._num_per_token)
        if self._is_normalized:
            shares /= shares.sum(-1, keepdim=True)
        if self._share_scale is not None:
            shares *= self._share_scale[chosen]
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


class WithSharedExpert:
    """Add to a mixture an expert that every token goes through, scaled by a gate of its own."""

    def __init__(
        self,
        weights: dict[str, Weight],
        prefix: str,
        experts: Experts,
        shared: FeedForward,
        backend: Backend,
        linears: Linears,
    ) -> None:
        self._experts, self._shared, self._backend = experts, shared, backend
        self._gate = linears.make(weights, [f"{prefix}shared_expert_gate"], kind="gate")
        self._one: torch.Tensor | None = None

    @property
    def is_one_kernel(self) -> bool:
        """False: torch has a part in it, and looks at values to know what comes next."""
        return self._experts.is_one_kernel

    def __call__(self, x: torch.Tensor, step: Any) -> torch.Tensor:
        """Return what a step's tokens [num_tokens, hidden_size] become."""
        routed, shared = self._experts(x, step), self._shared(x, step)
        if self._one is None:
            self._one = x.new_ones(1, 1)
        share = self._backend.gated(
            self._gate(x, step.num_few), "sigmoid", self._one.expand(len(x), 1)
        )
        self._backend.grow(shared[:, None], share[:, None])
        self._backend.add(routed, shared, 1.0)
        return routed


class DenseAndExperts:
    """Add up a dense feed-forward and a mixture, each with norms of its own.

    The dense one reads what the branch has normed. The experts and their router read norms of the
    stream itself.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, Weight],
        prefix: str,
        dense: FeedForward,
        experts: Experts,
        backend: Backend,
    ) -> None:
        assert config.experts is not None
        names = config.experts.names.beside_dense
        assert names is not None
        self._dense, self._experts, self._backend = dense, experts, backend
        self._eps = config.rms_norm_eps
        places = (names.after_dense, names.before_experts, names.after_experts)
        self._after_dense, self._before_experts, self._after_experts = (
            weights[f"{prefix}{place}.weight"].values.float() for place in places
        )
        scale = weights[prefix + names.router_scale].values.float()
        self._router_scale = scale * config.hidden_size**-0.5

    @property
    def is_one_kernel(self) -> bool:
        """False: torch has a part in it, and looks at values to know what comes next."""
        return self._experts.is_one_kernel

    def __call__(self, x: torch.Tensor, step: Any) -> torch.Tensor:
        """Return what a step's tokens [num_tokens, hidden_size] become."""
        backend, eps = self._backend, self._eps
        made = self._dense(x, step)
        backend.norm_rows(made[:, None], self._after_dense[None], eps)
        scores = self._experts.scores(backend.norm(step.stream, self._router_scale, eps), step)
        read = backend.norm(step.stream, self._before_experts, eps)
        routed = self._experts.routed(read, scores, step)
        backend.norm_rows(routed[:, None], self._after_experts[None], eps)
        backend.add(made, routed, 1.0)
        return made
