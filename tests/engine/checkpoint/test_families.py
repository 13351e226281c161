"""The table of families agrees with transformers' config classes, key by key."""

import itertools
import json

import pytest
from transformers import AutoConfig

from engine.checkpoint.delta_config import GatedDeltaConfig
from engine.checkpoint.families import FAMILY_BY_NAME
from engine.checkpoint.model_config import ModelConfig
from tests.checkpoints import FAMILIES, GATED_DELTA_NETS

GEMMAS_4 = ("gemma4_text", "gemma4_unified_text")

EVERY_KEY = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 112,
    "num_hidden_layers": 30,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_activation": "silu",
    "max_position_embeddings": 640,
    "rms_norm_eps": 1e-4,
    "rope_theta": 50000.0,
    "rope_local_base_freq": 7000.0,
    "tie_word_embeddings": True,
    "eos_token_id": [7, 9],
    "bos_token_id": 3,
    "use_sliding_window": True,
    "sliding_window": 64,
    "sliding_window_pattern": 3,
    "max_window_layers": 2,
    "no_rope_layers": [1, 0] * 18,
    "no_rope_layer_interval": 3,
    "attention_bias": True,
    "mlp_bias": True,
    "use_bias": True,
    "query_pre_attn_scalar": 25,
    "attn_logit_softcapping": 12.0,
    "final_logit_softcapping": 14.0,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.25,
    "logits_scaling": 5.0,
    "num_local_experts": 12,
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [1, 5],
    "global_head_dim": 16,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": 270000,
    "num_kv_shared_layers": 6,
    "use_double_wide_mlp": True,
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 20,
    "linear_value_head_dim": 28,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 48,
    "full_attention_interval": 5,
    "shared_expert_intermediate_size": 88,
}


def read(folder, keys):
    (folder / "config.json").write_text(json.dumps(keys))
    return ModelConfig.from_folder(folder)


def as_transformers_reads(keys):
    """The oracle's view of the same keys, as the fields of a ModelConfig."""
    oracle = AutoConfig.for_model(**keys)
    is_gemma4 = oracle.model_type in GEMMAS_4
    if is_gemma4:
        oracle.allow_global_per_layer_attribute_access = True
    num_layers = oracle.num_hidden_layers
    window = getattr(oracle, "sliding_window", None)
    kinds = getattr(oracle, "layer_types", ["sliding_attention"] * num_layers)
    is_rotated = getattr(oracle, "no_rope_layers", [1] * num_layers)[:num_layers]
    if oracle.model_type == "exaone4" and window is not None:  # its attention says so
        is_rotated = [kind == "sliding_attention" for kind in kinds]
    thetas = oracle.rope_parameters
    if "rope_theta" in thetas:
        thetas = dict.fromkeys(("sliding_attention", "full_attention", "linear_attention"), thetas)
    eos = oracle.eos_token_id
    head_dim = getattr(oracle, "head_dim", None)
    head_dim = head_dim or oracle.hidden_size // oracle.num_attention_heads
    scale = getattr(oracle, "query_pre_attn_scalar", head_dim) ** -0.5
    heads = [(oracle.num_key_value_heads, head_dim)] * num_layers
    kv_layers = tuple(range(num_layers))
    if oracle.model_type in GATED_DELTA_NETS:
        places = itertools.count()
        kv_layers = tuple(next(places) if k == "full_attention" else None for k in kinds)
    if is_gemma4:
        kv_layers = kv_layers_of(oracle)
        scale = 1.0  # its attention says so
        layers = [oracle.per_layer_config[layer] for layer in range(num_layers)]
        heads = [(layer.num_key_value_heads, layer.head_dim) for layer in layers]
    num_kv_heads, head_dim = max(heads, key=lambda each: each[0] * each[1])
    is_gemma = "gemma" in oracle.model_type
    has_bias = getattr(oracle, "use_bias", False)
    has_output_bias = getattr(oracle, "attention_bias", has_bias)
    has_output_bias = getattr(oracle, "attention_out_bias", has_output_bias)
    if oracle.model_type in ("glm", "glm4"):  # their modules say so
        has_output_bias = False
    activation = getattr(oracle, "hidden_activation", None) or oracle.hidden_act
    if oracle.model_type == "gpt_oss":  # whatever its key says
        activation = "clamped_swiglu"
    return {
        "vocab_size": oracle.vocab_size,
        "hidden_size": oracle.hidden_size,
        # without dense layers it is of no use
        "intermediate_size": getattr(oracle, "intermediate_size", 5632),
        "is_double_wide": getattr(oracle, "use_double_wide_mlp", False),
        "layer_inputs": layer_inputs_of(oracle),
        "kv_layers": kv_layers,
        "num_layers": num_layers,
        "num_heads": oracle.num_attention_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "heads": tuple(heads),
        "max_position_embeddings": oracle.max_position_embeddings,
        "rms_norm_eps": oracle.rms_norm_eps,
        "is_tied": oracle.tie_word_embeddings,
        "has_output_bias": has_output_bias,
        "has_mlp_bias": getattr(oracle, "mlp_bias", has_bias),
        "hidden_act": activation,
        "attention_scale": getattr(oracle, "attention_multiplier", scale),
        "attention_softcap": getattr(oracle, "attn_logit_softcapping", None),
        "logit_softcap": getattr(oracle, "final_logit_softcapping", None),
        "embedding_scale": oracle.hidden_size**0.5
        if is_gemma
        else getattr(oracle, "embedding_multiplier", 1.0),
        "residual_scale": getattr(oracle, "residual_multiplier", 1.0),
        "logit_divisor": getattr(oracle, "logits_scaling", 1.0),
        "eos_token_ids": tuple(
            one for one in ([eos] if isinstance(eos, int) else eos or ()) if one < oracle.vocab_size
        ),
        "bos_token_id": oracle.bos_token_id,
        "sliding_windows": tuple(window if k == "sliding_attention" else None for k in kinds),
        "thetas": [
            thetas[kind]["rope_theta"] if rotated else None
            for kind, rotated in zip(kinds, is_rotated, strict=True)
        ],
        "experts": experts_of(oracle),
        "delta": delta_of(oracle),
    }


