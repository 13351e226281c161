"""Compute each layer's key heads, and the KV layer that it reads.

Invariant: each layer's width divides the widest.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from engine.checkpoint.json_keys import JsonKeys
from engine.errors import WHAT_IS_SERVED, CheckpointError


class LayerHeads(NamedTuple):
    """How many key-value heads one layer has, and how wide they are."""

    num_kv_heads: int
    head_dim: int

    @property
    def width(self) -> int:
        """Values that one token has in this layer's keys."""
        return self.num_kv_heads * self.head_dim


def layer_heads(
    keys: JsonKeys, usual: LayerHeads, num_heads: int, windows: Sequence[int | None]
) -> tuple[LayerHeads, ...]:
    """Per layer: those without a window may have others (Gemma 4).

    Raises:
        CheckpointError: queries cannot share the heads, or no one pool holds all layers.
    """
    if "global_head_dim" not in keys.values:
        return (usual,) * len(windows)
    stated = keys.section("per_layer_config")
    own = [_global(keys, usual) if window is None else usual for window in windows]
    if keys.get("per_layer_config", None) is not None:  # empty: all layers are alike
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
            raise CheckpointError(what, where=str(keys.path), hint=WHAT_IS_SERVED)
    return tuple(own)


def _global(keys: JsonKeys, usual: LayerHeads) -> LayerHeads:
    num_kv_heads = usual.num_kv_heads
    if keys.flag("attention_k_eq_v") and keys.get("num_global_key_value_heads", None) is not None:
        num_kv_heads = keys.integer("num_global_key_value_heads")
    return LayerHeads(num_kv_heads, keys.integer("global_head_dim"))


def kv_layers(
    keys: JsonKeys,
    windows: Sequence[int | None],
    heads: Sequence[LayerHeads],
    recurrent: Collection[int] = (),
) -> tuple[int | None, ...]:
    """Find, for each layer, the layer of the KV pool that it reads; None for recurrent ones.

    Each of the last `num_kv_shared_layers` reads the last layer before them that is like itself:
    with the same window, or also with none.
    """
    if recurrent:  # those have none; the others' follow one another
        places = iter(range(len(windows)))
        return tuple(None if i in recurrent else next(places) for i in range(len(windows)))
    key, num_layers = "num_kv_shared_layers", len(windows)
    num_shared = keys.get(key, 0)
    if type(num_shared) is not int or not 0 <= num_shared < num_layers:
        raise keys.bad(key, f"an integer from 0 to {num_layers - 1}")
    stored = range(num_layers - num_shared)
    found = list(stored)
    for layer in range(len(stored), num_layers):
        kind = (windows[layer], heads[layer])
        alike = [each for each in stored if (windows[each], heads[each]) == kind]
        if not alike:
            raise keys.bad(key, f"possible: no earlier layer is like layer {layer}")
        found.append(alike[-1])
    return tuple(found)
