"""Divide weights into units that a step reads in turn, and choose which stay on disk.

A unit is a decoder layer; the last one is the output projection.
Invariant: chosen units lie evenly between the others, so that the disk reads while those compute.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.model_config import DTYPE_BYTES, ModelConfig
from engine.checkpoint.packed_layouts import panels_shape
from engine.checkpoint.weights_layout import PanelsLayout, WeightsLayout

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_EXPERT = ".experts."


def weight_bytes(
    checkpoint: Checkpoint, dtype: str, layout: WeightsLayout | PanelsLayout | None
) -> dict[str, int]:
    """Return the bytes that each weight has in memory.

    Args:
        layout: of the arena; None: matrices are mapped as their files have them.
    """
    if layout is None:
        stored = checkpoint.tensors.items()
        return {name: tensor.num_bytes for name, tensor in stored if len(tensor.shape) > 1}
    plain = layout.rest if isinstance(layout, PanelsLayout) else layout
    item = DTYPE_BYTES[dtype]
    found = {name: math.prod(shape) * item for name, shape in plain.shape_by_name.items()}
    if isinstance(layout, PanelsLayout):
        for name, panels in layout.panels.items():
            num_rows, depth = checkpoint.tensors[panels.source].shape
            found[name] = math.prod(panels_shape(panels.form, num_rows, depth))
    return found


def names_by_unit(names: Collection[str], config: ModelConfig) -> list[list[str]]:
    """Divide the names of weights; what no unit has is read in no order."""
    units: list[list[str]] = [[] for _ in range(config.num_layers + 1)]
    for name in names:
        found = _LAYER.search(name)
        if found is not None and int(found[1]) < config.num_layers:
            units[int(found[1])].append(name)
    prefix = config.family.prefix
    heads = (f"{prefix}lm_head.weight", f"{prefix}model.embed_tokens.weight")
    units[-1] += [name for name in heads if name in names][:1]
    return units


def is_expert(name: str) -> bool:
    """Say whether a step reads a weight only where a token is sent to its expert."""
    return _EXPERT in name


def units_on_disk(unit_bytes: Sequence[int], num_bytes: int) -> list[int]:
    """Choose units of `num_bytes` or little more, spread evenly; all units at most."""
    total, owed, chosen = sum(unit_bytes), 0, []
    for unit, size in enumerate(unit_bytes):
        owed += size * num_bytes
        if owed > 0 and size:
            chosen.append(unit)
            owed -= size * total
    return chosen
