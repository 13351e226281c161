"""Repositories in the likeness of published ones: configurations and sizes, written from memory."""

from __future__ import annotations

import json
from typing import Any

from tests.worlds.hub_server import Repository

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
    "rms_norm_eps": 1e-06,
    "vocab_size": 151936,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rms_norm_eps": 1e-05,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}

CONFIGS: dict[str, tuple[dict[str, Any], int]] = {
    "Qwen/Qwen3-0.6B": (
        _QWEN3
        | {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "tie_word_embeddings": True,
        },
        596_049_920,
    ),
    "Qwen/Qwen3-8B": (
        _QWEN3
        | {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
        },
        8_190_735_360,
    ),
    "Qwen/Qwen3-30B-A3B": (
        _QWEN3
        | {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
        },
        30_532_122_624,
    ),
    "Qwen/Qwen3-32B": (
        _QWEN3
        | {
            "hidden_size": 5120,
            "intermediate_size": 25600,
            "num_hidden_layers": 64,
            "num_attention_heads": 64,
        },
        32_762_123_264,
    ),
    "meta-llama/Llama-3.1-8B-Instruct": (
        _LLAMA
        | {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
        },
        8_030_261_248,
    ),
    "meta-llama/Llama-3.3-70B-Instruct": (
        _LLAMA
        | {
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
        },
        70_553_706_496,
    ),
}
"""By name: config.json, and the parameters that the model's page says it has."""

GGUF = {
    "Qwen3-8B-Q4_K_M.gguf": 5_027_783_488,
    "Qwen3-8B-Q6_K.gguf": 6_725_899_264,
    "Qwen3-8B-Q8_0.gguf": 8_709_518_624,
}
"""Of Qwen/Qwen3-8B-GGUF."""


def repository(name: str) -> Repository:
    """With everything but weights, which are only listed, in two parts."""
    config, num_parameters = CONFIGS[name]
    parts = [f"model-{i:05}-of-00002.safetensors" for i in (1, 2)]
    small = {"config.json": json.dumps(config).encode(), "tokenizer.json": b"{}"}
    files = small | {"model.safetensors.index.json": b"{}"}
    return Repository(dict(files), listed=dict.fromkeys(parts, num_parameters))
