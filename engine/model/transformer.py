"""The model: a step's tokens in, logits out, keys and values into the pool on the way.

Every layer is two blocks, attention and feed-forward, and each adds to the stream of tokens what it
makes of it: x += scale * norm(block(norm(x))), with those norms that the family has. What else the
families differ in is read from ModelConfig when a layer is built; a step only finds it done.
Owns: the order of layers and the weights in the shape that a step wants them.
Called by: engine.workers.runner.
Invariant: one forward is one step of any mix of prefill and decode; no state outlives it but the
pool's, and tables of cosines that only grow.
Never: samples, allocates blocks, trains.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  # its name everywhere

from engine.config import ExpertsConfig, ModelConfig
from engine.model.attention import AttentionPlan, Backend, StepBatch, choose_backend, write_kv
from engine.model.layers import Linear, bend, gated, linear, rms_norm, rope_table, rotate

__all__ = ["StepBatch", "Transformer"]

_MIN_TABLE_POSITIONS = 2048


@dataclass(frozen=True, slots=True)
class _Step:
    """What all layers of one step share."""

    kv: torch.Tensor
    plan: AttentionPlan
    angles: list[tuple[torch.Tensor, torch.Tensor]]
    """Cosine and signed sine of the step's positions, for each RoPE of the model."""


_Block = Callable[[torch.Tensor, _Step], torch.Tensor]


class Transformer:
    """A decoder over named weights.

    Args:
        config: the shape.
        weights: complete and final; they are read in place.
        dtype: of weights, activations and the pool.
        max_model_len: the longest request's tokens; None: all that the model has positions for.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, torch.Tensor],
        dtype: str,
        max_model_len: int | None = None,
    ) -> None:
        self.config = config
        self.dtype: torch.dtype = getattr(torch, dtype)
        prefix = config.family.prefix
        self._embedding = weights[f"{prefix}model.embed_tokens.weight"]
        # rounded as transformers rounds it, where it keeps the factor as a tensor
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=self.dtype).item()
        self._max_model_len = max_model_len or config.max_position_embeddings
        self._ropes = list(dict.fromkeys(rope for rope in config.ropes if rope is not None))
        self._tables: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._num_table_positions = 0
        backend = choose_backend(self._embedding.device.type, self.dtype)
        self.attention_backend = backend.name
        """Name of the attention backend in use."""
        self._layers = []
        for layer in range(config.num_layers):
            rope = config.ropes[layer]
            rope_index = None if rope is None else self._ropes.index(rope)
            self._layers.append(_Layer(config, weights, layer, rope_index, backend))
        self._norm_weight = _norm_weight(config, weights, f"{prefix}model.norm")
        self._head = self._embedding if config.is_tied else weights[f"{prefix}lm_head.weight"]

    @torch.inference_mode()
    def forward(self, batch: StepBatch, kv: torch.Tensor) -> torch.Tensor:
        """One step; returns float32 logits [len(batch.logit_rows), vocab_size].

        kv is the pool, [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim].
        """
        config = self.config
        self._grow_tables(max(batch.seq_lens))
        angles = [(cos[batch.positions], sin[batch.positions]) for cos, sin in self._tables]
        step = _Step(kv, AttentionPlan(batch, kv), angles)
        x = F.embedding(batch.input_ids, self._embedding)
        if self._embedding_scale != 1:
            x.mul_(self._embedding_scale)
        for layer in self._layers:
            x = layer(x, step)
        x = x[list(batch.logit_rows)]
        x = rms_norm(x, self._norm_weight, config.rms_norm_eps)
        logits = linear(x, self._head, None).float()
        if config.logit_divisor != 1:
            logits.div_(config.logit_divisor)
        return logits if config.logit_softcap is None else bend(logits, config.logit_softcap)

    def _grow_tables(self, num_positions: int) -> None:
        if num_positions > self._num_table_positions:
            size = max(_MIN_TABLE_POSITIONS, 1 << (num_positions - 1).bit_length())
            self._tables = [
                rope_table(rope, size, self._max_model_len, self.dtype) for rope in self._ropes
            ]
            self._num_table_positions = size


class _Layer:
    """One decoder layer: two blocks, each between its norms, each added to its input."""

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, torch.Tensor],
        layer: int,
        rope_index: int | None,
        backend: Backend,
    ) -> None:
        prefix = f"{config.family.prefix}model.layers.{layer}."
        attention = _Attention(config, weights, layer, rope_index, backend)
        experts = config.experts_of(layer)
        mlp: _Block
        if experts is None:
            mlp = _FeedForward(config, weights, f"{prefix}mlp.")
        else:
            mlp = _Experts(experts, weights, prefix, config.hidden_act)

        def norm(name: str | None) -> torch.Tensor | None:
            return None if name is None else _norm_weight(config, weights, prefix + name)

        norms = config.family.norms
        self._blocks: list[tuple[torch.Tensor | None, _Block, torch.Tensor | None]] = [
            (norm(norms.before_attention), attention, norm(norms.after_attention)),
            (norm(norms.before_mlp), mlp, norm(norms.after_mlp)),
        ]
        self._eps = config.rms_norm_eps
        self._scale = config.residual_scale

    def __call__(self, x: torch.Tensor, step: _Step) -> torch.Tensor:
        for before, block, after in self._blocks:
            added = block(x if before is None else rms_norm(x, before, self._eps), step)
            if after is not None:
                added = rms_norm(added, after, self._eps)
            x = x.add_(added, alpha=self._scale)
        return x


class _Attention:
    """Queries of the step's tokens over the keys and values of their sequences."""

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, torch.Tensor],
        layer: int,
        rope_index: int | None,
        backend: Backend,
    ) -> None:
        prefix = f"{config.family.prefix}model.layers.{layer}.self_attn."
        self._config = config
        self._layer = layer
        self._window = config.sliding_windows[layer]
        self._rope_index = rope_index
        self._attend = backend.attend
        self._qkv = Linear(weights, prefix, list(config.family.qkv), config.has_qkv_bias)
        self._output = Linear(weights, prefix, ["o_proj"], config.has_output_bias)
        self._qk_norms: list[torch.Tensor] = []
        """Of heads, [num_heads + num_kv_heads, head_dim], or one each of whole projections."""
        if config.family.qk_norm is not None:
            norms = [_norm_weight(config, weights, f"{prefix}{name}_norm") for name in "qk"]
            if config.family.qk_norm == "head":
                num_heads = (config.num_heads, config.num_kv_heads)
                rows = [n.expand(count, -1) for n, count in zip(norms, num_heads, strict=True)]
                norms = [torch.cat(rows)]
            self._qk_norms = norms

    def __call__(self, x: torch.Tensor, step: _Step) -> torch.Tensor:
        config = self._config
        num_q, num_kv, num_tokens = config.num_heads, config.num_kv_heads, len(x)
        heads = self._qkv(x).view(num_tokens, num_q + 2 * num_kv, config.head_dim)
        qk, v = heads[:, : num_q + num_kv], heads[:, num_q + num_kv :]
        if self._qk_norms:
            qk = self._normed(qk)
        if self._rope_index is not None:
            qk = rotate(qk, *step.angles[self._rope_index])
        q, k = qk[:, :num_q], qk[:, num_q:]
        write_kv(step.kv, self._layer, k, v, step.plan)
        output = self._attend(
            q,
            k,
            v,
            step.kv,
            self._layer,
            step.plan,
            config.attention_scale,
            self._window,
            config.attention_softcap,
        )
        return self._output(output.reshape(num_tokens, -1))

    def _normed(self, qk: torch.Tensor) -> torch.Tensor:
        """Queries and keys normed per head in one go, or each over all its heads."""
        num_q, eps = self._config.num_heads, self._config.rms_norm_eps
        if len(self._qk_norms) == 1:
            return rms_norm(qk, self._qk_norms[0], eps)
        q, k = (
            rms_norm(part.flatten(1), weight, eps).view(part.shape)
            for part, weight in zip((qk[:, :num_q], qk[:, num_q:]), self._qk_norms, strict=True)
        )
        return torch.cat((q, k), 1)