def delta_of(oracle):
    """Heads, their sizes, the convolution and the layers of the oracle's Gated DeltaNet."""
    if oracle.model_type not in GATED_DELTA_NETS:
        return None
    return GatedDeltaConfig(
        oracle.linear_num_key_heads,
        oracle.linear_num_value_heads,
        oracle.linear_key_head_dim,
        oracle.linear_value_head_dim,
        oracle.linear_conv_kernel_dim,
        frozenset(i for i, k in enumerate(oracle.layer_types) if k == "linear_attention"),
        FAMILY_BY_NAME[oracle.model_type].delta_projections,
    )


def kv_layers_of(oracle):
    """Per layer: the layer whose keys and values the oracle reads."""
    found, stores = [], {}
    for layer, (mode, kind) in enumerate(
        zip(oracle.kv_sharing_modes, oracle.layer_types, strict=True)
    ):
        if mode == "store":
            stores[kind] = layer
        found.append(stores[kind] if mode == "reuse" else layer)
    return tuple(found)


def layer_inputs_of(oracle):
    """Size and number of rows of the oracle's embeddings by layer; None: it has none."""
    size = getattr(oracle, "hidden_size_per_layer_input", 0)
    return (size, oracle.vocab_size_per_layer_input) if size else None


def experts_of(oracle):
    """Number, number per token, size, normalized or not, and layers of the oracle's experts."""
    if getattr(oracle, "enable_moe_block", False):
        sizes = (oracle.num_experts, oracle.top_k_experts, oracle.moe_intermediate_size)
        return (*sizes, True, set(range(oracle.num_hidden_layers)))
    if not hasattr(oracle, "num_experts_per_tok"):
        return None
    step, dense = getattr(oracle, "decoder_sparse_step", 1), getattr(oracle, "mlp_only_layers", [])
    return (
        getattr(oracle, "num_local_experts", None) or oracle.num_experts,
        oracle.num_experts_per_tok,
        getattr(oracle, "moe_intermediate_size", None) or oracle.intermediate_size,
        getattr(oracle, "norm_topk_prob", True),
        {n for n in range(oracle.num_hidden_layers) if (n + 1) % step == 0 and n not in dense},
    )


