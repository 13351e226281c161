"""The supported families whose layers choose among experts: rows of the table of families.

Owns: those rows. Invariant: as for all rows, engine.folder.families says it.
Never: reads a file.
"""

from __future__ import annotations

from engine.folder.family import COMMON, ExpertNames, Family

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
        experts=ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2"),
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
        experts=ExpertNames(router="router", has_bias=True, is_stacked=True),
        activation="clamped_swiglu",
        has_sinks=True,
    ),
)
