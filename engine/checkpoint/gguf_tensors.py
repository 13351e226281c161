"""Find the tensors of a GGUF file by the names that the model's family has for them.

Invariant: a tensor that is found lies wholly inside its file.
"""

from __future__ import annotations

import re
from array import array
from dataclasses import replace

from engine.checkpoint.family import Family
from engine.checkpoint.gguf import GgufModel
from engine.checkpoint.gguf_models import HEAD_COUNTS, arch_of, row_of
from engine.checkpoint.tensor_info import TensorInfo

_PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
}
_JOINED = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
"""Queries, keys and values, which some files have as the rows of one tensor."""
_NORMS = {
    "before_attention": "attn_norm",
    "after_attention": "post_attention_norm",
    "after_mlp": "post_ffw_norm",
}
_WHOLE_NAMES = {
    "self_attn.sinks": "attn_sinks.weight",
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
}
"""A layer's tensors without the ending `weight` or `bias`, or of one row."""
_DELTA = {
    "in_proj_qkv.weight": "attn_qkv.weight",
    "in_proj_z.weight": "attn_gate.weight",
    "in_proj_b.weight": "ssm_beta.weight",
    "in_proj_a.weight": "ssm_alpha.weight",
    "in_proj_qkvz.weight": "ssm_in.weight",
    "in_proj_ba.weight": "ssm_ba.weight",
    "conv1d.weight": "ssm_conv1d.weight",
    "dt_bias": "ssm_dt.bias",
    "A_log": "ssm_a",
    "norm.weight": "ssm_norm.weight",
    "out_proj.weight": "ssm_out.weight",
}
"""A Gated DeltaNet layer's tensors."""
_OUTER = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")
_EXPERT = re.compile(r"experts\.(\d+)\.(\w+)")


def named(model: GgufModel, family: Family, name: str) -> TensorInfo | None:
    """Find a tensor by the family's name for it; None: it is absent.

    One expert's is a part of the tensor of all experts.
    """
    row = row_of(model)
    layer = _LAYER.fullmatch(name)
    if layer is None:
        stem, _, kind = name.rpartition(".")
        found = model.tensors.get(f"{_OUTER.get(stem, stem)}.{kind}")
        shift = row.norm_shift if stem.endswith("norm") else 0.0
        return None if found is None else replace(found, name=name, shift=shift)
    number, own_name = layer.groups()
    if own_name.startswith("linear_attn."):
        return _of_delta(model, name, number, own_name.removeprefix("linear_attn."))
    if own_name in _WHOLE_NAMES:
        return _of_whole_name(model, name, number, own_name)
    stem, _, kind = own_name.rpartition(".")
    for place, gguf_norm in (*_NORMS.items(), ("before_mlp", row.before_mlp)):
        if stem == getattr(family.norms, place):
            found = model.tensors.get(f"blk.{number}.{gguf_norm}.{kind}")
            return None if found is None else replace(found, name=name, shift=row.norm_shift)
    if family.experts is not None and stem.startswith(family.experts.block):
        inner = stem.removeprefix(family.experts.block)
        if inner == family.experts.router:
            found = model.tensors.get(f"blk.{number}.ffn_gate_inp.{kind}")
            return None if found is None else replace(found, name=name)
        if (expert := _EXPERT.fullmatch(inner)) is not None:
            return _of_expert(model, family, name, number, int(expert[1]), expert[2], kind)
    found = model.tensors.get(f"blk.{number}.{_PARTS.get(stem, stem)}.{kind}")
    if found is None:
        joined = model.tensors.get(f"blk.{number}.attn_qkv.{kind}")
        found = None if joined is None else _of_joined(model, joined, stem)
    if found is None:
        return None
    shift = row.norm_shift if stem.endswith("norm") else 0.0
    head_rows = turned_rows = 0
    if row.is_interleaved and stem in _JOINED[:2]:
        head_rows = found.shape[0] // _num_heads(model, stem)
        turned_rows = model.integer(f"{arch_of(model)}.rope.dimension_count") or 0
        turned_rows = turned_rows if turned_rows < head_rows else 0
    return replace(found, name=name, shift=shift, head_rows=head_rows, turned_rows=turned_rows)


