"""Compute the per-layer embeddings of a step's tokens, and what each layer adds from them.

Invariant: a token's inputs depend on its id and its embedding alone.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from engine.checkpoint.model_config import ModelConfig
from engine.worker.model.backend import Backend
from engine.worker.model.linear import Linears
from engine.worker.model.weight import Weight, embedded


class LayerInputs:
    """Make a step's inputs of all layers."""

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, Weight],
        dtype: torch.dtype,
        backend: Backend,
        linears: Linears,
    ) -> None:
        assert config.layer_inputs is not None
        prefix = f"{config.family.prefix}model."
        self._size = config.layer_inputs.size
        self._config, self._dtype, self._backend = config, dtype, backend
        self._embedding = weights[f"{prefix}embed_tokens_per_layer.weight"]
        # rounded as transformers rounds it, where it keeps the factor as a tensor
        scale = math.sqrt(self._size)
        self._embedding_scale = torch.tensor(scale, dtype=dtype).item()
        projection = f"{prefix}per_layer_model_projection"
        self._project = linears.make(weights, [projection], is_kept=True)
        norm = weights[f"{prefix}per_layer_projection_norm.weight"].values.float()
        self._norm = norm.expand(config.num_layers, -1).contiguous()

    def __call__(self, ids: torch.Tensor, x: torch.Tensor, num_few: int) -> torch.Tensor:
        """Compute tokens' inputs, [num_tokens, num_layers, size], from ids and embeddings."""
        config = self._config
        shape = (len(ids), config.num_layers, self._size)
        projected = self._project(x, num_few).mul_(config.hidden_size**-0.5).view(shape)
        self._backend.norm_rows(projected, self._norm, config.rms_norm_eps)
        own = embedded(self._embedding, ids, self._dtype).mul_(self._embedding_scale)
        return projected.add_(own.view(shape)).mul_(2**-0.5)


class LayerInput:
    """Compute what one layer makes of its inputs: project(activation(gate(x)) * inputs)."""

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, Weight],
        prefix: str,
        layer: int,
        backend: Backend,
        linears: Linears,
    ) -> None:
        self._layer, self._activation, self._gated = layer, config.hidden_act, backend.gated
        self._gate = linears.make(weights, [f"{prefix}per_layer_input_gate"])
        self._project = linears.make(weights, [f"{prefix}per_layer_projection"])

    def __call__(self, x: torch.Tensor, step: Any) -> torch.Tensor:
        """Return what is to be added to tokens [num_tokens, hidden_size]."""
        inputs = step.layer_inputs[:, self._layer]
        gated = self._gated(self._gate(x, step.num_few), self._activation, inputs)
        return self._project(gated, step.num_few)
