"""Compute the pieces of a decoder layer as plain functions on tensors.

The arithmetic of norms, rotary embedding and gates is transformers', cast for cast.

Invariant: results in float32 agree with transformers to rounding; frequencies to the last bit.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812  # its name everywhere

from engine.checkpoint.rope import RopeConfig

_SWIGLU_LIMIT, _SWIGLU_ALPHA = 7.0, 1.702  # as in engine/kernels/fused.c


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise by the root mean square over the last dimension, in float32.

    The result is rounded to the dtype of x after the product with a float32 weight, and before
    that with a weight of its own dtype.
    """
    wide = x.float()
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (wide * scale).to(weight.dtype).mul_(weight).to(x.dtype)


def gated(gate_up: torch.Tensor, activation: str, up: torch.Tensor | None = None) -> torch.Tensor:
    """Compute activation(gate) * up of the halves of the last dimension, perhaps in place.

    With `up` given, the first argument is gate alone.
    """
    gate, up = gate_up.chunk(2, -1) if up is None else (gate_up, up)
    if activation == "clamped_swiglu":
        wide = gate.float().clamp_(max=_SWIGLU_LIMIT)
        open_gate = (wide * (wide * _SWIGLU_ALPHA).sigmoid_()).to(gate.dtype)
        return up.clamp_(-_SWIGLU_LIMIT, _SWIGLU_LIMIT).add_(1).mul_(open_gate)
    if activation == "silu":
        return F.silu(gate, inplace=True).mul_(up)
    if activation == "sigmoid":
        return gate.sigmoid().mul_(up)
    return F.gelu(gate, approximate="tanh").mul_(up)


def split_gates(
    x: torch.Tensor, num_heads: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Take gates [num_tokens, num_heads * head_dim] out of a projection.

    There each lies behind its query; keys and values, behind them all, stay with the queries.
    """
    pairs, rest = x.tensor_split([2 * num_heads * head_dim], -1)
    queries, gates = pairs.view(len(x), num_heads, 2 * head_dim).chunk(2, -1)
    return torch.cat((queries.flatten(1), rest), -1), gates.flatten(1)


def soft_cap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """Overwrite x with cap * tanh(x / cap), which bounds large values."""
    return x.div_(cap).tanh_().mul_(cap)


def rotate(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Turn heads [num_tokens, num_heads, head_dim] by their positions' angles.

    cos and signed_sin are [num_tokens, 1, rotary_dim]; the first half of signed_sin is negated, for
    it multiplies the swapped halves. Dimensions beyond rotary_dim pass as they are.
    """
    rotary_dim = cos.shape[-1]
    if rotary_dim < x.shape[-1]:
        return torch.cat((rotate(x[..., :rotary_dim], cos, signed_sin), x[..., rotary_dim:]), -1)
    half = rotary_dim // 2
    swapped = torch.cat((x[..., half:], x[..., :half]), -1)
    return (x * cos).add_(swapped.mul_(signed_sin))


def rope_table(
    config: RopeConfig,
    num_positions: int,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute cosine and signed sine for `rotate`, each [num_positions, 1, rotary_dim].

    Computed on the CPU whatever the device: to the last bit the same everywhere.
    """
    frequencies = rope_frequencies(config, max_model_len)
    angles = torch.arange(num_positions).float()[:, None] * frequencies
    cos = angles.cos().mul_(config.attention_factor)
    sin = angles.sin().mul_(config.attention_factor)
    signed_sin = torch.cat((-sin, sin), -1)
    cosine = torch.cat((cos, cos), -1)[:, None]
    return cosine.to(device, dtype), signed_sin[:, None].to(device, dtype)


def query_growth(config: RopeConfig, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Compute the factors of queries at positions [num_tokens]: [num_tokens, 1, 1]."""
    spans = torch.floor(positions / config.original_max_position_embeddings)
    return (1 + config.query_growth * torch.log(1 + spans))[:, None, None].to(dtype)


def rope_frequencies(config: RopeConfig, max_model_len: int) -> torch.Tensor:
    """Compute radians per position for each pair of dimensions: [rotary_dim / 2], float32.

    max_model_len is the longest request's; only longrope depends on it.
    """
    dim = config.rotary_dim
    wavelengths = config.theta ** (torch.arange(0, dim, 2, dtype=torch.float) / dim)
    frequencies = 1.0 / wavelengths
    if config.kind == "proportional":
        frequencies[config.num_turned_pairs :] = 0.0
        return frequencies / config.factor
    if config.kind == "linear":
        return frequencies / config.factor
    if config.kind == "llama3":
        return _llama3_frequencies(config, frequencies)
    if config.kind == "yarn":
        return _yarn_frequencies(config, wavelengths)
    if config.kind == "longrope":
        return 1.0 / (torch.tensor(config.factors(max_model_len)) * wavelengths)
    return frequencies


def _llama3_frequencies(config: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Keep short wavelengths, stretch long ones by the factor, blend those between."""
    original, low, high = (
        config.original_max_position_embeddings,
        config.low_freq_factor,
        config.high_freq_factor,
    )
    wavelengths = 2 * math.pi / frequencies
    is_long, is_short = wavelengths > original / low, wavelengths < original / high
    blend = (original / wavelengths - low) / (high - low)
    blended = (1 - blend) * frequencies / config.factor + blend * frequencies
    stretched = torch.where(is_long, frequencies / config.factor, frequencies)
    return torch.where(is_long | is_short, stretched, blended)


def _yarn_frequencies(config: RopeConfig, wavelengths: torch.Tensor) -> torch.Tensor:
    """Blend original and stretched frequencies along a ramp over the dimensions."""
    num_pairs = len(wavelengths)
    head_dim = 2 * num_pairs

    def dimension_of(num_rotations: float) -> float:
        # the dimension that turns so often over the original context
        turns = config.original_max_position_embeddings / (num_rotations * 2 * math.pi)
        return (head_dim * math.log(turns)) / (2 * math.log(config.theta))

    low, high = dimension_of(config.beta_fast), dimension_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp, without dividing by zero
    ramp = ((torch.arange(num_pairs, dtype=torch.float32) - low) / (high - low)).clamp_(0, 1)
    keep = 1 - ramp
    return 1.0 / (config.factor * wavelengths) * (1 - keep) + 1.0 / wavelengths * keep
