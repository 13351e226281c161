"""A GGUF file's metadata as the keys of config.json, and its tensors under the family's names.

The format has one vocabulary for all architectures, and leaves out what its own reader knows of
each (which layers have windows, how attention is scaled). Here both become what config.json says,
so that the rest of the engine knows one way to describe a model.
Owns: the table of architectures, and the names of tensors.
Invariant: an architecture that is not in the table is refused by name.
Never: reads a file.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from engine.errors import CheckpointError
from engine.folder.families import Family, reason
from engine.folder.gguf_header import GgufModel
from engine.folder.tensor_info import TensorInfo

_END_MARKS = frozenset(
    {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>"}
    | {"<end_of_turn>", "<|end_of_turn|>", "[|endofturn|]", "<seed:eos>", "</s>", "<EOT>", "<eos>"}
)
"""Control tokens that end a reply, whatever the file calls its end-of-text token."""
_CONTROL = 3
_MAX_LAYERS = 4096

_More = Callable[[GgufModel, dict[str, Any]], dict[str, Any]]

_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "rope_local_base_freq": "rope.freq_base_swa",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
    "num_local_experts": "expert_count",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
"""Of config.json, and what GGUF says after the architecture's name."""
_SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
_REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")

_PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.sinks": "attn_sinks",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_NORMS = {
    "before_attention": "attn_norm",
    "after_attention": "post_attention_norm",
    "after_mlp": "post_ffw_norm",
}
_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)\.(weight|bias|sinks)")
_EXPERT = re.compile(r"experts\.(\d+)\.(\w+)")


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
    truncates_yarn: bool = True
    """The borders of YaRN's ramp are whole dimensions."""
    more: _More = lambda _model, _keys: {}
    """Keys that follow from others, or that the format takes as known."""


def _windows(model: GgufModel, keys: dict[str, Any], period: int) -> dict[str, Any]:
    """Each layer of that number sees all, where the file does not list them."""
    layers = keys["num_hidden_layers"]
    if not keys.get("sliding_window") or type(layers) is not int or layers > _MAX_LAYERS:
        return {"sliding_window": None}
    pattern = model.metadata.get(f"{_arch(model)}.attention.sliding_window_pattern", period)
    if isinstance(pattern, array) and len(pattern) == layers:
        has_window = [bool(each) for each in pattern]
    else:
        every = pattern if type(pattern) is int and pattern > 0 else period
        has_window = [(layer + 1) % every != 0 for layer in range(layers)]
    kinds = ["sliding_attention" if each else "full_attention" for each in has_window]
    return {"sliding_window": keys["sliding_window"], "layer_types": kinds}