def _of_whole_name(model: GgufModel, name: str, number: str, own_name: str) -> TensorInfo | None:
    found = model.tensors.get(f"blk.{number}.{_WHOLE_NAMES[own_name]}")
    if found is not None and own_name.endswith(".weight"):
        found = replace(found, shape=(1, found.shape[-1]))
    return None if found is None else replace(found, name=name)


def _of_delta(model: GgufModel, name: str, number: str, own_name: str) -> TensorInfo | None:
    """Find a tensor of a Gated DeltaNet layer, with the rows of its value heads in our order.

    Files of Qwen 3.5 have the first value head of each key head, then the second of each. The
    columns of the output projection stay so: blocks of codes may reach over several heads.
    """
    found = model.tensors.get(f"blk.{number}.{_DELTA.get(own_name, own_name)}")
    if found is None:
        return None
    found = replace(found, name=name, is_negative_exp=own_name == "A_log")
    if own_name == "conv1d.weight" and len(found.shape) == 2:
        found = replace(found, shape=(found.shape[0], 1, found.shape[1]))
    if not row_of(model).has_tiled_heads:
        return found
    names = ("ssm.group_count", "ssm.time_step_rank", "ssm.inner_size", "ssm.state_size")
    sizes = [model.integer(f"{arch_of(model)}.{each}") or 0 for each in names]
    num_keys, num_values, inner, key_dim = sizes
    if own_name in ("norm.weight", "out_proj.weight") or not num_keys or num_values <= num_keys:
        return found
    has_keys = own_name in ("in_proj_qkv.weight", "conv1d.weight")
    first = 2 * num_keys * key_dim if has_keys else 0
    is_wide = has_keys or own_name == "in_proj_z.weight"
    size = inner // num_values if is_wide else 1
    rows = found.shape[0]
    if rows != first + num_values * size or rows > found.num_bytes:
        return found  # its shape, or its type, is refused; no list is as long as metadata says
    heads = (
        key + num_keys * place for key in range(num_keys) for place in range(num_values // num_keys)
    )
    runs = [(first + head * size, size) for head in heads]
    return replace(found, row_runs=(*([(0, first)] if first else []), *runs))


def _num_heads(model: GgufModel, stem: str) -> int:
    """Heads of a projection's output."""
    counts = [model.metadata.get(f"{arch_of(model)}.attention.{side}") for side in HEAD_COUNTS]
    heads = counts[0] if stem.endswith("q_proj") else counts[1] or counts[0]
    return int(heads[0] if isinstance(heads, array) else heads or 1)


def _of_joined(model: GgufModel, joined: TensorInfo, stem: str) -> TensorInfo | None:
    """Cut the rows of queries, keys or values out of the tensor that has all three."""
    if stem not in _JOINED:
        return None
    counts = [_num_heads(model, each) for each in _JOINED]
    place, rows = _JOINED.index(stem), joined.shape[0]
    if rows % sum(counts):
        return None
    row_bytes, head_dim = joined.num_bytes // rows, rows // sum(counts)
    first, own = (num * head_dim for num in (sum(counts[:place]), counts[place]))
    start = joined.start + first * row_bytes
    return replace(joined, shape=(own, *joined.shape[1:]), start=start, num_bytes=own * row_bytes)


def _of_expert(
    model: GgufModel, family: Family, name: str, number: str, expert: int, part: str, kind: str
) -> TensorInfo | None:
    names = family.experts
    assert names is not None
    parts = {names.gate: "gate", names.up: "up", names.down: "down"}
    found = model.tensors.get(f"blk.{number}.ffn_{parts.get(part, part)}_exps.{kind}")
    share, num_shares = 0, 1
    if found is None and part != names.down:  # gate's rows before up's in one tensor
        found = model.tensors.get(f"blk.{number}.ffn_gate_up_exps.{kind}")
        share, num_shares = int(part == names.up), 2
    if found is None or len(found.shape) < 2 or expert >= found.shape[0]:
        return None
    if found.shape[1] % num_shares:
        return None
    num_bytes = found.num_bytes // found.shape[0] // num_shares
    return replace(
        found,
        name=name,
        shape=(found.shape[1] // num_shares, *found.shape[2:]),
        start=found.start + (expert * num_shares + share) * num_bytes,
        num_bytes=num_bytes,
    )
