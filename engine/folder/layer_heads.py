"""How many key heads each layer has, and how large they are, where layers differ in it.

The KV pool has one shape: the widest layer's. A narrower one's keys and values lie at the
beginning of its place, so that the pool of all layers is still one run of bytes a block, and a view
of it with more, narrower layers is a pool in which every narrow layer is where the pool has it.
Owns: the reading of those keys, and the check that such a view exists.
Invariant: each layer's width divides the widest.
Never: makes a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.errors import CheckpointError
from engine.folder.json_keys import JsonKeys


class LayerHeads(NamedTuple):
    """Of one layer's keys, and likewise of its values."""

    num_kv_heads: int
    head_dim: int

    @property
    def width(self) -> int:
        """Values of one token."""
        return self.num_kv_heads * self.head_dim


def layer_heads(
    keys: JsonKeys, usual: LayerHeads, num_heads: int, windows: Sequence[int | None]
) -> tuple[LayerHeads, ...]:
    """Per layer: those without a window may have others (Gemma 4).

    Args:
        keys: of the family.
        usual: what `num_key_value_heads` and `head_dim` say.
        num_heads: of queries, in every layer.
        windows: per layer.

    Raises:
        CheckpointError: queries cannot share the heads, or no one pool holds all layers.
    """
    if "global_head_dim" not in keys.values:
        return (usual,) * len(windows)
    stated = keys.section("per_layer_config")
    own = [_global(keys, usual) if window is None else usual for window in windows]
    if stated.values:
        sections = [stated.section(str(layer)) for layer in range(len(windows))]
        own = [
            LayerHeads(
                section.integer("num_key_value_heads", usual.num_kv_heads),
                section.integer("head_dim", usual.head_dim),
            )
            for section in sections
        ]
    widest = max(heads.width for heads in own)
    for heads in own:
        if num_heads % heads.num_kv_heads or heads.head_dim % 2 or widest % heads.width:
            what = f"layers of {heads.num_kv_heads} key heads of {heads.head_dim}"
            what += f" beside {num_heads} query heads and others {widest} wide: not served"
            raise CheckpointError(what, where=str(keys.path))
    return tuple(own)


def _global(keys: JsonKeys, usual: LayerHeads) -> LayerHeads:
    num_kv_heads = usual.num_kv_heads
    if keys.flag("attention_k_eq_v") and keys.get("num_global_key_value_heads", None) is not None:
        num_kv_heads = keys.integer("num_global_key_value_heads")
    return LayerHeads(num_kv_heads, keys.integer("global_head_dim"))
