"""List the supported model families, one table row each.

A row's `defaults` are the keys of config.json that the family has, with transformers' default for
each; a key that is not among them means nothing to the family and is ignored, as transformers
ignores it. Numbers come out of those keys. What no key says is a field of the row.

There is no class and no branch per family anywhere else.

Invariant: a row is complete; None is "the family has no such part". What a number says is a key of
config.json, and no field.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.checkpoint.family import (
    COMMON,
    GATED_DELTA,
    GEMMAS,
    ExpertNames,
    Family,
    NormNames,
)

MIXTURES = (
    Family(
        "olmoe",
        "OlmoeForCausalLM",
        COMMON
        | {
            "vocab_size": 50304,
            "hidden_size": 2048,
            "intermediate_size": 2048,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
            "clip_qkv": None,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
            "bos_token_id": None,
            "eos_token_id": 50279,
        },
        qk_norm="projection",
        experts=ExpertNames(),
    ),
    Family(
        "mixtral",
        "MixtralForCausalLM",
        COMMON
        | {
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "sliding_window": None,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        experts=ExpertNames("block_sparse_moe.", gate="w1", up="w3", down="w2"),
    ),
    Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        COMMON
        | {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 24,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "attention_bias": False,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "num_local_experts": None,  # what newer files call num_experts
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": None,
            "bos_token_id": None,
            "eos_token_id": None,
        },
        qk_norm="head",
        experts=ExpertNames(),
    ),
    Family(
        "gpt_oss",
        "GptOssForCausalLM",
        COMMON
        | {
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 36,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "truncate": False,
            },
            "sliding_window": 128,
            "layer_types": None,
            "attention_bias": True,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
            "bos_token_id": None,
            "eos_token_id": None,
        },
        has_wide_norms=True,
        experts=ExpertNames(router="router", has_bias=True, stack="columns"),
        activation="clamped_swiglu",
        has_sinks=True,
    ),
)


_QWEN: dict[str, Any] = COMMON | {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
    "bos_token_id": None,
    "eos_token_id": None,
}

_OLMO2 = Family(
    "olmo2",
    "Olmo2ForCausalLM",
    COMMON
    | {
        "vocab_size": 50304,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "bos_token_id": None,
        "eos_token_id": 50279,
    },
    norms=NormNames(
        before_attention=None,
        after_attention="post_attention_layernorm",
        before_mlp=None,
        after_mlp="post_feedforward_layernorm",
    ),
    has_wide_norms=True,
    qk_norm="projection",
)

_GLM = Family(
    "glm",
    "GlmForCausalLM",
    COMMON
    | {
        "vocab_size": 151552,
        "intermediate_size": 13696,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1.5625e-7,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "attention_out_bias": False,
        "bos_token_id": None,
        "eos_token_id": [151329, 151336, 151338],
    },
    gate_up=("gate_up_proj",),
    has_partial_rotary=True,
    turns_neighbours=True,
)

_MISTRAL: dict[str, Any] = COMMON | {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}

_MINISTRAL3 = Family(
    "ministral3",
    "Ministral3ForCausalLM",
    COMMON
    | {
        "vocab_size": 131072,
        "intermediate_size": 14336,
        "num_hidden_layers": 34,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
        "sliding_window": None,
    },
    has_growing_queries=True,
)

_QWEN3_NEXT = Family(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    COMMON
    | GATED_DELTA
    | {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "partial_rotary_factor": 0.25,
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 10,
        "num_experts": 512,
        "norm_topk_prob": True,
        "mlp_only_layers": None,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    norm_offset=1.0,
    has_wide_norms=True,
    qk_norm="head",
    experts=ExpertNames(stack="rows", has_shared_expert=True),
    has_partial_rotary=True,
    delta_projections=("in_proj_qkvz", "in_proj_ba"),
    has_gates_in_queries=True,
)

_QWEN3_5_MOE_TEXT = replace(
    _QWEN3_NEXT,
    name="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    defaults={
        key: value
        for key, value in _QWEN3_NEXT.defaults.items()
        if key not in ("decoder_sparse_step", "mlp_only_layers", "norm_topk_prob")
    }
    | {
        "vocab_size": 248320,
        "num_hidden_layers": 40,
        "num_experts_per_tok": 8,
        "num_experts": 256,
    },
    delta_projections=("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    base="model.language_model.",
)

_QWEN3_5_TEXT = replace(
    _QWEN3_5_MOE_TEXT,
    name="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    defaults={
        key: value for key, value in _QWEN3_5_MOE_TEXT.defaults.items() if "expert" not in key
    }
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
    },
    experts=None,
)

_GATED_DELTA_NETS = (
    _QWEN3_NEXT,
    _QWEN3_5_TEXT,
    replace(
        _QWEN3_5_TEXT,
        name="qwen3_5",
        architecture="Qwen3_5ForConditionalGeneration",
        language="qwen3_5_text",
        section="text_config",
    ),
    _QWEN3_5_MOE_TEXT,
    replace(
        _QWEN3_5_MOE_TEXT,
        name="qwen3_5_moe",
        architecture="Qwen3_5MoeForConditionalGeneration",
        language="qwen3_5_moe_text",
        section="text_config",
    ),
)

_ROWS = (
    Family("llama", "LlamaForCausalLM", COMMON | {"attention_bias": False, "mlp_bias": False}),
    Family("mistral", "MistralForCausalLM", _MISTRAL),
    Family(
        "ministral",
        "MinistralForCausalLM",
        _MISTRAL | {"layer_types": None},
        window_period=None,
    ),
    _MINISTRAL3,
    replace(  # the language model of a checkpoint that also sees
        _MINISTRAL3,
        name="mistral3",
        architecture="Mistral3ForConditionalGeneration",
        language="ministral3",
        section="text_config",
        prefix="language_model.",
    ),
    Family("qwen2", "Qwen2ForCausalLM", _QWEN, has_qkv_bias=True),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        _QWEN | {"head_dim": 128, "attention_bias": False},
        qk_norm="head",
    ),
    *GEMMAS,
    Family(  # the language model of a checkpoint that also sees
        "muse_glimmer",
        "MuseGlimmerForConditionalGeneration",
        {
            key: value
            for key, value in COMMON.items()
            if key not in ("hidden_act", "tie_word_embeddings")  # it is never tied
        }
        | {
            "vocab_size": 202048,
            "hidden_size": 6656,
            "intermediate_size": 19968,
            "num_hidden_layers": 52,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "hidden_activation": "silu",
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "post_norm_eps": 1e-8,
            "attention_bias": False,
            "sliding_window": 2048,
            "layer_types": (),  # no default: files have both lists
            "layer_rope_theta": (),
            "final_logit_softcapping": 20.0,
            "qk_scale_factor": 3.87,
            "output_multiplier": 0.19611613513818404,
            "bos_token_id": 200000,
            "eos_token_id": 200001,
        },
        norms=NormNames(
            after_attention="post_attention_layernorm",
            before_mlp="pre_feedforward_layernorm",
            after_mlp="post_feedforward_layernorm",
        ),
        norm_offset=1.0,
        has_offset_last=False,
        has_wide_norms=True,
        qk_norm="unweighted",
        has_gated_attention=True,
        has_normed_embedding=True,
        language="muse_glimmer_text",
        section="text_config",
        base="model.language_model.",
    ),
    Family(
        "phi3",
        "Phi3ForCausalLM",
        COMMON
        | {
            "vocab_size": 32064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "eos_token_id": 32000,
        },
        qkv=("qkv_proj",),
        gate_up=("gate_up_proj",),
        has_partial_rotary=True,
        rope_aliases={"su": "longrope", "yarn": "longrope"},
    ),
    Family(
        "smollm3",
        "SmolLM3ForCausalLM",
        COMMON
        | {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_theta": 2e6,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
            "use_sliding_window": False,
            "sliding_window": None,
            "layer_types": None,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
        },
    ),
    Family(
        "granite",
        "GraniteForCausalLM",
        COMMON
        | {
            "attention_bias": False,
            "mlp_bias": False,
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
    ),
    _OLMO2,
    replace(
        _OLMO2,
        name="olmo3",
        architecture="Olmo3ForCausalLM",
        defaults={
            **_OLMO2.defaults,
            "sliding_window": 4096,
            "layer_types": None,
            "rope_theta": 500000.0,
            "rope_local_base_freq": 500000.0,
        },
        has_local_rope=True,
        window_period=4,
    ),
    Family(
        "exaone4",
        "Exaone4ForCausalLM",
        COMMON
        | {
            "vocab_size": 102400,
            "intermediate_size": 16384,
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "layer_types": None,
            "bos_token_id": 0,
        },
        norms=_OLMO2.norms,
        qk_norm="head",
        is_rotated_in_windows_only=True,
    ),
    Family(
        "seed_oss",
        "SeedOssForCausalLM",
        COMMON
        | {
            "vocab_size": 155136,
            "intermediate_size": 27648,
            "num_hidden_layers": 64,
            "num_attention_heads": 80,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 524288,
            "attention_bias": True,
            "attention_out_bias": False,
            "mlp_bias": False,
            "bos_token_id": 0,
        },
    ),
    _GLM,
    replace(
        _GLM,
        name="glm4",
        architecture="Glm4ForCausalLM",
        norms=NormNames(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm"),
    ),
    Family(
        "ernie4_5",
        "Ernie4_5ForCausalLM",
        COMMON
        | {
            "vocab_size": 103424,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 18,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
            "use_bias": False,
        },
        turns_neighbours=True,
    ),
    *MIXTURES,
    *_GATED_DELTA_NETS,
)

FAMILY_BY_NAME = {family.name: family for family in _ROWS}
FAMILY_BY_ARCHITECTURE = {family.architecture: family for family in _ROWS}


_STREAMS = "its layers compute four streams of tokens side by side and mix them (AltUp)"
_CHUNKED = "no kernel here supports its attention, which ends at chunk borders"
_SIGMOID = "no kernel here has its router, a corrected sigmoid, or its shared experts"
_LATENT = "its keys and values are compressed, which the KV pool does not support"

UNSERVED = {
    "gemma3n": _STREAMS,
    "llama4": _CHUNKED,
    "glm4moelite": _LATENT,
    "glm4moe": _SIGMOID,
    "deepseekv2": _LATENT,
    "deepseekv3": _LATENT,
}
"""Reasons by the beginning of an architecture's name in lower case, without marks.

config.json and GGUF agree up to that length."""


def reason(name: str) -> str | None:
    """Why an architecture or model type is not served, if that is known here."""
    if name in FAMILY_BY_NAME or name in FAMILY_BY_ARCHITECTURE:
        return None
    plain = "".join(letter for letter in name.lower() if letter.isalnum())
    plain = plain.replace("deepseek2", "deepseekv2")
    return next((why for start, why in UNSERVED.items() if plain.startswith(start)), None)
