"""The starter model as a thing that can learn, and as the folder that it becomes.

Owns: its shape, and its forward pass over whole conversations; what is written beside the weights.
Invariant: parameter names are those of Hugging Face's Llama without `model.`.
Never: serves.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from engine.starter.lessons import BEGIN, CHAT_TEMPLATE, END, VOCAB_SIZE

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


# The starter model as a checkpoint folder in Hugging Face's format.
# Invariant: the folder is an ordinary Llama checkpoint, in bfloat16.
# Never: trains, or overwrites a file of another kind.


def export(network: Network, tokenizer: Tokenizer, folder: Path) -> None:
    """Write config, weights, tokenizer, chat template and generation defaults."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        f"model.{name}": parameter.detach().to("cpu", torch.bfloat16).contiguous()
        for name, parameter in network.named_parameters()
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors writes it for its owner alone
    tokenizer.save(str(folder / "tokenizer.json"))
    begin, end = tokenizer.token_to_id(BEGIN), tokenizer.token_to_id(END)
    _write(folder / "config.json", {**_SHAPE, "bos_token_id": begin, "eos_token_id": end})
    _write(
        folder / "generation_config.json",
        {"bos_token_id": begin, "eos_token_id": end, "do_sample": False},
    )
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BEGIN,
            "eos_token": END,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


_SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "max_position_embeddings": MAX_POSITIONS,
    "rms_norm_eps": NORM_EPS,
    "rope_theta": ROPE_THETA,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
}
