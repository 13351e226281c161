"""Cut a model into shards, of which each process of a group computes some.

A shard has some of each layer's heads, a part of its feed-forward or of every expert, some
rows of the output projection. What shards make of a token is added up, or lies side by side. How
many there are depends on the model alone, so that every sum has the same parts in every group.

Invariant: what is not cut belongs to all shards, but a bias behind a sum to the first alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, NamedTuple

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.delta_config import GatedDeltaConfig
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.packed_layouts import BLOCK_VALUES, FORMS, form_of
from engine.checkpoint.tensor_info import TensorInfo
from engine.checkpoint.weights_layout import is_embedding

_OF_DELTA = ".linear_attn."
MAX_SHARDS = 4
"""More would make the products of small models too narrow."""


class Cut(NamedTuple):
    """How a tensor is cut: within runs of its rows or columns, or not: the first has it."""

    by: Literal["rows", "columns", "none"]
    runs: tuple[int, ...] = ()
    """Rows or columns of each run; a shard has an equal part of each."""

    def spans(self, shard: int, num_shards: int) -> Iterator[tuple[int, int]]:
        """Yield the first, and the one behind the last, of a shard's part of each run."""
        start = 0
        for size in self.runs:
            yield start + size * shard // num_shards, start + size * (shard + 1) // num_shards
            start += size

    def has(self, shard: int) -> bool:
        """Say whether a shard has more than zeros of it."""
        return self.by != "none" or shard == 0


def num_shards(checkpoint: Checkpoint) -> int:
    """Count the shards: a power of two that divides key heads, feed-forwards, rows of codes."""
    config = checkpoint.config
    sizes = {each.num_kv_heads for each in config.heads}
    if config.delta is not None:
        sizes.add(config.delta.num_key_heads)
    layers = range(config.num_layers)
    if any(config.experts_of(layer) is None for layer in layers):
        sizes.add(config.intermediate_size)
    if config.experts is not None:
        sizes |= {config.experts.intermediate_size, config.experts.shared_size}
    sizes |= set(_pieces_of_rows(checkpoint))
    count = MAX_SHARDS
    while any(size % count for size in sizes):
        count //= 2
    return count


def _pieces_of_rows(checkpoint: Checkpoint) -> Iterator[int]:
    """Yield into how many pieces rows of codes can be cut, of each matrix that needs it."""
    for name, tensor in checkpoint.tensors.items():
        form = kept_form(name, tensor)
        cut = None if form is None else cut_of(checkpoint.config, name, tensor.shape)
        if form is not None and cut is not None and cut.by == "columns":
            size = BLOCK_VALUES if FORMS[form].head_bytes else FORMS[form].group
            for columns in cut.runs:
                yield 1 if columns % size else columns // size


def kept_form(name: str, tensor: TensorInfo) -> str | None:
    """Return the form in which a shard keeps a matrix of codes; None: it keeps values.

    Args:
        name: the name of its use; a tied output projection has its own.
    """
    return None if is_embedding(name) else form_of(tensor)


def why_no_shards(checkpoint: Checkpoint) -> str | None:
    """Return why a model cannot be cut; None: nothing prevents it."""
    config = checkpoint.config
    experts = config.experts
    forms = [form for form in map(form_of, checkpoint.tensors.values()) if form is not None]
    reasons = {
        "its layers have inputs of their own": config.layer_inputs is not None,
        "its layers' heads differ": len(set(config.heads)) > 1,
        "it norms all heads together": config.family.qk_norm == "projection",
        "its experts stand beside a dense feed-forward": (
            experts is not None and experts.names.beside_dense is not None
        ),
        "inputs of its products are rounded with one scale": any(
            FORMS[form].rounds_inputs for form in forms
        ),
    }
    found = next((reason for reason, holds in reasons.items() if holds), None)
    if found is None and num_shards(checkpoint) == 1:
        codes = ", or its rows of codes," if forms else ","
        found = f"its {config.num_kv_heads} key heads, or its feed-forward{codes} have no half"
    return found


def shard_config(config: ModelConfig, count: int) -> ModelConfig:
    """Return the shape of one of `count` shards."""
    experts = config.experts
    if experts is not None:
        experts = replace(
            experts,
            intermediate_size=experts.intermediate_size // count,
            shared_size=experts.shared_size // count,
        )
    delta = config.delta
    if delta is not None:
        delta = replace(
            delta,
            num_key_heads=delta.num_key_heads // count,
            num_value_heads=delta.num_value_heads // count,
        )
    return replace(
        config,
        num_heads=config.num_heads // count,
        num_kv_heads=config.num_kv_heads // count,
        heads=tuple(
            each._replace(num_kv_heads=each.num_kv_heads // count) for each in config.heads
        ),
        intermediate_size=config.intermediate_size // count,
        experts=experts,
        delta=delta,
    )


def cut_of(config: ModelConfig, name: str, shape: tuple[int, ...]) -> Cut | None:
    """Return how a tensor is cut; None: each shard has it whole."""
    if name.endswith((".self_attn.sinks", "lm_head.weight")):
        return Cut("rows", shape[:1])
    if config.delta is not None and _OF_DELTA in name:
        return _cut_of_delta(config.delta, name.rpartition(_OF_DELTA)[2], shape)
    *_, module, kind = name.split(".")
    ins, outs = _cut_modules(config, is_attention=".self_attn." in name, in_expert=_in_expert(name))
    if module in outs:
        return Cut("columns", shape[1:]) if kind == "weight" else Cut("none")
    return Cut("rows", _runs(config, module, shape[0])) if module in ins else None


def _cut_of_delta(delta: GatedDeltaConfig, part: str, shape: tuple[int, ...]) -> Cut | None:
    """Return how a recurrent layer's tensor is cut: by key heads, with the value heads of each."""
    if part == "norm.weight":
        return None
    if part == "out_proj.weight":
        turns = delta.num_value_heads // delta.num_key_heads if delta.is_output_tiled else 1
        return Cut("columns", (delta.all_values // turns,) * turns)
    if part in ("in_proj_qkv.weight", "conv1d.weight"):
        return Cut("rows", (delta.all_keys, delta.all_keys, delta.all_values))
    return Cut("rows", shape[:1])


def _in_expert(name: str) -> bool:
    return ".experts." in name


def _cut_modules(
    config: ModelConfig, *, is_attention: bool, in_expert: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Name the projections that are cut by rows, then the ones that are added up."""
    family = config.family
    if is_attention:
        return (*family.qkv, "gate_proj"), ("o_proj",)
    if in_expert and family.experts is not None:
        return (family.experts.gate, family.experts.up), (family.experts.down,)
    return (*family.gate_up, "gate_proj", "up_proj"), ("down_proj",)


def _runs(config: ModelConfig, module: str, num_rows: int) -> tuple[int, ...]:
    """Return the rows of each projection that a tensor has side by side."""
    family, heads = config.family, config.heads[0]
    if (module,) == family.qkv:
        return config.num_heads * heads.head_dim, heads.width, heads.width
    if (module,) == family.gate_up:
        return num_rows // 2, num_rows // 2
    return (num_rows,)
