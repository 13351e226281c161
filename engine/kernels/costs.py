"""Compute the fewest bytes and operations that each kernel call needs.

Bytes cross the device's memory once; a product and its sum are two operations. A measured time is a
fraction of what they take at the device's rates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from engine.checkpoint.checkpoint import expected_shapes
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.weights_layout import is_embedding


@dataclass(frozen=True, slots=True)
class Cost:
    """What one call of a kernel moves and computes at least."""

    num_bytes: int
    num_flops: int = 0

    def is_bound_by_bytes(self, bytes_per_s: float, flops_per_s: float) -> bool:
        """Say whether moving takes longer than multiplying."""
        return self.num_bytes / bytes_per_s >= self.num_flops / flops_per_s


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads and widths of one attention layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    itemsize: int
    window: int | None = None


def attention_cost(heads: AttentionShape, sequences: Sequence[tuple[int, int]]) -> Cost:
    """Cost of attention over (tokens before, new tokens) pairs: each visible key is read once."""
    num_keys = num_pairs = num_queries = 0
    for context, new in sequences:
        window = heads.window or context + new
        num_keys += min(context + new, window + new - 1)
        num_pairs += sum(min(position + 1, window) for position in range(context, context + new))
        num_queries += new
    keys_and_values = 2 * num_keys * heads.num_kv_heads
    queries_and_results = 2 * num_queries * heads.num_heads
    return Cost(
        (keys_and_values + queries_and_results) * heads.head_dim * heads.itemsize,
        4 * num_pairs * heads.num_heads * heads.head_dim,
    )


def place_cost(heads: AttentionShape, num_tokens: int) -> Cost:
    """Cost of rotating queries and keys in place and writing keys and values to the pool."""
    read = heads.num_heads + 2 * heads.num_kv_heads
    written = read + 2 * heads.num_kv_heads
    return Cost((read + written) * num_tokens * heads.head_dim * heads.itemsize)


def norm_cost(num_tokens: int, dim: int, itemsize: int) -> Cost:
    """Cost of adding to the residual stream, keeping the sum, and normalising it."""
    return Cost(4 * num_tokens * dim * itemsize)


def gated_cost(num_tokens: int, width: int, itemsize: int) -> Cost:
    """Cost of activation(gate) * up: both halves read, one written."""
    return Cost(3 * num_tokens * width * itemsize)


def sample_cost(num_rows: int, vocab_size: int) -> Cost:
    """Cost of greedy sampling: float32 logits read once."""
    return Cost(num_rows * vocab_size * 4)


def product_cost(
    num_tokens: int, num_rows: int, depth: int, itemsize: int, num_outputs: int | None = None
) -> Cost:
    """Cost of multiplying tokens by a matrix [num_rows, depth]; num_outputs: fewer, of gates."""
    num_outputs = num_rows if num_outputs is None else num_outputs
    num_values = num_rows * depth + num_tokens * (num_outputs + depth)
    return Cost(num_values * itemsize, 2 * num_tokens * num_rows * depth)


@dataclass(frozen=True, slots=True)
class StepValues:
    """A model's weights by how a step uses them; vectors count for nothing."""

    dense: int
    """Values of matrices that multiply every token."""
    experts: int
    """Values of all experts' matrices."""
    expert_share: float
    """Share of an experts' layer that multiplies one token."""
    head: int
    """Values of the projection to logits, once per sequence; embeddings are looked up."""

    def read(self, batch: int) -> int:
        """Values that a decode step reads at least: of the experts as many as it can need."""
        return self.dense + self.head + round(self.experts * min(1.0, batch * self.expert_share))

    def prefill_flops(self, num_tokens: int) -> int:
        """Operations of the products for a prompt, which has logits for its last token."""
        of_each = self.dense + self.experts * self.expert_share
        return round(2 * (of_each * num_tokens + self.head))


def step_values(config: ModelConfig) -> StepValues:
    """Compute the values that one step needs at least, by the model's shape."""
    sizes = {name: math.prod(shape) for name, shape in expected_shapes(config) if len(shape) > 1}
    ends = {n: size for n, size in sizes.items() if is_embedding(n) or n.endswith("lm_head.weight")}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    mixture = config.experts
    share = 0.0 if mixture is None else mixture.num_per_token / mixture.num_experts
    dense = sum(sizes.values()) - sum(ends.values()) - experts
    return StepValues(dense, experts, share, config.vocab_size * config.hidden_size)
