"""The starter model as a thing that can learn: a Llama in plain torch.

Owns: its shape, and its forward pass over whole conversations.
Invariant: parameter names are those of Hugging Face's Llama without `model.`.
Never: serves.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

HIDDEN, INNER, NUM_LAYERS, NUM_HEADS, HEAD_DIM = 384, 320, 4, 3, 128
# Two thirds of the rotary pairs hardly turn within the context, so that words can be matched over
# any distance; the first few turn fast enough to count single tokens.
ROPE_THETA = 1e20
NORM_EPS = 1e-6
MAX_POSITIONS = 10_240


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, NUM_HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(HIDDEN, NUM_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(HIDDEN, NUM_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(NUM_HEADS * HEAD_DIM, HIDDEN, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[batch, time, HIDDEN] to the same."""
        batch, time, _ = x.shape
        q, k, v = (
            projection(x).view(batch, time, NUM_HEADS, HEAD_DIM).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = nn.functional.scaled_dot_product_attention(
            _rotate(q, cos, sin), _rotate(k, cos, sin), v, is_causal=True
        )
        return self.o_proj(out.transpose(1, 2).reshape(batch, time, NUM_HEADS * HEAD_DIM))


class Mlp(nn.Module):
    """A Llama layer's feed-forward: down(silu(gate(x)) * up(x))."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, INNER, bias=False)
        self.up_proj = nn.Linear(HIDDEN, INNER, bias=False)
        self.down_proj = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, HIDDEN] to the same."""
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Attention and MLP, each after a norm and beside the residual."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(HIDDEN, NORM_EPS)
        self.self_attn = Attention()
        self.post_attention_layernorm = nn.RMSNorm(HIDDEN, NORM_EPS)
        self.mlp = Mlp()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[batch, time, HIDDEN] to the same."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Network(nn.Module):
    """The model, with input and output embeddings tied.

    Args:
        vocab_size: tokens.
    """

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, HIDDEN)
        self.each_layer = [Layer() for _ in range(NUM_LAYERS)]
        self.layers = nn.ModuleList(self.each_layer)
        self.norm = nn.RMSNorm(HIDDEN, NORM_EPS)
        angles = torch.arange(MAX_POSITIONS)[:, None] * frequencies()
        self.cos, self.sin = (
            nn.Buffer(wave, persistent=False)
            for wave in (
                torch.cat((angles, angles), -1).cos(),
                torch.cat((angles, angles), -1).sin(),
            )
        )

    def forward(self, ids: Tensor, rows: Tensor) -> Tensor:
        """Logits [len(rows), vocab_size] at `rows` of the flattened ids [batch, time]."""
        x = self.embed_tokens(ids)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for layer in self.each_layer:
            x = layer(x, cos, sin)
        return nn.functional.linear(self.norm(x.flatten(0, 1)[rows]), self.embed_tokens.weight)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = HEAD_DIM // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def frequencies() -> Tensor:
    """Radians per position of each rotary pair."""
    return ROPE_THETA ** -(torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
