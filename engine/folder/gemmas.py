"""The supported Gemmas: rows of the table of families.

Owns: those rows. Invariant: as for all rows, engine.folder.families says it.
Never: reads a file.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.folder.family import COMMON, Family, NormNames

_GEMMA2: dict[str, Any] = {key: value for key, value in COMMON.items() if key != "hidden_act"} | {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "use_bidirectional_attention": None,
    "sliding_window": 4096,
    "layer_types": None,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "bos_token_id": 2,
    "eos_token_id": 1,
}

_GEMMA3_TEXT = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    _GEMMA2
    | {
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "rope_local_base_freq": 10000.0,
        "sliding_window_pattern": 6,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
    norms=NormNames(
        after_attention="post_attention_layernorm",
        before_mlp="pre_feedforward_layernorm",
        after_mlp="post_feedforward_layernorm",
    ),
    norm_offset=1.0,
    has_wide_norms=True,
    qk_norm="head",
    has_root_scaled_embedding=True,
    has_local_rope=True,
)

_GEMMA4_TEXT = replace(
    _GEMMA3_TEXT,
    name="gemma4_text",
    architecture="Gemma4ForCausalLM",
    defaults={
        key: value
        for key, value in _GEMMA2.items()
        if key not in ("query_pre_attn_scalar", "attn_logit_softcapping")
    }
    | {
        "vocab_size": 262144,
        "num_hidden_layers": 30,
        "max_position_embeddings": 131072,
        "sliding_window": 512,
        "final_logit_softcapping": None,
        "attention_multiplier": 1.0,
        "rope_theta": 1e6,
        "rope_local_base_freq": 10000.0,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1e6,
            },
        },
        "global_head_dim": 512,
        "num_global_key_value_heads": None,
        "per_layer_config": None,
        "attention_k_eq_v": False,
        "hidden_size_per_layer_input": 256,
        "num_kv_shared_layers": 0,
        "enable_moe_block": False,
    },
    norm_offset=0.0,
    window_period=6,
    has_value_norm=True,
    has_layer_scalar=True,
)

GEMMAS = (
    Family(
        "gemma",
        "GemmaForCausalLM",
        COMMON
        | {
            "vocab_size": 256000,
            "hidden_size": 3072,
            "intermediate_size": 24576,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "head_dim": 256,
            "hidden_act": "gelu_pytorch_tanh",
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "use_bidirectional_attention": None,
            "bos_token_id": 2,
            "eos_token_id": 1,
        },
        norm_offset=1.0,
        has_wide_norms=True,
        has_root_scaled_embedding=True,
    ),
    replace(
        _GEMMA3_TEXT,
        name="vaultgemma",
        architecture="VaultGemmaForCausalLM",
        defaults=_GEMMA2,
        norms=NormNames(before_mlp="pre_feedforward_layernorm"),
        qk_norm=None,
        has_local_rope=False,
    ),
    replace(
        _GEMMA3_TEXT,
        name="gemma2",
        architecture="Gemma2ForCausalLM",
        defaults=_GEMMA2,
        qk_norm=None,
        has_local_rope=False,
    ),
    _GEMMA3_TEXT,
    replace(  # the language model of a checkpoint that also sees; its eyes are left out
        _GEMMA3_TEXT,
        name="gemma3",
        architecture="Gemma3ForConditionalGeneration",
        language="gemma3_text",
        section="text_config",
        prefix="language_model.",
    ),
    _GEMMA4_TEXT,
    replace(
        _GEMMA4_TEXT,
        name="gemma4",
        architecture="Gemma4ForConditionalGeneration",
        language="gemma4_text",
        section="text_config",
        base="model.language_model.",
    ),
)