def assert_agrees(config, keys, without=None):
    expected = as_transformers_reads(keys)
    experts = config.experts
    assert expected.pop("thetas") == [rope and rope.theta for rope in config.ropes]
    assert expected.pop("experts") == (
        experts
        and (
            experts.num_experts,
            experts.num_per_token,
            experts.intermediate_size,
            experts.is_normalized,
            experts.layers,
        )
    )
    for field, value in expected.items():
        assert getattr(config, field) == value, (field, without)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_almost_empty_config_has_the_defaults_of_its_family(tmp_path, family):
    keys = {"model_type": family}
    assert_agrees(read(tmp_path, keys), keys)


def keys_of(family):
    """A config in which every key that transformers knows of the family has an unusual value."""
    known = {*AutoConfig.for_model(family).to_dict(), "rope_theta"}
    if family in GEMMAS_4:
        known |= {"global_head_dim", "num_global_key_value_heads"}
    if family == "gemma3_text":
        known |= {"rope_local_base_freq", "sliding_window_pattern"}
    return {key: value for key, value in EVERY_KEY.items() if key in known}


@pytest.mark.parametrize("family", FAMILIES)
def test_each_missing_key_defaults_as_in_transformers(tmp_path, family):
    known = keys_of(family)
    for missing in (*known, None):
        keys = {key: value for key, value in known.items() if key != missing}
        keys |= {"model_type": family}
        assert_agrees(read(tmp_path, keys), keys, missing)


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_of_other_families_mean_nothing(tmp_path, family):
    plain, strange = {"model_type": family}, {"attention_chunk_size": 3}
    known = AutoConfig.for_model(family).to_dict()
    for key in ("residual_multiplier", "attn_logit_softcapping", "no_rope_layers", "mlp_bias"):
        if key not in known:
            strange[key] = EVERY_KEY[key]
    assert read(tmp_path, plain | strange) == read(tmp_path, plain)


def test_biases_and_norms_follow_the_family(tmp_path):
    flags = {"attention_bias": True, "mlp_bias": True}
    seen = {}
    for family in FAMILIES:
        config = read(tmp_path, {"model_type": family, **flags})
        seen[family] = (
            config.has_qkv_bias,
            config.has_output_bias,
            config.has_mlp_bias,
            config.family.qk_norm,
        )
    assert seen == {
        "llama": (True, True, True, None),
        "mistral": (False, False, False, None),
        "qwen2": (True, False, False, None),
        "qwen3": (True, True, False, "head"),
        "gemma2": (True, True, False, None),
        "gemma3_text": (True, True, False, "head"),
        "phi3": (False, False, False, None),
        "smollm3": (True, True, True, None),
        "granite": (True, True, True, None),
        "olmo2": (True, True, False, "projection"),
        "mixtral": (False, False, False, None),
        "qwen3_moe": (True, True, False, "head"),
        "ministral": (False, False, False, None),
        "olmo3": (True, True, False, "projection"),
        "exaone4": (False, False, False, "head"),
        "seed_oss": (True, False, True, None),
        "olmoe": (True, True, False, "projection"),
        "gemma": (True, True, False, None),
        "vaultgemma": (True, True, False, None),
        "glm": (True, False, False, None),
        "glm4": (True, False, False, None),
        "ernie4_5": (False, False, False, None),
        "gpt_oss": (True, True, False, None),
        "ministral3": (False, False, False, None),
        "gemma4_text": (True, True, False, "head"),
        "gemma4_unified_text": (True, True, False, "head"),
        "qwen3_next": (True, True, False, "head"),
        "qwen3_5_text": (True, True, False, "head"),
        "qwen3_5_moe_text": (True, True, False, "head"),
    }


