"""Tiny transformers checkpoints, made at test time: the oracle's own files.

They have random weights large enough that greedy decoding is neither tied nor stuck, non-zero
biases and norms away from 1, so that leaving one out shows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

GATED_DELTA_NETS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "phi3",
    "smollm3",
    "granite",
    "olmo2",
    "mixtral",
    "qwen3_moe",
    "ministral",
    "olmo3",
    "exaone4",
    "seed_oss",
    "olmoe",
    "gemma",
    "vaultgemma",
    "glm",
    "glm4",
    "ernie4_5",
    "gpt_oss",
    "ministral3",
    "gemma4_text",
    "gemma4_unified_text",
    *GATED_DELTA_NETS,
)

_TINY = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": 296,
    "eos_token_id": 297,
    "pad_token_id": None,
}
_GATED_DELTA = {
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_SHARED_EXPERT = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 56,
}
# what makes a tiny model of a family show all of its ways
_OWN: dict[str, dict[str, Any]] = {
    "gemma2": {
        "sliding_window": 24,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 4.0,
        "final_logit_softcapping": 5.0,
    },
    "gemma3_text": {
        "sliding_window": 24,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 24,
        "rope_theta": 20000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "phi3": {"head_dim": ..., "partial_rotary_factor": 0.75},
    "smollm3": {"no_rope_layer_interval": 2},
    "granite": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.1,
        "logits_scaling": 1.5,
    },
    "olmo2": {"initializer_range": 0.5},
    "ministral": {"sliding_window": 24},
    "olmo3": {
        "initializer_range": 0.5,
        "sliding_window": 24,
        "num_hidden_layers": 4,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "rope_theta": 20000.0,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "exaone4": {"initializer_range": 0.5, "sliding_window": 24, "sliding_window_pattern": 2},
    "seed_oss": {"attention_out_bias": True},
    "glm": {"partial_rotary_factor": 0.5},
    "ernie4_5": {"use_bias": True},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": False},
    "vaultgemma": {
        "sliding_window": 24,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 4.0,
        "final_logit_softcapping": 5.0,
    },
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "rope_theta": 20000.0,
            "llama_4_scaling_beta": 0.4,
        },
    },
    "gemma4_text": {
        "sliding_window": 24,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_key_value_heads": 4,
        "num_global_key_value_heads": 1,
        "global_head_dim": 32,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 5.0,
    },
    "gemma4_unified_text": {
        "sliding_window": 24,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_global_key_value_heads": 1,
        "global_head_dim": 32,
        "attention_k_eq_v": True,
        "tie_word_embeddings": False,
    },
    "muse_glimmer": {
        "num_hidden_layers": 5,  # counted from the last: the first has no rotation, either
        "sliding_window": 24,
        "final_logit_softcapping": 5.0,
        "output_multiplier": 0.4,
        "qk_scale_factor": 1.7,
        "post_norm_eps": 0.01,
    },
    "gpt_oss": {
        "sliding_window": 24,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 4,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "truncate": False,
            "rope_theta": 20000.0,
        },
    },
    "qwen3_next": _GATED_DELTA | _SHARED_EXPERT | {"num_hidden_layers": 4, "mlp_only_layers": [1]},
    "qwen3_5_text": _GATED_DELTA
    | {
        "num_hidden_layers": 5,
        "layer_types": ["linear_attention", "full_attention"] * 2 + ["linear_attention"],
    },
    "qwen3_5_moe_text": _GATED_DELTA | _SHARED_EXPERT | {"num_hidden_layers": 4},
    "qwen3_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "mlp_only_layers": [1],
    },
}


GEMMA4_E: dict[str, Any] = {
    "num_hidden_layers": 7,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"] * 2
    + ["full_attention"],
    "num_key_value_heads": 2,
    "num_global_key_value_heads": None,
    "attention_k_eq_v": False,
    "hidden_size_per_layer_input": 24,
    "vocab_size_per_layer_input": 310,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
}
"""What makes a tiny gemma4_text one of the small ones: inputs by layer, and layers that read the
keys and values of an earlier one."""
GEMMA4_MOE: dict[str, Any] = {
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 3,
    "moe_intermediate_size": 40,
}
"""What gives it experts beside the dense feed-forward."""


_SEEING = ("muse_glimmer",)
"""Families whose language model transformers has only as a part of one that sees."""
_EYES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
_EYES |= {"num_attention_heads": 2, "pos_emb_height": 2, "pos_emb_width": 2, "patch_size": 14}


def _auto_class(family: str) -> Any:
    """Find what makes a family's models."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if family in _SEEING else AutoModelForCausalLM


