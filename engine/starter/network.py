"""The starter model as a thing that can learn: a Llama in plain torch.

Owns: its shape, its forward pass over whole conversations, and how its weights begin.
Called by: train. Invariant: parameter names are those of Hugging Face's Llama without `model.`.
Never: serves.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

HIDDEN, INNER, NUM_LAYERS, NUM_HEADS = 256, 512, 4, 4
HEAD_DIM = HIDDEN // NUM_HEADS
# Most of the 32 rotary pairs hardly turn within the context, so that words can be matched over any
# distance; the first few turn fast enough to count single tokens.
ROPE_THETA = 1e12
NORM_EPS = 1e-6
MAX_POSITIONS = 10_240
_STD = 0.02
_NUM_FAST_PAIRS = 5
_FIRST_SLOW_PAIR = 11
_SHARPNESS = 1.25
_TOKEN = 3.0


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.k_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.v_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.o_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)

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
        return self.o_proj(out.transpose(1, 2).reshape(batch, time, HIDDEN))


class Mlp(nn.Module):
    """SwiGLU."""

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
        angles = torch.arange(MAX_POSITIONS)[:, None] * _frequencies()
        self.cos, self.sin = (
            nn.Buffer(wave, persistent=False)
            for wave in (
                torch.cat((angles, angles), -1).cos(),
                torch.cat((angles, angles), -1).sin(),
            )
        )
        _begin(self)

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


def _frequencies() -> Tensor:
    """Radians per position of each rotary pair."""
    return ROPE_THETA ** -(torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)


@torch.no_grad()
def _begin(network: Network) -> None:
    """Begin as a reader: wired so that looking up works a little before anything is learned.

    From plain random weights most of the training goes by before a head attends to anything. Here
    the first layer writes the last token into one part of the residual, and the six before it, as a
    bag of words, into another. Later layers attend to where the token before is the one that stands
    here, among the same words, and copy what stands there. Every weight is then trained.
    """
    for parameter in network.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=_STD)
    last, bag = HIDDEN - 2 * HEAD_DIM, HIDDEN - HEAD_DIM
    network.embed_tokens.weight[:, 0] = 2 * _STD  # a constant, for heads that count positions
    network.embed_tokens.weight[:, last:] = 0
    seen = torch.zeros(HEAD_DIM, HIDDEN)
    seen[:, 1:last] = nn.init.orthogonal_(torch.empty(HEAD_DIM, last - 1))
    first = network.each_layer[0].self_attn
    for head, (distance, part) in enumerate(((1.0, last), (2.5, bag), (4.5, bag), (6.5, bag))):
        _look_back(first, head, distance)
        columns = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
        first.v_proj.weight[columns] = seen
        # a head between two tokens takes half of each
        share = _STD * (1 if part == last else 2)
        first.o_proj.weight[:, columns] = 0
        first.o_proj.weight[part : part + HEAD_DIM, columns] = share * torch.eye(HEAD_DIM)
    for layer in network.each_layer:
        nn.init.zeros_(layer.mlp.down_proj.weight)
    for layer in network.each_layer[1:]:
        _seek_and_copy(layer.self_attn, seen, last, bag)


def _seek_and_copy(attention: Attention, seen: Tensor, last: int, bag: int) -> None:
    """Attend to what followed the same token among the same words, and say that."""
    copy = torch.zeros(HIDDEN, HIDDEN)
    copy[:, 1:last] = nn.init.orthogonal_(torch.empty(HIDDEN, last - 1))
    attention.v_proj.weight.copy_(copy)
    attention.o_proj.weight.copy_(3 * _STD * copy.T)
    slow = torch.arange(HEAD_DIM) % (HEAD_DIM // 2) >= _FIRST_SLOW_PAIR
    for head in range(NUM_HEADS):
        query, key = _of_head(attention, head)
        token = _TOKEN * nn.init.orthogonal_(torch.empty(HEAD_DIM, HEAD_DIM))[slow]
        words = nn.init.orthogonal_(torch.empty(HEAD_DIM, HEAD_DIM))[slow]
        query[slow] = token @ seen
        query[slow, last:bag] += words
        query[slow, bag:] += words
        key[slow, last:bag] = token
        key[slow, bag:] = words
        query *= _SHARPNESS
        key *= _SHARPNESS


def _look_back(attention: Attention, head: int, distance: float) -> None:
    """Make a head attend to the token `distance` before: its scores peak there."""
    turn = _frequencies()[:_NUM_FAST_PAIRS] * distance
    query, key = _of_head(attention, head)
    query[:_NUM_FAST_PAIRS, 0] = 3.0
    key[:_NUM_FAST_PAIRS, 0] = 3.0 * turn.cos()
    key[HEAD_DIM // 2 :][:_NUM_FAST_PAIRS, 0] = 3.0 * turn.sin()


def _of_head(attention: Attention, head: int) -> tuple[Tensor, Tensor]:
    """A head's query and key weights, [HEAD_DIM, HIDDEN] each, emptied."""
    rows = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
    return attention.q_proj.weight[rows].zero_(), attention.k_proj.weight[rows].zero_()