def _gemma(period: int, large: int) -> _More:
    """Windows; scores are scaled by the head size, but in the largest by hidden size / heads."""

    def more(model: GgufModel, keys: dict[str, Any]) -> dict[str, Any]:
        hidden, heads = keys["hidden_size"], keys["num_attention_heads"]
        own = {"query_pre_attn_scalar": keys.get("head_dim", hidden // heads)}
        if keys["num_hidden_layers"] == large:
            own = {"query_pre_attn_scalar": hidden // heads}
        return _windows(model, keys, period) | own

    return more


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
    return {"model_type": "mistral"} if keys.get("sliding_window") else {}


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
    "phi3": _Architecture("phi3"),
    "smollm3": _Architecture("smollm3", is_interleaved=True),
    "granite": _Architecture("granite", is_interleaved=True),
    "olmo2": _Architecture("olmo2", more=_olmo),
    "olmoe": _Architecture("olmoe"),
    "exaone4": _Architecture("exaone4", more=lambda model, keys: _windows(model, keys, 4)),
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
    """What config.json would say of the model.

    Raises:
        CheckpointError: its architecture is not served, or a number is missing.
    """
    arch = _arch(model)
    row = _row(model)
    keys: dict[str, Any] = {"model_type": row.model_type}
    for key, suffix in _KEYS.items():
        value = model.metadata.get(f"{arch}.{suffix}")
        if isinstance(value, array):
            if len(set(value)) != 1:
                raise model.bad(f"{arch}.{suffix}", "one number for all layers is needed")
            value = value[0]
        if isinstance(value, float):
            value = float(f"{value:.7g}")  # written as float32: what was meant is 1e-05
        if value:  # 0 is none
            keys[key] = value
        if key in _REQUIRED and (type(value) is not int or value < 1):
            raise model.bad(f"{arch}.{suffix}", "a whole number above 0 is needed")
    value_length = model.metadata.get(f"{arch}.attention.value_length")
    if value_length not in (None, keys.get("head_dim", value_length)):
        raise model.bad(f"{arch}.attention.value_length", "as key_length, or absent")
    keys.setdefault("num_key_value_heads", None)
    keys.setdefault("rope_theta", 10000.0)
    keys["vocab_size"] = _rows(model, "token_embd.weight")
    keys["tie_word_embeddings"] = "output.weight" not in model.tensors
    keys["attention_bias"] = "blk.0.attn_q.bias" in model.tensors
    keys["attention_out_bias"] = "blk.0.attn_output.bias" in model.tensors
    keys["mlp_bias"] = "blk.0.ffn_up.bias" in model.tensors
    keys["eos_token_id"] = _end_ids(model)
    keys["bos_token_id"] = model.integer("tokenizer.ggml.bos_token_id")
    keys |= row.more(model, keys)
    return keys | _rope(model, arch, keys)


def sampling_keys(model: GgufModel) -> dict[str, Any]:
    """What generation_config.json would say of how to sample."""
    found = {key: model.metadata.get(f"general.sampling.{name}") for key, name in _SAMPLING.items()}
    return {
        key: float(f"{value:.7g}") if isinstance(value, float) else value
        for key, value in found.items()
        if value is not None
    }


def named(model: GgufModel, family: Family, name: str) -> TensorInfo | None:
    """A tensor by the family's name for it; None where the file has none.

    One expert's is a part of the tensor of all experts.
    """
    row = _row(model)
    layer = _LAYER.fullmatch(name)
    if layer is None:
        stem, _, kind = name.rpartition(".")
        found = model.tensors.get(f"{_OUTER.get(stem, stem)}.{kind}")
        shift = row.norm_shift if stem.endswith("norm") else 0.0
        return None if found is None else replace(found, name=name, shift=shift)
    number, stem, kind = layer.groups()
    if kind == "sinks":
        stem, kind = f"{stem}.sinks", "weight"
    for place, gguf_norm in (*_NORMS.items(), ("before_mlp", row.before_mlp)):
        if stem == getattr(family.norms, place):
            found = model.tensors.get(f"blk.{number}.{gguf_norm}.{kind}")
            return None if found is None else replace(found, name=name, shift=row.norm_shift)
    if family.experts is not None and stem.startswith(f"{family.experts.block}."):
        inner = stem.removeprefix(f"{family.experts.block}.")
        if inner == family.experts.router:
            found = model.tensors.get(f"blk.{number}.ffn_gate_inp.{kind}")
            return None if found is None else replace(found, name=name)
        if (expert := _EXPERT.fullmatch(inner)) is not None:
            return _of_expert(model, family, name, number, int(expert[1]), expert[2], kind)
    found = model.tensors.get(f"blk.{number}.{_PARTS.get(stem, stem)}.{kind}")
    if found is None:
        return None
    shift = row.norm_shift if stem.endswith("norm") else 0.0
    head_rows = 0
    if row.is_interleaved and stem in ("self_attn.q_proj", "self_attn.k_proj"):
        side = "head_count" if stem.endswith("q_proj") else "head_count_kv"
        heads = model.metadata.get(f"{_arch(model)}.attention.{side}")
        heads = heads or model.metadata[f"{_arch(model)}.attention.head_count"]
        heads = heads[0] if isinstance(heads, array) else heads
        head_rows = found.shape[0] // heads
    return replace(found, name=name, shift=shift, head_rows=head_rows)


def _of_expert(
    model: GgufModel, family: Family, name: str, number: str, expert: int, part: str, kind: str
) -> TensorInfo | None:
    names = family.experts
    assert names is not None
    parts = {names.gate: "gate", names.up: "up", names.down: "down"}
    found = model.tensors.get(f"blk.{number}.ffn_{parts.get(part, part)}_exps.{kind}")
    if found is None or len(found.shape) < 2 or expert >= found.shape[0]:
        return None
    num_bytes = found.num_bytes // found.shape[0]
    return replace(
        found,
        name=name,
        shape=found.shape[1:],
        start=found.start + expert * num_bytes,
        num_bytes=num_bytes,
    )


def _arch(model: GgufModel) -> str:
    return model.text("general.architecture") or ""


def _row(model: GgufModel) -> _Architecture:
    row = _ARCHITECTURES.get(_arch(model))
    if row is None:
        if (why := reason(_arch(model))) is not None:
            raise CheckpointError(f"{_arch(model)} is not served: {why}", where=str(model.path))
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
    """Of the tokens that end a reply."""
    marks = (model.integer(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom"))
    ids = [token_id for token_id in marks if token_id is not None]
    tokens = model.metadata.get("tokenizer.ggml.tokens")
    kinds = model.metadata.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and isinstance(kinds, array):
        ids += [
            token_id
            for token_id, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
            if kind == _CONTROL and token in _END_MARKS
        ]
    return list(dict.fromkeys(ids))


def _rope(model: GgufModel, arch: str, keys: dict[str, Any]) -> dict[str, Any]:
    """Scaling, as config.json has it; factors of each pair of dimensions are tensors here."""

    def said(suffix: str) -> Any:
        return model.metadata.get(f"{arch}.rope.{suffix}")

    more: dict[str, Any] = {}
    head_dim = keys.get("head_dim", keys["hidden_size"] // keys["num_attention_heads"])
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
            "beta_fast": said("scaling.yarn_beta_fast"),
            "beta_slow": said("scaling.yarn_beta_slow"),
            "truncate": _row(model).truncates_yarn,
        }
    else:
        raise model.bad(f"{arch}.rope.scaling.type", "none, linear, yarn or factors are served")
    return more