def use_one_thread() -> None:
    """Tiny matrices: a second thread of torch's costs five times what it brings, more under load.

    It is this process's; daemons and their workers count their own.
    """
    import torch

    torch.set_num_threads(1)


def tiny_keys(family: str, **overrides: Any) -> dict[str, Any]:
    """Say what the config.json of a family's tiny model has; an override of `...` drops a key."""
    keys = _TINY | _OWN.get(family, {}) | overrides
    keys = {key: value for key, value in keys.items() if value is not ...}
    return {"text_config": keys, "vision_config": _EYES} if family in _SEEING else keys


def make_checkpoint(
    folder: Path,
    family: str = "llama",
    dtype: str = "float32",
    seed: int = 0,
    max_shard_size: str = "1GB",
    **config_overrides: Any,
) -> Path:
    """Write config, weights, tokenizer (300 tokens) and chat template; returns the folder.

    An override of `...` drops the key, so that transformers' default takes its place.
    """
    import torch
    from transformers import AutoConfig

    from tests.byte_tokenizer import write_tokenizer

    use_one_thread()
    folder.mkdir(parents=True, exist_ok=True)
    config = AutoConfig.for_model(family, **tiny_keys(family, **config_overrides))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _auto_class(family).from_config(config, dtype=torch.float32)
        # some store the distance from 1
        is_from_1 = family in ("gemma", "gemma2", "gemma3_text", *_SEEING, *GATED_DELTA_NETS)
        norm_mean = 0.0 if is_from_1 else 1.0
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(("bias", ".sinks")):
                    parameter.normal_(std=0.3)
                elif name.endswith(("router.scale", "per_expert_scale")):
                    parameter.uniform_(0.4, 1.6)
                elif name.endswith("dt_bias"):
                    parameter.uniform_(-5.0, 1.0)
                elif name.endswith("A_log"):  # states that last hundreds of tokens, and a few
                    parameter.uniform_(-3.0, 1.5)
                elif name.endswith("linear_attn.norm.weight"):
                    parameter.normal_(mean=1.0, std=0.2)
                # factors of both signs: a tied head repeats less
                elif name in ("model.norm.weight", "model.language_model.norm.weight"):
                    parameter.normal_(mean=norm_mean - 1.0)
                elif parameter.dim() == 1:
                    parameter.normal_(mean=norm_mean, std=0.2)
            for name, buffer in model.named_buffers():
                if name.endswith("layer_scalar"):
                    buffer.uniform_(0.5, 1.5)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=max_shard_size)
    write_tokenizer(folder)
    return folder


def pack_experts(folder: Path) -> None:
    """Replace gpt-oss's experts by MXFP4, as it is published: other values, of about that size."""
    import json

    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(
            0, 256, (*shape, 16), dtype=torch.uint8, generator=generator
        )
        tensors[f"{name}_scales"] = torch.randint(
            121, 126, shape, dtype=torch.uint8, generator=generator
        )
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    keys = json.loads((folder / "config.json").read_text())
    keys["quantization_config"] = {"quant_method": "mxfp4", "dequantize": True}
    (folder / "config.json").write_text(json.dumps(keys))


def make_seeing_checkpoint(folder: Path, family: str = "gemma3") -> Path:
    """One that also sees: its language model is one part of the file among others."""
    import torch
    from transformers import (
        Gemma3Config,
        Gemma3ForConditionalGeneration,
        Mistral3Config,
        Mistral3ForConditionalGeneration,
    )

    from tests.byte_tokenizer import write_tokenizer

    text = {key: value for key, value in _TINY.items() if not key.endswith("token_id")}
    seen = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    seen |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    if family == "gemma3":
        config = Gemma3Config(
            text_config=text | _OWN["gemma3_text"] | {"pad_token_id": None},
            vision_config=seen,
            mm_tokens_per_image=4,
            eos_token_id=[296, 297],
        )
    else:
        text |= _OWN["ministral3"] | {"model_type": "ministral3", "pad_token_id": None}
        config = Mistral3Config(
            text_config=text,
            vision_config=seen | {"model_type": "pixtral", "head_dim": 16},
            tie_word_embeddings=False,
            eos_token_id=[296, 297],
        )
    kind = (
        Gemma3ForConditionalGeneration if family == "gemma3" else Mistral3ForConditionalGeneration
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        kind(config).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def load_oracle(folder: Path, dtype: str = "float32") -> Any:
    """The checkpoint as transformers loads it, in evaluation mode."""
    import torch
    from transformers import AutoConfig

    use_one_thread()
    kind = _auto_class(AutoConfig.from_pretrained(folder).model_type)
    return kind.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
