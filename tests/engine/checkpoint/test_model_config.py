"""Config keys mean what transformers says they mean, and nonsense is named."""

import contextlib
import copy
import dataclasses
import functools
import json
import math
import operator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.checkpoint.families import FAMILY_BY_NAME
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.rope import RopeConfig
from engine.checkpoint.written_models import written
from engine.errors import CheckpointError
from tests.checkpoints import FAMILIES, tiny_keys

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
OPTIONAL_KEYS = sorted({key for family in FAMILY_BY_NAME.values() for key in family.defaults})


def read(folder, keys, generation=None):
    (folder / "config.json").write_text(json.dumps(keys))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return ModelConfig.from_folder(folder)


def rope_of(config):
    """The one RoPE of all layers."""
    (rope,) = set(config.ropes)
    return rope


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_null_kv_heads_are_one_per_query_head(tmp_path, family):
    keys = {"model_type": family, "num_attention_heads": 8, "num_key_value_heads": None}
    assert read(tmp_path, keys).num_kv_heads == 8


def test_null_sliding_window_is_no_window(tmp_path):
    keys = {"model_type": "mistral", "sliding_window": None, "num_hidden_layers": 2}
    assert read(tmp_path, keys).sliding_windows == (None, None)


def test_qwen_layer_types_choose_the_windowed_layers(tmp_path):
    keys = {
        "model_type": "qwen2",
        "num_hidden_layers": 3,
        "use_sliding_window": True,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }
    assert read(tmp_path, keys).sliding_windows == (16, None, 16)


def test_generation_config_names_the_end_of_text(tmp_path):
    assert read(tmp_path, LLAMA | {"eos_token_id": 5}).eos_token_ids == (5,)
    generation = {"eos_token_id": [8, 6, 8]}
    assert read(tmp_path, LLAMA | {"eos_token_id": 5}, generation).eos_token_ids == (8, 6, 5)
    silent = {key: value for key, value in LLAMA.items() if key != "eos_token_id"}
    assert read(tmp_path, silent, generation).eos_token_ids == (8, 6)  # not the family's, too
    out = LLAMA | {"eos_token_id": [5, 10**6]}
    assert read(tmp_path, out, {}).eos_token_ids == (5,)
    assert read(tmp_path, LLAMA | {"eos_token_id": 5}, {}).eos_token_ids == (5,)
    assert read(tmp_path, LLAMA | {"eos_token_id": None}, {}).eos_token_ids == ()


@pytest.mark.parametrize(
    ("generation", "wanted"),
    [
        ({"temperature": 0.6, "top_p": 0.9, "do_sample": True}, {"temperature": 0.6, "top_p": 0.9}),
        ({"temperature": 0.6, "top_k": 20}, {"temperature": 0.6, "top_k": 20}),
        ({"temperature": 0.6, "do_sample": False}, {"temperature": 0.0, "repetition_penalty": 1.0}),
        ({"top_p": None}, {}),
    ],
)
def test_generation_config_says_how_to_sample(tmp_path, generation, wanted):
    assert read(tmp_path, LLAMA, generation).sampling == wanted


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "hot"),
        ("temperature", float("inf")),
        ("temperature", 2.5),
        ("top_k", 1e300),
        ("top_k", 1.5),
        ("top_p", 0),
        ("min_p", 7),
        ("repetition_penalty", 0),
    ],
)
def test_a_generation_config_that_cannot_be_is_named(tmp_path, name, value):
    with pytest.raises(CheckpointError, match=name):
        read(tmp_path, LLAMA, {name: value})


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}


@pytest.mark.parametrize("scaling", [{"rope_type": "linear", "factor": 2.0}, LLAMA3, YARN])
def test_old_and_new_rope_spellings_are_the_same(tmp_path, scaling):
    keys = LLAMA | {"rope_theta": 5e5, "max_position_embeddings": 2048}
    old = rope_of(read(tmp_path, keys | {"rope_scaling": scaling}))
    oldest = dict(scaling)
    oldest["type"] = oldest.pop("rope_type")
    assert rope_of(read(tmp_path, keys | {"rope_scaling": oldest})) == old
    new = LLAMA | {"max_position_embeddings": 2048}
    assert rope_of(read(tmp_path, new | {"rope_parameters": scaling | {"rope_theta": 5e5}})) == old
    assert old.kind == scaling["rope_type"]
    assert old.theta == 5e5


