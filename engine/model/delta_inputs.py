"""Describe a Gated DeltaNet layer to kernels: where its projections lie, and its constants.

Owns: nothing; the tensors are their makers'.
Invariant: distances are in values; value heads that share a key head lie side by side.
Never: computes anything.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class DeltaInputs:
    """A step's projections for one layer, and how far a key head's values are from the next's."""

    heads: torch.Tensor
    """[num_tokens, ...]: queries, keys and values."""
    places: tuple[int, int]
    """[num places]: first key, first value; queries are at 0."""
    key_step: int
    """Of queries, too."""
    value_step: int
    gates: torch.Tensor
    """[num_tokens, ...]: the output's."""
    gate_step: int
    betas: torch.Tensor
    """[num_tokens, ...]: one per value head, as time steps."""
    time_steps: torch.Tensor
    small_step: int
    """Distance of betas and time steps from one key head to the next."""


@dataclass(frozen=True, slots=True)
class DeltaConstants:
    """What a layer learnt, in float32, and where its part of a record is."""

    conv: torch.Tensor
    """[conv_size, conv_width]."""
    decay: torch.Tensor
    """[num_value_heads], as step_bias: logarithms, per unit of time."""
    step_bias: torch.Tensor
    norm: torch.Tensor
    """[value_dim]."""
    eps: float
    number: int
    """Place among the layers that keep a state."""
