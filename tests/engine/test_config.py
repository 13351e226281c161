"""Config keys mean what transformers says they mean, and nonsense is named."""

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig

from engine.config import ModelConfig
from engine.errors import CheckpointError
from engine.rope import RopeConfig
from tests.checkpoints import FAMILIES

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
OPTIONAL_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "tie_word_embeddings",
    "eos_token_id",
    "bos_token_id",
    "sliding_window",
    "max_window_layers",
    "attention_bias",
    "mlp_bias",
    "hidden_act",
)


def read(folder, keys, generation=None):
    (folder / "config.json").write_text(json.dumps(keys))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return ModelConfig.from_folder(folder)


def as_transformers_reads(keys):
    """The oracle's view of the same keys, as the fields of a ModelConfig."""
    oracle = AutoConfig.for_model(**keys)
    kinds = getattr(oracle, "layer_types", None)
    window = getattr(oracle, "sliding_window", None)
    if kinds is None:
        kinds = ["sliding_attention"] * oracle.num_hidden_layers
    eos = oracle.eos_token_id
    return {
        "vocab_size": oracle.vocab_size,
        "hidden_size": oracle.hidden_size,
        "intermediate_size": oracle.intermediate_size,
        "num_layers": oracle.num_hidden_layers,
        "num_heads": oracle.num_attention_heads,
        "num_kv_heads": oracle.num_key_value_heads,
        "head_dim": getattr(oracle, "head_dim", oracle.hidden_size // oracle.num_attention_heads),
        "max_position_embeddings": oracle.max_position_embeddings,
        "rms_norm_eps": oracle.rms_norm_eps,
        "is_tied": oracle.tie_word_embeddings,
        "has_output_bias": getattr(oracle, "attention_bias", False),
        "has_mlp_bias": getattr(oracle, "mlp_bias", False),
        "hidden_act": oracle.hidden_act,
        "eos_token_ids": () if eos is None else tuple([eos] if isinstance(eos, int) else eos),
        "bos_token_id": oracle.bos_token_id,
        "sliding_windows": tuple(window if k == "sliding_attention" else None for k in kinds),
    }


def assert_agrees(config, keys):
    for field, expected in as_transformers_reads(keys).items():
        assert getattr(config, field) == expected, field
    assert config.rope.theta == AutoConfig.for_model(**keys).rope_parameters["rope_theta"]


@pytest.mark.parametrize("family", FAMILIES)
def test_an_almost_empty_config_has_the_defaults_of_its_family(tmp_path, family):
    keys = {"model_type": family}
    assert_agrees(read(tmp_path, keys), keys)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("missing", OPTIONAL_KEYS)
def test_each_missing_key_defaults_as_in_transformers(tmp_path, family, missing):
    keys = {
        "model_type": family,
        "vocab_size": 320,
        "hidden_size": 128,
        "intermediate_size": 112,
        "num_hidden_layers": 30,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "max_position_embeddings": 640,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "tie_word_embeddings": True,
        "eos_token_id": [7, 9],
        "bos_token_id": 3,
        "use_sliding_window": True,
        "sliding_window": 64,
        "max_window_layers": 2,
        "attention_bias": family in ("llama", "qwen3"),
        "hidden_act": "silu",
        "mlp_bias": family == "llama",
    }
    keys.pop(missing)
    if family == "llama":
        keys.pop("sliding_window", None)
    assert_agrees(read(tmp_path, keys), keys)


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


def test_biases_and_norms_follow_the_family(tmp_path):
    flags = {"attention_bias": True, "mlp_bias": True}
    seen = {}
    for family in FAMILIES:
        config = read(tmp_path, {"model_type": family, **flags})
        seen[family] = (
            config.has_qkv_bias,
            config.has_output_bias,
            config.has_mlp_bias,
            config.has_qk_norm,
        )
    assert seen == {
        "llama": (True, True, True, False),
        "mistral": (False, False, False, False),
        "qwen2": (True, False, False, False),
        "qwen3": (True, True, False, True),
    }


def test_generation_config_names_the_end_of_text(tmp_path):
    assert read(tmp_path, LLAMA | {"eos_token_id": 5}).eos_token_ids == (5,)
    generation = {"eos_token_id": [8, 6, 8]}
    assert read(tmp_path, LLAMA | {"eos_token_id": 5}, generation).eos_token_ids == (8, 6)
    assert read(tmp_path, LLAMA | {"eos_token_id": 5}, {}).eos_token_ids == (5,)
    assert read(tmp_path, LLAMA | {"eos_token_id": None}, {}).eos_token_ids == ()


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
    old = read(tmp_path, keys | {"rope_scaling": scaling}).rope
    oldest = dict(scaling)
    oldest["type"] = oldest.pop("rope_type")
    assert read(tmp_path, keys | {"rope_scaling": oldest}).rope == old
    new = LLAMA | {"max_position_embeddings": 2048}
    assert read(tmp_path, new | {"rope_parameters": scaling | {"rope_theta": 5e5}}).rope == old
    assert old.kind == scaling["rope_type"]
    assert old.theta == 5e5


def test_yarn_scales_attention_with_the_stretch(tmp_path):
    keys = LLAMA | {"max_position_embeddings": 2048}
    assert read(tmp_path, keys | {"rope_scaling": YARN}).rope.attention_factor == pytest.approx(
        1.1386294361
    )
    given = read(tmp_path, keys | {"rope_scaling": YARN | {"attention_factor": 0.7}}).rope
    assert given.attention_factor == 0.7


def test_absent_scaling_is_plain_rope(tmp_path):
    assert read(tmp_path, LLAMA | {"rope_scaling": None}).rope == RopeConfig("default", 10000.0)


def test_kv_block_bytes_cover_all_layers(tmp_path):
    keys = LLAMA | {
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    }
    assert read(tmp_path, keys).kv_block_bytes(64, "bfloat16") == 8 << 20


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
        (LLAMA | {"eos_token_id": [1, -1]}, "eos_token_id"),
        (LLAMA | {"quantization_config": {"bits": 4}}, "quantization_config"),
        (LLAMA | {"rope_scaling": [1]}, "rope_scaling"),
        (LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.type"),
        (LLAMA | {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor"),
        (LLAMA | {"rope_scaling": {"type": "linear", "factor": "2"}}, "rope_scaling.factor"),
        (LLAMA | {"rope_parameters": YARN | {"factor": -1}}, "rope_parameters.factor"),
        (LLAMA | {"rope_theta": 1}, "rope_theta"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (LLAMA | {"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor"),
        ({"model_type": "qwen3", "layer_types": ["full_attention"]}, "layer_types"),
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


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000])
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
        st.sampled_from([*OPTIONAL_KEYS, "rope_scaling", "rope_parameters", "architectures"]),
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