def test_yarn_scales_attention_with_the_stretch(tmp_path):
    keys = LLAMA | {"max_position_embeddings": 2048}
    assert rope_of(read(tmp_path, keys | {"rope_scaling": YARN})).attention_factor == pytest.approx(
        1.1386294361
    )
    given = rope_of(read(tmp_path, keys | {"rope_scaling": YARN | {"attention_factor": 0.7}}))
    assert given.attention_factor == 0.7


def test_absent_scaling_is_plain_rope(tmp_path):
    assert rope_of(read(tmp_path, LLAMA | {"rope_scaling": None})) == RopeConfig(
        "default", 10000.0, 128
    )


def test_gemma_3_rotates_windowed_layers_without_scaling(tmp_path):
    keys = {"model_type": "gemma3_text", "num_hidden_layers": 2, "sliding_window_pattern": 2}
    scaling = {"rope_type": "linear", "factor": 8.0}
    plain = RopeConfig("default", 10000.0, 256)
    assert read(tmp_path, keys | {"rope_scaling": scaling}).ropes == (
        plain,
        RopeConfig("linear", 1e6, 256, factor=8.0),
    )
    newer = {
        "full_attention": scaling | {"rope_theta": 3e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    }
    assert read(tmp_path, keys | {"rope_parameters": newer}).ropes == (
        RopeConfig("default", 500.0, 256),
        RopeConfig("linear", 3e5, 256, factor=8.0),
    )


def test_a_seeing_gemma_is_its_text_section(tmp_path):
    text = {"hidden_size": 640, "num_hidden_layers": 12, "sliding_window": 512, "vocab_size": 500}
    keys = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "torch_dtype": "bfloat16",
        "eos_token_id": [1, 106],
        "hidden_size": 7,
        "text_config": text | {"model_type": "gemma3_text"},
        "vision_config": {"hidden_size": 1152},
    }
    config = read(tmp_path, keys)
    alone = read(tmp_path, text | {"model_type": "gemma3_text", "eos_token_id": [1, 106]})
    alone = dataclasses.replace(alone, family=config.family, stored_dtype="bfloat16")
    assert config == alone
    assert config.family.prefix == "language_model."
    with pytest.raises(CheckpointError, match="quantization_config"):
        read(tmp_path, keys | {"text_config": text | {"quantization_config": {"bits": 8}}})


LONGROPE = {"type": "su", "short_factor": [1.0] * 36, "long_factor": [2.0] * 36}
PHI = {"model_type": "phi3", "partial_rotary_factor": 0.75, "max_position_embeddings": 131072}


@pytest.mark.parametrize("kind", ["su", "yarn", "longrope"])
def test_phi_calls_its_scaling_by_three_names(tmp_path, kind):
    keys = PHI | {"rope_scaling": LONGROPE | {"type": kind}}
    rope = rope_of(read(tmp_path, keys))
    assert (rope.kind, rope.rotary_dim, rope.original_max_position_embeddings) == (
        "longrope",
        72,
        4096,
    )
    assert rope.attention_factor == pytest.approx((1 + math.log(32) / math.log(4096)) ** 0.5)
    assert (rope.short_factors, rope.long_factors) == ((1.0,) * 36, (2.0,) * 36)


def test_wide_heads_make_wide_blocks(tmp_path):
    config = read(tmp_path, {"model_type": "gemma2"})
    assert config.kv_block_bytes(64, "float32") == 26 * 2 * 64 * 4 * 256 * 4


