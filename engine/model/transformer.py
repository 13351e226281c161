"""The model: a step's tokens in, logits out, keys and values into the pool on the way.

Owns: the order of layers and the weights in the shape that a step wants them.
Called by: engine.workers.runner.
Invariant: one forward is one step of any mix of prefill and decode; no state outlives it but the
pool's, and a table of cosines that only grows.
Never: samples, allocates blocks, trains.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  # its name everywhere

from engine.config import ModelConfig
from engine.model.attention import AttentionPlan, Backend, StepBatch, choose_backend, write_kv
from engine.model.layers import Linear, linear, rms_norm, rope_table, rotate, silu_gate

__all__ = ["StepBatch", "Transformer"]

_MIN_TABLE_POSITIONS = 2048


class Transformer:
    """A Llama-shaped decoder over named weights.

    Args:
        config: the shape.
        weights: complete and final; they are read in place.
        dtype: of weights, activations and the pool.
    """

    def __init__(self, config: ModelConfig, weights: dict[str, torch.Tensor], dtype: str) -> None:
        self.config = config
        self.dtype: torch.dtype = getattr(torch, dtype)
        self._embedding = weights["model.embed_tokens.weight"]
        self._layers = [_Layer(config, weights, layer) for layer in range(config.num_layers)]
        self._norm_weight = weights["model.norm.weight"]
        self._head = self._embedding if config.is_tied else weights["lm_head.weight"]
        self._cos, self._signed_sin = self._embedding.new_empty(2, 0)
        self._backend = choose_backend(self._embedding.device.type, self.dtype)

    @property
    def attention_backend(self) -> str:
        """Name of the attention backend in use."""
        return self._backend.name

    @torch.inference_mode()
    def forward(self, batch: StepBatch, kv: torch.Tensor) -> torch.Tensor:
        """One step; returns float32 logits [len(batch.logit_rows), vocab_size].

        kv is the pool, [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim].
        """
        plan = AttentionPlan(batch, kv)
        self._grow_tables(max(batch.seq_lens))
        cos, signed_sin = self._cos[batch.positions], self._signed_sin[batch.positions]
        x = F.embedding(batch.input_ids, self._embedding)
        for layer in self._layers:
            x = layer.attend(x, kv, plan, cos, signed_sin, self._backend)
            x = layer.feed_forward(x)
        x = x[list(batch.logit_rows)]
        x = rms_norm(x, self._norm_weight, self.config.rms_norm_eps)
        return linear(x, self._head, None).float()

    def _grow_tables(self, num_positions: int) -> None:
        if num_positions > len(self._cos):
            size = max(_MIN_TABLE_POSITIONS, 1 << (num_positions - 1).bit_length())
            tables = rope_table(self.config.rope, self.config.head_dim, size, self.dtype)
            self._cos, self._signed_sin = tables


class _Layer:
    """One decoder layer: attention, then the gated feed-forward, each added to its input."""

    def __init__(self, config: ModelConfig, weights: dict[str, torch.Tensor], layer: int) -> None:
        prefix = f"model.layers.{layer}."
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        self._layer = layer
        self._config = config
        self._window = config.sliding_windows[layer]
        self._scale = config.head_dim**-0.5
        self._input_norm = weights[f"{prefix}input_layernorm.weight"]
        self._qkv = Linear(weights, attention, ["q_proj", "k_proj", "v_proj"], config.has_qkv_bias)
        self._qk_norm: torch.Tensor | None = None
        if config.has_qk_norm:
            q_norm = weights[f"{attention}q_norm.weight"].expand(config.num_heads, -1)
            k_norm = weights[f"{attention}k_norm.weight"].expand(config.num_kv_heads, -1)
            self._qk_norm = torch.cat((q_norm, k_norm))
        self._output = Linear(weights, attention, ["o_proj"], config.has_output_bias)
        self._mlp_norm = weights[f"{prefix}post_attention_layernorm.weight"]
        self._gate_up = Linear(weights, mlp, ["gate_proj", "up_proj"], config.has_mlp_bias)
        self._down = Linear(weights, mlp, ["down_proj"], config.has_mlp_bias)

    def attend(
        self,
        x: torch.Tensor,
        kv: torch.Tensor,
        plan: AttentionPlan,
        cos: torch.Tensor,
        signed_sin: torch.Tensor,
        backend: Backend,
    ) -> torch.Tensor:
        config = self._config
        num_q, num_kv, num_tokens = config.num_heads, config.num_kv_heads, len(x)
        qkv = self._qkv(rms_norm(x, self._input_norm, config.rms_norm_eps))
        heads = qkv.view(num_tokens, num_q + 2 * num_kv, config.head_dim)
        qk, v = heads[:, : num_q + num_kv], heads[:, num_q + num_kv :]
        if self._qk_norm is not None:
            qk = rms_norm(qk, self._qk_norm, config.rms_norm_eps)
        qk = rotate(qk, cos, signed_sin)
        q, k = qk[:, :num_q], qk[:, num_q:]
        write_kv(kv, self._layer, k, v, plan)
        output = backend.attend(q, k, v, kv, self._layer, plan, self._scale, self._window)
        return x.add_(self._output(output.view(num_tokens, -1)))

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = silu_gate(self._gate_up(rms_norm(x, self._mlp_norm, self._config.rms_norm_eps)))
        return x.add_(self._down(inner))
