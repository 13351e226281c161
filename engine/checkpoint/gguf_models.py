"""Translate a GGUF file's metadata into the keys of config.json.

The format has one vocabulary for all architectures, and leaves out what its own reader knows of
each (which layers have windows, how attention is scaled). Here both become what config.json says,
so that the rest of the engine knows one way to describe a model.

Invariant: an architecture that is not in the table is refused by name.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.checkpoint.end_tokens import end_marks
from engine.checkpoint.families import reason
from engine.checkpoint.gguf import GgufModel
from engine.errors import WHAT_IS_SERVED, CheckpointError

_MAX_LAYERS = 4096

_More = Callable[[GgufModel, dict[str, Any]], dict[str, Any]]

SHAPE_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
"""GGUF's key after the architecture's name, by config.json's, of all models, vectors' too."""
_KEYS = SHAPE_KEYS | {
    "rope_local_base_freq": "rope.freq_base_swa",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "llama_4_scaling_beta": "attention.temperature_scale",
    "logits_scaling": "logit_scale",
    "num_local_experts": "expert_count",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
}
"""GGUF's key after the architecture's name, by config.json's key."""
_SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
_REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")

HEAD_COUNTS = ("head_count", "head_count_kv")


@dataclass(frozen=True, slots=True)
class _Architecture:
    """How GGUF has a family."""

    model_type: str
    is_interleaved: bool = False
    """The halves of each head's queries and keys lie row by row beside each other."""
    norm_shift: float = 0.0
    """Stored norms have it added already; it is taken off."""
    before_mlp: str = "ffn_norm"
    """What it calls the norm before the feed-forward."""
    by_layer: tuple[str, ...] = ()
    """Keys that may have one value for each layer, which `more` reads."""
    truncates_yarn: bool = True
    """The borders of YaRN's ramp are whole dimensions."""
    has_tiled_heads: bool = False
    """Gated DeltaNet: one value head of each key head follow each other."""
    more: _More = lambda _model, _keys: {}
    """Keys that follow from others, or that the format takes as known."""


def _windows(model: GgufModel, keys: dict[str, Any], period: int) -> dict[str, Any]:
    """Set the layers' windows; every `period`th layer sees all if the file lists none."""
    layers = keys["num_hidden_layers"]
    if not keys.get("sliding_window") or type(layers) is not int or layers > _MAX_LAYERS:
        return {"sliding_window": None}
    pattern = model.metadata.get(f"{arch_of(model)}.attention.sliding_window_pattern", period)
    if isinstance(pattern, array) and len(pattern) == layers:
        has_window = [bool(each) for each in pattern]
    else:
        every = pattern if type(pattern) is int and pattern > 0 else period
        has_window = [(layer + 1) % every != 0 for layer in range(layers)]
    kinds = ["sliding_attention" if each else "full_attention" for each in has_window]
    return {"sliding_window": keys["sliding_window"], "layer_types": kinds}