def test_kv_block_bytes_cover_all_layers(tmp_path):
    keys = LLAMA | {
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    }
    assert read(tmp_path, keys).kv_block_bytes(64, "bfloat16") == 8 << 20
    assert read(tmp_path, keys).kv_block_bytes(64, "int8") == (4 << 20) * 132 // 128


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"architectures": ["FalconForCausalLM"]}, "FalconForCausalLM"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "SequenceClassification"),
        ({"architectures": "LlamaForCausalLM"}, "architectures"),
        ({"model_type": "gpt2"}, "gpt2"),
        ({}, "model_type"),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "qwen2"}, "qwen2"),
        (LLAMA | {"hidden_size": "512"}, "hidden_size"),
        (LLAMA | {"hidden_size": 512.0}, "hidden_size"),
        (LLAMA | {"hidden_size": True}, "hidden_size"),
        (LLAMA | {"hidden_size": -1}, "hidden_size"),
        (LLAMA | {"num_hidden_layers": 0}, "num_hidden_layers"),
        (LLAMA | {"num_hidden_layers": 10**9}, "num_hidden_layers"),
        (LLAMA | {"vocab_size": 10**12}, "vocab_size"),
        (LLAMA | {"num_key_value_heads": 5}, "num_attention_heads"),
        (LLAMA | {"head_dim": 7}, "head_dim"),
        (LLAMA | {"hidden_act": "gelu"}, "hidden_act"),
        (LLAMA | {"rms_norm_eps": None}, "rms_norm_eps"),
        (LLAMA | {"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        (LLAMA | {"eos_token_id": "</s>"}, "eos_token_id"),
        (LLAMA | {"eos_token_id": [1, 1.5]}, "eos_token_id"),
        (LLAMA | {"eos_token_id": 10**30}, "eos_token_id"),
        (LLAMA | {"rope_theta": 10**400}, "rope_theta"),
        (LLAMA | {"quantization_config": {"bits": 4}}, "quantization_config"),
        (LLAMA | {"rope_scaling": [1]}, "rope_scaling"),
        (LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.type"),
        (LLAMA | {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor"),
        (LLAMA | {"rope_scaling": {"type": "linear", "factor": "2"}}, "rope_scaling.factor"),
        (LLAMA | {"rope_parameters": YARN | {"factor": -1}}, "rope_parameters.factor"),
        (LLAMA | {"rope_theta": 1}, "rope_theta"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (LLAMA | {"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor"),
        ({"architectures": ["Gemma3nForConditionalGeneration"]}, "Gemma3n"),
        ({"architectures": ["PhiMoEForCausalLM"], "model_type": "phimoe"}, "PhiMoE"),
        ({"architectures": ["Phi3SmallForCausalLM"]}, "Phi3Small"),
        ({"architectures": ["Phi4MMForCausalLM"]}, "Phi4MM"),
        ({"architectures": ["Qwen4NextForCausalLM"]}, "Qwen4Next"),
        (
            {
                "model_type": "qwen3_5_text",
                "num_hidden_layers": 2,
                "layer_types": ["full_attention", "mamba"],
            },
            "1, which is 'mamba'",
        ),
        (
            {
                "model_type": "qwen3_next",
                "num_hidden_layers": 2,
                "layer_types": ["linear_attention"] * 2,
            },
            "with full_attention",
        ),
        ({"model_type": "qwen3_5_text", "linear_num_value_heads": 24}, "a multiple of 16"),
        ({"model_type": "qwen3_5_text", "linear_conv_kernel_dim": 17}, "an integer from 1 to 16"),
        ({"model_type": "olmoe", "clip_qkv": 8.0}, "clip_qkv"),
        ({"architectures": ["Qwen2MoeForCausalLM"]}, "Qwen2Moe"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "bidirectional"),
        ({"model_type": "gemma2", "hidden_activation": "relu"}, "hidden_activation"),
        ({"model_type": "gemma2", "attn_logit_softcapping": 0}, "attn_logit_softcapping"),
        (
            {"model_type": "gemma2", "sliding_window": None, "layer_types": ["x"] * 26},
            "layer_types",
        ),
        ({"model_type": "gemma3", "text_config": "gemma3_text"}, "text_config"),
        ({"model_type": "phi3", "partial_rotary_factor": 0.01}, "partial_rotary_factor"),
        ({"model_type": "phi3", "partial_rotary_factor": 2}, "partial_rotary_factor"),
        (PHI | {"rope_scaling": LONGROPE | {"short_factor": [1.0]}}, "short_factor"),
        (PHI | {"rope_scaling": LONGROPE | {"long_factor": [0] * 36}}, "long_factor"),
        (PHI | {"rope_scaling": {"type": "longrope"}}, "short_factor"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers"),
        ({"model_type": "smollm3", "no_rope_layers": [2] * 36}, "no_rope_layers"),
        ({"model_type": "granite", "logits_scaling": 0}, "logits_scaling"),
        ({"model_type": "mixtral", "num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": ["1"]}, "mlp_only_layers"),
        ({"model_type": "qwen3_moe", "num_experts": 0}, "num_experts"),
        ({"model_type": "qwen3", "layer_types": ["full_attention"]}, "layer_types"),
        (
            {
                "model_type": "qwen3",
                "num_hidden_layers": 2,
                "layer_types": ["full_attention", "linear_attention"],
            },
            "1, which is 'linear_attention'",
        ),
        (
            {"model_type": "qwen3", "num_hidden_layers": 1, "layer_types": ["sliding_attention"]},
            "layer_types",
        ),
    ],
)
def test_a_config_that_cannot_be_served_is_named_by_file_and_key(tmp_path, keys, named):
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path, keys)
    assert caught.value.where == str(tmp_path / "config.json")
    assert named in caught.value.what


@pytest.mark.parametrize("text", ["", "{", "[]", "null", pytest.param("[" * 100_000, id="deep")])
def test_a_file_that_is_no_json_object_is_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match="JSON") as caught:
        ModelConfig.from_folder(tmp_path)
    assert caught.value.where == str(tmp_path / "config.json")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(sorted(LLAMA3 | YARN)) | st.text(max_size=4), inner)
    ),
    max_leaves=6,
)


@given(
    st.sampled_from(FAMILIES),
    st.dictionaries(
        st.sampled_from(
            [*OPTIONAL_KEYS, "rope_scaling", "rope_parameters", "architectures", "layer_types"]
        ),
        json_values,
        max_size=3,
    ),
)
def test_any_json_gives_a_config_or_a_named_error(tmp_path_factory, family, keys):
    folder = tmp_path_factory.mktemp("config")
    with contextlib.suppress(CheckpointError):
        config = read(folder, {"model_type": family, **keys})
        assert len(config.sliding_windows) == config.num_layers
        assert config.kv_block_bytes(64, "float32") > 0


def test_a_missing_config_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="missing"):
        ModelConfig.from_folder(tmp_path)