class _FeedForward:
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, weights: dict[str, torch.Tensor], prefix: str) -> None:
        self._activation = config.hidden_act
        self._gate_up = Linear(weights, prefix, list(config.family.gate_up), config.has_mlp_bias)
        self._down = Linear(weights, prefix, ["down_proj"], config.has_mlp_bias)

    def __call__(self, x: torch.Tensor, _step: _Step) -> torch.Tensor:
        return self._down(gated(self._gate_up(x), self._activation))


class _Experts:
    """A mixture: each token goes through the few feed-forwards that its router scores highest."""

    def __init__(
        self,
        experts: ExpertsConfig,
        weights: dict[str, torch.Tensor],
        prefix: str,
        activation: str,
    ) -> None:
        names = experts.names
        self._activation = activation
        self._router = weights[f"{prefix}{names.block}.gate.weight"]
        self._num_per_token = experts.num_per_token
        self._is_normalized = experts.is_normalized
        prefixes = [f"{prefix}{names.block}.experts.{i}." for i in range(experts.num_experts)]
        self._gate_ups = [Linear(weights, p, [names.gate, names.up], False) for p in prefixes]
        self._downs = [Linear(weights, p, [names.down], False) for p in prefixes]

    def __call__(self, x: torch.Tensor, _step: _Step) -> torch.Tensor:
        scores = linear(x, self._router, None).float().softmax(-1)
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
                inner = gated(self._gate_ups[expert](x[rows[run]]), self._activation)
                added = self._downs[expert](inner) * shares_in_order[run]
                output.index_add_(0, rows[run], added.to(x.dtype))
                end += count
        return output


def _norm_weight(config: ModelConfig, weights: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """A norm's factors, in float32 where the family rounds after the product."""
    family, weight = config.family, weights[f"{name}.weight"]
    if family.has_wide_norms:
        weight = weight.float()
    return weight + family.norm_offset if family.norm_offset else weight