def _gemma(period: int, large: int) -> _More:
    """Read windows and the scale of scores: head size, in the largest hidden size / heads."""

    def more(model: GgufModel, keys: dict[str, Any]) -> dict[str, Any]:
        hidden, heads = keys["hidden_size"], keys["num_attention_heads"]
        own = {"query_pre_attn_scalar": keys["head_dim"]}
        if keys["num_hidden_layers"] == large:
            own = {"query_pre_attn_scalar": hidden // heads}
        return _windows(model, keys, period) | own

    return more


def _gemma4(model: GgufModel, keys: dict[str, Any]) -> dict[str, Any]:
    """Read what differs between layers, and which parts a model has."""
    arch, num_layers = arch_of(model), keys["num_hidden_layers"]
    own = _windows(model, keys, 6)
    kinds = own.get("layer_types", ["full_attention"] * num_layers)
    widths = {"full_attention": keys["head_dim"]}
    local = model.integer(f"{arch}.attention.key_length_swa")
    widths["sliding_attention"] = local or widths["full_attention"]
    num_kv = _of_layers(model, "attention.head_count_kv", num_layers)
    sizes = _of_layers(model, "feed_forward_length", num_layers)
    num_shared = model.integer(f"{arch}.attention.shared_kv_layers") or 0
    stored = num_layers - num_shared
    is_wide = num_shared > 0 and sizes[-1] == 2 * sizes[0]
    if sizes[:stored] != sizes[:1] * stored or set(sizes[stored:]) - {sizes[0] * (1 + is_wide)}:
        raise model.bad(f"{arch}.feed_forward_length", "one number, or twice it at the end")
    layers = range(num_layers)
    own |= {
        "head_dim": widths["sliding_attention"],
        "num_key_value_heads": num_kv[0],
        "per_layer_config": {
            str(i): {"num_key_value_heads": num_kv[i], "head_dim": widths[kinds[i]]} for i in layers
        },
        "attention_k_eq_v": any(
            f"blk.{i}.attn_v.weight" not in model.tensors for i in layers[:stored]
        ),
        "num_kv_shared_layers": num_shared,
        "use_double_wide_mlp": is_wide,
        "intermediate_size": sizes[0],
        "enable_moe_block": "num_experts" in keys,
        "top_k_experts": keys.get("num_experts_per_tok"),
        "rope_parameters": _gemma4_rope(model, keys, widths["full_attention"]),
    }
    inputs = model.integer(f"{arch}.embedding_length_per_layer_input") or 0
    own["hidden_size_per_layer_input"] = inputs
    if inputs:
        own["vocab_size_per_layer_input"] = _rows(model, "per_layer_token_embd.weight")
    return own


def _gemma4_rope(model: GgufModel, keys: dict[str, Any], width: int) -> dict[str, Any]:
    """Read the rotation of both kinds of layers; a factor of 1e30 means no rotation."""
    factors = model.floats("rope_freqs.weight", width // 2) or [1.0]  # absent: all pairs turn
    turned = [factor for factor in factors if factor < 1e29]
    if any(factor != 1 for factor in turned) or factors[: len(turned)] != turned:
        raise model.bad("rope_freqs.weight", "factors of 1, then of 1e30, are served")
    share = len(turned) / len(factors)
    theta, local = keys["rope_theta"], keys.get("rope_local_base_freq", 10000.0)
    full = {"rope_type": "proportional", "partial_rotary_factor": share, "rope_theta": theta}
    return {
        "full_attention": full,
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
    }


def _of_layers(model: GgufModel, suffix: str, num_layers: int) -> list[int]:
    """Read a number of the metadata for each layer."""
    key = f"{arch_of(model)}.{suffix}"
    value = model.metadata.get(key)
    values: list[Any] = [value] * min(num_layers, _MAX_LAYERS)
    if isinstance(value, array):
        values = list(value)
    if len(values) != num_layers or any(type(each) is not int or each < 1 for each in values):
        raise model.bad(key, "a whole number above 0 is needed for each layer")
    return values


def _gated_delta(model: GgufModel, keys: dict[str, Any]) -> dict[str, Any]:
    """Read the shape of Gated DeltaNet layers; blocks of drafts, at the end, are left out."""
    arch, heads = arch_of(model), keys.get("linear_num_value_heads")
    inner = model.integer(f"{arch}.ssm.inner_size")
    if not inner or type(heads) is not int or inner % heads:
        needed = "a multiple of ssm.time_step_rank is needed"
        raise model.bad(f"{arch}.ssm.inner_size", needed)
    num_drafting = model.integer(f"{arch}.nextn_predict_layers") or 0
    num_layers = min(keys["num_hidden_layers"] - num_drafting, _MAX_LAYERS)
    num_kv = model.metadata.get(f"{arch}.attention.head_count_kv")
    own = {"num_key_value_heads": max(num_kv)} if isinstance(num_kv, array) and num_kv else {}
    is_delta = [f"blk.{layer}.ssm_a" in model.tensors for layer in range(num_layers)]
    return own | {
        "num_hidden_layers": num_layers,
        "linear_value_head_dim": inner // heads,
        "linear_output_tiled": row_of(model).has_tiled_heads,
        "linear_split_qkvz": not any(name.endswith(".ssm_in.weight") for name in model.tensors),
        "layer_types": ["linear_attention" if each else "full_attention" for each in is_delta],
    }


def _olmo(model: GgufModel, keys: dict[str, Any]) -> dict[str, Any]:
    """Olmo 3 is Olmo 2 with windows, whose layers rotate as the others do, but are not scaled."""
    if not keys.get("sliding_window"):
        return {}
    local = keys.get("rope_local_base_freq", keys.get("rope_theta"))
    own = {"model_type": "olmo3", "rope_local_base_freq": local}
    return _windows(model, keys, 4) | own


def _llama(_model: GgufModel, keys: dict[str, Any]) -> dict[str, Any]:
    """Mistral and Mixtral are written under the same name."""
    if keys.get("num_local_experts"):
        return {"model_type": "mixtral"}
    return {"model_type": "mistral" if keys.get("sliding_window") else "llama"}


def _mistral3(model: GgufModel, keys: dict[str, Any]) -> dict[str, Any]:
    """Name the family: only Ministral 3 multiplies the queries of far positions."""
    if "llama_4_scaling_beta" not in keys:
        return _llama(model, keys)
    if keys.get("num_local_experts"):
        raise model.bad(
            f"{arch_of(model)}.expert_count", "0: mixtures of Ministral 3 are not known"
        )
    return {}


_QWEN3_NEXT: dict[str, Any] = {
    "norm_shift": -1.0,
    "before_mlp": "post_attention_norm",
    "by_layer": ("num_key_value_heads",),
    "more": _gated_delta,
}
_QWEN35 = _QWEN3_NEXT | {"has_tiled_heads": True}

_ARCHITECTURES = {
    "llama": _Architecture("llama", is_interleaved=True, more=_llama),
    "qwen2": _Architecture("qwen2"),
    "qwen3": _Architecture("qwen3"),
    "qwen3moe": _Architecture("qwen3_moe", more=lambda _m, _k: {"norm_topk_prob": True}),
    "gemma": _Architecture("gemma", norm_shift=-1.0),
    "gemma2": _Architecture(
        "gemma2",
        norm_shift=-1.0,
        more=lambda model, keys: _gemma(2, 46)(model, {"sliding_window": 4096} | keys),
    ),
    "gemma3": _Architecture("gemma3_text", norm_shift=-1.0, more=_gemma(6, 62)),
    "gemma4": _Architecture(
        "gemma4_text", by_layer=("intermediate_size", "num_key_value_heads"), more=_gemma4
    ),
    "qwen3next": _Architecture("qwen3_next", **_QWEN3_NEXT),
    "qwen35": _Architecture("qwen3_5_text", **_QWEN35),
    "qwen35moe": _Architecture("qwen3_5_moe_text", **_QWEN35),
    "phi3": _Architecture("phi3"),
    "smollm3": _Architecture("smollm3", is_interleaved=True),
    "granite": _Architecture("granite", is_interleaved=True),
    "olmo2": _Architecture("olmo2", more=_olmo),
    "olmoe": _Architecture("olmoe"),
    "exaone4": _Architecture("exaone4", more=lambda model, keys: _windows(model, keys, 4)),
    "mistral3": _Architecture("ministral3", is_interleaved=True, more=_mistral3),
    "chatglm": _Architecture("glm", is_interleaved=True),
    "glm4": _Architecture("glm4", is_interleaved=True),
    "ernie4_5": _Architecture(
        "ernie4_5",
        is_interleaved=True,
        more=lambda model, _k: {"use_bias": "blk.0.attn_q.bias" in model.tensors},
    ),
    "seed_oss": _Architecture("seed_oss", before_mlp="post_attention_norm"),
    "gpt-oss": _Architecture(
        "gpt_oss",
        before_mlp="post_attention_norm",
        truncates_yarn=False,
        more=lambda model, keys: (
            _windows(model, keys, 2)
            | {"intermediate_size": keys.get("moe_intermediate_size", keys["intermediate_size"])}
        ),
    ),
}


def config_keys(model: GgufModel) -> dict[str, Any]:
    """Translate the metadata to config.json's keys.

    Raises:
        CheckpointError: its architecture is not served, or a number is missing.
    """
    arch = arch_of(model)
    if model.integer(f"{arch}.pooling_type"):
        what, hint = "it makes vectors or scores of texts", "serve it beside a chat model"
        raise CheckpointError(what, where=str(model.path), hint=f"{hint}: --embedding-model")
    row = row_of(model)
    keys: dict[str, Any] = {"model_type": row.model_type}
    for key, suffix in _KEYS.items():
        value = model.metadata.get(f"{arch}.{suffix}")
        if isinstance(value, array):
            if key in row.by_layer:
                continue
            if len(set(value)) != 1:
                raise model.bad(f"{arch}.{suffix}", "one number for all layers is needed")
            value = value[0]
        if isinstance(value, float):
            value = float(f"{value:.7g}")  # written as float32: what was meant is 1e-05
        if value:  # 0 means absent
            keys[key] = value
        if key in _REQUIRED and (type(value) is not int or value < 1):
            raise model.bad(f"{arch}.{suffix}", "a whole number above 0 is needed")
    if keys["num_hidden_layers"] > _MAX_LAYERS:  # before lists are that long
        raise model.bad(f"{arch}.block_count", f"at most {_MAX_LAYERS} layers are served")
    keys.setdefault("head_dim", keys["hidden_size"] // keys["num_attention_heads"])
    if model.metadata.get(f"{arch}.attention.value_length") not in (None, keys["head_dim"]):
        raise model.bad(f"{arch}.attention.value_length", "as key_length, or absent")
    keys.setdefault("num_key_value_heads", None)
    keys.setdefault("rope_theta", 10000.0)
    keys["vocab_size"] = _rows(model, "token_embd.weight")
    keys["tie_word_embeddings"] = "output.weight" not in model.tensors
    biases = ("blk.0.attn_q.bias", "blk.0.attn_qkv.bias")
    keys["attention_bias"] = any(name in model.tensors for name in biases)
    keys["attention_out_bias"] = "blk.0.attn_output.bias" in model.tensors
    keys["mlp_bias"] = "blk.0.ffn_up.bias" in model.tensors
    keys["eos_token_id"] = _end_ids(model)
    keys["bos_token_id"] = model.integer("tokenizer.ggml.bos_token_id")
    keys |= row.more(model, keys)
    return keys | _rope(model, arch, keys)


def sampling_keys(model: GgufModel) -> dict[str, Any]:
    """Translate the metadata to generation_config.json's sampling keys."""
    found = {key: model.metadata.get(f"general.sampling.{name}") for key, name in _SAMPLING.items()}
    return {
        key: float(f"{value:.7g}") if isinstance(value, float) else value
        for key, value in found.items()
        if value is not None
    }


def arch_of(model: GgufModel) -> str:
    """Return the name of the file's architecture."""
    return model.text("general.architecture") or ""


def row_of(model: GgufModel) -> _Architecture:
    """Return what is known of the file's architecture, or refuse it by name."""
    row = _ARCHITECTURES.get(arch_of(model))
    if row is None:
        if (why := reason(arch_of(model))) is not None:
            what = f"{arch_of(model)} is not served: {why}"
            raise CheckpointError(what, where=str(model.path), hint=WHAT_IS_SERVED)
        needed = f"one of {', '.join(_ARCHITECTURES)} is served"
        raise model.bad("general.architecture", needed)
    return row


def _rows(model: GgufModel, name: str) -> int:
    tensor = model.tensors.get(name)
    if tensor is None or len(tensor.shape) != 2:
        hint = "it holds no language model" if not model.tensors else ""
        raise CheckpointError(f"tensor {name} is missing", where=str(model.path), hint=hint)
    return tensor.shape[0]


def _end_ids(model: GgufModel) -> list[int]:
    """List the tokens that end a reply."""
    marks = (model.integer(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom"))
    ids = [token_id for token_id in marks if token_id is not None]
    tokens = model.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list):
        ends = end_marks(tokens)
        ids += [token_id for token_id, token in enumerate(tokens) if token in ends]
    return list(dict.fromkeys(ids))


def _rope(model: GgufModel, arch: str, keys: dict[str, Any]) -> dict[str, Any]:
    """Scaling, as config.json has it; factors of each pair of dimensions are tensors here."""

    def said(suffix: str) -> Any:
        return model.metadata.get(f"{arch}.rope.{suffix}")

    more: dict[str, Any] = {}
    if "rope_parameters" in keys:
        return more
    head_dim = keys["head_dim"]
    dim = model.integer(f"{arch}.rope.dimension_count") or head_dim
    if 0 < dim < head_dim:
        more["partial_rotary_factor"] = dim / head_dim
    pairs = dim // 2
    factors = model.floats("rope_freqs.weight", pairs)
    if factors is not None:
        rope = {"short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
        more["rope_scaling"] = rope | {"rope_type": "longrope"}
        return more
    long = model.floats("rope_factors_long.weight", pairs)
    short = model.floats("rope_factors_short.weight", pairs)
    if long is not None and short is not None:
        original = said("scaling.original_context_length")
        more["original_max_position_embeddings"] = original
        rope = {"short_factor": short, "long_factor": long, "rope_type": "longrope"}
        more["rope_scaling"] = rope | {
            "original_max_position_embeddings": original,
            "attention_factor": said("scaling.attn_factor"),
        }
        return more
    kind, factor = said("scaling.type"), said("scaling.factor")
    if kind in (None, "none"):
        return more
    if kind == "linear":
        more["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        more["rope_scaling"] = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": said("scaling.original_context_length"),
            "attention_factor": said("scaling.yarn_attn_factor"),
            "mscale": 1.0,
            "mscale_all_dim": said("scaling.yarn_log_multiplier"),
            "llama_4_scaling_beta": keys.get("llama_4_scaling_beta"),
            "beta_fast": said("scaling.yarn_beta_fast"),
            "beta_slow": said("scaling.yarn_beta_slow"),
            "truncate": row_of(model).truncates_yarn,
        }
    else:
        raise model.bad(f"{arch}.rope.scaling.type", "none, linear, yarn or factors are served")
    return more