def test_muse_glimmers_config_is_read_as_transformers_writes_it(tmp_path):
    from transformers import MuseGlimmerConfig

    oracle = MuseGlimmerConfig()
    keys, text = oracle.to_dict(), oracle.text_config
    config = read(tmp_path, keys)
    assert config.num_layers == text.num_hidden_layers
    assert [rope is not None for rope in config.ropes] == [t != 0 for t in text.layer_rope_theta]
    assert [window is not None for window in config.sliding_windows] == [
        kind == "sliding_attention" for kind in text.layer_types
    ]
    assert (config.rms_norm_eps, config.post_norm_eps) == (text.rms_norm_eps, text.post_norm_eps)
    assert config.attention_scale == pytest.approx(text.head_dim**-0.5 * text.qk_scale_factor)
    assert config.logit_divisor == pytest.approx(1 / text.output_multiplier)
    assert (config.logit_softcap, config.is_tied) == (text.final_logit_softcapping, False)
    for wrong in ([], [5.0] * 52, text.layer_rope_theta[:-1]):
        keys["text_config"]["layer_rope_theta"] = wrong
        with pytest.raises(CheckpointError, match="layer_rope_theta"):
            read(tmp_path, keys)


EXTREMES = [10**30, -1, 1e400, math.nan, 1e308, True, "1", []]
WHOLE = {"eos_token_id": [1, 2], "bos_token_id": 1, "temperature": 0.6, "top_k": 20, "top_p": 0.9}


def places(values, before=()):
    """Every key and index of nested values, by its way there."""
    pairs = values.items() if isinstance(values, dict) else enumerate(values)
    for key, value in pairs:
        yield (*before, key)
        if isinstance(value, dict | list):
            yield from places(value, (*before, key))


def put(values, place, value):
    changed = copy.deepcopy(values)
    functools.reduce(operator.getitem, place[:-1], changed)[place[-1]] = value
    return changed


def changes(values):
    return (put(values, place, value) for place in places(values) for value in EXTREMES)


@pytest.mark.parametrize("family", FAMILIES)
def test_extreme_values_give_a_config_that_can_be_written_or_a_named_error(tmp_path, family):
    defaults = {key: value for key, value in FAMILY_BY_NAME[family].defaults.items() if value}
    keys = defaults | tiny_keys(family) | {"model_type": family, "eos_token_id": 2}
    read(tmp_path, keys, WHOLE)
    tried = [(each, WHOLE) for each in changes(keys)]
    for config, generation in tried + [(keys, each) for each in changes(WHOLE)]:
        with contextlib.suppress(CheckpointError):
            written(read(tmp_path, config, generation))
