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
from engine.checkpoint.model_config import ModelConfig

MAX_SHARDS = 4
"""More would make the products of small models too narrow."""


class Cut(NamedTuple):
    """How a tensor is cut: within each run of its rows, by columns, or not: the first has it."""

    by: Literal["rows", "columns", "none"]
    runs: tuple[int, ...] = ()
    """Rows of each run; a shard has an equal part of each."""

    def rows(self, shard: int, num_shards: int) -> Iterator[tuple[int, int]]:
        """Yield the first row, and the one behind the last, of a shard's part of each run."""
        start = 0
        for size in self.runs:
            yield start + size * shard // num_shards, start + size * (shard + 1) // num_shards
            start += size


def num_shards(config: ModelConfig) -> int:
    """Count the shards: a power of two that divides key heads and feed-forwards."""
    sizes = {each.num_kv_heads for each in config.heads}
    layers = range(config.num_layers)
    if any(config.experts_of(layer) is None for layer in layers):
        sizes.add(config.intermediate_size)
    if config.experts is not None:
        sizes |= {config.experts.intermediate_size, config.experts.shared_size}
    count = MAX_SHARDS
    while any(size % count for size in sizes):
        count //= 2
    return count


def why_no_shards(checkpoint: Checkpoint) -> str | None:
    """Return why a model cannot be cut; None: nothing prevents it."""
    config = checkpoint.config
    experts = config.experts
    quantised = sorted({t.dtype for t in checkpoint.tensors.values() if t.is_quantised})
    reasons = {
        "its layers are partly recurrent": config.delta is not None,
        "its layers have inputs of their own": config.layer_inputs is not None,
        "its layers' heads differ": len(set(config.heads)) > 1,
        "it norms all heads together": config.family.qk_norm == "projection",
        "its experts stand beside a dense feed-forward": (
            experts is not None and experts.names.beside_dense is not None
        ),
        f"its weights are quantised as {', '.join(quantised)}": bool(quantised),
        f"its {config.num_kv_heads} key heads, or its feed-forward, have no half": (
            num_shards(config) == 1
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def shard_config(config: ModelConfig, count: int) -> ModelConfig:
    """Return the shape of one of `count` shards."""
    experts = config.experts
    if experts is not None:
        experts = replace(
            experts,
            intermediate_size=experts.intermediate_size // count,
            shared_size=experts.shared_size // count,
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
    )


def cut_of(config: ModelConfig, name: str, shape: tuple[int, ...]) -> Cut | None:
    """Return how a tensor is cut; None: each shard has it whole."""
    if name.endswith((".self_attn.sinks", "lm_head.weight")):
        return Cut("rows", shape[:1])
    *_, module, kind = name.split(".")
    ins, outs = _cut_modules(config, is_attention=".self_attn." in name, in_expert=_in_expert(name))
    if module in outs:
        return Cut("columns") if kind == "weight" else Cut("none")
    return Cut("rows", _runs(config, module, shape[0])) if module in ins else None


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
