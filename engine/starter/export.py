"""The starter model as a checkpoint folder in Hugging Face's format.

Owns: what is written beside the weights.
Invariant: the folder is an ordinary Llama checkpoint, in bfloat16.
Never: trains, or overwrites a file of another kind.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from engine.starter import network as net
from engine.starter.lessons import BEGIN, CHAT_TEMPLATE, END, VOCAB_SIZE


def export(network: net.Network, tokenizer: Tokenizer, folder: Path) -> None:
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
    "hidden_size": net.HIDDEN,
    "intermediate_size": net.INNER,
    "num_hidden_layers": net.NUM_LAYERS,
    "num_attention_heads": net.NUM_HEADS,
    "num_key_value_heads": net.NUM_HEADS,
    "head_dim": net.HEAD_DIM,
    "hidden_act": "silu",
    "max_position_embeddings": net.MAX_POSITIONS,
    "rms_norm_eps": net.NORM_EPS,
    "rope_theta": net.ROPE_THETA,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
}