_GEMMA_4 = {
    "final_logit_softcapping": 30.0,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "full_attention": {
            "partial_rotary_factor": 0.25,
            "rope_theta": 1000000.0,
            "rope_type": "proportional",
        },
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "vocab_size": 262144,
    "hidden_size_per_layer_input": 0,
    "use_bidirectional_attention": "vision",
}
PUBLISHED = {
    "gemma-4-12b": _GEMMA_4
    | {
        "model_type": "gemma4_unified_text",
        "attention_k_eq_v": True,
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 1,
    },
    "gemma-4-26b-a4b": _GEMMA_4
    | {
        "model_type": "gemma4_text",
        "attention_k_eq_v": True,
        "enable_moe_block": True,
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "moe_intermediate_size": 704,
        "num_attention_heads": 16,
        "num_experts": 128,
        "num_global_key_value_heads": 2,
        "num_hidden_layers": 30,
        "num_key_value_heads": 8,
        "sliding_window": 1024,
        "top_k_experts": 8,
    },
    "gemma-4-e2b": _GEMMA_4
    | {
        "model_type": "gemma4_text",
        "hidden_size": 1536,
        "hidden_size_per_layer_input": 256,
        "intermediate_size": 6144,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
        "num_attention_heads": 8,
        "num_hidden_layers": 35,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 20,
        "sliding_window": 512,
        "use_bidirectional_attention": None,
        "use_double_wide_mlp": True,
        "vocab_size_per_layer_input": 262144,
    },
    "gemma-2-2b": {
        "model_type": "gemma2",
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "cache_implementation": "hybrid",
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "rope_theta": 10000.0,
    },
    "gemma-3-1b": {
        "model_type": "gemma3_text",
        "hidden_size": 1152,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "eos_token_id": [1, 106],
    },
    "phi-4": {
        "model_type": "phi3",
        "hidden_size": 5120,
        "num_attention_heads": 40,
        "num_key_value_heads": 10,
        "original_max_position_embeddings": 16384,
        "max_position_embeddings": 16384,
        "rope_scaling": None,
        "rope_theta": 250000,
        "sliding_window": None,
    },
    "phi-4-mini": {
        "model_type": "phi3",
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "original_max_position_embeddings": 4096,
        "max_position_embeddings": 131072,
        "partial_rotary_factor": 0.75,
        "rope_scaling": {"type": "longrope", "long_factor": [2.0] * 48, "short_factor": [1.0] * 48},
        "sliding_window": 262144,
        "tie_word_embeddings": True,
    },
    "granite-3.3-8b": {
        "model_type": "granite",
        "attention_multiplier": 0.0078125,
        "embedding_multiplier": 12.0,
        "logits_scaling": 16.0,
        "residual_multiplier": 0.22,
        "num_key_value_heads": 8,
        "rope_scaling": None,
        "rope_theta": 10000000.0,
        "tie_word_embeddings": True,
    },
    "glm-4-9b-0414": {
        "model_type": "glm4",
        "attention_bias": False,
        "eos_token_id": [151329, 151336, 151338],
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 13696,
        "max_position_embeddings": 32768,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "vocab_size": 151552,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "quantization_config": {
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
            "quant_method": "mxfp4",
        },
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "eos_token_id": 200002,
        "vocab_size": 201088,
    },
    "mixtral-8x7b": {"model_type": "mixtral", "rope_theta": 1000000.0, "sliding_window": None},
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "head_dim": 128,
        "max_window_layers": 48,
        "use_sliding_window": False,
        "sliding_window": None,
        "mlp_only_layers": [],
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_configs_as_they_are_published_mean_what_transformers_reads(tmp_path, name):
    assert_agrees(read(tmp_path, PUBLISHED[name]), PUBLISHED[name])


def test_every_family_of_the_table_is_tested():
    # tested as parts of one that sees, or by rows of their own
    seeing = {"gemma3", "gemma4", "gemma4_unified", "mistral3", "muse_glimmer"}
    seeing |= {"qwen3_5", "qwen3_5_moe"}
    assert set(FAMILY_BY_NAME) == {*FAMILIES, *seeing}
